"""Serves a corpus over HTTP, POST /retrieve, to this machine alone unless --host says otherwise.

Ctrl-C ends it.
"""

from __future__ import annotations

import signal
import socket

from launch.cli import Parser, entry

DEFAULT_PORT = 8100  # launch.serve has 8000


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.serve_retriever",
        __doc__,
        f"python -m launch.serve_retriever corpus.jsonl --port {DEFAULT_PORT}",
    )
    parser.add_argument(
        "corpus",
        metavar="CORPUS",
        help='a .jsonl or .jsonl.gz file with rows {"id", "contents"}, or "factbook"',
    )
    parser.add_argument("--index", choices=("bm25", "dense"), default="bm25")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}; 0: any free one"
    )
    args = parser.parse_args(argv)
    if args.index == "dense":
        parser.error("--index dense is not there yet, use --index bm25")
    if not 0 <= args.port < 2**16:
        parser.error(f"--port must be from 0 to 65535, got {args.port}")

    import uvicorn

    from envs.search.retrieval.bm25 import BM25Retriever
    from envs.search.retrieval.corpus import load_corpus
    from envs.search.retrieval.server import create_app

    version_6 = ":" in args.host
    try:  # first: a corpus may take minutes to load
        listener = socket.create_server(
            (args.host, args.port),
            family=socket.AF_INET6 if version_6 else socket.AF_INET,
            backlog=2048,
        )
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        parser.error(f"cannot listen on {args.host}:{args.port}: {reason}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with listener:
            passages = load_corpus(args.corpus)
            app = create_app(BM25Retriever(passages))
            host = f"[{args.host}]" if version_6 else args.host
            port = listener.getsockname()[1]
            print(f"{len(passages)} passages, POST http://{host}:{port}/retrieve", flush=True)
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
            uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    entry(main)
