"""Rotary layers of transformers 5.22.2, x-transformers 2.31.10 and equinox 0.13.8."""

from importlib.metadata import version
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DINOv3ViTConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PixtralVisionConfig,
    Qwen2VLTextConfig,
    Qwen3VLTextConfig,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3_vit
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.llama import modeling_llama as llama
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from firstlayer.numpy.rotary import RotaryPositions
from firstlayer.positions import from_patches
from firstlayer.positions.axial import qwen_axial_frequencies
from firstlayer.positions.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, YaRN

rng = np.random.default_rng(0)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def test_versions_match_the_documented_ones():
    assert version("transformers") == "5.22.2"
    assert version("x-transformers") == "2.31.10"
    assert version("equinox") == "0.13.8"


def random(*shape):
    return rng.standard_normal(shape).astype("float32")


def theirs(module, apply, x, positions, **options):
    """Rotate ``x`` with a transformers module and its apply function."""
    x, positions = torch.from_numpy(x), torch.from_numpy(np.asarray(positions))
    rotated, _ = apply(x, x, *module(x, positions), **options)
    return rotated.numpy()


def assert_same(got, want):
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_matches_llama(base):
    config = LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": base}
    )
    x, positions = random(2, 4, 6, 32), np.array([[0, 1, 2, 3, 4, 5], [9, 8, 40, 0, 3, 3]])
    module = llama.LlamaRotaryEmbedding(config)
    want = theirs(module, llama.apply_rotary_pos_emb, x, positions)
    assert_same(RotaryPositions(32, base=base)(x, positions), want)
    swapped = x.swapaxes(1, 2)
    want = theirs(module, llama.apply_rotary_pos_emb, swapped, positions, unsqueeze_dim=2)
    assert_same(RotaryPositions(32, base=base, heads_axis=-2)(swapped, positions), want)


SHORT, LONG = [1.0 + 0.1 * i for i in range(16)], [1.0 + i for i in range(16)]
ORIGINAL = {"original_max_position_embeddings": 32}
SCALED = {
    "linear": ({"factor": 4.0}, Linear(factor=4.0)),
    "dynamic": ({"factor": 4.0}, DynamicNTK(factor=4.0, original_length=64)),
    "yarn": ({"factor": 2.0, **ORIGINAL}, YaRN(factor=2.0, original_length=32)),
    "llama3": (
        {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
        Llama3(factor=2.0, original_length=32),
    ),
    "longrope": (
        {"short_factor": SHORT, "long_factor": LONG, "factor": 2.0, **ORIGINAL},
        LongRoPE(short_factors=SHORT, long_factors=LONG, original_length=32, factor=2.0),
    ),
}


@pytest.mark.parametrize("rope_type", SCALED)
@pytest.mark.parametrize("length", [20, 32, 33, 64, 65, 100])
def test_matches_llama_under_every_scaling_at_every_length(rope_type, length):
    parameters, rule = SCALED[rope_type]
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, **parameters}
    module = llama.LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=rope))
    x, positions = random(1, 4, length, 32), np.arange(length)
    want = theirs(module, llama.apply_rotary_pos_emb, x, positions[None])
    layer = RotaryPositions(32, scaling=rule).at_length(length)
    np.testing.assert_allclose(layer(x, positions), want, atol=3e-5)


def test_matches_gpt_neox_partial_rotation():
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    module = gpt_neox.GPTNeoXRotaryEmbedding(GPTNeoXConfig(**SIZES, rope_parameters=rope))
    x, positions = random(2, 4, 6, 32), np.array([[0, 1, 2, 3, 4, 5], [9, 8, 40, 0, 3, 3]])
    want = theirs(module, gpt_neox.apply_rotary_pos_emb, x, positions)
    assert_same(RotaryPositions(32, rotary_dim=8)(x, positions), want)


def test_matches_deepseek_v3():
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        **{"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        **ORIGINAL,
    }
    config = DeepseekV3Config(**SIZES, qk_rope_head_dim=32, rope_parameters=rope)
    module = deepseek_v3.DeepseekV3RotaryEmbedding(config)
    x, positions = random(2, 4, 6, 32), np.array([[0, 1, 2, 3, 4, 5], [9, 8, 40, 0, 3, 3]])
    want = theirs(module, deepseek_v3.apply_rotary_pos_emb_interleave, x, positions)
    rule = YaRN(factor=40.0, original_length=32, mscale=1.0, mscale_all_dim=0.7)
    layer = RotaryPositions(32, layout="interleaved_to_half", scaling=rule)
    assert_same(layer(x, positions), want)


