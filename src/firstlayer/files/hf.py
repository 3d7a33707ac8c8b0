"""Read the options of a rotary layer from a transformers config.

Configs express the same thing in several ways. Version 4 has ``rope_scaling`` with ``type``
or ``rope_type``, and ``rope_theta`` next to it; version 5 has ``rope_parameters`` with
everything inside. Both have one set of parameters for all layers or one per layer type.
Every rope parameter is either understood or rejected by name, because ignoring one would
give a model that is subtly wrong. Other keys of the config are not looked at. Image towers
have one frequency matrix each, from :mod:`firstlayer.files.hf_images`.
"""

from typing import Any

import numpy as np

from .._check import not_negative, number, positive
from ..positions import scaling
from ..positions.frequencies import layer_frequencies
from . import hf_images as images
from . import hf_models as models

Config = dict[str, Any]

#: Bound of a head's size. A mistyped one would fill the memory with tables.
_MAX_HEAD_DIM = 65_536
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
    "axial": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", _ORIGINAL_LENGTH, "beta_fast", "beta_slow", "truncate"),
        *("mscale", "mscale_all_dim", "attention_factor"),
        # Of the first YaRN models. It has no effect in transformers.
        "finetuned",
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
        config: Config of a text model or an image tower: the dict of a ``config.json``, or
            an object with ``to_dict``. The size of a head and the share of it that is
            rotated have the defaults of transformers in a dict without them. Other
            defaults are those of the object only.
        layer_type: Layer type, if the config has rope parameters per layer type.

    With multi-head latent attention (``qk_rope_head_dim``) the layer is for the rotated
    part of a head. DeepSeek's softmax scale and Ministral's query temperature belong to
    attention and are not read. Positions of image towers are row and column; of DINOv3,
    the centre of a patch in [-1, 1]; of Llama 4, row and column counted from 1, and 0, 0
    for the class token.

    Example:
        >>> llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
        >>> options = rotary_from_hf({**llama, "rope_theta": 5e5})
        >>> options["head_dim"], options["base"], options["layout"], options["scaling"]
        (16, 500000.0, 'half', None)
    """
    config = _config_dict(config)
    model_type = config.get("model_type")
    if model_type in models.UNSUPPORTED:
        raise ValueError(
            f"model_type must be one that a layer can rotate, got {model_type!r}: "
            f"{models.UNSUPPORTED[model_type]}"
        )
    options = _options(config, layer_type)
    if model_type in models.NEGATIVE:
        frequencies, _ = layer_frequencies(**{
            key: options[key] for key in ("head_dim", "base", "scaling")
        })
        return _with_frequencies(options, -frequencies)
    return options


def phases_from_hf(config: Any, layer_type: str | None = None) -> Config:
    """Return the arguments of a layer with the phases of a transformers rotary module.

    Like :func:`rotary_from_hf`, for models that rotate in a way of their own as well: the
    layout has no meaning, and the frequencies of Gemma 4's image tower and of HunYuan-VL
    are given per feature instead of per pair.

    Args:
        config: As in :func:`rotary_from_hf`.
        layer_type: As in :func:`rotary_from_hf`.

    Example:
        >>> vision = {"model_type": "gemma4_vision", "head_dim": 4}
        >>> rope = {"rope_type": "axial", "rope_theta": 100.0}
        >>> phases_from_hf({**vision, "rope_parameters": rope})["frequencies"].tolist()
        [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    """
    config = _config_dict(config)
    model_type = config.get("model_type")
    if model_type not in ("gemma4_vision", "hunyuan_vl_text"):
        if model_type in models.UNSUPPORTED:
            return rotary_from_hf(config, layer_type)
        return _options(config, layer_type)
    options = _options(config, layer_type)
    if model_type == "gemma4_vision":
        rows, columns = np.split(options["frequencies"], 2, axis=1)
        features = np.concatenate([rows, rows, columns, columns], axis=1)
        return _with_frequencies(options, features)
    if options["sections"] is None:
        return options
    sections, rule = options["sections"], options["scaling"]
    pairs, _ = layer_frequencies(options["head_dim"], base=options["base"], scaling=rule)
    if sum(sections) != len(pairs):
        raise ValueError(f"mrope_section must add up to {len(pairs)}, got {sections}")
    # Sections of features, so that the two features of a pair may belong to two axes.
    axis_of = np.repeat(np.arange(len(sections)), 2 * np.array(sections))
    features = np.tile(pairs, 2) * (axis_of == np.arange(len(sections))[:, None])
    return _with_frequencies(options, features)


def has_grid_positions(config: Any) -> bool:
    """Return whether the coordinates of a model's ``position_ids`` are on the last axis.

    Example:
        >>> has_grid_positions({"model_type": "pixtral", "rope_scaling": {"type": "axial"}})
        True
    """
    config = _config_dict(config)
    return images.is_image_tower(config, _rope_type_of(config))


def rope_layer_types(config: Any) -> list[str | None]:
    """Return the layer types that a rotary module has parameters for; None if shared.

    Example:
        >>> rope_layer_types({"model_type": "llama", "rope_theta": 1e4})
        [None]
    """
    config = _config_dict(config)
    rope = _dict_of(config, "rope_parameters")
    types = [name for name, value in rope.items() if isinstance(value, dict)]
    # A module has no buffers for types that none of its layers has. DeepSeek-V4 has other
    # names for the types of its layers.
    used = [name for name in types if name in (_layer_types(config) or types)]
    return [*(used or types)] or [None]


def _options(config: Config, layer_type: str | None) -> Config:
    rope, is_per_type = _rope_parameters(config, layer_type)
    rope = {**rope, "rope_type": _checked_rope_type(config, rope)}

    def value(name: str, *aliases: str) -> float | None:
        return _single_value(name, aliases, rope, config, is_per_type=is_per_type)

    base = value("rope_theta", "rotary_emb_base", "rotary_embedding_base")
    if base is None:
        base = models.DEFAULT_BASES.get(str(config.get("model_type")))
    if base is None:
        raise ValueError("config must have 'rope_theta', got none")
    head_dim = _head_dim(config, layer_type)
    options: Config = {
        "head_dim": head_dim,
        "base": base,
        "layout": _layout(config),
        "scaling": None,
        "rotary_dim": None,
        "sections": None,
        "interleaved_sections": False,
    }
    if images.is_image_tower(config, rope["rope_type"]):
        w = images.image_frequencies(config.get("model_type"), head_dim, base=base)
        return {**options, "frequencies": w}
    partial = value("partial_rotary_factor", "rotary_pct")
    if partial is None and config.get("rotary_dim") is None:
        partial = models.DEFAULT_PARTIAL_FACTORS.get(str(config.get("model_type")))
    if partial is not None and not 0.0 < partial <= 1.0:
        raise ValueError(
            f"partial_rotary_factor must be above 0 and at most 1, got {partial}"
        )
    options["scaling"] = _scaling(config, rope, partial)
    options["rotary_dim"] = _rotary_dim(config, rope, head_dim, partial)
    if options["rotary_dim"] is None and head_dim % 2:
        raise ValueError(
            f"head_dim must be even, got {head_dim}: give the head_dim of the checkpoint"
        )
    pairs = (options["rotary_dim"] or head_dim) // 2
    sections, interleaved = _sections(config, rope, pairs)
    if config.get("model_type") == "ernie4_5_vl_moe_text":
        w = images.ernie_frequencies(head_dim, base=base, sections=sections or [])
        return _with_frequencies(options, w)
    return {**options, "sections": sections, "interleaved_sections": interleaved}


def _with_frequencies(options: Config, frequencies: np.ndarray) -> Config:
    free = {"scaling": None, "rotary_dim": None, "sections": None}
    head_dim = max(options["head_dim"], 2 * frequencies.shape[-1])
    return {**options, **free, "head_dim": head_dim, "frequencies": frequencies}


def _config_dict(config: Any) -> Config:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, dict):
        name = type(config).__name__
        raise TypeError(
            "config must be a dict, such as the content of a config.json, or have to_dict, "
            f"got {name}"
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str | None):
        raise TypeError(f"model_type must be a string, got {type(model_type).__name__}")
    rope_keys = ("rope_parameters", "rope_scaling", "rope_theta")
    if config.get("text_config") and not any(config.get(key) for key in rope_keys):
        raise ValueError(
            f"config must be a text model's: give the text_config of {model_type!r}"
        )
    kind = config.get("position_embeddings_type", "rotary")
    if "rotary_embedding_base" in config and kind != "rotary":
        raise ValueError(f"position_embeddings_type must be 'rotary', got {kind!r}")
    return {**models.DEFAULT_SIZES.get(model_type or "", {}), **config}


def _dict_of(config: Config, name: str) -> Config:
    value = config.get(name)
    if not isinstance(value, dict | None):
        raise TypeError(f"{name} must be a dict, got {type(value).__name__}")
    return value or {}


def _list_of(config: Config, name: str) -> list[Any]:
    value = config.get(name)
    if not isinstance(value, list | tuple | None):
        raise TypeError(f"{name} must be a list, got {type(value).__name__}")
    return list(value or ())


def _layer_types(config: Config) -> list[Any]:
    return _list_of(config, "layer_types")


def _rope_parameters(config: Config, layer_type: str | None) -> tuple[Config, bool]:
    """Return the rope parameters, and whether they are specific to the layer type."""
    new, old = _dict_of(config, "rope_parameters"), _dict_of(config, "rope_scaling")
    if new and old and new != old:
        raise ValueError("config must have rope_parameters or rope_scaling, got both")
    rope = _with_local_base(config, new or old)
    if not any(isinstance(value, dict) for value in rope.values()):
        if layer_type is not None and layer_type not in _layer_types(config):
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
    name: str,
    aliases: tuple[str, ...],
    rope: Config,
    config: Config,
    *,
    is_per_type: bool,
) -> float | None:
    """Return a number given in the rope parameters or the config; all must agree.

    Parameters of a layer type override the config instead.
    """
    inside = rope.get(name)
    values = [config[key] for key in (name, *aliases) if config.get(key) is not None]
    if inside is not None:
        values = [inside] if is_per_type else [inside, *values]
    values = [number(name, value) for value in values]
    if any(value != values[0] for value in values):
        raise ValueError(
            f"{name} must have one value, got {' and '.join(map(str, values))}"
        )
    return values[0] if values else None


def _head_dim(config: Config, layer_type: str | None) -> int:
    name, head_dim = _named_head_dim(config, layer_type)
    if positive(name, head_dim) > _MAX_HEAD_DIM:
        raise ValueError(f"{name} must be at most {_MAX_HEAD_DIM}, got {head_dim}")
    return int(head_dim)


def _named_head_dim(config: Config, layer_type: str | None) -> tuple[str, Any]:
    if config.get("qk_rope_head_dim"):
        return "qk_rope_head_dim", config["qk_rope_head_dim"]
    types = _layer_types(config)
    for layer, values in _dict_of(config, "per_layer_config").items():
        at = int(layer) if str(layer).isdecimal() else len(types)
        if isinstance(values, dict) and "head_dim" in values and at < len(types):
            if types[at] == layer_type:
                return "head_dim", values["head_dim"]
    # A config that transformers saved has the sizes of each layer instead.
    is_global = layer_type == "full_attention" and "per_layer_config" not in config
    if is_global and config.get("global_head_dim"):
        return "global_head_dim", config["global_head_dim"]
    for name in ("head_dim", "attention_head_dim", "kv_channels"):
        if config.get(name):
            return name, config[name]
    # SAM's trackers have rotary in the memory attention only.
    memory = "memory_attention_"
    if config.get(memory + "hidden_size"):
        width = positive(memory + "hidden_size", config[memory + "hidden_size"])
        names = [memory + "downsample_rate", memory + "num_attention_heads"]
        for name in names:
            width //= positive(name, config.get(name, 1))
        return memory + "hidden_size // heads", width
    # The hidden_size of Qwen2-VL's image tower is the width of its output.
    width = _first_of(config, "embed_dim", "hidden_size", "n_embd", "d_model")
    heads = _first_of(
        config,
        *("num_attention_heads", "n_head", "n_heads", "num_heads"),
        *("encoder_num_attention_heads", "speech_encoder_attention_heads"),
    )
    return "hidden_size // num_attention_heads", width // heads


def _first_of(config: Config, *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return positive(name, config[name])
    parts = sorted(str(key) for key in config if str(key).endswith("_config"))
    hint = f": give one of {', '.join(map(repr, parts))}" if parts else ""
    expected = "hidden_size" if "hidden_size" in names else names[0]
    raise ValueError(f"config must have 'head_dim' or {expected!r}, got none{hint}")


def _rotary_dim(
    config: Config, rope: Config, head_dim: int, partial: float | None
) -> int | None:
    # With latent attention head_dim is already the rotated part. The proportional rule
    # selects pairs out of the whole head.
    if config.get("qk_rope_head_dim") or rope["rope_type"] == "proportional":
        return None
    model_type, rotary_dim = config.get("model_type"), config.get("rotary_dim")
    if rope["rope_type"] == "default" and model_type in models.WHOLE_HEADS:
        return None
    if model_type in models.WITHOUT_ROTARY_DIM:
        rotary_dim = None
    if rotary_dim is not None:
        positive("rotary_dim", rotary_dim)
    if partial is not None:
        given, rotary_dim = rotary_dim, int(head_dim * partial)
        if rotary_dim % 2:
            raise ValueError(
                f"head_dim {head_dim} times partial_rotary_factor {partial} must be even, "
                f"got {rotary_dim}: give the head_dim of the checkpoint"
            )
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
    if not isinstance(is_mixed, bool | None):
        raise TypeError(f"rope_interleave must be a bool, got {type(is_mixed).__name__}")
    return "interleaved_to_half" if is_mixed else "half"


def _sections(config: Config, rope: Config, pairs: int) -> tuple[list[int] | None, bool]:
    model_type = config.get("model_type", "")
    if model_type == "neomme":
        # Row and column have alternate pairs.
        return [pairs - pairs // 2, pairs // 2], True
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
    sections = _list_of(rope, "mrope_section") or default
    if not sections:
        return None, False
    checked = [not_negative(f"mrope_section[{i}]", n) for i, n in enumerate(sections)]
    if model_type in models.INTERLEAVED_SECTIONS:
        # transformers reads the other axes' numbers only, and bounds them by the pairs.
        axes = len(checked)
        others = [min(n, len(range(i, pairs, axes))) for i, n in enumerate(checked)][1:]
        return [pairs - sum(others), *others], True
    if sum(checked) != pairs:
        raise ValueError(
            f"mrope_section must add up to {pairs} pairs, got {checked}: "
            "give mrope_section, or the partial_rotary_factor that belongs to it"
        )
    return checked, bool(interleaved)


def _rope_type_of(config: Config) -> str:
    """Return the type of the rope parameters; of layer types, their first."""
    rope = _dict_of(config, "rope_parameters") or _dict_of(config, "rope_scaling")
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return _checked_rope_type(config, nested[0] if nested else rope)


def _checked_rope_type(config: Config, rope: Config) -> str:
    """Return the type of rope parameters, after checking that all keys belong to it."""
    given = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"rope_type must be a string, got {type(name).__name__}")
    types = {_TYPE_ALIASES.get(name, name) for name in given} or {"default"}
    if len(types) > 1:
        raise ValueError(
            f"rope_type and type must agree, got {given[0]!r} and {given[1]!r}"
        )
    rope_type = types.pop()
    if rope_type not in _KEYS:
        raise ValueError(
            f"rope_type must be one of {', '.join(map(repr, _KEYS))}, got {rope_type!r}"
        )
    keys = {key for key, value in rope.items() if value is not None}
    if rope_type == "dynamic" and config.get("model_type") in models.CONSTANT_NTK:
        keys -= models.CONSTANT_NTK_KEYS
    unknown = sorted(keys.difference(_COMMON_KEYS, _KEYS[rope_type]), key=str)
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
        case "dynamic" if rope.get("alpha"):
            return scaling.NTK(factor=rope["alpha"])
        case "dynamic":
            return scaling.DynamicNTK(
                factor=_required("factor", rope), original_length=_max_length(config, rope)
            )
        case "proportional":
            fraction = 1.0 if partial is None else partial
            factor = 1.0 if rope.get("factor") is None else rope["factor"]
            return scaling.Proportional(fraction=fraction, factor=factor)
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
        short_factors=_factors("short_factor", rope),
        long_factors=_factors("long_factor", rope),
        original_length=_original_length(config, rope),
        factor=_length_ratio(config, rope) if factor is None else factor,
        attention=rope.get("attention_factor"),
    )


def _factors(name: str, rope: Config) -> tuple[Any, ...]:
    _required(name, rope)
    return tuple(_list_of(rope, name))


def _original_length(config: Config, rope: Config) -> int:
    inside, outside = rope.get(_ORIGINAL_LENGTH), config.get(_ORIGINAL_LENGTH)
    if None not in (inside, outside) and inside != outside:
        raise ValueError(
            f"{_ORIGINAL_LENGTH} must have one value, got {inside} and {outside}"
        )
    length = outside if inside is None else inside
    return (
        _max_length(config, rope) if length is None else positive(_ORIGINAL_LENGTH, length)
    )


def _length_ratio(config: Config, rope: Config) -> float:
    return max(_max_length(config, rope) / _original_length(config, rope), 1.0)


def _max_length(config: Config, rope: Config) -> int:
    name = "max_position_embeddings"
    return positive(name, _required(name, {**rope, name: config.get(name)}))


def _required(name: str, rope: Config) -> Any:
    if rope.get(name) is None:
        raise ValueError(
            f"rope parameters of type {rope['rope_type']!r} must have {name!r}, got none"
        )
    return rope[name]
