"""Which position scheme a transformers config asks for."""

from dataclasses import dataclass
from typing import Any

from ..files.hf import rotary_from_hf

#: Keys of a config that only a model that rotates has.
ROTARY_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "rotary_pct")
ROTARY_MODELS = {"llama", "mistral", "gptj", "codegen", "gpt_neox", "falcon"}
T5_MODELS = {"t5", "mt5", "umt5", "longt5", "switch_transformers", "udop"}
SINUSOIDAL_MODELS = {"marian", "pegasus", "m2m_100", "xglm", "fsmt", "speech_to_text"}
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx")


@dataclass(frozen=True)
class Scheme:
    """How a model tells where a token stands.

    Args:
        kind: ``rotary``, ``alibi``, ``t5``, ``relative``, ``sinusoidal``, ``learned``,
            ``none``, or ``unknown``.
        detail: What there is to say about it.
    """

    kind: str
    detail: str = ""


def position_scheme(config: dict[str, Any], *, positions: int | None = None) -> Scheme:
    """Return the scheme that a config asks for.

    Args:
        config: What a ``config.json`` holds; nothing if there is none.
        positions: Rows of the table of positions that is stored, None if none is.

    Example:
        >>> position_scheme({"model_type": "bloom"}).kind
        'alibi'
    """
    config = {**config, **_object(config.get("text_config"))}
    model, asked = str(config.get("model_type")), config.get("position_embedding_type")
    inner = _object(config.get("attn_config"))
    rotates = model in ROTARY_MODELS or any(config.get(key) for key in ROTARY_KEYS)
    if model == "bloom" or config.get("alibi") or inner.get("alibi"):
        return Scheme("alibi")
    if model in T5_MODELS or config.get("relative_attention_num_buckets"):
        buckets = config.get("relative_attention_num_buckets", 32)
        return Scheme("t5", f"{buckets} buckets")
    if isinstance(asked, str) and asked.startswith("relative_key"):
        return Scheme("relative", asked)
    if config.get("relative_attention"):
        return Scheme("relative", f"of {model}")
    if asked == "rotary" or (asked is None and rotates):
        return Scheme("rotary", _rotation(config))
    if model in SINUSOIDAL_MODELS or config.get("sinusoidal_pos_embds"):
        return Scheme("sinusoidal")
    if model == "model2vec":
        return Scheme("none", "a text's vector is the mean of its tokens' rows")
    length = positions or next((config[k] for k in LENGTH_KEYS if config.get(k)), None)
    return Scheme("learned", f"{length} positions") if length else Scheme("unknown")


def _object(value: Any) -> dict[str, Any]:
    # A config is what somebody has written: what should be an object may be anything.
    return value if isinstance(value, dict) else {}


def _rotation(config: dict[str, Any]) -> str:
    held = _object(config.get("rope_parameters") or config.get("rope_scaling"))
    by_type = [name for name, value in held.items() if isinstance(value, dict)]
    if not by_type:
        return _one_rotation(config, None)
    return "; ".join(f"{name}: {_one_rotation(config, name)}" for name in by_type)


def _one_rotation(config: dict[str, Any], layer_type: str | None) -> str:
    try:
        found = rotary_from_hf(config, layer_type)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        return f"not read: {error}"
    width, rotated = found["head_dim"], found["rotary_dim"]
    parts = [f"base {found['base']:g}", f"layout {found['layout']}"]
    if rotated is not None and rotated != width:
        parts.append(f"{rotated} of {width} features")
    if found["scaling"] is not None:
        parts.append(repr(found["scaling"]))
    return ", ".join(parts)
