"""Base class of the attention biases on torch, and their shared argument handling."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from ..._check import not_masked
from .._tensors.buffers import PrecomputedBuffers
from .._tensors.dtypes import as_torch_dtype, dtype_name, upcast
from .._tensors.memory import is_plain_cpu
from .arguments import Positions, on_host, positions_tensor, signed

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: ``(head, q_position, k_position) -> bias`` for a single pair, as a score_mod needs it.
PairBias = Callable[[Tensor, Tensor, Tensor], Tensor]


class Bias(PrecomputedBuffers):
    """Base class of layers that return a bias to add to attention scores.

    Shape:
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or floats
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, or ``(batch, num_heads, q_length,
          k_length)`` if either side has a batch
    """

    def bias(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "*batch num_heads q_length k_length"]:
        """Return the bias of every query-key pair.

        Args:
            q_positions: Positions of the queries.
            k_positions: Positions of the keys.
            dtype: Dtype of the result. None is the dtype of the parameters, or float32
                without parameters. Computed in the compute dtype and rounded once.
        """
        raise NotImplementedError

    def forward(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "*batch num_heads q_length k_length"]:
        """Return the bias of every query-key pair; see :meth:`bias`."""
        return self.bias(q_positions, k_positions, dtype=dtype)

    def score_mod(
        self, q_positions: Positions | None = None, k_positions: Positions | None = None
    ) -> ScoreMod:
        """Return a ``score_mod`` for ``flex_attention`` that adds the bias.

        The bias is computed pair by pair; no ``(q_length, k_length)`` matrix is built. The
        function holds the layer's current parameters: create it again after they are
        replaced (``load_state_dict(assign=True)``) or moved to another device. On the CPU,
        flex_attention has no backward.

        Args:
            q_positions: Positions of the queries, ``(length,)`` or ``(batch, length)``;
                None is 0, 1, ….
            k_positions: Positions of the keys, in the same form.

        Example:
            >>> from firstlayer.torch import AlibiBias
            >>> score_mod = AlibiBias(2, max_bias=2.0).score_mod()
            >>> score, first, query, key = map(torch.tensor, (1.0, 0, 4, 2))
            >>> score_mod(score, first, first, query, key)  # slope 0.5, distance 2
            tensor(0.)
        """
        q_at = self._position_lookup(q_positions, "q_positions")
        k_at = self._position_lookup(k_positions, "k_positions")
        pair_bias = self._pair_bias()

        def score_mod(
            score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
        ) -> Tensor:
            return score + pair_bias(h, q_at(b, q_idx), k_at(b, kv_idx)).to(score.dtype)

        return score_mod

    def _pair_bias(self) -> PairBias:
        raise NotImplementedError

    def _device(self) -> torch.device:
        tensors = (*self.parameters(recurse=False), *self.buffers(recurse=False))
        return tensors[0].device

    def _checked_pair(self, q_positions: Any, k_positions: Any) -> tuple[Tensor, Tensor]:
        return (
            checked_positions("q_positions", q_positions, self._device()),
            checked_positions("k_positions", k_positions, self._device()),
        )

    def _position_lookup(
        self, positions: Any, name: str
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function from a batch index and a sequence index to the position."""
        if positions is None:
            return lambda b, index: index
        positions = checked_positions(name, positions, self._device())
        if positions.ndim not in (1, 2):
            raise ValueError(
                f"{name} must have shape (length,) or (batch, length), "
                f"got {tuple(positions.shape)}"
            )
        if positions.ndim == 1:
            return lambda b, index: positions[index]
        return lambda b, index: positions[b, index]


def checked_positions(
    name: str, positions: Any, device: torch.device
) -> Shaped[Tensor, "*batch length"]:
    """Return positions as int64, float32 or float64; concrete ones must be finite."""
    positions = signed(positions_tensor(positions, device=device, name=name))
    if not positions.is_floating_point():
        return positions.to(torch.int64)
    positions = upcast(positions)
    if is_plain_cpu(positions):
        host = on_host(positions)
        finite = abs(host) < float("inf")
        if not finite.all():
            raise ValueError(f"{name} must be finite, got {host[~finite].flat[0]}")
    return positions


def parameter(
    value: Any,
    shape: tuple[int, ...],
    *,
    device: Any = None,
    dtype: torch.dtype | str | None = None,
    name: str = "weight",
) -> nn.Parameter:
    """Return ``value`` as a parameter, without a copy if possible, or an empty parameter.

    Args:
        value: Initial values, or None.
        shape: Required shape.
        device: Device of the parameter; None keeps that of ``value``.
        dtype: Dtype of the parameter or its name; None keeps that of ``value``.
        name: Name of the parameter in error messages.
    """
    dtype = as_torch_dtype(dtype)
    if value is None:
        return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    tensor = torch.as_tensor(not_masked(value, name=name))
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if dtype is None and not tensor.is_floating_point():
        raise TypeError(f"{name} must be real, got {dtype_name(tensor.dtype)}")
    return nn.Parameter(tensor.detach().to(device=device, dtype=dtype))
