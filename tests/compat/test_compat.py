"""Public names of the compat modules, and the frameworks that they import."""

import doctest
import importlib

import pytest

from tests.support.run_alone import run_alone

NAMES = {
    "equinox": ["Embedding", "RotaryPositionalEmbedding"],
    "lrnnx": ["LRU", "Classifier", "PositionEmbedding", "TokenEmbedding"],
    "lucid.linalg": ["norm"],
    "lucid.nn": [
        "Embedding",
        "EmbeddingBag",
        "RotaryEmbedding",
        "SinusoidalEmbedding",
        "SinusoidalEmbedding2D",
        "functional",
    ],
    "lucid.nn.functional": [
        "apply_rotary_emb",
        "embedding",
        "embedding_bag",
        "sinusoidal_embedding",
        "sinusoidal_embedding_2d",
    ],
    "tinytorch": [
        "Embedding",
        "EmbeddingLayer",
        "PositionalEncoding",
        "Tensor",
        "analyze_embedding_memory_scaling",
        "analyze_embedding_performance",
        "analyze_positional_encoding_strategies",
        "create_sinusoidal_embeddings",
    ],
    "transformers": ["BertEmbeddings", "Embeddings", "GPT2Embeddings", "swapped"],
}


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_pinned_and_have_an_example(name):
    module = importlib.import_module(f"firstlayer.compat.{name}")
    assert sorted(module.__all__) == sorted(NAMES[name])
    for public in NAMES[name]:
        if public == "functional":
            continue  # a module, with examples of its own
        shown = doctest.DocTestFinder().find(getattr(module, public), public)
        assert any(test.examples for test in shown), public


def test_lucid_exports_tensor_dtypes_and_modules():
    lucid = importlib.import_module("firstlayer.compat.lucid")
    assert {"tensor", "int64", "float32", "linalg", "nn"} <= set(lucid.__all__)


def test_each_module_imports_only_its_own_framework():
    run_alone("""
        import sys
        import firstlayer.compat
        assert "numpy" not in sys.modules
        import firstlayer.compat.lucid
        assert not {"torch", "jax", "equinox", "transformers"} & set(sys.modules)
        import firstlayer.compat.lrnnx, firstlayer.compat.tinytorch
        import firstlayer.compat.transformers
        assert not {"jax", "equinox", "transformers"} & set(sys.modules)
    """)
    run_alone("""
        import sys
        import firstlayer.compat.equinox
        assert not {"torch", "transformers"} & set(sys.modules)
    """)


def test_missing_framework_error_names_the_extra_to_install():
    run_alone("""
        import importlib, sys
        sys.modules.update(torch=None, jax=None, equinox=None)
        extras = {"lrnnx": "torch", "tinytorch": "torch", "transformers": "torch"}
        for name, extra in {**extras, "equinox": "equinox"}.items():
            try:
                importlib.import_module(f"firstlayer.compat.{name}")
            except ImportError as error:
                assert f"pip install 'firstlayer[{extra}]'" in str(error), error
            else:
                raise AssertionError(name)
    """)
