"""Workflows, rewards and tasks: plain Python, free of jax, runnable with a scripted team."""
