"""Row updates: train the rows that a batch touched, at the cost of the batch.

JAX has no sparse gradients. The gradient of a table of a million rows is an array of a
million rows, and an optimizer goes over all of them, and over its moments of them, for
the few thousand that a batch looked up. Here the rows of a batch are taken out of the
table first, the loss is differentiated with respect to those, and the optimizer sees
nothing else:

>>> import equinox as eqx, jax, optax
>>> from firstlayer.equinox import Embedding, rows
>>> class Model(eqx.Module):
...     embed: Embedding
...     head: eqx.nn.Linear
>>> def loss(model, ids, targets):
...     vectors = model.embed(ids).mean(axis=1)
...     return ((jax.vmap(model.head)(vectors) - targets) ** 2).mean()
>>> optimizer = rows.RowOptimizer(
...     optax.adam(1e-2), table=lambda model: model.embed, rest=optax.adamw(1e-2)
... )
>>> @eqx.filter_jit(donate="all-except-first")
... def step(batch, model, state):
...     ids, targets = batch
...     value, grads = optimizer.value_and_grad(loss, ids)(model, ids, targets)
...     model, state = optimizer.update(grads, state, model)
...     return model, state, value
>>> keys = jax.random.split(jax.random.key(0), 2)
>>> model = Model(Embedding(100, 8, key=keys[0]), eqx.nn.Linear(8, 1, key=keys[1]))
>>> state = optimizer.init(model)
>>> batch = jax.numpy.array([[3, 7, 7], [5, 3, 9]]), jax.numpy.ones((2, 1))
>>> losses = []
>>> for _ in range(20):
...     model, state, value = step(batch, model, state)
...     losses.append(float(value))
>>> losses[-1] < 0.5 * losses[0]
True

Donating the model and the state is what makes it cheap: otherwise XLA copies the table
and the moments before it writes into them.

**What it means for an optimizer with a memory.** A row that no id touched is left alone,
and so are its moments: they do not decay while the row waits, momentum does not carry it
on, and weight decay does not reach it. This is *lazy* Adam, the rule of
``torch.optim.SparseAdam`` and TensorFlow's ``LazyAdam``; it is not dense Adam, which
moves every row at every step. What counts steps, for bias correction and schedules,
counts all of them. SGD without momentum and Adagrad leave rows without gradient alone
anyway, and give what they give densely.

What an optimizer works out across rows it works out across those of the batch. The norm
that ``optax.clip_by_global_norm`` takes is that of the whole gradient all the same, for
the others are zero; LAMB's trust ratio is not. Adafactor does not fit, for it has a state
by column; nor does ``optax.MultiSteps``: rows of earlier batches would wait for their turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PyTree

from ._module import replaced
from ._table.lookup import SomeRows
from ._table.module import Ids, Table

AnyTable = TypeVar("AnyTable", bound=Table)
# True of what `_each_once` returns, and lets XLA write row after row.
_PLACES = {"indices_are_sorted": True, "unique_indices": True}


class RowState(NamedTuple):
    """What a :class:`RowOptimizer` remembers.

    Args:
        rows: The state for the table, of all its rows.
        rest: The state for everything else, or None.
    """

    rows: PyTree
    rest: PyTree


def touched(table: AnyTable, ids: Ids) -> AnyTable:
    """Return a layer that has the rows of ``ids`` in place of its table.

    It looks up any of these ids as the table does, bags and ``max_norm`` included, at the
    cost of these rows; its gradient has their size. An id that is not among them is a NaN
    row. ``weight.ids`` says which rows they are.

    Args:
        table: An ``Embedding`` or ``EmbeddingBag``.
        ids: All ids that will be looked up, of any shape. Those that repeat, padding, and
            traced ones that are not rows take no place of their own.

    Example:
        >>> from firstlayer.equinox import Embedding
        >>> table = Embedding(50, 2, key=jax.random.key(0))
        >>> small = touched(table, [7, 3, 7])
        >>> small.weight.ids[:2].tolist(), bool((small([3, 7]) == table([3, 7])).all())
        ([3, 7], True)
    """
    if not isinstance(table, Table):
        raise TypeError(
            f"table must be an Embedding or EmbeddingBag, got {type(table).__name__}"
        )
    found = table._find(ids)
    return replaced(table, weight=_some_rows(table.weight, found.ids, found.trains))


@dataclass(frozen=True)
class RowOptimizer:
    """Trains the rows of one table by batch, and the rest of a model as ever.

    Args:
        rows: The optax transformation for touched rows; see the module for what that means
            to one with a memory. It is given the rows as one array.
        table: Where in the model the ``Embedding`` or ``EmbeddingBag`` is; the model itself
            if it is one. For an ``EmbeddingLayer``: ``lambda layer: layer.token``.
        rest: The optax transformation for every other real array; None leaves them as
            they are.
    """

    rows: Any
    table: Callable[[Any], Table] = lambda model: model
    rest: Any = None

    def init(self, model: PyTree) -> RowState:
        """Return the state to begin with; it has the table's size if the optimizer's has.

        Args:
            model: What will be trained.
        """
        rest = None
        if self.rest is not None:
            rest = self.rest.init(eqx.filter(self._without(model), eqx.is_inexact_array))
        return RowState(self.rows.init(self.table(model).weight), rest)

    def value_and_grad(
        self, loss: Callable[..., Any], ids: Ids, *, has_aux: bool = False
    ) -> Callable[..., tuple[Any, PyTree]]:
        """Return a function of a model and more to a loss and its gradients, by row.

        The loss is given a model with :func:`touched` rows in place of its table, so its
        code stays what it is.

        Args:
            loss: A function of a model and anything else to a number, and something more
                if ``has_aux``.
            ids: The ids that the loss looks up, all of them.
            has_aux: As in :func:`equinox.filter_value_and_grad`.
        """

        def of(model: PyTree, *args: Any, **options: Any) -> tuple[Any, PyTree]:
            small = eqx.tree_at(self.table, model, touched(self.table(model), ids))
            made = eqx.filter_value_and_grad(loss, has_aux=has_aux)
            value, grads = made(small, *args, **options)
            rows = SomeRows(self._weight(small).ids, self._weight(grads).values)
            return value, eqx.tree_at(self._weight, grads, rows)

        return of

    def update(
        self, gradients: PyTree, state: RowState, model: PyTree
    ) -> tuple[PyTree, RowState]:
        """Return the model and the state after one step.

        Args:
            gradients: From :meth:`value_and_grad`.
            state: From :meth:`init`, or from the step before.
            model: As it was when the gradients were taken.
        """
        gradient, weight = self._weight(gradients), self._weight(model)
        weight, rows = self._stepped(gradient, state.rows, weight)
        rest = state.rest
        if self.rest is not None:
            others = eqx.filter(self._without(model), eqx.is_inexact_array)
            updates, rest = self.rest.update(self._without(gradients), rest, others)
            model = eqx.apply_updates(model, updates)
        return eqx.tree_at(self._weight, model, weight), RowState(rows, rest)

    def _weight(self, model: PyTree) -> Any:
        return self.table(model).weight

    def _without(self, model: PyTree) -> PyTree:
        return eqx.tree_at(self._weight, model, None)

    def _stepped(
        self, gradient: SomeRows, state: PyTree, weight: Float[Array, "rows width"]
    ) -> tuple[Float[Array, "rows width"], PyTree]:
        """Return the table and the state after a step on the rows of ``gradient``."""
        at, axes = gradient.ids, _row_axes(self.rows, weight)
        rows = _taken(weight, 0, at=at)
        few = jax.tree.map(lambda leaf, axis: _taken(leaf, axis, at=at), state, axes)
        updates, few = self.rows.update(gradient.values, few, rows)
        new = eqx.apply_updates(rows, updates)
        state = jax.tree.map(partial(_put, at=at), state, axes, few)
        return _put(weight, 0, new, at=at), state


@partial(jax.jit, inline=True)
def _some_rows(weight: Array, ids: Array, trains: Array | None) -> SomeRows:
    """Return the rows of the ids that are to be trained."""
    beyond = weight.shape[0]
    ids = ids if trains is None else jnp.where(trains, ids, beyond)
    unique = _each_once(ids.reshape(-1), beyond=beyond)
    return SomeRows(unique, _taken(weight, 0, at=unique))


def _each_once(ids: Int32[Array, " n"], *, beyond: int) -> Int32[Array, " rows"]:
    """Return the ids below ``beyond``, ascending, each once, and then what is no id."""
    if ids.size == 0:
        return jnp.array([beyond], jnp.int32)
    unique = jnp.unique(ids, size=ids.size, fill_value=beyond)
    steps = jnp.arange(ids.size, dtype=jnp.int32)
    return jnp.where(unique < beyond, unique, beyond + steps)


def _row_axes(transformation: Any, weight: Float[Array, "rows width"]) -> PyTree:
    """Return which axis of each array of a state counts rows, -1 where none does."""
    rows, width = weight.shape

    def shapes(rows: int) -> PyTree:
        table = jax.ShapeDtypeStruct((rows, width), weight.dtype)
        return jax.eval_shape(transformation.init, table)

    def axis(one: Any, other: Any) -> int:
        pairs = zip(one.shape, other.shape, strict=True)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), -1)

    # What grows with the table has a row for each of its rows.
    return jax.tree.map(axis, shapes(rows), shapes(rows + 1))


def _taken(leaf: Any, axis: int, *, at: Int32[Array, " rows"]) -> Any:
    if axis < 0:
        return leaf
    where = (*(slice(None),) * axis, at)
    return leaf.at[where].get(mode="fill", fill_value=0, **_PLACES)


def _put(leaf: Any, axis: int, new: Any, *, at: Int32[Array, " rows"]) -> Any:
    if axis < 0:
        return new
    where = (*(slice(None),) * axis, at)
    return leaf.at[where].set(new.astype(leaf.dtype), mode="drop", **_PLACES)
