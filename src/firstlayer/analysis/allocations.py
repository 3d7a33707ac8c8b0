"""Running one training step and counting the bytes of the arrays that it keeps.

Row optimizers run on NumPy, whose arrays tracemalloc knows: what is counted is what NumPy
asked the allocator for. A table of zeros takes no memory until a row of it is written, so
even a huge one can be stepped. Dense optimizers run on torch, where the storages behind
tensors are counted, each once; a table that is too large goes to the meta device, where the
same operators work out sizes and nothing else.
"""

import gc
import tracemalloc
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np

from .._check import float_dtype
from .memory import DTYPES, OPTIMIZERS, Bytes, How, computed

#: The optimizers of torch.optim, and those of firstlayer.optim, by the study's names.
DENSE = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "adamw": "AdamW"}
BY_ROW = {
    "row-sgd": "RowSGD",
    "row-adagrad": "RowAdagrad",
    "rowwise-adagrad": "RowWiseAdagrad",
    "row-rmsprop": "RowRMSprop",
    "row-lion": "RowLion",
    "row-adamw": "RowAdamW",
}


def measured(
    rows: int, width: int, *, dtype: str, optimizer: str, tokens: int, allowed: int
) -> tuple[Bytes | None, How]:
    """Return what a step keeps and how that was found; see :mod:`firstlayer.analysis.memory`."""
    sizes: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "tokens": tokens}
    if OPTIMIZERS[optimizer].by_row:
        # Rows of the table, of two arrays of state, of the gradient and of the output.
        touched = 6 * min(tokens, rows) * width * max(DTYPES[dtype], 4)
        if touched > allowed:
            return None, None
        return by_rows(rows, width, **sizes), "allocated"
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        return None, None
    if computed(rows, width, **sizes).total > allowed:
        return dense(rows, width, device="meta", **sizes), "virtual"
    return dense(rows, width, device="cpu", **sizes), "allocated"


def by_rows(rows: int, width: int, *, dtype: str, optimizer: str, tokens: int) -> Bytes:
    """Return what a step on NumPy with row gradients keeps."""
    sizes: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "tokens": tokens}
    # A first step compiles, which makes arrays that have nothing to do with it.
    _marks(min(rows, tokens), width, allocated=lambda: 0, **sizes)
    with counting() as allocated:
        marks = _marks(rows, width, allocated=allocated, **sizes)
    parameters, activations, gradient, state = np.diff(marks).tolist()
    return Bytes(parameters, gradient, state, activations)


def _marks(
    rows: int,
    width: int,
    *,
    dtype: str,
    optimizer: str,
    tokens: int,
    allocated: Callable[[], int],
) -> list[int]:
    """Take a step and return what is allocated at first and after each part of it."""
    from .. import optim
    from ..numpy import Embedding

    kind = float_dtype(dtype)
    ids, dy = np.arange(tokens) % rows, np.zeros((tokens, width), kind)
    marks = [allocated()]
    layer = Embedding(rows, width, weight=np.zeros((rows, width), kind))
    marks.append(allocated())
    y, pull = layer.vjp(ids)
    marks.append(allocated())
    gradients = pull(dy)
    marks.append(allocated())
    stepper = getattr(optim, BY_ROW[optimizer])(layer)
    stepper.step(gradients)
    marks.append(allocated())
    return marks


def dense(
    rows: int, width: int, *, dtype: str, optimizer: str, tokens: int, device: str
) -> Bytes:
    """Return what a step on torch with a dense gradient keeps."""
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
    stepper = getattr(torch.optim, DENSE[optimizer])(layer.parameters())
    stepper.step()
    state = [value for each in stepper.state.values() for value in each.values()]
    return Bytes(
        storages([layer.weight]),
        storages([layer.weight.grad]),
        storages(state),
        storages([y, *saved]),
    )


def storages(tensors: Iterable[Any]) -> int:
    """Return the bytes behind torch tensors, those that share them counted once.

    Values that are no tensors, such as None and numbers in an optimizer's state, are
    nothing.
    """
    behind = [t.untyped_storage() for t in tensors if hasattr(t, "untyped_storage")]
    return sum({storage._cdata: storage.nbytes() for storage in behind}.values())


def kept_by(build: Callable[[], Any]) -> int:
    """Return the bytes of the arrays that what is built goes on to hold.

    Example:
        >>> kept_by(lambda: np.zeros(1000).astype(np.float32))
        4000
    """
    with counting() as allocated:
        before = allocated()
        held = build()
        after = allocated()
        del held
    return after - before


@contextmanager
def counting() -> Generator[Callable[[], int], None, None]:
    """Yield a function that returns how many bytes NumPy's arrays take now.

    Only arrays made meanwhile are counted.
    """
    was_on, was_frozen = tracemalloc.is_tracing(), gc.get_freeze_count() > 0
    only_arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)

    def allocated() -> int:
        gc.collect()
        traces = tracemalloc.take_snapshot().filter_traces([only_arrays]).traces
        return sum(trace.size for trace in traces)

    if not was_on:
        tracemalloc.start()
    if not was_frozen:
        gc.freeze()  # collecting then looks at what is new, and takes no time
    try:
        yield allocated
    finally:
        if not was_frozen:
            gc.unfreeze()
        if not was_on:
            tracemalloc.stop()
