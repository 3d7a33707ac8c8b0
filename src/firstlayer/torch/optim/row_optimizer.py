"""Base class of the row optimizers; see :mod:`firstlayer.torch.optim`.

A parameter is a table from its first sparse gradient on, and is updated by
:mod:`firstlayer.optim`. All other parameters are updated by torch's own optimizer, with the
same parameter groups. The state has torch's names and shapes, and saving it brings every
row up to date, so checkpoints are interchangeable with those of torch's optimizer.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ... import kernels
from ..._check import one_of
from ..._interrupts import held_interrupts
from ...optim.row_optimizer import check_rounding
from ...optim.rule import MODES, Mode, RowOptions, Rule
from ...optim.table_state import check_names, checked_step
from .._tensors.dtypes import FLOATS, HALF, compute_dtype, dtype_name
from .._tensors.errors import torch_errors
from .._tensors.memory import array_of, threads_of_torch
from .model_hooks import add_hooks, warn_of_dense_gradient
from .sparse_gradient import rows_of
from .table_state import ParameterState, detach

Params = nn.Module | Iterable[Any]
#: State of a table, ids and values of its gradient, and its parameter group.
TableStep = tuple[ParameterState, np.ndarray | None, np.ndarray, dict[str, Any]]


class RowOptimizer(torch.optim.Optimizer):
    """Base class of the row optimizers.

    Args:
        params: Model, parameters or parameter groups.
        lr: Learning rate.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.torch.optim`.
        stochastic_rounding: Round updated rows of bfloat16 tables up or down at random,
            the nearer value with the higher probability, so that updates too small for
            bfloat16 are kept on average. Repeated runs round the same way.
        options: Further arguments of torch's optimizer of that name.
    """

    #: Options of the optimizer, with defaults.
    _options_class: ClassVar[type[RowOptions]]
    #: Torch's optimizer of that name, for parameters that are not tables.
    _torch_class: ClassVar[Callable[..., torch.optim.Optimizer]]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.__signature__ = cls._options_class.constructor_signature(
            "params", others="torch_options"
        )

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        *,
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
        **options: Any,
    ) -> None:
        kernels.require_compiler(type(self).__name__)
        for name in ("differentiable", "capturable"):
            if options.get(name):
                raise ValueError(f"{name} must be False for row optimizers, got True")
        options = {**self._options_class().hyperparameters(), **options}
        if lr is not None:
            options["lr"] = lr
        # torch requires a parameter here; _step_dense passes the real ones.
        placeholder = torch.zeros(0, device="cpu")
        self._dense = type(self)._torch_class([placeholder], **options)
        self._table_states: dict[Tensor, ParameterState] = {}
        parameters = params.parameters() if isinstance(params, nn.Module) else params
        own = {"mode": mode, "stochastic_rounding": stochastic_rounding}
        super().__init__(parameters, {**self._dense.defaults, **own})
        if isinstance(params, nn.Module):
            add_hooks(params)
        _install_step_hook()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options, which may include ``mode``."""
        options = {**self.defaults, **param_group}
        with torch_errors():
            self._new_rule(options).check(options)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["stochastic_rounding"]:
            with torch_errors():
                check_rounding(dtype_name(p.dtype) for p in group["params"])
        for parameter in group["params"]:
            detach(parameter)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Take a step; raise and change nothing if a row to update was read while stale.

        Ctrl-C during the step is raised when the step is done. After a KeyboardInterrupt,
        either nothing has changed or the step is complete and ``state[parameter]["step"]``
        of every table with a gradient is larger by one.

        Args:
            closure: Computes the loss and its gradients again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A gradient of our class takes microseconds to call each function otherwise.
        with torch._C.DisableTorchFunctionSubclass():
            tables, dense_groups = self._checked_gradients()
        # Torch's contexts are entered last: an interrupt in one would leave it in effect.
        with held_interrupts(), torch.no_grad(), threads_of_torch():
            self._step_dense(dense_groups)
            for state, ids, gradient, group in tables:
                self._adopt(state)
                state.step(ids, gradient, options=group)
                state.publish(self.state[state.parameter])
        return loss

    def _checked_gradients(self) -> tuple[list[TableStep], list[dict[str, Any]]]:
        """Return the steps of the tables, and parameter groups of the other parameters.

        Raises if a step would, and changes nothing.
        """
        steps, dense_groups = [], []
        for group in self.param_groups:
            dense = []
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if grad.shape != parameter.shape:
                    raise ValueError(
                        f"a gradient must have the shape {tuple(parameter.shape)} of its "
                        f"parameter, got {tuple(grad.shape)}"
                    )
                if not grad.is_sparse:
                    warn_of_dense_gradient(parameter, type(self).__name__)
                if parameter in self._table_states or grad.is_sparse:
                    state = self._table_state(parameter, group)
                    steps.append((state, *self._gradient(state, grad, group), group))
                else:
                    dense.append(parameter)
            dense_groups.append({**group, "params": dense})
        return steps, dense_groups

    def table_state_of(self, parameter: Tensor) -> ParameterState | None:
        """Return the state of a table, or None for a parameter that is not a table yet."""
        return self._table_states.get(parameter)

    def flush(self) -> None:
        """Bring every row up to date.

        Operations on a parameter do this themselves. Call it before code that reads the
        memory of a parameter behind torch's back; see :mod:`firstlayer.torch.optim`.
        """
        for state in self._table_states.values():
            state.catch_up()

    def state_dict(self) -> dict[str, Any]:
        """Bring every row up to date and return the state."""
        self.flush()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this optimizer, or of torch's optimizer of that name.

        A state that does not fit the parameters raises a ValueError and changes nothing.
        """
        _check_tensors(state_dict)
        with held_interrupts():
            self.flush()
            replaced = self._table_states
            super().load_state_dict(state_dict)
            for parameter in replaced:
                detach(parameter)
            for group in self.param_groups:
                for name, value in self.defaults.items():
                    group.setdefault(name, value)
            self._restore_float32(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {**super().__getstate__(), "_dense": self._dense}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by load_state_dict too, with the state of each parameter.
        defaults = state["defaults"] if "defaults" in state else self.defaults
        for group in state["param_groups"]:
            rule = self._new_rule({**defaults, **group})
            required = rule.required_arrays({**defaults, **group})
            for number, parameter in enumerate(group["params"]):
                saved = state["state"].get(parameter)
                if saved:
                    owner = f"parameter {number} of its group"
                    _saved_arrays(saved, parameter, rule, required=required, owner=owner)
        super().__setstate__(state)
        self._table_states = {}

    def _new_rule(self, options: dict[str, Any]) -> Rule:
        mode = one_of("mode", options["mode"], MODES)
        return self._options_class.rule_class(lazy=mode == "lazy")

    def _gradient(
        self, state: ParameterState, grad: Tensor, group: dict[str, Any]
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Return the ids and values of a gradient; ids are None if it is dense."""
        if grad.is_sparse:
            rows = rows_of(grad)
            # A copy: another thread may change the ids after the check.
            ids, values = rows.ids.astype(np.int64), rows.values
        else:
            ids, values = None, array_of(grad.contiguous())
        with torch_errors():
            state.check_step(ids, values, options=group, ids_name="grad.indices()[0]")
        self._check_read(state, ids)
        return ids, values

    def _check_read(self, state: ParameterState, ids: np.ndarray | None) -> None:
        """Raise if a row was read while stale; in distributed runs, catch up instead."""
        row = state.first_stale(ids)
        if row is None:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Other processes may have read these rows.
            state.catch_up(ids)
            return
        raise RuntimeError(
            f"row {row} has a gradient, but was not up to date when it was read; read it "
            "through the parameter, not through an alias from before the last step"
        )

    def _table_state(self, parameter: Tensor, group: dict[str, Any]) -> ParameterState:
        """Return the state of a table, a new one at the table's first sparse gradient.

        A new state takes effect in :meth:`_adopt`.
        """
        known = self._table_states.get(parameter)
        if known is not None:
            if known.is_published(self.state[parameter]):
                return known
            # The state in ``self.state`` was replaced; missed steps belong to the old one.
            known.catch_up()
        if parameter.dtype not in FLOATS or parameter.dim() != 2:
            raise ValueError(
                f"a table must be real and have 2 axes, got {dtype_name(parameter.dtype)} "
                f"{tuple(parameter.shape)}"
            )
        rule, saved = self._new_rule(group), self.state.get(parameter) or {}
        arrays = _saved_arrays(saved, parameter, rule, required=set(), owner="a table")
        # Copied: the tensors of a loaded state may belong to another optimizer.
        copies = {
            name: array_of(
                value.detach().to(
                    "cpu",
                    compute_dtype(parameter.dtype),
                    copy=True,
                    memory_format=torch.contiguous_format,
                )
            )
            for name, value in arrays.items()
        }
        is_bfloat16 = parameter.dtype == torch.bfloat16
        with torch_errors():
            return ParameterState(
                parameter,
                rule,
                options=group,
                stochastic_rounding=group["stochastic_rounding"] and is_bfloat16,
                state=copies or None,
                step=checked_step("step", saved.get("step", int(bool(arrays)))),
            )

    def _adopt(self, state: ParameterState) -> None:
        """Use a state of a table from now on."""
        parameter = state.parameter
        self._table_states[parameter] = state
        # Another optimizer of the parameter may have detached the state.
        if not state.rule.lazy and vars(parameter).get("table_state") is not state:
            state.attach()

    def _step_dense(self, groups: list[dict[str, Any]]) -> None:
        """Update the parameters that are not tables with torch's optimizer."""
        if any(group["params"] for group in groups):
            self._dense.param_groups, self._dense.state = groups, self.state
            self._dense.step()

    def _restore_float32(self, state_dict: dict[str, Any]) -> None:
        """Restore float32 states of half-precision parameters, which torch downcasts."""
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if parameter.dtype in HALF and isinstance(value, Tensor):
                    self.state[parameter][name] = value.clone()


# Module state: a hook that torch calls before the step of every optimizer. It is installed
# with the first row optimizer of a process that is part of a process group.
_step_hooks: list[Any] = []


def _install_step_hook() -> None:
    in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if in_group and not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(_check_not_sharded))


def _check_not_sharded(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise if the optimizer is a ZeroRedundancyOptimizer of a row optimizer.

    Each rank trains some of the parameters and broadcasts them after the step. Other ranks
    would read stale rows, and loading a state would bypass the row optimizer.
    """
    local = getattr(optimizer, "optim", None)
    if isinstance(local, RowOptimizer):
        raise TypeError(
            f"{type(local).__name__} cannot be sharded by {type(optimizer).__name__}, "
            "whose other ranks would read stale rows; give it to every rank instead"
        )


def _saved_arrays(
    saved: dict[str, Any],
    parameter: Tensor,
    rule: Rule,
    *,
    required: set[str],
    owner: str,
) -> dict[str, Tensor]:
    """Return the arrays of a parameter's saved state, or raise if they do not fit it.

    Args:
        saved: State of a parameter, as in ``Optimizer.state``.
        parameter: Parameter, which may be a table or not.
        rule: Update rule.
        required: Names of arrays that the state must have.
        owner: Description of the parameter in error messages.
    """
    # torch.optim.SGD without momentum has None for its buffer.
    arrays = {
        name: value
        for name, value in saved.items()
        if name != "step" and (isinstance(value, Tensor) or name in rule.array_names)
    }
    arrays = {name: value for name, value in arrays.items() if value is not None}
    with torch_errors():
        check_names(rule, arrays, required=required, owner=owner)
        if "step" in saved:
            checked_step(f"step of {owner}", saved["step"])
        elif arrays and rule.depends_on_step:
            raise ValueError(f"the state of {owner} must have step, got {sorted(saved)}")
    shapes = [tuple(parameter.shape)]
    if parameter.dim() == 2 and rule.state_width(2) == 1:
        shapes.append((shapes[0][0], 1))
    for name, value in arrays.items():
        is_dense = isinstance(value, Tensor) and value.layout == torch.strided
        if not is_dense or value.is_meta or value.is_nested:
            kind = type(value).__name__
            raise ValueError(f"{name} of {owner} must be a dense tensor, got {kind}")
        if tuple(value.shape) not in shapes or not value.is_floating_point():
            raise ValueError(
                f"{name} of {owner} must be real of shape {shapes[-1]}, "
                f"got {dtype_name(value.dtype)} of shape {tuple(value.shape)}"
            )
    return arrays


def _check_tensors(state_dict: dict[str, Any]) -> None:
    """Raise ValueError for arrays that torch could not copy, or would cast to real."""
    for number, saved in state_dict["state"].items():
        if not isinstance(saved, dict):
            kind = type(saved).__name__
            raise ValueError(f"the state of parameter {number} must be a dict, got {kind}")
        for name, value in saved.items():
            if isinstance(value, Tensor) and name != "step":
                if value.is_meta or value.is_nested or not value.is_floating_point():
                    raise ValueError(
                        f"{name} of parameter {number} must be real and have values, "
                        f"got {dtype_name(value.dtype)} on {value.device}"
                    )
