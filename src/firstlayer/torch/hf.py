"""Firstlayer's rotation inside a transformers model, and nothing else of the model changed.

A transformers model asks one module for cosines and sines and rotates queries and keys with
them itself. :class:`HFRotary` answers in its place: right at every position, and unharmed
by ``model.half()`` or ``to_empty``. Logits are the same as long as positions are small
enough for transformers' own float32 angles. transformers itself is never imported.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .rotary import RotaryPositions

Spread = Callable[[Tensor], Tensor]

# How models lay out one number for each pair as one for each feature.
_SPREADS: dict[str, Spread] = {
    "halves": lambda pairs: torch.cat([pairs, pairs], dim=-1),
    "neighbours": lambda pairs: pairs.repeat_interleave(2, dim=-1),
    "pairs": lambda pairs: pairs,
}


class HFRotary(nn.Module):
    """Gives a transformers model its cosines and sines. Has no parameters.

    Args:
        config: The model's config, with one set of rope parameters or one for each type of
            layer.
        spread: What the model takes: ``"halves"`` is all pairs twice, as nearly all models,
            ``"neighbours"`` each pair twice (Cohere), ``"pairs"`` each once (gpt-oss).

    Shape:
        - x: anything; its dtype and device are those of the output
        - position_ids: ``(batch, length)``
        - output: cosines and sines, ``(batch, length, 2 * pairs)``

    What transformers reads off the largest position, the current length of ``dynamic`` and
    ``longrope`` parameters, is given by :meth:`at_length` here.

    Example:
        >>> llama = {"model_type": "llama", "head_dim": 4, "rope_theta": 10_000.0}
        >>> cos, sin = HFRotary(llama)(torch.zeros(1), torch.tensor([[0, 1]]))
        >>> sin[0, 1]
        tensor([0.8415, 0.0100, 0.8415, 0.0100])
    """

    def __init__(self, config: Any, *, spread: str = "halves") -> None:
        super().__init__()
        if spread not in _SPREADS:
            words = ", ".join(map(repr, _SPREADS))
            raise ValueError(f"spread must be one of {words}, got {spread!r}")
        self.spread = spread
        self.layers = nn.ModuleDict()
        for layer_type in _layer_types(config):
            layer = RotaryPositions.from_hf(config, layer_type)
            if layer.sections is not None:
                raise ValueError(
                    f"config must turn by one coordinate, got sections {layer.sections}"
                )
            self.layers[layer_type or "every"] = layer

    @torch.no_grad()
    def forward(
        self,
        x: Float[Tensor, "..."],
        position_ids: Int[Tensor, "batch length"],
        layer_type: str | None = None,
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
        """Return the cosines and sines of positions, as the model's own module does.

        Args:
            x: Whatever has the dtype and device that they should have.
            position_ids: Where each token stands.
            layer_type: Which layers ask, where their rotations differ.
        """
        layer: Any = self.layers["every" if "every" in self.layers else str(layer_type)]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = layer.phases(position_ids.to(x.device), dtype=dtype)
        spread = _SPREADS[self.spread]
        return spread(cos).to(x.dtype), spread(sin).to(x.dtype)

    def at_length(self, n: int) -> "HFRotary":
        """Return a copy for sequences of ``n`` positions; most rules make the same one."""
        other = copy.deepcopy(self)
        for name, layer in other.layers.items():
            other.layers[name] = cast(RotaryPositions, layer).at_length(n)
        return other


def replace_rotary(model: nn.Module, *, spread: str | None = None) -> int:
    """Put Firstlayer's rotation into a transformers model, in place; return in how many places.

    Args:
        model: A model whose rotary modules have a ``config`` and ``inv_freq``.
        spread: As for :class:`HFRotary`. None asks each module for the cosines and sines of
            two positions, and takes the place only of one that gives the same; a model
            that comes from the meta device cannot be asked.

    Example:
        >>> class Rotary(nn.Module):
        ...     config = {"model_type": "llama", "head_dim": 4, "rope_theta": 10_000.0}
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("inv_freq", torch.tensor([1.0, 0.01]))
        >>> model = nn.Sequential(Rotary(), nn.Linear(2, 2))
        >>> replace_rotary(model, spread="halves"), type(model[0]).__name__
        (1, 'HFRotary')
    """
    found = rotary_places(model)
    if not found:
        raise ValueError("model must have rotary modules with inv_freq, got none")
    new = [_in_place_of(child, spread) for _, _, child in found]
    for (parent, name, _), rotary in zip(found, new, strict=True):
        setattr(parent, name, rotary)
    return len(new)


def rotary_places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the rotary modules of a transformers model: parent, name and module."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "config") and any("inv_freq" in b for b in child._buffers)
    ]


def _layer_types(config: Any) -> list[str | None]:
    plain = config.to_dict() if hasattr(config, "to_dict") else config
    rope = plain.get("rope_parameters") or {}
    types = [name for name, value in rope.items() if isinstance(value, dict)]
    # A small model may lack layers of a type, and its own module then knows nothing of it.
    used = plain.get("layer_types") or types
    return [name for name in types if name in used] or [None]


def _in_place_of(module: Any, spread: str | None) -> HFRotary:
    device = next(module.buffers()).device
    if spread is not None:
        return HFRotary(module.config, spread=spread).to(device)
    x, ids = torch.zeros(1, device=device), torch.tensor([[0, 1]], device=device)
    for spread in _SPREADS:
        ours = HFRotary(module.config, spread=spread).to(device)
        types = [name for name in ours.layers if name != "every"]
        calls = [(x, ids, name) for name in types] or [(x, ids)]
        if all(_same(ours(*call), module(*call)) for call in calls):
            return ours
    raise ValueError(
        f"{type(module).__name__} must return cosines and sines for each feature of a head"
    )


def _same(ours: tuple[Tensor, Tensor], theirs: Any) -> bool:
    if not isinstance(theirs, tuple) or len(theirs) != 2:
        return False
    # Theirs may have been cast: half precision rounds a frequency by a part in 256.
    return all(
        isinstance(b, Tensor)
        and a.shape == b.shape
        and torch.allclose(a, b.to(a.dtype), atol=1e-2)
        for a, b in zip(ours, theirs, strict=True)
    )
