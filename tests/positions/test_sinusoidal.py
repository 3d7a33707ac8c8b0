"""Sinusoidal positions: accuracy, conventions, other libraries, gradients, errors."""

import itertools
import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.pi0.modeling_pi0 import PI0TimestepEmbeddings
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import SinusPositionEmbedding
from transformers.models.speech_to_text.modeling_speech_to_text import (
    Speech2TextSinusoidalPositionalEmbedding,
)
from transformers.models.vit_mae.modeling_vit_mae import (
    build_2d_sinusoidal_position_embedding,
)
from transformers.models.whisper.modeling_whisper import sinusoids

from firstlayer import positions as ids
from firstlayer.numpy.sinusoidal import SinusoidalPositions
from firstlayer.positions import sinusoidal
from firstlayer.positions.turns import float64_digit_tables

rng = np.random.default_rng(0)
INTEGERS = [0, 1, 255, 256, 65_535, 65_536, 2**24 - 1, -3, -9_999_999]
REALS = [0.0, 0.5, -0.25, 255.75, 1234.5678, -70_000.25, 2.0**24 - 1]


def sine_and_cosine(position, i, *, half, base, shift, frequency_scale):
    """Return the sine and the cosine of one pair, in long double."""
    exponent = np.longdouble(i) / (half - shift) if i else np.longdouble(0)
    angle = np.longdouble(position) * frequency_scale * np.longdouble(base) ** -exponent
    return float(np.sin(angle)), float(np.cos(angle))


def reference(
    positions,
    dim,
    *,
    base=10_000.0,
    layout="interleaved",
    shift=0.0,
    cos_first=False,
    scale=1.0,
    odd="sine",
    frequency_scale=1.0,
):
    """Return the vectors from the definition, one feature at a time."""
    half = dim / 2 if odd == "sine" else dim // 2
    rows = []
    for position in positions:
        sines, cosines = [], []
        for i in range((dim + (odd == "sine")) // 2):
            sine, cosine = sine_and_cosine(
                position,
                i,
                half=half,
                base=base,
                shift=shift,
                frequency_scale=frequency_scale,
            )
            sines.append(sine)
            if len(cosines) < dim // 2:
                cosines.append(cosine)
        first, second = (cosines, sines) if cos_first else (sines, cosines)
        if layout == "interleaved":
            pairs = itertools.zip_longest(first, second)
            row = [v for pair in pairs for v in pair if v is not None]
        else:
            row = first + second
        rows.append(row + [0.0] * (dim - len(row)))
    return scale * np.array(rows)


OPTIONS = [
    {},
    {"base": 500.0},
    {"layout": "half"},
    {"shift": 1.0},
    {"shift": 0.5, "layout": "half"},
    {"cos_first": True},
    {"cos_first": True, "layout": "half"},
    {"scale": 0.3},
    {"scale": 20.0, "base": 1e6},
    {"odd": "zero"},
    {"odd": "zero", "layout": "half", "shift": 1.0, "cos_first": True},
    {"frequency_scale": 0.125},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dim", [2, 3, 8, 9])
@pytest.mark.parametrize("positions", [INTEGERS, REALS], ids=["integers", "reals"])
def test_encode_matches_the_definition_at_every_position(options, dim, positions):
    got = SinusoidalPositions(dim, **options).encode(positions)
    want = reference(positions, dim, **options)
    tolerance = 2.5e-7 * options.get("scale", 1.0)
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=0)
    assert got.dtype == np.float32


@pytest.mark.parametrize("dim", [1, 2])
def test_a_single_pair_does_not_divide_by_zero(dim):
    got = SinusoidalPositions(dim, shift=1.0).encode([0, 3])
    np.testing.assert_allclose(got, reference([0, 3], dim), atol=2.5e-7)


@pytest.mark.parametrize(
    "positions", [[0.001, 0.5, 0.9999], [7, 1000, -3], [9999.37, -12.1]]
)
@pytest.mark.parametrize("dtype", [None, np.float32])
def test_high_frequencies_are_accurate_at_real_positions(positions, dtype):
    """float64 positions are not rounded to float32."""
    positions = np.array(positions, dtype)
    options: dict[str, Any] = {"frequency_scale": 1000.0, "scale": 3.0}
    got = SinusoidalPositions(16, **options).encode(positions)
    want = reference(positions, 16, **options)
    np.testing.assert_allclose(got, want, atol=3 * 3.5e-7, rtol=0)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("start", [0, 5_000_000, -77])
def test_shifting_is_a_rotation_that_depends_on_the_shift_only(layout, start):
    """(sin, cos)(p + k) is a rotation of (sin, cos)(p) that depends on k only."""
    layer, dim, step = SinusoidalPositions(8, layout=layout, base=300.0), 8, 13
    basis = layer.encode(np.arange(40), dtype="float64")
    moved = layer.encode(np.arange(40) + step, dtype="float64")
    matrix, *_ = np.linalg.lstsq(basis, moved)
    shifted = layer.encode([start], dtype="float64") @ matrix
    np.testing.assert_allclose(
        shifted, layer.encode([start + step], dtype="float64"), atol=5e-5
    )
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=5e-5)


