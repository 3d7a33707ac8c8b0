"""Float64 phases: accurate to float64 at every position, in every front end and mode."""

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import firstlayer.equinox as in_equinox
import firstlayer.numpy as in_numpy
import firstlayer.torch as in_torch
from firstlayer import kernels
from firstlayer.positions.axial import qwen_axial_frequencies
from firstlayer.positions.frequencies import (
    inverse_frequencies,
    layer_frequencies,
    section_frequencies,
)
from firstlayer.positions.phases import LIMIT, digit_phases
from firstlayer.positions.scaling import NTK, DynamicNTK, Linear, Llama3, YaRN
from firstlayer.positions.sinusoidal import frequencies as sinusoidal_frequencies
from firstlayer.positions.turns import (
    cycle_words,
    float64_digit_tables,
    float64_phases,
    turn_constants,
)
from firstlayer.positions.xpos import (
    float64_xpos_constants,
    float64_xpos_phases,
    xpos_exponents,
    xpos_reach,
)
from tests.support.float32_phases import hashes
from tests.support.float64_phases import exact_phases, exact_powers

DATA = Path(__file__).parent.parent / "data" / "float32-phases"
# Cosines and sines computed directly, and products of the phases of three digits.
BOUND, PRODUCT_BOUND = 4e-16, 2e-15
FIRST = np.arange(-3, 4)
EDGES = np.array([255, 256, 65_535, 65_536, 1_234_567, 2**24 - 1])
WHOLE = np.concatenate([FIRST, EDGES, -EDGES])
REALS = np.array([0.5, -0.1, 2.9, 1e-30, 1 / 3, -70_000.25, 12_345_678.123456, 2**24 - 0.1])
POSITIONS = {"whole": WHOLE, "real": REALS}
FRONT_ENDS = ("numpy", "torch", "torch, compiled", "equinox", "equinox, jit")
MODULES: dict[str, Any] = {"numpy": in_numpy, "torch": in_torch, "equinox": in_equinox}
SCALINGS = [
    None,
    Linear(factor=3.0),
    NTK(factor=2.5),
    DynamicNTK(factor=2.0, original_length=64).at_length(1000),
    Llama3(factor=8.0, original_length=512, low_factor=1.5, high_factor=5.0),
    YaRN(factor=4.0, original_length=4096),
]

wholes = st.integers(-LIMIT + 1, LIMIT - 1)
reals = st.floats(-LIMIT, LIMIT, exclude_min=True, exclude_max=True)
small = st.floats(-3.0, 3.0)


def worst(got: Any, want: Any) -> float:
    """Return the largest absolute difference of two pairs of arrays."""
    pairs = zip(got, want, strict=True)
    return max(float(np.abs(np.asarray(g) - w).max(initial=0.0)) for g, w in pairs)


