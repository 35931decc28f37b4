"""Serves a corpus over HTTP, POST /retrieve, to this machine alone unless --host says otherwise."""

from __future__ import annotations

from launch.cli import Parser, entry


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.serve_retriever",
        __doc__,
        "python -m launch.serve_retriever corpus.jsonl --port 8000",
    )
    parser.add_argument(
        "corpus",
        metavar="CORPUS",
        help='a .jsonl or .jsonl.gz file with rows {"id", "contents"}, or "factbook"',
    )
    parser.add_argument("--index", choices=("bm25", "dense"), default="bm25")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)
    if args.index == "dense":
        parser.error("--index dense is not there yet, use --index bm25")

    import uvicorn

    from envs.search.retrieval.bm25 import BM25Retriever
    from envs.search.retrieval.corpus import load_corpus
    from envs.search.retrieval.server import create_app

    passages = load_corpus(args.corpus)
    app = create_app(BM25Retriever(passages))
    print(f"{len(passages)} passages, POST http://{args.host}:{args.port}/retrieve", flush=True)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")
    return 0


if __name__ == "__main__":
    entry(main)
