"""HFRotary and replace_rotary in models of transformers 5.22.2."""

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from firstlayer.compat.transformers import swapped
from firstlayer.torch.hf import HFRotary, RotaryModule, replace_rotary
from firstlayer.torch.rotary import RotaryPositions
from tests.support.rotary_models import MODELS as FAMILIES
from tests.support.rotary_models import build
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


# ---- rules that depend on the length ----

ORIGINAL = 24
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
RULES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 20_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": DYNAMIC,
    "yarn": {**YARN, "original_max_position_embeddings": ORIGINAL},
    "longrope": LONGROPE,
    "llama3": {**LLAMA3, "original_max_position_embeddings": ORIGINAL},
    "proportional": {
        "rope_type": "proportional",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
}


def make_ruled(rule, **changes):
    """Return a Phi-3 with a rule and an original length of 24 positions."""
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2}
    # Phi-3's own key is needed for the switch, and dynamic NTK counts from the maximum.
    sizes["max_position_embeddings"] = ORIGINAL if rule == "dynamic" else 96
    if rule != "longrope":
        config = transformers.LlamaConfig(**sizes, rope_parameters=dict(RULES[rule]))
    else:
        config = transformers.Phi3Config(
            **sizes,
            rope_parameters=dict(LONGROPE),
            original_max_position_embeddings=ORIGINAL,
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, **changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


# Short, long, shorter than the longest, short again, exactly the original length, long.
LENGTHS = (10, 60, 40, 12, ORIGINAL, 25, ORIGINAL, 80, 23, 24)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["replace_rotary", "swapped"])
def test_every_rule_follows_the_length_as_transformers_does(rule, how):
    stock, ours = make_ruled(rule), make_ruled(rule)
    ids = inputs()["input_ids"]
    with contextlib.ExitStack() as stack, torch.no_grad():
        if how == "replace_rotary":
            assert replace_rotary(ours) == 1
        else:
            assert stack.enter_context(swapped(ours)).left == {}
        outputs = []
        for length in LENGTHS:
            want = stock(ids[:, :length], use_cache=False).logits
            got = ours(ids[:, :length], use_cache=False).logits
            torch.testing.assert_close(got, want, atol=3e-4, rtol=0)
            outputs.append(want)
    if rule in ("dynamic", "longrope"):
        # The length changes earlier logits: a rule that ignores it would not pass.
        assert (outputs[0] - outputs[1][:, :10]).abs().max() > 1e-2


@pytest.mark.parametrize("rule", ["dynamic", "longrope"])
def test_generating_past_the_original_length_matches(rule):
    stock, ours = make_ruled(rule), make_ruled(rule)
    replace_rotary(ours)
    ids, options = inputs()["input_ids"][:, :18], {"max_new_tokens": 14, "do_sample": False}
    mask = torch.ones_like(ids)
    for _ in range(2):
        want = stock.generate(ids, attention_mask=mask, **options)
        assert torch.equal(ours.generate(ids, attention_mask=mask, **options), want)


def test_decoding_with_a_cache_follows_the_length():
    stock, ours = make_ruled("dynamic"), make_ruled("dynamic")
    replace_rotary(ours)
    ids = inputs()["input_ids"]
    with torch.no_grad():
        for model, logits in ((stock, want := []), (ours, got := [])):
            cache = model(ids[:, :20], use_cache=True).past_key_values
            for at in range(20, 40):
                step = model(ids[:, at : at + 1], past_key_values=cache)
                cache = step.past_key_values
                logits.append(step.logits)
    torch.testing.assert_close(torch.cat(got), torch.cat(want), atol=3e-4, rtol=0)


