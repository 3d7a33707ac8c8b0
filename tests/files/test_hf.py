"""Rotary layers from configs of transformers 5.22.2, and configs that are refused."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from firstlayer.files.hf import rotary_from_hf
from firstlayer.numpy.rotary import RotaryPositions
from firstlayer.positions.scaling import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)
from tests.support.rope_fuzz import mutated_configs

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}


PHI = {**LLAMA, "model_type": "phi"}


# ---- whole modules ----

HEADS: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4}
MROPE = {"rope_type": "default", "rope_theta": 1e6}
# Config class and its arguments, layer type, module class, and the suffix of the function
# that applies it, after apply_rotary_pos_emb.
MODELS: list[tuple[str, dict[str, Any], str | None, str, str]] = [
    ("LlamaConfig", {}, None, "LlamaRotaryEmbedding", ""),
    ("MistralConfig", {"head_dim": 48}, None, "MistralRotaryEmbedding", ""),
    ("Qwen3Config", HEADS, None, "Qwen3RotaryEmbedding", ""),
    ("GPTNeoXConfig", {}, None, "GPTNeoXRotaryEmbedding", ""),
    ("Phi3Config", {}, None, "Phi3RotaryEmbedding", ""),
    ("GlmConfig", {}, None, "GlmRotaryEmbedding", ""),
    ("CohereConfig", {}, None, "CohereRotaryEmbedding", ""),
    ("Ernie4_5Config", {}, None, "Ernie4_5RotaryEmbedding", ""),
    ("HeliumConfig", {}, None, "HeliumRotaryEmbedding", ""),
    ("GptOssConfig", {}, None, "GptOssRotaryEmbedding", ""),
    ("CwmConfig", {}, None, "CwmRotaryEmbedding", ""),
    ("JetMoeConfig", {}, None, "JetMoeRotaryEmbedding", ""),
    ("Zamba2Config", {}, None, "Zamba2RotaryEmbedding", ""),
    ("Ministral3Config", {}, None, "Ministral3RotaryEmbedding", ""),
    ("Qwen3NextConfig", {}, None, "Qwen3NextRotaryEmbedding", ""),
    ("MiniCPM3Config", {}, None, "MiniCPM3RotaryEmbedding", ""),
    ("Gemma3TextConfig", {}, "full_attention", "Gemma3RotaryEmbedding", ""),
    ("Gemma3TextConfig", {}, "sliding_attention", "Gemma3RotaryEmbedding", ""),
    ("Gemma4TextConfig", {}, "full_attention", "Gemma4TextRotaryEmbedding", ""),
    ("Gemma4TextConfig", {}, "sliding_attention", "Gemma4TextRotaryEmbedding", ""),
    ("ModernBertConfig", {}, "full_attention", "ModernBertRotaryEmbedding", ""),
    ("MiMoV2FlashConfig", {}, "full_attention", "MiMoV2FlashRotaryEmbedding", ""),
    ("DeepseekV3Config", {}, None, "DeepseekV3RotaryEmbedding", "_interleave"),
    ("DeepseekV3Config", {"rope_interleave": False}, None, "DeepseekV3RotaryEmbedding", ""),
    ("LongcatFlashConfig", {}, None, "LongcatFlashRotaryEmbedding", "_interleave"),
    ("Mistral4Config", {}, None, "Mistral4RotaryEmbedding", "_interleave"),
    ("Qwen2VLTextConfig", {}, None, "Qwen2VLRotaryEmbedding", ""),
    (
        "Qwen2VLTextConfig",
        {**HEADS, "rope_parameters": {**MROPE, "mrope_section": [2, 6, 8]}},
        None,
        "Qwen2VLRotaryEmbedding",
        "",
    ),
    ("Qwen3VLTextConfig", {}, None, "Qwen3VLTextRotaryEmbedding", ""),
    ("Qwen3_5TextConfig", {}, None, "Qwen3_5TextRotaryEmbedding", ""),
]


def modeling(config):
    return importlib.import_module(
        type(config).__module__.replace("configuration_", "modeling_")
    )


@pytest.mark.parametrize(
    "name, options, layer_type, module, suffix",
    MODELS,
    ids=[f"{m[0]}-{m[2] or i}" for i, m in enumerate(MODELS)],
)
def test_the_layer_matches_the_models_own_module(name, options, layer_type, module, suffix):
    assert transformers.__version__ == "5.22.2"
    config = getattr(transformers, name)(**options)
    layer = RotaryPositions.from_hf(config, layer_type)
    again = RotaryPositions.from_hf(config.to_dict(), layer_type)
    assert again.config() == layer.config()

    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 6, layer.head_dim)).astype("float32")
    axes = () if layer.axes is None else (layer.axes,)
    positions = rng.integers(0, 60, (*axes, 2, 6))
    code = modeling(config)
    extra = () if layer_type is None else (layer_type,)
    q, ids = torch.from_numpy(x), torch.from_numpy(positions)
    rotation = getattr(code, module)(config)(q, ids, *extra)
    apply = getattr(code, f"apply_rotary_pos_emb{suffix}")
    # Gemma 4 rotates one array at a time.
    want = apply(q, *rotation) if module.startswith("Gemma4") else apply(q, q, *rotation)[0]
    np.testing.assert_allclose(layer(x, positions), want.numpy(), atol=3e-5)


def test_llama_4_rotates_interleaved_pairs():
    config = transformers.Llama4TextConfig(**HEADS, head_dim=32)
    layer, code = RotaryPositions.from_hf(config, heads_axis=-2), modeling(config)
    x = np.random.default_rng(0).standard_normal((2, 6, 4, 32)).astype("float32")
    q, ids = torch.from_numpy(x), torch.arange(6)[None].expand(2, -1)
    rotation = code.Llama4TextRotaryEmbedding(config)(q, ids)
    want = code.apply_rotary_emb(q, q, rotation)[0].numpy()
    assert layer.layout == "interleaved"
    np.testing.assert_allclose(layer(x), want, atol=3e-5)


# Config class and arguments, and the functions that rotate with its module.
IMAGES = [
    ("Qwen2VLVisionConfig", {"embed_dim": 64, "num_heads": 4}, "_vision"),
    ("PixtralVisionConfig", {"hidden_size": 64, "num_attention_heads": 4}, ""),
    ("Kimi_K25VisionConfig", {"hidden_size": 64, "num_attention_heads": 4}, "_vision"),
    ("MiniMaxM3VLVisionConfig", {"hidden_size": 80, "num_attention_heads": 4}, "_vision"),
    ("Sam3ViTConfig", {"hidden_size": 64, "num_attention_heads": 4}, "_2d"),
]


@pytest.mark.parametrize("name, options, suffix", IMAGES, ids=[i[0] for i in IMAGES])
def test_image_towers_rotate_by_row_and_column(name, options, suffix):
    config_class = getattr(transformers, name, None) or getattr(
        importlib.import_module("transformers.models.kimi_k25"), name
    )
    config = config_class(**options)
    layer, code = RotaryPositions.from_hf(config, heads_axis=-3), modeling(config)
    rng, axes = np.random.default_rng(0), len(layer.frequencies)
    positions = rng.integers(0, 30, (axes, 7))
    x = rng.standard_normal((4, 7, layer.head_dim)).astype("float32")
    module = next(
        value
        for key, value in vars(code).items()
        if "Rotary" in key and ("Vision" in key or "ViT" in key) and "Attention" not in key
    )
    cos, sin = module(config)(torch.zeros(1), torch.from_numpy(positions.T.copy()))
    q = torch.from_numpy(x)
    apply = getattr(code, f"apply_rotary_pos_emb{suffix}")
    if suffix == "_vision":
        # Attention has the heads before the features there.
        heads_last = q.transpose(0, 1)
        if name.startswith("MiniMax"):
            want = apply(heads_last[None], heads_last[None], cos, sin)[0][0]
        else:
            want = apply(heads_last, heads_last, cos, sin)[0]
        want = want.transpose(0, 1)
    elif suffix == "_2d":
        want = apply(q, q, cos, sin)[0]
    else:
        want = apply(q[None], q[None], cos, sin, unsqueeze_dim=0)[0][0]
    np.testing.assert_allclose(layer(x, positions), want.numpy(), atol=3e-5)


def test_llama_4_image_tower_rotates_interleaved_pairs_by_row_and_column():
    config = transformers.Llama4VisionConfig(
        hidden_size=64, num_attention_heads=4, image_size=16, patch_size=4
    )
    layer, code = RotaryPositions.from_hf(config, heads_axis=-3), modeling(config)
    grid = np.stack([np.arange(16) // 4 + 1, np.arange(16) % 4 + 1])
    positions = np.concatenate([grid, np.zeros((2, 1), int)], axis=1)
    x = np.random.default_rng(0).standard_normal((4, 17, 16)).astype("float32")
    q = torch.from_numpy(x).transpose(0, 1)[None]
    rotation = code.Llama4VisionRotaryEmbedding(config)(q)
    want = code.vision_apply_rotary_emb(q, q, freqs_ci=rotation)[0][0].transpose(0, 1)
    np.testing.assert_allclose(layer(x, positions), want.numpy(), atol=3e-5)


def test_patches_of_dinov3_rotate_by_their_centres():
    config = transformers.DINOv3ViTConfig(hidden_size=64, num_attention_heads=4)
    layer, code = RotaryPositions.from_hf(config, heads_axis=-3), modeling(config)
    rows, columns = (np.arange(0.5, n) / n * 2.0 - 1.0 for n in (2, 3))
    positions = np.stack(np.meshgrid(rows, columns, indexing="ij")).reshape(2, 6)
    x = np.random.default_rng(0).standard_normal((1, 4, 6, 16)).astype("float32")
    image = torch.zeros(1, 3, 32, 48)
    rotary = code.DINOv3ViTRopePositionEmbedding(config).eval()(image)
    q = torch.from_numpy(x)
    want = code.apply_rotary_pos_emb(q, q, *rotary)[0].numpy()
    np.testing.assert_allclose(layer(x[0], positions), want[0], atol=3e-5)


ERNIE = {"mrope_section": [6, 6, 4], "rope_theta": 1e4, "rope_type": "default"}


def test_nanochat_rotates_by_negative_angles():
    config = transformers.NanoChatConfig(**HEADS, num_key_value_heads=4)
    layer, code = RotaryPositions.from_hf(config), modeling(config)
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 32)).astype("float32")
    q, ids = torch.from_numpy(x), torch.arange(6)[None].expand(2, -1)
    want = code.apply_rotary_pos_emb(q, q, *code.NanoChatRotaryEmbedding(config)(q, ids))
    np.testing.assert_allclose(layer(x), want[0].numpy(), atol=3e-5)
    assert (layer.frequencies < 0).all()


def test_ernie_vl_alternates_between_row_and_column():
    name = "Ernie4_5_VLMoeTextConfig"
    code = importlib.import_module("transformers.models.ernie4_5_vl_moe")
    config = getattr(code, name)(**HEADS, num_key_value_heads=4, rope_parameters=ERNIE)
    layer, code = RotaryPositions.from_hf(config), modeling(config)
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 30, (3, 2, 6))
    x = rng.standard_normal((2, 4, 6, 32)).astype("float32")
    q, ids = torch.from_numpy(x), torch.from_numpy(positions)
    rotation = code.Ernie4_5_VLMoeTextRotaryEmbedding(config)(q, ids)
    want = code.apply_rotary_pos_emb(q, q, *rotation)[0].numpy()
    np.testing.assert_allclose(layer(x, positions), want, atol=3e-5)


def test_moonshine_and_hunyuan():
    moonshine = RotaryPositions.from_hf(transformers.MoonshineConfig())
    assert (moonshine.head_dim, moonshine.rotary_dim) == (36, 32)
    rope = {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0, "rope_theta": 1e4}
    # The released configs have these keys of YaRN, which have no effect.
    unused = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5}
    for given in (rope, {**rope, **unused}):
        config = transformers.HunYuanDenseV1Config(
            **HEADS, head_dim=32, rope_parameters=given
        )
        module = modeling(config).HunYuanDenseV1RotaryEmbedding(config)
        layer = RotaryPositions.from_hf(config)
        np.testing.assert_allclose(layer.frequencies, module.inv_freq.numpy(), rtol=1e-6)


def test_llama_4_scout_divides_frequencies_without_blending():
    rope = {"rope_type": "llama3", "factor": 16.0, "rope_theta": 500_000.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0, **ORIGINAL}
    config = transformers.Llama4TextConfig(
        **HEADS, head_dim=128, max_position_embeddings=65_536, rope_parameters=rope
    )
    module = modeling(config).Llama4TextRotaryEmbedding(config)
    layer = RotaryPositions.from_hf(config)
    np.testing.assert_allclose(layer.frequencies, module.inv_freq.numpy(), rtol=1e-6)
    plain = 500_000.0 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(np.unique((plain / layer.frequencies).round(9)), [1, 16])


def test_yarn_of_the_first_models_has_a_key_without_effect():
    rope = {"rope_type": "yarn", "factor": 16.0, **ORIGINAL}
    want = rotary_from_hf({**LLAMA, "rope_scaling": rope})
    assert rotary_from_hf({**LLAMA, "rope_scaling": {**rope, "finetuned": True}}) == want


def test_gpt_j_rotates_the_first_features_of_a_head():
    config = transformers.GPTJConfig(n_embd=128, n_head=4, rotary_dim=8)
    layer, code = RotaryPositions.from_hf(config, heads_axis=-2), modeling(config)
    assert (layer.head_dim, layer.rotary_dim, layer.base) == (32, 8, 10_000.0)
    x = np.random.default_rng(0).standard_normal((2, 6, 4, 32)).astype("float32")
    sin, cos = torch.chunk(code.create_sinusoidal_positions(6, 8)[None], 2, dim=-1)
    want = code.apply_rotary_pos_emb(torch.from_numpy(x[..., :8]), sin, cos).numpy()
    got = layer(x)
    np.testing.assert_allclose(got[..., :8], want, atol=1e-5)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])


@pytest.mark.parametrize("length", [None, 4096, 4097])
def test_phi_3_uses_long_factors_beyond_its_original_length(length):
    short, long = [1.0 + 0.1 * i for i in range(16)], [2.0 + i for i in range(16)]
    rope = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    config = transformers.Phi3Config(
        **HEADS,
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_parameters={**rope, "rope_theta": 10_000.0},
        pad_token_id=0,
    )
    layer = RotaryPositions.from_hf(config)
    layer = layer if length is None else layer.at_length(length)
    w, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"](
        config, seq_len=length
    )
    np.testing.assert_allclose(layer.frequencies, w.numpy(), rtol=1e-6)
    assert layer.attention_factor == pytest.approx(factor)


# ---- options ----


def test_a_config_without_scaling():
    assert rotary_from_hf(LLAMA) == {
        "head_dim": 32,
        "base": 500_000.0,
        "layout": "half",
        "scaling": None,
        "rotary_dim": None,
        "sections": None,
        "interleaved_sections": False,
    }


ORIGINAL = {"original_max_position_embeddings": 2048}
RULES = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 2}, Linear(factor=2.0)),
    ({"rope_type": "dynamic", "factor": 2.0}, DynamicNTK(factor=2.0, original_length=8192)),
    (
        {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
        YaRN(factor=4.0, original_length=2048),
    ),
    ({"rope_type": "yarn", "factor": 4.0}, YaRN(factor=4.0, original_length=8192)),
    (
        {"rope_type": "yarn", "factor": None, **ORIGINAL},
        YaRN(factor=4.0, original_length=2048),
    ),
    (
        {
            **{"rope_type": "yarn", "factor": 8.0, **ORIGINAL, "truncate": False},
            **{"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25},
        },
        YaRN(
            factor=8.0,
            original_length=2048,
            truncate=False,
            beta_fast=16.0,
            beta_slow=2.0,
            attention=1.25,
        ),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 8.0,
            **ORIGINAL,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
        },
        YaRN(factor=8.0, original_length=2048, mscale=0.7, mscale_all_dim=0.5),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 8.0,
            **ORIGINAL,
            "mscale": 0.7,
            "mscale_all_dim": 0,
        },
        YaRN(factor=8.0, original_length=2048),
    ),
    (
        {
            **{"rope_type": "llama3", "factor": 8.0, **ORIGINAL},
            **{"low_freq_factor": 0.5, "high_freq_factor": 6.0},
        },
        Llama3(factor=8.0, original_length=2048, low_factor=0.5, high_factor=6.0),
    ),
    (
        {
            **{"rope_type": "longrope", **ORIGINAL},
            **{"short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
        },
        LongRoPE(
            short_factors=[1.0] * 16,
            long_factors=[2.0] * 16,
            original_length=2048,
            factor=4.0,
        ),
    ),
    (
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        Proportional(fraction=0.25),
    ),
]


@pytest.mark.parametrize("rope, rule", RULES)
@pytest.mark.parametrize("version", ["4", "4 old", "5"])
def test_every_scaling_rule_in_every_version_of_the_format(rope, rule, version):
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    if version == "5":
        config["rope_parameters"] = {**rope, "rope_theta": 1e6}
    else:
        key = "rope_type" if version == "4" else "type"
        rest = {name: value for name, value in rope.items() if name != "rope_type"}
        config |= {"rope_theta": 1e6, "rope_scaling": {key: rope["rope_type"], **rest}}
    found = rotary_from_hf(config)
    assert found["scaling"] == rule and found["base"] == 1e6
    assert found["rotary_dim"] is None


@pytest.mark.parametrize(
    "change, want",
    [
        ({"partial_rotary_factor": 0.25}, 8),
        ({"rotary_pct": 0.5}, 16),
        ({"rotary_dim": 24}, 24),
        ({"rope_parameters": {"partial_rotary_factor": 0.75}}, 24),
        ({"partial_rotary_factor": 0.5, "rotary_dim": 16}, 16),
        ({"partial_rotary_factor": 1.0}, None),
    ],
)
def test_rotary_dim_is_read_from_any_of_its_keys(change, want):
    assert rotary_from_hf({**PHI, **change})["rotary_dim"] == want
    # transformers rotates whole heads of a Llama, whatever the config has.
    assert rotary_from_hf({**LLAMA, **change})["rotary_dim"] is None


@pytest.mark.parametrize(
    "change, want",
    [
        ({"head_dim": 64}, 64),
        ({"head_dim": None}, 32),
        ({"qk_rope_head_dim": 16, "head_dim": 64}, 16),
        ({"hidden_size": None, "n_embd": 64, "num_attention_heads": None, "n_head": 4}, 16),
    ],
)
def test_head_dim_is_read_from_any_of_its_keys(change, want):
    assert rotary_from_hf({**LLAMA, **change})["head_dim"] == want


NEMO = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "no_attention": None,
}


def test_each_layer_type_has_its_own_parameters():
    config = {**LLAMA, "rope_parameters": NEMO}
    full, local = (
        rotary_from_hf(config, f"{name}_attention") for name in ("full", "sliding")
    )
    assert (full["base"], full["scaling"]) == (1e6, Linear(factor=8.0))
    assert (local["base"], local["scaling"]) == (1e4, None)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {"rope_theta": None, "global_rope_theta": 1e6, "local_rope_theta": 1e4},
    ],
)
def test_version_4_has_a_separate_key_for_the_local_base(keys):
    config = {**LLAMA, **keys, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    full, local = (
        rotary_from_hf(config, f"{name}_attention") for name in ("full", "sliding")
    )
    assert (full["base"], full["scaling"]) == (1e6, Linear(factor=8.0))
    assert (local["base"], local["scaling"]) == (1e4, None)


def test_one_set_of_parameters_applies_to_every_layer_type():
    config = {**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}
    assert rotary_from_hf(config, "full_attention") == rotary_from_hf(config)


def test_truncate_is_read_from_a_layer_type():
    rope = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "rope_theta": 1e6}
    config = {**LLAMA, "rope_parameters": {"full_attention": {**rope, **ORIGINAL}}}
    assert rotary_from_hf(config, "full_attention")["scaling"].truncate is False


def test_the_base_of_older_models_has_a_default():
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert rotary_from_hf(config)["base"] == 10_000.0
    neox = {
        **LLAMA,
        "model_type": "gpt_neox",
        "rope_theta": None,
        "rotary_emb_base": 25_000,
    }
    assert rotary_from_hf(neox)["base"] == 25_000.0


def test_multimodal_sections():
    def sections(model, **rope):
        config = {**LLAMA, "model_type": model, "head_dim": 128, "rope_scaling": rope}
        found = rotary_from_hf(config)
        return found["sections"], found["interleaved_sections"]

    assert sections("qwen2_vl", type="mrope", mrope_section=[16, 24, 24]) == (
        [16, 24, 24],
        False,
    )
    assert sections("qwen2_5_vl_text") == ([16, 24, 24], False)
    assert sections("qwen3_vl_text", mrope_interleaved=True) == ([24, 20, 20], True)
    assert sections("another", mrope_section=[32, 32]) == ([32, 32], False)
    assert sections("another", mrope_section=[32, 32], mrope_interleaved=True)[1] is True
    assert sections("llama") == (None, False)


# ---- errors ----


@pytest.mark.rejects
@pytest.mark.parametrize(
    "rope, message",
    [
        ({"rope_type": "cubic"}, "rope_type must be one of 'default', .* got 'cubic'"),
        (
            {"rope_type": "yarn", "type": "linear"},
            "type must agree, got 'yarn' and 'linear'",
        ),
        ({"rope_type": "linear"}, "type 'linear' must have 'factor', got none"),
        ({"rope_type": "dynamic"}, "type 'dynamic' must have 'factor', got none"),
        ({"rope_type": "yarn", **ORIGINAL}, "type 'yarn' must have 'factor', got none"),
        ({"rope_type": "llama3", "factor": 8.0}, "must have 'low_freq_factor', got none"),
        ({"rope_type": "longrope", "factor": 2.0}, "must have 'short_factor', got none"),
        ({"factor": 2.0}, "type 'default' must have only .* got 'factor'"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1}, "got 'beta_fast'"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 9, "a": 1}, "got 'a', 'alpha'"),
        ({"rope_type": "dynamic", "factor": 2.0, **ORIGINAL}, "got 'original_max_position"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be .* at least 1, got 0.5"),
        ({"rope_theta": 1e4}, "rope_theta must have one value, got 10000.0 and 500000.0"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_invalid_rope_parameters_are_refused_by_name(rope, message, key):
    with pytest.raises(ValueError, match=message):
        rotary_from_hf({**LLAMA, key: rope})


YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}


@pytest.mark.rejects
@pytest.mark.parametrize(
    "change, layer_type, message",
    [
        (
            {"rope_parameters": NEMO},
            None,
            "'full_attention' or 'sliding_attention' .* None",
        ),
        ({"rope_parameters": NEMO}, "global", "'full_attention' or .* got 'global'"),
        ({"rope_parameters": NEMO}, "no_attention", "layer_type must be .* 'no_attention'"),
        (
            {"rope_parameters": {**NEMO, "factor": 2.0}},
            "full_attention",
            "rope parameters must all be in a layer type, got 'factor'",
        ),
        (
            {"model_type": "gemma3", "text_config": LLAMA, "rope_theta": None},
            None,
            "config must be a text model's: give the text_config of 'gemma3'",
        ),
        ({}, "full_attention", "layer_type must be None .* got 'full_attention'"),
        ({"layer_types": ["a"]}, "b", "layer_type must be None .* got 'b'"),
        (
            {
                "rope_parameters": YARN,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            None,
            "config must have rope_parameters or rope_scaling, got both",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
            None,
            "original_max_position_embeddings must have one value, got 2048 and 4096",
        ),
        (
            {"partial_rotary_factor": 0.5, "rotary_pct": 0.25},
            None,
            "partial_rotary_factor must have one value, got 0.5 and 0.25",
        ),
        (
            {"model_type": "phi", "partial_rotary_factor": 0.5, "rotary_dim": 8},
            None,
            "rotary_dim must be 16 for partial_rotary_factor 0.5, got 8",
        ),
        ({"model_type": "mistral", "rope_theta": None}, None, "must have 'rope_theta'"),
        ({"hidden_size": None}, None, "config must have 'head_dim' or 'hidden_size'"),
        ({"num_attention_heads": None}, None, "'head_dim' or 'num_attention_heads'"),
        (
            {"model_type": "musicflamingo"},
            None,
            "model_type must be one .* got 'musicflamingo': keep the model's own module",
        ),
        (
            {"model_type": "blt", "hidden_size": None, "encoder_config": {}},
            None,
            "must have 'head_dim' or 'hidden_size', got none: give one of 'encoder_config'",
        ),
        (
            {"rotary_embedding_base": 10_000, "position_embeddings_type": "relative"},
            None,
            "position_embeddings_type must be 'rotary', got 'relative'",
        ),
        (
            {"model_type": "qwen3_vl_text", "rope_scaling": {"mrope_interleaved": False}},
            None,
            "mrope_interleaved must be True for model_type 'qwen3_vl_text', got False",
        ),
        (
            {
                "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
                "max_position_embeddings": None,
            },
            None,
            "type 'dynamic' must have 'max_position_embeddings', got none",
        ),
    ],
)
def test_contradictory_configs_are_refused_by_name(change, layer_type, message):
    with pytest.raises(ValueError, match=message):
        rotary_from_hf({**LLAMA, **change}, layer_type)


@pytest.mark.rejects
def test_a_config_must_be_a_dict_or_have_to_dict():
    with pytest.raises(
        TypeError, match="^config must be a dict, .* or have to_dict, got str$"
    ):
        rotary_from_hf("config.json")


def test_the_config_is_not_modified():
    config = {**LLAMA, "rope_parameters": {**YARN, "rope_theta": 500_000.0}}
    before = repr(config)
    rotary_from_hf(config)
    assert repr(config) == before


# ---- random configs ----


def fault_of(config, layer_type):
    """Return the fault of a config's layer or error; None if there is none."""
    try:
        layer = RotaryPositions.from_hf(config, layer_type)
    except (ValueError, TypeError, KeyError) as error:
        return None if " must " in str(error) else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    axes = () if layer.axes is None else (layer.axes,)
    at = np.broadcast_to(np.array([0, 1, 100_000]), (*axes, 3))
    for one in (layer, layer.at_length(1000)):
        x = one(np.eye(3, one.head_dim, dtype="float32"), at)
        if not np.isfinite(x).all():
            return "rotated vectors are not finite"
    return None


@pytest.mark.rejects
@pytest.mark.rejects
def test_lists_for_numbers_are_named():
    config = {"model_type": "llama", "head_dim": 8, "rope_theta": np.int64(4)}
    for values in ([1.0, 2.0], np.ones(2)):
        with pytest.raises(TypeError, match="rope_theta must be a number, got "):
            rotary_from_hf({**config, "rope_parameters": {"rope_theta": values}})


def test_mutated_configs_give_finite_layers_or_one_sentence():
    faults: dict[str, Any] = {}
    refused = 0
    for config, layer_type in mutated_configs(3000, seed=1):
        fault = fault_of(config, layer_type)
        if fault is not None:
            faults.setdefault(fault, (config, layer_type))
        refused += _is_refused(config, layer_type)
    assert not faults, "\n".join(f"{k}: {v}" for k, v in list(faults.items())[:20])
    # Neither all configs are refused nor none.
    assert 500 < refused < 2900


def _is_refused(config, layer_type):
    try:
        rotary_from_hf(config, layer_type)
    except (ValueError, TypeError, KeyError):
        return True
    return False
