"""Row optimizers for JAX: a step updates the rows of the batch, not the whole table.

A dense optimizer reads and writes the whole table in every step, because momentum and
weight decay move rows without a gradient too. A row optimizer updates the rows of the
batch. Other rows become *stale*, and catch up when they are next gathered. The updates are
exact: every row that is read is what the dense optimizer would have computed from dense
gradients, schedules included. (:mod:`firstlayer.equinox.rows` is lazy instead: rows without
a gradient do not move.)

    >>> import equinox as eqx, jax, optax
    >>> from firstlayer.equinox import Embedding, optim
    >>> class Model(eqx.Module):
    ...     embed: Embedding
    ...     head: eqx.nn.Linear
    >>> def loss(model, ids, targets):
    ...     vectors = model.embed(ids).mean(axis=1)
    ...     return ((jax.vmap(model.head)(vectors) - targets) ** 2).mean()
    >>> schedule = optax.cosine_onecycle_schedule(100, peak_value=0.03)
    >>> optimizer = optim.RowAdamW(schedule, tables=lambda model: model.embed)
    >>> @eqx.filter_jit(donate="all-except-first")
    ... def step(batch, model, state):
    ...     ids, targets = batch
    ...     rows = optimizer.gather(model, state, ids)
    ...     value, grads = eqx.filter_value_and_grad(loss)(rows, ids, targets)
    ...     model, state = optimizer.update(grads, state, rows)
    ...     return model, state, value
    >>> keys = jax.random.split(jax.random.key(0), 2)
    >>> model = Model(Embedding(100, 8, key=keys[0]), eqx.nn.Linear(8, 1, key=keys[1]))
    >>> model, state = optimizer.init(model)
    >>> batch = jax.numpy.array([[3, 7, 7], [5, 3, 9]]), jax.numpy.ones((2, 1))
    >>> losses = []
    >>> for _ in range(30):
    ...     model, state, value = step(batch, model, state)
    ...     losses.append(float(value))
    >>> losses[-1] < 0.5 * losses[0]
    True

**The tables are in the state.** ``init`` moves the tables from the model to the state,
because rows there may be stale. Looking ids up in the model that ``init`` and ``update``
return is a RuntimeError; averages of weights and files of such a model do not contain the
tables. ``gather(model, state, ids)`` returns a model that has the rows of these ids, caught
up, for training and for evaluation at the cost of a batch. ``flush(model, state)`` returns
the complete model, for everything else:

    >>> float(loss(optimizer.flush(model, state), *batch)) < losses[0]
    True
    >>> model.embed([3])  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ...
    RuntimeError: this table of shape (100, 8) is in the optimizer state, where ...

**Gradients are ordinary trees** that have an array of rows in place of each table.
``optax.clip_by_global_norm(1.0).update(grads, None)`` clips the whole model, with the norm
of dense gradients. To accumulate gradients, gather the ids of all micro-batches once, and
add up the gradients with ``jax.tree.map``.

**Growing tables.** ``rows, state = optimizer.assign(model, state, ids)`` gives rows of a
:class:`~firstlayer.equinox.GrowingEmbedding` to new ids, on the host and before the
compiled step, which takes the rows. New rows start with the initial state.

**Sizes are static.** The number of ids is the size of their array. Pad smaller batches with
-1, which moves no row. Donate the model and the state to the step; otherwise XLA copies all
tables.

**Tied heads.** ``embed.logits`` needs every row, and gives every row a gradient. Pass None
instead of ids, or use ``flush``: the step is then dense, and a warning says so. A softmax
over the batch's ids and sampled candidates keeps it sparse: gather both, and multiply by
the looked-up rows.

**Checkpoints.** The state is a tree of arrays, stale rows and missed steps included. Save
``eqx.filter((model, state), eqx.is_array)`` with orbax or with Equinox's own functions. The
ids of a ``GrowingEmbedding`` are on the host: save ``layer.state()`` too, and restore it by
``layer.with_state``.

**Tables on a mesh.** The state of a table with a ``sharding`` is sharded as the table is. A
step sends the rows of the batch once, in ``gather``; each device catches up and updates the
rows that it has. No device holds the whole table or its gradient. To restore a checkpoint
on another number of devices, initialize the model there and pass ``strict=False`` to
orbax, which then adds or removes the rows of zeros at the end of tables.

**Accuracy** and the options that cannot be exact are those of :mod:`firstlayer.optim`. Half
precision tables have a float32 state; a row is rounded when it catches up and when it is
updated.
"""

