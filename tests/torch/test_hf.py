"""HFRotary and replace_rotary in models of transformers 5.22.2."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from firstlayer.torch.hf import HFRotary, replace_rotary
from firstlayer.torch.rotary import RotaryPositions
from tests.support.torch_round_trips import forget_graphs, graphs

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}


def make_config(name):
    return {
        "llama": lambda: transformers.LlamaConfig(
            **SIZES, num_key_value_heads=2, rope_parameters=LLAMA3
        ),
        "llama, yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(
            **SIZES,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 20_000.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **SIZES,
            head_dim=16,
            num_key_value_heads=2,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=GEMMA3,
        ),
        # All layers have one type, but rope parameters are given for two.
        "gemma3, short": lambda: transformers.Gemma3TextConfig(
            **{**SIZES, "num_hidden_layers": 2}, head_dim=16, num_key_value_heads=2
        ),
        "cohere": lambda: transformers.CohereConfig(**SIZES, num_key_value_heads=2),
    }[name]()


MODELS = ["llama", "llama, yarn", "gpt_neox", "gemma3", "gemma3, short", "cohere"]


def make_model(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make_config(name)).eval()
    # Large weights make attention uneven, so that a wrong angle changes the logits.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def inputs():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (2, 150), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits_of(model):
    return model(**inputs()).logits


def rotary_of(model):
    return model.model.rotary_emb


@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_change(name):
    model = make_model(name)
    before = logits_of(model)
    assert replace_rotary(model) == 1
    assert any(isinstance(module, HFRotary) for module in model.modules())
    after = logits_of(model)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)
    # The logits are sensitive to the rotation.
    broken = copy.deepcopy(model)
    for module in broken.modules():
        if isinstance(module, HFRotary):
            for key, layer in module.layers.items():
                pairs = layer.get_buffer("bits").shape[-1]
                module.layers[key] = RotaryPositions(2 * pairs, base=500.0)
    assert (logits_of(broken) - before).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layer_from_config_matches_the_model(name):
    model = make_model(name)
    rotary = model.model.rotary_emb
    types = getattr(rotary, "layer_types", [None])
    q, ids = torch.randn(2, 4, 50, 16), torch.arange(100).reshape(2, 50)
    for layer_type in types:
        layer = RotaryPositions.from_hf(model.config, layer_type)
        cos, sin = rotary(q, ids, *filter(None, [layer_type]))
        want, _ = apply_rotary_pos_emb(q, q, cos, sin)
        torch.testing.assert_close(layer(q, ids), want, atol=1e-4, rtol=0)


def test_casting_the_model_keeps_phases_exact():
    model = make_model("llama")
    want = rotary_of(model)(torch.zeros(1), torch.tensor([[0, 1, 400]]))
    replace_rotary(model)
    model.bfloat16()
    cos, sin = rotary_of(model)(torch.zeros(1), torch.tensor([[0, 1, 400]]))
    torch.testing.assert_close(cos, want[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, want[1], atol=1e-4, rtol=0)
    assert logits_of(model).dtype == torch.bfloat16


def test_replacing_restores_phases_of_a_model_already_cast():
    model, plain = make_model("llama").bfloat16(), make_model("llama")
    ids = torch.tensor([[0, 1, 4000]])
    want = rotary_of(plain)(torch.zeros(1), ids)[0]
    assert (rotary_of(model)(torch.zeros(1), ids)[0] - want).abs().max() > 0.1
    replace_rotary(model)
    got = rotary_of(model)(torch.zeros(1), ids)[0]
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)


def test_model_built_on_the_meta_device_has_correct_phases():
    model = make_model("gpt_neox")
    want, state = logits_of(model), model.state_dict()
    with torch.device("meta"):
        fresh = transformers.AutoModelForCausalLM.from_config(
            make_config("gpt_neox")
        ).eval()
    assert replace_rotary(fresh, spread="halves") == 1
    fresh.to_empty(device="cpu").load_state_dict(state)
    torch.testing.assert_close(logits_of(fresh), want, atol=1e-4, rtol=0)


def test_decoding_with_a_cache_matches_the_full_forward():
    model = make_model("gemma3")
    replace_rotary(model)
    ids = inputs()["input_ids"][:, :40]
    with torch.no_grad():
        full = model(ids).logits
        cache = model(ids[:, :39], use_cache=True).past_key_values
        step = model(ids[:, 39:], past_key_values=cache).logits
    torch.testing.assert_close(step[:, 0], full[:, -1], atol=1e-4, rtol=0)


def test_at_length_matches_dynamic_rope_parameters():
    config = transformers.LlamaConfig(**SIZES, rope_parameters=DYNAMIC)
    ids, x = torch.arange(700)[None], torch.zeros(1)
    want = LlamaRotaryEmbedding(config)(x, ids)
    ours = HFRotary(config)
    got = ours.at_length(700)(x, ids)
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)
    assert (ours(x, ids)[0] - want[0]).abs().max() > 0.1


def test_one_graph_is_compiled_for_five_lengths():
    forget_graphs()
    rotary = HFRotary(make_config("gemma3"))
    compiled = torch.compile(rotary, fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 9, 16, 24, 33):
        ids, x = torch.arange(length)[None].expand(2, -1), torch.zeros(2, length, 8)
        for actual, expected in zip(
            compiled(x, ids, "full_attention"),
            rotary(x, ids, "full_attention"),
            strict=True,
        ):
            assert torch.equal(actual, expected)
    assert graphs() == 1


def test_output_has_the_dtype_and_layout_of_transformers():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        cos, sin = HFRotary(make_config("llama"))(
            torch.zeros(1, dtype=dtype), torch.arange(6).reshape(2, 3)
        )
        assert cos.dtype == sin.dtype == dtype and cos.shape == (2, 3, 16)
    ids, x = torch.tensor([[3]]), torch.zeros(1)
    llama = make_config("llama")
    once, halves, each = (
        HFRotary(llama, spread=spread)(x, ids)[0][0, 0]
        for spread in ("pairs", "halves", "neighbours")
    )
    assert torch.equal(halves, torch.cat([once, once]))
    assert torch.equal(each, torch.stack([once, once], dim=1).flatten())


def test_state_dict_and_parameters_are_empty():
    rotary = HFRotary(make_config("gemma3"))
    assert not rotary.state_dict() and not list(rotary.parameters())
    assert set(rotary.layers) == {"sliding_attention", "full_attention"}


@pytest.mark.rejects
def test_unsupported_models_are_rejected_and_unchanged():
    with pytest.raises(ValueError, match="model must have rotary modules with inv_freq"):
        replace_rotary(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="spread must be one of 'halves', 'neighbours'"):
        HFRotary(make_config("llama"), spread="x")
    model = make_model("llama")
    original = rotary_of(model)
    model.model.rotary_emb.config = make_config("gpt_neox")
    with pytest.raises(ValueError, match="LlamaRotaryEmbedding must return cosines and"):
        replace_rotary(model)
    assert rotary_of(model) is original


@pytest.mark.rejects
def test_several_coordinates_are_rejected():
    config = {
        "model_type": "qwen2_vl_text",
        "head_dim": 128,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    with pytest.raises(ValueError, match=r"one coordinate, got sections \[16, 24, 24\]"):
        HFRotary(config)