def test_inner_products_depend_on_the_distance_only():
    layer = SinusoidalPositions(16)
    a = layer.encode([3, 10_000_003]) @ layer.encode([10, 10_000_010]).T
    np.testing.assert_allclose(a[0, 0], a[1, 1], atol=3e-6)
    assert abs(a[0, 0] - a[0, 1]) > 0.1


def test_conventions_match_the_definition_and_differ():
    named = {
        "paper": SinusoidalPositions(9),
        "tensor2tensor": SinusoidalPositions.tensor2tensor(9),
        "marian": SinusoidalPositions.marian(9),
        "timestep": SinusoidalPositions.timestep(9),
    }
    for name, layer in named.items():
        want = reference([3, 700], 9, **sinusoidal.CONVENTIONS[name])
        np.testing.assert_allclose(layer.encode([3, 700]), want, atol=2.5e-7)
    for a, b in itertools.combinations(named.values(), 2):
        assert np.abs(a.encode([700]) - b.encode([700])).max() > 0.1
    changed = SinusoidalPositions.timestep(8, shift=1.0, cos_first=False, base=50.0)
    same = SinusoidalPositions.tensor2tensor(8, base=50.0)
    assert (changed.encode([5, 6]) == same.encode([5, 6])).all()


@pytest.mark.parametrize("axes", [2, 3])
def test_features_are_divided_among_the_axes(axes):
    sizes = (4, 3, 2)[:axes]
    grid = ids.from_grid(sizes)
    options = {"layout": "half", "base": 100.0, "cos_first": True}
    layer = SinusoidalPositions(axes * 7, axes=axes, **options)
    want = np.concatenate([reference(axis, 7, **options) for axis in grid], axis=1)
    np.testing.assert_allclose(layer.encode(grid), want, atol=2.5e-7)
    x = rng.standard_normal((2, grid.shape[1], axes * 7))
    np.testing.assert_allclose(layer(x, grid), x + want, atol=2.5e-7)
    per_row = np.stack([grid, grid + 1000], axis=1)
    np.testing.assert_allclose(layer(x, per_row)[1], layer(x[1], grid + 1000))
    real = layer.encode(grid + 0.5)
    want = np.concatenate([reference(a + 0.5, 7, **options) for a in grid], axis=1)
    np.testing.assert_allclose(real, want, atol=2.5e-7)


def test_paper_matches_distilbert_and_xlm():
    """transformers 5.22.2, computed shifted in float64."""
    out = torch.empty(600, 10)
    create_sinusoidal_embeddings(600, 10, out)
    got = SinusoidalPositions(10).encode(np.arange(600))
    np.testing.assert_allclose(got, out.numpy(), atol=2.5e-7)


@pytest.mark.parametrize("dim", [6, 7])
def test_matches_marian(dim):
    """transformers 5.22.2, computed shifted in float64; odd widths too."""
    want = MarianSinusoidalPositionalEmbedding(600, dim).create_weight().numpy()
    got = SinusoidalPositions.marian(dim).encode(np.arange(600))
    np.testing.assert_allclose(got, want, atol=2.5e-7)


@pytest.mark.parametrize("dim", [6, 7])
@pytest.mark.parametrize(
    "theirs",
    [M2M100SinusoidalPositionalEmbedding, Speech2TextSinusoidalPositionalEmbedding],
)
def test_matches_fairseq_with_padding_and_cache(theirs, dim):
    """transformers 5.22.2: tokens begin at padding_idx + 1 and padding gets zeros."""
    tokens = torch.tensor([[1, 1, 5, 6, 7], [5, 6, 7, 8, 1]])
    want = theirs(50, dim, padding_idx=1)(tokens, past_key_values_length=4).numpy()
    mask = tokens.numpy() != 1
    got = SinusoidalPositions.tensor2tensor(dim).encode(ids.from_mask(mask, offset=4) + 2)
    np.testing.assert_allclose(got * mask[..., None], want, atol=2e-5)