def test_matches_qwen2_vl_text():
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    config: Any = Qwen2VLTextConfig(**SIZES, rope_parameters=rope)
    x, positions = random(2, 4, 6, 32), rng.integers(0, 60, (3, 2, 6))
    module = qwen2_vl.Qwen2VLRotaryEmbedding(config)
    want = theirs(module, qwen2_vl.apply_rotary_pos_emb, x, positions)
    assert_same(RotaryPositions(32, base=1e6, sections=[4, 6, 6])(x, positions), want)


def test_matches_qwen3_vl_text():
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
    config = Qwen3VLTextConfig(**SIZES, head_dim=32, rope_parameters=rope)
    x, positions = random(2, 4, 6, 32), rng.integers(0, 60, (3, 2, 6))
    module = qwen3_vl.Qwen3VLTextRotaryEmbedding(config)
    want = theirs(module, qwen3_vl.apply_rotary_pos_emb, x, positions)
    layer = RotaryPositions(32, base=1e6, sections=[6, 5, 5], interleaved_sections=True)
    assert_same(layer(x, positions), want)


def test_matches_qwen2_vl_images():
    config = Qwen2VLVisionConfig(embed_dim=160, num_heads=2)
    x, positions = random(12, 2, 80), rng.integers(0, 60, (2, 12))
    module = qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)
    want = theirs(module, qwen2_vl.apply_rotary_pos_emb_vision, x, positions.T)
    layer = RotaryPositions(80, frequencies=qwen_axial_frequencies(80), heads_axis=-2)
    assert_same(layer(x, positions), want)


def test_matches_pixtral_images():
    config: Any = PixtralVisionConfig(hidden_size=128, num_attention_heads=2)
    x, positions = random(1, 2, 12, 64), rng.integers(0, 60, (2, 12))
    module = pixtral.PixtralVisionRotaryEmbedding(config)
    want = theirs(module, pixtral.apply_rotary_pos_emb, x, positions.T, unsqueeze_dim=0)
    layer = RotaryPositions.pixtral(64, base=config.rope_parameters["rope_theta"])
    assert_same(layer(x, positions), want)


@pytest.mark.parametrize("size", [(48, 80), (16, 16), (96, 32)])
@pytest.mark.parametrize("base", [100.0, 37.0])
def test_matches_dinov3_images(size, base):
    config: Any = DINOv3ViTConfig(
        hidden_size=128, num_attention_heads=2, patch_size=16, rope_theta=base
    )
    patches = size[0] // 16, size[1] // 16
    x = random(2, 2, 5 + patches[0] * patches[1], 64)
    module = dinov3_vit.DINOv3ViTRopePositionEmbedding(config).eval()
    cos, sin = module(torch.zeros(2, 3, *size))
    q = torch.from_numpy(x)
    want = dinov3_vit.apply_rotary_pos_emb(q, q, cos, sin)[0].numpy()
    layer = RotaryPositions.dinov3(64, base=base)
    got = layer(x, from_patches(patches, prefix=5))
    assert_same(got, want)
    np.testing.assert_array_equal(got[..., :5, :], x[..., :5, :])


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ({}, {}),
        ({"base": 5e5}, {"base": 5e5}),
        ({"interpolation_factor": 4.0}, {"scaling": Linear(factor=4.0)}),
        ({"base_rescale_factor": 4.0}, {"scaling": NTK(factor=4.0)}),
    ],
)
@pytest.mark.parametrize("rotary_dim", [16, 32])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_matches_x_transformers(theirs, ours, rotary_dim):
    import x_transformers.x_transformers as xt

    x, positions = random(2, 4, 6, 32), np.array([[0, 1, 2, 3, 4, 5], [9, 8, 40, 0, 3, 3]])
    angles, scale = xt.RotaryEmbedding(rotary_dim, **theirs)(torch.from_numpy(positions))
    want = xt.apply_rotary_pos_emb(torch.from_numpy(x), angles, scale).numpy()
    layer = RotaryPositions(32, layout="interleaved", rotary_dim=rotary_dim, **ours)
    assert_same(layer(x, positions), want)


# Equinox caches by width and ignores theta, so each width is used only once.
@pytest.mark.parametrize("dim, base", [(22, 10_000.0), (26, 500_000.0)])
def test_matches_equinox(dim, base):
    x = random(50, dim)
    want = eqx.nn.RotaryPositionalEmbedding(dim, theta=base)(jnp.asarray(x))
    assert_same(RotaryPositions(dim, base=base)(x), np.asarray(want))
