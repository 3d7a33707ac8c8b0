"""Rotary position embeddings: turn pairs of features by an angle proportional to position.

The dot product of a rotated query and a rotated key then depends only on how far apart
the two are (Su et al. 2021, https://arxiv.org/abs/2104.09864).

Which two features make a pair is the *layout*, and a checkpoint fits only one. How fast
pairs turn is :mod:`firstlayer.positions.frequencies`; the cosines and sines come from
:mod:`firstlayer.positions.phases`; here they meet queries and keys. Everything runs unchanged on NumPy, JAX
and torch arrays, eager or compiled, in the dtype it is given: cast to float32 first.
"""

from typing import Any, Literal, get_args

from jaxtyping import Float, Shaped

from .._array import cast, is_real, namespace_of
from .._check import number, one_of, positive
from .frequencies import inverse_frequencies as inverse_frequencies
from .frequencies import pixtral_axial_frequencies as pixtral_axial_frequencies
from .frequencies import qwen_axial_frequencies as qwen_axial_frequencies
from .frequencies import rotated_features
from .frequencies import section_frequencies as section_frequencies

Layout = Literal["half", "interleaved", "interleaved_to_half"]
LAYOUTS = get_args(Layout)


def over_heads(
    positions: Shaped[Any, "*seq"],
    x: Shaped[Any, "*lead head_dim"],
    *,
    heads_axis: int = -3,
    axial: bool = False,
) -> Shaped[Any, "*lined"]:
    """Line ``positions`` up with the axes of ``x``, adding one for the heads if need be.

    ``(length,)`` serves every sequence. ``(batch, length)`` belongs to ``x`` of shape
    ``(batch, length, head_dim)`` or ``(batch, heads, length, head_dim)``: which of the two
    is read off the number of axes, never off their sizes.

    Args:
        positions: Positions of ``x``.
        x: Queries or keys.
        heads_axis: -3 for ``(..., heads, length, head_dim)``, or no heads at all; -2 for
            ``(..., length, heads, head_dim)``.
        axial: Whether the first axis of ``positions`` is that of the coordinates.

    Example:
        >>> import numpy as np
        >>> over_heads(np.zeros((2, 5)), np.zeros((2, 3, 5, 8))).shape
        (2, 1, 5)
        >>> over_heads(np.zeros((2, 5)), np.zeros((2, 5, 3, 8)), heads_axis=-2).shape
        (2, 5, 1)
    """
    check_heads_axis(heads_axis)
    lead, length = tuple(x.shape[:-1]), -1 if heads_axis == -3 else -2
    lined = _with_heads(positions, len(positions.shape) - axial, len(lead), heads_axis)
    if lined is None or not _fits(tuple(lined.shape)[axial:], lead, length):
        raise ValueError(
            f"positions must fit x of shape {tuple(x.shape)} with heads_axis {heads_axis}, "
            f"got shape {tuple(positions.shape)}"
        )
    return lined


def _with_heads(positions: Any, count: int, lead: int, heads_axis: int) -> Any:
    if heads_axis == -2 and count in (1, lead - 1):
        return positions[..., None]
    if heads_axis == -3 and 1 < count == lead - 1:
        return positions[..., None, :]
    if count == lead or (heads_axis == -3 and count == 1):
        return positions
    return None


def _fits(lined: tuple[int, ...], lead: tuple[int, ...], length: int) -> bool:
    if len(lined) > len(lead) or lined[length] != lead[length]:
        return False
    sizes = zip(lined[::-1], lead[::-1], strict=False)
    # Not `in`: a compiler that has symbols for sizes finds no number among them.
    return all(mine == 1 or mine == theirs for mine, theirs in sizes)


def check_heads_axis(heads_axis: int) -> int:
    """Return ``heads_axis`` as an int if it is one that :func:`over_heads` knows."""
    if heads_axis not in (-3, -2):
        raise ValueError(f"heads_axis must be -3 or -2, got {heads_axis}")
    return int(heads_axis)


def over_rows(
    delta: Shaped[Any, "*rows"],
    keys: Shaped[Any, "*lead head_dim"],
    *,
    axes: int | None = None,
) -> Shaped[Any, "*lined"]:
    """Line a move of cached keys up with their axes: one for all, or one for each row.

    Args:
        delta: By how many positions keys move: a number, or one per row of ``keys``.
        keys: What a rotary layer has turned.
        axes: How many coordinates a position has, which all move alike; None if it is a
            single number.

    Example:
        >>> import numpy as np
        >>> over_rows(np.array([3, -1]), np.zeros((2, 4, 5, 8))).shape
        (2, 1, 1)
    """
    if delta.ndim and (tuple(delta.shape) != tuple(keys.shape[:1]) or keys.ndim < 3):
        raise ValueError(
            f"delta must be a number or one per row of keys of shape {tuple(keys.shape)}, "
            f"got shape {tuple(delta.shape)}"
        )
    lined = delta.reshape(*delta.shape, *(1,) * (keys.ndim - 1 - delta.ndim))
    if axes is None:
        return lined
    return namespace_of(lined).broadcast_to(lined, (axes, *lined.shape))