def test_matches_whisper():
    """transformers 5.22.2, where angles are float32: accurate to 1500 × 6e-8."""
    got = SinusoidalPositions.tensor2tensor(12, base=700.0).encode(np.arange(1500))
    want = sinusoids(1500, 12, max_timescale=700.0).numpy()
    np.testing.assert_allclose(got, want, atol=3e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_matches_x_transformers():
    """x-transformers 2.31.10: the half layout times embedding_dim ** -0.5."""
    from x_transformers.x_transformers import ScaledSinusoidalEmbedding

    theirs = ScaledSinusoidalEmbedding(12, theta=300)
    want = theirs(torch.zeros(1, 40, 12), offset=9).detach().numpy()
    layer = SinusoidalPositions.marian(12, base=300.0, scale=12**-0.5)
    np.testing.assert_allclose(layer(np.zeros((40, 12)), offset=9), want, atol=2e-6)


def test_matches_vit_mae_on_two_axes():
    """transformers 5.22.2, computed shifted in float64."""
    want = build_2d_sinusoidal_position_embedding(5, 7, 12, temperature=200.0).numpy()
    layer = SinusoidalPositions.marian(12, axes=2, base=200.0)
    np.testing.assert_allclose(layer.encode(ids.from_grid((5, 7))), want, atol=2.5e-7)


def test_matches_pi0_timesteps():
    """transformers 5.22.2, where an angle of 1570 is off by 1e-4."""
    config = types.SimpleNamespace(
        dit_config=types.SimpleNamespace(hidden_size=16), min_period=4e-3, max_period=4.0
    )
    time = np.linspace(0, 1, 9, dtype=np.float32)
    want = PI0TimestepEmbeddings(config)(torch.from_numpy(time)).numpy()
    layer = SinusoidalPositions.tensor2tensor(
        16, base=1000.0, frequency_scale=2 * np.pi / 4e-3
    )
    np.testing.assert_allclose(layer.encode(time), want, atol=3e-4)


def test_matches_qwen_omni_timesteps():
    """transformers 5.22.2, which multiplies the time by 1000, in float32."""
    time = np.linspace(0, 1, 9, dtype=np.float32)
    want = SinusPositionEmbedding(16)(torch.from_numpy(time)).numpy()
    layer = SinusoidalPositions.tensor2tensor(16, frequency_scale=1000.0)
    np.testing.assert_allclose(layer.encode(time), want, atol=1e-4)


@pytest.mark.parametrize("dim", [8, 9])
@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("flip", [False, True])
def test_timesteps_match_the_diffusion_formula(dim, shift, flip):
    """The arguments of diffusers' get_timestep_embedding, in float64."""
    time, period, scale = np.array([0.0, 1.0, 499.5, 999.0]), 5000.0, 2.0
    exponent = -np.log(period) * np.arange(dim // 2) / (dim // 2 - shift)
    angles = scale * time[:, None] * np.exp(exponent)
    blocks = [np.cos(angles), np.sin(angles)] if flip else [np.sin(angles), np.cos(angles)]
    want = np.pad(np.concatenate(blocks, axis=1), [(0, 0), (0, dim % 2)])
    layer = SinusoidalPositions.timestep(
        dim, base=period, shift=shift, cos_first=flip, frequency_scale=scale
    )
    np.testing.assert_allclose(layer.encode(time), want, atol=2.5e-7)


def test_output_does_not_depend_on_the_length():
    layer, x = SinusoidalPositions(6), rng.standard_normal((2, 300, 6)).astype("float32")
    assert (layer(x)[:, :5] == layer(x[:, :5])).all()
    assert (layer(x)[:, 290:] == layer(x[:, 290:], offset=290)).all()


def test_offset_is_a_number_or_one_per_row():
    layer, x = SinusoidalPositions(6), rng.standard_normal((2, 4, 6))
    for offset in (9_999_990, np.int32(7), np.array(7)):
        assert (layer(x, offset=offset) == layer(x, np.arange(4) + offset)).all()
    rows = layer(x, offset=[3, 70_000])
    assert (rows[0] == layer(x[0], offset=3)).all()
    assert (rows[1] == layer(x[1], offset=70_000)).all()
    assert np.abs(rows[1] - layer(x[1])).max() > 0.1


def test_left_padding_does_not_change_tokens():
    layer, x = SinusoidalPositions(6), rng.standard_normal((1, 7, 6))
    mask = np.array([[0, 0, 0, 1, 1, 1, 1]])
    padded = layer(x, ids.from_mask(mask))
    assert (padded[:, 3:] == layer(x[:, 3:])).all()


def test_packed_documents_equal_separate_calls():
    layer, x = SinusoidalPositions(6), rng.standard_normal((9, 6))
    packed = layer(x, ids.from_lengths([4, 2, 3]))
    parts = [layer(part) for part in np.split(x, [4, 6])]
    assert (packed == np.concatenate(parts)).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_vectors_are_rounded_once(dtype):
    layer = SinusoidalPositions(8)
    x = rng.standard_normal((4096, 8)).astype(dtype)
    want = (x.astype(np.float64) + reference(range(4096), 8)).astype(np.float32)
    got = layer(x)
    assert got.dtype == dtype
    # An error of 1e-6 before rounding may change the result by one ulp.
    ulp = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(got.astype(float), want, rtol=0.51 * ulp, atol=1e-6)
    encoded = layer.encode(np.arange(4096), dtype=dtype)
    assert (encoded == layer.encode(np.arange(4096)).astype(dtype)).all()


def test_float64_vectors_keep_full_precision():
    x = rng.standard_normal((3, 8))
    got = SinusoidalPositions(8)(x, [0, 0, 0])
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, x + [0, 1] * 4)


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64", "float16", "float64"]
)
def test_positions_of_any_dtype_are_the_same_positions(dtype):
    layer = SinusoidalPositions(4)
    got = layer.encode(np.array([0, 3, 100], dtype))
    np.testing.assert_allclose(got, layer.encode([0, 3, 100]), atol=2.5e-7)
    assert layer.encode(ml_dtypes.bfloat16(3)).shape == (4,)


