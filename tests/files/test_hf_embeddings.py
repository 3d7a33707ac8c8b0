"""Embedding layers of transformers checkpoints, in every front end, and their errors.

Compared with transformers 5.22.2; models are small and random.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

import firstlayer.equinox
import firstlayer.numpy
import firstlayer.torch
from firstlayer.files import hf_tables
from firstlayer.files.hf_embeddings import FAMILIES
from tests.support.hf_fuzz import CONFIGS, damaged_checkpoints, tensors_of
from tests.support.hf_models import first_block_input, small_config, small_model

IDS = torch.tensor([[9, 10, 11, 12, 13, 14, 15, 16, 17, 18]])
LAYERS = {
    "numpy": firstlayer.numpy.EmbeddingLayer,
    "torch": firstlayer.torch.EmbeddingLayer,
    "equinox": firstlayer.equinox.EmbeddingLayer,
}
# Only the text_config of another type has these; see test_types_of_text_configs.
TEXT_ONLY = {
    *("mllama_text_model", "paddleocr_vl_text", "qwen3_omni_moe_text"),
    "unlimited_ocr_text",
}
TYPES = sorted(
    {
        *hf_tables.EMBED_TOKENS,
        *hf_tables.OTHER_TABLES,
        *hf_tables.WITH_TEXT_CONFIG,
        *FAMILIES,
    }
    - TEXT_ONLY
    - {"minicpm3"}  # see test_factor_of_the_token_rows
)


@pytest.fixture(autouse=True)
def no_progress_bars():
    transformers.utils.logging.disable_progress_bar()


def check_type(model_type: str, folder: Path) -> None:
    """Check the layer of a saved model of a type against the input of its first block."""
    model = small_model(model_type)
    model.save_pretrained(folder)
    layer = firstlayer.torch.EmbeddingLayer.from_hf(folder).eval()
    want = first_block_input(model, IDS)
    with torch.no_grad():
        torch.testing.assert_close(layer(IDS), want, atol=1e-5, rtol=1e-6)
    assert layer.padding_idx == model.get_input_embeddings().padding_idx


# Raised by the code of GPT-BigCode when it is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_layer_equals_the_input_of_the_first_block(tmp_path):
    assert importlib.metadata.version("transformers") == "5.22.2"
    assert len(TYPES) > 190
    for model_type in TYPES:
        check_type(model_type, tmp_path / model_type)


def test_tables_of_facts_agree():
    single = hf_tables.EMBED_TOKENS | hf_tables.OTHER_TABLES.keys()
    assert not single & FAMILIES.keys() and not single & hf_tables.WITH_TEXT_CONFIG
    for facts in (hf_tables.SCALED, hf_tables.SCALED_IF, hf_tables.FACTORS):
        assert {*facts} <= single
    assert hf_tables.PADDING.keys() <= hf_tables.EMBED_TOKENS
    assert hf_tables.DROPOUTS.keys() <= single
    defaults = {
        model_type: small_default(model_type).get("pad_token_id")
        for model_type in hf_tables.EMBED_TOKENS
    }
    assert hf_tables.PADDING == {t: pad for t, pad in defaults.items() if pad is not None}


def small_default(model_type: str) -> dict[str, Any]:
    """Return the default values of a type's config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]().to_dict()


def write(folder: Path, config: Any, **tensors: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.asarray(value) for name, value in tensors.items()}
    save_file(arrays or tensors_of(config), folder / "model.safetensors")


def test_types_of_text_configs(tmp_path):
    table = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    for model_type in sorted(TEXT_ONLY):
        text = {"model_type": model_type, "pad_token_id": None}
        config = {"model_type": "llava", "text_config": text}
        for prefix in ("model.language_model.", "language_model.model.", ""):
            write(tmp_path, config, **{f"{prefix}embed_tokens.weight": table})
            layer = firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path)
            assert np.array_equal(layer([3, 8]), table[[3, 8]])


