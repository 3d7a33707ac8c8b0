"""Step of one table for compiled code, from ids and values of a static size.

``torch.compile(fullgraph=True)`` cannot build sparse tensors, and a row optimizer's own
``step`` reads numbers that change in every call. A :class:`RowStep` takes ids and values
instead. Everything of the table's device is traced. What the host computes, with the
options at the time of the call, is in two operators around it.
"""

from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from .._tensors.errors import WrongValue, check_ids, check_integers
from .._tensors.row_parameter import WITHOUT_VALUES, without_catch_up
from .operator_state import OperatorState
from .row_tensors import RowTensors, StepTensors
from .static_step import (
    begin_lookup,
    begin_step,
    end_step,
    new_step_tensors,
    static_lookup,
    static_step,
)
from .table_state import find_state


class RowStep:
    """Step of one table, callable in code that is compiled with ``fullgraph=True``.

    Made by :meth:`firstlayer.torch.optim.RowOptimizer.row_step`. A call takes the step that
    ``optimizer.step()`` would take for this table with the sparse gradient of these ids and
    values. Options are read at each call, so schedules do not recompile. The options
    that choose the form of the rule (``amsgrad``, ``centered``, ``eps``, momentum or none)
    must stay the same.

    Args:
        parameter: Table.
        state: State of the table.

    Shape:
        - ids: ``(*batch)``, integers. Entries with a negative id are left out, so batches
          of different lengths can be padded to one size.
        - values: ``(*batch, embedding_dim)``, the gradient of each looked up row. The
          values of equal ids are added up.

    Example:
        >>> from firstlayer.torch import Embedding
        >>> from firstlayer.torch.optim import RowAdamW
        >>> layer = Embedding(9, 2, sparse=True)
        >>> optimizer = RowAdamW(layer.parameters(), lr=0.1)
        >>> step = optimizer.row_step(layer.weight)
        >>> ids = torch.tensor([3, 7, 3, -1])
        >>> rows = step.lookup(ids).requires_grad_()
        >>> rows[:3].square().sum().backward()
        >>> step(ids, rows.grad)
    """

    def __init__(self, parameter: Tensor, state: OperatorState) -> None:
        self.parameter = parameter
        self.bind(state)

    def bind(self, state: OperatorState) -> None:
        """Use another state of the table from now on."""
        self._state, self._number = state, state.number
        self._row_tensors = state.row_tensors()
        self._numbers = new_step_tensors(state)

    def __call__(
        self,
        ids: Integer[Tensor, "*batch"],
        values: Float[Tensor, "*batch embedding_dim"],
    ) -> None:
        """Take a step."""
        check_integers(ids, name="ids")
        width = self._state.shape[1]
        if values.shape != (*ids.shape, width):
            raise WrongValue(
                f"values must have shape {(*ids.shape, width)}, got {tuple(values.shape)}"
            )
        ids, numbers = ids.reshape(-1).long(), self._numbers
        with torch.no_grad(), without_catch_up():
            tensors = self._tensors()
            torch.ops.firstlayer.begin_row_step(
                tensors.as_list(), numbers.as_list(), ids, self._number
            )
            if ids.shape[0]:
                values = values.detach().reshape(-1, width)
                static_step(self._state, tensors, numbers, ids, values)
            torch.ops.firstlayer.end_row_step(numbers.as_list(), self._number)

    def lookup(
        self, ids: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return rows of the table as they are after all steps, without a gradient.

        Compiled code computes the missed steps of the rows together with the lookup, and
        writes nothing. A negative id reads row 0.
        """
        check_integers(ids, name="ids")
        index, numbers = ids.reshape(-1).long(), self._numbers
        with torch.no_grad(), without_catch_up():
            tensors = self._tensors()
            torch.ops.firstlayer.begin_row_lookup(
                tensors.as_list(), numbers.as_list(), index, self._number
            )
            rows = static_lookup(self._state, tensors, numbers, index)
        return rows.view(*ids.shape, self._state.shape[1])

    def _tensors(self) -> RowTensors:
        others = self._row_tensors
        return RowTensors(self.parameter.detach(), others.row_steps, others.state)


def _state(number: int) -> Any:
    state: Any = find_state(number)
    if state is None or state.group is None:
        raise RuntimeError("the optimizer of this RowStep no longer exists")
    return state


def _prepared(tensors: list[Tensor], ids: Tensor, number: int) -> tuple[Any, RowTensors]:
    """Return the state of a number and the tensors to work on, if everything fits."""
    state, (table, row_steps, *others) = _state(number), tensors
    if not state.is_published(state.published):
        raise RuntimeError(
            "the optimizer's state of the table was replaced; call row_step again"
        )
    if ids.numel():
        check_ids(ids.clamp(min=0), table.shape[0])
    return state, RowTensors(table, row_steps, tuple(others))


@torch.library.custom_op(
    "firstlayer::begin_row_lookup", mutates_args=("tensors", "numbers")
)
def _begin_lookup(
    tensors: list[Tensor], numbers: list[Tensor], ids: Tensor, number: int
) -> None:
    state, row_tensors = _prepared(tensors, ids, number)
    begin_lookup(state, row_tensors, StepTensors(*numbers), ids)


@torch.library.custom_op("firstlayer::begin_row_step", mutates_args=("tensors", "numbers"))
def _begin_step(
    tensors: list[Tensor], numbers: list[Tensor], ids: Tensor, number: int
) -> None:
    state, row_tensors = _prepared(tensors, ids, number)
    begin_step(state, row_tensors, StepTensors(*numbers), ids, state.group)


@_begin_lookup.register_fake
@_begin_step.register_fake
def _(tensors: list[Tensor], numbers: list[Tensor], ids: Tensor, number: int) -> None:
    return None


# The numbers are declared as mutated, so that the operator runs after the code that reads
# them.
@torch.library.custom_op("firstlayer::end_row_step", mutates_args=("numbers",))
def _end_step(numbers: list[Tensor], number: int) -> None:
    state = _state(number)
    end_step(state, state.group)
    state.publish(state.published)


@_end_step.register_fake
def _(numbers: list[Tensor], number: int) -> None:
    return None


# These operators catch up rows themselves.
WITHOUT_VALUES.update((
    torch.ops.firstlayer.begin_row_lookup.default,
    torch.ops.firstlayer.begin_row_step.default,
))
