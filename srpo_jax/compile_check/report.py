"""What a compiled program will do, read before it runs: collectives, memory, floating-point work.

Sizes are bytes on one device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from rich.table import Table

from models.config import ModelConfig
from srpo_jax.compile_check.hlo import CollectiveCounts, read_collectives
from srpo_jax.run.memory_plan import GIB, Phase

# ---- memory --------------------------------------------------------------------------------------


# HBM that XLA leaves to a program's arrays, GiB per device, as libtpu 0.0.42 says when a program
# does not fit: a v5e chip has 16 GiB, a v6e 32, a v5p 96; a v4 has 32 for two devices.
USABLE_GIB = {"v4": 15.25, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}


@dataclass(frozen=True)
class ProgramReport:
    """One compiled program, in bytes on one device.

    Attributes:
        name: Of the program.
        arguments: Of its arguments.
        outputs: Of its outputs.
        aliased: Outputs that reuse donated arguments.
        temporaries: Of its temporaries.
        peak: Arguments, outputs and temporaries that live together.
        flops: XLA's own count, which takes the body of a loop once and knows nothing of kernels.
        collectives: By kind.
        seconds: Compile time.
    """

    name: str
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    flops: float
    collectives: CollectiveCounts
    seconds: float

    @classmethod
    def of(
        cls,
        name: str,
        compiled: jax.stages.Compiled,
        seconds: float,
        open_trips: Sequence[int] = (),
    ) -> ProgramReport:
        """Reads a compiled program.

        Args:
            name: Of the program.
            compiled: The program.
            seconds: Compile time.
            open_trips: See ``read_collectives``.
        """
        memory: Any = compiled.memory_analysis()
        costs: Any = compiled.cost_analysis()
        hlo: Any = compiled.as_text()  # JAX has a None for other compilers in all three
        return cls(
            name, memory.argument_size_in_bytes, memory.output_size_in_bytes,
            memory.alias_size_in_bytes, memory.temp_size_in_bytes, memory.peak_memory_in_bytes,
            float(costs.get("flops", 0.0)), read_collectives(hlo, open_trips), seconds,
        )  # fmt: skip

    @property
    def scratch(self) -> int:
        """The workspace at its peak: what it needs beside its arguments and outputs."""
        return max(self.peak - self.arguments - (self.outputs - self.aliased), 0)


class OutOfMemory(Exception):
    """XLA refuses a program that alone needs more memory than a device has."""


def compiled_report(
    name: str, lowered: jax.stages.Lowered, open_trips: Sequence[int] = ()
) -> ProgramReport:
    """Compiles a program.

    Args:
        name: What errors call it.
        lowered: The program.
        open_trips: See ``read_collectives``.

    Raises:
        OutOfMemory: XLA refuses it.
    """
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).partition(": ")[2].splitlines()[0]
        raise OutOfMemory(f"{name}: {reason}") from None
    return ProgramReport.of(name, compiled, time.perf_counter() - started, open_trips)


TEMPORARIES = "temporaries"


def with_scratch(phase: Phase, scratch: int | None) -> Phase:
    """A planned phase with the largest workspace of its programs (None: they were not compiled, or
    it has none)."""
    if scratch is None:
        return phase
    return Phase(phase.name, {**phase.parts, TEMPORARIES: scratch})


def phase_table(phases: Sequence[Phase], usable_gib: float) -> Table:
    """One row a phase: GiB of each part, their sum, and whether that fits."""
    names = list(dict.fromkeys(name for phase in phases for name in phase.parts))
    table = Table(title="resident together in each phase of a step, GiB per device")
    table.add_column("phase")
    for name in (*names, "total", f"fits {usable_gib:g}"):
        table.add_column(name, justify="right")
    for phase in phases:
        cells = [_gib(phase.parts[n]) if n in phase.parts else "-" for n in names]
        fits = phase.total <= usable_gib * GIB
        table.add_row(phase.name, *cells, _gib(phase.total), "yes" if fits else "NO")
    return table


def memory_table(reports: Iterable[ProgramReport]) -> Table:
    """XLA's memory_analysis of each program."""
    table = Table(title="XLA's memory analysis, GiB per device")
    table.add_column("program")
    for name in ("argument", "output", "alias", "temp", "peak", "compiled in"):
        table.add_column(name, justify="right")
    for r in reports:
        sizes = (r.arguments, r.outputs, r.aliased, r.temporaries, r.peak)
        table.add_row(r.name, *map(_gib, sizes), f"{r.seconds:.1f} s")
    return table


def collective_table(reports: Iterable[ProgramReport]) -> Table:
    """Collectives of each program by kind: how many, and their GiB a device."""
    table = Table(
        title="collectives of one micro-batch, GiB per device",
        caption="with loss at every token; fewer such tokens, fewer for the vocabulary",
    )
    for name in ("program", "kind"):
        table.add_column(name)
    for name in ("count", "GiB"):
        table.add_column(name, justify="right")
    for report in reports:
        for kind, of_kind in report.collectives.by_kind.items():
            table.add_row(report.name, kind, str(of_kind.count), _gib(of_kind.bytes))
    return table


def work_table(forward: ModelFlops, reports: Mapping[str, ProgramReport], devices: int) -> Table:
    """Model work of a micro-batch beside XLA's own count, TFLOP a device.

    Args:
        forward: Work of one forward pass.
        reports: Of the programs score and accumulate.
        devices: Of the mesh.
    """
    table = Table(title="work of one micro-batch, TFLOP per device")
    table.add_column("program")
    for name in ("matrices", "attention", "model", "XLA, loop bodies once"):
        table.add_column(name, justify="right")
    for name, passes in (("score", 1), ("accumulate", 3)):  # a backward pass is two forward ones
        parts = (forward.matrices, forward.attention, forward.total)
        cells = [f"{passes * part / devices / 1e12:.1f}" for part in parts]
        table.add_row(name, *cells, f"{reports[name].flops / 1e12:.1f}")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


# ---- floating-point work -------------------------------------------------------------------------


class ModelFlops(NamedTuple):
    """Floating-point operations of a forward pass; forward and backward take three times as many
    (6 N tokens and attention), recomputation not counted."""

    matrices: float
    attention: float

    @property
    def total(self) -> float:
        return self.matrices + self.attention


def model_flops(config: ModelConfig, sequences: int, length: int) -> ModelFlops:
    """Work of ``sequences`` full sequences of ``length`` tokens, the head at every position.

    2 operations for each weight of a matrix and token; for attention the causal half of scores and
    weighted sum, 2 x 2 x length^2 / 2 operations for each layer, head and head dimension.

    Args:
        config: The architecture.
        sequences: S, all of them full.
        length: Tokens of a sequence, T.
    """
    attention_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * attention_width + 2 * kv_width + 3 * config.intermediate_size)
    weights = config.num_layers * layer + config.hidden_size * config.vocab_size
    pairs = config.num_layers * attention_width * float(length) ** 2
    return ModelFlops(2.0 * weights * sequences * length, 2.0 * pairs * sequences)
