"""Serves a corpus over HTTP, POST /retrieve, to this machine alone unless --host says otherwise.

Clients need no token unless --token-env names one. Ctrl-C ends it.
"""

from __future__ import annotations

from launch.cli import Parser, entry
from launch.http_options import add_http_arguments, open_http

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
    add_http_arguments(parser, DEFAULT_PORT)
    args = parser.parse_args(argv)
    if args.index == "dense":
        parser.error("--index dense is not there yet, use --index bm25")

    from envs.http_server import HTTPServer, url_of
    from envs.search.retrieval.bm25 import BM25Retriever
    from envs.search.retrieval.corpus import load_corpus
    from envs.search.retrieval.server import create_app, refuse

    listener, access = open_http(parser, args)  # first: a corpus may take minutes to load
    try:
        with listener:
            passages = load_corpus(args.corpus)
            app = create_app(BM25Retriever(passages), access)
            print(f"{len(passages)} passages, POST {url_of(listener)}/retrieve", flush=True)
            HTTPServer(app, refuse).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    entry(main)
