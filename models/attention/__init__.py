"""Attention over sequences and over a KV cache: plain forms, and kernels for TPU and GPU."""
