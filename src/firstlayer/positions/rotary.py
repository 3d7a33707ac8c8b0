"""Rotary position embeddings: rotate feature pairs by an angle proportional to position.

The dot product of a rotated query and a rotated key depends only on the distance between
them (Su et al. 2021, https://arxiv.org/abs/2104.09864).

The *layout* defines which features form a pair; a checkpoint works with one layout only.
Frequencies are in :mod:`firstlayer.positions.frequencies`, cosines and sines in
:mod:`firstlayer.positions.phases`. ``phase_rows``, ``inverse_phases`` and ``rotate_rows``
run on the compiled kernels, for arrays in host memory. Everything else runs unchanged on
NumPy, JAX and torch arrays, eager or compiled, in the dtype it is given: cast to float32
first.
"""

from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float, Shaped

from .. import kernels
from .._array import cast, is_real, namespace_of, repeating
from .._check import number, one_of, positive
from .axial import pixtral_axial_frequencies as pixtral_axial_frequencies
from .axial import qwen_axial_frequencies as qwen_axial_frequencies
from .frequencies import check_rotary_dim
from .frequencies import inverse_frequencies as inverse_frequencies
from .frequencies import section_frequencies as section_frequencies
from .phases import axial_phases, phases

Layout = Literal["half", "interleaved", "interleaved_to_half"]
LAYOUTS = get_args(Layout)


def over_heads(
    positions: Shaped[Any, "*seq"],
    x: Shaped[Any, "*lead head_dim"],
    *,
    heads_axis: int | None = -3,
    axial: bool = False,
) -> Shaped[Any, "*aligned"]:
    """Align ``positions`` with the leading axes of ``x``, adding a heads axis if needed.

    Positions of shape ``(length,)`` apply to every sequence. Positions of shape ``(batch,
    length)`` belong to ``x`` of shape ``(batch, length, head_dim)`` or ``(batch, heads,
    length, head_dim)``; the number of axes decides which, never their sizes.

    Args:
        positions: Positions of ``x``.
        x: Queries or keys.
        heads_axis: -3 or None for ``(..., heads, length, head_dim)`` or no heads axis; -2
            for ``(..., length, heads, head_dim)``.
        axial: Whether the first axis of ``positions`` holds the coordinates.

    Example:
        >>> over_heads(np.zeros((2, 5)), np.zeros((2, 3, 5, 8))).shape
        (2, 1, 5)
        >>> over_heads(np.zeros((2, 5)), np.zeros((2, 5, 3, 8)), heads_axis=-2).shape
        (2, 5, 1)
    """
    heads_axis = -2 if check_heads_axis(heads_axis) == -2 else -3
    lead, length = tuple(x.shape[:-1]), -1 if heads_axis == -3 else -2
    aligned = _with_heads(positions, len(positions.shape) - axial, len(lead), heads_axis)
    if aligned is None or not _fits(tuple(aligned.shape)[axial:], lead, length):
        raise ValueError(
            f"positions must fit x of shape {tuple(x.shape)} with heads_axis {heads_axis}, "
            f"got shape {tuple(positions.shape)}"
        )
    return aligned


def _with_heads(positions: Any, ndim: int, lead_ndim: int, heads_axis: int) -> Any:
    if heads_axis == -2 and ndim in (1, lead_ndim - 1):
        return positions[..., None]
    if heads_axis == -3 and 1 < ndim == lead_ndim - 1:
        return positions[..., None, :]
    if ndim == lead_ndim or (heads_axis == -3 and ndim == 1):
        return positions
    return None


def _fits(aligned: tuple[int, ...], lead: tuple[int, ...], length: int) -> bool:
    if len(aligned) > len(lead) or aligned[length] != lead[length]:
        return False
    sizes = zip(aligned[::-1], lead[::-1], strict=False)
    # Two comparisons instead of `in`, which fails on a compiler's symbolic sizes.
    return all(size == 1 or size == wanted for size, wanted in sizes)


def check_heads(
    shape: tuple[int, ...], positions: Any, *, offset: Any, axial: bool
) -> None:
    """Raise if vectors of this shape may have either the heads or the length first.

    Called where ``heads_axis`` is None. Three axes are ambiguous unless there is a position
    for every vector or an offset for every row. Positions of shape ``(length,)`` do not
    decide it, although their length often would: a model must not start to fail when a
    sequence becomes as long as there are heads.

    Args:
        shape: Shape of the queries or keys.
        positions: Their positions, or None.
        offset: Offset of the first position, if positions are None.
        axial: Whether the first axis of ``positions`` holds the coordinates.

    Example:
        >>> check_heads((2, 5, 8), np.zeros((2, 5)), offset=0, axial=False)
    """
    if len(shape) != 3:
        return
    if positions is None:
        is_clear = len(_shape(offset)) == 1
    else:
        given = _shape(positions)[axial:]
        is_clear = len(given) == 2 and given[0] == shape[0]
    if not is_clear:
        raise ValueError(
            f"heads_axis must be given for x of three axes, got shape {tuple(shape)}: "
            "-2 for (length, heads, head_dim), -3 for (heads, length, head_dim) or "
            "(batch, length, head_dim)"
        )


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def check_heads_axis(heads_axis: int | None) -> int | None:
    """Return ``heads_axis`` as an int or None if :func:`over_heads` supports it."""
    if heads_axis is None:
        return None
    if heads_axis not in (-3, -2):
        raise ValueError(f"heads_axis must be -3 or -2, got {heads_axis}")
    return int(heads_axis)


