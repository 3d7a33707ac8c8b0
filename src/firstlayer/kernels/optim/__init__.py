"""Kernels of the row optimizers: updates with a gradient, and catching up stale rows."""
