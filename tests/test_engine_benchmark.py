"""The engine benchmark's work, limit, table and last line; no peer is installed or run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import engine, engine_work, harness, sampling
from benchmarks.harness import OURS
from benchmarks.ours_engine import KV_BYTES, limit
from benchmarks.peer_environments import PeerError

RATES = {"peak_gflops": 400.0, "decode_gflops": 200.0, "read_gbs": 40.0}


def ours(**changes: float) -> dict[str, float]:
    rest = {"uniform_limit": 1200.0, "workload_limit": 1600.0, "slots": 32.0, "compiles": 0.0}
    return {"uniform": 900.0, "workload": 800.0} | RATES | rest | changes


def test_the_work_is_as_stated():
    prompts, lengths = engine_work.ragged_requests()
    assert (len(prompts), len(lengths), sum(lengths)) == (192, 192, 15_497)
    assert min(lengths) >= 8 and max(lengths) <= 256 and {len(p) for p in prompts} == {192}
    assert len({tuple(p) for p in prompts}) == 16
    assert all(prompts[i] == prompts[i - i % 12] for i in range(192))
    first, second = engine_work.uniform_prompts(1), engine_work.uniform_prompts(2)
    assert {len(p) for p in first} == {128} and len(first) == 32 and first != second


def test_the_limit_by_hand():
    """Two requests with one prompt of 10 tokens, 3 and 5 new ones; 1000 parameters, 600 below the
    head."""
    products = 2 * 1000 * 8 / 200e9 + 2 * 600 * 10 / 400e9
    reads = KV_BYTES * ((1 + 2 + 3) + (1 + 2 + 3 + 4 + 5) + 10 * 5) / 40e9
    assert limit(RATES, 1000, 600, [3, 5], 10, 2) == pytest.approx(8 / (products + reads))
    assert KV_BYTES == 24_576  # a token: 12 layers of 4 heads of 64, keys and values


def test_the_last_line(monkeypatch, capsys):
    speeds = {OURS: ours(), "tunix": {"uniform": 450.0, "workload": 100.0}}
    monkeypatch.setattr(harness, "run_peer", lambda name, *options, read: read(speeds[name]))
    monkeypatch.setattr(harness, "peer_python", lambda name, say: Path(name))
    assert engine.main(["--skip", "transformers"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == {
        "uniform_ratio_tunix": 2.0, "uniform_ratio_transformers": None,
        "workload_ratio_tunix": 8.0, "workload_limit_factor": 2.0,
    }  # fmt: skip
    assert "compiles after warm-up: 0" in printed and "50%" in printed


@pytest.mark.parametrize("body, said", [("exit 3", "ended with code 3"), ("echo x", "last line")])
def test_a_program_that_fails(tmp_path, body, said):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    with pytest.raises(PeerError, match=said):
        harness.run_peer("tunix", program, "a.module", {"repeats": 1}, read=engine.engine_figures)


def test_the_figures_of_a_decode_step(capsys):
    shape = ["--model", "assets/tiny_team", "--rows", "2", "--steps", "2", "--pairs", "1"]
    assert sampling.main(shape) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ratio"] == pytest.approx(found["top_p_ms"] / found["plain_ms"], rel=0.05)
