"""What an HLO text says of a program's collectives: kinds, bytes on one device, trips of loops."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

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


@dataclass(frozen=True)
class Collective:
    """How often a kind of collective runs, and its bytes over all of these times."""

    count: int
    bytes: int


class CollectiveCounts(NamedTuple):
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


def read_collectives(hlo: str, open_trips: Sequence[int] = ()) -> CollectiveCounts:
    """Counts the collectives of a compiled module's text (``compiled.as_text()``).

    Bodies of loops count as often as they run, and every branch of a conditional counts.

    Args:
        hlo: The text.
        open_trips: Trip counts of loops whose length is an argument, by nesting depth among such
            loops; 1 beyond its end.
    """
    computations, entry = _parse(hlo)
    found = {kind: Collective(0, 0) for kind in KINDS}
    chains: set[tuple[str | Any, ...]] = set()
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
    return CollectiveCounts({kind: c for kind, c in found.items() if c.count}, open_loops)


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
            bits = _BITS.get(dtype) or int(re.findall(r"\d+", dtype)[0])
            total += -(-bits * math.prod(int(d) for d in dims.split(",") if d) // 8)
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
    return re.findall(rf"\b{name}=%?([\w.\-]+)", op.text)[0]


def _called(op: _Instruction) -> Iterator[str]:
    yield from _CALLED.findall(op.text)
    for branches in _BRANCHES.findall(op.text):
        yield from re.findall(r"[\w.\-]+", branches)
