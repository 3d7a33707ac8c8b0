"""Phases: accurate at every position in range, the same bits in every library."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlayer import kernels
from firstlayer.positions.phases import (
    LIMIT,
    axial_digit_phases,
    digit_phases,
    digit_tables,
)
from firstlayer.positions.sinusoidal import encode

BOUND = 2.5e-7
EDGES = [0, 1, 255, 256, 65_535, 65_536, 2**24 - 1]
EDGES += [-p for p in EDGES] + [1_000_000, -9_999_999, 131_071]


def frequencies(pairs=64, base=10_000.0):
    return base ** (-np.arange(pairs) / pairs)


def exact(positions, w):
    # With 64 bits of mantissa, the angles below are accurate to 1e-12.
    angles = np.asarray(positions)[..., None].astype(np.longdouble) * w
    return np.cos(angles).astype(float), np.sin(angles).astype(float)


def at(positions, w, dtype: type = np.float32):
    tables = digit_tables(w).astype(dtype)
    return digit_phases(np.asarray(positions), tables, w.astype(dtype))


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 100.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_integer_positions_are_accurate_up_to_the_limit(base, dtype):
    w = frequencies(base=base)
    random = np.random.default_rng(0).integers(-LIMIT + 1, LIMIT, 20_000)
    positions = np.concatenate([EDGES, random])
    for got, want in zip(at(positions, w, dtype), exact(positions, w), strict=True):
        assert got.dtype == dtype
        assert np.abs(got - want).max() <= BOUND


def test_phases_match_forty_digit_arithmetic():
    w = frequencies(8, base=500_000.0)
    cos, sin = at([2**24 - 1, -7_654_321], w)
    with mpmath.workdps(40):
        for row, position in enumerate([2**24 - 1, -7_654_321]):
            for pair, frequency in enumerate(w):
                angle = mpmath.mpf(position) * mpmath.mpf(float(frequency))
                assert abs(float(mpmath.cos(angle)) - cos[row, pair]) <= BOUND
                assert abs(float(mpmath.sin(angle)) - sin[row, pair]) <= BOUND


def test_tables_are_float64_rounded_once():
    w = frequencies()
    tables = digit_tables(w)
    assert tables.shape == (2, 3, 256, 64) and tables.dtype == np.float32
    for level in range(3):
        want = exact(np.arange(256) * 256**level, w)
        np.testing.assert_allclose(tables[:, level], want, atol=2.0**-25 + 1e-9, rtol=0)


HALF_RANGE = st.integers(-LIMIT // 2 + 1, LIMIT // 2 - 1)


@given(HALF_RANGE, HALF_RANGE)
def test_phase_of_a_sum_is_the_product_of_phases(first, second):
    c, s = at([first, second, first + second], frequencies(16))
    np.testing.assert_allclose(c[2], c[0] * c[1] - s[0] * s[1], atol=4 * BOUND)
    np.testing.assert_allclose(s[2], s[0] * c[1] + c[0] * s[1], atol=4 * BOUND)


def test_phases_of_negative_positions_are_exact_conjugates():
    w, positions = frequencies(), np.abs(EDGES)
    (c, s), (back_c, back_s) = at(positions, w), at(-positions, w)
    np.testing.assert_array_equal(back_c, c)
    np.testing.assert_array_equal(back_s, -s)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_real_positions_are_accurate(dtype, sign):
    positions = sign * np.array([
        0.0,
        0.25,
        0.5,
        3.75,
        255.5,
        256.25,
        65_535.875,
        2.0**23 + 1,
    ])
    w = frequencies(base=500_000.0)
    for got, want in zip(
        at(positions.astype(dtype), w, dtype), exact(positions, w), strict=True
    ):
        assert got.dtype == dtype
        assert np.abs(got - want).max() <= BOUND


def test_large_float64_positions_keep_their_fraction():
    w, positions = frequencies(), np.array([12_345_678.123456, -9_999_999.987654])
    cos, sin = at(positions, w, np.float64)
    want = exact(positions, w)
    assert max(np.abs(cos - want[0]).max(), np.abs(sin - want[1]).max()) <= BOUND


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
def test_half_precision_positions_equal_their_float32_values(dtype):
    import ml_dtypes

    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    positions, w = np.array([0.5, 200.0, -3.25], dtype), frequencies(8)
    for got, want in zip(at(positions, w), at(positions.astype("f4"), w), strict=True):
        np.testing.assert_array_equal(got, want)


OUT_OF_RANGE = {
    "int32": [LIMIT, -LIMIT, 2**31 - 1, -(2**31)],
    "int64": [LIMIT, -LIMIT, 2**63 - 1, -(2**63), 2**32, 2**32 + 1],
    "uint32": [LIMIT, 2**32 - 1],
    "uint64": [LIMIT, 2**64 - 1, 2**32 + 1],
    "float32": [LIMIT, -LIMIT, np.inf, -np.inf, np.nan],
    "float64": [LIMIT, -LIMIT, 1e300, np.nan],
}


@pytest.mark.parametrize("dtype", OUT_OF_RANGE)
def test_positions_out_of_range_are_nan_and_others_are_not(dtype):
    w = frequencies(4)
    cos, sin = at(np.array([*OUT_OF_RANGE[dtype], 7], dtype), w)
    assert np.isnan(cos[:-1]).all() and np.isnan(sin[:-1]).all()
    np.testing.assert_array_equal(np.stack([cos, sin])[:, -1:], np.stack(at([7], w)))


IN_RANGE = {
    "int8": [-128, 127, 0],
    "uint8": [0, 255, 128],
    "int16": [-(2**15), 2**15 - 1],
    "uint16": [0, 2**16 - 1],
    "uint32": [0, LIMIT - 1],
    "uint64": [0, LIMIT - 1],
}


@pytest.mark.parametrize("dtype", IN_RANGE)
def test_every_integer_dtype_gives_the_same_bits(dtype):
    w = frequencies(8)
    for got, want in zip(
        at(np.array(IN_RANGE[dtype], dtype), w), at(IN_RANGE[dtype], w), strict=True
    ):
        np.testing.assert_array_equal(got, want)


LIBRARIES = {"torch": torch.from_numpy, "jax": jnp.asarray}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_integer_positions_have_the_same_bits_in_every_library(library, dtype):
    wrap, w = LIBRARIES[library], frequencies()
    positions = np.array(EDGES if dtype == "int32" else IN_RANGE[dtype], dtype)
    got = digit_phases(wrap(positions), wrap(digit_tables(w)), wrap(w.astype("float32")))
    for mine, want in zip(got, at(positions, w), strict=True):
        np.testing.assert_array_equal(np.asarray(mine).view("int32"), want.view("int32"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_real_positions_agree_in_every_library(library):
    wrap, w = LIBRARIES[library], frequencies()
    positions = np.array([0.5, -1234.25, 65_536.5, np.nan, LIMIT], "float32")
    got = digit_phases(wrap(positions), wrap(digit_tables(w)), wrap(w.astype("float32")))
    for mine, want in zip(got, at(positions, w), strict=True):
        np.testing.assert_allclose(np.asarray(mine), want, atol=BOUND)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_smallest_int32_is_out_of_range_in_every_library(library):
    wrap, w = LIBRARIES[library], frequencies(4)
    positions = np.array([-(2**31), 2**31 - 1, LIMIT, -LIMIT, 5], "int32")
    cos, _ = digit_phases(wrap(positions), wrap(digit_tables(w)), wrap(w.astype("float32")))
    assert np.isnan(np.asarray(cos)).all(axis=1).tolist() == [True] * 4 + [False]


def test_phases_compile():
    w, positions = frequencies(8), np.array(EDGES, "int32")
    args = (digit_tables(w), w.astype("float32"))
    want = at(positions, w)
    compiled = torch.compile(digit_phases, fullgraph=True, backend="eager")
    got = compiled(torch.from_numpy(positions), *map(torch.from_numpy, args))
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other)
    for mine, other in zip(jax.jit(digit_phases)(positions, *args), want, strict=True):
        np.testing.assert_allclose(mine, other, atol=BOUND)


def test_vmap_equals_the_batched_call():
    w, positions = frequencies(8), jnp.arange(6).reshape(2, 3)
    tables, rates = jnp.asarray(digit_tables(w)), jnp.asarray(w, jnp.float32)
    got = jax.vmap(lambda p: digit_phases(p, tables, rates))(positions)
    for mine, want in zip(got, digit_phases(positions, tables, rates), strict=True):
        np.testing.assert_array_equal(mine, want)


def test_axial_phases_add_the_angles_of_all_coordinates():
    w = np.stack([frequencies(8), frequencies(8, base=100.0) / 3, np.zeros(8)])
    positions = np.random.default_rng(1).integers(-70_000, 70_000, (3, 4, 5))
    cos, sin = axial_digit_phases(positions, digit_tables(w), w.astype("float32"))
    angles = np.tensordot(
        positions.astype(np.longdouble), w.astype(np.longdouble), axes=(0, 0)
    )
    np.testing.assert_allclose(cos, np.cos(angles).astype(float), atol=2 * BOUND)
    np.testing.assert_allclose(sin, np.sin(angles).astype(float), atol=2 * BOUND)


@pytest.mark.parametrize("library", LIBRARIES)
def test_axial_phases_have_the_same_bits_in_every_library(library):
    wrap, w = LIBRARIES[library], np.stack([frequencies(4), frequencies(4) / 7])
    positions = np.array([[3, 300, 70_000], [-1, 2, 5]], "int32")
    want = axial_digit_phases(positions, digit_tables(w), w.astype("float32"))
    got = axial_digit_phases(
        wrap(positions), wrap(digit_tables(w)), wrap(w.astype("float32"))
    )
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), other)


@pytest.mark.parametrize("axes", [None, 1, 3])
def test_the_factor_multiplies_every_phase_once(axes):
    w = frequencies(8) if axes is None else np.stack([frequencies(8)] * axes)
    positions = np.array([0, 5, 300, 70_000, -9])
    tables, rates = digit_tables(w, factor=1.25), w.astype("float32")
    if axes is None:
        cos, sin = digit_phases(positions, tables, rates)
    else:
        cos, sin = axial_digit_phases(np.stack([positions] * axes), tables, rates)
    np.testing.assert_allclose(np.hypot(cos, sin), 1.25, rtol=1e-6)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = kernels.get_num_threads()
    kernels.set_num_threads(request.param)
    yield
    kernels.set_num_threads(before)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 1, 9_000])
def test_the_kernel_has_the_bits_of_digit_phases(dtype, count, threads):
    rng, w = np.random.default_rng(2), frequencies()
    positions = rng.integers(-LIMIT + 1, LIMIT, count)
    if count > 100:
        positions[:8] = [LIMIT, -LIMIT, 2**63 - 1, -(2**63), 0, 255, 256, 65_536]
    tables = digit_tables(w, factor=1.5).astype(dtype)
    want = np.concatenate(digit_phases(positions, tables, w.astype(dtype)), axis=-1)
    got = kernels.digit_phases(positions, tables)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("cos_first", [False, True])
@pytest.mark.parametrize("width", [14, 15, 13])
def test_the_kernel_has_the_bits_of_encode(layout, cos_first, width, threads):
    rng, w = np.random.default_rng(3), np.array([1.0, 0.3, 0.05, 0.01, 3e-3, 2e-4, 1e-5])
    positions = rng.integers(-LIMIT + 1, LIMIT, 20_000)
    positions[:6] = [0, 255, 256, 65_535, 65_536, -1]
    tables = digit_tables(w, factor=0.5).astype(np.float32)
    cos, sin = digit_phases(positions, tables, w.astype(np.float32))
    want = encode(cos, sin, embedding_dim=width, layout=layout, cos_first=cos_first)
    got = kernels.sinusoid_features(
        positions,
        tables,
        width=width,
        interleaved=layout == "interleaved",
        cos_first=cos_first,
    )
    np.testing.assert_array_equal(got, want)
