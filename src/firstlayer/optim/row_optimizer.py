"""Row optimizers on the layers of the NumPy face; see :mod:`firstlayer.optim`."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from .._check import ids_in_range, integers, one_of
from ..embeddings.row_gradient import RowGradient
from .rule import Rule
from .table_state import TableState

Mode = Literal["exact", "lazy"]
MODES = ("exact", "lazy")
# What a layer's gradients hold beside those of its parameters.
INPUTS = ("x", "inputs_embeds", "per_sample_weights")


class RowOptimizer:
    """Base of the row optimizers for NumPy layers.

    Args:
        layer: Whose parameters are trained.
        rule: How.
        options: The rule's options, by torch's names. They may be changed between steps.
        mode: ``"exact"`` or ``"lazy"``; see the module.
        stochastic_rounding: Round bfloat16 tables up or down at random, the nearer the
            likelier, so that updates too small to be kept are kept on average. The same
            run rounds the same way.
    """

    def __init__(
        self,
        layer: Any,
        rule: Rule,
        *,
        options: dict[str, Any],
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
    ) -> None:
        one_of("mode", mode, MODES)
        rule.check(options, exact=mode == "exact")
        self.rule, self.options, self.mode = rule, options, mode
        self._tables, self._parameters = layer.embeddings(), layer.parameters()
        for name, value in self._parameters.items():
            if not value.flags.writeable:
                raise ValueError(f"{name} must be writable to be trained, got it read-only")
        self.stochastic_rounding = stochastic_rounding
        if stochastic_rounding:
            check_rounding(value.dtype.name for value in self._parameters.values())
        #: What is kept for each parameter, by name.
        self.table_state: dict[str, TableState] = {
            name: self._table_states(name) for name in self._parameters
        }
        self._hand_out()

    @property
    def lr(self) -> float:
        """The learning rate. Schedules set it."""
        return self.options["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        self.options["lr"] = value

    def step(self, grads: Mapping[str, RowGradient | np.ndarray]) -> None:
        """Take a step with what a layer's ``pull(dy)`` returned.

        Parameters without a gradient stay, as in torch. Gradients of a layer's inputs are
        passed over. Nothing is changed if a gradient does not fit.

        Args:
            grads: A row gradient, or an array of the parameter's shape, for each name.
        """
        found = {name: grad for name, grad in grads.items() if name in self.table_state}
        unknown = sorted(grads.keys() - found.keys() - set(INPUTS))
        if unknown:
            raise ValueError(f"grads must be of {sorted(self.table_state)}, got {unknown}")
        for name, grad in found.items():
            self._check(name, grad)
        for name, grad in found.items():
            table_state = self.table_state[name]
            if isinstance(grad, RowGradient):
                table_state.step(grad.ids, grad.values, options=self.options)
            else:
                table_state.step(
                    None, grad.reshape(table_state.shape), options=self.options
                )

    def flush(self) -> None:
        """Bring every row up to date, for whoever reads or writes ``weight`` itself."""
        for table_state in self.table_state.values():
            table_state.catch_up()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of the state's arrays, every row being brought up to date first.

        Names are those of a parameter and of an array, with a dot between, and ``step``.
        """
        self.flush()
        found = {}
        for name, table_state in self.table_state.items():
            found[f"{name}.step"] = np.array(table_state.now)
            for key, array in table_state.state.items():
                found[f"{name}.{key}"] = array.copy()
        return found

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from a state. Nothing is changed if it does not fit.

        Args:
            state: What :meth:`state_dict` returned.
        """
        loaded = {name: self._loaded(name, state) for name in self.table_state}
        self.flush()
        self.table_state |= loaded
        self._hand_out()

    def _table_states(
        self, name: str, state: dict[str, Any] | None = None, *, step: int = 0
    ) -> TableState:
        array = self._parameters[name]
        return TableState(
            self.rule,
            self._table(name),
            options=self.options,
            exact=self.mode == "exact",
            dither=self.stochastic_rounding and array.dtype.name == "bfloat16",
            state=state,
            step=step,
        )

    def _table(self, name: str) -> Callable[[], np.ndarray]:
        if name in self._tables:
            # The layer holds what is pending, which need not hold the layer.
            owner = weakref.proxy(self._tables[name])
            return lambda: owner.weight
        # What is no table has no rows: it is one, or an entry is one if each has a number.
        array, shape = self._parameters[name], (1, -1)
        if self.rule.width("", 2) == 1:
            shape = (-1, 1)
        return lambda: array.reshape(shape)

    def _hand_out(self) -> None:
        for name, owner in self._tables.items():
            if owner.table_state is not None:
                owner.table_state.catch_up()
            owner.table_state = self.table_state[name] if self.mode == "exact" else None

    def _check(self, name: str, grad: RowGradient | np.ndarray) -> None:
        table_state = self.table_state[name]
        shape = (
            self._parameters[name].shape if name not in self._tables else table_state.shape
        )
        if not isinstance(grad, RowGradient):
            if np.shape(grad) != shape:
                raise ValueError(
                    f"grads[{name!r}] must have shape {shape}, got {np.shape(grad)}"
                )
            row = table_state.behind()
        else:
            if name not in self._tables or grad.values.shape[1:] != shape[1:]:
                raise ValueError(
                    f"grads[{name!r}] must be for rows of {shape}, "
                    f"got values of shape {grad.values.shape}"
                )
            _check_ids(name, grad, rows=shape[0])
            row = table_state.behind(grad.ids)
        if row is not None:
            raise ValueError(
                f"row {row} was read before it was brought up to date; "
                'look it up through its layer, call flush(), or use mode="lazy"'
            )

    def _loaded(self, name: str, state: Mapping[str, np.ndarray]) -> TableState:
        mine, arrays = self.table_state[name], {}
        for key in ("step", *mine.state):
            if f"{name}.{key}" not in state:
                raise ValueError(f"state must have {name}.{key}, got {sorted(state)}")
        for key, array in mine.state.items():
            given = np.array(state[f"{name}.{key}"], array.dtype)
            if given.shape != array.shape:
                raise ValueError(
                    f"{name}.{key} must have shape {array.shape}, got {given.shape}"
                )
            arrays[key] = given
        return self._table_states(name, arrays, step=int(state[f"{name}.step"]))


def _check_ids(name: str, grad: RowGradient, *, rows: int) -> None:
    """Refuse ids that are not rows, or not each once: kernels write where they say."""
    ids = integers(grad.ids, name=f"grads[{name!r}].ids")
    if ids.shape != grad.values.shape[:1]:
        raise ValueError(
            f"grads[{name!r}] must have an id for each of {len(grad.values)} rows, "
            f"got ids of shape {ids.shape}"
        )
    if (ids[1:] <= ids[:-1]).any():
        raise ValueError(f"grads[{name!r}].ids must be ascending, each once")
    ids_in_range(ids, rows, name=f"grads[{name!r}].ids", bound="the number of rows")


def check_rounding(dtypes: Iterable[str]) -> None:
    """Refuse stochastic rounding where nothing is in bfloat16."""
    found = sorted(set(dtypes))
    if "bfloat16" not in found:
        raise ValueError(f"stochastic_rounding needs a table in bfloat16, got {found}")
