"""Rotary positions of Firstlayer inside transformers models.

A transformers model gets cosines and sines from one module and rotates queries and keys
itself. :class:`HFRotary` replaces that module: its values are exact at every position and
survive ``model.half()`` and ``to_empty``. Logits are unchanged as long as positions are
small enough for transformers' float32 angles. transformers itself is never imported.
"""

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from ..files.hf import has_grid_positions, phases_from_hf, rope_layer_types
from ._positions.by_length import phases_of
from ._replaced import Replaced
from ._tensors.errors import check_module
from .rotary import RotaryPositions

# The layouts in which models expect the values of pairs.
_SPREADS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda pairs: torch.cat([pairs, pairs], dim=-1),
    "neighbours": lambda pairs: pairs.repeat_interleave(2, dim=-1),
    "pairs": lambda pairs: pairs,
    "complex": lambda pairs: pairs,
}
# Key of the layer in HFRotary.layers if it does not depend on the layer type.
_ALL = "all"


class RotaryModule(nn.Module):
    """Base class of the replacements for rotary modules.

    Args:
        config: Config of the model.
        spread: Layout of the output; see :class:`HFRotary`.
        cast: Return the dtype of ``x``; see :class:`HFRotary`.
    """

    def __init__(self, config: Any, *, spread: str, cast: bool) -> None:
        super().__init__()
        if spread not in _SPREADS:
            allowed = ", ".join(map(repr, _SPREADS))
            raise ValueError(f"spread must be one of {allowed}, got {spread!r}")
        #: Models read parameters from it.
        self.config = config
        self.spread, self.cast = spread, bool(cast)
        self._is_grid = has_grid_positions(config)
        self._has_leading_axis = False
        self.layers = nn.ModuleDict()
        for layer_type in rope_layer_types(config):
            layer = RotaryPositions(**phases_from_hf(config, layer_type))
            self.layers[layer_type or _ALL] = phases_of(layer)

    @torch.no_grad()
    def _phases(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> Any:
        layer: Any = self.layers[_ALL if _ALL in self.layers else str(layer_type)]
        positions = position_ids.to(x.device)
        if self._is_grid:
            positions = positions.movedim(-1, 0)
        elif layer.axes is not None:
            # Text tokens have the same position on every axis.
            positions = positions.expand(layer.axes, -1, -1)
        is_wide = self.cast and x.dtype == torch.float64
        phases = layer.phases(positions, dtype=torch.float64 if is_wide else torch.float32)
        if self._has_leading_axis:
            phases = tuple(phase[None] for phase in phases)
        if self.spread == "complex":
            return torch.complex(*(phase.float() for phase in phases))
        cos, sin = (_SPREADS[self.spread](phase) for phase in phases)
        return (cos.to(x.dtype), sin.to(x.dtype)) if self.cast else (cos, sin)


class HFRotary(RotaryModule):
    """Drop-in replacement for the rotary module of a transformers model.

    Has no parameters. With ``dynamic`` and ``longrope`` parameters the phases depend on the
    largest position of a call, and with ``dynamic`` on that of earlier calls, as in
    transformers.

    Args:
        config: Config of a text model or an image tower, with rope parameters that are
            shared or per layer type.
        spread: Layout of the output: ``"halves"`` is ``[pairs, pairs]`` (most models),
            ``"neighbours"`` repeats each pair (Cohere), ``"pairs"`` has one entry per pair
            (gpt-oss), ``"complex"`` is one complex64 tensor ``cos + i sin`` with one entry
            per pair (Llama 4, DeepSeek-V2).
        cast: Return cosines and sines in the dtype of ``x``. False is float32 (OLMo, image
            towers of Qwen).

    Shape:
        - x: any shape; the output has its device
        - position_ids: ``(batch, length)``. Multimodal text models (M-RoPE) also accept
          ``(axes, batch, length)``; image towers expect ``(..., axes)``.
        - output: cosines and sines, each ``(batch, length, 2 * pairs)``, or ``(batch,
          length, pairs)`` for ``"pairs"`` and ``"complex"``

    Example:
        >>> llama = {"model_type": "llama", "head_dim": 4, "rope_theta": 10_000.0}
        >>> cos, sin = HFRotary(llama)(torch.zeros(1), torch.tensor([[0, 1]]))
        >>> sin[0, 1]
        tensor([0.8415, 0.0100, 0.8415, 0.0100])
    """

    def __init__(self, config: Any, *, spread: str = "halves", cast: bool = True) -> None:
        super().__init__(config, spread=spread, cast=cast)

    def forward(
        self,
        x: Float[Tensor, "..."],
        position_ids: Shaped[Tensor, "..."],
        layer_type: str | None = None,
    ) -> Any:
        """Return the cosines and sines of positions, as transformers' module does.

        Args:
            x: Tensor with the device, and with ``cast`` the dtype, of the output.
            position_ids: Position of each token.
            layer_type: Layer type, if rope parameters are given per layer type.
        """
        return self._phases(x, position_ids, layer_type)


class PatchRotary(RotaryModule):
    """Rotary module of DINOv3 and Sapiens 2: positions are the centres of patches.

    Args:
        config: Config of the image tower.

    Shape:
        - pixel_values: ``(batch, channels, height, width)``
        - output: cosines and sines, each ``(patches, head_dim)``
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, spread="halves", cast=True)

    def forward(self, pixel_values: Float[Tensor, "batch channels height width"]) -> Any:
        """Return the cosines and sines of the patches of an image."""
        sizes = _pair(self.config.patch_size)
        counts = [n // k for n, k in zip(pixel_values.shape[-2:], sizes, strict=True)]
        axes = [
            (torch.arange(n, device=pixel_values.device) * 2.0 + 1.0) / n - 1.0
            for n in counts
        ]
        at = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
        return self._phases(pixel_values, self._augmented(at) if self.training else at)

    def _augmented(self, at: Tensor) -> Tensor:
        """Return coordinates shifted and scaled at random, drawn as transformers does."""
        shift, config = self.config.pos_embed_shift, self.config
        if shift is not None:
            at = at + at.new_empty(1, 2).uniform_(-shift, shift)
        for scale, shape in (
            (config.pos_embed_jitter, (1, 2)),
            (config.pos_embed_rescale, (1,)),
        ):
            if scale is not None:
                reach = math.log(scale)
                at = at * at.new_empty(shape).uniform_(-reach, reach).exp()
        return at


class TileRotary(RotaryModule):
    """Rotary module of Llama 4's image tower: the patches of a tile, then the class token.

    Args:
        config: Config of the image tower.

    Shape:
        - hidden_states: any shape; the output has its device
        - output: complex64, ``(patches + 1, 1, pairs)``
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, spread="complex", cast=False)

    def forward(self, hidden_states: Float[Tensor, "..."]) -> Any:
        """Return ``cos + i sin`` of the patches; the class token is not rotated."""
        side = self.config.image_size // self.config.patch_size
        patches = torch.arange(side * side, device=hidden_states.device)
        grid = torch.stack([patches // side + 1, patches % side + 1], dim=-1)
        grid = torch.cat([grid, grid.new_zeros(1, 2)])
        return self._phases(hidden_states, grid)[:, None]


# Modules that compute positions from an image instead of receiving them.
_IMAGE_MODULES: dict[str, Callable[[Any], RotaryModule]] = {
    "dinov3_vit": PatchRotary,
    "eomt_dinov3": PatchRotary,
    "llama4_vision_model": TileRotary,
    "sapiens2": PatchRotary,
}


def replace_rotary(model: nn.Module, *, spread: str | None = None) -> Replaced:
    """Replace the rotary modules of a transformers model in place.

    Args:
        model: Model whose rotary modules have a ``config`` and ``inv_freq``.
        spread: Layout as in :class:`HFRotary`. None detects it by comparing the output of
            each module for small positions; give it for a model on the meta device, whose
            modules cannot be called.

    Returns:
        The number of replaced modules, an int. Its ``names`` are those of the modules, and
        its ``left`` has the reason for each module that was not replaced. Modules that are
        Firstlayer's already are in neither. Raises a ValueError if the model then has no
        module of Firstlayer's.

    Example:
        >>> class Rotary(nn.Module):
        ...     config = {"model_type": "llama", "head_dim": 4, "rope_theta": 10_000.0}
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("inv_freq", torch.tensor([1.0, 0.01]))
        >>> model = nn.Sequential(Rotary(), nn.Linear(2, 2))
        >>> replace_rotary(model, spread="halves"), type(model[0]).__name__
        (Replaced(['0'], left={}), 'HFRotary')
    """
    missing = "model must have rotary modules with inv_freq, got none"
    check_module("model", model)
    replaced = replace_rotary_modules(rotary_places(model), spread=spread)
    return replaced.check(model, RotaryModule, missing)


@dataclass(frozen=True)
class Place:
    """A rotary module in a model.

    Args:
        name: Name of the module in the model.
        parent: Module that has it as an attribute.
        attribute: Name of the attribute.
        module: The rotary module.
    """

    name: str
    parent: nn.Module
    attribute: str
    module: nn.Module


def rotary_places(model: nn.Module) -> list[Place]:
    """Return every rotary module of a model, once for each of its names."""
    return [
        Place(f"{path}.{name}" if path else name, parent, name, child)
        for path, parent in model.named_modules(remove_duplicate=False)
        for name, child in parent._modules.items()
        if child is not None
        and not isinstance(child, RotaryModule)
        and any("inv_freq" in buffer or buffer == "freqs_ci" for buffer in child._buffers)
    ]


def replace_rotary_modules(places: list[Place], *, spread: str | None = None) -> Replaced:
    """Replace the rotary modules that can be replaced.

    Args:
        places: From :func:`rotary_places`.
        spread: As in :func:`replace_rotary`.
    """
    new: dict[nn.Module, RotaryModule] = {}
    left: dict[str, str] = {}
    for place in places:
        try:
            # A module that is registered twice gets one replacement.
            new[place.module] = new.get(place.module) or _replacement(place.module, spread)
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            left[place.name] = str(error)
    # All replacements are built before the model is changed.
    replaced = [place for place in places if place.module in new]
    for place in replaced:
        setattr(place.parent, place.attribute, new[place.module])
    return Replaced([place.name for place in replaced], left)


def _replacement(module: Any, spread: str | None) -> RotaryModule:
    title = type(module).__name__
    if not hasattr(module, "config"):
        raise ValueError(f"{title} must have a config, got none")
    own = sorted(name for name in module.state_dict() if name != "inv_freq")
    if own:
        raise ValueError(f"{title} must have no state of its own, got {', '.join(own)}")
    make = _IMAGE_MODULES.get(getattr(module.config, "model_type", ""))
    if make is not None:
        new = _checked(make(module.config), module)
    elif spread is not None:
        new = HFRotary(module.config, spread=spread)
    else:
        new = _detected(module)
    # HunYuan-VL reads the number of axes from it.
    if hasattr(module, "mrope_section"):
        vars(new)["mrope_section"] = module.mrope_section
    if "inv_freq" in module.state_dict():
        new.register_buffer("inv_freq", module.inv_freq)
    return new.train(module.training).to(next(module.buffers()).device)


def _checked(new: RotaryModule, module: Any) -> RotaryModule:
    """Return ``new`` if its output for an image equals that of ``module``."""
    buffer = next(module.buffers())
    if not buffer.is_meta:
        height, width = _pair(module.config.patch_size)
        image = torch.zeros(1, 3, 2 * height, 3 * width, device=buffer.device)
        theirs = _separate(module).eval()(image)
        if not _is_close(new.to(buffer.device).eval()(image), theirs, atol=5e-2):
            raise _mismatch(module)
    return new


def _detected(module: Any) -> RotaryModule:
    """Return a replacement with the layout and dtype of the output of ``module``."""
    title, device = type(module).__name__, next(module.buffers()).device
    names = list(inspect.signature(module.forward).parameters)
    if names[:2] != ["x", "position_ids"]:
        raise ValueError(f"{title} must be called with x and position_ids, got {names}")
    if device.type == "meta":
        raise ValueError(f"spread must be given for {title} on the meta device, got None")
    new, x = HFRotary(module.config).to(device), torch.zeros(1, device=device)
    types = [name for name in new.layers if name != _ALL]
    for ids in _test_positions(new):
        calls = [(ids.to(device), name) for name in types] or [(ids.to(device),)]
        theirs = [_separate(module)(x, *call) for call in calls]
        for new.spread, new._has_leading_axis in product(_SPREADS, (False, True)):
            if all(
                _is_close(new(x, *call), b) for call, b in zip(calls, theirs, strict=True)
            ):
                half = _separate(module)(x.bfloat16(), *calls[0])
                new.cast = not torch.is_tensor(half) and half[0].dtype == torch.bfloat16
                return new
    raise _mismatch(module)


def _separate(module: Any) -> Any:
    """Return a copy that can be called without changing the frequencies of ``module``."""
    other = copy.copy(module)
    other._buffers = dict(module._buffers)
    return other


def _mismatch(module: Any) -> ValueError:
    return ValueError(
        f"{type(module).__name__} must return cosines and sines as its config describes"
    )


def _test_positions(rotary: RotaryModule) -> list[Tensor]:
    """Return position ids in the shapes that models use: 0 and 1 on each axis."""
    layer: Any = next(iter(rotary.layers.values()))
    if layer.axes is None:
        return [torch.tensor([[0, 1]], device="cpu")]
    units = torch.eye(layer.axes, dtype=torch.int64, device="cpu")
    return [units, units[None]] if rotary._is_grid else [units[:, None]]


def _pair(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _is_close(ours: Any, theirs: Any, *, atol: float = 1e-6) -> bool:
    if torch.is_tensor(ours) and torch.is_tensor(theirs) and theirs.is_complex():
        ours, theirs = (ours.real, ours.imag), (theirs.real, theirs.imag)
    if not isinstance(ours, tuple) or not isinstance(theirs, tuple) or len(theirs) != 2:
        return False
    if not all(
        torch.is_tensor(b) and a.shape == b.shape for a, b in zip(ours, theirs, strict=True)
    ):
        return False
    # The module may have been cast: bfloat16 frequencies have a relative error of 1/256,
    # as the sines of small angles then have. float16 has no frequencies below 6e-8.
    (cos, sin), (their_cos, their_sin) = ours, (part.float() for part in theirs)
    return torch.allclose(cos, their_cos, atol=max(atol, 1e-2)) and torch.allclose(
        sin, their_sin, rtol=1e-2, atol=atol
    )