def rotate(
    x: Float[Any, "*lead head_dim"],
    cos: Float[Any, "*turns pairs"],
    sin: Float[Any, "*turns pairs"],
    *,
    layout: Layout = "half",
) -> Float[Any, "*lead head_dim"]:
    """Rotate the first ``2 * pairs`` features of ``x`` and pass the rest on.

    Args:
        x: Queries or keys.
        cos: Cosines from :func:`firstlayer.positions.phases.phases`, broadcastable against ``x``.
        sin: Sines, likewise. Minus them turn back.
        layout: ``"half"`` pairs feature ``i`` with ``i + pairs`` (GPT-NeoX, Hugging Face
            Llama, Qwen, Gemma); ``"interleaved"`` pairs ``2i`` with ``2i + 1`` (the paper,
            GPT-J, Meta's Llama, Cohere, GLM); ``"interleaved_to_half"`` reads interleaved
            pairs and writes halves (DeepSeek-V3), which queries and keys must both do.

    Example:
        >>> import numpy as np
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
        woven = xp.stack(parts, axis=-1)
        parts = [xp.reshape(woven, (*woven.shape[:-2], 2 * pairs))]
    if 2 * pairs < x.shape[-1]:
        parts.append(x[..., 2 * pairs :])
    return xp.concat(parts, axis=-1) if len(parts) > 1 else parts[0]


def convert_layout(
    weight: Shaped[Any, "features *rest"],
    num_heads: int,
    *,
    source: Layout,
    target: Layout,
    rotary_dim: int | None = None,
) -> Shaped[Any, "features *rest"]:
    """Reorder a query or key projection so that it fits another layout, exactly.

    Convert queries and keys both, biases and norms as well (a norm over one head has
    ``num_heads`` 1). Scores do not change. Values and outputs have no layout.

    Args:
        weight: Rows that make the features of all heads, ``(num_heads * head_dim, ...)``,
            as torch keeps them; transpose a ``(in, out)`` matrix first.
        num_heads: How many heads the rows make: of keys, the key heads.
        source: The layout that the rows are in.
        target: The layout that is wanted.
        rotary_dim: How many features of each head are rotated; None is all.

    Example:
        >>> import numpy as np
        >>> convert_layout(np.arange(6), 1, source="interleaved", target="half")
        array([0, 2, 4, 1, 3, 5])
    """
    rows = weight.shape[0]
    if rows % positive("num_heads", num_heads):
        raise ValueError(f"num_heads must divide {rows} rows, got {num_heads}")
    head_dim, rest = rows // num_heads, tuple(weight.shape[1:])
    size = rotated_features(rotary_dim, head_dim)
    # What is read counts: both interleaved forms want the same rows.
    from_half = one_of("source", source, LAYOUTS) == "half"
    if from_half == (one_of("target", target, LAYOUTS) == "half"):
        return weight
    xp = namespace_of(weight)
    heads = xp.reshape(weight, (num_heads, head_dim, *rest))
    grid = (2, size // 2) if from_half else (size // 2, 2)
    turned = xp.reshape(heads[:, :size], (num_heads, *grid, *rest))
    turned = xp.reshape(xp.swapaxes(turned, 1, 2), (num_heads, size, *rest))
    return xp.reshape(xp.concat([turned, heads[:, size:]], axis=1), weight.shape)


def query_temperature(
    positions: Shaped[Any, "*seq"],
    *,
    scale: float = 0.1,
    every: int = 8192,
    dtype: str = "float32",
) -> Float[Any, "*seq"]:
    """Return what Llama 4 multiplies queries by in the layers without rotation.

    ``1 + scale * log(1 + floor((position + 1) / every))``: attention over a longer context
    would be flatter, and a larger query makes it sharper again. Ministral 3 counts from one
    less: give it ``positions - 1``.

    Args:
        positions: Integers or reals, at least -1.
        scale: How much sharper (``attn_scale``).
        every: After how many positions it grows (``floor_scale``).
        dtype: Name of the dtype of the result.

    Example:
        >>> import numpy as np
        >>> query_temperature(np.array([0, 8190, 8191]), dtype="float64").round(4).tolist()
        [1.0, 1.0, 1.0693]
    """
    positive("every", every)
    scale = number("scale", scale)
    if not is_real(positions) and positions.dtype.itemsize < 4:
        positions = cast(positions, "int32")  # 127 + 1 is -128 in int8
    xp = namespace_of(positions)
    return 1.0 + scale * xp.log1p(cast((positions + 1) // every, dtype))
