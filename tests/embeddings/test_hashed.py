"""Hashed ids, quotients and remainders, frequent ids: rows, vectors and training."""

import copy
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import firstlayer.equinox as fe
import firstlayer.numpy as fn
import firstlayer.torch as ft
from firstlayer.embeddings.hashed import (
    FrequencyRows,
    HashedRows,
    QuotientRemainderRows,
    int64_bits,
    sorted_frequent,
    splitmix64,
)
from firstlayer.torch.optim import RowAdamW
from tests.support.gradients import central_difference
from tests.support.torch_round_trips import ROUND_TRIPS, built

MASK, GAMMA = 2**64 - 1, 0x9E3779B97F4A7C15
IDS = [0, 1, -1, 5, 2**31, 2**40 + 5, 2**63 - 1, -(2**63), 123_456_789_012_345]
any_id = st.integers(-(2**63), 2**63 - 1)


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def row_of(id_: int, k: int, *, num_rows: int, seed: int) -> int:
    """Return the row of an id by the formula in the module's docstring."""
    key = mix(seed + (k + 2) * GAMMA & MASK)
    return (mix(mix((id_ & MASK) + GAMMA & MASK) ^ key) >> 1) % num_rows


# The rows of version 0.2: they must never change, or saved tables lose their meaning.
VECTORS = {
    (0, 1_000_003, 0): [425744, 951537, 558],
    (2**40 + 5, 1_000_003, 7): [111518, 847025, 489115],
    (-1, 2**31 - 1, 2**62): [1140601613, 104995528, 1525071816],
}


@pytest.mark.parametrize(("key", "rows"), VECTORS.items())
def test_rows_never_change(key, rows):
    id_, num_rows, seed = key
    hashed = HashedRows(num_rows=num_rows, hashes=3, seed=seed)
    assert hashed(np.array([id_])).tolist() == [rows]


