"""Run a training step and count the bytes of the arrays that it keeps.

Row optimizers run on NumPy, whose allocations tracemalloc records. A table of zeros is not
backed by memory until a row is written, so even a huge one can be stepped. Dense optimizers
run on torch, where every storage is counted once. A table that is too large is put on the
meta device, which has sizes but no memory.
"""

import gc
import tracemalloc
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np

from .._check import float_dtype
from .memory import DTYPES, OPTIMIZERS, Bytes, Method, computed

#: Classes of torch.optim and firstlayer.optim, by the names in ``memory.OPTIMIZERS``.
DENSE = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "adamw": "AdamW"}
BY_ROW = {
    "row-sgd": "RowSGD",
    "row-adagrad": "RowAdagrad",
    "rowwise-adagrad": "RowWiseAdagrad",
    "row-rmsprop": "RowRMSprop",
    "row-lion": "RowLion",
    "row-adamw": "RowAdamW",
}


#: No array has this many bytes, with or without memory.
MAX_BYTES = 1 << 62


def measure_step(
    rows: int, width: int, *, dtype: str, optimizer: str, tokens: int, allowed: int
) -> tuple[Bytes | None, Method]:
    """Return the bytes that a step keeps and the method; see :func:`.memory.footprint`."""
    sizes: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "tokens": tokens}
    if computed(rows, width, **sizes).total >= MAX_BYTES:
        return None, None
    if OPTIMIZERS[optimizer].by_row:
        # Rows of the table, of two state arrays, of the gradient and of the output.
        touched = 6 * min(tokens, rows) * width * max(DTYPES[dtype], 4)
        touched += OPTIMIZERS[optimizer].rows * rows
        if touched > allowed:
            return None, None
        try:
            return row_step(rows, width, **sizes), "allocated"
        except MemoryError:
            # Some systems do not reserve more memory than they have.
            return None, None
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        return None, None
    if computed(rows, width, **sizes).total > allowed:
        return dense_step(rows, width, device="meta", **sizes), "virtual"
    return dense_step(rows, width, device="cpu", **sizes), "allocated"


def row_step(rows: int, width: int, *, dtype: str, optimizer: str, tokens: int) -> Bytes:
    """Return the bytes that a NumPy step with row gradients keeps."""
    sizes: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "tokens": tokens}
    # The first step compiles kernels, which allocates unrelated arrays.
    _totals(min(rows, tokens), width, allocated=lambda: 0, **sizes)
    with counting() as allocated:
        totals = _totals(rows, width, allocated=allocated, **sizes)
    parameters, activations, gradient, state = np.diff(totals).tolist()
    return Bytes(parameters, gradient, state, activations)


def _totals(
    rows: int,
    width: int,
    *,
    dtype: str,
    optimizer: str,
    tokens: int,
    allocated: Callable[[], int],
) -> list[int]:
    """Run a step and return the allocated bytes before it and after each part of it."""
    from .. import optim
    from ..numpy import Embedding

    numpy_dtype = float_dtype(dtype)
    ids, dy = np.arange(tokens) % rows, np.zeros((tokens, width), numpy_dtype)
    totals = [allocated()]
    layer = Embedding(rows, width, weight=np.zeros((rows, width), numpy_dtype))
    totals.append(allocated())
    y, pullback = layer.vjp(ids)
    totals.append(allocated())
    gradients = pullback(dy)
    totals.append(allocated())
    row_optimizer = getattr(optim, BY_ROW[optimizer])(layer)
    row_optimizer.step(gradients)
    totals.append(allocated())
    return totals


def dense_step(
    rows: int, width: int, *, dtype: str, optimizer: str, tokens: int, device: str
) -> Bytes:
    """Return the bytes that a torch step with a dense gradient keeps."""
    import torch

    from ..torch import Embedding

    weight = torch.zeros(rows, width, dtype=getattr(torch, dtype), device=device)
    layer = Embedding(rows, width, _weight=weight)
    ids, saved = torch.arange(tokens, device=device) % rows, []

    def keep(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(ids)
    y.backward(torch.empty_like(y))
    dense_optimizer = getattr(torch.optim, DENSE[optimizer])(layer.parameters())
    dense_optimizer.step()
    states = dense_optimizer.state.values()
    return Bytes(
        bytes_of_tensors([layer.weight]),
        bytes_of_tensors([layer.weight.grad]),
        bytes_of_tensors(value for state in states for value in state.values()),
        bytes_of_tensors([y, *saved]),
    )


def bytes_of_tensors(values: Iterable[Any]) -> int:
    """Return the bytes of all storages of torch tensors. Other values are ignored."""
    storages = [x.untyped_storage() for x in values if hasattr(x, "untyped_storage")]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def bytes_of_arrays(build: Callable[[], Any]) -> int:
    """Return the bytes of the NumPy arrays that a new object keeps.

    Example:
        >>> bytes_of_arrays(lambda: np.zeros(1000).astype(np.float32))
        4000
    """
    with counting() as allocated:
        before = allocated()
        built = build()
        after = allocated()
        del built
    return after - before


@contextmanager
def counting() -> Generator[Callable[[], int], None, None]:
    """Yield a function that returns the bytes of all NumPy arrays made inside the block."""
    was_on, was_frozen = tracemalloc.is_tracing(), gc.get_freeze_count() > 0
    only_arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)

    def allocated() -> int:
        gc.collect()
        traces = tracemalloc.take_snapshot().filter_traces([only_arrays]).traces
        return sum(trace.size for trace in traces)

    if not was_on:
        tracemalloc.start()
    if not was_frozen:
        gc.freeze()  # makes collection fast: it then visits only new objects
    try:
        yield allocated
    finally:
        if not was_frozen:
            gc.unfreeze()
        if not was_on:
            tracemalloc.stop()
