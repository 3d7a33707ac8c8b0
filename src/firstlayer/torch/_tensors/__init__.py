"""Tensors and memory: when kernels may run, buffers, errors, large pages."""