def test_splitmix64_is_the_published_generator():
    # The first outputs of Java's SplittableRandom(1234567).
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = state + GAMMA & MASK
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(
    st.lists(any_id, min_size=1, max_size=5),
    st.integers(1, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(1, 4),
)
def test_rows_equal_the_formula_in_every_front_end(ids, num_rows, seed, hashes):
    rows = HashedRows(num_rows=num_rows, hashes=hashes, seed=seed)
    expected = [
        [row_of(i, k, num_rows=num_rows, seed=seed) for k in range(hashes)] for i in ids
    ]
    assert rows(np.array(ids)).tolist() == expected
    assert rows(torch.tensor(ids)).tolist() == expected


def test_compiled_jax_hashes_pairs_of_bits():
    layer = fe.HashedEmbedding(97, 4, hashes=3, seed=5, key=jax.random.key(0))
    pairs = jnp.asarray(fe.split_ids(IDS))
    expected = np.asarray(layer(IDS))
    np.testing.assert_array_equal(eqx.filter_jit(layer)(pairs), expected)
    one_by_one = jax.vmap(layer)(pairs)
    np.testing.assert_array_equal(one_by_one, expected)
    small = [i for i in IDS if -(2**31) <= i < 2**31]
    np.testing.assert_array_equal(
        eqx.filter_jit(layer)(jnp.array(small)), np.asarray(layer(small))
    )
    with pytest.raises(ValueError, match=r"must be pairs of low and high bits, \(..., 2\)"):
        layer(jnp.zeros(3, jnp.uint32))
    with pytest.raises(TypeError, match="ids must be integers, got float32"):
        layer(jnp.zeros(3))


@pytest.mark.parametrize("stride", [1, 7, 2**20, 2**32, 2**45])
def test_rows_are_uniform_and_hashes_independent(stride):
    rows, count = 64, 64_000
    ids = np.arange(count) * stride
    first, second = HashedRows(num_rows=rows, hashes=2, seed=1)(ids).T
    for column in (first, second):
        counts = np.bincount(column, minlength=rows)
        chi = ((counts - count / rows) ** 2 / (count / rows)).sum()
        # 63 degrees of freedom: beyond 140 once in ten million times.
        assert chi < 140
    pairs = np.bincount(first * rows + second, minlength=rows * rows)
    expected = count / rows**2
    # 4095 degrees of freedom, standard deviation 90.
    assert ((pairs - expected) ** 2 / expected).sum() < 4095 + 6 * 90


@given(st.integers(1, 200), st.data())
def test_every_id_has_its_own_quotient_and_remainder(num_embeddings, data):
    buckets = data.draw(st.integers(1, num_embeddings))
    rows = QuotientRemainderRows(num_embeddings=num_embeddings, buckets=buckets)
    pairs = rows(np.arange(num_embeddings))
    assert len({tuple(pair) for pair in pairs.tolist()}) == num_embeddings
    assert pairs.min() == 0 and pairs.max() == rows.num_rows - 1
    outside = rows(np.array([-1, num_embeddings, -num_embeddings, 2**62]))
    assert (outside == -1).all()


@given(st.lists(any_id, min_size=1, max_size=6, unique=True), st.lists(any_id, max_size=4))
def test_frequent_ids_have_rows_of_their_own(frequent, others):
    ascending, order = sorted_frequent(frequent)
    hashed = HashedRows(num_rows=10, hashes=2, seed=3)
    rows = FrequencyRows(num_frequent=len(frequent), hashed=hashed)
    own = rows(np.array(frequent), frequent=ascending, order=order)
    padding = len(frequent) + 10
    assert own.tolist() == [[row, padding] for row in range(len(frequent))]
    others = [i for i in others if i not in frequent]
    ids = np.array(others, np.int64)
    rest = rows(ids, frequent=ascending, order=order)
    np.testing.assert_array_equal(rest, hashed(ids) + len(frequent))


def test_uint64_ids_keep_their_bits():
    ids = np.array([2**64 - 1, 2**63], np.uint64)
    assert int64_bits(ids).tolist() == [-1, -(2**63)]
    layer = fn.HashedEmbedding(50, 3, rng=0)
    np.testing.assert_array_equal(layer(ids), layer([-1, -(2**63)]))


def layers_on_numpy():
    options = {"rng": 0, "dtype": "float64"}
    return {
        "sum": fn.HashedEmbedding(11, 4, hashes=3, importance_rows=3, **options),
        "concat": fn.HashedEmbedding(
            11, 4, hashes=2, combine="concat", importance_rows=3, **options
        ),
        "multiply": fn.QuotientRemainderEmbedding(20, 4, buckets=6, **options),
        "frequent": fn.FrequencyEmbedding([3, 4], 5, 4, hashes=2, **options),
    }


@pytest.mark.parametrize("name", ["sum", "concat", "multiply", "frequent"])
def test_gradients_equal_finite_differences(name):
    layer = layers_on_numpy()[name]
    if getattr(layer, "importance", None) is not None:
        layer.importance.weight[:] = np.random.default_rng(1).standard_normal(
            layer.importance.weight.shape
        )
    ids = np.array([[3, 4, 3], [17, 0, 5]])
    y, pull = layer.vjp(ids)
    dy = np.random.default_rng(2).standard_normal(y.shape)
    gradients = pull(dy)
    assert gradients.keys() == layer.parameters().keys()
    for name_, weight in layer.parameters().items():
        expected = central_difference(lambda: float((layer(ids) * dy).sum()), weight)
        dense = gradients[name_].dense(len(weight))
        np.testing.assert_allclose(dense, expected, rtol=1e-6, atol=1e-8)


def test_sums_and_products_are_those_of_the_rows():
    layers = layers_on_numpy()
    hashed, table = layers["sum"], layers["sum"].table.weight
    hashed.importance.weight[:] = np.arange(9.0).reshape(3, 3)
    rows = HashedRows(num_rows=11, hashes=3)(np.array([2**40]))[0]
    own = HashedRows(num_rows=3, hashes=1, first=3)(np.array([2**40]))[0, 0]
    expected = hashed.importance.weight[own] @ table[rows]
    np.testing.assert_allclose(hashed([2**40])[0], expected, rtol=1e-12)
    product, table = layers["multiply"], layers["multiply"].table.weight
    np.testing.assert_array_equal(product([16])[0], table[16 % 6] * table[6 + 16 // 6])


@pytest.mark.parametrize("front_end", [fn, fe])
def test_lists_without_ids_have_no_vectors(front_end):
    key = {"key": jax.random.key(0)} if front_end is fe else {}
    layers = (
        front_end.HashedEmbedding(9, 4, importance_rows=3, **key),
        front_end.FrequencyEmbedding([7], 9, 4, **key),
        front_end.GrowingEmbedding(3, 4),
    )
    for layer in layers:
        assert layer([]).shape == (0, 4) and layer([[], []]).shape == (2, 0, 4)
        with pytest.raises(TypeError, match="^ids must be integers, got float64$"):
            layer(np.zeros(0))
    assert layers[-1].rows([]).shape == (0,)
    assert fe.split_ids([]).shape == (0, 2)


def test_importance_starts_at_one():
    plain = fn.HashedEmbedding(11, 4, hashes=3, rng=0)
    weighted = fn.HashedEmbedding(11, 4, hashes=3, rng=0, importance_rows=3)
    np.testing.assert_array_equal(plain(IDS), weighted(IDS))


@pytest.mark.parametrize(
    "make",
    [
        lambda sparse: ft.HashedEmbedding(
            50, 4, hashes=3, importance_rows=6, sparse=sparse
        ),
        lambda sparse: ft.QuotientRemainderEmbedding(99, 4, buckets=9, sparse=sparse),
        lambda sparse: ft.FrequencyEmbedding([5, 7], 40, 4, sparse=sparse),
    ],
    ids=["hashed", "quotient", "frequent"],
)
def test_row_optimizers_equal_dense_ones(make):
    torch.manual_seed(0)
    dense, by_rows = make(False), make(True)
    by_rows.load_state_dict(dense.state_dict())
    options = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    optimizers = [
        torch.optim.AdamW(dense.parameters(), **options),
        RowAdamW(by_rows, **options),
    ]
    for step in range(12):
        ids = torch.randint(99, (6,), generator=torch.Generator().manual_seed(step))
        for layer, optimizer in zip((dense, by_rows), optimizers, strict=True):
            optimizer.zero_grad()
            layer(ids).square().sum().backward()
            optimizer.step()
    assert by_rows.table.weight.grad.is_sparse
    for a, b in zip(
        dense.state_dict().values(), by_rows.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_torch_layers_compile_copy_and_pickle():
    layer = ft.FrequencyEmbedding([5, 2**40], 40, 4, hashes=3, seed=2)
    ids = torch.tensor([[5, 2**40, -7]])
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids), layer(ids), rtol=0, atol=0)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(other(ids), layer(ids), rtol=0, atol=0)
    half = copy.deepcopy(layer).half()
    assert half.frequent_ids.tolist() == [5, 2**40]
    torch.testing.assert_close(half(ids[:, :2]), layer(ids[:, :2]).half(), rtol=0, atol=0)


@pytest.mark.parametrize("round_trip", [name for name in ROUND_TRIPS if name != "reset"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: ft.FrequencyEmbedding([5, -(2**40), 3], 40, 4, hashes=3, seed=2),
        lambda: ft.HashedEmbedding(40, 4, hashes=3, importance_rows=7, seed=2),
        lambda: ft.QuotientRemainderEmbedding(90, 4, buckets=7, combine="concat"),
    ],
)
def test_torch_layers_read_the_same_rows_after_moves_and_loads(round_trip, build):
    ids = torch.tensor([[5, 2**40, 3], [-7, 5, 0]])
    if isinstance(build(), ft.QuotientRemainderEmbedding):
        ids = ids.remainder(90)
    layer = ROUND_TRIPS[round_trip](build)
    torch.testing.assert_close(layer(ids).float(), built(build)(ids))
    if isinstance(layer, ft.FrequencyEmbedding):
        assert layer.frequent_ids.tolist() == [5, -(2**40), 3]


@pytest.mark.parametrize("front_end", [fn, ft, fe])
def test_large_ids_agree_after_a_file(front_end, tmp_path):
    made = [
        fn.HashedEmbedding(97, 4, hashes=3, seed=5, importance_rows=4, rng=0),
        fn.FrequencyEmbedding([2**40 + 5, -1], 30, 4, hashes=2, rng=0),
    ]
    for layer in made:
        fn.save(tmp_path / "a.safetensors", layer)
        loaded = front_end.load(tmp_path / "a.safetensors")
        ids = torch.tensor(IDS) if front_end is ft else IDS
        result = loaded(ids)
        result = result.detach().numpy() if front_end is ft else np.asarray(result)
        np.testing.assert_allclose(result, layer(IDS), rtol=1e-6, atol=1e-6)
        front_end.save(tmp_path / "b.safetensors", loaded)
        again = fn.load(tmp_path / "b.safetensors")
        np.testing.assert_array_equal(again(IDS), layer(IDS))


@pytest.mark.rejects
@pytest.mark.parametrize("front_end", [fn, ft, fe])
def test_bad_arguments_are_refused_alike(front_end):
    key = {"key": jax.random.key(0)} if front_end is fe else {}
    cases = {
        "hashes must be between 1 and 64, got 0": lambda: front_end.HashedEmbedding(
            9, 4, hashes=0, **key
        ),
        "num_rows must be positive, got 0": lambda: front_end.HashedEmbedding(0, 4, **key),
        "embedding_dim must be a multiple of 3": lambda: front_end.HashedEmbedding(
            9, 4, hashes=3, combine="concat", **key
        ),
        "combine must be 'sum' or 'concat', got 'multiply'": (
            lambda: front_end.HashedEmbedding(9, 4, combine="multiply", **key)
        ),
        "buckets must be between 1 and num_embeddings 9, got 10": (
            lambda: front_end.QuotientRemainderEmbedding(9, 4, buckets=10, **key)
        ),
        "frequent_ids must be different, got 7 twice": (
            lambda: front_end.FrequencyEmbedding([7, 7], 9, 4, **key)
        ),
        "frequent_ids must be a list of at least one id": (
            lambda: front_end.FrequencyEmbedding([], 9, 4, **key)
        ),
        "seed must be below": lambda: front_end.HashedEmbedding(9, 4, seed=2**63, **key),
    }
    for message, make in cases.items():
        with pytest.raises((ValueError, TypeError)) as error:
            make()
        assert message in str(error.value), str(error.value)


@pytest.mark.rejects
def test_ids_out_of_range_of_quotients_are_named():
    with pytest.raises(IndexError, match=r"ids\[1\] is 9, but num_embeddings is 9"):
        fn.QuotientRemainderEmbedding(9, 4)([3, 9])
    with pytest.raises(IndexError, match=r"ids\[1\] is -1, but num_embeddings is 9"):
        ft.QuotientRemainderEmbedding(9, 4)(torch.tensor([3, -1]))
    layer = fe.QuotientRemainderEmbedding(9, 4, key=jax.random.key(0))
    with pytest.raises(IndexError, match=r"ids\[1\] is 9, but num_embeddings is 9"):
        layer([3, 9])
    y = eqx.filter_jit(layer)(jnp.array([3, 9, -1]))
    assert np.isnan(y).all(axis=1).tolist() == [False, True, True]
