"""Row optimizers as torch's users know optimizers; see :mod:`firstlayer.torch.optim`.

A parameter whose gradient is sparse is a table, from its first such gradient on, and moved
by the core (:mod:`firstlayer.optim`). All other parameters are moved by torch's own optimizer of
that name, in the same groups. The state has torch's names and shapes, and every row is
brought up to date before it is handed out: checkpoints of this and of torch's optimizer
continue each other.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..._check import one_of
from ...optim.row_optimizer import MODES, Mode, check_rounding
from ...optim.rule import Rule
from .._tensors.dtypes import FLOATS, HALF, compute_dtype, dtype_name
from .._tensors.errors import torch_errors
from .._tensors.memory import array_of, tensor_of, threads_of_torch
from .model_hooks import add_hooks
from .sparse_gradient import rows_of
from .table_state import ParameterState, detach

Params = nn.Module | Iterable[Any]


class RowOptimizer(torch.optim.Optimizer):
    """Base of the row optimizers.

    Args:
        params: A model, or what every optimizer of torch takes: parameters or groups.
        lr: Learning rate; None is torch's default.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.torch.optim`.
        stochastic_rounding: Round tables in bfloat16 up or down at random, the nearer the
            likelier, so that updates too small to be kept are kept on average. The same
            run rounds the same way.
        options: As torch's optimizer of that name takes them.
    """

    #: Torch's optimizer of that name, for parameters that are no tables.
    torch_class: ClassVar[Callable[..., torch.optim.Optimizer]]

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        *,
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
        **options: Any,
    ) -> None:
        for name in ("differentiable", "capturable"):
            if options.get(name):
                raise ValueError(f"{name} must be False for row optimizers, got True")
        options |= {} if lr is None else {"lr": lr}
        # It needs a parameter to be made; it gets others in every step.
        nothing = torch.zeros(0, device="cpu")
        self._dense = type(self).torch_class([nothing], **options)
        self._table_states: dict[Tensor, ParameterState] = {}
        ours = {"mode": mode, "stochastic_rounding": stochastic_rounding}
        found = params.parameters() if isinstance(params, nn.Module) else params
        super().__init__(found, {**self._dense.defaults, **ours})
        if isinstance(params, nn.Module):
            add_hooks(params)

    def rule(self, *, lazy: bool) -> Rule:
        """Return how rows are moved."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, ``mode`` among them."""
        options = {**self.defaults, **param_group}
        with torch_errors():
            one_of("mode", options["mode"], MODES)
            exact = options["mode"] == "exact"
            self.rule(lazy=not exact).check(options, exact=exact)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["stochastic_rounding"]:
            with torch_errors():
                check_rounding(dtype_name(p.dtype) for p in group["params"])
        for parameter in group["params"]:
            detach(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Take a step. Nothing is changed if a row was read before it was up to date.

        Args:
            closure: Computes the loss and its gradients once more.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tables, rest = [], []
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            tables += [self._taken(p, group) for p in given if self._is_table(p)]
            rest.append({**group, "params": [p for p in given if not self._is_table(p)]})
        self._step_dense(rest)
        for table_state, ids, values, group in tables:
            with threads_of_torch():
                table_state.step(ids, values, options=group)
            self._publish(table_state, self.state[table_state.parameter])
        return loss

    def flush(self) -> None:
        """Bring every row up to date, for whoever reads or writes a table itself."""
        for table_state in self._table_states.values():
            table_state.catch_up()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, every row being brought up to date first."""
        self.flush()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state: of this optimizer, or of torch's of the same name."""
        for parameter in self._table_states:
            detach(parameter)
        self._table_states = {}
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._widen(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {**super().__getstate__(), "_dense": self._dense}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._table_states = {}

    def _is_table(self, parameter: Tensor) -> bool:
        grad = parameter.grad
        return parameter in self._table_states or (grad is not None and grad.is_sparse)

    def _taken(self, parameter: Tensor, group: dict[str, Any]) -> Any:
        """Return what a table's step needs, or say why it cannot be taken."""
        table_state = self._table_states.get(parameter)
        if table_state is None:
            table_state = self._begun(parameter, group)
        grad = parameter.grad
        if grad is None or not grad.is_sparse:
            self._check(table_state, None)
            return table_state, None, array_of(grad.contiguous()), group  # pyright: ignore
        rows = rows_of(grad)
        self._check(table_state, rows.ids)
        return table_state, rows.ids, rows.values, group

    def _check(self, table_state: ParameterState, ids: Any) -> None:
        row = table_state.behind(ids)
        if row is None:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Gradients of rows that other processes have read.
            table_state.catch_up(ids)
            return
        raise RuntimeError(
            f"row {row} was read before it was brought up to date; look it up through "
            'firstlayer.torch.Embedding, pass the model, or use mode="lazy"'
        )

    def _begun(self, parameter: Tensor, group: dict[str, Any]) -> ParameterState:
        """Make a table of a parameter, with the state that it has, and return its rows."""
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
        exact, found = group["mode"] == "exact", self.state[parameter]
        # Copied: what was loaded may be somebody else's.
        arrays = {
            name: array_of(
                value.detach().to(compute_dtype(parameter.dtype), copy=True).contiguous()
            )
            for name, value in found.items()
            if isinstance(value, Tensor) and name != "step"
        }
        table_state = ParameterState(
            parameter,
            self.rule(lazy=not exact),
            options=group,
            exact=exact,
            dither=group["stochastic_rounding"] and parameter.dtype == torch.bfloat16,
            state=arrays or None,
            step=int(found.get("step", bool(arrays))),
        )
        if exact:
            table_state.attach()
        self._table_states[parameter] = table_state
        return table_state

    def _publish(self, table_state: ParameterState, state: dict[str, Any]) -> None:
        for name, array in table_state.state.items():
            if name not in state or state[name].data_ptr() != array.ctypes.data:
                state[name] = tensor_of(array)
        state["step"] = step_count(table_state.now)

    def _step_dense(self, groups: list[dict[str, Any]]) -> None:
        if any(group["params"] for group in groups):
            self._dense.param_groups, self._dense.state = groups, self.state
            self._dense.step()

    def _widen(self, state_dict: dict[str, Any]) -> None:
        """Put back the float32 states of tables in half precision, which torch rounds."""
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if parameter.dtype in HALF and isinstance(value, Tensor):
                    self.state[parameter][name] = value.clone()


def step_count(steps: int) -> Tensor:
    """Return a number of steps as torch's optimizers keep it.

    Neither on torch's default device, where it would be waited for, nor in its default
    dtype, of which bfloat16 has no 257.
    """
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")
