"""Addresses of HTTP servers, as recipes and remote engines take them."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


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
