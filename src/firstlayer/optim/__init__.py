"""Row optimizers: train a table of a million rows at the cost of a batch.

A batch reads a few thousand rows of a table, and only those have a gradient. A dense
optimizer goes over the whole table nevertheless, for momentum and weight decay move every
row in every step. Here each step moves the rows that have a gradient; a row that was left
alone catches up in one pass before it is next read. In ``mode="exact"``, the default, every
number that is read is what the dense optimizer would have made it, schedules included; in
``mode="lazy"`` a row without a gradient simply stays, which is what TensorFlow's sparse
updates and torch's SparseAdam do, and another algorithm.

    >>> import numpy as np
    >>> from firstlayer.numpy import Embedding
    >>> layer = Embedding(1_000_000, 4, rng=0)
    >>> optimizer = RowAdamW(layer, lr=0.1)
    >>> y, pull = layer.vjp([[3, 7, 3]])
    >>> optimizer.step(pull(y))

**Who brings a row up to date.** The optimizer puts a :class:`~firstlayer.optim.table_state.TableState`
on each table, as ``layer.table_state``, and whatever looks rows up, saves or copies them
settles with it first. Whoever reads or writes ``layer.weight`` itself calls
:meth:`RowOptimizer.flush` before.

What can be exact: SGD with momentum and decay, Adagrad, RMSprop and Lion are to rounding,
and so are AdamW's decay and averages; its drift is to 1e-5 of itself, mostly to rounding.
What cannot: weight decay that is added to the gradient and then divided (``weight_decay``
of Adam, Adagrad and RMSprop), for then no row is without a gradient; Adafactor, whose
averages run over rows; LAMB and LARS, which use the norm of the whole table. Gradients that
are arrays of a parameter's shape are taken too, and move every row.
"""

from .adagrad import RowAdagrad as RowAdagrad
from .adagrad import RowWiseAdagrad as RowWiseAdagrad
from .adam import RowAdam as RowAdam
from .adam import RowAdamW as RowAdamW
from .lion import RowLion as RowLion
from .rmsprop import RowRMSprop as RowRMSprop
from .row_optimizer import RowOptimizer as RowOptimizer
from .sgd import RowSGD as RowSGD

__all__ = [
    "RowAdagrad",
    "RowAdam",
    "RowAdamW",
    "RowLion",
    "RowOptimizer",
    "RowRMSprop",
    "RowSGD",
    "RowWiseAdagrad",
]