def exact(positions: np.ndarray, frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return exact_phases(np.asarray(positions)[..., None], frequencies[:, None])


# ------------------------------------------------------------------ the core functions


@given(
    st.lists(wholes | reals | small, min_size=1, max_size=5),
    st.sampled_from([1.5, 100.0, 10_000.0, 5e5, 1e7]),
    st.sampled_from(SCALINGS),
)
def test_every_position_is_accurate(positions, base, scaling):
    w, _ = layer_frequencies(8, base=base, scaling=scaling)
    constants, at = turn_constants(w), np.array(positions)
    assert worst(float64_phases(at, constants), exact(at, w)) <= BOUND


@given(
    st.lists(wholes | reals, min_size=1, max_size=3),
    st.lists(st.floats(-65_536.0, 65_536.0), min_size=1, max_size=4),
)
def test_every_frequency_is_accurate(positions, frequencies):
    w, at = np.array(frequencies), np.array(positions)
    assert worst(float64_phases(at, turn_constants(w)), exact(at, w)) <= BOUND


@given(st.lists(wholes, min_size=1, max_size=5), st.sampled_from([1.5, 10_000.0, 1e7]))
def test_products_of_digit_phases_are_accurate(positions, base):
    w, at = inverse_frequencies(8, base=base), np.array(positions)
    tables = float64_digit_tables(turn_constants(w))[0]
    got = np.split(kernels.digit_phases(at, tables), 2, axis=-1)
    assert worst(got, exact(at, w)) <= PRODUCT_BOUND
    assert worst(digit_phases(at, tables, w), got) == 0.0
    first = np.split(kernels.digit_phases(FIRST, tables), 2, axis=-1)
    assert worst(first, exact(FIRST, w)) <= BOUND


def test_sines_of_small_angles_are_relatively_accurate():
    at, w = np.array([1, 3, -7, 0.3, 1e-12]), np.array([1e-3, 1e-7, 1e-30])
    _, sin = float64_phases(at, turn_constants(w))
    np.testing.assert_allclose(sin, exact(at, w)[1], rtol=4e-16)


def test_the_scale_multiplies_every_phase():
    w = inverse_frequencies(8)
    plain = float64_phases(WHOLE, turn_constants(w))
    scaled = float64_phases(WHOLE, turn_constants(w), scale=1.25)
    assert worst(scaled, [1.25 * part for part in plain]) == 0.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4))
def test_words_of_cycles_are_exact(cycles):
    from fractions import Fraction

    words = cycle_words(np.array(cycles))
    for number, *three in zip(cycles, *words.tolist(), strict=True):
        fixed = sum(Fraction(word, 2 ** (32 * (i + 1))) for i, word in enumerate(three))
        rest = (Fraction(number) - fixed) % 1
        assert min(rest, 1 - rest) < Fraction(1, 2**96)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint32", "int64", "uint64"])
def test_positions_out_of_range_are_nan_for_every_dtype(dtype):
    info, constants = np.iinfo(dtype), turn_constants(np.array([1.0, 0.1]))
    at = np.array([info.min, info.max, 7, 100], dtype)
    cos, sin = float64_phases(at, constants)
    outside = [not -LIMIT < int(p) < LIMIT for p in at]
    assert np.isnan(cos).any(axis=1).tolist() == outside
    assert worst([cos[2:], sin[2:]], exact(at[2:], np.array([1.0, 0.1]))) <= BOUND


def test_nan_and_infinite_positions_are_nan():
    at = np.array([np.nan, np.inf, -np.inf, LIMIT, 1e300, 0.5])
    for part in float64_phases(at, turn_constants(np.array([1.0]))):
        assert np.isnan(part[:, 0]).tolist() == [True] * 5 + [False]


# ---------------------------------------------------------------------- the front ends


def run(front_end: str, name: str, options: dict[str, Any], call: Any, *arrays: Any) -> Any:
    """Return ``call(layer, *arrays)`` as NumPy arrays, eager or compiled."""
    library, _, mode = front_end.partition(", ")
    layer = getattr(MODULES[library], name)(**options)
    if library == "numpy":
        return call(layer, *arrays)
    if library == "torch":
        function = call
        if mode:
            torch._dynamo.reset()
            function = torch.compile(call, fullgraph=True)
        with torch.no_grad(), warnings.catch_warnings():
            # Inductor imports modules that use deprecated parts of torch.
            warnings.simplefilter("ignore", DeprecationWarning)
            out = function(layer, *map(torch.from_numpy, arrays))
        return jax.tree.map(lambda x: x.numpy(), out)
    with jax.enable_x64(True):
        function = eqx.filter_jit(call) if mode else call
        out = function(layer, *map(jnp.asarray, arrays))
        return jax.tree.map(np.asarray, out)


def rotate_ones(layer: Any, x: Any, at: Any) -> Any:
    return layer(x, at)


