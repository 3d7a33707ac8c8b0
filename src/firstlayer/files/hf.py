"""Read the options of a rotary layer from a transformers config.

Configs express the same thing in several ways. Version 4 has ``rope_scaling`` with ``type``
or ``rope_type``, and ``rope_theta`` next to it; version 5 has ``rope_parameters`` with
everything inside. Both have one set of parameters for all layers or one per layer type.
Every rope parameter is either understood or rejected by name, because ignoring one would
give a model that is subtly wrong. Other keys of the config are not looked at.
"""

from typing import Any

from ..positions import scaling
from . import hf_models as models

Config = dict[str, Any]

_TYPE_ALIASES = {"mrope": "default", "su": "longrope"}
_ORIGINAL_LENGTH = "original_max_position_embeddings"
#: Keys of rope parameters of any type.
_COMMON_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved", "interleaved"),
)
#: Further keys, by type.
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", _ORIGINAL_LENGTH, "beta_fast", "beta_slow", "truncate"),
        *("mscale", "mscale_all_dim", "attention_factor"),
        # Ministral's. The second belongs to attention: see query_temperature.
        *("max_position_embeddings", "llama_4_scaling_beta"),
    ),
    "longrope": (
        *("factor", _ORIGINAL_LENGTH, "attention_factor"),
        *("short_factor", "long_factor"),
    ),
    "llama3": ("factor", _ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor",),
}


def rotary_from_hf(config: Any, layer_type: str | None = None) -> Config:
    """Return the arguments of a ``RotaryPositions`` layer for a transformers config.

    Args:
        config: Config of a text model: the dict of a ``config.json``, or an object with
            ``to_dict``. Only the object has the defaults that a short file leaves out.
        layer_type: Layer type, if the config has rope parameters per layer type.

    With multi-head latent attention (``qk_rope_head_dim``) the layer is for the rotated
    part of a head. DeepSeek's softmax scale and Ministral's query temperature belong to
    attention and are not read.

    Example:
        >>> llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
        >>> options = rotary_from_hf({**llama, "rope_theta": 5e5})
        >>> options["head_dim"], options["base"], options["layout"], options["scaling"]
        (16, 500000.0, 'half', None)
    """
    config = _config_dict(config)
    rope, is_per_type = _rope_parameters(config, layer_type)
    rope = {**rope, "rope_type": _checked_rope_type(rope)}

    def value(name: str, alias: str) -> Any:
        return _single_value(name, alias, rope, config, is_per_type=is_per_type)

    partial = value("partial_rotary_factor", "rotary_pct")
    base = value("rope_theta", "rotary_emb_base")
    if base is None:
        base = models.DEFAULT_BASES.get(config.get("model_type", ""))
    if base is None:
        raise ValueError("config must have 'rope_theta', got none")
    head_dim = _head_dim(config, layer_type)
    sections, interleaved = _sections(config, rope)
    return {
        "head_dim": head_dim,
        "base": float(base),
        "layout": _layout(config),
        "scaling": _scaling(config, rope, partial),
        "rotary_dim": _rotary_dim(config, rope, head_dim, partial),
        "sections": sections,
        "interleaved_sections": interleaved,
    }


def _config_dict(config: Any) -> Config:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, dict):
        name = type(config).__name__
        raise TypeError(f"config must be a dict or have to_dict, got {name}")
    model_type = config.get("model_type")
    if model_type in models.UNSUPPORTED:
        raise ValueError(
            f"model_type must be one with a standard rotary layer, got {model_type!r}"
        )
    rope_keys = ("rope_parameters", "rope_scaling", "rope_theta")
    if config.get("text_config") and not any(config.get(key) for key in rope_keys):
        raise ValueError(
            f"config must be a text model's: give the text_config of {model_type!r}"
        )
    return config


