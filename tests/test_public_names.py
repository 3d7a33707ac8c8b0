"""Public names, their documentation and their leading parameters."""

import doctest
import importlib
import inspect
import re
import tomllib
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import firstlayer

FRONT_ENDS = ["firstlayer.numpy", "firstlayer.torch", "firstlayer.equinox"]
# Each layer with the arguments that may be positional, in every front end.
LAYERS = {
    "AlibiBias": ["num_heads"],
    "CopeBias": ["head_dim"],
    "Embedding": ["num_embeddings", "embedding_dim"],
    "EmbeddingBag": ["num_embeddings", "embedding_dim"],
    "EmbeddingLayer": ["num_embeddings", "embedding_dim"],
    "EngramGate": ["memory_dim", "embedding_dim"],
    "FireBias": ["num_heads"],
    "FourierFeatures": ["matrix"],
    "FrequencyEmbedding": ["frequent_ids", "num_rows", "embedding_dim"],
    "GrowingEmbedding": ["capacity", "embedding_dim"],
    "HashedEmbedding": ["num_rows", "embedding_dim"],
    "KerpleBias": ["num_heads"],
    "LearnedPositions": ["max_positions", "embedding_dim"],
    "NgramAverage": ["columns", "width", "embedding_dim"],
    "NgramEmbedding": ["scheme", "table"],
    "QuotientRemainderEmbedding": ["num_embeddings", "embedding_dim"],
    "RotaryPositions": ["head_dim"],
    "ShawScores": ["head_dim"],
    "ShortConvGate": ["memory_dim", "embedding_dim"],
    "SinusoidalPositions": ["embedding_dim"],
    "T5Bias": ["num_heads"],
    "Table": ["num_embeddings", "embedding_dim"],
    "TableGroup": ["tables"],
    "Time2Vec": ["embedding_dim"],
    "TransformerXLScores": ["num_heads", "head_dim"],
    "XPosRotary": ["head_dim"],
}
OPTIMIZERS = [
    "AveragedRows",
    "RowAdagrad",
    "RowAdam",
    "RowAdamW",
    "RowLion",
    "RowOptimizer",
    "RowRMSprop",
    "RowSGD",
    "RowWiseAdagrad",
    "RowWiseRMSprop",
]
NAMES = {
    "firstlayer": [
        "DynamicNTK",
        "Linear",
        "Llama3",
        "LongRoPE",
        "NTK",
        "Proportional",
        "RowGradient",
        "YaRN",
        "__version__",
        "convert_layout",
        "get_num_threads",
        "ngram",
        "open_vectors",
        "positions",
        "query_temperature",
        "set_num_threads",
        "warmup",
    ],
    "firstlayer.numpy": [*LAYERS, "load", "save"],
    "firstlayer.torch": [
        *LAYERS,
        "HFRotary",
        "FrozenRowsEmbedding",
        "PartlyFrozenEmbedding",
        "functional",
        "install",
        "load",
        "replace_embeddings",
        "replace_rotary",
        "save",
        "to_torch",
    ],
    "firstlayer.equinox": [*LAYERS, "load", "load_leaves", "rows", "save", "split_ids"],
    "firstlayer.ngram": [
        "ByteGroups",
        "Engram",
        "Layout",
        "LongCatNgram",
        "QwenNgram",
        "SaltedNgram",
        "canonical_ids",
        "from_hf",
    ],
    "firstlayer.stores": [
        "FileStore",
        "MemoryStore",
        "RowStore",
        "SharedStore",
        "TrainingStore",
        "create_store",
        "open_store",
    ],
    "firstlayer.optim": OPTIMIZERS,
    "firstlayer.equinox.optim": [name for name in OPTIMIZERS if name != "AveragedRows"],
    "firstlayer.torch.optim": [*OPTIMIZERS, "RowStep", "clip_grad_norm_"],
    "firstlayer.torch.sharding": [
        "ShardedRows",
        "Traffic",
        "copy_to_torchrec",
        "from_torchrec",
        "shard_columns",
        "shard_rows",
        "shard_rows_and_columns",
        "sharded_parameters",
        "traffic",
    ],
}
# These keep the whole signature of torch's classes, which starts with the same names.
TORCH_SIGNATURES = ("Embedding", "EmbeddingBag")
# Names whose example is in the docstring of another.
SHARED_EXAMPLES = {
    "Traffic": "shard_rows",
    "copy_to_torchrec": "from_torchrec",
    "sharded_parameters": "shard_rows",
    "traffic": "shard_rows",
}
# Methods that the reference leaves out: torch or other parts of Firstlayer call them.
SITE = tomllib.loads((Path(__file__).parent.parent / "zensical.toml").read_text())
PYTHON = SITE["project"]["plugins"]["mkdocstrings"]["handlers"]["python"]
FILTERS = [rule.removeprefix("!") for rule in PYTHON["options"]["filters"]]
# Parameters whose meaning depends on the framework.
OWN = {"dtype", "init", "rng", "weight"}
OWN_WORDS = {
    **dict.fromkeys(
        TORCH_SIGNATURES, OWN | {"num_embeddings", "embedding_dim", "max_norm"}
    ),
    "EmbeddingLayer": OWN | {"dropout"},
    "KerpleBias": OWN | {"r1"},
    "LearnedPositions": OWN | {"max_positions"},
    "NgramEmbedding": OWN | {"options"},
}
METHODS = FunctionType, classmethod, staticmethod
# Calling a layer calls forward; reset_parameters is torch's own.
NOT_FOR_USERS = "|".join([*FILTERS, "^(forward|reset_parameters)$"])


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_pinned(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(NAMES[name])
    assert all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name):
    module = importlib.import_module(name)
    for public in set(module.__all__) - {"__version__", "functional", "ngram", "positions"}:
        value = getattr(module, SHARED_EXAMPLES.get(public) or public)
        examples = doctest.DocTestFinder().find(value, public)
        assert any(test.examples for test in examples), public


