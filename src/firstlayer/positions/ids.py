"""Position ids: plain, moved on by a cache, from a padding mask, per packed document.

Every scheme takes explicit positions, so that left padding, packed documents and cached
keys are a matter of these few functions and of nothing else. A layer counts ``0, 1, …`` by
itself, from its ``offset`` if it is given one; what you need beyond that is here:

- a padded batch: :func:`from_mask`
- documents packed into one sequence: :func:`from_documents`, :func:`from_lengths`
- an image or another grid: :func:`from_grid`
- training for sequences longer than those at hand: :func:`randomised`

What is made from arrays runs unchanged on NumPy, torch and JAX arrays; what is made from
plain numbers (lengths, the sizes of a grid, a random draw) is made on the host, by NumPy.
"""

from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from .._array import cast, namespace_of, running_max
from .._check import integers, not_negative, positive

# A whole offset is smaller than this in size, so that counting on stays within 64 bits.
LIMIT = 2**62


def plain_offset(offset: Any) -> Any:
    """Return an offset that is one whole number as an int, and any other as it is.

    Example:
        >>> plain_offset(np.uint8(3))
        3
    """
    if isinstance(offset, bool) or not isinstance(offset, int | np.integer):
        return offset
    if not -LIMIT < int(offset) < LIMIT:
        raise ValueError(f"offset must be smaller than {LIMIT} in size, got {offset}")
    return int(offset)


def from_offset(steps: Shaped[Any, "*seq"], offset: Any = 0) -> Shaped[Any, "*moved"]:
    """Return ``steps`` moved on by ``offset``, as a cache of that many positions asks.

    Args:
        steps: ``0, 1, …`` as an array of the library in use.
        offset: How many positions came before: a number, or an array of one per row, which
            gives positions of shape ``(batch, length)``.

    Example:
        >>> from_offset(np.arange(3), np.array([0, 10])).tolist()
        [[0, 1, 2], [10, 11, 12]]
    """
    if isinstance(offset, int | float):
        return steps + offset
    if not hasattr(offset, "ndim"):
        kind = type(offset).__name__
        raise TypeError(f"offset must be a number or an array of one per row, got {kind}")
    if offset.ndim == 0:
        return steps + offset
    return steps + offset[..., None]


def from_mask(
    mask: Shaped[Any, "*batch length"], *, offset: Any = 0, at_padding: int = 0
) -> Shaped[Any, "*batch length"]:
    """Return positions that count the tokens of a padded batch and skip the padding.

    Padded left, right or in between, a sequence gets the positions it has alone.

    Args:
        mask: True or 1 where there is a token, False or 0 where there is padding.
        offset: How many tokens came before: a number, or an array of one per row.
        at_padding: The position of padding. -1 with a table whose ``row_offset`` is 2 gives
            the rows that OPT and RoBERTa take.

    Example:
        >>> from_mask(np.array([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist()
        [[0, 0, 0, 1], [0, 1, 2, 0]]
    """
    xp = namespace_of(mask)
    real = mask != 0
    count = xp.cumsum(cast(real, "int32"), axis=-1)
    return xp.where(real, from_offset(count - 1, offset), at_padding)


def from_documents(
    documents: Shaped[Any, "*batch length"],
) -> Shaped[Any, "*batch length"]:
    """Return positions that begin again at 0 wherever the document changes.

    Args:
        documents: Which document each token of a packed sequence belongs to. Only changes
            along the length count: an id that comes back later is a new document.

    Example:
        >>> from_documents(np.array([7, 7, 7, 2, 2, 9])).tolist()
        [0, 1, 2, 0, 1, 0]
    """
    xp = namespace_of(documents)
    steps = xp.cumsum(cast(xp.ones_like(documents), "int32"), axis=-1) - 1
    before = xp.concat([documents[..., :1], documents[..., :-1]], axis=-1)
    return steps - running_max(xp.where(documents != before, steps, 0))


def from_lengths(lengths: Any) -> Int[np.ndarray, " total"]:
    """Return the positions of documents packed one after the other.

    Args:
        lengths: How long each document is, at least 0. For cumulative lengths, as
            ``cu_seqlens``, give their differences.

    Example:
        >>> from_lengths([3, 2, 1]).tolist()
        [0, 1, 2, 0, 1, 0]
    """
    sizes = integers(lengths, name="lengths").astype(np.int64)
    if sizes.ndim != 1:
        raise ValueError(f"lengths must have one axis, got shape {sizes.shape}")
    if sizes.size and sizes.min() < 0:
        raise ValueError(f"lengths must be at least 0, got {sizes.min()}")
    starts = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) - np.repeat(starts, sizes)


