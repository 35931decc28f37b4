"""The options of the commands that serve over HTTP: where they listen, and who may ask."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import socket
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from launch.cli import Parser

if TYPE_CHECKING:
    from envs.http_server import Access


def add_http_arguments(parser: Parser, port: int) -> None:
    """Adds --host, --port, --allow-host and --token-env.

    Args:
        parser: The command's.
        port: The default port.
    """
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=port, help=f"default {port}; 0: any free one")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="a further name by which clients call this server (addresses, localhost and --host "
        "are allowed); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--token-env", metavar="VARIABLE",
        help="environment variable with a token that clients must send: Authorization: Bearer ...",
    )  # fmt: skip


def open_http(parser: Parser, args: Namespace) -> tuple[socket.socket, Access]:
    """A socket that listens where the options say, and who may ask there.

    Says so on stderr when anyone who reaches it may. That is not refused: on the private network of
    a cluster it is the rule, and clients of other projects' retrieval servers send no token.

    Args:
        parser: Refuses options that are wrong, in one line.
        args: What ``add_http_arguments`` added.
    """
    from envs.http_server import Access, listen

    if not 0 <= args.port < 2**16:
        parser.error(f"--port must be from 0 to 65535, got {args.port}")
    for name in args.allow_host:
        if not re.fullmatch(r"[\w.-]+", name):
            parser.error(f"--allow-host must be a name without scheme and port, got {name!r}")
    token = None
    if args.token_env is not None:
        token = os.environ.get(args.token_env, "")
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            got = "other text" if token else "nothing"
            parser.error(
                f"--token-env: the variable {args.token_env} must hold a token of printable ASCII "
                f"characters without spaces, got {got}"
            )
    try:
        listener = listen(args.host, args.port)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        parser.error(f"cannot listen on {args.host}:{args.port}: {reason}")
    if token is None and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        print(
            f"warning: whoever reaches {args.host}:{listener.getsockname()[1]} can use this server "
            "(--token-env sets a token)",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return listener, Access(frozenset([args.host, *args.allow_host]), token)
