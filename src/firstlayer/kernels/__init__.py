"""Numba kernels, behind typed functions on NumPy arrays.

Numba is imported when the first kernel is used. If its compiler is turned off by
``NUMBA_DISABLE_JIT=1``, the kernels of the layers are the functions in ``plain``. Arrays
are C-contiguous, in any float dtype including float16 and bfloat16; ids are int64. Tests
compare every function with plain NumPy, for several numbers of threads.
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
    from .mapped_rows import copy_rows_at as copy_rows_at
    from .mapped_rows import locate_rows as locate_rows
    from .mapped_rows import request_rows as request_rows
    from .mapped_rows import rows_missing as rows_missing
    from .neighbor_map import move_points as move_points
    from .neighbor_map import nearest_in as nearest_in
    from .optim.drivers import average_rows as average_rows
    from .optim.drivers import catch_up_rows as catch_up_rows
    from .optim.drivers import update_rows as update_rows
    from .optim.rows import stale_range as stale_range
    from .optim.rows import stale_rows as stale_rows
    from .phases import digit_phases as digit_phases
    from .phases import sinusoid_features as sinusoid_features
    from .quantized import gather_quantized as gather_quantized
    from .quantized import sum_quantized_bags as sum_quantized_bags
    from .rotate import rotate_pairs as rotate_pairs
    from .row_io import store_rows as store_rows
    from .row_io import upcast_rows as upcast_rows
    from .row_sums import sum_groups as sum_groups
    from .row_sums import sum_runs as sum_runs
    from .row_sums import sum_words as sum_words
    from .runtime.aligned import aligned_empty as aligned_empty
    from .runtime.aligned import aligned_zeros as aligned_zeros
    from .runtime.threads import get_num_threads as get_num_threads
    from .runtime.threads import set_num_threads as set_num_threads
    from .subwords import mean_subword_rows as mean_subword_rows
    from .text_rows import parse_text_rows as parse_text_rows
    from .word2vec.draws import noise_table as noise_table
    from .word2vec.step import word2vec_step as word2vec_step
    from .word2vec.word_rows import subword_rows as subword_rows
    from .word2vec.workspace import word2vec_workspace as word2vec_workspace

# Module of each name above; a test checks that the two lists match.
_NAMES = {
    "bags": ("dot_bags", "max_bags", "sum_bags"),
    "gather": ("gather_rows",),
    "group": ("ascends", "group_by_id"),
    "layer.backward": ("layer_backward",),
    "layer.backward_plan": ("BackwardPlan", "plan_backward"),
    "layer.forward": ("layer_forward",),
    "mapped_rows": ("copy_rows_at", "locate_rows", "request_rows", "rows_missing"),
    "neighbor_map": ("move_points", "nearest_in"),
    "optim.drivers": ("average_rows", "catch_up_rows", "update_rows"),
    "optim.rows": ("stale_range", "stale_rows"),
    "phases": ("digit_phases", "sinusoid_features"),
    "quantized": ("gather_quantized", "sum_quantized_bags"),
    "rotate": ("rotate_pairs",),
    "row_io": ("store_rows", "upcast_rows"),
    "row_sums": ("sum_groups", "sum_runs", "sum_words"),
    "runtime.aligned": ("aligned_empty", "aligned_zeros"),
    "runtime.threads": ("get_num_threads", "set_num_threads"),
    "subwords": ("mean_subword_rows",),
    "text_rows": ("parse_text_rows",),
    "word2vec.draws": ("noise_table",),
    "word2vec.step": ("word2vec_step",),
    "word2vec.word_rows": ("subword_rows",),
    "word2vec.workspace": ("word2vec_workspace",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _HOME[name]
    if not module.startswith("runtime.") and not has_compiler():
        if module.startswith(("neighbor_map", "optim.", "word2vec.")):
            require_compiler(name)
        module = "plain"
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def has_compiler() -> bool:
    """Return whether Numba compiles functions; ``NUMBA_DISABLE_JIT=1`` turns it off."""
    from numba.core import config

    return not getattr(config, "DISABLE_JIT", False)


def can_bind() -> bool:
    """Return whether kernels can be called without Numba's dispatcher; see ``bound``."""
    if not has_compiler():
        return False
    from .runtime.pool import has_known_layout

    return has_known_layout()


def require_compiler(what: str) -> None:
    """Raise a RuntimeError if Numba's compiler is turned off.

    Args:
        what: What needs the compiler, as the subject of the message.
    """
    if not has_compiler():
        raise RuntimeError(
            f"{what} needs Numba's compiler, but NUMBA_DISABLE_JIT turns it off"
        )
