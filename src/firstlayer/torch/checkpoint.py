"""The embedding layer inside a transformers checkpoint: its options and its tensors.

A checkpoint is a folder with ``config.json`` and one safetensors file, or several with an
index of which tensor is where. A handful of its tensors are the embedding layer; only
those are read, by the names that each family of models gives them. They are views of the
mapped file until something writes to them, and a write stays in memory.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Options = dict[str, Any]
#: Options of the layer, options of its learned positions if it has some, its tensors.
Found = tuple[Options, Options | None, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Family:
    """How a family of models writes its embedding layer down.

    Args:
        prefix: What names begin with where the model has a head; without one, nothing.
        names: What the family calls our tensors. Several are alternatives.
        options: From the config to the options of the layer, and of its positions.
    """

    prefix: str
    names: dict[str, tuple[str, ...]]
    options: Callable[[Options], tuple[Options, Options | None]]


def embedding_tensors(checkpoint_dir: str | os.PathLike[str]) -> Found:
    """Return what a checkpoint says about its embedding layer.

    Args:
        checkpoint_dir: The folder. A model of another family is a ValueError that lists
            those that are known.
    """
    folder = os.fspath(checkpoint_dir)
    config = _json(os.path.join(folder, "config.json"))
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"model_type must be one of {known}, got {model_type!r}")
    family = FAMILIES[model_type]
    options, position = family.options(config)
    wanted = dict(family.names)
    if position is None:
        wanted.pop("position.weight", None)
    places = _places(folder)
    stored = {name: _stored(names, family.prefix, places) for name, names in wanted.items()}
    tensors = _read(folder, {name: (key, places[key]) for name, key in stored.items()})
    return _sized(options, position, tensors)


def _sized(options: Options, position: Options | None, tensors: Any) -> Found:
    """Add the sizes, which are the tensors' own: a config may be behind them."""
    rows, width = tensors["token.weight"].shape
    options = {"num_embeddings": rows, "embedding_dim": width, **options}
    if "segment.weight" in tensors:
        options["segments"] = len(tensors["segment.weight"])
    if position is not None:
        held = len(tensors["position.weight"])
        position = {"embedding_dim": width, "row_offset": 0, **position}
        position["max_positions"] = held - position["row_offset"]
    return options, position, tensors


def _stored(names: tuple[str, ...], prefix: str, places: dict[str, str]) -> str:
    for name in names:
        for full in (prefix + name, name):
            if full in places:
                return full
    raise ValueError(f"the checkpoint has no tensor {names[0]!r} or {prefix + names[0]!r}")


def _places(folder: str) -> dict[str, str]:
    """Return which file each tensor is in."""
    from safetensors import safe_open

    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        places = _json(index).get("weight_map", {})
        for name in set(places.values()):
            # An index names files beside it and nothing else on this machine.
            if os.path.basename(name) != name:
                raise ValueError(f"{index} must name files in its folder, got {name!r}")
        return places
    whole = os.path.join(folder, "model.safetensors")
    if not os.path.exists(whole):
        raise FileNotFoundError(
            f"no model.safetensors and no model.safetensors.index.json in {folder}"
        )
    with safe_open(whole, framework="pt") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


def _read(folder: str, wanted: dict[str, tuple[str, str]]) -> dict[str, Tensor]:
    from safetensors import safe_open

    found = {}
    for file_name in sorted({place for _, place in wanted.values()}):
        with safe_open(os.path.join(folder, file_name), framework="pt") as file:
            for name, (key, place) in wanted.items():
                if place == file_name:
                    found[name] = _aligned(file.get_tensor(key))
    return {name: found[name] for name in wanted}


def _aligned(tensor: Tensor) -> Tensor:
    # Files written by old versions may begin anywhere, which kernels do not take.
    return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor


def _json(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        raise FileNotFoundError(f"no file {path}")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _bert(config: Options) -> tuple[Options, Options | None]:
    options = {
        "padding_idx": config.get("pad_token_id", 0),
        "layer_norm": True,
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "dropout": config.get("hidden_dropout_prob", 0.1),
    }
    absolute = config.get("position_embedding_type", "absolute") == "absolute"
    return options, {} if absolute else None


def _roberta(config: Options) -> tuple[Options, Options | None]:
    options, position = _bert({"pad_token_id": 1, **config})
    padding = options["padding_idx"]
    # The row of padding is that of position -1, and positions begin behind it.
    if position is not None and padding is not None:
        position = {"row_offset": padding + 1, "padding_idx": padding}
    return options, position


def _gpt2(config: Options) -> tuple[Options, Options | None]:
    return {"dropout": config.get("embd_pdrop", 0.1)}, {}


def _opt(config: Options) -> tuple[Options, Options | None]:
    width = config.get("hidden_size", 768)
    inner = config.get("word_embed_proj_dim") or width
    if inner != width:
        raise ValueError(
            f"word_embed_proj_dim must be hidden_size {width}, got {inner}: token rows of "
            "this model are projected before positions are added"
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
