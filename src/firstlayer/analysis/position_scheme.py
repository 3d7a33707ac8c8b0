"""Find the position scheme of a model in its transformers config."""

from dataclasses import dataclass
from typing import Any

from ..files.hf import rotary_from_hf

#: Config keys that only rotary models have.
ROTARY_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "rotary_pct")
ROTARY_MODELS = {"llama", "mistral", "gptj", "codegen", "gpt_neox", "falcon"}
T5_MODELS = {"t5", "mt5", "umt5", "longt5", "switch_transformers", "udop"}
SINUSOIDAL_MODELS = {"marian", "pegasus", "m2m_100", "xglm", "fsmt", "speech_to_text"}
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx")


@dataclass(frozen=True)
class Scheme:
    """The position scheme of a model.

    Args:
        kind: ``rotary``, ``alibi``, ``t5``, ``relative``, ``sinusoidal``, ``learned``,
            ``none``, or ``unknown``.
        detail: Its options, in words.
    """

    kind: str
    detail: str = ""


def position_scheme(config: dict[str, Any], *, positions: int | None = None) -> Scheme:
    """Return the position scheme of a config.

    Args:
        config: Content of a ``config.json``, empty if there is none.
        positions: Rows of the position table in the checkpoint, None without one.

    Example:
        >>> position_scheme({"model_type": "bloom"}).kind
        'alibi'
    """
    config = {**config, **_object(config.get("text_config"))}
    model, given = str(config.get("model_type")), config.get("position_embedding_type")
    attention = _object(config.get("attn_config"))
    is_rotary = model in ROTARY_MODELS or any(config.get(key) for key in ROTARY_KEYS)
    if model == "bloom" or config.get("alibi") or attention.get("alibi"):
        return Scheme("alibi")
    if model in T5_MODELS or config.get("relative_attention_num_buckets"):
        buckets = config.get("relative_attention_num_buckets", 32)
        return Scheme("t5", f"{buckets} buckets")
    if isinstance(given, str) and given.startswith("relative_key"):
        return Scheme("relative", given)
    if config.get("relative_attention"):
        return Scheme("relative", f"of {model}")
    if given == "rotary" or (given is None and is_rotary):
        return Scheme("rotary", _rotary_detail(config))
    if model in SINUSOIDAL_MODELS or config.get("sinusoidal_pos_embds"):
        return Scheme("sinusoidal")
    if model == "model2vec":
        return Scheme("none", "a text's vector is the mean of its tokens' rows")
    length = positions or next((config[k] for k in LENGTH_KEYS if config.get(k)), None)
    return Scheme("learned", f"{length} positions") if length else Scheme("unknown")


def _object(value: Any) -> dict[str, Any]:
    # A config may hold anything where an object belongs.
    return value if isinstance(value, dict) else {}


def _rotary_detail(config: dict[str, Any]) -> str:
    rope = _object(config.get("rope_parameters") or config.get("rope_scaling"))
    types = [name for name, value in rope.items() if isinstance(value, dict)]
    if not types:
        return _rotary_options(config, None)
    return "; ".join(f"{name}: {_rotary_options(config, name)}" for name in types)


def _rotary_options(config: dict[str, Any], layer_type: str | None) -> str:
    try:
        options = rotary_from_hf(config, layer_type)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        return f"not read: {error}"
    head_dim, rotary_dim = options["head_dim"], options["rotary_dim"]
    parts = [f"base {options['base']:g}", f"layout {options['layout']}"]
    if rotary_dim is not None and rotary_dim != head_dim:
        parts.append(f"{rotary_dim} of {head_dim} features")
    if options["scaling"] is not None:
        parts.append(repr(options["scaling"]))
    return ", ".join(parts)