def from_grid(sizes: tuple[int, ...]) -> Int[np.ndarray, "axes length"]:
    """Return the coordinates of a grid's cells, row by row: one line for each axis.

    Args:
        sizes: How many cells the grid has along each axis: height and width of an image.

    Example:
        >>> from_grid((2, 3)).tolist()
        [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    """
    sizes = tuple(positive("sizes", size) for size in sizes)
    return np.indices(sizes).reshape(len(sizes), -1)


def randomised(
    length: int,
    *,
    below: int,
    rng: int | np.random.Generator | None = None,
    batch: int | None = None,
) -> Int[np.ndarray, "*batch length"]:
    """Return ``length`` different positions drawn from ``[0, below)``, in ascending order.

    A model trained on them has met every position up to ``below`` before it meets a
    sequence that long (Ruoss et al. 2023, https://arxiv.org/abs/2305.16843).

    Args:
        length: How many positions, at most ``below``.
        below: What all positions are smaller than; longer than any sequence to come.
        rng: A seed or a generator; None is random.
        batch: Draw this many rows, each for itself. None draws a single one, without the
            batch axis.

    Example:
        >>> ids = randomised(4, below=100, rng=0)
        >>> ids.size, bool((np.diff(ids) > 0).all())
        (4, True)
    """
    length, below = not_negative("length", length), positive("below", below)
    if length > below:
        raise ValueError(f"length must be at most below {below}, got {length}")
    rng = np.random.default_rng(rng)
    if batch is None:
        return np.sort(rng.choice(below, length, replace=False))
    rows = np.empty((not_negative("batch", batch), length), np.int64)
    for row in rows:
        row[:] = randomised(length, below=below, rng=rng)
    return rows


def resolve(positions: Any, *, offset: Any, steps: Any) -> Any:
    """Return ``positions`` if they were given, else ``steps`` moved on by ``offset``.

    Args:
        positions: What the caller gave, or None.
        offset: As in :func:`from_offset`. Given together with positions it would be
            counted twice or not at all, so that is a ValueError.
        steps: ``0, 1, …`` as an array of the library in use.

    Example:
        >>> resolve(None, offset=4, steps=np.arange(2)).tolist()
        [4, 5]
    """
    if positions is None:
        return from_offset(steps, offset)
    if not (isinstance(offset, int) and offset == 0):
        raise ValueError("give positions or offset, not both: add the offset to positions")
    return positions


def check_fit(positions: tuple[int, ...], x: tuple[int, ...]) -> None:
    """Refuse positions that do not belong to vectors of this shape.

    ``(length,)`` serves every sequence. With more axes there is one for each axis of ``x``
    but the last, of the same size or 1. Nothing else is broadcast: a batch that happens to
    be as long as its sequences is never taken for them.

    Args:
        positions: The shape of the positions.
        x: The shape of the vectors, ``(..., length, embedding_dim)``.

    Example:
        >>> check_fit((4, 5), (3, 5, 8))
        Traceback (most recent call last):
        ...
        ValueError: positions must have shape (5,) or (3, 5), got (4, 5)
    """
    lead = x[:-1]
    if positions == lead[-1:]:
        return
    same = len(positions) == len(lead) and positions[-1:] == lead[-1:]
    # Not `in`: a compiler that has symbols for sizes finds no number among them.
    if not same or any(p != 1 and p != n for p, n in zip(positions, lead, strict=True)):
        shapes = " or ".join(dict.fromkeys(map(str, (lead[-1:], lead))))
        raise ValueError(f"positions must have shape {shapes}, got {positions}")


def check_axes(positions: Shaped[Any, "..."], axes: int) -> None:
    """Refuse positions that have not one coordinate for each of ``axes``, on their first.

    Example:
        >>> check_axes(np.zeros((2, 7)), 2)
    """
    if tuple(positions.shape[:1]) != (axes,):
        raise ValueError(
            f"positions must have shape ({axes}, ...), one coordinate for each of the "
            f"axes, got {tuple(positions.shape)}"
        )
