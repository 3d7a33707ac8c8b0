"""What a row optimizer has yet to do to a parameter, kept on the parameter itself.

``parameter.table_state`` is there while a row optimizer in ``mode="exact"`` trains a table.
Whoever is about to read rows calls :func:`catch_up`. Copying and pickling settle first and
leave it behind: torch asks the parameter itself how that is done, and gets the answer of
one that is up to date. In compiled code settling is one operator that writes to the table.
"""

import itertools
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from ...optim.rule import Options, Rule
from ...optim.table_state import TableState
from .._tensors.memory import array_of, array_of_table, is_plain_cpu, threads_of_torch

# What stands on a parameter while it is waited for.
NAMES = ("table_state", "__deepcopy__", "__reduce_ex__")

# An operator takes numbers and tensors only: it finds what is pending by its number.
_by_number: "weakref.WeakValueDictionary[int, TablePending]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class ParameterState(TableState):
    """What is pending for the rows of a parameter.

    Args:
        parameter: The table. It is not kept alive.
        rule: What moves its rows.
        options: The rule's options.
        how: As in :class:`firstlayer.optim.table_state.TableState`.
    """

    def __init__(
        self, parameter: Tensor, rule: Rule, *, options: Options, **how: Any
    ) -> None:
        # Not a method of this: what is pending should go when nobody needs it.
        owner = self._owner = weakref.ref(parameter)
        super().__init__(rule, lambda: _array_of(owner), options=options, **how)
        self.number = next(_numbers)
        _by_number[self.number] = self

    @property
    def parameter(self) -> Tensor:
        """The table."""
        return _alive(self._owner)

    def catch_up(self, ids: Any = None, *, table: Any = None) -> None:
        """Bring rows up to date: those of ``ids``, or all."""
        if not self.is_caught_up:
            with threads_of_torch():
                super().catch_up(ids, table=table)

    def attach(self) -> None:
        """Put this on the parameter, in place of what was there."""
        parameter = self.parameter
        detach(parameter)
        # The latter two are what copy and pickle look for on whatever they are given.
        mine = zip(NAMES, (self, self._copied, self._reduced), strict=True)
        vars(parameter).update(mine)

    def _copied(self, memo: dict[int, Any]) -> Any:
        self.catch_up()
        parameter = self.parameter
        return type(parameter).__deepcopy__(parameter, memo)

    def _reduced(self, protocol: Any) -> Any:
        self.catch_up()
        parameter = self.parameter
        twin = Parameter(parameter.data, parameter.requires_grad)
        kept = {key: value for key, value in vars(parameter).items() if key not in NAMES}
        vars(twin).update(kept)
        return twin.__reduce_ex__(protocol)


def detach(parameter: Tensor) -> None:
    """Bring every row up to date and take what was pending off the parameter."""
    table_state = getattr(parameter, "table_state", None)
    if isinstance(table_state, ParameterState):
        table_state.catch_up()
        for name in NAMES:
            vars(parameter).pop(name, None)


def catch_up(weight: Tensor, ids: Tensor | None = None) -> None:
    """Bring rows up to date before they are read, if anything is pending for a table.

    Args:
        weight: The table.
        ids: The rows that will be read; None is all of them.
    """
    table_state = getattr(weight, "table_state", None)
    # A symbol that stands for a table has every attribute.
    if not isinstance(table_state, ParameterState):
        return
    if torch.compiler.is_compiling():
        # An exported program has no optimizer.
        if not torch.compiler.is_exporting():
            with torch.no_grad():
                torch.ops.firstlayer.catch_up(weight, ids, table_state.number)
    elif not table_state.is_readable:
        table_state.catch_up(_index(ids))


def _alive(owner: "weakref.ref[Tensor]") -> Tensor:
    parameter = owner()
    if parameter is None:
        raise ReferenceError("the parameter is gone, and what was pending with it")
    return parameter


def _array_of(owner: "weakref.ref[Tensor]") -> np.ndarray:
    return array_of_table(_alive(owner))


def _index(ids: Tensor | None) -> np.ndarray | None:
    """Return ids as the kernels take them, or None if they cannot be read."""
    if ids is None or not is_plain_cpu(ids):
        return None
    return np.ascontiguousarray(array_of(ids).reshape(-1), np.int64)


@torch.library.custom_op("firstlayer::catch_up", mutates_args=("weight",))
def _catch_up_loop(weight: Tensor, ids: Tensor | None, number: int) -> None:
    table_state = _by_number.get(number)
    if table_state is not None and not table_state.is_readable:
        # Of the tensor that is given, which need not be the parameter: what compiled the
        # code may write to a copy and copy that back.
        table_state.catch_up(_index(ids), table=array_of_table(weight))


@_catch_up_loop.register_fake
def _(weight: Tensor, ids: Tensor | None, number: int) -> None:
    return None
