"""Base class of the row optimizers; see :mod:`firstlayer.equinox.optim`."""

import inspect
import warnings
from collections.abc import Callable
from inspect import Parameter
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32, PyTree

from ..._check import positive
from ...optim.rule import RowOptions
from .._ids import IdsArgument, host_values
from .._lookup import check_ids
from .._module import upcast
from .._row_shards import replicate_others
from .._sharding import with_specs
from .._table import TableModule
from .._table_rows import RowSubset
from .._unique import unique_ids
from ..growing import GrowingEmbedding, host_bits
from .execution import Execution
from .missed_steps import MissedSteps
from .table_state import DetachedTable, TableState


class OptimizerState(eqx.Module):
    """State of a row optimizer, the tables included. A tree of arrays of fixed sizes.

    Args:
        step: Number of steps taken.
        tables: State of each table.
        missed: The steps that stale rows have missed; None for a rule that does not change
            rows without a gradient.
        rest: State of the other parameters.
        table_of: For each module that ``tables`` returns, the number of its table; None if
            it is not trained.
    """

    step: Int32[Array, ""]
    tables: tuple[TableState, ...]
    missed: MissedSteps | None
    rest: PyTree
    table_of: tuple[int | None, ...] = eqx.field(static=True)


class RowOptimizer:
    """Base class of the row optimizers for Equinox models.

    Args:
        lr: Learning rate: a number, or a function of the number of steps taken before, such
            as a schedule of optax. An optimizer that a transformed function creates may
            have a traced one: the function's argument, for ``jax.jit`` or ``jax.vmap``.
        tables: Function that returns the tables of a model to train by row: an
            ``Embedding``, ``EmbeddingBag`` or ``GrowingEmbedding``, or a list, tuple or
            dictionary of them. By default the model itself.
        rest: The optax transformation for all other floating-point arrays. By default they
            are updated densely by the same rule.
        mask: Tree of booleans with the structure of the model or a prefix of it, or a
            function from the model to one. Arrays where it is False are not updated.
        max_missed_steps: Number of steps after which every row is caught up, in one pass
            over the tables within the compiled step.
        options: Other hyperparameters of the rule, under torch's names.

    Example:
        >>> from firstlayer.equinox import Embedding, optim
        >>> optimizer = optim.RowSGD(0.5)
        >>> model, state = optimizer.init(Embedding(weight=jnp.ones((5, 1))))
        >>> rows = optimizer.gather(model, state, jnp.array([3]))
        >>> grads = eqx.filter_grad(lambda rows: rows(jnp.array([3])).sum())(rows)
        >>> model, state = optimizer.update(grads, state, rows)
        >>> optimizer.flush(model, state).weight.ravel().tolist()
        [1.0, 1.0, 1.0, 0.5, 1.0]
    """

    _options_class: ClassVar[type[RowOptions]]
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        own = inspect.signature(RowOptimizer.__init__).parameters.values()
        own = [parameter for parameter in own if parameter.kind is Parameter.KEYWORD_ONLY]
        general = RowOptions.__annotations__
        options = inspect.signature(cls._options_class).parameters.values()
        options = [option for option in options if option.name not in general]
        cls.__signature__ = inspect.Signature([*options, *own])

    def __init__(
        self,
        *lr: Any,
        tables: Callable[[Any], Any] = lambda model: model,
        rest: Any = None,
        mask: PyTree | Callable[[Any], PyTree] = None,
        max_missed_steps: int = 1024,
        **options: Any,
    ) -> None:
        for name in options.keys() - type(self).__signature__.parameters.keys():
            raise TypeError(f"{type(self).__name__} has no argument {name!r}")
        self.execution = Execution(self._options_class(*lr, **options))
        self.tables, self.rest, self.mask = tables, rest, mask
        self.max_missed_steps = positive("max_missed_steps", max_missed_steps)

    def init(self, model: PyTree) -> tuple[PyTree, OptimizerState]:
        """Return the model without its tables, and the state, which holds them.

        Nothing is copied. Modules whose tables are one array share that table.

        Args:
            model: The model to train.
        """
        modules, owners, weights = self._modules(model), [], []
        is_trained = [one.weight is not None for one in self._modules(self._masked(model))]
        for module, trained in zip(modules, is_trained, strict=True):
            if trained and not any(module.weight is weight for weight in weights):
                owners.append(module)
                weights.append(module.weight)
        numbers = [_index_of(module.weight, weights) for module in modules]
        model = self._with_weights(
            model,
            [
                module.weight if number is None else DetachedTable.of(module.weight)
                for module, number in zip(modules, numbers, strict=True)
            ],
        )
        _check_not_shared(model, weights)
        others = self._others(model)
        dense = self.execution.init_dense if self.rest is None else self.rest.init
        state = OptimizerState(
            step=jnp.zeros((), jnp.int32),
            tables=tuple(TableState.of(owner, self.execution) for owner in owners),
            missed=MissedSteps.of(self.execution, size=self.max_missed_steps),
            rest=dense(others),
            table_of=tuple(numbers),
        )
        for owner in owners:
            if owner.sharding is not None:
                state = replicate_others(state, owner.sharding)
        return model, state

    def gather(self, model: PyTree, state: OptimizerState, ids: Any) -> PyTree:
        """Return the model with only the rows of ``ids`` in its tables, caught up.

        Lookups of these ids give the same result as with the complete table, bags, padding
        and ``max_norm`` included; other ids are NaN. Gradients have the size of these rows.

        Args:
            model: From :meth:`init` or :meth:`update`.
            state: The state that was returned with it.
            ids: All ids that will be looked up, of any shape; for several tables in the
                structure that ``tables`` returns. None instead of ids gives the complete
                table. Traced ids out of range, such as -1, have no row: they fill up
                batches of a fixed size.
        """
        modules = self._modules(model)
        self._check_state(state)
        _check_detached(modules, state)
        ids = self._ids_of_modules(model, ids)
        weights = [module.weight for module in modules]
        for number, table in enumerate(state.tables):
            own = [i for i, at in enumerate(state.table_of) if at == number]
            new = self._gather_table(table, state, {i: (modules[i], ids[i]) for i in own})
            for i, weight in new.items():
                weights[i] = weight
        return self._with_weights(model, weights)

    def update(
        self, gradients: PyTree, state: OptimizerState, model: PyTree
    ) -> tuple[PyTree, OptimizerState]:
        """Return the model without its tables, and the state, after one step.

        Args:
            gradients: Gradients of ``model``, as from ``eqx.filter_grad``. Other parameters
                whose gradient is None do not change.
            state: The state that ``model`` was gathered from.
            model: From :meth:`gather` or :meth:`flush`.
        """
        self._check_state(state)
        execution, step, missed = self.execution, state.step, state.missed
        values = execution.step_values(step + 1)
        modules, slopes = self._modules(model), self._modules(gradients)
        tables, weights = [], [module.weight for module in modules]
        for number, table in enumerate(state.tables):
            own = [i for i, at in enumerate(state.table_of) if at == number]
            rows = [_without_padding(modules[i], weights[i]) for i in own]
            for row in rows:
                _check_gathered(row)
            given = [_without_padding(modules[i], slopes[i].weight) for i in own]
            gradient = _sum_of_gradients(given, rows)
            args = gradient, execution, missed, step
            if isinstance(rows[0], RowSubset):
                table = table.update(rows[0], *args)
            else:
                _warn_dense(table)
                table = table.update_all(rows[0], *args)
            tables.append(table)
            for i in own:
                weights[i] = DetachedTable.of(table.weight)
        step = step + 1
        if missed is not None:
            missed = missed.record(execution, values, step)
            is_full = missed.is_full(step)
            tables = [
                table.catch_up(execution, missed, step, when=is_full) for table in tables
            ]
            missed = missed.restart(execution, step, when=is_full)
        model = self._with_weights(model, weights)
        slopes = self._with_weights(gradients, weights)
        model, rest = self._update_rest(slopes, state.rest, model, values)
        return model, OptimizerState(step, tuple(tables), missed, rest, state.table_of)

    def assign(
        self, model: PyTree, state: OptimizerState, ids: Any
    ) -> tuple[Any, OptimizerState]:
        """Give rows of growing tables to new ids, on the host, and return the rows of ids.

        New rows start with the initial state, like the rows of a new table. The arrays of
        ``state`` are donated: only the returned state is valid afterwards.

        Args:
            model: From :meth:`init` or :meth:`update`.
            state: The state that was returned with it.
            ids: All ids of a step, in the structure that ``tables`` returns. Ids of layers
                other than ``GrowingEmbedding`` are returned as they are.

        Returns:
            Rows in the structure of ``ids``, to look up with ``layer.table(rows)`` and to
            pass to :meth:`gather`, and the state.

        Example:
            >>> from firstlayer.equinox import GrowingEmbedding
            >>> from firstlayer.equinox.optim import RowAdamW
            >>> optimizer = RowAdamW(0.1)
            >>> layer, state = optimizer.init(GrowingEmbedding(100, 4))
            >>> rows, state = optimizer.assign(layer, state, [2**40, 7, 2**40])
            >>> rows.tolist()
            [1, 2, 1]
            >>> optimizer.gather(layer, state, rows).table(rows).shape
            (3, 4)
        """
        layers, structure = jax.tree.flatten(self.tables(model), is_leaf=_is_module)
        self._check_state(state)
        _check_detached(self._modules(model), state)
        rows, tables = self._ids_of_modules(model, ids), list(state.tables)
        for i, (layer, number) in enumerate(zip(layers, state.table_of, strict=True)):
            if isinstance(layer, GrowingEmbedding) and number is not None:
                assigned = layer.id_map.assign(host_bits(rows[i]))
                rows[i] = assigned.rows.astype(jnp.int32)
                if assigned.new_rows.size:
                    table = tables[number]
                    new = layer.new_rows(assigned, table.weight.dtype)
                    arguments = *new, self.execution, state.step
                    tables[number] = _reset_rows(arguments, table)
        state = eqx.tree_at(lambda one: one.tables, state, tuple(tables))
        return jax.tree.unflatten(structure, rows), state

    def flush(self, model: PyTree, state: OptimizerState) -> PyTree:
        """Return the complete model, with every row caught up.

        The state stays valid, so that training can go on from it. Tables are copied if they
        have stale rows, unless buffers are donated.

        Args:
            model: From :meth:`init` or :meth:`update`.
            state: The state that was returned with it.
        """
        nothing = jax.tree.map(lambda _: None, self.tables(model), is_leaf=_is_module)
        return self.gather(model, state, nothing)

    def _check_state(self, state: OptimizerState) -> None:
        """Raise an error unless a state is one of this optimizer."""
        if not isinstance(state, OptimizerState):
            raise TypeError(f"state must be that of init, got {type(state).__name__}")
        for table in state.tables:
            table.check(self.execution)
        if state.missed is not None:
            state.missed.check(self.execution)

    def _gather_table(
        self,
        table: TableState,
        state: OptimizerState,
        users: dict[int, tuple[TableModule, Any]],
    ) -> dict[int, Any]:
        """Return the weight of each module that uses a table.

        Args:
            table: The table.
            state: State of the optimizer.
            users: Modules and the ids that they look up, by number.
        """
        execution, missed, step = self.execution, state.missed, state.step
        if any(ids is None for _, ids in users.values()):
            pending = host_values(step - table.caught_up)
            if pending is None or pending:
                table = table.catch_up(execution, missed, step)
            return dict.fromkeys(users, table.weight)
        end = len(table.row_steps)
        arguments = [module._check_ids(ids) for module, ids in users.values()]

        def ids_of(arguments: list[IdsArgument]) -> Int32[Array, " n"]:
            looked_up = []
            for (module, _), argument in zip(users.values(), arguments, strict=True):
                checked = check_ids(argument, module.weight, module._options())
                ids = checked.ids.reshape(-1)
                if checked.valid is not None:
                    ids = jnp.where(checked.valid.reshape(-1), ids, end)
                looked_up.append(ids)
                if module.padding_idx is not None:
                    looked_up.append(jnp.array([module.padding_idx], jnp.int32))
            return unique_ids(jnp.concatenate(looked_up), end=end)

        ids = with_specs(ids_of, arguments, specs=PartitionSpec(None))
        subset = RowSubset(ids, table.gather(ids, execution, missed, step))
        return {i: _with_padding(module, subset) for i, (module, _) in users.items()}

    def _update_rest(
        self, gradients: PyTree, state: PyTree, model: PyTree, values: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the model and the state of its other parameters after a step."""
        others, slopes = self._others(model), self._masked(gradients)
        if self.rest is not None:
            updates, state = self.rest.update(slopes, state, others)
            return eqx.apply_updates(model, updates), state
        others, state = self.execution.update_dense(values, others, slopes, state)
        return eqx.combine(others, model), state

    def _modules(self, model: PyTree) -> list[Any]:
        """Return the modules with a table, each of them once for each place."""
        modules = jax.tree.leaves(self.tables(model), is_leaf=_is_module)
        modules = [
            module.table if isinstance(module, GrowingEmbedding) else module
            for module in modules
        ]
        for module in modules:
            if not isinstance(module, TableModule):
                raise TypeError(
                    "tables must return an Embedding or EmbeddingBag, or a list, tuple or "
                    f"dictionary of them, got {type(module).__name__}"
                )
        return modules

    def _with_weights(self, model: PyTree, weights: list[Any]) -> PyTree:
        def where(model: PyTree) -> list[Any]:
            return [module.weight for module in self._modules(model)]

        return eqx.tree_at(where, model, weights, is_leaf=lambda node: node is None)

    def _ids_of_modules(self, model: PyTree, ids: Any) -> list[Any]:
        structure = jax.tree.structure(self.tables(model), is_leaf=_is_module)
        try:
            return structure.flatten_up_to(ids)
        except ValueError as error:
            raise ValueError(
                f"ids must have the structure that tables returns: {error}"
            ) from error

    def _others(self, model: PyTree) -> PyTree:
        """Return the floating-point arrays to update besides the tables."""
        return eqx.filter(self._masked(model), eqx.is_inexact_array)

    def _masked(self, model: PyTree) -> PyTree:
        """Return a tree of the model's structure without the arrays that are masked."""
        mask = self.mask
        if mask is None:
            return model
        # A module of booleans may be callable too.
        if callable(mask) and not isinstance(mask, eqx.Module):
            mask = mask(model)
        return eqx.filter(model, mask)


@eqx.filter_jit(donate="all-except-first")
def _reset_rows(
    arguments: tuple[Any, Any, Execution, Array], table: TableState
) -> TableState:
    return table.reset_rows(*arguments)


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def _index_of(weight: Any, weights: list[Any]) -> int | None:
    return next((i for i, other in enumerate(weights) if other is weight), None)


def _with_padding(module: TableModule, subset: RowSubset) -> RowSubset:
    """Return a subset with the padding row of ``module`` as its last row, if it has one."""
    if module.padding_idx is None:
        return subset
    index, _ = subset.find(jnp.array([module.padding_idx], jnp.int32))
    # RowSubset expects the padding row under a number that is not an id.
    last = jnp.array([module.num_embeddings + subset.ids.size], jnp.int32)
    rows = jnp.concatenate([subset.values, subset.values[index]])
    return RowSubset(jnp.append(subset.ids, last), rows)


def _without_padding(module: TableModule, weight: Any) -> Any:
    """Undo :func:`_with_padding`, for rows or their gradients."""
    if module.padding_idx is None or not isinstance(weight, RowSubset):
        return weight
    return jax.tree.map(lambda array: array[:-1], weight)


def _sum_of_gradients(gradients: list[Any], rows: list[Any]) -> Array:
    """Return the gradient of a table's rows, summed over the modules that use it."""
    for gradient, own in zip(gradients, rows, strict=True):
        given, wanted = jax.tree.leaves(gradient), jax.tree.leaves(own)[-1]
        if len(given) != 1 or given[0].shape != wanted.shape:
            raise ValueError(
                f"gradients must be those of the model, of shape {wanted.shape} for its "
                f"table, got {[leaf.shape for leaf in given]}"
            )
    first, *others = (upcast(jax.tree.leaves(gradient)[0]) for gradient in gradients)
    return sum(others, first)


def _check_detached(modules: list[Any], state: OptimizerState) -> None:
    """Raise ValueError unless the model and the state were returned together."""
    given = [
        module.weight.shape if isinstance(module.weight, DetachedTable) else None
        for module in modules
    ]
    wanted = [None if i is None else state.tables[i].weight.shape for i in state.table_of]
    if given != wanted:
        raise ValueError(
            "model must be the one that init or update returned with the state, whose "
            f"tables are {wanted}, got a model without its tables {given}"
        )


def _check_gathered(weight: Any) -> None:
    """Raise ValueError unless the weight of a model has rows to update."""
    if isinstance(weight, DetachedTable):
        raise ValueError(
            "model must be the one that gather or flush returned, got one whose table of "
            f"shape {weight.shape} is in the state"
        )


def _check_not_shared(model: PyTree, weights: list[Any]) -> None:
    """Raise ValueError if a table is in a place of the model that ``tables`` leaves out."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if any(leaf is weight for weight in weights):
            place = jax.tree_util.keystr(path)
            raise ValueError(
                f"model{place} must not be the array of a table, unless tables returns "
                "its layer too; a layer that multiplies by the table is "
                "embedding.logits"
            )


def _warn_dense(table: TableState) -> None:
    warnings.warn(
        f"a table of shape {table.weight.shape} has a gradient for every row, so the step "
        "costs as much as a dense one; to keep it sparse, gather the ids of the batch and "
        "of sampled candidates, and compute the logits of those rows only",
        stacklevel=3,
    )
