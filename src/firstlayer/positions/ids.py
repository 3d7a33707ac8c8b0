"""Position ids: from a padding mask, for packed documents, from a cache offset, for a grid.

Every scheme takes explicit positions, so left padding, packed documents and cached keys
need nothing but these functions. By default a layer counts ``0, 1, …`` from its
``offset``. Other positions are built by:

- a padded batch: :func:`from_mask`
- documents packed into one sequence: :func:`from_documents`, :func:`from_lengths`
- an image or another grid: :func:`from_grid`, or :func:`from_patches` as in DINOv3
- training for longer sequences than the data has: :func:`randomised`

Functions of arrays run unchanged on NumPy, torch and JAX arrays. Functions of plain
numbers (lengths, grid sizes, random draws) return NumPy arrays.
"""

from typing import Any

import numpy as np
from jaxtyping import Float64, Int, Shaped

from .._array import cast, is_real, namespace_of, running_max
from .._check import integers, not_negative, positive

# Integer offsets must be smaller than this in size, so that positions fit in 64 bits.
LIMIT = 2**62


def plain_offset(offset: Any) -> Any:
    """Return an integer scalar offset as an int, and any other offset unchanged.

    Example:
        >>> plain_offset(np.uint8(3))
        3
    """
    if isinstance(offset, bool) or not isinstance(offset, int | np.integer):
        return offset
    if not -LIMIT < int(offset) < LIMIT:
        raise ValueError(f"offset must be smaller than {LIMIT} in size, got {offset}")
    return int(offset)


def from_offset(steps: Shaped[Any, "*seq"], offset: Any = 0) -> Shaped[Any, "*shifted"]:
    """Return ``steps`` shifted by ``offset``, the number of positions already cached.

    Args:
        steps: ``0, 1, …`` as an array of the library in use.
        offset: A number, or an array of one for each sequence, which gives positions of
            shape ``(batch, length)``.

    Example:
        >>> from_offset(np.arange(3), np.array([0, 10])).tolist()
        [[0, 1, 2], [10, 11, 12]]
    """
    if isinstance(offset, int | float):
        return steps + offset
    if not hasattr(offset, "ndim"):
        name = type(offset).__name__
        raise TypeError(f"offset must be a number or an array of one per row, got {name}")
    if offset.ndim == 0:
        return steps + offset
    return steps + offset[..., None]


def from_mask(
    mask: Shaped[Any, "*batch length"], *, offset: Any = 0, at_padding: int = 0
) -> Shaped[Any, "*batch length"]:
    """Return positions that count the tokens of a padded batch and skip the padding.

    With padding on the left, on the right or in between, a sequence gets the positions it
    would have without padding.

    Args:
        mask: Bools or integers: True or 1 at tokens, False or 0 at padding. Reals are a
            TypeError, because 0 is a token in a mask that is added to scores.
        offset: Number of preceding tokens: a number, or an array of one for each sequence.
        at_padding: Position of padding. -1 with a table whose ``row_offset`` is 2 gives
            the rows that OPT and RoBERTa use.

    Example:
        >>> from_mask(np.array([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist()
        [[0, 0, 0, 1], [0, 1, 2, 0]]
    """
    xp = namespace_of(mask, name="mask")
    if is_real(mask):
        raise TypeError(
            f"mask must be bools or integers, got {mask.dtype}: pass mask == 0 if it is "
            "added to scores, else mask != 0"
        )
    is_token = mask != 0
    count = xp.cumsum(cast(is_token, "int32"), axis=-1)
    return xp.where(is_token, from_offset(count - 1, offset), at_padding)


def from_documents(documents: Shaped[Any, "*batch length"]) -> Shaped[Any, "*batch length"]:
    """Return positions that restart at 0 where the document changes.

    Args:
        documents: Document id of each token of a packed sequence. Only changes along the
            length matter: an id that reappears later starts a new document.

    Example:
        >>> from_documents(np.array([7, 7, 7, 2, 2, 9])).tolist()
        [0, 1, 2, 0, 1, 0]
    """
    xp = namespace_of(documents, name="documents")
    steps = xp.cumsum(cast(xp.ones_like(documents), "int32"), axis=-1) - 1
    previous = xp.concat([documents[..., :1], documents[..., :-1]], axis=-1)
    return steps - running_max(xp.where(documents != previous, steps, 0))


