"""Base class of the row optimizers for NumPy layers; see :mod:`firstlayer.optim`."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec

import numpy as np

from .. import kernels
from .._check import (
    check_real,
    ids_in_range,
    integers,
    not_masked,
    not_negative,
    one_of,
)
from .._interrupts import held_interrupts
from ..embeddings.row_gradient import RowGradient
from .rule import MODES, RowOptions
from .saved_state import check_stored_step, checked_step
from .table_state import TableState

# Names in a layer's gradients that are inputs, not parameters.
INPUTS = frozenset({
    "x", "inputs_embeds", "per_sample_weights", "q", "k", "scores", "hidden", "memory",
    "tokens",
})  # fmt: skip

P = ParamSpec("P")
Constructor = Callable[Concatenate[Any, Any, P], None]


def with_options(
    options_class: Callable[P, RowOptions],
) -> Callable[[Callable[..., None]], Constructor[P]]:
    """Make a constructor ``(self, layer, options)`` take the options as its arguments.

    Its signature, for tools and for type checkers, lists the fields of ``options_class``.
    """

    def decorate(constructor: Callable[..., None]) -> Constructor[P]:
        @functools.wraps(constructor)
        def __init__(self: Any, layer: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            constructor(self, layer, options_class(*args, **kwargs))

        signature = options_class.constructor_signature("self", "layer")  # pyright: ignore
        __init__.__signature__ = signature  # pyright: ignore
        return __init__

    return decorate


class RowOptimizer:
    """Base class of the row optimizers for NumPy layers.

    ``mode`` is ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`. With
    ``stochastic_rounding``, updated rows of bfloat16 tables are rounded up or down at
    random, the nearer value with the higher probability, so that updates too small for
    bfloat16 are kept on average. Repeated runs round the same way.

    Args:
        layer: Layer whose parameters are trained.
        options: Arguments of the optimizer. The attribute ``options`` is a dictionary of
            the hyperparameters, which may be changed between steps.

    Example:
        >>> from firstlayer.numpy import Embedding
        >>> from firstlayer.optim import RowSGD
        >>> optimizer = RowSGD(Embedding(5, 2, rng=0), lr=0.1)
        >>> optimizer.options["lr"] = 0.05
        >>> isinstance(optimizer, RowOptimizer)
        True
    """

    def __init__(self, layer: Any, options: RowOptions) -> None:
        if not hasattr(layer, "embeddings"):
            got = type(layer).__name__
            raise TypeError(f"layer must be a layer of firstlayer.numpy, got {got}")
        kernels.require_compiler(type(self).__name__)
        self.mode = one_of("mode", options.mode, MODES)
        self.rule = options.rule_class(lazy=self.mode == "lazy")
        self.options = options.hyperparameters()
        self.rule.check(self.options)
        self._tables, self._parameters = layer.embeddings(), layer.parameters()
        for name, value in self._parameters.items():
            if not value.flags.writeable:
                raise ValueError(f"{name} must be writable to be trained, got it read-only")
            if name not in self._tables and not value.flags.c_contiguous:
                # A step would change a copy of it.
                rule = "must be C-contiguous to be trained"
                raise ValueError(f"{name} {rule}, got strides {value.strides}")
        self.stochastic_rounding = options.stochastic_rounding
        if self.stochastic_rounding:
            check_rounding(value.dtype.name for value in self._parameters.values())
        #: State of each parameter, by name.
        self.table_states = {name: self._new_table_state(name) for name in self._parameters}
        #: Averages of the parameters (:class:`firstlayer.optim.AveragedRows`).
        self.averages: weakref.WeakSet[Any] = weakref.WeakSet()
        self._attach()

    @property
    def lr(self) -> float:
        """Learning rate. Schedules set it."""
        return self.options["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        self.options["lr"] = value

    def step(self, grads: Mapping[str, RowGradient | np.ndarray]) -> None:
        """Take a step with the gradients that a layer's ``pull(dy)`` returned.

        Parameters without a gradient do not change, as in torch. Gradients of the layer's
        inputs are ignored. Nothing changes if a gradient is invalid. Ctrl-C during the
        step is raised when the step is done. After a KeyboardInterrupt, either nothing has
        changed or the step is complete and every ``table_states[name].step_count`` of a
        name in ``grads`` is larger by one.

        Args:
            grads: For each name, a row gradient or an array of the parameter's shape.

        Example:
            >>> from firstlayer.numpy import Embedding
            >>> from firstlayer.optim import RowSGD
            >>> layer = Embedding(weight=np.ones((5, 1)))
            >>> optimizer = RowSGD(layer, lr=0.5)
            >>> vectors, pull = layer.vjp([3])
            >>> optimizer.step(pull(np.ones_like(vectors)))
            >>> layer.weight.ravel().tolist()
            [1.0, 1.0, 1.0, 0.5, 1.0]
        """
        if not isinstance(grads, Mapping):
            got = type(grads).__name__
            raise TypeError(f"grads must be the gradients by name of pull(dy), got {got}")
        own = {name: grad for name, grad in grads.items() if name in self.table_states}
        unknown = sorted(grads.keys() - own.keys() - INPUTS)
        if unknown:
            raise ValueError(f"grads must be of {sorted(self.table_states)}, got {unknown}")
        steps = [self._checked_gradient(name, grad) for name, grad in own.items()]
        with held_interrupts():
            for state, ids, values in steps:
                state.step(ids, values, options=self.options)

    def flush(self) -> None:
        """Bring every row up to date, as reading ``layer.weight`` does.

        Example:
            >>> from firstlayer.numpy import Embedding
            >>> from firstlayer.optim import RowAdamW
            >>> layer = Embedding(weight=np.ones((2, 1)))
            >>> optimizer, array = RowAdamW(layer, lr=0.5, weight_decay=1.0), layer.weight
            >>> vectors, pull = layer.vjp([0])
            >>> optimizer.step(pull(vectors))
            >>> float(array[1, 0])  # stale
            1.0
            >>> optimizer.flush()
            >>> float(array[1, 0])
            0.5
        """
        for state in self.table_states.values():
            state.catch_up()

    def resize_rows(self, name: str, kept_ids: Any, new_rows: int = 0) -> None:
        """Make the state of a table follow a change of its rows.

        Call it after the table was resized, pruned or reordered, as by ``layer.resize``.
        Kept rows keep their state, their averages and the steps they have missed; new rows
        start with the initial state, like the rows of a new table.

        Args:
            name: Name of the table among the layer's parameters.
            kept_ids: For each of the first rows, its number before the change.
            new_rows: Number of rows after these.

        Example:
            >>> from firstlayer.numpy import Embedding
            >>> from firstlayer.optim import RowAdamW
            >>> layer = Embedding(4, 2, rng=0)
            >>> optimizer = RowAdamW(layer)
            >>> changes = layer.resize(6)
            >>> optimizer.resize_rows("weight", changes.kept, len(changes.added))
        """
        self._check_table_name(name)
        state = self.table_states[name]
        bound = "the number of rows before"
        kept = ids_in_range(kept_ids, state.shape[0], name="kept_ids", bound=bound)
        kept, owner = kept.reshape(-1), self._tables[name]
        num_rows = kept.size + not_negative("new_rows", new_rows)
        # Not the property of the layer, which would catch up a table of another size.
        weight = state.table()
        if len(weight) != num_rows:
            raise ValueError(
                f"kept_ids and new_rows must add up to the {len(weight)} rows of the "
                f"table, got {kept.size} + {new_rows}"
            )
        with held_interrupts():
            state.resize_rows(kept, num_rows, self.options)
            self._parameters[name] = owner.stored_weight
            for averaged in self.averages:
                averaged._resize_rows(name, kept)

    def reset_rows(self, name: str, rows: Any) -> None:
        """Give rows of a table the state of new rows.

        Call it after rows were given new values that belong to something else, such as
        another id. :class:`firstlayer.numpy.GrowingEmbedding` does so itself.

        Args:
            name: Name of the table among the layer's parameters.
            rows: Rows with new values.

        Example:
            >>> from firstlayer.numpy import Embedding
            >>> from firstlayer.optim import RowAdamW
            >>> layer = Embedding(4, 2, rng=0)
            >>> optimizer = RowAdamW(layer)
            >>> layer.weight[3] = 0.5
            >>> optimizer.reset_rows("weight", [3])
        """
        self._check_table_name(name)
        state = self.table_states[name]
        state.reset_rows(ids_in_range(rows, state.shape[0], name="rows").reshape(-1))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Bring every row up to date and return copies of the state's arrays.

        Keys are ``"{parameter}.{array}"`` and ``"{parameter}.step"``. The state of a table
        on disk is in its store: only its step is returned, and its rows may stay stale.

        Example:
            >>> from firstlayer.numpy import Embedding
            >>> from firstlayer.optim import RowAdamW
            >>> layer = Embedding(5, 2, rng=0)
            >>> state = RowAdamW(layer, lr=0.1).state_dict()
            >>> RowAdamW(layer, lr=0.1).load_state_dict(state)
        """
        arrays = {}
        for name, state in self.table_states.items():
            arrays[f"{name}.step"] = np.array(state.step_count)
            if state.stored is not None:
                continue
            state.catch_up()
            for key, array in state.state.items():
                arrays[f"{name}.{key}"] = array.copy()
        return arrays

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a state. Nothing changes if it does not fit."""
        loaded = {name: self._loaded(name, state) for name in self.table_states}
        with held_interrupts():
            for name, table_state in self.table_states.items():
                if loaded[name] is not table_state:
                    table_state.catch_up()
                    for average in table_state.averages:
                        loaded[name].attach_average(average)
            self.table_states |= loaded
            self._attach()

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter; its table state may have another."""
        state = self.table_states[name]
        return state.shape if name in self._tables else self._parameters[name].shape

    def _check_table_name(self, name: str) -> None:
        if name not in self._tables:
            raise ValueError(
                f"name must be of a table, {sorted(self._tables)}, got {name!r}"
            )

    def _new_table_state(
        self, name: str, state: dict[str, np.ndarray] | None = None, *, step: int = 0
    ) -> TableState:
        is_bfloat16 = self._parameters[name].dtype.name == "bfloat16"
        return TableState(
            self.rule,
            self._table(name),
            options=self.options,
            stochastic_rounding=self.stochastic_rounding and is_bfloat16,
            state=state,
            step=step,
            store=getattr(self._tables.get(name), "store", None),
        )

    def _table(self, name: str) -> Callable[[], np.ndarray]:
        if name in self._tables:
            # The layer refers to its TableState; a strong reference back would be a cycle.
            owner = weakref.proxy(self._tables[name])
            return lambda: owner.stored_weight
        # Other parameters are treated as one row, or as one row per entry if the rule has
        # one number per row.
        array, shape = self._parameters[name], (1, -1)
        if self.rule.state_width(2) == 1:
            shape = (-1, 1)
        return lambda: array.reshape(shape)

    def _attach(self) -> None:
        """Put the states on the layers, which catch up with them before they read rows."""
        for name, owner in self._tables.items():
            known = owner.table_state
            if known is not None and known is not self.table_states[name]:
                known.catch_up()
            owner.table_state = None if self.rule.lazy else self.table_states[name]
            owner.optimizer_state = self.table_states[name]

    def _checked_gradient(
        self, name: str, grad: RowGradient | np.ndarray
    ) -> tuple[TableState, np.ndarray | None, np.ndarray]:
        """Return the arguments of a parameter's step; raise if the step would."""
        state, is_table = self.table_states[name], name in self._tables
        shape = state.shape if is_table else self._parameters[name].shape
        if isinstance(grad, RowGradient):
            grad = grad.current()
            if not is_table or np.shape(grad.values)[1:] != shape[1:]:
                raise ValueError(
                    f"grads[{name!r}] must be for rows of {shape}, "
                    f"got values of shape {np.shape(grad.values)}"
                )
            values = np.asarray(grad.values)
            ids = integers(grad.ids, name=f"grads[{name!r}].ids")
            if ids.shape != values.shape[:1]:
                raise ValueError(
                    f"grads[{name!r}] must have an id for each of {len(values)} rows, "
                    f"got ids of shape {ids.shape}"
                )
            # A copy: another thread may change the ids after the check.
            ids = ids.astype(np.int64)
        else:
            if np.shape(not_masked(grad, name=f"grads[{name!r}]")) != shape:
                raise ValueError(
                    f"grads[{name!r}] must have shape {shape}, got {np.shape(grad)}"
                )
            ids, values = None, np.asarray(grad).reshape(state.shape)
        check_real(values, name=f"grads[{name!r}]")
        ids_name = f"grads[{name!r}].ids"
        state.check_step(ids, values, options=self.options, ids_name=ids_name)
        row = state.first_stale(ids)
        if row is not None:
            raise ValueError(
                f"row {row} has a gradient, but was not up to date when it was read; read "
                "it through the layer, not from an array from before the last step"
            )
        return state, ids, values

    def _loaded(self, name: str, state: Mapping[str, np.ndarray]) -> TableState:
        prefix, current = f"{name}.", self.table_states[name].state
        saved = {
            key.removeprefix(prefix)
            for key in state
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
        required = self.rule.initial_state(self.options).keys() | current.keys()
        if saved == {"step"} and self.table_states[name].stored is not None:
            table_state = self.table_states[name]
            check_stored_step(table_state, state[f"{name}.step"], name=f"{name}.step")
            return table_state
        if "step" not in saved or saved - {"step"} != required:
            expected = sorted(prefix + key for key in ("step", *required))
            got = sorted(prefix + key for key in saved)
            raise ValueError(f"state must have {expected}, got {got}")
        step = checked_step(f"{name}.step", state[f"{name}.step"])
        table = self.table_states[name]
        arrays = {}
        for key in required:
            array = np.asarray(state[prefix + key])
            check_real(array, name=prefix + key, whole=False)
            if array.shape != table.state_shape:
                raise ValueError(
                    f"{prefix}{key} must have shape {table.state_shape}, got {array.shape}"
                )
            arrays[key] = np.array(array, table.dtype, order="C")
        return self._new_table_state(name, arrays, step=step)


def check_rounding(dtypes: Iterable[str]) -> None:
    """Raise ValueError for stochastic rounding of parameters none of which is bfloat16."""
    names = sorted(set(dtypes))
    if "bfloat16" not in names:
        raise ValueError(f"stochastic_rounding needs a table in bfloat16, got {names}")