def test_lists_empty_and_single_positions_are_accepted():
    layer = SinusoidalPositions(4)
    np.testing.assert_allclose(layer.encode(5), reference([5], 4)[0], atol=2.5e-7)
    assert layer.encode(np.zeros((2, 0), int)).shape == (2, 0, 4)
    assert layer(np.zeros((2, 0, 4))).shape == (2, 0, 4)
    got = layer([[0.0, 0.0, 0.0, 0.0]], [7])
    np.testing.assert_allclose(got, reference([7], 4), atol=2.5e-7)


def test_layers_do_not_share_state():
    a, b = SinusoidalPositions(8), SinusoidalPositions(8, base=5e5)
    before = a.encode([9, 10])
    np.testing.assert_allclose(
        b.encode([9, 10]), reference([9, 10], 8, base=5e5), atol=3e-7
    )
    assert (a.encode([9, 10]) == before).all()
    assert np.abs(a.encode([9]) - b.encode([9])).max() > 0.1


def test_config_is_plain_and_rebuilds_the_layer():
    options = {
        "base": 77.0,
        "layout": "half",
        "shift": 1.0,
        "cos_first": True,
        "scale": 0.5,
        "odd": "zero",
        "axes": 2,
        "frequency_scale": 3.0,
    }
    layer = SinusoidalPositions(10, **options)
    config = json.loads(json.dumps(layer.config()))
    assert config == {"embedding_dim": 10, **options}
    rebuilt = SinusoidalPositions(**config)
    grid = ids.from_grid((3, 4))
    assert (rebuilt.encode(grid) == layer.encode(grid)).all()
    assert not layer.parameters() and not layer.state_dict()
    assert "base=77.0" in repr(layer)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_gradient_of_x_is_the_gradient_of_the_output(dtype):
    x = rng.standard_normal((2, 3, 4)).astype(dtype)
    dy = rng.standard_normal((2, 3, 4))
    layer = SinusoidalPositions(4)
    y, pullback = layer.vjp(x, [4, 1, 2])
    assert (y == layer(x, [4, 1, 2])).all()
    dx = pullback(dy)["x"]
    assert dx.dtype == dtype
    np.testing.assert_array_equal(dx, dy.astype(dtype))


