"""Retrievers of passages: BM25 in this process, and servers of the ``POST /retrieve`` protocol."""
