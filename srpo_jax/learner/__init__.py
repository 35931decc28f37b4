"""Events to a gradient: packed batches, log-probs, the update, the optimiser."""
