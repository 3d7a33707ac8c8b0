"""Kernels of the row optimizers."""
