"""One program for each peer; it runs in that peer's environment and imports nothing of ours but
``benchmarks.learner_work``."""
