"""Row optimizers: a step updates the rows of the batch, not the whole table.

A batch reads a few thousand rows of a table, and only those have a gradient. A dense
optimizer still updates the whole table, because momentum and weight decay move every row in
every step. A row optimizer updates only the rows that have a gradient. All other rows
become *stale*, and each catches up in one pass before it is next read.

``mode="exact"`` (the default): every weight that is read is what the dense optimizer would
have computed, schedules included. ``mode="lazy"``: a row without a gradient does not move
at all, as in TensorFlow's sparse updates and ``torch.optim.SparseAdam``. This is a
different algorithm.

    >>> import numpy as np
    >>> from firstlayer.numpy import Embedding
    >>> layer = Embedding(1_000_000, 4, rng=0)
    >>> optimizer = RowAdamW(layer, lr=0.1)
    >>> y, pull = layer.vjp([[3, 7, 3]])
    >>> optimizer.step(pull(y))

**Reading the table.** The optimizer puts a ``TableState`` on each table, as
``layer.table_state``. Lookups catch up the rows that they read
(:meth:`firstlayer.optim.table_state.TableState.catch_up`). Reading or replacing
``layer.weight``, ``logits``, ``parameters()``, saving and copying catch up every row. An
array that was read before a step is stale after it: read ``layer.weight`` again, or call
``optimizer.flush()``, which brings the same array up to date.

**Accuracy.** SGD with momentum and decay, Adagrad, RMSprop and Lion are exact to rounding,
and so are AdamW's decay and moments. The updates of stale weights by the
momentum of Adam and AdamW are exact to a relative error of 1e-5, usually to rounding.

**Not available in exact mode.** Weight decay that is added to the gradient and then
normalized (``weight_decay`` of Adam, Adagrad and RMSprop), because then every row has a
gradient. Adafactor averages over rows; LAMB and LARS use the norm of the whole table.

**Averages of weights.** :class:`AveragedRows` keeps an exponential moving average of every
row; an update costs as much as a batch.

Gradients that are arrays of the parameter's shape are accepted too, and update every row.
"""

from .adagrad import RowAdagrad as RowAdagrad
from .adagrad import RowWiseAdagrad as RowWiseAdagrad
from .adam import RowAdam as RowAdam
from .adam import RowAdamW as RowAdamW
from .averaged_rows import AveragedRows as AveragedRows
from .lion import RowLion as RowLion
from .rmsprop import RowRMSprop as RowRMSprop
from .rmsprop import RowWiseRMSprop as RowWiseRMSprop
from .row_optimizer import RowOptimizer as RowOptimizer
from .sgd import RowSGD as RowSGD

__all__ = [
    "AveragedRows",
    "RowAdagrad",
    "RowAdam",
    "RowAdamW",
    "RowLion",
    "RowOptimizer",
    "RowRMSprop",
    "RowSGD",
    "RowWiseAdagrad",
    "RowWiseRMSprop",
]
