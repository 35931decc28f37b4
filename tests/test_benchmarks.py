"""The benchmarks' rows, timing, parsing, tables and environments; no peer is installed or run."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import harness, learner, objective, peer_environments, timing
from benchmarks.harness import OURS
from benchmarks.learner_work import make_rows, measure_updates
from benchmarks.ours_learner import event_batch, event_sizes
from benchmarks.peer_environments import PeerError, peer_python
from launch.cli import entry


def figures(tokens_per_second: float, **changes: float) -> dict[str, float]:
    rest = {"seconds": 2.0, "peak_gflops": 400.0, "matmul_share": 0.5, "peak_gib": 3.0}
    return rest | {"tokens_per_second": tokens_per_second} | changes


def script(path: Path, body: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---- the work ------------------------------------------------------------------------------------


def test_the_rows_hold_the_stated_tokens():
    rows = make_rows(16)
    assert (len(rows), rows.real_tokens) == (16, 4941)
    assert all(64 <= len(p) <= 256 and p.min() >= 10 and p.max() < 32_000 for p in rows.prompts)
    assert all(16 <= len(r) <= 256 and r.min() >= 10 for r in rows.responses)
    assert np.all(rows.advantages != 0)


@pytest.mark.parametrize("count, sizes", [(16, [3, 1, 2, 3, 1, 2, 3, 1]), (5, [3, 1, 1]), (1, [1])])
def test_events_hold_every_row(count, sizes):
    assert list(event_sizes(count)) == sizes


def test_our_batch_is_the_same_rows_packed():
    rows = make_rows(16)
    batch = event_batch(rows)
    assert batch.tokens.shape[1:] == (3, 640)
    assert np.count_nonzero(batch.segment_ids) == 4941
    assert batch.num_tokens == sum(map(len, rows.responses))
    assert batch.event_size.tolist() == [3, 1, 2, 3, 1, 2, 3, 1]
    first_rows = [0, 3, 4, 6, 9, 10, 12, 15]
    np.testing.assert_allclose(batch.event_advantage, rows.advantages[first_rows], rtol=1e-6)
    for r in (0, 7, 15):
        there = batch.tokens[batch.token_row == r]
        np.testing.assert_array_equal(there, np.append(rows.prompts[r], rows.responses[r]))


def test_steps_are_timed_with_the_peak_between_them(monkeypatch):
    clock, order = [0.0], []

    def worker(name, durations):
        def run():
            order.append(name)
            clock[0] += next(durations)

        return run

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    step = worker("step", iter([100.0, 4.0, 2.0, 9.0]))  # the first compiles
    product = worker("matmul", iter([50.0] + [0.1] * 5 + [0.3] * 5 + [0.2] * 5))
    found = measure_updates(step, product, parameters=1000, tokens=60, steps=3)
    assert order == ["step", "matmul"] + (["matmul"] * 5 + ["step"]) * 3
    assert found["seconds"] == pytest.approx(4)
    assert found["tokens_per_second"] == pytest.approx(15)
    peak = 2 * 2048**3 / 0.2
    assert found["peak_gflops"] == pytest.approx(peak / 1e9)
    assert found["matmul_share"] == pytest.approx(6 * 1000 * 15 / peak)
    assert 0.01 < found["peak_gib"] < 64


# ---- what the driver makes of it -----------------------------------------------------------------


def test_figures_are_on_the_last_line(tmp_path):
    printed = json.dumps(figures(7) | {"tokens": 3})
    python = script(tmp_path / "python", f"echo a warning; echo '{{}}'; echo '{printed}'")
    assert harness.run_peer("tunix", python, "m", read=learner.learner_figures) == figures(7)


@pytest.mark.parametrize("printed", ["", "done", "3", '{"seconds": 1}', "[1]"])
def test_a_program_without_figures_is_an_error(printed, tmp_path):
    python = script(tmp_path / "python", f"echo '{printed}'")
    with pytest.raises(PeerError, match=r"^torch: the last line") as error:
        harness.run_peer("torch", python, "m", read=learner.learner_figures)
    assert error.value.output == printed


def test_a_program_gets_its_options_and_no_accelerator(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    seen = '{\\"said\\": \\"$* $JAX_PLATFORMS [$CUDA_VISIBLE_DEVICES] [$PYTHONPATH] $(cat)\\"}'
    python = script(tmp_path / "python", f'echo "{seen}"')
    found = harness.run_peer(
        "x", python, "m", {"rows": 3, "steps": 1}, read=lambda value: value["said"], stdin="work"
    )
    assert found == "-m m --rows 3 --steps 1 cpu [] [] work"


def test_work_is_timed_after_its_warm_up(monkeypatch):
    clock, order, programs = [0.0], [], [0]

    def work(number):
        order.append(number)
        clock[0] += {0: 100.0, 1: 1.0, 2: 9.0, 3: 4.0}[number]
        programs[0] += {0: 5, 1: 0, 2: 2, 3: 0}[number]

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.time_work(work, 3, lambda: programs[0]) == (4.0, 2)
    assert order == [0, 1, 2, 3]


def test_a_measured_program_prints_its_figures_last(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["program", "--steps", "2", "--rows", "16"])
    timing.run_program(lambda rows, steps: {"rows": rows, "steps": steps})
    assert capsys.readouterr().out == '{"rows": 16, "steps": 2}\n'


def test_medians_are_taken_of_each_figure():
    runs = [figures(1, seconds=9), figures(5, seconds=1), figures(4, seconds=2)]
    assert harness.medians(runs) == figures(4, seconds=2)


def test_the_table_compares_with_ours():
    found = {OURS: figures(600, peak_gib=2.25), "tunix": figures(200, seconds=24.7)}
    console = Console(file=io.StringIO(), width=120)
    console.print(learner.learner_table(found))
    lines = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if "│" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        [OURS, "600", "0.50", "2.2", "2.00", ""],
        ["tunix", "200", "0.50", "3.0", "24.70", "3.00"],
    ]


@pytest.mark.parametrize(
    "larger, said", [(2.19, "+9.5%, below the limit"), (2.3, "+15.0%, NOT below")]
)
def test_growth_of_memory_is_judged(larger, said):
    line = learner.memory_line(figures(1, peak_gib=2.0), figures(1, peak_gib=larger), 4)
    assert said in line and "on 4 times the rows" in line


def test_learners_take_turns_and_the_last_line_is_json(monkeypatch, capsys):
    order = []

    def run(name, python, module, options, read):
        rows, steps = options["rows"], options["steps"]
        order.append((name, rows, steps))
        speed = {OURS: 600 + 100 * len(order), "torch": 200}[name]  # ours: 700, 900, 1100
        return figures(speed, peak_gib=4.0 if rows == 16 else 4.1)

    monkeypatch.setattr(harness, "run_peer", run)
    monkeypatch.setattr(harness, "peer_python", lambda name, say: Path(name))
    options = ["--skip", "tunix", "--rounds", "3", "--steps", "2", "--batch-factor", "4"]
    assert learner.main(options) == 0
    assert order == [(OURS, 16, 2), ("torch", 16, 2)] * 3 + [(OURS, 64, 1)]
    printed = capsys.readouterr().out
    assert "+2.5%, below" in printed
    assert json.loads(printed.splitlines()[-1]) == {
        "ratio_tunix": None, "ratio_torch": 4.5, "matmul_share": 0.5, "peak_gib": 4.0,
    }  # fmt: skip


def test_a_peer_that_fails_is_one_line_after_its_output(monkeypatch, capsys, tmp_path):
    lines = "; ".join(f"echo line {i} >&2" for i in range(40))
    broken = script(tmp_path / "python", f"{lines}; exit 3")
    monkeypatch.setattr(harness, "peer_python", lambda name, say: broken)
    monkeypatch.setattr(harness.sys, "executable", str(broken))
    with pytest.raises(SystemExit) as exit_:
        entry(lambda: learner.main([]))
    assert exit_.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"error: {OURS}: its program ended with code 3"
    assert said[-2] == "line 39" and "line 20" not in said


@pytest.mark.parametrize("wrong", [["--rows", "0"], ["--steps", "x"], ["--skip", OURS]])
def test_wrong_arguments(wrong, capsys):
    with pytest.raises(SystemExit) as exit_:
        learner.main(wrong)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: argument {wrong[0]}")


# ---- environments --------------------------------------------------------------------------------


def fake_base(folder: Path, pip: str) -> str:
    """An interpreter whose ``-m venv HOME`` makes one whose ``-m pip`` runs ``pip``."""
    body = (
        'home=$3; mkdir -p "$home/bin"; '
        f'printf \'#!/bin/sh\\necho "$@" >> {folder}/pip.log\\n{pip}\\n\' > "$home/bin/python"; '
        'chmod +x "$home/bin/python"'
    )
    return str(script(folder / "base", body))


def test_an_environment_is_made_once_for_its_pins(tmp_path, monkeypatch):
    said = []

    def make():
        return peer_python(
            "torch", folder=tmp_path / "envs", say=said.append, base=fake_base(tmp_path, "exit 0")
        )

    assert make() == make() == tmp_path / "envs/torch/bin/python"
    assert len(said) == 1
    (tmp_path / "envs/torch/left_over").touch()
    monkeypatch.setitem(peer_environments.REQUIREMENTS, "torch", ("torch==9",))
    make()
    assert len(said) == 2 and said[1].endswith("torch==9 (several minutes)")
    assert not (tmp_path / "envs/torch/left_over").exists()
    assert [line.split()[-1] for line in (tmp_path / "pip.log").read_text().splitlines()] == [
        "transformers==5.24.0",
        "torch==9",
    ]


def test_a_failed_installation_shows_its_end_and_is_tried_again(tmp_path):
    settings = {"folder": tmp_path / "envs", "say": lambda text: None}
    with pytest.raises(PeerError, match=r"^tunix: .*pip install ended with code 1") as e:
        peer_python("tunix", base=fake_base(tmp_path, "echo no such package; exit 1"), **settings)
    assert e.value.output == "no such package"
    peer_python("tunix", base=fake_base(tmp_path, "exit 0"), **settings)


# ---- the objective -------------------------------------------------------------------------------


def test_the_objectives_batch_against_a_loop():
    batch = objective.make_batch(4, 8)
    assert batch["event_size"].tolist() == [1, 3, 5, 7]
    assert batch["current_logp"].shape == (16, 8)
    gap = (batch["current_logp"] - batch["old_logp"]).astype(np.float64) * batch["loss_mask"]
    loss, weights, start = 0.0, np.zeros((16, 8)), 0
    for size, advantage in zip(batch["event_size"], batch["event_advantage"], strict=True):
        members = slice(start, start + size)
        ratio = np.exp(gap[members].sum() / np.sqrt(size))
        clipped = np.clip(ratio, 0.8, 1.2) * advantage
        loss -= min(ratio * advantage, clipped) / 4
        slope = ratio * advantage / np.sqrt(size) if ratio * advantage <= clipped else 0.0
        weights[members] = -slope / 4 * batch["loss_mask"][members]
        start += size
    (found, _), gradient = objective.loss_and_weights(batch)
    assert float(found) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(gradient, weights, rtol=1e-4, atol=1e-7)
