"""Reading a rotary layer off a transformers config.

Configs say the same thing in several ways. Version 4 has ``rope_scaling`` with ``type`` or
``rope_type``, and ``rope_theta`` beside it; version 5 has ``rope_parameters`` with
everything inside; either has one set for all layers or one for each layer type. What is
about rotation is understood completely or refused by name: a key that is skipped is a model
that is subtly wrong. Keys that are not about rotation are the model's own.
"""

from typing import Any

from .hf_models import (
    BASES,
    INTERLEAVED,
    INTERLEAVED_SECTIONS,
    INTERLEAVED_TO_HALF,
    PECULIAR,
    SECTIONS,
)
from .hf_scaling import Config, kind_of, rule_of


def rotary_from_hf(config: Any, layer_type: str | None = None) -> Config:
    """Return the arguments of a ``RotaryPositions`` layer for a transformers config.

    Args:
        config: A text model's: the dict of a ``config.json``, or an object with
            ``to_dict``. Only the latter says what a short file leaves to defaults.
        layer_type: Which layers, where rope parameters are given for each type.

    With multi-head latent attention (``qk_rope_head_dim``) the layer is for the rotated
    part of a head alone. DeepSeek's softmax scale and Ministral's query temperature belong
    to the attention and are not read.

    Example:
        >>> llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
        >>> found = rotary_from_hf({**llama, "rope_theta": 5e5})
        >>> found["head_dim"], found["base"], found["layout"], found["scaling"]
        (16, 500000.0, 'half', None)
    """
    config = _plain(config)
    rope, own = _rope_of(config, layer_type)
    kind = kind_of(rope)
    partial = _said("partial_rotary_factor", rope, config, own=own, alias="rotary_pct")
    head_dim = _head_dim(config, layer_type)
    sections, interleaved = _sections(config, rope)
    return {
        "head_dim": head_dim,
        "base": _base(config, rope, own=own),
        "layout": _layout(config),
        "scaling": rule_of(config, rope, kind=kind, partial=partial),
        "rotary_dim": _rotary_dim(config, head_dim, kind=kind, partial=partial),
        "sections": sections,
        "interleaved_sections": interleaved,
    }


def _plain(config: Any) -> Config:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, dict):
        found = type(config).__name__
        raise TypeError(f"config must be a dict or have to_dict, got {found}")
    model, own = config.get("model_type"), ("rope_parameters", "rope_scaling", "rope_theta")
    if model in PECULIAR:
        raise ValueError(f"model_type must be one that rotates as others do, got {model!r}")
    if config.get("text_config") and not any(config.get(key) for key in own):
        raise ValueError(
            f"config must be a text model's: give the text_config of {model!r}"
        )
    return config


def _rope_of(config: Config, layer_type: str | None) -> tuple[Config, bool]:
    """Return one set of rope parameters, and whether it is the layer type's own."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError("config must have rope_parameters or rope_scaling, got both")
    rope = _by_layer(config, new or old)
    if not any(isinstance(value, dict) for value in rope.values()):
        if layer_type is not None and layer_type not in (config.get("layer_types") or ()):
            raise ValueError(
                "layer_type must be None for one set of rope parameters, "
                f"got {layer_type!r}"
            )
        return rope, False
    stray = [name for name, value in rope.items() if not isinstance(value, dict | None)]
    if stray:
        raise ValueError(f"rope parameters must all be in a layer type, got {stray[0]!r}")
    types = " or ".join(repr(name) for name, value in rope.items() if value is not None)
    own = None if layer_type is None else rope.get(layer_type)
    if not isinstance(own, dict):
        raise ValueError(f"layer_type must be {types} for this config, got {layer_type!r}")
    return own, True


def _by_layer(config: Config, rope: Config) -> Config:
    # Version 4 has the base of local layers beside the other: Gemma 3, ModernBERT.
    for local, other in (
        ("rope_local_base_freq", "rope_theta"),
        ("local_rope_theta", "global_rope_theta"),
    ):
        if config.get(local) is not None and "sliding_attention" not in rope:
            return {
                "full_attention": {"rope_theta": config.get(other), **rope},
                "sliding_attention": {"rope_theta": config[local]},
            }
    return rope


def _said(name: str, rope: Config, config: Config, *, own: bool, alias: str) -> Any:
    """Return what is said inside or beside rope parameters; own ones need not agree."""
    inside = rope.get(name)
    beside = [config[key] for key in (name, alias) if config.get(key) is not None]
    if inside is not None:
        beside = [inside] if own else [inside, *beside]
    if any(value != beside[0] for value in beside):
        raise ValueError(f"{name} must be said once, got {' and '.join(map(str, beside))}")
    return beside[0] if beside else None


def _base(config: Config, rope: Config, *, own: bool) -> float:
    base = _said("rope_theta", rope, config, own=own, alias="rotary_emb_base")
    base = BASES.get(config.get("model_type", "")) if base is None else base
    if base is None:
        raise ValueError("config must have 'rope_theta', got none")
    return float(base)


def _head_dim(config: Config, layer_type: str | None) -> int:
    if config.get("qk_rope_head_dim"):
        return config["qk_rope_head_dim"]
    layers, special = config.get("layer_types") or (), config.get("per_layer_config") or {}
    for layer, values in special.items():
        if "head_dim" in values and layers[int(layer)] == layer_type:
            return values["head_dim"]
    if layer_type == "full_attention" and config.get("global_head_dim"):
        return config["global_head_dim"]
    for name in ("head_dim", "attention_head_dim", "kv_channels"):
        if config.get(name):
            return config[name]
    width = _first(config, "hidden_size", "n_embd", "d_model")
    return width // _first(config, "num_attention_heads", "n_head", "n_heads")


def _first(config: Config, *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ValueError(f"config must have 'head_dim' or {names[0]!r}, got none")


def _rotary_dim(
    config: Config, head_dim: int, *, kind: str, partial: float | None
) -> int | None:
    # Latent attention has split the head; a proportional rule turns part of a whole one.
    if config.get("qk_rope_head_dim") or kind == "proportional":
        return None
    size = config.get("rotary_dim")
    if partial is not None:
        said, size = size, int(head_dim * partial)
        if said not in (None, size):
            raise ValueError(
                f"rotary_dim must be {size} for partial_rotary_factor {partial}, got {said}"
            )
    return None if size == head_dim else size


def _layout(config: Config) -> str:
    model = config.get("model_type")
    if model in INTERLEAVED:
        return "interleaved"
    reads = config.get("rope_interleave", model in INTERLEAVED_TO_HALF)
    return "interleaved_to_half" if reads else "half"


def _sections(config: Config, rope: Config) -> tuple[list[int] | None, bool]:
    model = config.get("model_type", "")
    dealt = rope.get("mrope_interleaved", rope.get("interleaved"))
    if model in INTERLEAVED_SECTIONS or model in SECTIONS:
        known = model in INTERLEAVED_SECTIONS
        if dealt not in (None, known):
            raise ValueError(
                f"mrope_interleaved must be {known} for model_type {model!r}, got {dealt}"
            )
        dealt = known
    usual = INTERLEAVED_SECTIONS.get(model) or SECTIONS.get(model)
    sections = rope.get("mrope_section") or usual
    return (list(sections), bool(dealt)) if sections else (None, False)
