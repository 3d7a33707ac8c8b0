"""Position ids: masks, documents, offsets, grids, random draws and their checks."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from firstlayer.positions import ids as positions

LIBRARIES = {"numpy": np.asarray, "torch": torch.as_tensor, "jax": jnp.asarray}

shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9)
masks = hnp.arrays(bool, shapes)
documents = hnp.arrays(np.int64, shapes, elements=st.integers(-2, 2))


def count_tokens(mask, at_padding):
    """Count positions one token at a time."""
    out = []
    for row in (mask[i] for i in np.ndindex(mask.shape[:-1])):
        seen = 0
        for is_token in row:
            out.append(seen if is_token else at_padding)
            seen += bool(is_token)
    return np.array(out, int).reshape(mask.shape)


def count_documents(documents):
    """Count positions one token at a time."""
    out = []
    for row in (documents[i] for i in np.ndindex(documents.shape[:-1])):
        for i, document in enumerate(row):
            out.append(out[-1] + 1 if i and document == row[i - 1] else 0)
    return np.array(out, int).reshape(documents.shape)


@given(masks, st.integers(-2, 5))
def test_from_mask_counts_tokens(mask, at_padding):
    got = positions.from_mask(mask, at_padding=at_padding)
    np.testing.assert_array_equal(got, count_tokens(mask, at_padding))


def test_from_mask_positions_do_not_depend_on_the_side_of_padding():
    for left, right in [(0, 0), (3, 0), (0, 3), (2, 1)]:
        mask = np.array([0] * left + [1] * 5 + [0] * right)
        got = positions.from_mask(mask)
        np.testing.assert_array_equal(got[left : left + 5], np.arange(5))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64"])
def test_from_mask_of_any_dtype_counts_beyond_its_range(dtype):
    got = positions.from_mask(np.ones((1, 400), dtype))
    np.testing.assert_array_equal(got[0], np.arange(400))
    assert got.dtype.kind == "i"


def test_from_mask_adds_the_offset_to_tokens_only():
    mask = np.array([[0, 1, 1], [1, 1, 0]])
    got = positions.from_mask(mask, offset=np.array([10, 20]), at_padding=-1)
    assert got.tolist() == [[-1, 10, 11], [20, 21, -1]]
    assert positions.from_mask(mask, offset=4)[1].tolist() == [4, 5, 0]


@pytest.mark.parametrize("past", [0, 7])
def test_from_mask_matches_roberta(past):
    """transformers 5.22.2: rows begin at padding_idx + 1, padding is at padding_idx."""
    ids = torch.tensor([[1, 1, 5, 6, 7], [5, 6, 7, 8, 1], [9, 1, 9, 1, 9]])
    want = RobertaEmbeddings.create_position_ids_from_input_ids(ids, 1, past)
    got = positions.from_mask(ids != 1, offset=past, at_padding=-1) + 2
    np.testing.assert_array_equal(got, want)


@given(documents)
def test_from_documents_restarts_where_the_document_changes(documents):
    got = positions.from_documents(documents)
    np.testing.assert_array_equal(got, count_documents(documents))


def test_from_documents_counts_beyond_the_range_of_the_ids_dtype():
    got = positions.from_documents(np.zeros(300, np.int8))
    np.testing.assert_array_equal(got, np.arange(300))
    got = positions.from_documents(jnp.zeros(300, "int8"))
    np.testing.assert_array_equal(got, np.arange(300))


@given(st.lists(st.integers(0, 6), max_size=8))
def test_from_lengths_concatenates_aranges(lengths):
    want = [p for n in lengths for p in range(n)]
    assert positions.from_lengths(lengths).tolist() == want


def test_from_lengths_and_from_documents_agree():
    lengths = np.array([5, 1, 3], np.uint8)
    packed = np.repeat([4, 9, 2], lengths)
    np.testing.assert_array_equal(
        positions.from_lengths(lengths), positions.from_documents(packed)
    )


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_numpy_torch_and_jax_agree_eager_and_compiled(library):
    make = LIBRARIES[library]
    mask = np.array([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    packed = np.array([[3, 3, 1, 1, 3], [0, 0, 0, 0, 0]])
    offset = np.array([2, 30])

    def run(mask, packed, offset):
        return (
            positions.from_mask(mask, offset=offset, at_padding=-1),
            positions.from_documents(packed),
            positions.from_offset(positions.from_documents(packed[0]), offset),
        )

    compiled = (
        jax.jit(run)
        if library == "jax"
        else torch.compile(run, fullgraph=True, backend="eager")
    )
    for function in (run, compiled):
        got = function(make(mask), make(packed), make(offset))
        for one, want in zip(got, run(mask, packed, offset), strict=True):
            np.testing.assert_array_equal(np.asarray(one), want)


@pytest.mark.parametrize("library", LIBRARIES)
def test_from_offset_accepts_a_number_or_one_per_row(library):
    make = LIBRARIES[library]
    steps = make(np.arange(3))
    assert positions.from_offset(steps, 5).tolist() == [5, 6, 7]
    rows = positions.from_offset(steps, make(np.array([0, 40])))
    assert rows.tolist() == [[0, 1, 2], [40, 41, 42]]
    assert positions.from_offset(steps, make(np.array(7))).tolist() == [7, 8, 9]


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 2**32))
def test_randomised_positions_ascend_below_the_bound(below, length, seed):
    length = min(length, below)
    rng = np.random.default_rng(seed)
    got = positions.randomised(length, below=below, rng=rng, batch=3)
    assert got.shape == (3, length)
    assert (np.diff(got, axis=1) > 0).all()
    assert (got >= 0).all() and (got < below).all()


def test_randomised_positions_are_spread_evenly():
    rng = np.random.default_rng(0)
    got = positions.randomised(9, below=99, rng=rng, batch=4000)
    # The mean of the k-th of n numbers drawn from 0 … N - 1 without replacement is
    # k (N + 1) / (n + 1) - 1, with k from 1.
    np.testing.assert_allclose(got.mean(axis=0), np.arange(1, 10) * 10 - 1, atol=0.8)


def test_randomised_rows_differ_and_a_seed_repeats_them():
    draw = [
        positions.randomised(8, below=1000, rng=np.random.default_rng(3), batch=2)
        for _ in range(2)
    ]
    np.testing.assert_array_equal(draw[0], draw[1])
    assert (draw[0][0] != draw[0][1]).any()
    seeded = positions.randomised(8, below=1000, rng=3, batch=2)
    np.testing.assert_array_equal(seeded, draw[0])
    single = positions.randomised(8, below=1000, rng=np.random.default_rng(3))
    np.testing.assert_array_equal(single, draw[0][0])


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (2, 3, 4)])
def test_from_grid_is_in_row_major_order(sizes):
    got = positions.from_grid(sizes)
    np.testing.assert_array_equal(
        np.ravel_multi_index(tuple(got), sizes), np.arange(np.prod(sizes))
    )


def test_resolve_returns_given_positions():
    given_positions = np.array([4, 2])
    assert positions.resolve(given_positions, offset=0, steps=None) is given_positions
    assert positions.resolve(None, offset=3, steps=np.arange(2)).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("shape", "x"),
    [((5,), (5, 8)), ((5,), (3, 5, 8)), ((3, 5), (3, 5, 8)), ((1, 5), (3, 5, 8))]
    + [((2, 1, 5), (2, 3, 5, 8)), ((0,), (3, 0, 8))],
)
def test_check_fit_accepts_matching_shapes(shape, x):
    positions.check_fit(shape, x)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("shape", "x", "want"),
    [
        ((4,), (5, 8), r"\(5,\), got \(4,\)"),
        ((1,), (5, 8), r"\(5,\), got \(1,\)"),
        ((), (5, 8), r"\(5,\), got \(\)"),
        ((3, 1), (3, 5, 8), r"\(5,\) or \(3, 5\), got \(3, 1\)"),
        ((3, 5), (5, 8), r"\(5,\), got \(3, 5\)"),
        ((3, 5), (2, 3, 5, 8), r"\(5,\) or \(2, 3, 5\), got \(3, 5\)"),
    ],
)
def test_check_fit_rejects_other_shapes(shape, x, want):
    with pytest.raises(ValueError, match=f"positions must have shape {want}"):
        positions.check_fit(shape, x)


@pytest.mark.rejects
@pytest.mark.parametrize("offset", [[0, 5], None])
def test_from_offset_rejects_lists_and_none(offset):
    want = (
        f"offset must be a number or an array of one per row, got {type(offset).__name__}"
    )
    for call in (
        lambda: positions.from_offset(np.arange(3), offset),
        lambda: positions.from_mask(np.ones((2, 3), int), offset=offset),
    ):
        with pytest.raises(TypeError, match=want):
            call()


@pytest.mark.rejects
@pytest.mark.parametrize("front_end", ["numpy", "equinox"])
def test_integer_offsets_are_plain_ints_and_bounded(front_end):
    layer = importlib.import_module(f"firstlayer.{front_end}").SinusoidalPositions(4)
    x = np.zeros((2, 4), np.float32)
    np.testing.assert_array_equal(layer(x, [0, 1], offset=np.int64(0)), layer(x))
    for far in (2**62, -(2**70)):
        with pytest.raises(ValueError, match=f"^offset must be smaller .*, got {far}$"):
            layer(x, offset=far)


@pytest.mark.rejects
def test_resolve_rejects_positions_with_an_offset():
    with pytest.raises(ValueError, match="give positions or offset, not both"):
        positions.resolve(np.arange(2), offset=1, steps=np.arange(2))


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("lengths", "error", "want"),
    [
        ([3, -1], ValueError, "lengths must be at least 0, got -1"),
        ([[3]], ValueError, r"lengths must have one axis, got shape \(1, 1\)"),
        ([1.5], TypeError, "lengths must be integers, got float64"),
        ([True], TypeError, "lengths must be integers, got bool"),
    ],
)
def test_from_lengths_rejects_bad_lengths(lengths, error, want):
    with pytest.raises(error, match=want):
        positions.from_lengths(lengths)


@pytest.mark.rejects
def test_randomised_rejects_bad_sizes():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="length must be at most below 10, got 12"):
        positions.randomised(12, below=10, rng=rng)
    with pytest.raises(ValueError, match="length must be at least 0, got -1"):
        positions.randomised(-1, below=10, rng=rng)
    with pytest.raises(ValueError, match="below must be positive, got 0"):
        positions.randomised(0, below=0, rng=rng)
    with pytest.raises(ValueError, match="batch must be at least 0, got -2"):
        positions.randomised(1, below=2, rng=rng, batch=-2)


@pytest.mark.rejects
def test_from_grid_rejects_an_empty_side():
    with pytest.raises(ValueError, match="sizes must be positive, got 0"):
        positions.from_grid((3, 0))


@pytest.mark.rejects
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_from_mask_rejects_masks_that_may_be_added_to_scores(library, dtype):
    added = LIBRARIES[library](np.array([[0.0, 0.0, -np.inf]], dtype))
    with pytest.raises(
        TypeError, match=f"bools or integers, got .*{dtype}: pass mask == 0"
    ):
        positions.from_mask(added)
    assert positions.from_mask(added == 0).tolist() == [[0, 1, 0]]


@pytest.mark.rejects
def test_from_mask_rejects_lists():
    with pytest.raises(
        TypeError, match="^mask must be a NumPy, JAX or torch array, got list$"
    ):
        positions.from_mask([[1, 0]])