def rotated(w: np.ndarray, cos: np.ndarray, sin: np.ndarray, layout: str) -> np.ndarray:
    """Return all-ones vectors rotated by the exact phases."""
    parts = [cos - sin, cos + sin]
    if layout == "interleaved":
        return np.stack(parts, axis=-1).reshape(*cos.shape[:-1], 2 * len(w))
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_to_half"])
@pytest.mark.parametrize("front_end", ["numpy", "torch", "equinox"])
@pytest.mark.parametrize("scaling", [SCALINGS[2], SCALINGS[-1]], ids=["ntk", "yarn"])
def test_rotary_is_accurate_in_every_layout(front_end, layout, scaling):
    options = {"head_dim": 8, "base": 5e5, "layout": layout, "scaling": scaling}
    w, factor = layer_frequencies(8, base=5e5, scaling=scaling)
    for at in POSITIONS.values():
        got = run(front_end, "RotaryPositions", options, rotate_ones, ones(at, 8), at)
        want = factor * rotated(w, *exact(at, w), layout)
        assert got.dtype == np.float64
        assert np.abs(got - want).max() <= 2 * PRODUCT_BOUND


def ones(at: np.ndarray, width: int) -> np.ndarray:
    return np.ones((len(at), width))


def call_phases(layer: Any, at: Any) -> Any:
    return layer.phases(at, dtype=at.dtype if is_float64(at) else float64_of(at))


def is_float64(x: Any) -> bool:
    return "float64" in str(x.dtype)


def float64_of(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.Tensor) else np.float64


def of_each(call: Any) -> Any:
    """Return ``call`` of several positions: Inductor takes seconds for every program."""
    return lambda layer, *positions: [call(layer, at) for at in positions]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_rotary_phases_are_accurate(front_end):
    w, options = inverse_frequencies(8, base=77.0), {"head_dim": 8, "base": 77.0}
    calls = of_each(call_phases)
    results = run(front_end, "RotaryPositions", options, calls, WHOLE, REALS)
    for got, at in zip(results, (WHOLE, REALS), strict=True):
        assert worst(got, exact(at, w)) <= PRODUCT_BOUND
    first = [part[: len(FIRST)] for part in results[0]]
    assert worst(first, exact(FIRST, w)) <= BOUND


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("kind", ["sections", "grid"])
def test_axial_rotary_phases_are_accurate(front_end, kind):
    if kind == "sections":
        w = section_frequencies(inverse_frequencies(8), [2, 1, 1])
        options: dict[str, Any] = {"head_dim": 8, "sections": [2, 1, 1]}
    else:
        w = qwen_axial_frequencies(8, base=9.0)
        options = {"head_dim": 8, "frequencies": w}
    at = np.stack([np.roll(WHOLE, k) + 0.25 * k for k in range(len(w))])
    got = run(front_end, "RotaryPositions", options, call_phases, at)
    assert worst(got, exact_phases(at.T, w.T)) <= BOUND


def encode_float64(layer: Any, at: Any) -> Any:
    return layer.encode(at, dtype=float64_of(at))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_sinusoidal_is_accurate(front_end):
    w = 30.0 * 500.0 ** -(np.arange(4) / 3)
    options = {
        "embedding_dim": 9,
        "base": 500.0,
        "layout": "half",
        "shift": 1.0,
        "odd": "zero",
        "frequency_scale": 30.0,
        "scale": 0.5,
    }
    calls = of_each(encode_float64)
    results = run(front_end, "SinusoidalPositions", options, calls, WHOLE, REALS)
    for got, at in zip(results, (WHOLE, REALS), strict=True):
        cos, sin = exact(at, w)
        want = 0.5 * np.concatenate([sin, cos, np.zeros((len(at), 1))], axis=-1)
        # A frequency that NumPy's power rounds differently here would be off by 1e-7.
        assert np.abs(got - want).max() <= PRODUCT_BOUND


