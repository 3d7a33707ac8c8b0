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

from ... import kernels
from ..._check import one_of
from ...optim.row_optimizer import check_rounding
from ...optim.rule import MODES, Mode, RowOptions, Rule
from .._tensors.dtypes import FLOATS, HALF, compute_dtype, dtype_name
from .._tensors.errors import torch_errors
from .._tensors.memory import array_of, tensor_of, threads_of_torch
from .model_hooks import add_hooks
from .sparse_gradient import rows_of
from .table_state import ParameterState, detach

Params = nn.Module | Iterable[Any]


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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options, which may include ``mode``."""
        options = {**self.defaults, **param_group}
        with torch_errors():
            one_of("mode", options["mode"], MODES)
            self._new_rule(options).check(options)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["stochastic_rounding"]:
            with torch_errors():
                check_rounding(dtype_name(p.dtype) for p in group["params"])
        for parameter in group["params"]:
            detach(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Take a step; raise and change nothing if a row to update was read while stale.

        Args:
            closure: Computes the loss and its gradients again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tables, dense_groups = [], []
        for group in self.param_groups:
            dense = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter in self._table_states or parameter.grad.is_sparse:
                    state = self._table_state(parameter, group)
                    tables.append((state, *self._gradient(state, parameter.grad), group))
                else:
                    dense.append(parameter)
            dense_groups.append({**group, "params": dense})
        self._step_dense(dense_groups)
        for state, ids, gradient, group in tables:
            with threads_of_torch():
                state.step(ids, gradient, options=group)
            self._publish(state)
        return loss

    def flush(self) -> None:
        """Bring every row up to date; call before using ``weight`` directly."""
        for state in self._table_states.values():
            state.catch_up()

    def state_dict(self) -> dict[str, Any]:
        """Bring every row up to date and return the state."""
        self.flush()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this optimizer, or of torch's optimizer of that name."""
        for parameter in self._table_states:
            detach(parameter)
        self._table_states = {}
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._restore_float32(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {**super().__getstate__(), "_dense": self._dense}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._table_states = {}

    def _new_rule(self, options: dict[str, Any]) -> Rule:
        return self._options_class.rule_class(lazy=options["mode"] == "lazy")

    def _gradient(
        self, state: ParameterState, grad: Tensor
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Return the ids and values of a gradient; ids are None if it is dense."""
        if not grad.is_sparse:
            self._check_read(state, None)
            return None, array_of(grad.contiguous())
        rows = rows_of(grad)
        self._check_read(state, rows.ids)
        return rows.ids, rows.values

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
            f"row {row} was read before it was brought up to date; look it up through "
            'firstlayer.torch.Embedding, pass the model, or use mode="lazy"'
        )

    def _table_state(self, parameter: Tensor, group: dict[str, Any]) -> ParameterState:
        """Return the state of a table; create it at the table's first sparse gradient."""
        if parameter in self._table_states:
            return self._table_states[parameter]
        _check_table(parameter)
        rule, loaded = self._new_rule(group), self.state[parameter]
        # Copied: the tensors of a loaded state may belong to another optimizer.
        arrays = {
            name: array_of(
                value.detach().to(compute_dtype(parameter.dtype), copy=True).contiguous()
            )
            for name, value in loaded.items()
            if isinstance(value, Tensor) and name != "step"
        }
        is_bfloat16 = parameter.dtype == torch.bfloat16
        state = ParameterState(
            parameter,
            rule,
            options=group,
            stochastic_rounding=group["stochastic_rounding"] and is_bfloat16,
            state=arrays or None,
            step=int(loaded.get("step", bool(arrays))),
        )
        if not rule.lazy:
            state.attach()
        self._table_states[parameter] = state
        return state

    def _publish(self, table_state: ParameterState) -> None:
        """Expose the arrays of a table's state in ``self.state``."""
        state = self.state[table_state.parameter]
        for name, array in table_state.state.items():
            if name not in state or state[name].data_ptr() != array.ctypes.data:
                state[name] = tensor_of(array)
        state["step"] = step_tensor(table_state.step_count)

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


def step_tensor(steps: int) -> Tensor:
    """Return a number of steps as torch's optimizers store it.

    Always on the CPU, where reading it does not synchronize a device, and in float32:
    bfloat16 cannot represent 257.
    """
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def _check_table(parameter: Tensor) -> None:
    if not parameter.is_cpu or not parameter.is_contiguous():
        raise ValueError(
            "a table must be on the CPU and contiguous, "
            f"got one on {parameter.device} with strides {parameter.stride()}"
        )
    if parameter.dtype not in FLOATS or parameter.dim() != 2:
        raise ValueError(
            f"a table must be real and have 2 axes, got {dtype_name(parameter.dtype)} "
            f"{tuple(parameter.shape)}"
        )