@pytest.mark.parametrize("name", NAMES)
def test_every_public_method_has_an_example(name):
    module = importlib.import_module(name)
    public = [getattr(module, name) for name in module.__all__]
    missing = [
        f"{value.__name__}.{method}"
        for value in filter(inspect.isclass, public)
        for method in own_methods(value)
        if not has_example(value, method)
    ]
    assert not missing


def own_methods(value: type) -> list[str]:
    """Return the methods for users that Firstlayer defines, inherited ones included."""
    return sorted({
        name
        for base in own_bases(value)
        for name, member in vars(base).items()
        if isinstance(member, METHODS) and not re.search(NOT_FOR_USERS, name)
    })


def has_example(value: type, method: str) -> bool:
    """Return whether an example of the class or of one of its methods calls the method."""
    parser = doctest.DocTestParser()
    members = (vars(base).values() for base in own_bases(value))
    docstrings = (inspect.getdoc(x) or "" for x in chain(own_bases(value), *members))
    examples = chain.from_iterable(map(parser.get_examples, docstrings))
    return any(f".{method}(" in example.source for example in examples)


def own_bases(value: type) -> list[type]:
    return [base for base in value.__mro__ if base.__module__.startswith("firstlayer.")]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", LAYERS)
def test_positional_parameters_are_the_same_in_every_front_end(name, front_end):
    layer = getattr(importlib.import_module(front_end), name)
    parameters = inspect.signature(layer).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if front_end == "firstlayer.torch" and name in TORCH_SIGNATURES:
        positional = positional[:2]
    assert positional == LAYERS[name]


@pytest.mark.parametrize("name", LAYERS)
def test_descriptions_are_the_same_in_every_front_end(name):
    layers = [getattr(importlib.import_module(front_end), name) for front_end in FRONT_ENDS]
    summaries = {inspect.getdoc(layer).partition("\n")[0] for layer in layers}  # pyright: ignore
    assert len(summaries) == 1 or name in (*TORCH_SIGNATURES, "TableGroup")
    described = [described_parameters(layer) for layer in layers]
    for parameter in set.intersection(*map(set, described)) - OWN_WORDS.get(name, OWN):
        texts = {texts[parameter] for texts in described}
        assert len(texts) == 1, (parameter, texts)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_described(name):
    module = importlib.import_module(name)
    public = [getattr(module, name) for name in module.__all__]
    for value in filter(callable, public):
        parameters = set(inspect.signature(value).parameters)
        assert parameters <= {"self", *described_parameters(value)}, value.__name__


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "Table"])
def test_calls_of_layers_are_documented(name, front_end):
    layer = getattr(importlib.import_module(front_end), name)
    call = layer.forward if front_end == "firstlayer.torch" else layer.__call__
    assert inspect.getdoc(call)


def described_parameters(value: Any) -> dict[str, str]:
    """Return the text in the docstring for each parameter."""
    _, _, rest = (inspect.getdoc(value) or "").partition("Args:\n")
    described = {}
    for names, text in re.findall(r"^    ([\w, ]+): (.*(?:\n     +.*)*)", rest, re.M):
        described |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return described


@pytest.mark.rejects
def test_an_unknown_name_is_an_attribute_error():
    name = "Torch"
    with pytest.raises(AttributeError, match="'firstlayer' has no attribute 'Torch'"):
        getattr(firstlayer, name)


def test_dir_lists_lazily_imported_names():
    assert {"YaRN", "RowGradient", "positions"} <= set(dir(firstlayer))


def test_names_of_front_ends_are_hinted_at():
    with pytest.raises(
        ImportError, match="import Embedding from a front end: firstlayer.n"
    ):
        exec("from firstlayer import Embedding")
    assert sorted(firstlayer._IN_FRONT_ENDS) == sorted(NAMES["firstlayer.numpy"])
    assert not hasattr(firstlayer, "nothing")
