"""Table on any device whose rows may be stale, caught up by torch operators.

Rows and state are gathered, changed as the rule specifies, and written back. Apart from the
table, its state and the event that each row is at, no tensor has as many rows as the table.

The host records the steps (:mod:`.device_steps`). Which rows are stale is decided on the
device, so catching up does not wait for it: all rows of a batch are computed, and those
that are up to date keep their values. There are two exceptions. Missed steps are replayed
one by one where the polynomial of Adam is not accurate, and their number is read from the
device. On the CPU, where reading a value costs nothing, only stale rows are computed, in
chunks that stay in the cache, and the state of rows that a lookup has caught up is written
together with the next step (:class:`.row_tensors.DeferredState`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore

from ..._interrupts import held_interrupts
from ...optim.missed_steps import MissedSteps
from ...optim.rule import ArrayOps, Options, Rule
from ...optim.table_events import TableEvents
from .._tensors.dtypes import compute_dtype
from .._tensors.memory import is_plain_cpu
from .._tensors.row_parameter import without_catch_up
from . import rule_ops
from .device_steps import DeviceSteps
from .row_operators import (
    Rows,
    read_rows,
    round_to_bfloat16,
    write_number,
    write_rows,
)
from .row_tensors import (
    DeferredState,
    RowTensors,
    StepTensors,
    check_row_tensors,
)
from .table_state import AttachedState, check_class
from .tensor_average import TensorAverage

# Entries of a table that operators process at a time, for each thread on the CPU: their
# temporary tensors stay in the cache.
CPU_CHUNK = 1 << 18
# The same on other devices, where it bounds the memory of temporary tensors.
DEVICE_CHUNK = 1 << 24
# Entries of each tensor of the state that a lookup may leave to the next step to write.
MAX_DEFERRED = 1 << 22


class StaleTensors(TableEvents, AttachedState):
    """Table and optimizer state as tensors, with the event that each row is at.

    Args:
        parameter: Table. Only a weak reference to it is kept.
        rule: Update rule.
        options: Current options of the rule.
        stochastic_rounding: Round a bfloat16 table up or down at random.
        state: Tensors to continue from, on the device of the table.
        step: Number of steps taken before ``state`` was saved.
    """

    def __init__(
        self,
        parameter: Tensor,
        rule: Rule,
        *,
        options: Options,
        stochastic_rounding: bool = False,
        state: dict[str, Tensor] | None = None,
        step: int = 0,
    ) -> None:
        rule.check(options)
        AttachedState.__init__(self, parameter)
        TableEvents.__init__(self, MissedSteps(rule, options, step), step)
        self.rule, self.stochastic_rounding = rule, stochastic_rounding
        self.shape, self.device = tuple(parameter.shape), parameter.device
        self.dtype = compute_dtype(parameter.dtype)
        #: Shape of each tensor of the state.
        self.state_shape = self.shape[0], rule.state_width(self.shape[1])
        #: Tensors of the optimizer state, by name.
        self.state: dict[str, Tensor] = {} if state is None else state
        #: Event of the last step. The weights of rows at it or later are up to date.
        self.last_step_event = step
        #: For each row, the event it is at; smaller values stand for ``base_step``.
        self.row_steps = torch.zeros(self.shape[0], dtype=torch.int64, device=self.device)
        #: The missed steps on the device.
        self.device_steps = DeviceSteps(self.missed, self.dtype, self.device)
        self._deferred: DeferredState | None = None
        # Largest row that got a gradient although it was read while stale, or −1.
        self._stale_read = torch.full((), -1, dtype=torch.int64, device=self.device)
        #: Parameter group and torch state of the table, for steps in compiled code.
        self.group: dict[str, Any] | None = None
        self.published: dict[str, Any] = {}
        self._add_missing_tensors(options)
        self.check(self.row_tensors())
        if state is not None:
            self._adapt_state(options)
        if not rule.lazy:
            check_class(parameter)

    def row_tensors(self, table: Tensor | None = None) -> RowTensors:
        """Return the table, or a copy that will replace it, and what changes with it."""
        if table is None:
            with without_catch_up():
                table = self.parameter.detach()
        state = tuple(self.state[name] for name in self.missed.names)
        return RowTensors(table, self.row_steps, state)

    def catch_up(self) -> None:
        """Apply the missed steps to every stale row, in place."""
        self.catch_up_rows(None)

    def catch_up_rows(self, ids: Tensor | None, *, table: Tensor | None = None) -> None:
        """Apply the missed steps to stale rows of ``ids``, or to all, in place.

        Args:
            ids: Rows, of any shape and possibly repeated; None for all.
            table: Copy of the table to write to, which will replace the table.
        """
        if self.is_caught_up:
            return
        if ids is not None and is_functorch_wrapped_tensor(ids):
            # The ids of all examples of a vmap are not at hand.
            ids = None
        with held_interrupts(), self.lock, torch.no_grad():
            tensors = self.row_tensors(table)
            self.check(tensors)
            self.catch_up_tensors(tensors, None if ids is None else self.as_rows(ids))
        if ids is None:
            self._check_stale_read()

    def gather_caught_up(self, ids: Tensor, *, table: Tensor | None = None) -> Tensor:
        """Return rows as they are after the missed steps; change nothing.

        Args:
            ids: Rows, of any shape and in range.
            table: Copy of the table to read from.
        """
        with self.lock, torch.no_grad():
            tensors, rows = self.row_tensors(table), self.as_rows(ids)
            if self.has_stale_weights:
                self.check(tensors)
                self.device_steps.update()
                weight = self.caught_up(tensors, rows)[0].to(tensors.table.dtype)
            else:
                weight = tensors.table.index_select(0, rows)
            return weight.view(*ids.shape, self.shape[1])

    def first_stale(self, ids: Tensor | None = None) -> int | None:
        """Return the first row of ``ids``, or of all, whose weight is stale, or None.

        None on other devices than the CPU, which are not waited for. There the error is
        raised when every row catches up.
        """
        if not self.has_stale_weights:
            return None
        row_steps = self.row_steps if ids is None else self.row_steps.index_select(0, ids)
        is_stale = self._columns_of(row_steps) < self.last_step_event - self.base_step
        if is_plain_cpu(is_stale):
            stale = is_stale.nonzero().flatten()
            if not stale.numel():
                return None
            return int(stale[0] if ids is None else ids[stale[0]])
        if ids is not None and ids.numel():
            found = torch.where(is_stale, ids, -1).amax()
            self._stale_read = torch.maximum(self._stale_read, found)
        return None

    def write_deferred(self, tensors: RowTensors | None = None) -> None:
        """Write the state of rows that lookups have caught up, as before other reads of it.

        Args:
            tensors: Tensors to write to, if they are not those of :meth:`row_tensors`.
        """
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            tensors = self.row_tensors() if tensors is None else tensors
            with torch.no_grad():
                for rows, state in deferred.current_parts(tensors):
                    tensors.write_state(rows, state)

    def catch_up_tensors(self, tensors: RowTensors, ids: Tensor | None) -> None:
        """Apply the missed steps to the stale rows among ``ids``, or to all.

        Args:
            tensors: Table and state, which are changed.
            ids: Rows in range, possibly repeated; None for all.
        """
        self.write_deferred(tensors)
        if self.is_caught_up:
            return
        self.device_steps.update()
        generator = self._generator(2 * self.step_count)
        row_steps, on_cpu = tensors.row_steps, is_plain_cpu(tensors.row_steps)
        if on_cpu and ids is not None:
            ids = self._rows_to_catch_up(tensors, ids)
        for rows, _ in self._chunks(ids):
            if on_cpu and isinstance(rows, slice):
                stale = (row_steps[rows] != self.event_count).nonzero().flatten()
                if not stale.numel():
                    continue
                rows = stale + rows.start
            for average in self.averages:
                caught_up = self._caught_up_average(average, tensors, rows)
                write_rows(average.tensor, rows, caught_up)
            weight, *state = self.caught_up(tensors, rows)
            self.write_weight(tensors, rows, weight, generator)
            if self._deferred is not None and isinstance(rows, Tensor):
                self._deferred.parts.append((rows, state))
            else:
                tensors.write_state(rows, state)
            write_number(row_steps, rows, self.event_count)
        if ids is None:
            self.base_step = self.event_count

    def _rows_to_catch_up(self, tensors: RowTensors, ids: Tensor) -> Tensor:
        """Return the distinct rows of a lookup that are stale, ascending; all if most are.

        Writing their state is deferred to the next step, which is likely to update the
        same rows, unless there are many.
        """
        rows = ids.unique()
        is_stale = tensors.row_steps.index_select(0, rows) != self.event_count
        if 8 * int(is_stale.sum()) >= 7 * rows.shape[0]:
            # A step of all rows needs no copy of its gradient.
            is_stale.fill_(True)
        stale = rows[is_stale]
        is_small = 0 < stale.shape[0] * self.shape[1] <= MAX_DEFERRED
        # Tensors made in inference mode could not be used in a step.
        if is_small and not torch.is_inference_mode_enabled():
            versions = tuple(x._version for x in tensors.state)
            self._deferred = DeferredState(rows, is_stale, versions)
        return stale

    def caught_up(
        self,
        tensors: RowTensors,
        rows: Rows,
        numbers: StepTensors | None = None,
    ) -> Sequence[Tensor]:
        """Return weight and state of rows after the missed steps.

        Args:
            tensors: Table and state.
            rows: Rows to read.
            numbers: Numbers of a step of static size; steps have been replayed.
        """
        old = [read_rows(x, rows, self.dtype) for x in (tensors.table, *tensors.state)]
        if self.rule.lazy or self.device_steps.is_empty:
            return old
        row_steps = read_rows(tensors.row_steps, rows, torch.int64)
        if numbers is None:
            start = self._columns_of(row_steps)
            is_fresh = start >= self.last_step_event - self.base_step
            if is_plain_cpu(row_steps) and isinstance(rows, Tensor):
                return self._caught_up_in_place(start, is_fresh, old)
            new = self.device_steps.catch_up(ArrayOps(torch), start, old)
        else:
            base, last_step = numbers.steps[0], numbers.steps[2]
            start = (row_steps - base).clamp(min=0)
            is_fresh = start >= last_step - base
            ops, coefficients = ArrayOps(torch), numbers.coefficients
            new = self.device_steps.apply(ops, coefficients, start, old)
        # Rows that are up to date keep their values bit for bit.
        return where_rows(is_fresh, old, new)

    def _caught_up_in_place(
        self, start: Tensor, is_fresh: Tensor, old: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return rows after the missed steps, on the CPU; ``old`` is overwritten.

        Args:
            start: Recorded event that each row is at.
            is_fresh: Whether the weight of each row is up to date.
            old: Weight and state of each row.
        """
        fresh = is_fresh.nonzero().flatten()
        if not fresh.numel():
            return self.device_steps.catch_up(rule_ops, start, old)
        kept = [x.index_select(0, fresh) for x in old]
        new = self.device_steps.catch_up(rule_ops, start, old)
        for x, y in zip(new, kept, strict=True):
            write_rows(x, fresh, y)
        return new

    def _caught_up_average(
        self, average: TensorAverage, tensors: RowTensors, rows: Rows
    ) -> Tensor:
        """Return rows of an average after its missed updates."""
        old = [read_rows(x, rows, self.dtype) for x in (tensors.table, *tensors.state)]
        start = self._columns_of(read_rows(tensors.row_steps, rows, torch.int64))
        values = read_rows(average.tensor, rows, self.dtype)
        return average.caught_up(values, start, old, self.missed)

    def _columns_of(self, row_steps: Tensor) -> Tensor:
        """Return the recorded event that each row is at, counted from ``base_step``."""
        return (row_steps - self.base_step).clamp(min=0)

    def write_weight(
        self,
        tensors: RowTensors,
        rows: Rows,
        weight: Tensor,
        generator: torch.Generator | None,
    ) -> None:
        """Write rows of the table, in place.

        Args:
            tensors: Table and state.
            rows: Rows to write.
            weight: New values in the compute dtype.
            generator: Source of random numbers for stochastic rounding.
        """
        if self.stochastic_rounding:
            weight = round_to_bfloat16(weight, generator)
        write_rows(tensors.table, rows, weight)

    def _generator(self, seed: int) -> torch.Generator | None:
        """Return a source of random numbers for rounding, if it is used."""
        if not self.stochastic_rounding:
            return None
        return torch.Generator(self.device).manual_seed(seed)

    def _chunks(self, ids: Tensor | None) -> Iterator[tuple[Rows, slice]]:
        """Yield rows of ``ids``, or all as ranges, and their places among ``ids``."""
        size = DEVICE_CHUNK
        if self.device.type == "cpu":
            size = CPU_CHUNK * torch.get_num_threads()
        count = self.shape[0] if ids is None else ids.shape[0]
        num_chunks = -(-count * self.shape[1] // size)
        chunk = max(1, -(-count // max(1, num_chunks)))
        for lo in range(0, count, chunk):
            part = slice(lo, min(lo + chunk, count))
            yield part if ids is None else ids[part], part

    def as_rows(self, ids: Tensor) -> Tensor:
        """Return ids as a vector of rows; an id out of range becomes some row.

        The lookup reports it. Catching up another row changes nothing that is read.
        """
        rows = ids.reshape(-1).to(self.device, torch.int64, non_blocking=True)
        return rows.clamp(0, max(0, self.shape[0] - 1))

    def _adapt_state(self, options: Options) -> None:
        """Adjust the state to frozen options that may be new; no row is stale."""
        for rows, _ in self._chunks(None):
            part = {name: x[rows] for name, x in self.state.items()}
            for name, new in self.rule.adapted_state(torch, options, part).items():
                part[name].copy_(new)

    def _add_missing_tensors(self, options: Options) -> None:
        #: Initial value of each tensor of the state.
        self._initial_state = self.rule.initial_state(options)
        for name, value in self._initial_state.items():
            if name not in self.state:
                shape, device = self.state_shape, self.device
                zeros = torch.zeros(shape, dtype=self.dtype, device=device)
                self.state[name] = zeros.fill_(value) if value else zeros

    def check(self, tensors: RowTensors) -> None:
        """Raise ValueError unless the table and its state fit together."""
        check_row_tensors(
            tensors.table,
            self.state,
            shape=self.shape,
            state_shape=self.state_shape,
            dtype=self.dtype,
            device=self.device,
        )

    def _check_stale_read(self) -> None:
        """Raise if a row with a gradient was read while stale; waits for the device."""
        if is_plain_cpu(self._stale_read) or self._stale_read.is_meta:
            return
        row = int(self._stale_read)
        self._stale_read.fill_(-1)
        if row >= 0:
            raise RuntimeError(stale_row_message(row))


def stale_row_message(row: int) -> str:
    """Return the message of an error about a row that was read while stale."""
    return (
        f"row {row} has a gradient, but was not up to date when it was read; read it "
        "through the parameter, not through an alias from before the last step. Call "
        "flush() before a step with a gradient that is older than the last step"
    )


def where_rows(
    mask: Tensor, values: Sequence[Tensor], others: Sequence[Tensor]
) -> list[Tensor]:
    """Return rows of ``values`` where ``mask`` is True, and of ``others`` elsewhere."""
    mask = mask[:, None]
    return [torch.where(mask, x, y) for x, y in zip(values, others, strict=True)]
