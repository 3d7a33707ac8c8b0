"""Compilation of kernels, and the thread pool they run on.

``compile`` has the decorators, ``lanes`` the SIMD values, ``pool`` the two functions that
share a range between threads (``run``, ``pieces``) and ``threads`` the setting of their
number. Only ``numba_abi``, ``compiler`` and ``cache`` rely on Numba's internals.
"""
