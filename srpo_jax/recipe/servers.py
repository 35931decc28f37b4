"""HTTP servers that a recipe names: their addresses, and the keys that they ask for."""

from __future__ import annotations

import os
from urllib.parse import SplitResult, urlsplit

from srpo_jax.recipe.errors import RecipeError


def split_server_url(url: str) -> SplitResult:
    """The parts of a base address, host and scheme among them.

    Raises:
        ValueError: it is no address of an HTTP server.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number below 65536, half an IPv6 address
        known = False
    if not known or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise ValueError(f"must be a URL such as http://host:8000, got {url!r}")
    return parts


def server_url(url: str) -> str:
    """``url`` itself, checked as :func:`split_server_url` does."""
    split_server_url(url)
    return url


def key_from_environment(variable: str | None, where: str) -> str | None:
    """The key that an environment variable holds.

    Args:
        variable: Its name; None: the server asks for no key.
        where: The recipe's key that names it.

    Raises:
        RecipeError: It is not set, or holds what no HTTP header can.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise RecipeError(f"{where}: {variable} is not set in the environment")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise RecipeError(
            f"{where}: {variable} must hold printable ASCII without spaces, got other text"
        )
    return key
