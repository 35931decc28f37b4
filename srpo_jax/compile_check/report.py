"""What a compiled program will do, read before it runs: collectives, memory, floating-point work.

Sizes are bytes on one device.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table

from models.config import ModelConfig

GIB = 2**30
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# ---- collectives ---------------------------------------------------------------------------------

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+|f8\w+|c64|c128)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_CALLED = re.compile(r"\b(?:calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# The pieces of one collective that XLA spreads over several fusions carry both of these.
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')


class Collective(NamedTuple):
    """How often a kind of collective runs, and its bytes over all of these times."""

    count: int
    bytes: int


class Collectives(NamedTuple):
    """Collectives by kind, and the number of loops whose length is not in the program.

    The bytes of a collective are the larger of what a device puts in and what it gets.
    """

    by_kind: dict[str, Collective]
    open_loops: int


@dataclass(frozen=True)
class _Instruction:
    name: str
    is_root: bool
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str


def read_collectives(hlo: str, open_trips: Sequence[int] = ()) -> Collectives:
    """Counts the collectives of a compiled module's text (``compiled.as_text()``).

    Bodies of loops count as often as they run. Loops whose length is an argument run as
    ``open_trips`` says, by how many such loops are around them, and once beyond its end. Every
    branch of a conditional counts.
    """
    computations, entry = _parse(hlo)
    found = {kind: Collective(0, 0) for kind in KINDS}
    chains: set[tuple[str, str]] = set()
    open_loops = 0

    def walk(name: str, times: int, depth: int) -> None:
        nonlocal open_loops
        body = computations.get(name, {})
        for op in body.values():
            kind = op.opcode.removesuffix("-start")
            chain = _CHAIN.search(op.text)
            if kind in found and not (chain and chain.groups() in chains):
                if chain:
                    chains.add(chain.groups())
                seen = found[kind]
                size = _payload(op, body)
                found[kind] = Collective(seen.count + times, seen.bytes + size * times)
            if op.opcode == "while":
                trips, inside = _trip_count(op, computations), depth
                if trips is None:
                    trips = open_trips[depth] if depth < len(open_trips) else 1
                    open_loops += 1
                    inside += 1
                walk(_attribute(op, "body"), times * trips, inside)
            else:
                for called in _called(op):
                    walk(called, times, depth)

    walk(entry, 1, 0)
    return Collectives({kind: c for kind, c in found.items() if c.count}, open_loops)


def _parse(hlo: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """The instructions of every computation by name, and the entry's name."""
    computations: dict[str, dict[str, _Instruction]] = {}
    current: dict[str, _Instruction] = {}
    entry = ""
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header.group(2), {})
            if header.group(1):
                entry = header.group(2)
        elif match := _INSTRUCTION.match(line):
            root, name, text = match.groups()
            if opcode := _OPCODE.search(" " + text):
                shape, rest = text[: max(opcode.start() - 1, 0)], (" " + text)[opcode.end() :]
                inside = rest.partition(")")[0]
                operands = tuple(re.findall(r"%([\w.\-]+)", inside))
                current[name] = _Instruction(
                    name, root is not None, shape, opcode.group(1), operands, text
                )
    return computations, entry


def _payload(op: _Instruction, body: Mapping[str, _Instruction]) -> int:
    sent = sum(_size(body[name].shape) for name in op.operands if name in body)
    got = _size(op.shape)
    if op.opcode.endswith("-start") and op.opcode != "all-reduce-start":
        got = _size(op.shape, scalars=False) - sent  # (operands, results, context)
    return max(sent, got)


def _size(shape: str, *, scalars: bool = True) -> int:
    total = 0
    for dtype, dims in _SHAPE.findall(shape):
        if dims or scalars:
            bits = _BITS.get(dtype) or int(re.search(r"\d+", dtype).group())
            total += -(-bits * int(np.prod([int(d) for d in dims.split(",") if d])) // 8)
    return total


def _trip_count(loop: _Instruction, computations: Mapping[str, Any]) -> int | None:
    """How often a loop runs: said by XLA, or the constant that its counter from 0 is below."""
    if said := _TRIP_COUNT.search(loop.text):
        return int(said.group(1))
    condition = computations.get(_attribute(loop, "condition"), {})
    root = next((op for op in condition.values() if op.is_root), None)
    if root is None or root.opcode != "compare" or "direction=LT" not in root.text:
        return None
    bound = condition.get(root.operands[-1])
    match = re.search(r"constant\((\d+)\)", bound.text) if bound else None
    return int(match.group(1)) if match else None


def _attribute(op: _Instruction, name: str) -> str:
    return re.search(rf"\b{name}=%?([\w.\-]+)", op.text).group(1)


def _called(op: _Instruction) -> Iterator[str]:
    yield from _CALLED.findall(op.text)
    for branches in _BRANCHES.findall(op.text):
        yield from re.findall(r"[\w.\-]+", branches)


# ---- memory --------------------------------------------------------------------------------------


# HBM that XLA leaves to a program's arrays, GiB per device, as libtpu 0.0.42 says when a program
# does not fit: a v5e chip has 16 GiB, a v6e 32, a v5p 96; a v4 has 32 for two devices.
USABLE_GIB = {"v4": 15.25, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}


@dataclass(frozen=True)
class ProgramReport:
    """One compiled program, on one device. ``peak`` counts arguments, outputs and temporaries that
    live together; ``flops`` is XLA's own count, which takes the body of a loop once and knows
    nothing of kernels."""

    name: str
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    flops: float
    collectives: Collectives
    seconds: float

    @classmethod
    def of(
        cls,
        name: str,
        compiled: jax.stages.Compiled,
        seconds: float,
        open_trips: Sequence[int] = (),
    ) -> ProgramReport:
        """``open_trips``: see ``read_collectives``."""
        memory = compiled.memory_analysis()
        return cls(
            name, memory.argument_size_in_bytes, memory.output_size_in_bytes,
            memory.alias_size_in_bytes, memory.temp_size_in_bytes, memory.peak_memory_in_bytes,
            float(compiled.cost_analysis().get("flops", 0.0)),
            read_collectives(compiled.as_text(), open_trips), seconds,
        )  # fmt: skip

    @property
    def scratch(self) -> int:
        """What the program needs at its peak beside its arguments and outputs."""
        return max(self.peak - self.arguments - (self.outputs - self.aliased), 0)


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of arrays or ShapeDtypeStructs, by their shardings."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


class OutOfMemory(Exception):
    """XLA refuses a program that alone needs more memory than a device has."""


def compiled_report(
    name: str, lowered: jax.stages.Lowered, open_trips: Sequence[int] = ()
) -> ProgramReport:
    """Compiles a program. Raises OutOfMemory."""
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).partition(": ")[2].splitlines()[0]
        raise OutOfMemory(f"{name}: {reason}") from None
    return ProgramReport.of(name, compiled, time.perf_counter() - started, open_trips)


@dataclass(frozen=True)
class Phase:
    """What is on a device together in one phase of a step: bytes by part."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


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
        for kind, (count, size) in report.collectives.by_kind.items():
            table.add_row(report.name, kind, str(count), _gib(size))
    return table


def work_table(forward: ModelFlops, reports: Mapping[str, ProgramReport], devices: int) -> Table:
    """Model work of a micro-batch beside XLA's own count, TFLOP a device."""
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
    """
    attention_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * attention_width + 2 * kv_width + 3 * config.intermediate_size)
    weights = config.num_layers * layer + config.hidden_size * config.vocab_size
    pairs = config.num_layers * attention_width * float(length) ** 2
    return ModelFlops(2.0 * weights * sequences * length, 2.0 * pairs * sequences)
