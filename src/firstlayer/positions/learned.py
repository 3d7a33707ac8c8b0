"""Learned positions: a table with one row per position, added to the token's vector.

Used by GPT-2, BERT, OPT, RoBERTa, ViT and CLIP. The table has a fixed number of positions.

Position ``p`` is in row ``p + row_offset``. The rows before position 0 are reserved: OPT
and RoBERTa have ``row_offset=2`` and give padding position -1, which is row 1. A real
position is interpolated linearly between two rows, which fits a longer sequence into the
table without changing it.

A table can also be resampled to another length (:func:`resize_linear`) or to another grid
of image patches (:func:`resize_grid`, bicubic). Resampling is a weighted sum of a few rows.
It is computed in float64 on the host, rounded once, and equals
``torch.nn.functional.interpolate``.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from .._array import cast, compute_dtype, is_real, namespace_of
from .._check import integer, not_negative, number, one_of, positive
from ..embeddings.init import normal
from ..embeddings.token import mask_out_of_range

Align = Literal["ends", "centres", "starts"]
# Rows that each new row is a sum of, and their weights.
Taps = tuple[Int[np.ndarray, "new taps"], Float[np.ndarray, "new taps"]]


def small_normal(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw normally with standard deviation 0.02, as GPT-2 and BERT do."""
    return normal(shape, rng, std=0.02)


def rows_at(
    weight: Float[Any, "rows embedding_dim"],
    positions: Shaped[Any, "*seq"],
    *,
    row_offset: int = 0,
) -> Float[Any, "*seq embedding_dim"]:
    """Return the row of each position, NaN where the position is out of range.

    Args:
        weight: Table of positions.
        positions: Integers, or reals, which are interpolated between two rows in float32
            (float64 for a float64 table).
        row_offset: Row of position 0.

    Example:
        >>> rows_at(np.array([[0.0], [10.0], [30.0]]), np.array([1.5, 0.1])).tolist()
        [[20.0], [1.0]]
    """
    xp = namespace_of(weight)
    last = weight.shape[0] - 1 - row_offset
    if not is_real(positions):
        in_range, safe = mask_out_of_range(positions, first=-row_offset, last=last)
        return xp.where(in_range[..., None], weight[safe + row_offset], float("nan"))
    in_range, low, high, fraction = neighbours(positions, first=-row_offset, last=last)
    dtype = compute_dtype(weight.dtype)
    a, b = (cast(weight[row + row_offset], dtype) for row in (low, high))
    fraction = cast(fraction, dtype)[..., None]
    # NaN is written last: a NaN fraction would make the gradient of the rows NaN.
    return xp.where(in_range[..., None], a * (1 - fraction) + b * fraction, float("nan"))


def neighbours(
    positions: Float[Any, "*seq"], *, first: int, last: int
) -> tuple[Bool[Any, "*seq"], Int[Any, "*seq"], Int[Any, "*seq"], Float[Any, "*seq"]]:
    """Return whether each position is in range, the integers around it and its fraction.

    Positions out of range get the neighbours of ``first``.

    Args:
        positions: Reals.
        first: First valid position.
        last: Last valid position.

    Example:
        >>> _, low, high, fraction = neighbours(np.array([2.25, 5.0]), first=0, last=5)
        >>> low.tolist(), high.tolist(), fraction.tolist()
        ([2, 5], [3, 5], [0.25, 0.0])
    """
    xp = namespace_of(positions)
    real = cast(positions, compute_dtype(positions.dtype))
    in_range = (real >= first) & (real <= last)
    safe = xp.where(in_range, real, first)
    floor = xp.floor(safe)
    low = cast(floor, "int32")
    return in_range, low, xp.clip(low + 1, None, last), safe - floor