def test_gradient_matches_finite_differences():
    x, dy, layer = *rng.standard_normal((2, 2, 3, 4)), SinusoidalPositions(4, scale=2.0)
    got = layer.vjp(x, offset=[5, 9])[1](dy)["x"]
    want = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = 1e-3
        ahead, behind = (layer(x + s, offset=[5, 9]) for s in (step, -step))
        want[index] = ((ahead - behind) * dy).sum() / 2e-3
    np.testing.assert_allclose(got, want, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_layer_has_the_bits_of_the_core_functions(dtype):
    """The layer computes integer positions with a kernel."""
    layer = SinusoidalPositions(9, base=77.0, scale=0.3, layout="half")
    positions = np.array([*INTEGERS, -1, -255, -256, -65_536])
    tables = layer.tables
    if dtype == "float64":
        tables = float64_digit_tables(layer.turns, scale=layer.scale)
    cos, sin = sinusoidal.phases(positions, tables, layer.rates.astype(dtype))
    want = sinusoidal.encode(cos, sin, embedding_dim=9, layout="half")
    np.testing.assert_array_equal(layer.encode(positions, dtype=dtype), want)


# NumPy, torch and JAX


def features(positions, tables, rates):
    cos, sin = sinusoidal.phases(positions, tables, rates)
    out = [
        sinusoidal.encode(cos, sin, embedding_dim=dim, layout=layout, cos_first=flip)
        for dim in (5, 6, 7)
        for layout in ("half", "interleaved")
        for flip in (False, True)
    ]
    return [*out, sinusoidal.join_axes(out[0])]


@pytest.mark.parametrize("frequency_scale", [1.0, 900.0])
@pytest.mark.parametrize("real", [False, True])
def test_numpy_torch_and_jax_agree_eager_and_compiled(frequency_scale, real):
    tables, rates = sinusoidal.phase_tables(
        sinusoidal.frequencies(6, frequency_scale=frequency_scale), scale=0.7
    )
    assert len(tables) == (1 if frequency_scale == 1.0 else 2)
    positions = np.array([[0, 1, 65_537], [-300, 2**24 - 1, 7]])
    if real:
        positions = positions.astype(np.float32) + np.float32(0.25)
    want = features(positions, tables, rates)
    runs = {
        "torch": (torch.from_numpy, features),
        "compiled": (
            torch.from_numpy,
            torch.compile(features, fullgraph=True, backend="eager"),
        ),
        "jax": (jnp.asarray, features),
        "jit": (jnp.asarray, jax.jit(features)),
    }
    for name, (make, function) in runs.items():
        got = function(make(positions), make(tables), make(rates))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(one), other, atol=1e-6, err_msg=name)
            if name != "jit" and not real:
                np.testing.assert_array_equal(np.asarray(one), other, err_msg=name)


@pytest.mark.parametrize("frequency_scale", [1.0, 900.0])
def test_positions_out_of_range_are_nan_under_jit(frequency_scale):
    tables, rates = sinusoidal.phase_tables(
        sinusoidal.frequencies(4, frequency_scale=frequency_scale)
    )
    for positions in ([2**24, 5], [-(2**24), 5], [np.inf, 5.0], [np.nan, 5.0]):
        cos, sin = jax.jit(sinusoidal.phases)(jnp.asarray(positions), tables, rates)
        assert np.isnan(cos[0]).all() and np.isnan(sin[0]).all()
        assert np.isfinite(cos[1]).all() and np.isfinite(sin[1]).all()


def test_unsigned_positions_are_in_range_on_jax():
    tables, rates = sinusoidal.phase_tables(sinusoidal.frequencies(4))
    positions = np.array([0, 300], np.uint32)
    cos, _ = sinusoidal.phases(jnp.asarray(positions), tables, rates)
    np.testing.assert_array_equal(cos, sinusoidal.phases(positions, tables, rates)[0])


@pytest.mark.parametrize("frequency_scale", [1.0, 900.0])
def test_phases_have_the_derivatives_of_cosine_and_sine(frequency_scale):
    """d cos(wp) / dp is -w sin(wp), although integer parts come from tables."""
    frequencies = sinusoidal.frequencies(4, frequency_scale=frequency_scale)
    tables, rates = map(torch.from_numpy, sinusoidal.phase_tables(frequencies))
    p = torch.tensor([0.25, 12.5, -3.75], requires_grad=True)
    cos, sin = sinusoidal.phases(p, tables, rates)
    for values, derivative in ((cos, -sin), (sin, cos)):
        (got,) = torch.autograd.grad(values.sum(), p, retain_graph=True)
        want = (derivative.detach().double().numpy() * frequencies).sum(-1)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5)


