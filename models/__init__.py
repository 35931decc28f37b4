"""Decoder models in Flax NNX, their checkpoints and their tokenizers."""
