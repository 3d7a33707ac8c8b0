"""Read an n-gram scheme from a model's config."""

from typing import Any

import numpy as np

from .byte_groups import ByteGroups
from .canonical import canonical_ids
from .engram import Engram
from .longcat import LongCatNgram
from .qwen import QwenNgram

Config = dict[str, Any]


def from_hf(
    config: Any, tokenizer: Any = None
) -> Engram | QwenNgram | LongCatNgram | ByteGroups:
    """Return the n-gram scheme of a model's config.

    Reads the configs of DeepSeek-V4.1 and of Engram's demo, Qwen3.8-Flash-Next,
    LongCat-Flash-Lite and BLT. Raises a ValueError if the number of canonical ids or of
    rows differs from the one in the config, because all ids would then read other rows.

    Args:
        config: The dict of a ``config.json``, or an object with ``to_dict``. A config with
            a ``text_config`` is the one of its text model.
        tokenizer: Tokenizer of an Engram model, or its canonical ids as an array.

    Example:
        >>> config = {"encoder_hash_byte_group_size": [3, 4]}
        >>> from_hf({**config, "encoder_hash_byte_group_vocab": 1000})
        ByteGroups(sizes=(3, 4), rows=1000, functions=1)
    """
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, dict):
        raise TypeError(f"config must be a dict, got {type(config).__name__}")
    if isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    if config.get("engram_layer_ids"):
        return _engram(config, _canonical(tokenizer))
    if config.get("layer_ids") and config.get("n_head_per_ngram"):
        return _engram_demo(config, _canonical(tokenizer))
    if config.get("ple_layer_ids"):
        return _qwen(config)
    if _renamed(config, "emb_neighbor_num") is not None:
        return _longcat(config)
    if "encoder_hash_byte_group_size" in config:
        return _byte_groups(config)
    raise ValueError(
        "config must have one of the keys 'engram_layer_ids', 'ple_layer_ids', "
        "'emb_neighbor_num' or 'encoder_hash_byte_group_size', got none"
    )


def _canonical(tokenizer: Any) -> np.ndarray:
    if tokenizer is None:
        raise ValueError("tokenizer must be given for an Engram config, got None")
    return tokenizer if isinstance(tokenizer, np.ndarray) else canonical_ids(tokenizer)


def _engram(config: Config, canonical: np.ndarray) -> Engram:
    declared = config.get("engram_compressed_vocab_size")
    _check_declared("engram_compressed_vocab_size", declared, int(canonical.max()) + 1)
    pad = config.get("engram_pad_token_id", config.get("engram_pad_id"))
    scheme = Engram(
        order=_required(config, "engram_max_ngram_size"),
        heads=_required(config, "engram_n_heads"),
        base=_required(config, "engram_vocab_size"),
        layers=config["engram_layer_ids"],
        canonical=canonical,
        pad=_required({"engram_pad_token_id": pad}, "engram_pad_token_id"),
    )
    rows = [scheme.layout(layer).rows for layer in scheme.layers]
    _check_declared("engram_num_embeddings", config.get("engram_num_embeddings"), rows)
    return scheme


def _engram_demo(config: Config, canonical: np.ndarray) -> Engram:
    return Engram(
        order=_required(config, "max_ngram_size"),
        heads=config["n_head_per_ngram"],
        base=_required(config, "engram_vocab_size"),
        layers=config["layer_ids"],
        canonical=canonical,
        pad=_required(config, "pad_id"),
        seed=_required(config, "seed"),
        hash_negative=True,
    )


def _qwen(config: Config) -> QwenNgram:
    eos = _required(config, "eos_token_id")
    names = {
        "order": "ngram_size",
        "heads": "heads_per_ngram",
        "base": "ngram_vocab_size_base",
        "seed": "seed",
        "multiple_of": "make_ngram_vocab_size_divisible_by",
    }
    # Keys that a short file leaves out have the defaults of transformers.
    given = {
        name: config[key] for name, key in names.items() if config.get(key) is not None
    }
    return QwenNgram(
        layers=sorted(set(config["ple_layer_ids"])),
        vocab_size=_required(config, "vocab_size"),
        eos=eos[0] if isinstance(eos, list) else eos,
        **given,
    )


def _longcat(config: Config) -> LongCatNgram:
    eos = _required(config, "eos_token_id")
    renamed = {"order": "emb_neighbor_num", "splits": "emb_split_num"}
    values = {name: _renamed(config, key) for name, key in renamed.items()}
    return LongCatNgram(
        **{
            name: _required({renamed[name]: v}, renamed[name]) for name, v in values.items()
        },
        ratio=_required(
            {"ngram_vocab_size_ratio": _renamed(config, "ngram_vocab_size_ratio")},
            "ngram_vocab_size_ratio",
        ),
        vocab_size=_required(config, "vocab_size"),
        eos=eos[0] if isinstance(eos, list) else eos,
    )


def _byte_groups(config: Config) -> ByteGroups:
    names = {
        "sizes": "encoder_hash_byte_group_size",
        "rows": "encoder_hash_byte_group_vocab",
        "functions": "encoder_hash_byte_group_nb_functions",
    }
    return ByteGroups(**{n: config[key] for n, key in names.items() if config.get(key)})


def _renamed(config: Config, name: str) -> Any:
    """Return a key of LongCat, which has another name in older configs."""
    old = "oe_vocab_size_ratio" if "ratio" in name else name.replace("emb_", "oe_")
    return config.get(name, config.get(old))


def _required(config: Config, name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"config must have {name!r}, got none")
    return config[name]


def _check_declared(name: str, declared: Any, found: Any) -> None:
    if declared is not None and declared != found:
        raise ValueError(f"{name} must be {found} for this tokenizer, got {declared}")
