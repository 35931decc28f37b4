"""Sections whose keys are the switches of a dataclass: names and types stand there alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from types import GenericAlias
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import AfterValidator, create_model, model_serializer

from envs.text_files import short
from srpo_jax.objective_config import names_in, switch_types
from srpo_jax.recipe.sections import Section


class Changes(Section):
    """What a recipe changes of a preset. A key that it does not say is as the preset has it."""

    own: ClassVar[frozenset[str]]  # keys that are no switch of a preset: they always have a value
    config: ClassVar[type]  # the dataclass of the switches, by `of_switches`

    @model_serializer(mode="wrap")
    def _only_said(self, dump: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """A dump says no more than the recipe: null is a value of its own (no dual clip)."""
        said = self.own | self.model_fields_set
        return {name: value for name, value in dump(self).items() if name in said}

    def changes(self) -> dict[str, Any]:
        """The switches that are said, as fields of ``config``. Null is a value where None is one,
        and leaves any other switch to the preset."""
        defaults = {field.name: field.default for field in fields(self.config)}
        return {
            name: getattr(self, name)
            for name, default in defaults.items()
            if name in self.own | self.model_fields_set
            and (getattr(self, name) is not None or default is None)
        }


SectionT = TypeVar("SectionT", bound=Changes)


def of_switches(config: type) -> Callable[[type[SectionT]], type[SectionT]]:
    """A class decorator that gives a section a key for each switch that it does not declare itself.

    What more a value must be is the dataclass's own check, when the recipe builds it.

    Args:
        config: the dataclass of the switches.
    """

    def add(section: type[SectionT]) -> type[SectionT]:
        keys: dict[str, Any] = {
            name: (_key_type(hint) | None, None)
            for name, hint in switch_types(config).items()
            if name not in section.model_fields
        }
        made = create_model(
            section.__name__,
            __base__=section,
            __module__=section.__module__,
            __doc__=section.__doc__,
            **keys,
        )
        made.config = config
        return made

    return add


def _key_type(hint: Any) -> Any:
    """The type of a recipe's key for a field of this type. YAML has lists, no tuples."""
    if get_origin(hint) is tuple:
        return GenericAlias(list, (_key_type(get_args(hint)[0]),))
    if get_origin(hint) is Annotated and names_in(hint) is not None:
        return Annotated[str, key_of(lambda: names_in(hint) or ())]
    return hint


@dataclass(frozen=True)
class OneOf(AfterValidator):
    """Marks a text that must be one of ``names()``."""

    names: Callable[[], Iterable[str]] = tuple


def key_of(names: Callable[[], Iterable[str]]) -> OneOf:
    """What the type of a key is annotated with, so that its value is one of the names.

    Args:
        names: Gives them; asked at every check, so that a table may grow.
    """

    def check(name: str) -> str:
        known = tuple(names())
        if name not in known:
            raise ValueError(f"must be one of {', '.join(known)}, got {short(name)}")
        return name

    return OneOf(check, names)
