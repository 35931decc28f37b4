"""What a user's error must be, whoever raises it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from launch.cli import exit_code


def refusal(error: type[Exception], call: Callable[..., Any], *arguments: Any) -> str:
    """The message of the error that ``call`` raises: one line, and exit code 2."""
    with pytest.raises(error) as caught:
        call(*arguments)
    assert exit_code(caught.value) == 2 and "\n" not in str(caught.value)
    return str(caught.value)
