"""Base class of the row optimizers; see :mod:`firstlayer.torch.optim`.

A parameter is a table from its first sparse gradient on. Kernels update contiguous tables
on the CPU (:mod:`firstlayer.optim.table_state`), torch operators all others
(:mod:`firstlayer.torch.optim.operator_state`). Parameters that are not tables are updated
by torch's own optimizer, with the same parameter groups. The state has torch's names and
shapes, and saving it brings every row up to date, so checkpoints are interchangeable with
those of torch's optimizer.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version

from ... import kernels
from ..._check import ids_in_range, not_negative, one_of
from ..._interrupts import held_interrupts
from ...optim.row_average import refuse_swapped
from ...optim.row_optimizer import check_rounding
from ...optim.rule import MODES, Mode, RowOptions, Rule
from .._tensors.dtypes import dtype_name
from .._tensors.errors import torch_errors
from .._tensors.memory import array_of, tensor_of, threads_of_torch
from .._tensors.row_parameter import without_catch_up
from .._tensors.shard import shard_of
from .._tensors.shard_tensor import check_whole_table
from .model_hooks import add_hooks, warn_of_dense_gradient
from .new_state import State, current_state
from .operator_state import OperatorState
from .parameter_state import ParameterState
from .row_step import RowStep
from .row_tensors import resized_rows
from .saved_state import (
    check_stored_steps,
    check_tensors,
    restore_float32,
    saved_arrays,
)
from .sharded import check_whole_rows, create_dense_state, to_dtensors, to_local
from .step_hook import install_step_hook
from .stored import store_of
from .table_gradient import table_gradient
from .table_state import detach

Params = nn.Module | Iterable[Any]
#: State of a table, ids and values of its gradient, and its parameter group.
TableStep = tuple[State, Any, Any, dict[str, Any]]


class RowOptimizer(torch.optim.Optimizer):
    """Base class of the row optimizers.

    Args:
        params: Model, parameters or parameter groups.
        lr: Learning rate.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.torch.optim`.
        stochastic_rounding: Round updated rows of bfloat16 tables up or down at random,
            the nearer value with the higher probability, so that updates too small for
            bfloat16 are kept on average. Repeated runs round the same way.
        background: Update the rows of tables on a worker thread: ``step`` returns earlier,
            and the next read of a table waits for its update. Results have the same bits.
            Has no effect on other devices, on disk, and in lazy mode.
        options: Further arguments of torch's optimizer of that name.

    Example:
        >>> from firstlayer.torch import Embedding
        >>> from firstlayer.torch.optim import RowAdamW
        >>> optimizer = RowAdamW(Embedding(5, 2, sparse=True), lr=0.1, mode="lazy")
        >>> isinstance(optimizer, RowOptimizer)
        True
    """

    #: Options of the optimizer, with defaults.
    _options_class: ClassVar[type[RowOptions]]
    #: Torch's optimizer of that name, for parameters that are not tables.
    _torch_class: ClassVar[Callable[..., torch.optim.Optimizer]]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        signature = cls._options_class.constructor_signature(
            "params", others="torch_options"
        )
        *parameters, others = signature.parameters.values()
        background = Parameter("background", Parameter.KEYWORD_ONLY, default=False)
        cls.__signature__ = signature.replace(parameters=[*parameters, background, others])

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        *,
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
        background: bool = False,
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
        self._background = bool(background)
        self._table_states: dict[Tensor, State] = {}
        self._row_steps: dict[Tensor, RowStep] = {}
        #: Averages of the parameters (:class:`firstlayer.torch.optim.AveragedRows`).
        self.averages: weakref.WeakSet[Any] = weakref.WeakSet()
        parameters = params.parameters() if isinstance(params, nn.Module) else params
        own = {"mode": mode, "stochastic_rounding": stochastic_rounding}
        super().__init__(parameters, {**self._dense.defaults, **own})
        if isinstance(params, nn.Module):
            add_hooks(params)
        create_dense_state(self, self._dense)
        install_step_hook()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options, which may include ``mode``.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> from firstlayer.torch.optim import RowAdamW
            >>> table, head = Embedding(5, 2, sparse=True), nn.Linear(2, 1)
            >>> optimizer = RowAdamW(table, lr=0.1)
            >>> optimizer.add_param_group({"params": head.parameters(), "lr": 0.01})
            >>> [group["lr"] for group in optimizer.param_groups]
            [0.1, 0.01]
        """
        options = {**self.defaults, **param_group}
        rule = self._new_rule(options)
        with torch_errors():
            rule.check(options)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            with torch_errors():
                if group["stochastic_rounding"]:
                    check_rounding(dtype_name(p.dtype) for p in group["params"])
            for parameter in group["params"]:
                check_whole_rows(parameter, rule)
        except ValueError:
            del self.param_groups[-1]
            raise
        for parameter in group["params"]:
            is_sharded = shard_of(parameter) is not None and not parameter.is_meta
            if store_of(parameter) is None and not is_sharded:
                detach(parameter)
            else:
                # Rows on disk may be stale from an earlier run; lookups bring them up to
                # date. Checkpoints of shards are loaded into the arrays of the state.
                self._adopt_new(parameter, group)

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Take a step.

        A row with a gradient that was stale when it was read is a RuntimeError, before
        anything changes; see :mod:`firstlayer.torch.optim`.

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
        with without_catch_up():
            tables, dense_groups = self._checked_gradients()
        # Torch's contexts are entered last: an interrupt in one would leave it in effect.
        with held_interrupts(), torch.no_grad(), threads_of_torch():
            self._step_dense(dense_groups)
            for state, ids, gradient, group in tables:
                self._adopt(state)
                self._step_table(state, ids, gradient, group)
                # A backward that needs the rows from before raises torch's error.
                increment_version(state.parameter)
                state.num_steps_in_version += not state.rule.lazy
        return loss

    def _step_table(
        self, state: State, ids: Any, gradient: Any, group: dict[str, Any]
    ) -> None:
        published = self.state[state.parameter]
        # Not the first step, which creates the arrays of the state. Not in lazy mode, in
        # which neither lookups nor other optimizers wait for the worker.
        if (
            self._background
            and isinstance(state, ParameterState)
            and state.step_count
            and state.stored is None
            and not state.rule.lazy
        ):
            state.publish(published, step_count=state.step_count + 1)
            state.step_in_background(ids, gradient, options=group)
        else:
            state.step(ids, gradient, options=group)
            state.publish(published)

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
                    name = type(self).__name__
                    warn_of_dense_gradient(parameter, name, group["lr"])
                is_table = grad.is_sparse or store_of(parameter) is not None
                if parameter in self._table_states or is_table:
                    state = self._table_state(parameter, group)
                    steps.append((state, *table_gradient(state, grad, group), group))
                else:
                    dense.append(parameter)
            dense_groups.append({**group, "params": dense})
        return steps, dense_groups

    def table_state_of(self, parameter: Tensor) -> State | None:
        """Return the state of a table, or None for a parameter that is not a table yet."""
        return self._table_states.get(parameter)

    def flush(self) -> None:
        """Bring every row up to date.

        Operations on a parameter do this themselves. Call it before code that reads the
        memory of a parameter directly; see :mod:`firstlayer.torch.optim`.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> from firstlayer.torch.optim import RowAdamW
            >>> ones = torch.ones(2, 1)
            >>> table = Embedding.from_pretrained(ones, freeze=False, sparse=True)
            >>> optimizer = RowAdamW(table, lr=0.5, weight_decay=1.0)
            >>> table(torch.tensor([0])).sum().backward()
            >>> optimizer.step()
            >>> optimizer.flush()
            >>> float(table.weight.detach()[1])
            0.5
        """
        for state in self._table_states.values():
            state.catch_up()

    def state_dict(self) -> dict[str, Any]:
        """Bring every row up to date and return the state.

        The state of a table on disk is in its store: only its step is returned, and its
        rows may stay stale. The state of a sharded table is a DTensor.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> from firstlayer.torch.optim import RowAdamW
            >>> table = Embedding(5, 2, sparse=True)
            >>> optimizer, resumed = RowAdamW(table, lr=0.1), RowAdamW(table)
            >>> resumed.load_state_dict(optimizer.state_dict())
            >>> resumed.param_groups[0]["lr"]
            0.1
        """
        self._flush_in_memory()
        return to_dtensors(super().state_dict(), self._all_parameters())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this optimizer, or of torch's optimizer of that name.

        A state that does not fit the parameters raises a ValueError and changes nothing.
        """
        parameters = self._all_parameters()
        state_dict = to_local(state_dict, parameters)
        check_tensors(state_dict, parameters)
        check_stored_steps(state_dict, parameters, self._table_states)
        with held_interrupts():
            self._flush_in_memory()
            replaced = self._table_states
            self._load_in_float32(state_dict)
            for parameter, state in replaced.items():
                if state.stored is None:
                    detach(parameter)
                else:
                    self._table_states[parameter] = state
                    self._adopt_new(parameter, self._group_of(parameter))
            for group in self.param_groups:
                for name, value in self.defaults.items():
                    group.setdefault(name, value)
            for parameter in self._row_steps:
                self.row_step(parameter)

    def _load_in_float32(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, without rounding it to half precision.

        The state is the one that pre-hooks return, and post-hooks may change it afterwards.
        """
        loaded = state_dict

        def before(_: Any, given: dict[str, Any]) -> None:
            nonlocal loaded
            loaded = given

        def after(_: Any) -> None:
            restore_float32(loaded, self._all_parameters(), self.state)

        hooks = (
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(after, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def row_step(self, parameter: Tensor) -> RowStep:
        """Return a function that takes a step of one table in compiled code.

        It takes the ids and values of the gradient instead of ``parameter.grad``, and may
        be called in a function that is compiled with ``fullgraph=True``. The table is
        updated by operators from now on, by ``step`` too.

        Args:
            parameter: Table.

        Returns:
            Function of ids and values; see :class:`firstlayer.torch.optim.RowStep`. It
            stays valid when a state is loaded.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> from firstlayer.torch.optim import RowSGD
            >>> table = Embedding.from_pretrained(torch.ones(5, 1), freeze=False)
            >>> step = RowSGD(table, lr=0.5).row_step(table.weight)
            >>> step(torch.tensor([3]), torch.ones(1, 1))
            >>> step.lookup(torch.tensor([2, 3])).tolist()
            [[1.0], [0.5]]
        """
        check_whole_table(parameter, "row_step", advice="call step()")
        group = self._group_of(parameter)
        state: Any = self._table_state(parameter, group, by_operators=True)
        with held_interrupts():
            self._adopt(state)
            state.group, state.published = group, self.state[parameter]
            state.publish(state.published)
        known = self._row_steps.get(parameter)
        if known is None:
            known = self._row_steps[parameter] = RowStep(parameter, state)
        else:
            known.bind(state)
        # Learning rate schedulers warn if no step was taken, and do not see these steps.
        self._opt_called = True
        return known

    def resize_rows(
        self, parameter: Tensor, kept_ids: Sequence[int] | Tensor, new_rows: int = 0
    ) -> None:
        """Make the state of a table follow a change of its rows.

        Call it after the table was resized, pruned or reordered, as by ``layer.resize``.
        Kept rows keep their state, their averages and the steps they have missed; new rows
        start with the initial state, like the rows of a new table.

        Args:
            parameter: Table, with ``len(kept_ids) + new_rows`` rows.
            kept_ids: For each of the first rows, its number before the change.
            new_rows: Number of rows after these.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> from firstlayer.torch.optim import RowAdamW
            >>> layer = Embedding(4, 2, sparse=True)
            >>> optimizer = RowAdamW(layer.parameters())
            >>> layer(torch.tensor([3])).sum().backward()
            >>> optimizer.step()
            >>> changes = layer.resize(6)
            >>> optimizer.resize_rows(layer.weight, changes.kept, len(changes.added))
        """
        group, saved = self._group_of(parameter), self.state.get(parameter) or {}
        arrays = {n: x for n, x in saved.items() if n != "step" and isinstance(x, Tensor)}
        known = self._table_states.get(parameter)
        sizes = [len(x) for x in arrays.values()] if known is None else [known.shape[0]]
        # A table without a state may have had any number of rows.
        old_rows = min(sizes, default=torch.iinfo(torch.int64).max)
        bound = "the number of rows before"
        kept = _row_numbers(kept_ids, old_rows, name="kept_ids", bound=bound)
        num_rows = kept.numel() + not_negative("new_rows", new_rows)
        if parameter.shape[0] != num_rows:
            raise ValueError(
                f"kept_ids and new_rows must add up to the {parameter.shape[0]} rows of "
                f"the table, got {kept.numel()} + {new_rows}"
            )
        with held_interrupts(), torch.no_grad():
            if known is not None:
                rows: Any = kept if isinstance(known, OperatorState) else kept.numpy()
                known.resize_rows(rows, num_rows, group)
                known.publish(self.state[parameter])
            else:
                initial = self._new_rule(group).initial_state(group)
                for name, x in arrays.items():
                    value = initial.get(name, 0.0)
                    saved[name] = resized_rows(x, kept.to(x.device), num_rows, value)
            for averaged in self.averages:
                averaged._resize_rows(parameter, kept)
        if parameter in self._row_steps:
            self.row_step(parameter)

    def reset_rows(self, parameter: Tensor, rows: Sequence[int] | Tensor) -> None:
        """Give rows of a table the state of new rows; averages start from their weights.

        Call it after rows were given new values that belong to something else, such as
        another id. :class:`firstlayer.torch.GrowingEmbedding` does so itself.

        Args:
            parameter: Table.
            rows: Rows with new values.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> from firstlayer.torch.optim import RowAdamW
            >>> layer = Embedding(4, 2, sparse=True)
            >>> optimizer = RowAdamW(layer.parameters())
            >>> layer(torch.tensor([3])).sum().backward()
            >>> optimizer.step()
            >>> with torch.no_grad():
            ...     layer.weight[3] = 0.5
            >>> optimizer.reset_rows(layer.weight, [3])
            >>> optimizer.state[layer.weight]["exp_avg"][3].tolist()
            [0.0, 0.0]
        """
        group, saved = self._group_of(parameter), self.state.get(parameter) or {}
        index = _row_numbers(rows, parameter.shape[0], name="rows")
        known = self._table_states.get(parameter)
        averages = [averaged._in_memory.get(parameter) for averaged in self.averages]
        averages = [average for average in averages if average is not None]
        with held_interrupts(), torch.no_grad(), torch_errors():
            refuse_swapped(averages, "rows must not be reset")
            if known is not None:
                known.reset_rows(index.numpy())
            else:
                initial = self._new_rule(group).initial_state(group)
                for name, x in saved.items():
                    if name != "step" and isinstance(x, Tensor):
                        x.index_fill_(0, index.to(x.device), initial.get(name, 0.0))
            with without_catch_up():
                for average in averages:
                    average.reset_rows(index, parameter.detach())

    def __getstate__(self) -> dict[str, Any]:
        self._flush_in_memory()
        own = {"_dense": self._dense, "_background": self._background}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by load_state_dict too, with the state of each parameter.
        defaults = state["defaults"] if "defaults" in state else self.defaults
        for group in state["param_groups"]:
            rule = self._new_rule({**defaults, **group})
            required = rule.required_arrays({**defaults, **group})
            for number, parameter in enumerate(group["params"]):
                saved = state["state"].get(parameter)
                if saved and not (store_of(parameter) and saved.keys() == {"step"}):
                    owner = f"parameter {number} of its group"
                    saved_arrays(saved, parameter, rule, required=required, owner=owner)
        super().__setstate__(state)
        self._background = vars(self).get("_background", False)
        self._table_states = {}
        # A copy has no compiled steps and no averages; an optimizer that loads a state
        # keeps its own.
        self._row_steps = vars(self).get("_row_steps", {})
        self.averages = vars(self).get("averages", weakref.WeakSet())

    def _new_rule(self, options: dict[str, Any]) -> Rule:
        mode = one_of("mode", options["mode"], MODES)
        return self._options_class.rule_class(lazy=mode == "lazy")

    def _all_parameters(self) -> list[Tensor]:
        """Return all parameters, in the order of a state dict."""
        return [p for group in self.param_groups for p in group["params"]]

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(each is parameter for each in group["params"]):
                return group
        raise ValueError("parameter must be one that this optimizer trains, got another")

    def _table_state(
        self, parameter: Tensor, group: dict[str, Any], *, by_operators: bool = False
    ) -> State:
        """Return the state of a table, a new one at the table's first sparse gradient.

        A new state takes effect in :meth:`_adopt`.

        Args:
            parameter: Table.
            group: Parameter group of the table.
            by_operators: Whether operators update the table from now on, and not kernels.
        """
        by_operators = by_operators or parameter in self._row_steps
        if by_operators and store_of(parameter) is not None:
            raise TypeError("a table on disk cannot be trained in compiled code")
        return current_state(
            parameter,
            self._new_rule(group),
            group,
            saved=self.state.get(parameter) or {},
            known=self._table_states.get(parameter),
            by_kernels=not by_operators and trains_by_kernels(parameter),
        )

    def _adopt_new(self, parameter: Tensor, group: dict[str, Any]) -> None:
        with held_interrupts(), torch.no_grad():
            state = self._table_state(parameter, group)
            self._adopt(state)
            state.publish(self.state[parameter])

    def _flush_in_memory(self) -> None:
        """Bring every row up to date, but not those of tables on disk."""
        for state in self._table_states.values():
            if state.stored is None:
                state.catch_up()

    def _adopt(self, state: State) -> None:
        """Use a state of a table from now on."""
        parameter = state.parameter
        previous = self._table_states.get(parameter)
        if previous is not None and previous is not state:
            # The new state has its missed steps.
            previous.base_step = previous.event_count
        self._table_states[parameter] = state
        if previous is not state:
            for averaged in self.averages:
                averaged._attach(state)
        attached = vars(parameter).get("table_state")
        if not state.rule.lazy:
            # Another optimizer of the parameter may have detached the state.
            if attached is not state:
                state.attach()
        elif attached is not None and attached is previous:
            # The mode was exact before.
            detach(parameter)

    def _step_dense(self, groups: list[dict[str, Any]]) -> None:
        """Update the parameters that are not tables with torch's optimizer."""
        if any(group["params"] for group in groups):
            self._dense.param_groups, self._dense.state = groups, self.state
            self._dense.step()


def _row_numbers(
    rows: Any, num_rows: int, *, name: str, bound: str = "num_embeddings"
) -> Tensor:
    """Return rows as a vector of int64 on the CPU, or raise unless a table has them."""
    rows = array_of(rows.cpu()) if isinstance(rows, Tensor) else rows
    with torch_errors():
        numbers = ids_in_range(rows, num_rows, name=name, bound=bound).reshape(-1)
    return tensor_of(numbers.copy())


def trains_by_kernels(parameter: Tensor) -> bool:
    """Return whether kernels update the rows of a table, not torch operators."""
    return parameter.is_cpu and parameter.is_contiguous()
