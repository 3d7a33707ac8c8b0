"""Benchmarks: every claim of speed, measured against its peers in one run."""
