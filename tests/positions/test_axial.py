"""Frequencies and positions of image towers."""

import numpy as np
import pytest

from firstlayer.numpy.rotary import RotaryPositions
from firstlayer.positions import from_grid, from_patches
from firstlayer.positions.axial import (
    dinov3_axial_frequencies,
    pixtral_axial_frequencies,
    qwen_axial_frequencies,
)
from firstlayer.positions.frequencies import inverse_frequencies


def test_qwen_frequencies_are_the_same_for_rows_and_columns():
    matrix = qwen_axial_frequencies(80, base=5_000.0)
    per_axis = inverse_frequencies(40, base=5_000.0)
    assert matrix.shape == (2, 40)
    np.testing.assert_array_equal(matrix[0], np.r_[per_axis, np.zeros(20)])
    np.testing.assert_array_equal(matrix[1], np.r_[np.zeros(20), per_axis])


def test_pixtral_frequencies_alternate_between_rows_and_columns():
    matrix = pixtral_axial_frequencies(64, base=5_000.0)
    whole = inverse_frequencies(64, base=5_000.0)
    assert matrix.shape == (2, 32)
    np.testing.assert_array_equal(matrix[0], np.r_[whole[0::2], np.zeros(16)])
    np.testing.assert_array_equal(matrix[1], np.r_[np.zeros(16), whole[1::2]])


def test_dinov3_frequencies_are_whole_turns_per_unit():
    matrix = dinov3_axial_frequencies(64, base=50.0)
    per_axis = 2 * np.pi * 50.0 ** (-4 * np.arange(16) / 64)
    np.testing.assert_allclose(matrix[0], np.r_[per_axis, np.zeros(16)], rtol=1e-15)
    np.testing.assert_allclose(matrix[1], np.r_[np.zeros(16), per_axis], rtol=1e-15)


def test_scores_of_patches_depend_on_their_distance_on_both_axes_only():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 8))
    for layer, at in (
        (RotaryPositions.pixtral(8, base=50.0), from_grid((5, 7))),
        (RotaryPositions.dinov3(8, base=50.0), from_patches((5, 7))),
    ):
        # Index 8 is row 1, column 1. Each second patch is one row down, two columns right.
        scores = [
            (layer(q, at[:, [i]]) @ layer(k, at[:, [i + 9]]).T).item() for i in (0, 8, 16)
        ]
        np.testing.assert_allclose(scores, scores[0], rtol=1e-5)
        other = (layer(q, at[:, [0]]) @ layer(k, at[:, [15]]).T).item()
        assert abs(other - scores[0]) > 1e-2


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (7, 1, 5)])
def test_patch_centers_divide_each_axis_evenly(sizes):
    got, cells = from_patches(sizes, prefix=2), from_grid(sizes)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got[:, :2], 0.0)
    for axis, size in enumerate(sizes):
        edges = np.linspace(-1.0, 1.0, size + 1)
        centers = (edges[1:] + edges[:-1]) / 2
        np.testing.assert_allclose(got[axis, 2:], centers[cells[axis]], atol=1e-15)
    np.testing.assert_array_equal(from_patches(sizes), got[:, 2:])


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: qwen_axial_frequencies(6), "head_dim must be a multiple of 4, got 6"),
        (lambda: pixtral_axial_frequencies(2), "head_dim must be a multiple of 4, got 2"),
        (lambda: dinov3_axial_frequencies(10), "head_dim must be a multiple of 4, got 10"),
        (lambda: RotaryPositions.dinov3(8, base=1.0), "base must be greater than 1, got 1"),
        (lambda: from_patches((3, 0)), "sizes must be positive, got 0"),
        (lambda: from_patches((3, 2), prefix=-1), "prefix must be at least 0, got -1"),
    ],
)
def test_invalid_arguments_are_rejected(build, message):
    with pytest.raises(ValueError, match=message):
        build()
