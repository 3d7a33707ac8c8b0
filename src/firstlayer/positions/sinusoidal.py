"""Sinusoidal positions: sines and cosines of the position, added to the token's vector.

Each pair of features has its own frequency, from one radian per position down to ``base``
times less. The vector of position ``p + k`` is a rotation of the vector of ``p`` that
depends on ``k`` alone, so a linear layer can learn to attend ``k`` positions back (Vaswani
et al. 2017, https://arxiv.org/abs/1706.03762, §3.5).

Four conventions are in wide use. They differ in the order of the features, the lowest
frequency and the last feature of an odd width; a checkpoint works with one of them. All
are arguments here, and ``CONVENTIONS`` names them.

Cosines and sines come from :mod:`firstlayer.positions.phases`: they are accurate at any
position up to 2^24, and there is no maximum length. ``encode`` and ``join_axes`` create no
arrays and run unchanged on NumPy, JAX and torch.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float64, Shaped

from .. import kernels
from .._array import is_real, namespace_of
from .._check import number, one_of, positive, positive_number
from .phases import phase_tables as phase_tables
from .phases import phases as phases

Layout = Literal["interleaved", "half"]
Odd = Literal["sine", "zero"]
LAYOUTS = ("interleaved", "half")
ODDS = ("sine", "zero")

# "paper": Vaswani et al., most tutorials, keras-hub. "tensor2tensor": fairseq, M2M100,
# Speech2Text, the Whisper encoder, MLX. "marian": Pegasus too, x-transformers and, on two
# axes, ViT-MAE. "timestep": guided-diffusion, DiT and Stable Diffusion's UNet; the first
# diffusion models have shift=1 and cos_first=False.
CONVENTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "tensor2tensor": {"layout": "half", "shift": 1.0, "odd": "zero"},
    "marian": {"layout": "half"},
    "timestep": {"layout": "half", "cos_first": True, "odd": "zero"},
}


def frequencies(
    embedding_dim: int,
    *,
    base: float = 10_000.0,
    shift: float = 0.0,
    odd: Odd = "sine",
    frequency_scale: float = 1.0,
) -> Float64[np.ndarray, " pairs"]:
    """Return the angle per position of each feature pair, fastest first.

    Frequency ``i`` is ``frequency_scale * base ** (-i / (embedding_dim / 2 - shift))``.

    Args:
        embedding_dim: Number of features. Positive.
        base: Ratio of the slowest wavelength to the fastest, reached with ``shift=1``.
            Positive.
        shift: 0 in the paper, 1 in tensor2tensor and fairseq. Smaller than half of
            ``embedding_dim``, unless there is only one pair.
        odd: Last feature of an odd width: ``"sine"`` is the sine of one more frequency
            (the paper, Marian), ``"zero"`` is zero (tensor2tensor).
        frequency_scale: Multiplier of every frequency (``scale`` in diffusion). Positive.

    Example:
        >>> frequencies(4), frequencies(4, shift=1.0)
        (array([1.  , 0.01]), array([1.e+00, 1.e-04]))
    """
    dim = positive("embedding_dim", embedding_dim)
    one_of("odd", odd, ODDS)
    base = positive_number("base", base)
    frequency_scale = positive_number("frequency_scale", frequency_scale)
    shift = number("shift", shift)
    if odd == "zero" and dim == 1:
        raise ValueError("embedding_dim must be at least 2 for odd='zero', got 1")
    half, pairs = (dim / 2, (dim + 1) // 2) if odd == "sine" else (dim // 2, dim // 2)
    if pairs > 1 and not shift < half:
        raise ValueError(f"shift must be smaller than {half}, got {shift}")
    # A single pair has exponent 0 for any shift; half - shift may be 0 there.
    exponents = np.arange(pairs) / (half - shift if pairs > 1 else 1.0)
    return frequency_scale * base**-exponents


def encode(
    cos: Float[Any, "*seq pairs"],
    sin: Float[Any, "*seq pairs"],
    *,
    embedding_dim: int,
    layout: Layout = "interleaved",
    cos_first: bool = False,
) -> Float[Any, "*seq embedding_dim"]:
    """Return cosines and sines in the order of the features.

    Args:
        cos: Cosines from :func:`phases`.
        sin: Sines of the same shape.
        embedding_dim: Number of features. If it is odd, the last one is a sine if there
            are ``(embedding_dim + 1) / 2`` pairs, otherwise a zero.
        layout: ``"interleaved"`` is sine, cosine, sine, cosine, … (the paper); ``"half"``
            is all sines, then all cosines (tensor2tensor, Marian).
        cos_first: Swap sines and cosines (diffusion's ``flip_sin_to_cos``).

    Example:
        >>> cos, sin = np.array([1.0, 2.0]), np.array([10.0, 20.0])
        >>> encode(cos, sin, embedding_dim=4).tolist()
        [10.0, 1.0, 20.0, 2.0]
        >>> encode(cos, sin, embedding_dim=4, layout="half", cos_first=True).tolist()
        [1.0, 2.0, 10.0, 20.0]
    """
    xp = namespace_of(cos)
    half = embedding_dim // 2
    one_of("layout", layout, LAYOUTS)
    if layout == "half":
        parts = _in_order(cos[..., :half], sin, cos_first)
    else:
        pairs = xp.stack(_in_order(cos[..., :half], sin[..., :half], cos_first), axis=-1)
        parts = [pairs.reshape(*cos.shape[:-1], 2 * half), sin[..., half:]]
    if 2 * sin.shape[-1] < embedding_dim:
        parts.append(xp.zeros_like(sin[..., :1]))
    return xp.concat(parts, axis=-1)


def features_at(
    positions: Shaped[np.ndarray, "*seq"],
    tables: Float[np.ndarray, "levels 2 3 256 pairs"],
    rates: Float[np.ndarray, "levels pairs"],
    *,
    embedding_dim: int,
    layout: Layout,
    cos_first: bool,
) -> Float[np.ndarray, "*seq embedding_dim"]:
    """Return the features at positions in host memory, by a kernel if they are integers.

    Args:
        positions: Positions in range.
        tables: From :func:`phase_tables`, in the dtype of the result.
        rates: The rates that belong to ``tables``.
        embedding_dim: As in :func:`encode`.
        layout: As in :func:`encode`.
        cos_first: As in :func:`encode`.

    Example:
        >>> tables, rates = phase_tables(frequencies(2))
        >>> options = {"embedding_dim": 2, "layout": "interleaved", "cos_first": False}
        >>> features_at(np.array([0]), tables, rates, **options).tolist()
        [[0.0, 1.0]]
    """
    if is_real(positions):
        return encode(
            *phases(positions, tables, rates),
            embedding_dim=embedding_dim,
            layout=layout,
            cos_first=cos_first,
        )
    features = kernels.sinusoid_features(
        np.ascontiguousarray(positions, np.int64).reshape(-1),
        tables[0],
        width=embedding_dim,
        interleaved=layout == "interleaved",
        cos_first=cos_first,
    )
    return features.reshape(*positions.shape, embedding_dim)


def join_axes(features: Float[Any, "axes *seq part"]) -> Float[Any, "*seq embedding_dim"]:
    """Concatenate the features of several coordinates, in the order of the axes.

    Example:
        >>> join_axes(np.array([[[1.0, 2.0]], [[3.0, 4.0]]])).tolist()
        [[1.0, 2.0, 3.0, 4.0]]
    """
    parts = [features[axis] for axis in range(features.shape[0])]
    return namespace_of(features).concat(parts, axis=-1)


def _in_order(cos: Any, sin: Any, cos_first: bool) -> list[Any]:
    return [cos, sin] if cos_first else [sin, cos]