@pytest.mark.parametrize("front_end", LAYERS)
@pytest.mark.parametrize("model_type", ["bert", "roberta", "gpt2", "gemma2"])
def test_every_front_end_gives_the_vectors_of_the_model(front_end, model_type, tmp_path):
    model = small_model(model_type)
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    layer = LAYERS[front_end].from_hf(tmp_path)
    is_equinox = front_end == "equinox"
    if front_end == "torch":
        layer.eval()
    ids = IDS if front_end == "torch" else IDS.numpy()
    got = layer(ids, inference=True) if is_equinox else layer(ids)
    got = got.detach() if front_end == "torch" else np.asarray(got)
    want = first_block_input(model, IDS)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-6)
    table = model.get_input_embeddings()
    assert layer.padding_idx == table.padding_idx and layer.token.num_embeddings == 64
    config = layer.config()
    assert config["dtype"] == "float32" and config["scale"] == (model_type == "gemma2")
    p = {"gemma2": 0.0}.get(model_type, 0.1)
    assert config["dropout"] == p


@pytest.mark.parametrize("front_end", LAYERS)
def test_dtype_of_the_files_or_of_the_argument(front_end, tmp_path):
    model = small_model("bert").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    layer_class = LAYERS[front_end]
    layer = layer_class.from_hf(tmp_path)
    assert layer.config()["dtype"] == layer.config()["position"]["dtype"] == "bfloat16"
    dtype = torch.float16 if front_end == "torch" else "float16"
    other = layer_class.from_hf(tmp_path, dtype=dtype)
    table = model.embeddings.word_embeddings.weight.detach().to(torch.float16)
    assert other.config()["dtype"] == "float16"
    weight = other.token.weight
    weight = weight.detach() if front_end == "torch" else np.asarray(weight)
    assert np.array_equal(np.asarray(weight), table.numpy())
    if front_end == "numpy":
        layer.token.weight[:] = 0
        layer.position.weight[:] = 0
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_factor_of_the_token_rows(tmp_path):
    table = np.ones((9, 16), np.float32)
    name = {"model.embed_tokens.weight": table}
    for factor, scale in ((1.0, False), (4.0, True), (None, False)):
        config = {"model_type": "granite", "embedding_multiplier": factor}
        write(tmp_path, config, **name)
        layer = firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path)
        assert layer.scale is scale
        assert np.array_equal(layer([2]), table[[2]] * (factor or 1.0))
    write(tmp_path, {"model_type": "granite", "embedding_multiplier": 12.0}, **name)
    rule = "must be 1 or the square root of the width 16, got 12.0: firstlayer.torch.repl"
    with pytest.raises(ValueError, match=f"embedding_multiplier in .* {rule}"):
        firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path)
    write(tmp_path, small_config("minicpm3").to_dict(), **name)
    with pytest.raises(ValueError, match=r"scale_emb in .* got 12"):
        firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path)
    write(tmp_path, {"model_type": "afmoe", "mup_enabled": True}, **name)
    assert firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path).scale
    write(tmp_path, {"model_type": "minicpm3", "scale_emb": 4}, **name)
    assert firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path).scale


def test_missing_padding_id_is_that_of_the_model_type(tmp_path):
    name = {"model.embed_tokens.weight": np.ones((9, 4), np.float32)}
    for model_type, pad in (("llama", None), ("gemma", 0), ("olmo", 1), ("helium", 3)):
        write(tmp_path, {"model_type": model_type}, **name)
        assert firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path).padding_idx == pad
    write(tmp_path, {"model_type": "llama", "pad_token_id": -1}, **name)
    assert firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path).padding_idx == 8
    write(tmp_path, {"model_type": "gemma", "pad_token_id": None}, **name)
    assert firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path).padding_idx is None


