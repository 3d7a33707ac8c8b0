"""Rotary positions of firstlayer inside transformers models.

A transformers model gets cosines and sines from one module and rotates queries and keys
itself. :class:`HFRotary` replaces that module: its values are exact at every position and
survive ``model.half()`` and ``to_empty``. Logits are unchanged as long as positions are
small enough for transformers' float32 angles. transformers itself is never imported.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .rotary import RotaryPositions

# The layouts in which models expect one value per pair as one value per feature.
_SPREADS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda pairs: torch.cat([pairs, pairs], dim=-1),
    "neighbours": lambda pairs: pairs.repeat_interleave(2, dim=-1),
    "pairs": lambda pairs: pairs,
}
# Key of the layer in HFRotary.layers if it does not depend on the layer type.
_ALL = "all"


class HFRotary(nn.Module):
    """Drop-in replacement for the rotary module of a transformers model.

    Has no parameters. For ``dynamic`` and ``longrope`` parameters, transformers derives the
    current length from the largest position; here, call :meth:`at_length`.

    Args:
        config: Model config with rope parameters, shared or per layer type.
        spread: Layout of the output: ``"halves"`` is ``[pairs, pairs]`` (most models),
            ``"neighbours"`` repeats each pair (Cohere), ``"pairs"`` has one entry per pair
            (gpt-oss).

    Shape:
        - x: any shape; the output has its dtype and device
        - position_ids: ``(batch, length)``
        - output: cosines and sines, each ``(batch, length, 2 * pairs)``, or ``(batch,
          length, pairs)`` for ``"pairs"``

    Example:
        >>> llama = {"model_type": "llama", "head_dim": 4, "rope_theta": 10_000.0}
        >>> cos, sin = HFRotary(llama)(torch.zeros(1), torch.tensor([[0, 1]]))
        >>> sin[0, 1]
        tensor([0.8415, 0.0100, 0.8415, 0.0100])
    """

    def __init__(self, config: Any, *, spread: str = "halves") -> None:
        super().__init__()
        if spread not in _SPREADS:
            allowed = ", ".join(map(repr, _SPREADS))
            raise ValueError(f"spread must be one of {allowed}, got {spread!r}")
        self.spread = spread
        self.layers = nn.ModuleDict()
        for layer_type in _layer_types(config):
            layer = RotaryPositions.from_hf(config, layer_type)
            if layer.sections is not None:
                raise ValueError(
                    f"config must have one coordinate, got sections {layer.sections}"
                )
            self.layers[layer_type or _ALL] = layer

    @torch.no_grad()
    def forward(
        self,
        x: Float[Tensor, "..."],
        position_ids: Int[Tensor, "batch length"],
        layer_type: str | None = None,
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
        """Return the cosines and sines of positions, as transformers' module does.

        Args:
            x: Tensor with the dtype and device of the output.
            position_ids: Position of each token.
            layer_type: Layer type, if rope parameters are given per layer type.
        """
        layer: Any = self.layers[_ALL if _ALL in self.layers else str(layer_type)]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = layer.phases(position_ids.to(x.device), dtype=dtype)
        spread = _SPREADS[self.spread]
        return spread(cos).to(x.dtype), spread(sin).to(x.dtype)

    def at_length(self, n: int) -> "HFRotary":
        """Return a copy with the scaling for sequences of ``n`` positions."""
        other = copy.deepcopy(self)
        for name, layer in other.layers.items():
            other.layers[name] = cast(RotaryPositions, layer).at_length(n)
        return other


def replace_rotary(model: nn.Module, *, spread: str | None = None) -> int:
    """Replace the rotary modules of a transformers model in place.

    Returns the number of replaced modules.

    Args:
        model: Model whose rotary modules have a ``config`` and ``inv_freq``.
        spread: Layout as in :class:`HFRotary`. None detects it by comparing the output of
            each module for two positions and raises if no layout matches; give it for a
            model on the meta device, whose modules cannot be called.

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
    places = rotary_places(model)
    if not places:
        raise ValueError("model must have rotary modules with inv_freq, got none")
    # All replacements are built before the model is changed.
    replacements = [_replacement(child, spread) for _, _, child in places]
    for (parent, name, _), rotary in zip(places, replacements, strict=True):
        setattr(parent, name, rotary)
    return len(places)


def rotary_places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the parent, attribute name and module of each rotary module of a model."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "config") and any("inv_freq" in b for b in child._buffers)
    ]


def _layer_types(config: Any) -> list[str | None]:
    options = config.to_dict() if hasattr(config, "to_dict") else config
    rope = options.get("rope_parameters") or {}
    types = [name for name, value in rope.items() if isinstance(value, dict)]
    # The model's module has no buffers for types that none of its layers has.
    used = options.get("layer_types") or types
    return [name for name in types if name in used] or [None]


def _replacement(module: Any, spread: str | None) -> HFRotary:
    device = next(module.buffers()).device
    if spread is not None:
        return HFRotary(module.config, spread=spread).to(device)
    x, ids = torch.zeros(1, device=device), torch.tensor([[0, 1]], device=device)
    for spread in _SPREADS:
        ours = HFRotary(module.config, spread=spread).to(device)
        types = [name for name in ours.layers if name != _ALL]
        calls = [(x, ids, name) for name in types] or [(x, ids)]
        if all(_is_close(ours(*call), module(*call)) for call in calls):
            return ours
    raise ValueError(
        f"{type(module).__name__} must return cosines and sines for each feature of a head"
    )


def _is_close(ours: tuple[Tensor, Tensor], theirs: Any) -> bool:
    if not isinstance(theirs, tuple) or len(theirs) != 2:
        return False
    # The module may have been cast: bfloat16 frequencies have a relative error of 1/256.
    return all(
        isinstance(b, Tensor)
        and a.shape == b.shape
        and torch.allclose(a, b.to(a.dtype), atol=1e-2)
        for a, b in zip(ours, theirs, strict=True)
    )
