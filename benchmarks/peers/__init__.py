"""One program for each peer; it runs in that peer's environment and imports nothing of ours but
``benchmarks.timing`` and the work of the benchmark."""
