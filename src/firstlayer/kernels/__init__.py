"""The loops that Numba compiles, behind plain functions on NumPy arrays.

Numba is imported at the first call, not before. Arguments are C-contiguous arrays and int64
ids; half-precision arrays are taken as they are. Every function has an obvious NumPy
counterpart in the tests that it must equal, for any number of threads.
"""

import importlib
from typing import Any

_HOME = {
    "Route": "_route",
    "adagrad_update": "_optim_scaled",
    "adam_settle": "_optim_adam",
    "adam_update": "_optim_adam",
    "ascends": "_group",
    "dot_bags": "_bag",
    "draw_targets": "_skipgram",
    "features": "_turns",
    "gather": "_gather",
    "get_num_threads": "_threads",
    "group_by_id": "_group",
    "group_targets": "_skipgram",
    "layer": "_layer",
    "layer_pull": "_layer_pull",
    "linear_settle": "_optim_linear",
    "lion_settle": "_optim_lion",
    "lion_update": "_optim_lion",
    "max_bags": "_bag",
    "narrow_rows": "_optim_rows",
    "noise_table": "_skipgram",
    "push_targets": "_skipgram",
    "rmsprop_update": "_optim_scaled",
    "rotate": "_rotate",
    "route_of": "_route",
    "set_num_threads": "_threads",
    "sgd_update": "_optim_linear",
    "stale_range": "_optim_rows",
    "stale_rows": "_optim_rows",
    "sum_bags": "_bag",
    "sum_groups": "_rows",
    "sum_runs": "_rows",
    "turns": "_turns",
    "widen_rows": "_optim_rows",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
