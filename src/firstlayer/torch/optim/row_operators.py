"""Operators on rows of a table: read and write rows, and sum gradients by id.

All functions run on any device and under ``torch.compile``. Only :func:`sum_by_id`
waits for the device: the number of distinct ids determines the size of its results.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import embedding_bag

from .._tensors.memory import is_plain_cpu

#: Rows by number, or a range of rows.
Rows = Tensor | slice

# On the CPU index_copy_ copies element by element, so large elements are copied faster.
WORD = torch.complex128


class Groups(NamedTuple):
    """Positions of a batch of ids, grouped by id.

    Args:
        order: Positions sorted by id; equal ids keep their order.
        offsets: Start of each group in ``order``.
        rows: Id of each group.
    """

    order: Tensor
    offsets: Tensor
    rows: Tensor


def read_rows(table: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    """Return rows of a table in ``dtype``; a range of rows may be a view."""
    part = table[rows] if isinstance(rows, slice) else table.index_select(0, rows)
    return part.to(dtype)


def write_rows(table: Tensor, rows: Rows, values: Tensor) -> None:
    """Write rows in place, in the dtype of the table.

    A row that occurs twice must have the same values twice.
    """
    if isinstance(rows, slice):
        table[rows].copy_(values)
        return
    values = values.to(table.dtype)
    if not is_compiling() and _is_made_of_words(table) and _is_made_of_words(values):
        table, values = table.view(WORD), values.view(WORD)
    table.index_copy_(0, rows, values)


def write_number(x: Tensor, rows: Rows, value: int) -> None:
    """Write one number to rows of a vector, in place."""
    if isinstance(rows, slice):
        x[rows] = value
    else:
        x.index_fill_(0, rows, value)


def sum_by_id(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids, ascending, and the sum of the values of each.

    Waits for the device once, for the number of distinct ids.

    Args:
        ids: Ids of shape ``(n,)``.
        values: One row for each id, in the compute dtype.
    """
    ordered, order = torch.sort(ids, stable=True)
    offsets = _is_first(ordered).nonzero().flatten()
    groups = Groups(order, offsets, ordered.index_select(0, offsets))
    return groups.rows, _sum_groups(values, groups)


def sum_by_id_static(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return as many ids as there are, and for each the sum of the values of that id.

    The sizes of the results do not depend on the ids. All distinct ids are in the result;
    the largest is repeated, with the same sum. Entries with a negative id are left out. If
    every id is negative, every id of the result is −1.

    Args:
        ids: Ids of shape ``(n,)``, n > 0.
        values: One row for each id, in the compute dtype.
    """
    count = ids.shape[0]
    ordered, order = torch.sort(ids.clamp(min=-1), stable=True)
    is_first = _is_first(ordered)
    group = is_first.cumsum(0) - 1
    position = torch.arange(count, device=ids.device)
    # Entry ``count`` takes the writes of positions that are not the first of their group.
    starts = torch.full((count + 1,), count, dtype=torch.int64, device=ids.device)
    offsets = starts.scatter(0, torch.where(is_first, group, count), position)[:count]
    last = group[-1:]
    number = torch.minimum(position, last)
    # Negative ids are the first group.
    number = torch.where(ordered[:1] < 0, torch.minimum(number + 1, last), number)
    rows = ordered.index_select(0, offsets.index_select(0, number))
    sums = _sum_groups(values, Groups(order, offsets, rows))
    return rows, sums.index_select(0, number)


def round_to_bfloat16(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return float32 numbers in bfloat16, rounded up or down at random.

    The nearer value has the higher probability, so the expected value is ``x``.

    Args:
        x: Numbers in float32.
        generator: Source of random numbers on the device of ``x``; None for torch's.
    """
    noise = torch.randint(
        0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    # Adding to the bits of a number that is not finite could change it into another.
    bits = (x.view(torch.int32) + noise) & -(1 << 16)
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)


def _is_made_of_words(x: Tensor) -> bool:
    """Return whether rows on the CPU can be viewed as vectors of :data:`WORD`."""
    if not is_plain_cpu(x) or x.stride(-1) != 1:
        return False
    sizes = x.shape[-1], x.stride(0), x.storage_offset()
    is_divisible = all(n * x.itemsize % WORD.itemsize == 0 for n in sizes)
    return is_divisible and x.data_ptr() % WORD.itemsize == 0


def _is_first(ordered: Tensor) -> Tensor:
    """Return where a sorted id differs from the one before it."""
    first = torch.ones_like(ordered[:1], dtype=torch.bool)
    return torch.cat([first, ordered[1:] != ordered[:-1]])


def _sum_groups(values: Tensor, groups: Groups) -> Tensor:
    # A bag sums its rows in order, in parallel over bags: no atomic additions.
    return embedding_bag(groups.order, values, groups.offsets, mode="sum")
