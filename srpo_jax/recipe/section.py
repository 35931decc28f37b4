"""What the sections of a recipe are made of: a strict base class and the types of their values."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from srpo_jax.recipe.server_url import server_url

Dtype = Literal["float32", "bfloat16"]
Count = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _local(path: str) -> str:
    """Refuses ``gs://bucket/x``: as a path it would silently be a local folder called ``gs:``."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", path):
        raise ValueError(f"{path!r} is no local path, and no other is supported: copy or mount it")
    return path


LocalPath = Annotated[str, AfterValidator(_local)]
ServerUrl = Annotated[str, AfterValidator(server_url)]


class Section(BaseModel):
    """A part of a recipe: immutable, strict on types, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
