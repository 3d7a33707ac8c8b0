"""What the schemes on attention scores share: positions of queries and keys, score_mod."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from .._tensors.buffers import PrecomputedBuffers
from .._tensors.dtypes import as_torch_dtype, dtype_name, upcast
from .._tensors.memory import is_plain_cpu
from .arguments import Positions, on_host, positions_tensor, signed

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: The bias of head ``h`` for a query and a key at those positions, one by one.
PairBias = Callable[[Tensor, Tensor, Tensor], Tensor]


class Bias(PrecomputedBuffers):
    """Base of the layers whose output is added to attention scores.

    Shape:
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with ``batch`` in front if either
          has it
    """

    def bias(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "*batch num_heads q_length k_length"]:
        """Return what is added to the score of every query and key."""
        raise NotImplementedError

    def forward(
        self,
        q_positions: Positions,
        k_positions: Positions,
        *,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "*batch num_heads q_length k_length"]:
        return self.bias(q_positions, k_positions, dtype=dtype)

    def score_mod(
        self, q_positions: Positions | None = None, k_positions: Positions | None = None
    ) -> ScoreMod:
        """Return the bias as ``flex_attention`` takes it: pair by pair, never a matrix.

        It reads the parameters that the layer has now whenever it is called; make it again
        where others take their place, as ``load_state_dict(assign=True)`` does, or another
        device. On the CPU flex_attention has no backward.

        Args:
            q_positions: Where the queries stand, ``(length,)`` or ``(batch, length)``; None
                is 0, 1, ….
            k_positions: Likewise, the keys.
        """
        q_at = self._reader(q_positions, "q_positions")
        k_at = self._reader(k_positions, "k_positions")
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

    def _pair(self, q_positions: Any, k_positions: Any) -> tuple[Tensor, Tensor]:
        return (
            checked("q_positions", q_positions, self._device()),
            checked("k_positions", k_positions, self._device()),
        )

    def _reader(self, positions: Any, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        if positions is None:
            return lambda b, index: index
        found = checked(name, positions, self._device())
        if found.ndim not in (1, 2):
            raise ValueError(
                f"{name} must have shape (length,) or (batch, length), "
                f"got {tuple(found.shape)}"
            )
        if found.ndim == 1:
            return lambda b, index: found[index]
        return lambda b, index: found[b, index]


def checked(
    name: str, positions: Any, device: torch.device
) -> Shaped[Tensor, "*batch length"]:
    """Return positions as integers or as reals of 32 bits or more, concrete ones finite."""
    found = signed(positions_tensor(positions, device=device, name=name))
    if not found.is_floating_point():
        return found.to(torch.int64)
    found = upcast(found)
    if is_plain_cpu(found):
        host = on_host(found)
        known = abs(host) < float("inf")
        if not known.all():
            raise ValueError(f"{name} must be finite, got {host[~known].flat[0]}")
    return found


def parameter(
    value: Any,
    shape: tuple[int, ...],
    *,
    device: Any = None,
    dtype: torch.dtype | str | None = None,
    name: str = "weight",
) -> nn.Parameter:
    """Return a parameter of that shape: ``value``, not copied if it fits, or an empty one.

    Args:
        value: What the caller gave, or None.
        shape: The shape it must have.
        device: None keeps the one it has.
        dtype: Likewise. A name will do.
        name: What it is called in the sentence.
    """
    dtype = as_torch_dtype(dtype)
    if value is None:
        return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    found = torch.as_tensor(value)
    if tuple(found.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(found.shape)}")
    if dtype is None and not found.is_floating_point():
        raise TypeError(f"{name} must be real, got {dtype_name(found.dtype)}")
    return nn.Parameter(found.detach().to(device=device, dtype=dtype))