@pytest.mark.parametrize("rule", ["dynamic", "longrope"])
def test_one_graph_follows_the_length(rule):
    forget_graphs()
    stock, rotary = rotary_of(make_ruled(rule)), HFRotary(make_ruled(rule).config)
    compiled = torch.compile(rotary, fullgraph=True, dynamic=True, backend="eager")
    for length in LENGTHS:
        ids, x = torch.arange(length)[None].expand(2, -1), torch.zeros(2, length, 8)
        for got, want in zip(compiled(x, ids), stock(x, ids), strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert graphs() == 1


def test_a_compiled_model_follows_the_length():
    stock, ours = make_ruled("longrope"), make_ruled("longrope")
    replace_rotary(ours)
    compiled = torch.compile(ours, dynamic=True, backend="eager")
    ids = inputs()["input_ids"]
    with torch.no_grad():
        for length in (10, 60, 12):
            want = stock(ids[:, :length], use_cache=False).logits
            got = compiled(ids[:, :length], use_cache=False).logits
            torch.testing.assert_close(got, want, atol=3e-4, rtol=0)


def test_the_length_survives_copies_and_casts():
    rotary, x = HFRotary(make_ruled("dynamic").config), torch.zeros(1)
    at = torch.tensor([[5, 30]])
    want = rotary(x, torch.arange(60)[None])[0][:, [5, 30]]
    plain = HFRotary(make_ruled("dynamic").config)(x, at)[0]
    assert (plain - want).abs().max() > 1e-2
    assert "DynamicNTK(factor=4.0" in repr(rotary)
    for other in (
        copy.deepcopy(rotary),
        pickle.loads(pickle.dumps(rotary)),
        copy.deepcopy(rotary).half(),
        copy.deepcopy(rotary).to_empty(device="cpu"),
    ):
        torch.testing.assert_close(other(x, at)[0], want, atol=1e-6, rtol=0)
    fresh = HFRotary(make_ruled("dynamic").config).to("meta").to_empty(device="cpu")
    torch.testing.assert_close(fresh(x, at)[0], plain, atol=1e-6, rtol=0)


def test_two_modules_have_separate_lengths():
    one, two = (HFRotary(make_ruled("dynamic").config) for _ in range(2))
    x, short = torch.zeros(1), torch.arange(ORIGINAL)[None]
    before = one(x, short)[0]
    two(x, torch.arange(60)[None])
    assert torch.equal(one(x, short)[0], before)
    assert (two(x, short)[0] - before).abs().max() > 1e-2


def test_a_module_in_two_places_gets_one_replacement():
    rotary = rotary_of(make_ruled("dynamic"))
    model: Any = nn.ModuleDict({
        "a": rotary,
        "b": rotary,
        "c": nn.ModuleDict({"d": rotary}),
    })
    assert replace_rotary(model) == 3
    assert model["a"] is model["b"] is model["c"]["d"] is not rotary


# ---- families of models ----


@torch.no_grad()
def output_of(model, given):
    output = model(**given)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_every_family_keep_their_output(name):
    model, given = build(name)
    before, keys = output_of(model, given), list(model.state_dict())
    places, _ = FAMILIES[name]
    replaced = replace_rotary(model)
    assert replaced == places and replaced.left == {}
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(output_of(model, given), before, atol=1e-4, rtol=0)
    # The output is sensitive to each of the modules. Granite's two layers share one.
    changes = []
    for module in [m for m in model.modules() if isinstance(m, RotaryModule)]:
        for key in list(module.layers):
            kept: Any = module.layers[key]
            wrong = RotaryPositions(
                2 * kept.frequencies.shape[-1], frequencies=kept.frequencies * 1.7
            )
            module.layers[key] = wrong
            changes.append(float((output_of(model, given) - before).abs().max()))
            module.layers[key] = kept
    assert (max if name == "granite_swa" else min)(changes) > 1e-3


@pytest.mark.parametrize("name", ["olmo", "qwen2_vl", "deepseek_v2", "llama"])
def test_dtypes_of_the_output_are_those_of_transformers(name):
    model = make_model("llama") if name == "llama" else build(name)[0]
    before = [m for m in model.modules() if any("inv_freq" in b for b in m._buffers)]
    replace_rotary(model)
    after = [m for m in model.modules() if isinstance(m, RotaryModule)]
    for old, new in zip(before, after, strict=True):
        axes = next(iter(new.layers.values())).axes
        ids = torch.zeros(3, 1, 4).long() if axes == 3 else torch.zeros(1, 4).long()
        ids = torch.zeros(4, 2).long() if axes == 2 else ids
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.zeros(1, dtype=dtype)
            a, b = old(x, ids), new(x, ids)
            assert type(a) is type(b)
            assert [p.dtype for p in (a if type(a) is tuple else [a])] == [
                p.dtype for p in (b if type(b) is tuple else [b])
            ]


def test_augmented_patches_draw_the_numbers_of_transformers():
    model, given = build("dinov3")
    config = model.config
    config.pos_embed_shift, config.pos_embed_jitter = 0.1, 1.3
    config.pos_embed_rescale = 2.0
    stock = next(m for m in model.modules() if "inv_freq" in m._buffers)
    replace_rotary(model)
    ours = next(m for m in model.modules() if isinstance(m, RotaryModule))
    for seed in (3, 4):
        outputs = []
        for rotary in (ours, stock):
            torch.manual_seed(seed)
            outputs.append(rotary.train()(given["pixel_values"]))
        for got, want in zip(*outputs, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_modules_that_cannot_be_replaced_are_reported_and_stay():
    class Learned(LlamaRotaryEmbedding):
        def __init__(self, config):
            super().__init__(config)
            self.alpha = nn.Parameter(torch.zeros(8))

    model: Any = nn.ModuleDict({
        "good": LlamaRotaryEmbedding(make_config("llama")),
        "learned": Learned(make_config("llama")),
        "part": nn.ModuleDict({"timed": Timed()}),
        "bare": Bare(),
    })
    replaced = replace_rotary(model)
    assert replaced == 1 and isinstance(model["good"], HFRotary)
    assert replaced.left == {
        "learned": "Learned must have no state of its own, got alpha",
        "bare": "Bare must have a config, got none",
        "part.timed": "Timed must be called with x and position_ids, got ['timestamps']",
    }
    assert type(model["bare"]) is Bare and replaced.names == ["good"]
    # Modules that are replaced already are neither replaced nor left.
    again = replace_rotary(model)
    assert again == 0 and again.left == replaced.left


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)


class Timed(Bare):
    config = transformers.LlamaConfig(**SIZES)

    def forward(self, timestamps):
        return timestamps


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
