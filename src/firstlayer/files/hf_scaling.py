"""From one set of transformers' rope parameters to a scaling rule, key by key."""

from typing import Any

from ..positions.scaling import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Scaling,
    YaRN,
)

Config = dict[str, Any]

_ALIASES = {"mrope": "default", "su": "longrope"}
_ALWAYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved", "interleaved"),
)
_ORIGINAL = "original_max_position_embeddings"
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", _ORIGINAL, "beta_fast", "beta_slow", "truncate"),
        *("mscale", "mscale_all_dim", "attention_factor"),
        # Ministral's: the second is no rotation but firstlayer.positions.rotary.query_temperature's scale.
        *("max_position_embeddings", "llama_4_scaling_beta"),
    ),
    "longrope": ("factor", _ORIGINAL, "short_factor", "long_factor", "attention_factor"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor",),
}


def kind_of(rope: Config) -> str:
    """Return the kind of scaling, once every key has been found to belong to it."""
    said = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    kinds = {_ALIASES.get(name, name) for name in said} or {"default"}
    if len(kinds) > 1:
        raise ValueError(f"rope_type and type must agree, got {said[0]!r} and {said[1]!r}")
    kind = kinds.pop()
    if kind not in _KEYS:
        hint = ": qwen_axial_frequencies and pixtral_axial_frequencies make image towers'"
        raise ValueError(
            f"rope_type must be one of {', '.join(map(repr, _KEYS))}, "
            f"got {kind!r}{hint if kind == 'axial' else ''}"
        )
    given = {key for key, value in rope.items() if value is not None}
    unknown = sorted(given.difference(_ALWAYS, _KEYS[kind]))
    if unknown:
        raise ValueError(
            f"rope parameters of type {kind!r} must have only keys that belong to it, "
            f"got {', '.join(map(repr, unknown))}"
        )
    return kind


def rule_of(
    config: Config, rope: Config, *, kind: str, partial: float | None
) -> Scaling | None:
    """Return the rule for rope parameters of that kind; None if they scale nothing."""
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(factor=_need(rope, "factor", kind))
    if kind == "dynamic":
        longest = _need(config, "max_position_embeddings", kind)
        return DynamicNTK(factor=_need(rope, "factor", kind), original_length=longest)
    if kind == "proportional":
        fraction = 1.0 if partial is None else partial
        return Proportional(fraction=fraction, factor=rope.get("factor") or 1.0)
    original = _original_length(config, rope, kind)
    if kind == "llama3":
        return Llama3(
            factor=_need(rope, "factor", kind),
            original_length=original,
            low_factor=_need(rope, "low_freq_factor", kind),
            high_factor=_need(rope, "high_freq_factor", kind),
        )
    return (_yarn if kind == "yarn" else _longrope)(config, rope, original)


def _yarn(config: Config, rope: Config, original: int) -> YaRN:
    # A factor of None is asked for; a factor that is missing has been forgotten.
    asked = "factor" in rope and rope["factor"] is None
    names = ("beta_fast", "beta_slow", "truncate")
    options = {name: rope[name] for name in names if rope.get(name) is not None}
    # transformers takes them together or not at all, and 0 for not given.
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        options |= {name: rope[name] for name in ("mscale", "mscale_all_dim")}
    return YaRN(
        factor=_ratio(config, original, "yarn") if asked else _need(rope, "factor", "yarn"),
        original_length=original,
        attention=rope.get("attention_factor"),
        **options,
    )


def _longrope(config: Config, rope: Config, original: int) -> LongRoPE:
    factor = rope.get("factor")
    return LongRoPE(
        short_factors=tuple(_need(rope, "short_factor", "longrope")),
        long_factors=tuple(_need(rope, "long_factor", "longrope")),
        original_length=original,
        factor=_ratio(config, original, "longrope") if factor is None else factor,
        attention=rope.get("attention_factor"),
    )


def _original_length(config: Config, rope: Config, kind: str) -> int:
    inside, beside = rope.get(_ORIGINAL), config.get(_ORIGINAL)
    if inside is not None and beside is not None and inside != beside:
        raise ValueError(f"{_ORIGINAL} must be said once, got {inside} and {beside}")
    said = inside if inside is not None else beside
    return _need(config, "max_position_embeddings", kind) if said is None else said


def _ratio(config: Config, original: int, kind: str) -> float:
    return max(_need(config, "max_position_embeddings", kind) / original, 1.0)


def _need(values: Config, name: str, kind: str) -> Any:
    if values.get(name) is None:
        raise ValueError(f"rope parameters of type {kind!r} must have {name!r}, got none")
    return values[name]
