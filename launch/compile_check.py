"""Compiles a recipe's update and engine for a TPU topology, without one: memory, collectives, work.

Needs libtpu (pip install libtpu); the model's architecture is that of a local folder or of a known
hub name, and no weights are read. Exit code 1: it does not fit.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from launch.cli import Parser, add_recipe_arguments, entry, output
from srpo_jax.recipe.errors import RecipeError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax
    from jax.sharding import Mesh

    from models.known_configs import Architecture
    from srpo_jax.recipe.recipe import Recipe

_TOPOLOGY = re.compile(r"([a-z0-9]+):(\d+(?:x\d+){1,2})")

# libtpu looks for a TPU of this machine, and complains of what it cannot find out about it. What
# is compiled for absent devices can be written to the compilation cache, but not read back.
LIBTPU_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.compile_check",
        __doc__,
        "python -m launch.compile_check configs/math_qwen3_8b.yaml --topology v5e:4x4",
    )
    add_recipe_arguments(parser)
    parser.add_argument(
        "--topology", required=True, metavar="TPU:AxB", help="v5e:4x4, v6e:4x4, v5p:2x2x2, ..."
    )
    parser.add_argument("--slices", type=int, default=1, help="of this topology (default 1)")
    parser.add_argument(
        "--chips-per-host", metavar="AxB",
        help="the grid of a host's chips where it is not libtpu's own, such as 2x4 of a v6e-8",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.slices < 1:
        raise RecipeError(f"--slices must be at least 1, got {args.slices}")
    chips = host_grid(args.chips_per_host)
    _silence_libtpu()
    from srpo_jax.recipe.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    from models.known_configs import find_architecture

    generation = tpu_generation(args.topology)
    architecture = find_architecture(recipe.checkpoint)
    mesh = tpu_mesh(recipe, args.topology, args.slices, chips)
    return check(recipe, architecture, mesh, host_devices(mesh, args.topology), generation)


def host_grid(text: str | None) -> list[int] | None:
    """The grid of a host's chips in three dimensions (``2x4`` is [2, 4, 1]).

    Raises:
        RecipeError: it is no grid.
    """
    if text is None:
        return None
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text) is None:
        raise RecipeError(f"--chips-per-host must be a grid such as 2x4, got {text}")
    return [*map(int, text.split("x")), 1][:3]


def tpu_generation(topology: str) -> str:
    """The generation that a topology names (``v5e`` of ``v5e:4x4``).

    Raises:
        RecipeError: it is no topology, or that of a TPU that is not known.
    """
    from srpo_jax.compile_check.report import USABLE_GIB

    match = _TOPOLOGY.fullmatch(topology)
    if match is None:
        raise RecipeError(f"--topology must be a TPU and its grid, such as v5e:4x4, got {topology}")
    if match.group(1) not in USABLE_GIB:
        raise RecipeError(
            f"--topology {topology}: unknown TPU, {nearest(match.group(1), USABLE_GIB)}"
        )
    return match.group(1)


def tpu_mesh(
    recipe: Recipe, topology: str, slices: int = 1, chips: Sequence[int] | None = None
) -> Mesh:
    """The recipe's learner mesh over a topology's devices.

    Args:
        recipe: says the mesh.
        topology: of one slice.
        slices: how many.
        chips: of a host, in three dimensions (None: libtpu's own).

    Raises:
        RecipeError: there is no libtpu, the TPU does not come in this grid, or the mesh has another
            size.
    """
    from srpo_jax.learner.sharding import make_mesh

    try:
        devices = topology_devices(topology, slices, chips)
    except RuntimeError as error:
        if "not installed" in str(error):
            raise RecipeError("libtpu is not installed: pip install libtpu") from None
        reason = str(error).removeprefix("INVALID_ARGUMENT: ")
        raise RecipeError(f"--topology {topology}: {reason}") from None
    return make_mesh(**recipe.learner.mesh.model_dump(), devices=devices)


def topology_devices(
    topology: str, slices: int = 1, chips: Sequence[int] | None = None
) -> list[jax.Device]:
    """The devices of a topology, slice by slice; arguments as of ``tpu_mesh``."""
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if chips is not None:
        options["chips_per_host_bounds"] = list(chips)
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    return list(found.devices)


def host_devices(mesh: Mesh, topology: str) -> list[jax.Device]:
    """A host of the topology as one of its own: libtpu compiles for no part of a larger one."""
    devices = list(mesh.devices.flat)
    first = [d for d in devices if d.process_index == devices[0].process_index]
    if len(first) == len(devices):
        return devices
    tpu, grid = topology.split(":")
    corners = list(zip(*(d.coords for d in first), strict=True))
    sizes = [max(axis) - min(axis) + 1 for axis in corners]
    host = "x".join(map(str, sizes[: grid.count("x") + 1]))
    return topology_devices(f"{tpu}:{host}", chips=sizes)


def check(
    recipe: Recipe,
    architecture: Architecture,
    mesh: Mesh,
    host: Sequence[jax.Device],
    generation: str,
) -> int:
    """Compiles the update and the engine, and prints what they need.

    Args:
        recipe: says batch, lengths and meshes.
        architecture: the model's shapes.
        mesh: the learner's devices.
        host: the devices of one host, the engine's.
        generation: the TPU's, which says the usable memory of a chip.

    Returns:
        The exit code: 0 if every phase of a step fits, else 1.
    """
    from srpo_jax.compile_check import report
    from srpo_jax.compile_check.engine import compile_engine
    from srpo_jax.compile_check.start import init_report, sync_reports
    from srpo_jax.compile_check.update import MICRO_BATCHES, abstract_update, sequence_length
    from srpo_jax.run.memory_plan import plan_memory

    console, config = output(), architecture.config
    usable = report.USABLE_GIB[generation]
    rows, length = recipe.learner.micro_batch_rows, sequence_length(recipe)
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    plan = plan_memory(recipe, config, mesh, host, int(usable * report.GIB))
    update = abstract_update(recipe, architecture, mesh)
    console.print(
        f"{recipe.model.path}: {update.num_params / 1e9:.2f}e9 parameters in "
        f"{recipe.model.param_dtype}, computed in {recipe.model.dtype}\n"
        f"{mesh.size} {generation} devices: {axes}; {MICRO_BATCHES} micro-batches of {rows} x "
        f"{length} tokens"
    )
    programs: dict[str, report.ProgramReport] = {}
    refused = None
    phases_of_programs = {
        "init": lambda: {"init": init_report(recipe, update)},
        "sync": lambda: sync_reports(architecture, update, plan.engine, list(mesh.devices.flat)),
        "rollout": lambda: compile_engine(architecture, plan, host),
        "update": update.compile,
    }
    scratch = {}
    try:
        for phase, compile_phase in phases_of_programs.items():
            compiled = compile_phase()
            programs |= compiled
            scratch[phase] = max(r.scratch for r in compiled.values())
    except report.OutOfMemory as error:
        refused = error
    phases = [report.with_scratch(phase, scratch.get(phase.name)) for phase in plan.phases]
    if "update" in scratch:
        at = next(n for n, phase in enumerate(phases) if phase.name == "update")
        phases[at : at + 1] = update.phases({n: programs[n] for n in update.arguments})
    console.print(report.phase_table(phases, usable))
    if refused is not None:
        console.print(f"does not fit: {refused}", style="bold red")
        return 1
    longest = recipe.rollout.prompt_tokens + recipe.rollout.response_tokens
    mesh_sizes = plan.engine.mesh or {}
    console.print(
        f"rollout: on each host {mesh_sizes['replicas']} replicas of {mesh_sizes['tensor']} "
        f"devices, each with {recipe.rollout.slots} slots and {plan.cache_tokens:,} cached "
        f"tokens: {plan.cache_tokens // longest} calls of full length at once"
    )
    console.print(report.memory_table(programs.values()))
    flops = report.model_flops(config, rows, length)
    console.print(report.work_table(flops, programs, mesh.size))
    console.print(report.collective_table(programs.values()))
    worst = max(phases, key=lambda phase: phase.total)
    left = usable - worst.total / report.GIB
    verdict = f"fits, {left:.2f} GiB left" if left >= 0 else f"does not fit, {-left:.2f} GiB short"
    console.print(f"{verdict} of {usable:g} GiB in {worst.name}", style="bold")
    return int(left < 0)


def _silence_libtpu() -> None:
    """Sets what libtpu and jax read when they are imported: call it before jax is in."""
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("TPU_LIBRARY_PATH"):
        os.environ.pop("TPU_LIBRARY_PATH", None)


if __name__ == "__main__":
    entry(main)
