"""xPos for Equinox."""

from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from .._array import compute_dtype
from .._check import one_of
from ..positions.rotary import (
    LAYOUTS,
    Layout,
    check_heads,
    check_heads_axis,
    over_heads,
    rotate,
)
from ..positions.xpos import (
    check_center,
    check_xpos_reach,
    float64_xpos_constants,
    float64_xpos_phases,
    xpos_phases,
    xpos_reach,
    xpos_tables,
)
from ._constant import Constant
from ._module import Module, compiled, upcast
from ._parameters import Key
from ._positions import (
    Offset,
    Positions,
    PositionsArgument,
    check_reach,
    checked_vectors,
    positions_argument,
)


class XPosRotary(Module):
    """Rotates queries and keys by their positions and scales them, so that scores decay.

    xPos rotates as :class:`RotaryPositions` and multiplies pair ``i`` of the score of a
    query and a key ``d`` positions before it by ``zeta_i ** (d / scale_base)``, where
    ``zeta_i = (2i + 0.4 rotary_dim) / (1.4 rotary_dim)``. Queries and keys are scaled
    inversely: call the layer with ``keys=True`` for keys. Attention must be causal. Has no
    parameters.

    Args:
        head_dim: Number of features of a head. Positive, and even unless ``rotary_dim`` is
            given.
        base: Ratio of the slowest wavelength to the fastest.
        scale_base: Number of positions over which pair ``i`` decays by ``zeta_i``.
            Positive.
        center: Position whose scale is 1. Scores do not depend on it. The middle of the
            longest sequence allows the most positions; see below.
        layout: ``"half"``, ``"interleaved"`` (torchscale, x-transformers) or
            ``"interleaved_to_half"``; see :func:`firstlayer.positions.rotary.rotate`.
        rotary_dim: Number of rotated features, the first ones; None is all.
        heads_axis: -3 for ``(..., heads, length, head_dim)``, -2 for ``(..., length, heads,
            head_dim)``. None is -3, but an input of three axes, which may be either, is
            a ValueError unless it has a position for every vector or an offset for every
            sequence.

    Shape:
        - x: ``(..., heads, length, head_dim)`` or ``(..., length, head_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers or reals; None is ``0, 1,
          …`` shifted by ``offset``
        - output: as ``x``, in the dtype of ``x``

    Positions must be within :attr:`reach` of ``center``, where no score overflows: 16997
    for a ``scale_base`` of 512, and a tenth of it in float16. Others are a ValueError, or
    NaN if traced.

    Example:
        >>> layer = XPosRotary(4, scale_base=10.0)
        >>> q, k = jnp.ones((2, 1, 4))
        >>> scores = [layer(q, [p + 9]) @ layer(k, [p], keys=True).T for p in (0, 50)]
        >>> bool(jnp.allclose(*scores, atol=1e-5)), round(scores[0].item(), 4)
        (True, 0.7482)
    """

    #: Phases and scales of each digit of a position; see
    #: :func:`firstlayer.positions.xpos.xpos_tables`.
    tables: Constant = eqx.field(static=True)
    rates: Constant = eqx.field(static=True)
    #: The same for float64; see
    #: :func:`firstlayer.positions.xpos.float64_xpos_constants`.
    turns: Constant = eqx.field(static=True)
    exponents: Constant = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    base: float = eqx.field(static=True)
    scale_base: float = eqx.field(static=True)
    center: int = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)
    rotary_dim: int | None = eqx.field(static=True)
    heads_axis: int | None = eqx.field(static=True)

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10_000.0,
        scale_base: float = 512.0,
        center: int = 0,
        layout: Layout = "half",
        rotary_dim: int | None = None,
        heads_axis: int | None = None,
    ) -> None:
        self.heads_axis = check_heads_axis(heads_axis)
        one_of("layout", layout, LAYOUTS)
        self.layout = layout
        self.center = check_center(center)
        options: dict[str, Any] = {
            "base": base,
            "scale_base": scale_base,
            "rotary_dim": rotary_dim,
        }
        tables, rates = xpos_tables(head_dim, **options)
        turns, exponents = float64_xpos_constants(head_dim, **options)
        self.head_dim, self.base = int(head_dim), float(base)
        self.scale_base = float(scale_base)
        self.rotary_dim = None if rotary_dim is None else int(rotary_dim)
        self.tables, self.rates = Constant(tables), Constant(rates)
        self.turns, self.exponents = Constant(turns), Constant(exponents)

    def __call__(
        self,
        x: Float[Array | np.ndarray, "*lead head_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
        keys: bool = False,
        key: Key | None = None,
    ) -> Float[Array, "*lead head_dim"]:
        """Return ``x`` rotated by its positions and scaled.

        Args:
            x: Queries, or keys.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
            keys: Whether ``x`` are keys, which are scaled inversely to queries.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        axes = ("length",) if self.heads_axis != -2 else ("length", "heads")
        x = checked_vectors(x, self.head_dim, axes=axes)
        if self.heads_axis is None:
            check_heads(x.shape, positions, offset=offset, axial=False)
        reach = xpos_reach(self.scale_base, float16=x.dtype == jnp.float16)

        def check(positions: Shaped[np.ndarray, "..."]) -> None:
            check_reach(positions)
            check_xpos_reach(
                positions, center=self.center, reach=reach, scale_base=self.scale_base
            )

        argument = positions_argument(
            x.shape[self._length_axis], positions=positions, offset=offset, check=check
        )
        return _rotate(self, x, argument, bool(keys))

    @property
    def reach(self) -> int:
        """Largest distance from ``center`` of a position, unless ``x`` is float16."""
        return xpos_reach(self.scale_base)

    @property
    def _length_axis(self) -> int:
        return -2 if self.heads_axis != -2 else -3


@partial(compiled, static_argnums=3)
def _rotate(
    layer: XPosRotary, x: Array, argument: PositionsArgument, keys: bool
) -> Float[Array, "*lead head_dim"]:
    at = argument.count(x.shape[layer._length_axis])
    at = over_heads(at, x, heads_axis=layer.heads_axis)
    options: dict[str, Any] = {
        "center": layer.center,
        "reach": xpos_reach(layer.scale_base, float16=x.dtype == jnp.float16),
        "keys": keys,
    }
    if compute_dtype(x.dtype) == "float64":
        constants = (jnp.asarray(c.array) for c in (layer.turns, layer.exponents))
        cos, sin = float64_xpos_phases(at, *constants, **options)
    else:
        constants = (jnp.asarray(c.array) for c in (layer.tables, layer.rates))
        cos, sin = xpos_phases(at, *constants, **options)
    return rotate(upcast(x), cos, sin, layout=layer.layout).astype(x.dtype)
