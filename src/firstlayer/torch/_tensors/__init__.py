"""Tensors: dtypes, buffers, errors, and memory as the kernels read it."""
