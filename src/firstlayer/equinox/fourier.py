"""Fourier features for Equinox."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int32

from .._check import FLOATS, one_of, positions_in_reach
from ..positions.fourier import (
    fourier_phases,
    fourier_tables,
    gaussian_matrix,
    octave_matrix,
)
from ..positions.phases import LIMIT
from ..positions.sinusoidal import LAYOUTS, Layout, encode
from ._module import Module, bits_of, concrete, floats_of, upcast
from ._table.parameters import Key


class FourierFeatures(Module):
    """Turns coordinates into waves of fixed frequencies. Has no parameters.

    Frequencies that were drawn cannot be made again, so their bits are leaves of the tree:
    ``eqx.tree_serialise_leaves`` brings them back. No optimizer moves integers; give it
    ``eqx.filter(model, eqx.is_inexact_array)``, for optax' Adam does not take them at all.

    Args:
        matrix: Cycles per unit of each wave along each coordinate, ``(pairs, axes)``.
        layout: ``"half"`` is all cosines, then all sines; ``"interleaved"`` alternates.
        cos_first: Cosine before sine (Tancik et al.); NeRF has the sine first.

    Shape:
        - coordinates: ``(..., axes)``
        - output: ``(..., 2 * pairs)``, in the dtype of the coordinates

    A coordinate of 2^24 or more in size is a ValueError, and NaN where it is traced.

    Example:
        >>> layer = FourierFeatures.gaussian(64, axes=2, std=10.0, key=jax.random.key(0))
        >>> layer(jnp.zeros((5, 2))).shape
        (5, 128)
        >>> FourierFeatures.octaves(2, axes=1)(jnp.array([0.5])).round(6).tolist()
        [1.0, 0.0, 0.0, -1.0]
    """

    #: The float64 frequencies, the turns made of them, and their float32 rates.
    matrix_bits: Int32[Array, "pairs axes 2"]
    bits: Int32[Array, "parts 2 3 256 pairs"]
    rate_bits: Int32[Array, "parts pairs"]
    axes: int = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)
    cos_first: bool = eqx.field(static=True)

    def __init__(
        self, matrix: Any, *, layout: Layout = "half", cos_first: bool = True
    ) -> None:
        found = np.array(matrix, np.float64)
        if found.ndim != 2 or not found.size:
            raise ValueError(f"matrix must have shape (pairs, axes), got {found.shape}")
        if not np.isfinite(found).all():
            raise ValueError("matrix must be finite, got NaN or infinity in it")
        one_of("layout", layout, LAYOUTS)
        self.layout, self.cos_first = layout, bool(cos_first)
        self.axes, self.matrix_bits = found.shape[1], bits_of(found)
        tables, rates = fourier_tables(found)
        self.bits, self.rate_bits = bits_of(tables), bits_of(rates)

    @classmethod
    def gaussian(cls, pairs: int, *, axes: int, std: float, key: Key) -> "FourierFeatures":
        """Return features of randomly drawn frequencies, as Tancik et al. have them.

        Args:
            pairs: How many waves; there are twice as many features.
            axes: How many coordinates a point has.
            std: Standard deviation of the frequencies, in cycles per unit.
            key: What is drawn with. It must be concrete, for tables are made on the host.
        """
        if not concrete(key):
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
            octaves: How many frequencies each coordinate has.
            axes: How many coordinates a point has.
        """
        matrix = octave_matrix(octaves, axes=axes)
        return cls(matrix, layout="interleaved", cos_first=False)

    def __call__(
        self,
        coordinates: Float[Array | np.ndarray, "*batch axes"] | list[Any],
        *,
        key: Key | None = None,
    ) -> Float[Array, "*batch features"]:
        """Return the waves at ``coordinates``.

        Args:
            coordinates: Points, one number for each axis.
            key: Ignored; for :class:`equinox.nn.Sequential`.
        """
        given = self._checked(coordinates)
        wide = upcast(given)
        cos, sin = fourier_phases(
            wide, floats_of(self.bits, wide.dtype), floats_of(self.rate_bits, wide.dtype)
        )
        return encode(
            cos,
            sin,
            embedding_dim=2 * cos.shape[-1],
            layout=self.layout,
            cos_first=self.cos_first,
        ).astype(given.dtype)

    @property
    def matrix(self) -> Float64[np.ndarray, "pairs axes"]:
        """The frequencies, in float64."""
        return np.asarray(self.matrix_bits).view(np.float64)[..., 0]

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "matrix": self.matrix.tolist(),
            "layout": self.layout,
            "cos_first": self.cos_first,
        }

    def _checked(self, coordinates: Any) -> Float[Array, "*batch axes"]:
        found = (
            coordinates if isinstance(coordinates, jax.Array) else np.asarray(coordinates)
        )
        if found.dtype.name not in FLOATS:
            raise TypeError(f"coordinates must be real, got {found.dtype.name}")
        if found.shape[-1:] != (self.axes,):
            raise ValueError(
                f"coordinates must have shape (..., {self.axes}), got {found.shape}"
            )
        if concrete(found):
            positions_in_reach(np.asarray(found), LIMIT, name="coordinates")
        return jnp.asarray(found)