@pytest.mark.rejects
@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "model_type in .*config.json must be a string, got None"),
        ({"model_type": ["llama"]}, r"model_type in .* must be a string, got \['llama'\]"),
        (
            {"model_type": "bart"},
            "model_type in .* must be that of a supported model, got 'bart': firstlayer."
            "torch.replace_embeddings replaces the tables of any model, and Embedding",
        ),
        ({"model_type": "llava"}, "text_config in .* must describe the text model of 'll"),
        (
            {"model_type": "llava", "text_config": {"model_type": "bart"}},
            "model_type in text_config of .* must be that of a supported model, got 'bart'",
        ),
        (
            {"model_type": "llama", "pad_token_id": 9},
            "pad_token_id in .* must be an id of the table with 9 rows, got 9",
        ),
        (
            {"model_type": "llama", "pad_token_id": 1.0},
            "pad_token_id in .* must be an integer or null, got 1.0",
        ),
        (
            {"model_type": "llama", "pad_token_id": True},
            "pad_token_id in .* must be an integer or null, got True",
        ),
        ({"model_type": "t5", "dropout_rate": 1.5}, "dropout_rate .* from 0 to 1, got 1.5"),
        ({"model_type": "t5", "dropout_rate": float("nan")}, "from 0 to 1, got nan"),
        ({"model_type": "afmoe", "mup_enabled": "yes"}, "mup_enabled .* be true or false"),
        (
            {"model_type": "bert", "layer_norm_eps": -1e-5},
            "layer_norm_eps in .* must be a number that is not negative, got -1e-05",
        ),
        (
            {"model_type": "bert", "layer_norm_eps": 10**400},
            r"layer_norm_eps in .* a number that is not negative, got 1000\d*\.\.\.",
        ),
        (
            {"model_type": "roberta", "pad_token_id": -1},
            "pad_token_id in .* must not be negative, got -1",
        ),
        (
            {"model_type": "roberta", "pad_token_id": 8},
            "position_embeddings.weight must have more than 9 rows, got 9",
        ),
        (
            {"model_type": "electra"},
            "embedding_size in .* must be hidden_size 256, got None: this model projects",
        ),
        (
            {"model_type": "opt", "word_embed_proj_dim": 8, "hidden_size": 4},
            "word_embed_proj_dim in .* must be hidden_size 4, got 8: this model projects",
        ),
    ],
)
def test_values_of_a_config_are_checked(config, message, tmp_path):
    name = config.get("model_type")
    tensors = tensors_of(config if isinstance(name, str) else CONFIGS[0])
    write(tmp_path, config, **tensors)
    with pytest.raises(ValueError, match=message):
        firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path)


@pytest.mark.rejects
def test_shapes_and_dtypes_of_tensors_are_checked(tmp_path):
    good = tensors_of({"model_type": "bert"})
    for name, value, message in [
        (
            "word_embeddings.weight",
            np.ones(4, np.float32),
            r"shape \(rows, 4\), got \(4,\)",
        ),
        ("LayerNorm.bias", np.ones(5, np.float32), r"have shape \(4,\), got \(5,\)"),
        ("position_embeddings.weight", np.ones((9, 3), np.float32), r"got \(9, 3\)"),
        ("token_type_embeddings.weight", np.ones((0, 4), np.float32), r"got \(0, 4\)"),
        ("word_embeddings.weight", np.ones((9, 4), np.int8), "be real, got I8"),
    ]:
        write(tmp_path, CONFIGS[5], **{**good, f"embeddings.{name}": value})
        with pytest.raises(ValueError, match=f"embeddings.{name} must .*{message}"):
            firstlayer.numpy.EmbeddingLayer.from_hf(tmp_path)


def check_damaged_checkpoints(folder: Path, count: int, seed: int) -> tuple[int, int]:
    """Check that damaged checkpoints give a layer or one sentence.

    Returns the number of layers and of errors.
    """
    layers = errors = 0
    for what, target in damaged_checkpoints(folder, count, seed):
        try:
            layer = firstlayer.numpy.EmbeddingLayer.from_hf(target)
        except (ValueError, FileNotFoundError, IsADirectoryError) as error:
            errors += 1
            known = (ValueError, FileNotFoundError, IsADirectoryError)
            assert type(error) in known, what
            text = str(error)
            assert 10 < len(text) < 800 and "\n" not in text, (what, text)
        else:
            layers += 1
            assert layer([[0]]).shape == (1, 1, layer.embedding_dim), what
    return layers, errors


def test_damaged_checkpoints_raise_one_sentence(tmp_path):
    layers, errors = check_damaged_checkpoints(tmp_path, count=2000, seed=0)
    # Some faults change nothing that is read.
    assert layers > 200 and errors > 1000


@pytest.mark.rejects
@pytest.mark.parametrize("front_end", LAYERS)
def test_every_front_end_raises_the_same_errors(front_end, tmp_path):
    (tmp_path / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match="config.json is not JSON"):
        LAYERS[front_end].from_hf(tmp_path)
    write(tmp_path, CONFIGS[0])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match="is cut short: tensor 'model.embed_tokens.weight'"
    ):
        LAYERS[front_end].from_hf(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="no model.safetensors and no model"):
        LAYERS[front_end].from_hf(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no file .*config.json"):
        LAYERS[front_end].from_hf(tmp_path)
    want = "^no folder bert-base-uncased: from_hf does not download checkpoints$"
    with pytest.raises(FileNotFoundError, match=want):
        LAYERS[front_end].from_hf("bert-base-uncased")