def check_positions(positions: np.ndarray, *, max_positions: int, row_offset: int) -> None:
    """Raise if a table has no row for a position.

    Args:
        positions: Integers or reals in host memory.
        max_positions: Number of positions of the table.
        row_offset: Number of rows before position 0.

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


def check_padding_idx(padding_idx: int | None, row_offset: int) -> int | None:
    """Return ``padding_idx`` as an int if it is a row before position 0, or None.

    Example:
        >>> check_padding_idx(2, 2)
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
    """Return a table of ``length`` rows, interpolated linearly between those of ``weight``.

    Args:
        weight: Table of positions, without the rows before position 0.
        length: New number of rows. Positive.
        align: Where new row ``m`` of N' lies among the N old rows. ``"ends"``: at
            ``m * (N - 1) / (N' - 1)``, so first and last rows coincide (torch's
            ``align_corners=True``). ``"centres"``: at ``(m + 0.5) * N / N' - 0.5``
            (torch's default). ``"starts"``: at ``m * N / N'`` (position interpolation).
            Beyond the last row, the last row is used.

    Example:
        >>> resize_linear(np.array([[0.0], [3.0]]), 4).ravel().tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    one_of("align", align, ("ends", "centres", "starts"))
    old = len(weight)
    places = _places(positive("weight rows", old), positive("length", length), align)
    _, low, high, fraction = neighbours(np.clip(places, 0, old - 1), first=0, last=old - 1)
    taps = np.stack([low, high], axis=1), np.stack([1 - fraction, fraction], axis=1)
    return _resample(weight, taps, axis=0).astype(weight.dtype)


def resize_grid(
    weight: Float[np.ndarray, "rows embedding_dim"],
    new_grid: tuple[int, int],
    *,
    grid: tuple[int, int],
    class_tokens: int = 1,
    antialias: bool = False,
    nudge: float = 0.0,
) -> Float[np.ndarray, "new_rows embedding_dim"]:
    """Return a table of image patches resampled bicubically to another grid.

    Equals what ViT and DINOv2 compute for another image size.

    Args:
        weight: Table of ``class_tokens`` rows, then the patches in row-major order.
        new_grid: New height and width in patches.
        grid: Current height and width in patches.
        class_tokens: Number of rows before the patches. They are kept.
        antialias: Widen the kernel when the grid shrinks, like torch's ``antialias=True``,
            whose kernel also has another sharpness (-0.5 instead of -0.75).
        nudge: Added to each new size before the ratio is taken; 0.1 in the first DINOv2.

    Example:
        >>> table = np.arange(5.0)[:, None]
        >>> resize_grid(table, (1, 2), grid=(2, 2)).ravel().tolist()
        [0.0, 2.0, 3.0]
    """
    sizes = [positive("grid", size) for size in grid]
    changes = tuple(sizes) != tuple(new_grid)
    nudge = number("nudge", nudge)
    rows = not_negative("class_tokens", class_tokens) + sizes[0] * sizes[1]
    if len(weight) != rows:
        raise ValueError(
            f"weight must have {rows} rows for grid {tuple(sizes)} and class_tokens "
            f"{class_tokens}, got {len(weight)}"
        )
    cells = weight[class_tokens:].reshape(*sizes, -1)
    for axis, (old, new) in enumerate(zip(sizes, new_grid, strict=True)):
        # A nudge also moves an axis of unchanged size, except in torch with antialias.
        if positive("new_grid", new) != old or not antialias and changes:
            taps_of = _antialiased_taps if antialias else _cubic_taps
            taps = taps_of(old, new, step=old / (new + nudge))
            cells = _resample(cells, taps, axis=axis)
    cells = cells.reshape(-1, weight.shape[1]).astype(weight.dtype)
    return np.concatenate([weight[:class_tokens], cells])


def _places(old: int, new: int, align: Align) -> np.ndarray:
    steps = np.arange(new, dtype=np.float64)
    if align == "ends":
        return steps * ((old - 1) / max(new - 1, 1))
    return (steps + 0.5) * old / new - 0.5 if align == "centres" else steps * old / new


def _cubic_taps(old: int, new: int, *, step: float) -> Taps:
    # The four rows around each place. Beyond an end, the end row is repeated.
    places = (np.arange(new) + 0.5) * step - 0.5
    rows = np.floor(places).astype(int)[:, None] + np.arange(-1, 3)
    weights = _cubic(rows - places[:, None], sharpness=-0.75)
    return np.clip(rows, 0, old - 1), weights


def _antialiased_taps(old: int, new: int, *, step: float) -> Taps:
    # The rows that one new row covers. Rows beyond an end are dropped, and the weights of
    # the others are normalized.
    width = max(step, 1.0)
    centres = (np.arange(new)[:, None] + 0.5) * step
    # torch truncates to the rows whose centre is within the kernel; it is 0 at the others.
    rows = np.floor(centres - 2 * width + 0.5).astype(int) + np.arange(int(4 * width) + 2)
    weights = _cubic((rows + 0.5 - centres) / width, sharpness=-0.5)
    weights = np.where((rows >= 0) & (rows < old), weights, 0.0)
    return np.clip(rows, 0, old - 1), weights / weights.sum(axis=1, keepdims=True)


def _cubic(distance: np.ndarray, *, sharpness: float) -> np.ndarray:
    # Keys 1981, https://doi.org/10.1109/TASSP.1981.1163711, equation 15.
    a, d = sharpness, np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d**2 + 1
    far = a * (((d - 5) * d + 8) * d - 4)
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _resample(table: np.ndarray, taps: Taps, *, axis: int) -> np.ndarray:
    rows, weights = taps
    moved = np.moveaxis(table, axis, 0).astype(np.float64)
    out = sum(
        moved[rows[:, tap]] * weights[:, tap].reshape(-1, *(1,) * (moved.ndim - 1))
        for tap in range(rows.shape[1])
    )
    return np.moveaxis(np.asarray(out), 0, axis)
