"""The public names are a promise: adding one is a choice, losing one is a break."""

import doctest
import importlib
import inspect

import pytest

import firstlayer

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
        "positions",
        "query_temperature",
        "set_num_threads",
    ],
    "firstlayer.numpy": [
        "AlibiBias",
        "Embedding",
        "EmbeddingBag",
        "EmbeddingLayer",
        "FireBias",
        "FourierFeatures",
        "KerpleBias",
        "LearnedPositions",
        "RotaryPositions",
        "ShawScores",
        "SinusoidalPositions",
        "T5Bias",
        "load",
        "save",
    ],
    "firstlayer.torch": [
        "AlibiBias",
        "Embedding",
        "EmbeddingBag",
        "EmbeddingLayer",
        "FireBias",
        "FourierFeatures",
        "HFRotary",
        "KerpleBias",
        "LearnedPositions",
        "PartlyFrozenEmbedding",
        "RotaryPositions",
        "ShawScores",
        "SinusoidalPositions",
        "T5Bias",
        "functional",
        "load",
        "replace_rotary",
        "save",
    ],
    "firstlayer.equinox": [
        "AlibiBias",
        "Embedding",
        "EmbeddingBag",
        "EmbeddingLayer",
        "FireBias",
        "FourierFeatures",
        "KerpleBias",
        "LearnedPositions",
        "RotaryPositions",
        "ShawScores",
        "SinusoidalPositions",
        "T5Bias",
        "load",
        "load_leaves",
        "rows",
        "save",
    ],
    "firstlayer.optim": [
        "RowAdagrad",
        "RowAdam",
        "RowAdamW",
        "RowLion",
        "RowOptimizer",
        "RowRMSprop",
        "RowSGD",
        "RowWiseAdagrad",
    ],
    "firstlayer.torch.optim": [
        "RowAdagrad",
        "RowAdam",
        "RowAdamW",
        "RowLion",
        "RowOptimizer",
        "RowRMSprop",
        "RowSGD",
        "RowWiseAdagrad",
        "clip_grad_norm_",
    ],
}
# torch's own signature, which these two keep whole, begins with the same names.
DROP_IN = ("Embedding", "EmbeddingBag")

# Names whose example is that of another.
SHOWN_WITH = {
    "load": "save",
    "get_num_threads": "set_num_threads",
    "RowOptimizer": "RowAdamW",
}

# The arguments that may be given by position, in every face.
LEADING = {
    "AlibiBias": ["num_heads"],
    "Embedding": ["num_embeddings", "embedding_dim"],
    "EmbeddingBag": ["num_embeddings", "embedding_dim"],
    "EmbeddingLayer": ["num_embeddings", "embedding_dim"],
    "FireBias": ["num_heads"],
    "FourierFeatures": ["matrix"],
    "KerpleBias": ["num_heads"],
    "LearnedPositions": ["max_positions", "embedding_dim"],
    "RotaryPositions": ["head_dim"],
    "ShawScores": ["head_dim"],
    "SinusoidalPositions": ["embedding_dim"],
    "T5Bias": ["num_heads"],
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_pinned(module):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == NAMES[module]
    for name in found.__all__:
        assert getattr(found, name) is not None


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_is_documented_with_an_example_that_runs(module):
    found = importlib.import_module(module)
    for name in set(found.__all__) - {"__version__", "functional", "positions"}:
        value = getattr(found, name)
        if name in SHOWN_WITH:
            value = getattr(found, SHOWN_WITH[name])
        examples = doctest.DocTestFinder().find(value, name)
        assert any(test.examples for test in examples), name


@pytest.mark.parametrize(
    "face", ["firstlayer.numpy", "firstlayer.torch", "firstlayer.equinox"]
)
@pytest.mark.parametrize("name", LEADING)
def test_leading_parameters_are_the_same_in_every_face(name, face):
    layer = getattr(importlib.import_module(face), name)
    parameters = inspect.signature(layer).parameters.values()
    leading = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if face == "firstlayer.torch" and name in DROP_IN:
        leading = leading[:2]
    assert leading == LEADING[name]


def test_the_faces_offer_the_same_names():
    assert set(NAMES["firstlayer.numpy"]) <= set(NAMES["firstlayer.torch"])
    assert set(NAMES["firstlayer.numpy"]) <= set(NAMES["firstlayer.equinox"])
    assert set(NAMES["firstlayer.optim"]) <= set(NAMES["firstlayer.torch.optim"])


@pytest.mark.rejects
def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(
        AttributeError, match="module 'firstlayer' has no attribute 'Torch'"
    ):
        firstlayer.Torch  # noqa: B018  # pyright: ignore


def test_dir_lists_what_is_fetched_on_demand():
    assert {"YaRN", "RowGradient", "positions"} <= set(dir(firstlayer))
