"""Compiling kernels and running them on several threads."""
