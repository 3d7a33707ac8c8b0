"""Learned positions: a table with one row for each position, added to the token's vector.

GPT-2, BERT, OPT, RoBERTa, ViT and CLIP learn where a token stands as they learn what it is.
The table has an end: what lies beyond it was never trained.

Position ``p`` is in row ``p + row_offset``. Rows before that are for what is no position:
OPT and RoBERTa have ``row_offset=2`` and send padding to position -1, which is row 1. A
real-valued position lies between two rows and is interpolated linearly, which squeezes a
longer sequence into a table as it is.

A table can also be made anew for another length (:func:`resize_linear`) or for another
grid of image patches (:func:`resize_grid`, bicubic). Resampling is a weighted sum of a few
rows; it is done in float64 on the host and rounded once, and equals what
``torch.nn.functional.interpolate`` computes.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from .._array import cast, compute_dtype, is_real, namespace_of
from .._check import integer, not_negative, number, one_of, positive
from ..embeddings.init import normal
from ..embeddings.token import mask_out_of_range

Align = Literal["ends", "centres", "starts"]
Taps = tuple[Int[np.ndarray, "new taps"], Float[np.ndarray, "new taps"]]


def small_normal(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw with standard deviation 0.02, as GPT-2 and BERT draw their positions."""
    return normal(shape, rng, std=0.02)


def rows_at(
    weight: Float[Any, "rows embedding_dim"],
    positions: Shaped[Any, "*seq"],
    *,
    row_offset: int = 0,
) -> Float[Any, "*seq embedding_dim"]:
    """Return the row of each position, NaN where the table has none.

    Args:
        weight: The table.
        positions: Integers, for rows as they are, or reals, for a mix of the two rows
            around each, in float32 (float64 for float64).
        row_offset: The row of position 0.

    Example:
        >>> rows_at(np.array([[0.0], [10.0], [30.0]]), np.array([1.5, 0.1])).tolist()
        [[20.0], [1.0]]
    """
    xp = namespace_of(weight)
    last = weight.shape[0] - 1 - row_offset
    if not is_real(positions):
        inside, near = mask_out_of_range(positions, first=-row_offset, last=last)
        return xp.where(inside[..., None], weight[near + row_offset], float("nan"))
    inside, low, high, share = neighbours(positions, first=-row_offset, last=last)
    work = compute_dtype(weight.dtype)
    a, b = (cast(weight[row + row_offset], work) for row in (low, high))
    share = cast(share, work)[..., None]
    # Chosen last: a share of NaN would make the gradient of the rows NaN.
    return xp.where(inside[..., None], a * (1 - share) + b * share, float("nan"))


def neighbours(
    positions: Float[Any, "*seq"], *, first: int, last: int
) -> tuple[Bool[Any, "*seq"], Int[Any, "*seq"], Int[Any, "*seq"], Float[Any, "*seq"]]:
    """Return which positions there are, the whole ones around each, and the upper's share.

    Where there is no such position the others are those of ``first``.

    Args:
        positions: Reals.
        first: The first whole position there is.
        last: The last one.

    Example:
        >>> inside, low, high, share = neighbours(np.array([2.25, 5.0]), first=0, last=5)
        >>> low.tolist(), high.tolist(), share.tolist()
        ([2, 5], [3, 5], [0.25, 0.0])
    """
    xp = namespace_of(positions)
    real = cast(positions, compute_dtype(positions.dtype))
    inside = (real >= first) & (real <= last)
    near = xp.where(inside, real, first)
    below = xp.floor(near)
    low = cast(below, "int32")
    return inside, low, xp.clip(low + 1, None, last), near - below


def check_positions(positions: np.ndarray, *, max_positions: int, row_offset: int) -> None:
    """Refuse positions that a table has no row for.

    Args:
        positions: Integers or reals, on the host.
        max_positions: How many positions the table has.
        row_offset: How many rows come before that of position 0.

    Example:
        >>> check_positions(np.array([0, 600]), max_positions=512, row_offset=0)
        Traceback (most recent call last):
        ...
        ValueError: positions must be smaller than max_positions 512, got 600
    """
    if not positions.size:
        return
    largest, smallest = positions.max().item(), positions.min().item()
    if not largest < max_positions:
        raise ValueError(
            f"positions must be smaller than max_positions {max_positions}, got {largest}"
        )
    if largest > max_positions - 1:
        raise ValueError(
            f"positions must be at most {max_positions - 1}, the last of max_positions "
            f"{max_positions}, got {largest}"
        )
    if smallest < -row_offset:
        raise ValueError(
            f"positions must be at least {-row_offset} for row_offset {row_offset}, "
            f"got {smallest}"
        )


def padding_row(padding_idx: int | None, row_offset: int) -> int | None:
    """Return the row that is padding, if it is one before that of position 0, or None.

    Example:
        >>> padding_row(2, 2)
        Traceback (most recent call last):
        ...
        ValueError: padding_idx must be one of the 2 rows before position 0, got 2
    """
    if padding_idx is None:
        return None
    if not 0 <= integer("padding_idx", padding_idx) < row_offset:
        raise ValueError(
            f"padding_idx must be one of the {row_offset} rows before position 0, "
            f"got {padding_idx}"
        )
    return int(padding_idx)


