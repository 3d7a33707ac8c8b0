"""Bags of rows on torch: options, pooling by kernels and by operators, short calls."""
