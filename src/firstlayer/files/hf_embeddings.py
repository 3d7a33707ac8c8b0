"""Find the embedding layer in a transformers checkpoint: its options and its tensors.

A checkpoint is a folder with ``config.json`` and safetensors files. Only the headers of the
files that hold the embedding layer are read, and its tensors are memory-mapped.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from .checkpoint import open_checkpoint, read_json_object

Options = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Family:
    """Names and options of the embedding layer in one family of models.

    Args:
        prefix: Prefix of tensor names in models with a head; models without have none.
        names: Names of each tensor in the family's checkpoints; several are alternatives.
        options: Maps the config to the options of the layer and of its learned positions,
            or None if it has none.
    """

    prefix: str
    names: dict[str, tuple[str, ...]]
    options: Callable[[Options], tuple[Options, Options | None]]


@dataclass(frozen=True, eq=False)
class EmbeddingCheckpoint:
    """The embedding layer of a checkpoint.

    Args:
        options: Options of the layer.
        position: Options of its learned positions, None without any.
        arrays: Its parameters by name, memory-mapped. Writes do not change the files.
    """

    options: Options
    position: Options | None
    arrays: dict[str, Shaped[np.ndarray, "..."]]


def read_embedding_checkpoint(folder: str | os.PathLike[str]) -> EmbeddingCheckpoint:
    """Return the embedding layer of a transformers checkpoint.

    Args:
        folder: Folder of the checkpoint. A model of an unknown family is a ValueError that
            lists the known ones.
    """
    config = read_json_object(Path(folder) / "config.json")
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"model_type must be one of {known}, got {model_type!r}")
    family = FAMILIES[model_type]
    options, position = family.options(config)
    names = {
        ours: [prefix + name for name in theirs for prefix in (family.prefix, "")]
        for ours, theirs in family.names.items()
        if position is not None or ours != "position.weight"
    }
    checkpoint = open_checkpoint(folder, names=sum(names.values(), []))
    arrays = {}
    for ours, candidates in names.items():
        stored = [name for name in candidates if name in checkpoint.tensors]
        if not stored:
            with_prefix, without = candidates[:2]
            raise ValueError(f"the checkpoint has no tensor {without!r} or {with_prefix!r}")
        arrays[ours] = checkpoint.tensors[stored[0]].map()
    # Sizes come from the tensors: a config may be older than a resized table.
    rows, width = arrays["token.weight"].shape
    options = {"num_embeddings": rows, "embedding_dim": width, **options}
    if "segment.weight" in arrays:
        options["segments"] = len(arrays["segment.weight"])
    if position is not None:
        position = {"embedding_dim": width, "row_offset": 0, **position}
        position["max_positions"] = len(arrays["position.weight"]) - position["row_offset"]
    return EmbeddingCheckpoint(options, position, arrays)


def _bert(config: Options) -> tuple[Options, Options | None]:
    options = {
        "padding_idx": config.get("pad_token_id", 0),
        "layer_norm": True,
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "dropout": config.get("hidden_dropout_prob", 0.1),
    }
    is_absolute = config.get("position_embedding_type", "absolute") == "absolute"
    return options, {} if is_absolute else None


def _roberta(config: Options) -> tuple[Options, Options | None]:
    options, position = _bert({"pad_token_id": 1, **config})
    padding_idx = options["padding_idx"]
    # Row padding_idx belongs to padding, which has position -1. Position 0 is the next row.
    if position is not None and padding_idx is not None:
        position = {"row_offset": padding_idx + 1, "padding_idx": padding_idx}
    return options, position


def _gpt2(config: Options) -> tuple[Options, Options | None]:
    return {"dropout": config.get("embd_pdrop", 0.1)}, {}


def _opt(config: Options) -> tuple[Options, Options | None]:
    width = config.get("hidden_size", 768)
    projected = config.get("word_embed_proj_dim") or width
    if projected != width:
        raise ValueError(
            f"word_embed_proj_dim must be hidden_size {width}, got {projected}: this model "
            "projects token rows before it adds positions"
        )
    return {"padding_idx": config.get("pad_token_id", 1)}, {"row_offset": 2}


def _llama(config: Options) -> tuple[Options, Options | None]:
    return {"padding_idx": config.get("pad_token_id")}, None


_BERT_NAMES = {
    "token.weight": ("embeddings.word_embeddings.weight",),
    "position.weight": ("embeddings.position_embeddings.weight",),
    "segment.weight": ("embeddings.token_type_embeddings.weight",),
    # The second names are those of checkpoints converted from TensorFlow.
    "norm.weight": ("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"),
    "norm.bias": ("embeddings.LayerNorm.bias", "embeddings.LayerNorm.beta"),
}

FAMILIES = {
    "bert": Family("bert.", _BERT_NAMES, _bert),
    "roberta": Family("roberta.", _BERT_NAMES, _roberta),
    "gpt2": Family(
        "transformer.",
        {"token.weight": ("wte.weight",), "position.weight": ("wpe.weight",)},
        _gpt2,
    ),
    "opt": Family(
        "model.",
        {
            "token.weight": ("decoder.embed_tokens.weight",),
            "position.weight": ("decoder.embed_positions.weight",),
        },
        _opt,
    ),
    "llama": Family("model.", {"token.weight": ("embed_tokens.weight",)}, _llama),
}