@pytest.mark.parametrize("front_end", ["numpy", "torch", "equinox"])
def test_sinusoidal_with_axes_is_accurate(front_end):
    at, w = np.stack([WHOLE, WHOLE[::-1]]), 100.0 ** -(np.arange(2) / 2)
    options = {"embedding_dim": 8, "axes": 2, "base": 100.0}
    got = run(front_end, "SinusoidalPositions", options, encode_float64, at)
    want = []
    for row in at:
        cos, sin = exact(row, w)
        want.append(np.stack([sin, cos], axis=-1).reshape(len(row), 4))
    assert np.abs(got - np.concatenate(want, axis=-1)).max() <= PRODUCT_BOUND


def call(layer: Any, x: Any) -> Any:
    return layer(x)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_fourier_features_are_accurate(front_end):
    rng = np.random.default_rng(0)
    matrix = 40.0 * rng.standard_normal((6, 3))
    points = np.concatenate([
        rng.uniform(-3, 3, (5, 3)),
        rng.uniform(-LIMIT, LIMIT, (5, 3)),
        rng.integers(-LIMIT, LIMIT, (5, 3)) / 1.0,
    ])
    got = run(front_end, "FourierFeatures", {"matrix": matrix}, call, points)
    want = np.concatenate(exact_phases(points, matrix, turns=True), axis=-1)
    assert np.abs(got - want).max() <= BOUND


def call_ids(layer: Any, ids: Any, at: Any) -> Any:
    return layer(ids, positions=at)


@pytest.mark.parametrize("front_end", ["numpy", "torch", "equinox"])
def test_embedding_layer_adds_accurate_positions(front_end):
    library, dtypes = MODULES[front_end], {"torch": torch.float64}
    options = {"position": "sinusoidal", "dtype": dtypes.get(front_end, np.float64)}
    if front_end == "equinox":
        options["key"] = jax.random.key(0)
    w = 10_000.0 ** -(np.arange(3) / 3)
    cos, sin = exact(WHOLE, w)
    want = np.stack([sin, cos], axis=-1).reshape(len(WHOLE), 6)
    ids = np.arange(len(WHOLE)) % 5
    with jax.enable_x64(True):
        layer = library.EmbeddingLayer(5, 6, **options)
        weight = layer.token.weight
        weight = weight.detach() if front_end == "torch" else weight
        made = torch.from_numpy if front_end == "torch" else np.asarray
        out = layer(made(ids), positions=made(WHOLE))
        got = np.asarray(out.detach() if front_end == "torch" else out)
        assert got.dtype == np.float64
        assert np.abs(got - (np.asarray(weight)[ids] + want)).max() <= PRODUCT_BOUND


# --------------------------------------------------------------------------- gradients


def test_torch_gradients_are_those_of_the_exact_phases():
    layer = in_torch.RotaryPositions(6, base=50.0, scaling=SCALINGS[-1], heads_axis=-3)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    at = torch.tensor([0.3, 7.25, -10.5, 3.875, 9.0], dtype=torch.float64)
    at.requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(layer, (x, at), eps=1e-5, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("position", [0.3, -7.25, 65_536.75])
def test_derivatives_by_position_are_accurate(position):
    w = inverse_frequencies(6, base=50.0)
    cos, sin = exact(np.array([position]), w)
    want = w * np.stack([-sin[0], cos[0]])
    layer = in_torch.RotaryPositions(6, base=50.0)
    at = torch.tensor(position, dtype=torch.float64)
    got = torch.func.jacrev(lambda p: torch.stack(layer.phases(p, dtype=p.dtype)))(at)
    np.testing.assert_allclose(got, want, atol=1e-15, rtol=0)
    with jax.enable_x64(True):
        jax_layer = in_equinox.RotaryPositions(6, base=50.0)

        def phases(p):
            return jnp.stack(jax_layer.phases(p, dtype=jnp.float64))

        for derivative in (jax.jacrev, jax.jacfwd):
            got = derivative(phases)(jnp.asarray(position, jnp.float64))
            np.testing.assert_allclose(got, want, atol=1e-15, rtol=0)


def test_fourier_gradients_are_accurate():
    matrix = np.array([[3.0, -0.7], [40.0, 0.01]])
    points = np.array([[0.3, 2.0], [-70_000.25, 1e5]])
    cos, sin = exact_phases(points, matrix, turns=True)
    rates = 2 * np.pi * matrix
    want = np.einsum("np,pa->na", cos - sin, rates)
    x = torch.from_numpy(points).requires_grad_()
    in_torch.FourierFeatures(matrix)(x).sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad, want, atol=1e-12, rtol=0)
    y, pullback = in_numpy.FourierFeatures(matrix).vjp(points)
    np.testing.assert_allclose(pullback(np.ones_like(y))["x"], want, atol=1e-12, rtol=0)
    with jax.enable_x64(True):
        layer = in_equinox.FourierFeatures(matrix)
        got = jax.grad(lambda p: layer(p).sum())(jnp.asarray(points))
        np.testing.assert_allclose(got, want, atol=1e-12, rtol=0)