def _rope_parameters(config: Config, layer_type: str | None) -> tuple[Config, bool]:
    """Return the rope parameters, and whether they are specific to the layer type."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError("config must have rope_parameters or rope_scaling, got both")
    rope = _with_local_base(config, new or old)
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
    of_type = None if layer_type is None else rope.get(layer_type)
    if not isinstance(of_type, dict):
        raise ValueError(f"layer_type must be {types} for this config, got {layer_type!r}")
    return of_type, True


def _with_local_base(config: Config, rope: Config) -> Config:
    # In version 4, Gemma 3 and ModernBERT have a separate key for the base of local layers.
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


def _single_value(
    name: str, alias: str, rope: Config, config: Config, *, is_per_type: bool
) -> Any:
    """Return a value given in the rope parameters or the config; all must agree.

    Parameters of a layer type override the config instead.
    """
    inside = rope.get(name)
    values = [config[key] for key in (name, alias) if config.get(key) is not None]
    if inside is not None:
        values = [inside] if is_per_type else [inside, *values]
    if any(value != values[0] for value in values):
        raise ValueError(
            f"{name} must have one value, got {' and '.join(map(str, values))}"
        )
    return values[0] if values else None


def _head_dim(config: Config, layer_type: str | None) -> int:
    if config.get("qk_rope_head_dim"):
        return config["qk_rope_head_dim"]
    types, by_layer = config.get("layer_types") or (), config.get("per_layer_config") or {}
    for layer, values in by_layer.items():
        if "head_dim" in values and types[int(layer)] == layer_type:
            return values["head_dim"]
    if layer_type == "full_attention" and config.get("global_head_dim"):
        return config["global_head_dim"]
    for name in ("head_dim", "attention_head_dim", "kv_channels"):
        if config.get(name):
            return config[name]
    width = _first_of(config, "hidden_size", "n_embd", "d_model")
    return width // _first_of(config, "num_attention_heads", "n_head", "n_heads")


def _first_of(config: Config, *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ValueError(f"config must have 'head_dim' or {names[0]!r}, got none")


def _rotary_dim(
    config: Config, rope: Config, head_dim: int, partial: float | None
) -> int | None:
    # With latent attention head_dim is already the rotated part. The proportional rule
    # selects pairs out of the whole head.
    if config.get("qk_rope_head_dim") or rope["rope_type"] == "proportional":
        return None
    rotary_dim = config.get("rotary_dim")
    if partial is not None:
        given, rotary_dim = rotary_dim, int(head_dim * partial)
        if given not in (None, rotary_dim):
            raise ValueError(
                f"rotary_dim must be {rotary_dim} for partial_rotary_factor {partial}, "
                f"got {given}"
            )
    return None if rotary_dim == head_dim else rotary_dim


def _layout(config: Config) -> str:
    model_type = config.get("model_type")
    if model_type in models.INTERLEAVED:
        return "interleaved"
    is_mixed = config.get("rope_interleave", model_type in models.INTERLEAVED_TO_HALF)
    return "interleaved_to_half" if is_mixed else "half"


def _sections(config: Config, rope: Config) -> tuple[list[int] | None, bool]:
    model_type = config.get("model_type", "")
    interleaved = rope.get("mrope_interleaved", rope.get("interleaved"))
    if model_type in models.INTERLEAVED_SECTIONS or model_type in models.SECTIONS:
        expected = model_type in models.INTERLEAVED_SECTIONS
        if interleaved not in (None, expected):
            raise ValueError(
                f"mrope_interleaved must be {expected} for model_type {model_type!r}, "
                f"got {interleaved}"
            )
        interleaved = expected
    default = models.INTERLEAVED_SECTIONS.get(model_type) or models.SECTIONS.get(model_type)
    sections = rope.get("mrope_section") or default
    return (list(sections), bool(interleaved)) if sections else (None, False)


def _checked_rope_type(rope: Config) -> str:
    """Return the type of rope parameters, after checking that all keys belong to it."""
    given = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    types = {_TYPE_ALIASES.get(name, name) for name in given} or {"default"}
    if len(types) > 1:
        raise ValueError(
            f"rope_type and type must agree, got {given[0]!r} and {given[1]!r}"
        )
    rope_type = types.pop()
    if rope_type not in _KEYS:
        hint = ": use qwen_axial_frequencies or pixtral_axial_frequencies for image towers"
        raise ValueError(
            f"rope_type must be one of {', '.join(map(repr, _KEYS))}, "
            f"got {rope_type!r}{hint if rope_type == 'axial' else ''}"
        )
    keys = {key for key, value in rope.items() if value is not None}
    unknown = sorted(keys.difference(_COMMON_KEYS, _KEYS[rope_type]))
    if unknown:
        raise ValueError(
            f"rope parameters of type {rope_type!r} must have only keys that belong to it, "
            f"got {', '.join(map(repr, unknown))}"
        )
    return rope_type


def _scaling(config: Config, rope: Config, partial: float | None) -> scaling.Scaling | None:
    match rope["rope_type"]:
        case "default":
            return None
        case "linear":
            return scaling.Linear(factor=_required("factor", rope))
        case "dynamic":
            return scaling.DynamicNTK(
                factor=_required("factor", rope), original_length=_max_length(config, rope)
            )
        case "proportional":
            fraction = 1.0 if partial is None else partial
            return scaling.Proportional(fraction=fraction, factor=rope.get("factor") or 1.0)
        case "llama3":
            return scaling.Llama3(
                factor=_required("factor", rope),
                original_length=_original_length(config, rope),
                low_factor=_required("low_freq_factor", rope),
                high_factor=_required("high_freq_factor", rope),
            )
        case "yarn":
            return _yarn(config, rope)
    return _longrope(config, rope)


def _yarn(config: Config, rope: Config) -> scaling.YaRN:
    names = ("beta_fast", "beta_slow", "truncate")
    options = {name: rope[name] for name in names if rope.get(name) is not None}
    # transformers uses both or neither, and takes 0 for absent.
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        options |= {name: rope[name] for name in ("mscale", "mscale_all_dim")}
    # A factor of None means the ratio of lengths; a missing factor is an error.
    is_ratio = "factor" in rope and rope["factor"] is None
    return scaling.YaRN(
        factor=_length_ratio(config, rope) if is_ratio else _required("factor", rope),
        original_length=_original_length(config, rope),
        attention=rope.get("attention_factor"),
        **options,
    )


def _longrope(config: Config, rope: Config) -> scaling.LongRoPE:
    factor = rope.get("factor")
    return scaling.LongRoPE(
        short_factors=tuple(_required("short_factor", rope)),
        long_factors=tuple(_required("long_factor", rope)),
        original_length=_original_length(config, rope),
        factor=_length_ratio(config, rope) if factor is None else factor,
        attention=rope.get("attention_factor"),
    )


def _original_length(config: Config, rope: Config) -> int:
    inside, outside = rope.get(_ORIGINAL_LENGTH), config.get(_ORIGINAL_LENGTH)
    if None not in (inside, outside) and inside != outside:
        raise ValueError(
            f"{_ORIGINAL_LENGTH} must have one value, got {inside} and {outside}"
        )
    length = outside if inside is None else inside
    return _max_length(config, rope) if length is None else length


def _length_ratio(config: Config, rope: Config) -> float:
    return max(_max_length(config, rope) / _original_length(config, rope), 1.0)


def _max_length(config: Config, rope: Config) -> int:
    name = "max_position_embeddings"
    return _required(name, {**rope, name: config.get(name)})


def _required(name: str, rope: Config) -> Any:
    if rope.get(name) is None:
        raise ValueError(
            f"rope parameters of type {rope['rope_type']!r} must have {name!r}, got none"
        )
    return rope[name]