def from_lengths(lengths: Any) -> Int[np.ndarray, " total"]:
    """Return the positions of documents packed one after another.

    Args:
        lengths: Length of each document, at least 0. For cumulative lengths such as
            ``cu_seqlens``, pass their differences.

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
    """Return the coordinates of a grid's cells in row-major order, one row per axis.

    Args:
        sizes: Number of cells along each axis, such as height and width of an image.

    Example:
        >>> from_grid((2, 3)).tolist()
        [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    """
    sizes = tuple(positive("sizes", size) for size in sizes)
    return np.indices(sizes).reshape(len(sizes), -1)


def from_patches(
    sizes: tuple[int, ...], *, prefix: int = 0
) -> Float64[np.ndarray, "axes length"]:
    """Return the centers of an image's patches, between -1 and 1, one row per axis.

    These are the positions of DINOv3. They do not depend on the resolution of the image,
    and may be shifted and scaled at random in training.

    Args:
        sizes: Number of patches along each axis, such as height and width.
        prefix: Number of tokens before the patches, such as CLS and registers. Their
            coordinates are 0, where nothing is rotated.

    Example:
        >>> from_patches((2, 2), prefix=1).tolist()
        [[0.0, -0.5, -0.5, 0.5, 0.5], [0.0, -0.5, 0.5, -0.5, 0.5]]
    """
    centers = (2 * from_grid(sizes) + 1) / np.array(sizes)[:, None] - 1
    return np.pad(centers, ((0, 0), (not_negative("prefix", prefix), 0)))


def randomised(
    length: int,
    *,
    below: int,
    rng: int | np.random.Generator | None = None,
    batch: int | None = None,
) -> Int[np.ndarray, "*batch length"]:
    """Return ``length`` distinct positions drawn from ``[0, below)``, in ascending order.

    A model trained on them has seen every position up to ``below`` before it is given a
    sequence that long (Ruoss et al. 2023, https://arxiv.org/abs/2305.16843).

    Args:
        length: Number of positions, at most ``below``.
        below: Exclusive upper bound, at least the longest sequence at inference.
        rng: Seed or generator; None is random.
        batch: Number of independent rows. None draws one, without the batch axis.

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
    """Return ``positions``, or ``steps`` shifted by ``offset`` if ``positions`` is None.

    Args:
        positions: Positions given by the caller, or None.
        offset: As in :func:`from_offset`. A ValueError if positions are given too, because
            it is ambiguous whether they include it.
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
    """Raise if positions of this shape do not fit vectors of this shape.

    ``(length,)`` applies to every sequence. Otherwise there must be one axis for each axis
    of ``x`` but the last, of the same size or 1. Nothing else is broadcast, so a batch
    whose size equals its length is never confused with it.

    Args:
        positions: Shape of the positions.
        x: Shape of the vectors, ``(..., length, embedding_dim)``.

    Example:
        >>> check_fit((4, 5), (3, 5, 8))
        Traceback (most recent call last):
        ...
        ValueError: positions must have shape (5,) or (3, 5), got (4, 5)
    """
    lead = x[:-1]
    if positions == lead[-1:]:
        return
    aligned = len(positions) == len(lead) and positions[-1:] == lead[-1:]
    # Two comparisons instead of `in`, which fails on a compiler's symbolic sizes.
    if not aligned or any(p != 1 and p != n for p, n in zip(positions, lead, strict=True)):
        shapes = " or ".join(dict.fromkeys(map(str, (lead[-1:], lead))))
        raise ValueError(f"positions must have shape {shapes}, got {positions}")


def check_axes(positions: Shaped[Any, "..."], axes: int) -> None:
    """Raise if the first axis of ``positions`` does not have one entry per coordinate.

    Example:
        >>> check_axes(np.zeros((2, 7)), 2)
    """
    if tuple(positions.shape[:1]) != (axes,):
        raise ValueError(
            f"positions must have shape ({axes}, ...), one coordinate for each of the "
            f"axes, got {tuple(positions.shape)}"
        )
