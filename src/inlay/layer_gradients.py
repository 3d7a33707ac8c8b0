"""The gradients of the complete layer's tables and norm, by the kernels.

A token table is large and its ids mostly differ, so its gradient is a sum by id
(:class:`inlay.rows.Rows`): a row whose id occurs once is written where it belongs at once,
and only those of repeated ids are summed afterwards.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64

from . import kernels
from .rows import Rows

Part = tuple[Float[np.ndarray, "rows embedding_dim"], Int64[np.ndarray, " places"]]
Missing = tuple[None, None]
# Blocks there are at most, and how many rows there are to each row of their sums at least.
BLOCKS, SHARE = 64, 4
# From how many places to a row on, the second table is summed by each block for itself.
FEW = 8
# How many times as much memory as it needs a gradient may keep.
WASTE = 4


@dataclass(frozen=True, eq=False)
class LayerGradients:
    """What each part of the layer gets.

    Args:
        token: Of the token table; or, if not asked by id, one row for each place.
        second: Of the first table that is added, or None.
        third: Of the second table that is added, all rows of it, or None.
        weight: Of the norm's weight, or None.
        bias: Of its bias, or None.
    """

    token: Rows | Float[np.ndarray, "places embedding_dim"]
    second: Rows | None
    third: Float[np.ndarray, "rows embedding_dim"] | None
    weight: Float[np.ndarray, " embedding_dim"] | None
    bias: Float[np.ndarray, " embedding_dim"] | None


def layer_gradients(
    token: Part,
    added: tuple[Part | Missing, ...],
    *,
    scale: float,
    norm: tuple[np.ndarray, float] | None,
    dy: Float[np.ndarray, "places embedding_dim"],
    by_id: bool = True,
    skips: tuple[int | None, int | None] = (None, None),
    mask: Bool[np.ndarray, " places"] | None = None,
) -> LayerGradients:
    """Return the gradients of all that an output row is made of.

    Args:
        token: A table and its row for each place.
        added: Up to two more; ``(None, None)`` for a first that is not there. Fewer rows
            than there are places begin again at their end.
        scale: What token rows were multiplied by.
        norm: Weight and epsilon of the LayerNorm, or None.
        dy: Gradient of the output.
        by_id: Whether the gradient of token rows is summed by id.
        skips: The row of the token table and of the second one that gets no gradient.
        mask: False at places that give nobody a gradient, whatever is there.
    """
    places = np.arange(len(dy)) if mask is None else np.flatnonzero(mask)
    added = tuple((table, _for_each_place(rows, len(dy))) for table, rows in added)  # pyright: ignore
    layout = _by_id(token[1], places, skip=skips[0]) if by_id else _in_order(len(dy))
    shared = 2 + (added[1][0].shape[0] if len(added) > 1 else 0)  # pyright: ignore
    seconds, how = _seconds(added, places, shared=shared)
    route = kernels.Route(slots=layout.slots, size=layout.size, **how)
    values, dsecond, dshared = kernels.layer_pull(
        token, added, scale=scale, norm=norm, dy=dy, route=route
    )
    if not by_id and mask is not None:
        values[~mask] = 0
    weight, bias = (None, None) if norm is None else dshared[:2]
    return LayerGradients(
        layout.summed(values) if by_id else values,
        None if seconds is None else _without(Rows(seconds, dsecond), skips[1]),
        dshared[2:] if len(added) > 1 else None,
        weight,
        bias,
    )


def _for_each_place(rows: np.ndarray | None, places: int) -> Any:
    """Return a row for each place."""
    return rows if rows is None or rows.size == places else np.resize(rows, places)


def _seconds(
    added: tuple[Part | Missing, ...], places: np.ndarray, *, shared: int
) -> tuple[Any, dict[str, Any]]:
    """Return the rows of the second table, and the order that suits their sums."""
    if not added or added[0][1] is None:
        return None, {"order": places, "bounds": _blocks(places.size, shared)}
    order, bounds, rows = kernels.group_by_id(added[0][1][places])
    sums = np.empty(added[0][1].size, np.int64)
    sums[places[order]] = np.repeat(np.arange(rows.size), np.diff(bounds))
    how = {"sums": sums, "count": rows.size}
    if places.size >= FEW * rows.size:
        # Few rows, met again and again: every block has sums of its own.
        blocks = _blocks(places.size, shared + rows.size)
        return rows, {"order": places, "bounds": blocks, "is_split": True, **how}
    # Else all places of a row are in one block.
    cuts = bounds[_blocks(rows.size, 1 + shared * rows.size // max(1, places.size))]
    return rows, {"order": places[order], "bounds": cuts, **how}


def _blocks(size: int, sums: int) -> np.ndarray:
    """Return the bounds of so many blocks that their sums are fewer than the rows."""
    count = max(1, min(BLOCKS, size // (SHARE * sums)))
    return np.linspace(0, size, count + 1).astype(np.int64)


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where gradients of token rows are written: rows of ids, each once, come first.

    After them come the rows of ids that occur several times, those of one id together.

    Args:
        slots: The row for each place; -1 is none.
        ids: The ids, ascending.
        counts: How often each occurs.
    """

    slots: Int64[np.ndarray, " places"]
    ids: Int64[np.ndarray, " rows"]
    counts: Int64[np.ndarray, " rows"]

    @property
    def size(self) -> int:
        """How many rows there are."""
        return self.ids.size + int(self.counts[self.counts > 1].sum())

    def summed(self, values: Float[np.ndarray, "size embedding_dim"]) -> Rows:
        """Return one row for each id."""
        several, size = np.flatnonzero(self.counts > 1), self.ids.size
        if several.size:
            ends = size + np.cumsum(self.counts[several])
            starts, every = ends - self.counts[several], np.arange(len(values))
            kernels.sum_groups(values, every, starts, ends, into=(values, several))
        # A view keeps all of the values alive, which are many where ids are few.
        few = len(values) > WASTE * size
        return Rows(self.ids, values[:size].copy() if few else values[:size])


def _in_order(size: int) -> _Layout:
    every = np.arange(size)
    return _Layout(every, every, np.ones(size, np.int64))


def _by_id(ids: np.ndarray, places: np.ndarray, *, skip: int | None) -> _Layout:
    order, bounds, unique = kernels.group_by_id(ids[places])
    counts = np.diff(bounds)
    if skip is not None:
        kept = unique != skip
        order = order[np.repeat(kept, counts)]
        unique, counts = unique[kept], counts[kept]
    slots = kernels.slots_of(places[order], counts, ids.size)
    return _Layout(slots, unique, counts)


def _without(rows: Rows, skip: int | None) -> Rows:
    if skip is None or skip not in rows.ids:
        return rows
    kept = rows.ids != skip
    return Rows(rows.ids[kept], rows.values[kept])