def resize_linear(
    weight: Float[np.ndarray, "old embedding_dim"], length: int, *, align: Align = "ends"
) -> Float[np.ndarray, "length embedding_dim"]:
    """Return a table of ``length`` rows along the lines between the rows of ``weight``.

    Args:
        weight: The table as it is, without rows that are no positions.
        length: How many rows there shall be. Positive.
        align: Where new row ``m`` of N' lies among the N old ones. ``"ends"``: the first on
            the first, the last on the last, at ``m * (N - 1) / (N' - 1)`` (torch's
            ``align_corners=True``). ``"centres"``: every row in the middle of its share, at
            ``(m + 0.5) * N / N' - 0.5`` (torch's default). ``"starts"``: at ``m * N / N'``
            (position interpolation). Places beyond the last row are on it.

    Example:
        >>> resize_linear(np.array([[0.0], [3.0]]), 4).ravel().tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    one_of("align", align, ("ends", "centres", "starts"))
    old = len(weight)
    places = _places(positive("weight rows", old), positive("length", length), align)
    _, low, high, share = neighbours(np.clip(places, 0, old - 1), first=0, last=old - 1)
    taps = np.stack([low, high], axis=1), np.stack([1 - share, share], axis=1)
    return _resampled(weight, taps, axis=0).astype(weight.dtype)


def resize_grid(
    weight: Float[np.ndarray, "rows embedding_dim"],
    new_grid: tuple[int, int],
    *,
    grid: tuple[int, int],
    class_tokens: int = 1,
    antialias: bool = False,
    nudge: float = 0.0,
) -> Float[np.ndarray, "new_rows embedding_dim"]:
    """Return the table of an image's patches for another grid, bicubically.

    Equals what ViT, DINOv2 and their kin compute when they meet another image size.

    Args:
        weight: The table as it is: ``class_tokens`` rows, then the patches row by row.
        new_grid: Height and width in patches that it shall have.
        grid: Height and width that it has.
        class_tokens: How many rows come before the patches. They are kept as they are.
        antialias: Widen the kernel when the grid shrinks, as torch does with
            ``antialias=True``, whose kernel is also a sharper one (-0.5 against -0.75).
        nudge: Added to each new size before the ratio is taken; the first DINOv2 had 0.1.

    Example:
        >>> table = np.arange(5.0)[:, None]
        >>> resize_grid(table, (1, 2), grid=(2, 2)).ravel().tolist()
        [0.0, 2.0, 3.0]
    """
    sizes = [positive("grid", size) for size in grid]
    is_other = tuple(sizes) != tuple(new_grid)
    nudge = number("nudge", nudge)
    rows = not_negative("class_tokens", class_tokens) + sizes[0] * sizes[1]
    if len(weight) != rows:
        raise ValueError(
            f"weight must have {rows} rows for grid {tuple(sizes)} and class_tokens "
            f"{class_tokens}, got {len(weight)}"
        )
    cells = weight[class_tokens:].reshape(*sizes, -1)
    for axis, (old, new) in enumerate(zip(sizes, new_grid, strict=True)):
        # A nudge moves what stays as large, but with antialias torch leaves it alone.
        if positive("new_grid", new) != old or not antialias and is_other:
            make = _smooth_taps if antialias else _cubic_taps
            cells = _resampled(cells, make(old, new, step=old / (new + nudge)), axis=axis)
    cells = cells.reshape(-1, weight.shape[1]).astype(weight.dtype)
    return np.concatenate([weight[:class_tokens], cells])


def _places(old: int, new: int, align: Align) -> np.ndarray:
    steps = np.arange(new, dtype=np.float64)
    if align == "ends":
        return steps * ((old - 1) / max(new - 1, 1))
    return (steps + 0.5) * old / new - 0.5 if align == "centres" else steps * old / new


def _cubic_taps(old: int, new: int, *, step: float) -> Taps:
    # The four rows around each place; beyond an end, the end itself.
    places = (np.arange(new) + 0.5) * step - 0.5
    rows = np.floor(places).astype(int)[:, None] + np.arange(-1, 3)
    shares = _cubic(rows - places[:, None], sharpness=-0.75)
    return np.clip(rows, 0, old - 1), shares


def _smooth_taps(old: int, new: int, *, step: float) -> Taps:
    # As many rows as one new row covers; beyond an end nothing, and the rest sums to one.
    wide = max(step, 1.0)
    centres = (np.arange(new)[:, None] + 0.5) * step
    # torch takes the rows whose middle is in reach, by truncating; the kernel is 0 there.
    rows = np.floor(centres - 2 * wide + 0.5).astype(int) + np.arange(int(4 * wide) + 2)
    shares = _cubic((rows + 0.5 - centres) / wide, sharpness=-0.5)
    shares = np.where((rows >= 0) & (rows < old), shares, 0.0)
    return np.clip(rows, 0, old - 1), shares / shares.sum(axis=1, keepdims=True)


def _cubic(distance: np.ndarray, *, sharpness: float) -> np.ndarray:
    # Keys 1981, https://doi.org/10.1109/TASSP.1981.1163711, equation 15.
    a, d = sharpness, np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d**2 + 1
    far = a * (((d - 5) * d + 8) * d - 4)
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _resampled(table: np.ndarray, taps: Taps, *, axis: int) -> np.ndarray:
    rows, shares = taps
    moved = np.moveaxis(table, axis, 0).astype(np.float64)
    out = sum(
        moved[rows[:, tap]] * shares[:, tap].reshape(-1, *(1,) * (moved.ndim - 1))
        for tap in range(rows.shape[1])
    )
    return np.moveaxis(np.asarray(out), 0, axis)