from ...optim.adagrad import AdagradOptions, WiseAdagradOptions
from ...optim.adam import AdamOptions, AdamWOptions
from ...optim.lion import LionOptions
from ...optim.rmsprop import RMSpropOptions, WiseRMSpropOptions
from ...optim.sgd import SGDOptions
from .row_optimizer import RowOptimizer as RowOptimizer

__all__ = [
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


class RowSGD(RowOptimizer):
    """SGD on rows, with momentum and weight decay. Equals dense SGD.

    Args:
        lr, tables, rest, mask, max_missed_steps: See :class:`RowOptimizer`.
        momentum: Momentum factor.
        dampening: Dampening of the momentum.
        weight_decay: Weight decay, added to the gradient.
        nesterov: Use Nesterov momentum.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer = RowSGD(0.1, momentum=0.9, weight_decay=0.01)
    """

    _options_class = SGDOptions


class RowAdagrad(RowOptimizer):
    """Adagrad on rows. Equals dense Adagrad, as torch defines it.

    Args:
        lr, tables, rest, mask, max_missed_steps: See :class:`RowOptimizer`.
        lr_decay: Decay of the learning rate.
        weight_decay: Must be 0: it would give every row a gradient.
        initial_accumulator_value: Initial value of the sums of squares.
        eps: Term added to the denominator.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer = RowAdagrad(0.1, initial_accumulator_value=0.1)
    """

    _options_class = AdagradOptions


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one number per row: the sum of the mean squares of its gradients.

    The state of a table of a million rows takes 4 MB. Parameters that are not tables get
    Adagrad with a sum for each entry.

    Args:
        lr, tables, rest, mask, max_missed_steps: See :class:`RowOptimizer`.
        lr_decay: Decay of the learning rate.
        weight_decay: Must be 0: it would give every row a gradient.
        initial_accumulator_value: Initial value of the sums.
        eps: Term added to the denominator.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer = RowWiseAdagrad(0.1, eps=1e-8)
    """

    _options_class = WiseAdagradOptions


class RowAdam(RowOptimizer):
    """Adam on rows. Equals dense Adam.

    Args:
        lr, tables, rest, mask, max_missed_steps: See :class:`RowOptimizer`.
        betas: Decay rates of the first and second moment.
        eps: Term added to the denominator.
        weight_decay: Must be 0: it would give every row a gradient. See :class:`RowAdamW`.
        amsgrad: Divide by the largest second moment so far.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer = RowAdam(1e-3, betas=(0.9, 0.95))
    """

    _options_class = AdamOptions


class RowAdamW(RowOptimizer):
    """AdamW on rows. Equals dense AdamW.

    Args:
        lr, tables, rest, mask, max_missed_steps: See :class:`RowOptimizer`.
        betas: Decay rates of the first and second moment.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay.
        amsgrad: Divide by the largest second moment so far.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer = RowAdamW(1e-3, weight_decay=0.1, tables=lambda model: model.embed)
    """

    _options_class = AdamWOptions


class RowRMSprop(RowOptimizer):
    """RMSprop on rows. Equals dense RMSprop, as torch defines it.

    Args:
        lr, tables, rest, mask, max_missed_steps: See :class:`RowOptimizer`.
        alpha: Decay rate of the averages.
        eps: Term added to the denominator.
        weight_decay: Must be 0: it would give every row a gradient.
        momentum: Momentum factor.
        centered: Divide by the standard deviation of gradients.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer = RowRMSprop(1e-3, momentum=0.9, centered=True)
    """

    _options_class = RMSpropOptions


class RowWiseRMSprop(RowOptimizer):
    """RMSprop with one number per row: the average of its gradients' mean squares.

    Parameters that are not tables get RMSprop with an average for each entry.

    Args:
        lr, tables, rest, mask, max_missed_steps: See :class:`RowOptimizer`.
        alpha: Decay rate of the average.
        eps: Term added to the denominator.
        weight_decay: Must be 0: it would give every row a gradient.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer = RowWiseRMSprop(1e-3, alpha=0.9)
    """

    _options_class = WiseRMSpropOptions


class RowLion(RowOptimizer):
    """Lion on rows: updates weights by the sign of an average of gradients.

    Args:
        lr, tables, rest, mask, max_missed_steps: See :class:`RowOptimizer`.
        betas: Decay rates of the average: in the update, and in the stored state.
        weight_decay: Decoupled weight decay.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer = RowLion(1e-4, weight_decay=0.1)
    """

    _options_class = LionOptions
