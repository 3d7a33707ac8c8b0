"""Numba kernels, behind typed functions on NumPy arrays.

Numba is imported when the first kernel is used. Arrays are C-contiguous and ids int64, in
any float dtype including float16 and bfloat16. Tests compare every function with plain
NumPy, for several numbers of threads.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bags import dot_bags as dot_bags
    from .bags import max_bags as max_bags
    from .bags import sum_bags as sum_bags
    from .gather import gather_rows as gather_rows
    from .group import ascends as ascends
    from .group import group_by_id as group_by_id
    from .layer.backward import layer_backward as layer_backward
    from .layer.backward_plan import BackwardPlan as BackwardPlan
    from .layer.backward_plan import plan_backward as plan_backward
    from .layer.forward import layer_forward as layer_forward
    from .optim.adam import adam_catch_up as adam_catch_up
    from .optim.adam import adam_update as adam_update
    from .optim.linear import linear_catch_up as linear_catch_up
    from .optim.linear import sgd_update as sgd_update
    from .optim.lion import lion_catch_up as lion_catch_up
    from .optim.lion import lion_update as lion_update
    from .optim.rows import stale_range as stale_range
    from .optim.rows import stale_rows as stale_rows
    from .optim.scaled import adagrad_update as adagrad_update
    from .optim.scaled import rmsprop_update as rmsprop_update
    from .phases import digit_phases as digit_phases
    from .phases import sinusoid_features as sinusoid_features
    from .rotate import rotate_pairs as rotate_pairs
    from .row_io import store_rows as store_rows
    from .row_io import upcast_rows as upcast_rows
    from .row_sums import sum_groups as sum_groups
    from .row_sums import sum_runs as sum_runs
    from .runtime.threads import get_num_threads as get_num_threads
    from .runtime.threads import set_num_threads as set_num_threads
    from .skipgram import draw_targets as draw_targets
    from .skipgram import group_targets as group_targets
    from .skipgram import noise_table as noise_table
    from .skipgram import skipgram_gradients as skipgram_gradients

# Module of each name above; a test holds the two lists equal.
_HOME = {
    "BackwardPlan": "layer.backward_plan",
    "adagrad_update": "optim.scaled",
    "adam_catch_up": "optim.adam",
    "adam_update": "optim.adam",
    "ascends": "group",
    "digit_phases": "phases",
    "dot_bags": "bags",
    "draw_targets": "skipgram",
    "gather_rows": "gather",
    "get_num_threads": "runtime.threads",
    "group_by_id": "group",
    "group_targets": "skipgram",
    "layer_backward": "layer.backward",
    "layer_forward": "layer.forward",
    "linear_catch_up": "optim.linear",
    "lion_catch_up": "optim.lion",
    "lion_update": "optim.lion",
    "max_bags": "bags",
    "noise_table": "skipgram",
    "plan_backward": "layer.backward_plan",
    "skipgram_gradients": "skipgram",
    "rmsprop_update": "optim.scaled",
    "rotate_pairs": "rotate",
    "set_num_threads": "runtime.threads",
    "sgd_update": "optim.linear",
    "sinusoid_features": "phases",
    "stale_range": "optim.rows",
    "stale_rows": "optim.rows",
    "store_rows": "row_io",
    "sum_bags": "bags",
    "sum_groups": "row_sums",
    "sum_runs": "row_sums",
    "upcast_rows": "row_io",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
