"""Fourier features for Equinox."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int32

from .._check import (
    FLOATS,
    boolean,
    dtype_text,
    host_array,
    not_masked,
    one_of,
    positions_in_reach,
)
from ..positions.fourier import (
    coordinate_parts,
    float64_fourier_phases,
    fourier_tables,
    gaussian_matrix,
    octave_matrix,
)
from ..positions.phases import LIMIT, digit_phases, multiply
from ..positions.sinusoidal import LAYOUTS, Layout, encode
from ._ids import host_values
from ._module import Module, compiled, is_concrete, native, upcast
from ._parameters import Key


class FourierFeatures(Module):
    """Maps coordinates to cosines and sines of fixed frequencies. Has no parameters.

    Drawn frequencies cannot be recomputed, so they are leaves of the tree and
    ``eqx.tree_serialise_leaves`` stores them. They are stored as int32 bit patterns, which
    casts and optimizers skip. optax' Adam rejects integer leaves: initialize it with
    ``eqx.filter(model, eqx.is_inexact_array)``.

    Args:
        matrix: Cycles per unit of each pair along each coordinate, ``(pairs, axes)``.
        layout: ``"half"`` is all cosines, then all sines; ``"interleaved"`` alternates.
        cos_first: Cosine before sine (Tancik et al.); NeRF has the sine first.

    Shape:
        - coordinates: ``(..., axes)``
        - output: ``(..., 2 * pairs)``, in the dtype of the coordinates

    A coordinate of magnitude 2^24 or more is a ValueError, or NaN if it is traced
    or on an accelerator.

    Example:
        >>> layer = FourierFeatures.gaussian(64, axes=2, std=10.0, key=jax.random.key(0))
        >>> layer(jnp.zeros((5, 2))).shape
        (5, 128)
        >>> FourierFeatures.octaves(2, axes=1)(jnp.array([0.5])).round(6).tolist()
        [1.0, 0.0, 0.0, -1.0]
    """

    #: Bits of the float64 frequencies, of their phases and of their float32 rates.
    matrix_bits: Int32[Array, "pairs axes 2"]
    bits: Int32[Array, "parts 2 3 256 pairs"]
    rate_bits: Int32[Array, "parts pairs"]
    axes: int = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)
    cos_first: bool = eqx.field(static=True)

    def __init__(
        self, matrix: Any, *, layout: Layout = "half", cos_first: bool = True
    ) -> None:
        matrix = np.array(not_masked(matrix, name="matrix"), np.float64)
        if matrix.ndim != 2 or not matrix.size:
            raise ValueError(f"matrix must have shape (pairs, axes), got {matrix.shape}")
        if not np.isfinite(matrix).all():
            raise ValueError("matrix must be finite, got NaN or infinity in it")
        one_of("layout", layout, LAYOUTS)
        self.layout, self.cos_first = layout, boolean("cos_first", cos_first)
        self.axes, self.matrix_bits = matrix.shape[1], _to_bits(matrix)
        tables, rates = fourier_tables(matrix)
        self.bits, self.rate_bits = _to_bits(tables), _to_bits(rates)

    @classmethod
    def gaussian(cls, pairs: int, *, axes: int, std: float, key: Key) -> "FourierFeatures":
        """Return features with normally distributed frequencies, as in Tancik et al.

        Args:
            pairs: Number of frequencies; there are twice as many features.
            axes: Number of coordinates of a point.
            std: Standard deviation of the frequencies, in cycles per unit.
            key: Random key. It must be concrete, because tables are made on the host.
        """
        if not is_concrete(key):
            raise ValueError(
                "key must be concrete: draw frequencies outside of jit, vmap and eval_shape"
            )
        seed = np.asarray(jax.random.bits(key, (4,), jnp.uint32))
        rng = np.random.default_rng(seed)
        return cls(gaussian_matrix(pairs, axes=axes, std=std, rng=rng))

    @classmethod
    def octaves(cls, octaves: int, *, axes: int) -> "FourierFeatures":
        """Return NeRF's features: ``sin 2^k πv, cos 2^k πv`` for each coordinate in turn.

        Args:
            octaves: Number of frequencies per coordinate.
            axes: Number of coordinates of a point.
        """
        matrix = octave_matrix(octaves, axes=axes)
        return cls(matrix, layout="interleaved", cos_first=False)

    def __call__(
        self,
        coordinates: Float[Array | np.ndarray, "*batch axes"] | list[Any],
        *,
        key: Key | None = None,
    ) -> Float[Array, "*batch features"]:
        """Return the features of ``coordinates``.

        Args:
            coordinates: Points, with one number for each axis of ``matrix``.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        return _features(self, self._checked(coordinates))

    @property
    def matrix(self) -> Float64[np.ndarray, "pairs axes"]:
        """The frequencies, in float64."""
        return np.asarray(self.matrix_bits).view(np.float64)[..., 0]

    def _checked(self, coordinates: Any) -> Float[Any, "*batch axes"]:
        if not isinstance(coordinates, jax.Array):
            coordinates = native(host_array(coordinates, name="coordinates"))
        if coordinates.dtype.name not in FLOATS:
            raise TypeError(
                f"coordinates must be real, got {dtype_text(coordinates.dtype)}"
            )
        if coordinates.shape[-1:] != (self.axes,):
            raise ValueError(
                f"coordinates must have shape (..., {self.axes}), got {coordinates.shape}"
            )
        values = host_values(coordinates)
        if values is not None:
            positions_in_reach(np.asarray(values), LIMIT, name="coordinates")
        return coordinates


@compiled
def _features(
    layer: FourierFeatures, points: Float[Array, "*batch axes"]
) -> Float[Array, "*batch features"]:
    x = upcast(points)
    if x.dtype == np.float64:
        matrix = jax.lax.bitcast_convert_type(layer.matrix_bits, jnp.float64)
        cos, sin = float64_fourier_phases(x, matrix)
    else:
        cos, sin = _phases(x, _from_bits(layer.bits), _from_bits(layer.rate_bits))
    return encode(
        cos,
        sin,
        embedding_dim=2 * cos.shape[-1],
        layout=layer.layout,
        cos_first=layer.cos_first,
    ).astype(points.dtype)


def _phases(
    x: Float[Array, "*batch axes"],
    tables: Float[Array, "parts 2 3 256 pairs"],
    rates: Float[Array, "parts pairs"],
) -> tuple[Float[Array, "*batch pairs"], Float[Array, "*batch pairs"]]:
    """Return :func:`firstlayer.positions.fourier.fourier_phases` by a loop over parts.

    Without the loop XLA fuses the products of all parts and computes each of them twice for
    the next: 8 axes take minutes to compile.
    """

    def add_part(phase: tuple[Array, Array], part: tuple[Array, ...]) -> tuple[Any, None]:
        return multiply(*phase, *digit_phases(*part)), None

    parts = coordinate_parts(x, tables.shape[0]), tables, rates
    first = digit_phases(*(array[0] for array in parts))
    return jax.lax.scan(add_part, first, tuple(array[1:] for array in parts))[0]


def _to_bits(x: Float[np.ndarray, "*shape"]) -> Int32[Array, "*bits"]:
    """Return the bit patterns of float32 numbers, or of float64 numbers as pairs of int32.

    Example:
        >>> _to_bits(np.array([0.0, 1.0], np.float32)).tolist()
        [0, 1065353216]
    """
    pair = (2,) if x.dtype.itemsize == 8 else ()
    return jnp.array(np.ascontiguousarray(x).view(np.int32).reshape(*x.shape, *pair))


def _from_bits(bits: Int32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the float32 numbers of these bit patterns."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
