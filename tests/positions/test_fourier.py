"""Fourier features: accuracy, conventions, gradients, libraries, errors."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from firstlayer.numpy.fourier import FourierFeatures
from firstlayer.positions import fourier
from tests.support.gradients import central_difference

rng = np.random.default_rng(0)
LAYOUT: Any = "x"


def reference(coordinates, matrix):
    """Return cosines and sines of the angles 2πBv, in long double."""
    angles = np.asarray(coordinates, np.longdouble) @ (2 * np.pi * matrix.T)
    return np.cos(angles).astype(float), np.sin(angles).astype(float)


@pytest.mark.parametrize("std", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_features_are_cosines_then_sines_of_every_pair(std, axes):
    layer = FourierFeatures.gaussian(16, axes=axes, std=std, rng=1)
    v = rng.uniform(-2, 2, (5, 7, axes)).astype(np.float32)
    want = np.concatenate(reference(v, layer.matrix), axis=-1)
    np.testing.assert_allclose(layer(v), want, atol=axes * 3.5e-7, rtol=0)


def test_features_are_more_accurate_than_float32_angles():
    layer = FourierFeatures([[300.0]])
    v = rng.uniform(0, 1, (200, 1)).astype(np.float32)
    want, _ = reference(v, layer.matrix)
    naive = np.cos(v @ np.float32(2 * np.pi * layer.matrix.T))
    assert np.abs(naive - want).max() > 2e-5
    np.testing.assert_allclose(layer(v)[:, :1], want, atol=3.5e-7)


def test_octaves_match_nerf():
    """sin(2^k πv), cos(2^k πv) for k = 0, 1, …, for each coordinate in turn."""
    v = rng.uniform(-1, 1, (9, 3)).astype(np.float32)
    want = np.stack(
        [
            function(2.0**k * np.pi * v[:, axis].astype(float))
            for axis in range(3)
            for k in range(10)
            for function in (np.sin, np.cos)
        ],
        axis=1,
    )
    np.testing.assert_allclose(FourierFeatures.octaves(10, axes=3)(v), want, atol=5e-7)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("cos_first", [True, False])
def test_order_of_features(layout, cos_first):
    matrix = np.array([[1.0, 0.5], [-2.0, 3.0]])
    v = np.array([0.3, -0.7])
    cos, sin = reference(v, matrix)
    first, second = (cos, sin) if cos_first else (sin, cos)
    want = {"half": [*first, *second], "interleaved": np.stack([first, second], 1).ravel()}
    layer = FourierFeatures(matrix, layout=layout, cos_first=cos_first)
    np.testing.assert_allclose(layer(v), want[layout], atol=1e-6)


def test_inner_products_depend_on_the_difference_only():
    layer = FourierFeatures.gaussian(64, axes=2, std=3.0, rng=0)
    a, b, move = rng.standard_normal((3, 2))
    products = layer(a) @ layer(b)
    np.testing.assert_allclose(products, layer(a + move) @ layer(b + move), atol=1e-5)
    assert abs(products - layer(a + move) @ layer(b)) > 0.1


def test_gaussian_frequencies_have_their_standard_deviation():
    matrix = fourier.gaussian_matrix(20_000, axes=2, std=7.0, rng=np.random.default_rng(0))
    np.testing.assert_allclose(matrix.std(axis=0), 7.0, rtol=0.02)
    np.testing.assert_allclose(matrix.mean(axis=0), 0.0, atol=0.2)


def test_features_follow_the_seed():
    v = rng.standard_normal((3, 2))
    a, b, c = (FourierFeatures.gaussian(8, axes=2, std=1.0, rng=s)(v) for s in (5, 5, 6))
    assert (a == b).all() and np.abs(a - c).max() > 0.1


def test_config_restores_the_frequencies_exactly():
    layer = FourierFeatures.gaussian(8, axes=2, std=1.0, rng=5)
    rebuilt = FourierFeatures(**json.loads(json.dumps(layer.config())))
    assert (rebuilt.matrix == layer.matrix).all()
    nerf = FourierFeatures.octaves(3, axes=2)
    other = FourierFeatures(**json.loads(json.dumps(nerf.config())))
    v = rng.standard_normal((3, 2))
    assert (other(v) == nerf(v)).all()
    assert not layer.parameters()
    assert repr(layer) == (
        "FourierFeatures(<8 pairs of 2 axes>, layout='half', cos_first=True)"
    )


def test_the_matrix_is_copied():
    matrix = np.array([[1.0]])
    layer = FourierFeatures(matrix)
    matrix[:] = 9
    np.testing.assert_allclose(layer([0.25]), [0, 1], atol=1e-6)
    assert layer.config()["matrix"] == [[1.0]]


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    layer = FourierFeatures.gaussian(8, axes=2, std=2.0, rng=5)
    v = rng.standard_normal((50, 2)).astype(dtype)
    got = layer(v)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, layer(v.astype(np.float32)).astype(dtype))


@pytest.mark.parametrize("std", [0.02, 3.0])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_gradient_of_the_coordinates_matches_finite_differences(std, layout):
    matrix = fourier.gaussian_matrix(5, axes=3, std=std, rng=rng)
    layer = FourierFeatures(matrix, layout=layout, cos_first=layout == "half")
    v = rng.uniform(-1, 1, (2, 4, 3))
    y, pullback = layer.vjp(v)
    dy = rng.standard_normal(y.shape)

    def loss():
        # In long double: differences of table values would have noise of 1e-7 / 1e-6.
        cos, sin = reference(v, matrix)
        if layout == "half":
            return float((np.concatenate([cos, sin], axis=-1) * dy).sum())
        return float((np.stack([sin, cos], axis=-1).reshape(y.shape) * dy).sum())

    np.testing.assert_allclose(
        pullback(dy)["x"], central_difference(loss, v), rtol=1e-5, atol=1e-5
    )
    assert (y == layer(v)).all()


def test_gradient_has_the_dtype_of_the_coordinates():
    layer = FourierFeatures.gaussian(8, axes=2, std=2.0, rng=5)
    v = rng.standard_normal((4, 2)).astype(np.float16)
    y, pullback = layer.vjp(v)
    full = layer.vjp(v.astype(np.float32))[1](np.ones_like(y, np.float32))["x"]
    got = pullback(np.ones_like(y))["x"]
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, full.astype(np.float16))


@pytest.mark.parametrize("std", [0.02, 5.0])
def test_numpy_torch_and_jax_agree_eager_and_compiled(std):
    matrix = fourier.gaussian_matrix(6, axes=2, std=std, rng=np.random.default_rng(1))
    tables, rates = fourier.fourier_tables(matrix)
    assert len(tables) == (2 if std < 1 else 4)
    v = np.array([[0.25, -300.5], [70_000.0, 1.0]], np.float32)
    want = fourier.fourier_phases(v, tables, rates)
    compiled = torch.compile(fourier.fourier_phases, fullgraph=True, backend="eager")
    for make, function in [
        (torch.from_numpy, fourier.fourier_phases),
        (torch.from_numpy, compiled),
        (jnp.asarray, fourier.fourier_phases),
        (jnp.asarray, jax.jit(fourier.fourier_phases)),
    ]:
        got = function(make(v), make(tables), make(rates))
        np.testing.assert_allclose(np.asarray(got), want, atol=1e-6)


def test_torch_autograd_matches_the_pullback():
    layer = FourierFeatures.gaussian(6, axes=2, std=2.0, rng=3)
    v = torch.tensor([[0.3, -1.75]], dtype=torch.float64, requires_grad=True)
    tables, rates = (torch.from_numpy(a).double() for a in (layer.tables, layer.rates))
    cos, sin = fourier.fourier_phases(v, tables, rates)
    (got,) = torch.autograd.grad(cos.sum() + 2 * sin.sum(), v)
    dy = np.concatenate([np.ones((1, 6)), np.full((1, 6), 2.0)], axis=1)
    want = layer.vjp(v.detach().numpy())[1](dy)["x"]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)


def test_coordinates_out_of_range_are_nan_under_jit():
    tables, rates = fourier.fourier_tables(np.array([[0.3, 5.0]]))
    v = jnp.asarray([[2.0**24, 0.0], [0.5, 0.5]])
    cos, sin = jax.jit(fourier.fourier_phases)(v, tables, rates)
    assert np.isnan([cos[0], sin[0]]).all() and np.isfinite([cos[1], sin[1]]).all()


@pytest.mark.rejects
def test_rejects_bad_arguments():
    with pytest.raises(ValueError, match=r"shape \(pairs, axes\), got \(2,\)"):
        FourierFeatures([1.0, 2.0])
    with pytest.raises(ValueError, match="matrix must be finite, got NaN or infinity"):
        FourierFeatures([[np.nan]])
    with pytest.raises(ValueError, match="layout must be 'interleaved' or 'half', got 'x'"):
        FourierFeatures([[1.0]], layout=LAYOUT)
    with pytest.raises(ValueError, match="std must be positive and finite, got 0"):
        FourierFeatures.gaussian(4, axes=2, std=0.0)
    with pytest.raises(ValueError, match="pairs must be positive, got 0"):
        FourierFeatures.gaussian(0, axes=2, std=1.0)
    with pytest.raises(ValueError, match="axes must be positive, got 0"):
        FourierFeatures.octaves(2, axes=0)
    with pytest.raises(ValueError, match="octaves must be positive, got 0"):
        FourierFeatures.octaves(0, axes=2)


@pytest.mark.rejects
def test_rejects_bad_coordinates():
    layer = FourierFeatures([[1.0, 2.0]])
    with pytest.raises(ValueError, match=r"shape \(..., 2\), got \(3,\)"):
        layer([1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match="coordinates must be real, got int64"):
        layer(np.array([1, 2]))
    want = "coordinates must be smaller than 16777216 in size, got -16777216.0"
    with pytest.raises(ValueError, match=want):
        layer([0.0, -(2.0**24)])
    with pytest.raises(ValueError, match=r"dy must have shape \(2,\), got \(3,\)"):
        layer.vjp([0.0, 1.0])[1](np.ones(3))
