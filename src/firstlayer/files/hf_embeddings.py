"""Find the embedding layer in a transformers checkpoint: its options and its tensors.

A checkpoint is a folder with ``config.json`` and safetensors files. Only the headers of the
files that hold the embedding layer are read, and its tensors are memory-mapped. Every value
that is used is checked: a folder that does not describe an embedding layer is a ValueError
that states the reason, and a missing file is a FileNotFoundError.
"""

import math
import os
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from .._check import is_float
from . import hf_tables as tables
from .checkpoint import StoredTensor, open_checkpoint, read_json_object
from .layer_files import FrontEnd

Options = dict[str, Any]
Arrays = dict[str, Shaped[np.ndarray, "..."]]

#: Prefixes of the text model's tensors in models with a ``text_config``.
_TEXT_PREFIXES = (
    *("model.language_model.", "language_model.model.", "language_model."),
    *("model.text_model.", "text_model.", "model.language_model.model."),
)
_ALTERNATIVES = (
    "firstlayer.torch.replace_embeddings replaces the tables of any model, and "
    "Embedding takes a table as weight"
)


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
    options: Callable[["Config"], tuple[Options, Options | None]]


@dataclass(frozen=True)
class Config:
    """Values of a ``config.json``, which may be anything until they are checked.

    Args:
        values: The values.
        source: Name of the file and of the part of it, for messages.
    """

    values: Options
    source: str

    @property
    def model_type(self) -> str:
        """The ``model_type``, which must be a string."""
        found = self.values.get("model_type")
        if not isinstance(found, str):
            raise self.error("model_type", "be a string")
        return found

    def index(self, name: str, default: int | None = None) -> int | None:
        """Return an integer or None."""
        value = self.values.get(name, default)
        if value is None or (type(value) is int and abs(value) < 2**63):
            return value
        raise self.error(name, "be an integer or null")

    def number(self, name: str, default: float, *, most: float = math.inf) -> float:
        """Return a finite number from 0 to ``most``; null is the default."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) in (int, float) and 0 <= value <= most and value < 1e300:
            return float(value)
        rule = "be a number that is not negative"
        raise self.error(name, rule if most == math.inf else f"be from 0 to {most:g}")

    def flag(self, name: str) -> bool:
        """Return True or False; a missing value is False."""
        value = self.values.get(name, False)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.error(name, "be true or false")

    def error(self, name: str, rule: str, *, default: Any = None) -> ValueError:
        """Return the error for a value that breaks a rule."""
        got = reprlib.repr(self.values.get(name, default))
        return ValueError(f"{name} in {self.source} must {rule}, got {got}")


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
    arrays: Arrays


def layer_from_hf(
    layer_class: Any,
    folder: str | os.PathLike[str],
    front_end: FrontEnd,
    *,
    cast: Callable[[Arrays], Arrays] = lambda arrays: arrays,
) -> Any:
    """Return the embedding layer of a transformers checkpoint in a front end.

    Args:
        layer_class: ``EmbeddingLayer`` of the front end, or a subclass.
        folder: Folder of the checkpoint.
        front_end: Builds layers.
        cast: Converts the parameters to the dtype of the layer.
    """
    found = read_embedding_checkpoint(folder)
    arrays = cast(found.arrays)
    dtype = arrays["token.weight"].dtype.name
    position = None
    if found.position is not None:
        position = front_end.build(
            front_end.layer_class("LearnedPositions"),
            {**found.position, "dtype": dtype},
            {"weight": arrays["position.weight"]},
        )
    options = {**found.options, "position": position, "dtype": dtype}
    return front_end.build(layer_class, options, arrays)


def read_embedding_checkpoint(folder: str | os.PathLike[str]) -> EmbeddingCheckpoint:
    """Return the embedding layer of a transformers checkpoint.

    Args:
        folder: Folder of the checkpoint. A model of an unknown family is a ValueError that
            names the alternatives.
    """
    if not Path(folder).is_dir():
        where = os.fspath(folder)
        raise FileNotFoundError(f"no folder {where}: from_hf does not download checkpoints")
    path = Path(folder) / "config.json"
    config = Config(read_json_object(path), os.fspath(path))
    family, config, prefixes = _family(config)
    options, position = family.options(config)
    names = {
        ours: [prefix + name for name in theirs for prefix in prefixes]
        for ours, theirs in family.names.items()
        if position is not None or ours != "position.weight"
    }
    checkpoint = open_checkpoint(folder, names=sum(names.values(), []))
    tensors = {}
    for ours, candidates in names.items():
        stored = [name for name in candidates if name in checkpoint.tensors]
        if not stored:
            choices = " or ".join(repr(name) for name in candidates[:2][::-1])
            raise ValueError(f"the checkpoint has no tensor {choices}")
        tensors[ours] = checkpoint.tensors[stored[0]]
    _check_shapes(tensors)
    # Sizes come from the tensors: a config may be older than a resized table.
    rows, width = tensors["token.weight"].shape
    options = {"num_embeddings": rows, "embedding_dim": width, **options}
    options = _with_scale(options, config)
    padding_idx = options.get("padding_idx")
    if padding_idx is not None and not -rows <= padding_idx < rows:
        rule = f"be an id of the table with {rows} rows"
        raise config.error("pad_token_id", rule, default=padding_idx)
    if "segment.weight" in tensors:
        options["segments"] = tensors["segment.weight"].shape[0]
    if position is not None:
        position = {"embedding_dim": width, "row_offset": 0, **position}
        stored_rows = tensors["position.weight"].shape[0]
        if stored_rows <= position["row_offset"]:
            raise ValueError(
                f"{tensors['position.weight'].name} must have more than "
                f"{position['row_offset']} rows, got {stored_rows}"
            )
        position["max_positions"] = stored_rows - position["row_offset"]
    arrays = {name: tensor.map() for name, tensor in tensors.items()}
    return EmbeddingCheckpoint(options, position, arrays)


def _family(config: Config) -> tuple[Family, Config, tuple[str, ...]]:
    """Return the family of a model, the config of its text model, and name prefixes."""
    model_type, prefixes = config.model_type, ()
    if model_type in tables.WITH_TEXT_CONFIG:
        text = config.values.get("text_config")
        if not isinstance(text, dict):
            raise config.error("text_config", f"describe the text model of {model_type!r}")
        config = Config(text, f"text_config of {config.source}")
        model_type, prefixes = config.model_type, _TEXT_PREFIXES
    family = FAMILIES.get(model_type)
    if family is None and model_type in tables.EMBED_TOKENS:
        family = Family("model.", {"token.weight": ("embed_tokens.weight",)}, _table)
    if family is None and model_type in tables.OTHER_TABLES:
        prefix, name = tables.OTHER_TABLES[model_type]
        family = Family(prefix, {"token.weight": (f"{name}.weight",)}, _table)
    if family is None:
        raise ValueError(
            f"{config.error('model_type', 'be that of a supported model')}: {_ALTERNATIVES}"
        )
    return family, config, (*prefixes, family.prefix, "")


def _table(config: Config) -> tuple[Options, Options | None]:
    """Return the options of a layer with token rows only."""
    model_type = config.model_type
    options: Options = {}
    if model_type in tables.EMBED_TOKENS:
        options["padding_idx"] = config.index(
            "pad_token_id", tables.PADDING.get(model_type)
        )
    if model_type in tables.DROPOUTS:
        name, default = tables.DROPOUTS[model_type]
        options["dropout"] = config.number(name, default, most=1)
    options["scale"] = model_type in tables.SCALED
    if model_type in tables.SCALED_IF:
        options["scale"] = config.flag(tables.SCALED_IF[model_type])
    return options, None


def _with_scale(options: Options, config: Config) -> Options:
    """Return the options with ``scale``, after checking the factor of the token rows."""
    if config.model_type not in tables.FACTORS:
        return options
    name, default = tables.FACTORS[config.model_type]
    factor, root = config.number(name, default), math.sqrt(options["embedding_dim"])
    if factor not in (1.0, root):
        rule = f"be 1 or the square root of the width {options['embedding_dim']}"
        raise ValueError(f"{config.error(name, rule)}: {_ALTERNATIVES}")
    return {**options, "scale": factor == root != 1.0}


def _check_shapes(tensors: dict[str, StoredTensor]) -> None:
    width = tensors["token.weight"].shape[-1:]
    for name, tensor in tensors.items():
        axes = 1 if name.startswith("norm.") else 2
        if len(tensor.shape) != axes or tensor.shape[-1:] != width or 0 in tensor.shape:
            size = width[0] if width else "width"
            want = f"({size},)" if axes == 1 else f"(rows, {size})"
            raise ValueError(f"{tensor.name} must have shape {want}, got {tensor.shape}")
        if not is_float(tensor.numpy_dtype):
            raise ValueError(f"{tensor.name} must be real, got {tensor.dtype}")


def _bert(config: Config) -> tuple[Options, Options | None]:
    options = {
        "padding_idx": config.index("pad_token_id", 0),
        "layer_norm": True,
        "norm_eps": config.number("layer_norm_eps", 1e-12),
        "dropout": config.number("hidden_dropout_prob", 0.1, most=1),
    }
    kind = config.values.get("position_embedding_type", "absolute")
    return options, {} if kind == "absolute" else None


def _electra(config: Config) -> tuple[Options, Options | None]:
    _check_width(config, "embedding_size", 128, 256)
    return _bert(config)


def _distilbert(config: Config) -> tuple[Options, Options | None]:
    return {
        "padding_idx": config.index("pad_token_id", 0),
        "layer_norm": True,
        "norm_eps": 1e-12,
        "dropout": config.number("dropout", 0.1, most=1),
    }, {}


def _roberta(config: Config) -> tuple[Options, Options | None]:
    config = Config({"pad_token_id": 1, **config.values}, config.source)
    options, position = _bert(config)
    return options, None if position is None else _after_padding(config)


def _mpnet(config: Config) -> tuple[Options, Options | None]:
    # The padding row is 1 for any pad_token_id.
    return _roberta(Config({**config.values, "pad_token_id": 1}, config.source))


def _after_padding(config: Config) -> Options:
    """Return the options of positions that start after the padding row."""
    padding_idx = config.index("pad_token_id")
    if padding_idx is None:
        return {}
    if not 0 <= padding_idx < 2**31:
        raise config.error("pad_token_id", "not be negative")
    # Row padding_idx belongs to padding, which has position -1. Position 0 is the next row.
    return {"row_offset": padding_idx + 1, "padding_idx": padding_idx}


def _gpt2(config: Config) -> tuple[Options, Options | None]:
    return {"dropout": config.number("embd_pdrop", 0.1, most=1)}, {}


def _gpt_neo(config: Config) -> tuple[Options, Options | None]:
    return {"dropout": config.number("embed_dropout", 0.0, most=1)}, {}


def _bloom(config: Config) -> tuple[Options, Options | None]:
    return {
        "layer_norm": True,
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
    }, None


def _opt(config: Config) -> tuple[Options, Options | None]:
    _check_width(config, "word_embed_proj_dim", None, 768)
    return {"padding_idx": config.index("pad_token_id", 1)}, {"row_offset": 2}


def _check_width(config: Config, name: str, default: int | None, hidden: int) -> None:
    """Raise unless the token rows have the width of the model.

    Args:
        config: The config.
        name: Key of the width of the token rows.
        default: Its value if the config has none; None is the width of the model.
        hidden: Width of the model if the config has none.
    """
    width, projected = config.index("hidden_size", hidden), config.index(name, default)
    if projected is not None and projected != width:
        raise ValueError(
            f"{config.error(name, f'be hidden_size {width}')}: this model projects its "
            "embeddings"
        )


_BERT_NAMES = {
    "token.weight": ("embeddings.word_embeddings.weight",),
    "position.weight": ("embeddings.position_embeddings.weight",),
    "segment.weight": ("embeddings.token_type_embeddings.weight",),
    # The second names are those of checkpoints converted from TensorFlow.
    "norm.weight": ("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"),
    "norm.bias": ("embeddings.LayerNorm.bias", "embeddings.LayerNorm.beta"),
}
_NO_SEGMENTS = {
    name: theirs for name, theirs in _BERT_NAMES.items() if name != "segment.weight"
}
_GPT2_NAMES = {"token.weight": ("wte.weight",), "position.weight": ("wpe.weight",)}

FAMILIES = {
    "bert": Family("bert.", _BERT_NAMES, _bert),
    "bloom": Family(
        "transformer.",
        {
            "token.weight": ("word_embeddings.weight",),
            "norm.weight": ("word_embeddings_layernorm.weight",),
            "norm.bias": ("word_embeddings_layernorm.bias",),
        },
        _bloom,
    ),
    "camembert": Family("roberta.", _BERT_NAMES, _roberta),
    "data2vec-text": Family("data2vec_text.", _BERT_NAMES, _roberta),
    "distilbert": Family("distilbert.", _NO_SEGMENTS, _distilbert),
    "electra": Family("electra.", _BERT_NAMES, _electra),
    "gpt2": Family("transformer.", _GPT2_NAMES, _gpt2),
    "gpt_bigcode": Family("transformer.", _GPT2_NAMES, _gpt2),
    "gpt_neo": Family("transformer.", _GPT2_NAMES, _gpt_neo),
    "mpnet": Family("mpnet.", _NO_SEGMENTS, _mpnet),
    "openai-gpt": Family(
        "transformer.",
        {
            "token.weight": ("tokens_embed.weight",),
            "position.weight": ("positions_embed.weight",),
        },
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
    "roberta": Family("roberta.", _BERT_NAMES, _roberta),
    "roberta-prelayernorm": Family("roberta_prelayernorm.", _BERT_NAMES, _roberta),
    "splinter": Family("splinter.", _BERT_NAMES, _bert),
    "xlm-roberta": Family("roberta.", _BERT_NAMES, _roberta),
}