def over_rows(
    delta: Shaped[Any, "*rows"],
    keys: Shaped[Any, "*lead head_dim"],
    *,
    axes: int | None = None,
) -> Shaped[Any, "*aligned"]:
    """Align a shift of cached keys with their axes.

    Args:
        delta: Number of positions to shift by: a scalar, or one for each sequence (the
            first axis of ``keys``).
        keys: Output of a rotary layer.
        axes: Number of coordinates of a position, all shifted equally; None if a position
            is a single number.

    Example:
        >>> over_rows(np.array([3, -1]), np.zeros((2, 4, 5, 8))).shape
        (2, 1, 1)
    """
    if delta.ndim and (tuple(delta.shape) != tuple(keys.shape[:1]) or keys.ndim < 3):
        raise ValueError(
            f"delta must be a number or one per row of keys of shape {tuple(keys.shape)}, "
            f"got shape {tuple(delta.shape)}"
        )
    aligned = delta.reshape(*delta.shape, *(1,) * (keys.ndim - 1 - delta.ndim))
    if axes is None:
        return aligned
    return namespace_of(aligned).broadcast_to(aligned, (axes, *aligned.shape))


def rotate(
    x: Float[Any, "*lead head_dim"],
    cos: Float[Any, "*seq pairs"],
    sin: Float[Any, "*seq pairs"],
    *,
    layout: Layout = "half",
) -> Float[Any, "*lead head_dim"]:
    """Rotate the first ``2 * pairs`` features of ``x`` and pass the others through.

    Args:
        x: Queries or keys.
        cos: Cosines of the phases, broadcast to ``x``.
        sin: Sines of the same shape. Negate them to rotate back.
        layout: ``"half"`` pairs feature ``i`` with ``i + pairs`` (GPT-NeoX, Hugging Face
            Llama, Qwen, Gemma); ``"interleaved"`` pairs ``2i`` with ``2i + 1`` (the paper,
            GPT-J, Meta's Llama, Cohere, GLM); ``"interleaved_to_half"`` reads interleaved
            pairs and writes halves (DeepSeek-V3), for queries and keys alike.

    Example:
        >>> rotate(np.array([1.0, 2.0, 3.0]), np.zeros(1), np.ones(1))
        array([-2.,  1.,  3.])
    """
    xp, pairs = namespace_of(x), cos.shape[-1]
    if 2 * pairs > x.shape[-1]:
        raise ValueError(f"x must have at least {2 * pairs} features, got {x.shape[-1]}")
    if one_of("layout", layout, LAYOUTS) == "half":
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    else:
        a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if layout == "interleaved":
        stacked = xp.stack(parts, axis=-1)
        parts = [xp.reshape(stacked, (*stacked.shape[:-2], 2 * pairs))]
    if 2 * pairs < x.shape[-1]:
        parts.append(x[..., 2 * pairs :])
    return xp.concat(parts, axis=-1) if len(parts) > 1 else parts[0]


def phase_rows(
    positions: Shaped[np.ndarray, "*seq"],
    tables: Float[np.ndarray, "levels *axes 2 3 256 pairs"],
    rates: Float[np.ndarray, "levels *axes pairs"],
) -> Float[np.ndarray, "positions 2*pairs"]:
    """Return one row per position: the cosines of all pairs, then the sines.

    Args:
        positions: Positions in range. Several coordinates are on the first axis.
        tables: From :func:`firstlayer.positions.phases.phase_tables`, in the dtype of the
            result.
        rates: The rates that belong to ``tables``.

    Example:
        >>> from firstlayer.positions.phases import phase_tables
        >>> phase_rows(np.array([0.0]), *phase_tables(np.ones(2)))
        array([[1., 1., 0., 0.]], dtype=float32)
    """
    if rates.ndim == 3:
        cos, sin = axial_phases(positions.reshape(len(positions), -1), tables, rates)
    elif positions.dtype.kind in "iu":
        flat = np.ascontiguousarray(positions, np.int64).reshape(-1)
        return kernels.digit_phases(flat, tables[0])
    else:
        cos, sin = phases(positions.reshape(-1), tables, rates)
    return np.concatenate([cos, sin], axis=-1)


def inverse_phases(rows: Float[np.ndarray, "positions 2*pairs"]) -> np.ndarray:
    """Return the rows that rotate by the opposite angles, with the same factor."""
    cos, sin = np.split(rows, 2, axis=-1)
    return np.concatenate([cos, -sin], axis=-1)