# Errors


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("dim", "options", "want"),
    [
        (0, {}, "embedding_dim must be positive, got 0"),
        (7, {"axes": 2}, "embedding_dim must be a multiple of axes 2, got 7"),
        (4, {"axes": 0}, "axes must be positive, got 0"),
        (4, {"base": 0.0}, "base must be positive and finite, got 0.0"),
        (4, {"base": float("nan")}, "base must be positive and finite, got nan"),
        (
            4,
            {"frequency_scale": -1.0},
            "frequency_scale must be positive and finite, got -1",
        ),
        (4, {"shift": 2.0}, "shift must be smaller than 2.0, got 2.0"),
        (5, {"shift": 2.0, "odd": "zero"}, "shift must be smaller than 2, got 2.0"),
        (4, {"layout": "split"}, "layout must be 'interleaved' or 'half', got 'split'"),
        (4, {"odd": "cut"}, "odd must be 'sine' or 'zero', got 'cut'"),
        (1, {"odd": "zero"}, "embedding_dim must be at least 2 for odd='zero', got 1"),
    ],
)
def test_rejects_bad_arguments(dim, options, want):
    with pytest.raises(ValueError, match=want):
        SinusoidalPositions(dim, **options)


@pytest.mark.rejects
@pytest.mark.parametrize("bad", [2**24, -(2**24), 2.0**24, float("nan"), float("inf")])
def test_rejects_positions_out_of_range(bad):
    want = f"positions must be smaller than 16777216 in size, got {bad}"
    with pytest.raises(ValueError, match=want):
        SinusoidalPositions(4)(np.zeros((2, 4)), [1, bad])


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("x", "positions", "error", "want"),
    [
        (np.zeros((3, 5)), None, ValueError, r"shape \(..., length, 4\), got \(3, 5\)"),
        (np.zeros(4), None, ValueError, r"shape \(..., length, 4\), got \(4,\)"),
        (np.zeros((3, 4), int), None, TypeError, "x must be real, got int64"),
        (np.zeros((3, 4)), [True] * 3, TypeError, "integers or reals, got bool"),
        (np.zeros((3, 4)), [1, 2], ValueError, r"shape \(3,\), got \(2,\)"),
    ],
)
def test_rejects_bad_input(x, positions, error, want):
    with pytest.raises(error, match=want):
        SinusoidalPositions(4)(x, positions)


@pytest.mark.rejects
@pytest.mark.parametrize("offset", [True, [True, False], np.array([True, False])])
def test_rejects_an_offset_of_bools(offset):
    with pytest.raises(TypeError, match="offset must be integers or reals, got bool"):
        SinusoidalPositions(4)(np.zeros((2, 3, 4)), offset=offset)


@pytest.mark.rejects
def test_rejects_positions_that_are_not_one_per_axis():
    layer = SinusoidalPositions(4, axes=2)
    with pytest.raises(ValueError, match="must be given when axes is 2, got None"):
        layer(np.zeros((3, 4)))
    want = r"shape \(2, ...\), one coordinate for each of the axes, got \(3, 3\)"
    for call in (layer.encode, lambda p: layer(np.zeros((3, 4)), p)):
        with pytest.raises(ValueError, match=want):
            call(np.zeros((3, 3), int))


@pytest.mark.rejects
def test_rejects_positions_with_an_offset_and_a_gradient_of_another_shape():
    layer, x = SinusoidalPositions(4), np.zeros((2, 4))
    with pytest.raises(ValueError, match="give positions or offset, not both"):
        layer(x, [0, 1], offset=3)
    with pytest.raises(ValueError, match=r"dy must have shape \(2, 4\), got \(4,\)"):
        layer.vjp(x)[1](np.zeros(4))


@pytest.mark.rejects
def test_encode_rejects_an_unknown_layout():
    layout: Any = "neox"
    with pytest.raises(ValueError, match="got 'neox'"):
        sinusoidal.encode(np.ones(2), np.ones(2), embedding_dim=4, layout=layout)
