"""xPos for NumPy."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from .._array import compute_dtype
from .._check import dtype_text, host_array, is_float, one_of, positions_in_reach
from ..positions.phases import LIMIT
from ..positions.rotary import (
    LAYOUTS,
    Layout,
    check_heads,
    check_heads_axis,
    inverse_phases,
    over_heads,
    rotate_rows,
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
from ._module import Module, native_byte_order, resolve_positions
from ._positions import gradient_of


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
    for a ``scale_base`` of 512, and a tenth of it in float16. Others are a ValueError.

    Example:
        >>> layer = XPosRotary(4, scale_base=10.0)
        >>> q, k = np.ones((2, 1, 4))
        >>> scores = [layer(q, [p + 9]) @ layer(k, [p], keys=True).T for p in (0, 50)]
        >>> bool(np.allclose(*scores)), scores[0].round(4).item()
        (True, 0.7482)
    """

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
        self.layout: Layout = layout
        self.center = check_center(center)
        self.tables, self.rates = xpos_tables(
            head_dim, base=base, scale_base=scale_base, rotary_dim=rotary_dim
        )
        self.head_dim, self.base = int(head_dim), float(base)
        self.scale_base = float(scale_base)
        self.rotary_dim = None if rotary_dim is None else int(rotary_dim)

    def __call__(
        self,
        x: Float[Any, "*lead head_dim"] | list[Any],
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        *,
        offset: Any = 0,
        keys: bool = False,
    ) -> Float[np.ndarray, "*lead head_dim"]:
        """Return ``x`` rotated by its positions and scaled.

        Args:
            x: Queries, or keys.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
            keys: Whether ``x`` are keys, which are scaled inversely to queries.
        """
        return self.vjp(x, positions, offset=offset, keys=keys)[0]

    def vjp(
        self,
        x: Float[Any, "*lead head_dim"] | list[Any],
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        *,
        offset: Any = 0,
        keys: bool = False,
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, np.ndarray]]]:
        """Return the output and the pullback from its gradient to that of ``x``.

        Example:
            >>> y, pullback = XPosRotary(2, scale_base=1.0).vjp(np.ones((1, 2)), [-1])
            >>> bool(np.allclose(pullback(y)["x"], (1.4 / 0.4) ** 2))
            True
        """
        x = self._vectors(x)
        if self.heads_axis is None:
            check_heads(x.shape, positions, offset=offset, axial=False)
        length = x.shape[-2 if self.heads_axis != -2 else -3]
        at = resolve_positions(length, positions=positions, offset=offset)
        rows = self._phase_rows(at, x.dtype, keys)
        seq = over_heads(at, x, heads_axis=self.heads_axis).shape
        read, write = self.layout == "half", self.layout != "interleaved"
        y = rotate_rows(x, rows, seq, read_half=read, write_half=write)

        def pullback(dy: Any) -> dict[str, np.ndarray]:
            dy = gradient_of(y, dy)
            if dy.dtype != x.dtype:
                dy = dy.astype(rows.dtype)
            # The transpose of a rotation rotates back; that of a scale is the same scale.
            inverse = inverse_phases(rows)
            dx = rotate_rows(dy, inverse, seq, read_half=write, write_half=read)
            return {"x": dx.astype(x.dtype, copy=False)}

        return y, pullback

    @property
    def reach(self) -> int:
        """Largest distance from ``center`` of a position, unless ``x`` is float16."""
        return xpos_reach(self.scale_base)

    def _vectors(self, x: Any) -> np.ndarray:
        x = host_array(x, name="x")
        if not is_float(x.dtype):
            raise TypeError(f"x must be real, got {dtype_text(x.dtype)}")
        axes = ("length",) if self.heads_axis != -2 else ("length", "heads")
        if x.ndim <= len(axes) or x.shape[-1] != self.head_dim:
            shape = f"(..., {', '.join(axes)}, {self.head_dim})"
            raise ValueError(f"x must have shape {shape}, got {x.shape}")
        return native_byte_order(x)

    def _phase_rows(self, positions: np.ndarray, dtype: np.dtype, keys: bool) -> np.ndarray:
        positions_in_reach(positions, LIMIT)
        reach = xpos_reach(self.scale_base, float16=dtype == np.float16)
        check_xpos_reach(
            positions, center=self.center, reach=reach, scale_base=self.scale_base
        )
        options: dict[str, Any] = {"center": self.center, "reach": reach, "keys": keys}
        flat = positions.reshape(-1)
        if compute_dtype(dtype) == "float64":
            phases = float64_xpos_phases(flat, *self._float64_constants, **options)
        else:
            phases = xpos_phases(flat, self.tables, self.rates, **options)
        return np.concatenate(phases, axis=-1)

    @cached_property
    def _float64_constants(self) -> tuple[np.ndarray, np.ndarray]:
        return float64_xpos_constants(
            self.head_dim,
            base=self.base,
            scale_base=self.scale_base,
            rotary_dim=self.rotary_dim,
        )