# ------------------------------------------------------------- copies, casts and modes


def test_torch_layers_stay_accurate_through_copies_casts_and_pickles():
    w, at = inverse_frequencies(8), torch.from_numpy(WHOLE)
    layer = in_torch.RotaryPositions(8)
    x = torch.ones(len(WHOLE), 8, dtype=torch.float64)
    before = layer(x, at)
    size = len(pickle.dumps(in_torch.RotaryPositions(8)))
    assert len(pickle.dumps(layer)) == size
    assert not layer.state_dict()
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        copy.deepcopy(layer).half().double(),
        copy.deepcopy(layer).to("meta").to_empty(device="cpu"),
    ):
        assert torch.equal(other(x, at), before)
        got = other.phases(at.double() + 0.5, dtype=torch.float64)
        assert worst(got, exact(WHOLE + 0.5, w)) <= BOUND


def test_torch_layers_repair_cast_constants():
    layer = in_torch.RotaryPositions(8)
    for buffer in layer.buffers():
        buffer.data = buffer.data.to(torch.float16)
    got = layer.phases(torch.from_numpy(REALS), dtype=torch.float64)
    assert worst(got, exact(REALS, inverse_frequencies(8))) <= BOUND


def test_one_compiled_function_serves_layers_of_different_bases():
    torch._dynamo.reset()
    compiled = torch.compile(call_phases, fullgraph=True, backend="eager")
    at = torch.from_numpy(WHOLE)
    for base in (10.0, 500.0):
        got = compiled(in_torch.RotaryPositions(8, base=base), at)
        want = exact(WHOLE, inverse_frequencies(8, base=base))
        assert worst(got, want) <= BOUND


def test_exported_program_is_accurate():
    x = torch.ones(len(WHOLE), 8, dtype=torch.float64)
    arguments = x, torch.from_numpy(WHOLE)
    layer = in_torch.RotaryPositions(8)
    for strict in (True, False):
        program = torch.export.export(layer, arguments, strict=strict).module()
        got = program(*arguments)
        w = inverse_frequencies(8)
        want = rotated(w, *exact(WHOLE, w), "half")
        assert np.abs(got.detach().numpy() - want).max() <= 2 * BOUND


@settings(max_examples=20)
@given(st.lists(wholes | reals, min_size=1, max_size=4))
def test_vmap_equals_the_batched_call(positions):
    layer, at = in_torch.RotaryPositions(8), torch.tensor(positions, dtype=torch.float64)
    got = torch.func.vmap(lambda p: torch.stack(layer.phases(p, dtype=p.dtype)))(at)
    want = torch.stack(layer.phases(at, dtype=torch.float64), dim=1)
    assert torch.equal(got, want)


def test_alibi_slopes_are_float64_in_torch():
    slopes = in_numpy.AlibiBias(12, max_bias=7.0, factor=3.0).slopes
    layer = in_torch.AlibiBias(12, max_bias=7.0, factor=3.0)
    got = layer.bias([1], [0], dtype=torch.float64)
    np.testing.assert_array_equal(got[:, 0, 0].numpy(), -slopes)
    narrow = layer.bias([1], [0], dtype=torch.float32)
    np.testing.assert_array_equal(narrow[:, 0, 0].numpy(), -slopes.astype(np.float32))


