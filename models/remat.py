"""Which results of a layer are stored for its backward pass (activation checkpointing).

Loads no jax, so that a recipe's names are checked without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# A name -> the policy of ``jax.checkpoint``, from the module ``jax.checkpoint_policies``. What a
# policy does not save is computed again.
REMAT_POLICIES: dict[str, Callable[[Any], Any] | None] = {
    "none": None,  # everything is stored
    "dots": lambda policies: policies.dots_with_no_batch_dims_saveable,  # matrix products
    "attention": lambda policies: policies.save_only_these_names("attention"),
    "full": lambda policies: policies.nothing_saveable,  # the layer's input alone
}