def rotate_rows(
    x: Float[np.ndarray, "*lead head_dim"],
    rows: Float[np.ndarray, "positions 2*pairs"],
    seq: tuple[int, ...],
    *,
    read_half: bool,
    write_half: bool,
) -> Float[np.ndarray, "*lead head_dim"]:
    """Return ``x`` rotated, with the memory layout of ``x``.

    Args:
        x: Queries or keys.
        rows: From :func:`phase_rows`, as many as ``seq`` has entries.
        seq: Shape of the positions, broadcastable to the leading axes of ``x``.
        read_half: Whether pairs of ``x`` are halves; see ``kernels.rotate_pairs``.
        write_half: Whether pairs of the result are halves.

    Example:
        >>> quarter = np.array([[0.0, 1.0]])
        >>> rotate_rows(np.eye(2), quarter, (1,), read_half=True, write_half=True).tolist()
        [[0.0, 1.0], [-1.0, 0.0]]
    """
    contiguous, order = x, None
    index = np.arange(len(rows)).reshape((1,) * (x.ndim - 1 - len(seq)) + seq)
    if not x.flags.c_contiguous:
        # Heads are often a transposed view. In memory order, no copy is needed.
        order = sorted(range(x.ndim - 1), key=lambda axis: -x.strides[axis])
        contiguous = np.ascontiguousarray(x.transpose(*order, -1))
        index = index.transpose(order)
    out = kernels.rotate_pairs(
        contiguous.reshape(-1, x.shape[-1]),
        rows,
        which=repeating(index, contiguous.shape[:-1]),
        read_half=read_half,
        write_half=write_half,
    ).reshape(contiguous.shape)
    return out if order is None else out.transpose(*np.argsort(order), -1)


def convert_layout(
    weight: Shaped[Any, "features *rest"],
    num_heads: int,
    *,
    source: Layout,
    target: Layout,
    rotary_dim: int | None = None,
) -> Shaped[Any, "features *rest"]:
    """Reorder the rows of a query or key projection for another layout, exactly.

    Convert queries and keys both, including biases and norms (a norm over one head has
    ``num_heads`` 1). Scores do not change. Values and outputs have no layout.

    Args:
        weight: Projection whose rows produce the features of all heads, ``(num_heads *
            head_dim, ...)``, as in torch; transpose an ``(in, out)`` matrix first.
        num_heads: Number of heads in ``weight``; for keys, the number of key heads.
        source: Layout of ``weight``.
        target: Layout of the result.
        rotary_dim: Number of rotated features per head; None is all.

    Example:
        >>> convert_layout(np.arange(6), 1, source="interleaved", target="half")
        array([0, 2, 4, 1, 3, 5])
    """
    rows = weight.shape[0]
    if rows % positive("num_heads", num_heads):
        raise ValueError(f"num_heads must divide {rows} rows, got {num_heads}")
    head_dim, rest = rows // num_heads, tuple(weight.shape[1:])
    size = check_rotary_dim(rotary_dim, head_dim)
    # Only the order that is read matters, and both interleaved layouts read the same one.
    from_half = one_of("source", source, LAYOUTS) == "half"
    if from_half == (one_of("target", target, LAYOUTS) == "half"):
        return weight
    xp = namespace_of(weight)
    heads = xp.reshape(weight, (num_heads, head_dim, *rest))
    grid = (2, size // 2) if from_half else (size // 2, 2)
    rotary = xp.reshape(heads[:, :size], (num_heads, *grid, *rest))
    rotary = xp.reshape(xp.swapaxes(rotary, 1, 2), (num_heads, size, *rest))
    return xp.reshape(xp.concat([rotary, heads[:, size:]], axis=1), weight.shape)


def query_temperature(
    positions: Shaped[Any, "*seq"],
    *,
    scale: float = 0.1,
    every: int = 8192,
    dtype: str = "float32",
) -> Float[Any, "*seq"]:
    """Return the factor that Llama 4 multiplies queries by in layers without rotation.

    ``1 + scale * log(1 + floor((position + 1) / every))``. Attention flattens as the
    context grows, and larger queries sharpen it again. Ministral 3 counts from one less:
    pass ``positions - 1``.

    Args:
        positions: Integers or reals, at least -1.
        scale: Growth rate (``attn_scale``).
        every: Number of positions between two increases (``floor_scale``).
        dtype: Name of the dtype of the result.

    Example:
        >>> query_temperature(np.array([0, 8190, 8191]), dtype="float64").round(4).tolist()
        [1.0, 1.0, 1.0693]
    """
    positive("every", every)
    scale = number("scale", scale)
    if not is_real(positions) and positions.dtype.itemsize < 4:
        positions = cast(positions, "int32")  # 127 + 1 is -128 in int8
    xp = namespace_of(positions)
    return 1.0 + scale * xp.log1p(cast((positions + 1) // every, dtype))