# ----------------------------------------------------------------------------- float32


def test_float32_outputs_keep_their_bits():
    assert hashes() == json.loads((DATA / "sha256.json").read_text())


def test_float32_bits_do_not_depend_on_float64_use():
    layer, x = in_torch.RotaryPositions(8), torch.ones(len(WHOLE), 8)
    at = torch.from_numpy(WHOLE)
    before = layer(x, at)
    layer(x.double(), at)
    assert torch.equal(layer(x, at), before)


def test_manifest_describes_every_file():
    manifest = json.loads((DATA / "manifest.json").read_text())
    files = {path.name for path in DATA.iterdir()} - {"manifest.json"}
    assert manifest["files"].keys() == files


# ------------------------------------------------- layers with more than phases

XPOS_BOUND = 2e-15


@given(
    st.lists(st.integers(-900, 900) | st.floats(-900.0, 900.0), min_size=1, max_size=5),
    st.sampled_from([30.0, 512.0, 1e6]),
    st.sampled_from([0, 77, -123]),
    st.booleans(),
)
def test_xpos_phases_are_relatively_accurate(positions, scale_base, center, keys):
    at, reach = np.array(positions), xpos_reach(scale_base)
    at = np.where(np.abs(at - center) <= reach, at, center)
    constants = float64_xpos_constants(8, base=500.0, scale_base=scale_base)
    got = float64_xpos_phases(at, *constants, center=center, reach=reach, keys=keys)
    exponents = xpos_exponents(8, scale_base=scale_base)
    scale = exact_powers(at, exponents) / exact_powers(np.array([center]), exponents)
    scale = 1 / scale if keys else scale
    want = exact(at, inverse_frequencies(8, base=500.0))
    for part, phase in zip(got, want, strict=True):
        assert (np.abs(part / scale - phase) <= XPOS_BOUND).all()


def rotate_keys(layer: Any, x: Any, *positions: Any) -> Any:
    return [layer(x, at, keys=True) for at in positions]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_xpos_is_accurate(front_end):
    whole = np.array([0, 1, -1, 255, 256, 999, 16_900, -16_900])
    real = whole + np.array([0.5, 1 / 3, -0.1, 0.7] * 2)
    options = {"head_dim": 8, "base": 5e5, "center": 40, "layout": "interleaved"}
    x, w, exponents = ones(whole, 8), inverse_frequencies(8, base=5e5), xpos_exponents(8)
    results = run(front_end, "XPosRotary", options, rotate_keys, x, whole, real)
    for got, at in zip(results, (whole, real), strict=True):
        scale = exact_powers(at, -exponents) * exact_powers(np.array([40]), exponents)
        cos, sin = exact(at, w)
        want = rotated(w, cos, sin, "interleaved")
        assert got.dtype == np.float64
        assert np.abs(got / np.repeat(scale, 2, axis=1) - want).max() <= 2 * XPOS_BOUND


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_transformer_xl_scores_are_accurate(front_end):
    w = sinusoidal_frequencies(4, base=500.0)
    cos, sin = exact(np.arange(70_000, 69_990, -1), w)
    # Each head multiplies all-ones queries with one feature: the sines, then the cosines.
    zeros = np.zeros((4, 1), np.float32)
    parameters = {"weight": np.eye(4, dtype=np.float32), "u": zeros, "v": zeros + 1}
    options = {"num_heads": 4, "head_dim": 1, "base": 500.0, **parameters}
    q, k = np.zeros((4, 1, 1)), np.ones((4, 10, 1))

    def far(layer: Any, q: Any, k: Any) -> Any:
        return layer.scores(q, k, offset=70_000)

    got = run(front_end, "TransformerXLScores", options, far, q, k)
    want = np.concatenate([sin, cos], axis=-1).T[:, None]
    assert got.dtype == np.float64 and np.abs(got - want).max() <= BOUND
