"""Lazy row updates: optax steps on only the rows of a table that a batch uses.

**The updates are lazy, not exact.** Rows without a gradient do not move; this differs from
the dense optimizer, which moves every row in every step. Moments of such a row do not
decay, momentum does not move it, and weight decay does not shrink it. The trained weights
therefore differ from those of a dense optimizer: after 300 steps of AdamW on ids with a
Zipf distribution, rare rows differ by as much as dense updates move them. The row
optimizers of :mod:`firstlayer.equinox.optim` are exact instead. Lazy is the rule of
``torch.optim.SparseAdam`` and TensorFlow's ``LazyAdam``. Step counts, for bias correction
and schedules, count every step. SGD without momentum and Adagrad do not move rows without a
gradient anyway, so they give the same result as dense updates.

JAX has no sparse gradients: the gradient of a table has the size of the table, and a dense
optimizer reads and writes all of its rows and moments. Here the rows of a batch are
gathered first, and the loss is differentiated with respect to those rows alone:

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

Donate the model and the state: otherwise XLA copies the table and its moments in every
step.

Quantities that an optimizer computes across rows are computed across the rows of the batch.
``optax.clip_by_global_norm`` still gets the norm of the complete gradient, because all
other rows are zero; the trust ratio of LAMB differs. Adafactor is not supported, because
part of its state is per column; nor is ``optax.MultiSteps``, which would need the rows of
earlier batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PyTree

from .._array import axis_specs
from ._ids import IdsArgument, host_values
from ._lookup import LookupOptions, check_ids
from ._module import compiled, replace_fields
from ._row_copies import read_rows, write_rows
from ._sharding import Spec, with_sharding
from ._table import Ids, TableModule
from ._table_rows import RowSubset
from ._unique import INDEX_HINTS, unique_ids

AnyTable = TypeVar("AnyTable", bound=TableModule)


class RowState(NamedTuple):
    """State of a :class:`RowOptimizer`.

    Args:
        rows: Optimizer state of the table, for all of its rows.
        rest: Optimizer state of the other parameters, or None.
    """

    rows: PyTree
    rest: PyTree


def touched(table: AnyTable, ids: Ids) -> AnyTable:
    """Return a layer that holds only the rows of ``ids``.

    Lookups of these ids give the same result as with the complete table, bags and
    ``max_norm`` included, and gradients have the size of these rows. An id without a row is
    a NaN row. ``weight.ids`` are the ids of the rows.

    Args:
        table: An ``Embedding`` or ``EmbeddingBag``.
        ids: All ids that will be looked up, of any shape. Repeated ids share a row. The
            padding row is always included.

    Example:
        >>> from firstlayer.equinox import Embedding
        >>> table = Embedding(50, 2, key=jax.random.key(0))
        >>> small = touched(table, [7, 3, 7])
        >>> small.weight.ids[:2].tolist(), bool((small([3, 7]) == table([3, 7])).all())
        ([3, 7], True)
    """
    if not isinstance(table, TableModule):
        raise TypeError(
            f"table must be an Embedding or EmbeddingBag, got {type(table).__name__}"
        )
    subset = _row_subset(table._options(), table.weight, table._check_ids(ids))
    return replace_fields(table, weight=subset)


@dataclass(frozen=True)
class RowOptimizer:
    """Updates the rows of one table lazily, and the rest of a model densely.

    Rows without a gradient do not move; this differs from the dense optimizer, which moves
    every row in every step. See the module for what that means for stateful optimizers.

    Args:
        rows: The optax transformation for the rows of a batch. It gets them as one array.
        table: Function that returns the ``Embedding`` or ``EmbeddingBag`` of a model; by
            default the model itself. For an ``EmbeddingLayer``: ``lambda layer:
            layer.token``.
        rest: The optax transformation for all other floating-point arrays; None does not
            update them.
    """

    rows: Any
    table: Callable[[Any], TableModule] = lambda model: model
    rest: Any = None

    def init(self, model: PyTree) -> RowState:
        """Return the initial state, which covers every row of the table.

        Args:
            model: The model to train.
        """
        rest = None
        if self.rest is not None:
            rest = self.rest.init(
                eqx.filter(self._without_weight(model), eqx.is_inexact_array)
            )
        return RowState(self.rows.init(self.table(model).weight), rest)

    def value_and_grad(
        self, loss: Callable[..., Any], ids: Ids, *, has_aux: bool = False
    ) -> Callable[..., tuple[Any, PyTree]]:
        """Return a function that computes the loss and its gradients by row.

        The loss gets a model whose table is replaced by :func:`touched`; its code does not
        change.

        Args:
            loss: Function of a model and other arguments that returns a number, or a number
                and auxiliary data if ``has_aux``.
            ids: All ids that the loss looks up.
            has_aux: As in :func:`equinox.filter_value_and_grad`.
        """

        def run(model: PyTree, *args: Any, **options: Any) -> tuple[Any, PyTree]:
            small = eqx.tree_at(self.table, model, touched(self.table(model), ids))
            differentiated = eqx.filter_value_and_grad(loss, has_aux=has_aux)
            value, grads = differentiated(small, *args, **options)
            rows = RowSubset(self._weight(small).ids, self._weight(grads).values)
            return value, eqx.tree_at(self._weight, grads, rows)

        return run

    def update(
        self, gradients: PyTree, state: RowState, model: PyTree
    ) -> tuple[PyTree, RowState]:
        """Return the model and the state after one step.

        Args:
            gradients: From :meth:`value_and_grad`.
            state: From :meth:`init`, or from the previous step. A state of other arrays is
                a ValueError before anything changes.
            model: The model that the gradients were computed for.
        """
        gradient, weight = self._weight(gradients), self._weight(model)
        others = eqx.filter(self._without_weight(model), eqx.is_inexact_array)
        _check_gradient(gradient, weight)
        if not isinstance(state, RowState):
            raise TypeError(f"state must be a RowState, got {type(state).__name__}")
        _check_state("state.rows", state.rows, self.rows, weight)
        if self.rest is not None:
            _check_state("state.rest", state.rest, self.rest, others)
        weight, rows = self._step_rows(gradient, state.rows, weight)
        rest = state.rest
        if self.rest is not None:
            updates, rest = self.rest.update(self._without_weight(gradients), rest, others)
            model = eqx.apply_updates(model, updates)
        return eqx.tree_at(self._weight, model, weight), RowState(rows, rest)

    def _weight(self, model: PyTree) -> Any:
        return self.table(model).weight

    def _without_weight(self, model: PyTree) -> PyTree:
        return eqx.tree_at(self._weight, model, None)

    def _step_rows(
        self, gradient: RowSubset, state: PyTree, weight: Float[Array, "rows width"]
    ) -> tuple[Float[Array, "rows width"], PyTree]:
        """Return the table and its state after a step on the rows of ``gradient``."""
        ids, axes = gradient.ids, _row_axes(self.rows, weight)
        rows = _gather(weight, 0, ids=ids)
        own = jax.tree.map(partial(_gather, ids=ids), state, axes)
        updates, own = self.rows.update(gradient.values, own, rows)
        rows = eqx.apply_updates(rows, updates)
        state = jax.tree.map(partial(_scatter, ids=ids), state, axes, own)
        return _scatter(weight, 0, rows, ids=ids), state


@partial(compiled, static_argnums=0, inline=True)
def _row_subset(options: LookupOptions, weight: Array, argument: IdsArgument) -> RowSubset:
    end, padding_idx = weight.shape[0], options.padding_idx

    def ids_of(argument: IdsArgument) -> Int32[Array, " rows"]:
        checked = check_ids(argument, weight, options)
        ids = checked.ids
        if checked.has_gradient is not None:
            ids = jnp.where(checked.has_gradient, ids, end)
        return unique_ids(ids.reshape(-1), end=end)

    ids = with_sharding(ids_of, argument, out_sharding=None, default=lambda: (None,))
    values = _gather(weight, 0, ids=ids)
    if padding_idx is not None:
        # Under a number that is not an id: the padding row is read but not updated.
        padding = _gather(weight, 0, ids=jnp.array([padding_idx], jnp.int32))
        ids = jnp.append(ids, jnp.array([end + ids.size], jnp.int32))
        values = jnp.concatenate([values, padding])
    return RowSubset(ids, values)


def _check_gradient(gradient: Any, weight: Float[Array, "rows width"]) -> None:
    if not isinstance(gradient, RowSubset):
        name = type(gradient).__name__
        raise TypeError(f"gradients must be those of value_and_grad, got {name}")
    shape, width = gradient.values.shape, weight.shape[1]
    if gradient.ids.shape != shape[:1] or shape[1:] != (width,):
        raise ValueError(
            f"gradients must have one row of width {width} for each id, "
            f"got {gradient.ids.shape} ids and rows of shape {shape}"
        )


def _check_state(name: str, state: PyTree, transformation: Any, parameters: PyTree) -> None:
    """Raise an error unless ``state`` is a state of this transformation.

    Step counts are checked if the host can read them.
    """
    wanted = jax.eval_shape(transformation.init, parameters)
    if jax.tree.structure(state) != jax.tree.structure(wanted):
        raise ValueError(f"{name} must be a state of this optimizer, got another structure")
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), want in zip(leaves, jax.tree.leaves(wanted), strict=True):
        place, shape = f"{name}{jax.tree_util.keystr(path)}", jnp.shape(leaf)
        dtype = jnp.result_type(leaf)
        if shape != want.shape:
            raise ValueError(f"{place} must have shape {want.shape}, got {shape}")
        # Optimizers may promote floats, but not turn them into integers.
        if jnp.issubdtype(dtype, jnp.inexact) != jnp.issubdtype(want.dtype, jnp.inexact):
            raise TypeError(f"{place} must be {want.dtype.name}, got {dtype.name}")
        is_count = not shape and dtype.kind == "i"
        count = host_values(leaf) if is_count else None
        if count is not None and int(count) < 0:
            raise ValueError(f"{place} must not be negative, got {int(count)}")


def _row_axes(transformation: Any, weight: Float[Array, "rows width"]) -> PyTree:
    """Return the row axis of each array of the optimizer state, -1 if it has none."""
    rows, width = weight.shape

    def shapes(rows: int) -> PyTree:
        table = jax.ShapeDtypeStruct((rows, width), weight.dtype)
        return jax.eval_shape(transformation.init, table)

    def axis(a: Any, b: Any) -> int:
        sizes = enumerate(zip(a.shape, b.shape, strict=True))
        return next((at for at, (one, other) in sizes if one != other), -1)

    # The row axis is the one that grows with the table.
    return jax.tree.map(axis, shapes(rows), shapes(rows + 1))


def _gather(leaf: Any, axis: int, *, ids: Int32[Array, " rows"]) -> Any:
    if axis < 0:
        return leaf

    def run(leaf: Array, ids: Array) -> Array:
        if axis == 0:
            return read_rows(leaf, ids)
        rows = leaf.at[(*(slice(None),) * axis, ids)]
        return rows.get(mode="fill", fill_value=0, **INDEX_HINTS)

    def default() -> Spec:
        specs = axis_specs(leaf)
        return (*specs[:axis], None, *specs[axis + 1 :])

    return with_sharding(run, leaf, ids, out_sharding=None, default=default)


def _scatter(leaf: Any, axis: int, new: Any, *, ids: Int32[Array, " rows"]) -> Any:
    if axis < 0:
        return new

    def run(leaf: Array, new: Array, ids: Array) -> Array:
        if axis == 0:
            return write_rows(leaf, ids, new)
        rows = leaf.at[(*(slice(None),) * axis, ids)]
        return rows.set(new.astype(leaf.dtype), mode="drop", **INDEX_HINTS)

    return with_sharding(
        run, leaf, new, ids, out_sharding=None, default=lambda: axis_specs(leaf)
    )
