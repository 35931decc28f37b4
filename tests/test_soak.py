"""A long run uses no more of the machine at its end than at its start."""

from __future__ import annotations

import collections
import os
import threading

import pytest
from rich.console import Console

from srpo_jax import trainer
from srpo_jax.run.logs import read_metrics
from tests.process_cases import resident_mib
from tests.run_cases import noisy_reward, tiny_recipe

STEPS = int(os.environ.get("SRPO_TEST_STEPS", "60"))
SAVES = 60


@pytest.mark.slow
def test_sixty_saves_in_a_run_leave_memory_descriptors_and_threads_flat(
    tmp_path, monkeypatch, single_device
):
    every = max(STEPS // SAVES, 1)
    recipe = tiny_recipe(
        tmp_path, f"trainer.steps={STEPS}", f"trainer.checkpoint_every={every}",
        f"evaluation.every={5 * every}",
    )  # fmt: skip
    used, log = [], trainer.MetricLogger.log

    def logged(self, step, metrics):
        log(self, step, metrics)
        use = resident_mib(), len(os.listdir("/proc/self/fd")), threading.active_count()
        used.append((metrics.get("compiles"), use))

    monkeypatch.setattr(trainer.MetricLogger, "log", logged)
    assert trainer.run(recipe, reward=noisy_reward, console=Console(quiet=True)) == trainer.DONE
    assert len(read_metrics(tmp_path / "run")) == STEPS + 1
    # A new shape compiles new programs, which take memory for good, so steps with one count of them
    # are compared. A save on its way has threads and files of its own: the least of several steps.
    ((programs, _),) = collections.Counter(compiles for compiles, _ in used).most_common(1)
    steady = [use for compiles, use in used if compiles == programs]
    part = len(steady) // 4
    early, late = (
        [min(column) for column in zip(*rows, strict=True)]
        for rows in (steady[part : 2 * part], steady[-part:])
    )
    print(f"{len(steady)} steps with {programs} programs: MiB, descriptors, threads {early} {late}")
    assert all(b <= a + room for a, b, room in zip(early, late, (40, 3, 3), strict=True))
