"""The loops that Numba compiles, behind half a dozen functions on NumPy arrays.

Numba is imported at the first call, not before. Arguments are C-contiguous arrays and int64
ids; half-precision arrays are taken as they are. Every function has an obvious NumPy
counterpart in the tests that it must equal, for any number of threads.
"""

import importlib
from typing import Any

_HOME = {
    "dot_bags": "_bag",
    "gather": "_gather",
    "get_num_threads": "_pool",
    "layer": "_layer",
    "layer_pull": "_layer",
    "max_bags": "_bag",
    "rotate": "_rotate",
    "set_num_threads": "_pool",
    "sum_bags": "_bag",
    "sum_groups": "_rows",
    "turns": "_turns",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
