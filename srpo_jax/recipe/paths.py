"""Where a path of a recipe or of the command line leads: one order of places for all of them.

Looked up are beside the recipe, then the working folder, then, for ``configs/`` and ``assets/``,
the recipes and the checkpoint that come with srpo_jax.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from models.hub import is_hub_name
from srpo_jax.recipe.errors import RecipeError

BUNDLED = ("configs", "assets")
_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has them inside the package, a clone of the repository beside it.
_BUNDLE = bundle if (bundle := _PACKAGE / "bundled").is_dir() else _PACKAGE.parent


def places(path: str | Path, folder: Path | None = None) -> list[Path]:
    """Where a path may lead, in the order of search.

    Args:
        path: as a user wrote it: absolute, from the home folder (``~``), or relative.
        folder: the folder of the recipe that names the path; None: no recipe does.
    """
    expanded = Path(os.path.expanduser(path))  # leaves a home folder that nobody has as it is
    if expanded.is_absolute():
        return [expanded]
    found = [] if folder is None else [folder / expanded]
    found.append(expanded)
    if expanded.parts[:1] and expanded.parts[0] in BUNDLED:
        found.append(_BUNDLE / expanded)
    return list({place.absolute(): place for place in found}.values())


def find(path: str | Path, folder: Path | None = None, kind: str = "file") -> Path:
    """The first of the :func:`places` of a path where something is.

    Args:
        path: as a user wrote it.
        folder: the folder of the recipe that names the path.
        kind: ``file`` or ``folder``, what must be there.

    Returns:
        The place as it was looked for: relative to the working folder where it was found there.

    Raises:
        RecipeError: there is nothing in any place, or something else than ``kind`` in the first, or
            it cannot be reached.
    """
    candidates = places(path, folder)
    trouble: str | None = None
    for place in candidates:
        try:
            mode = os.stat(place).st_mode
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:  # no permission, a circle of links, a zero byte
            trouble = trouble or getattr(error, "strerror", None) or str(error)
            continue
        found = "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "special file"
        if found != kind:
            raise RecipeError(f"{path}: must be a {kind}, got a {found}")
        return place
    if trouble is not None:
        raise RecipeError(f"{path}: {trouble}")
    raise RecipeError(f"{path}: no such {kind}{_looked_for(path, candidates)}")


def find_file(path: str, folder: Path | None = None) -> Path:
    """:func:`find` for a file of a recipe, as an absolute path."""
    return find(path, folder).resolve()


def find_model(path: str, folder: Path | None = None) -> str:
    """The local folder of a checkpoint, or the hub name that ``path`` is.

    A local folder wins over a hub repository of the same name; what looks like a path is never
    taken for a hub name.

    Raises:
        RecipeError: there is no such folder, and the path is no hub name.
    """
    candidates = places(path, folder)
    for place in candidates:
        try:
            if place.exists() or place.is_symlink():
                return str(place)  # whoever reads it says what is wrong with a file, a dead link
        except (OSError, ValueError):  # no permission, too long a name
            return str(place)
    if is_hub_name(path):
        return path
    hint = "" if "/" in path else "; a hub name is organisation/model"
    raise RecipeError(f"{path}: no such folder{_looked_for(path, candidates)}{hint}")


def _looked_for(path: str | Path, candidates: list[Path]) -> str:
    """The places, where they say more than the path itself."""
    if [str(place) for place in candidates] == [str(path)]:
        return ""
    return f" (looked for {', '.join(map(str, candidates))})"
