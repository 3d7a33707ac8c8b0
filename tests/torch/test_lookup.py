"""Lookup of rows by id: values, ids of any dtype and shape, errors."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import firstlayer.numpy.token
from firstlayer.torch.functional import embedding
from firstlayer.torch.token import Embedding
from tests.support.torch_tables import DTYPES, ids_of, same_bits


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_lookup_returns_rows_bit_by_bit(dtype, shape):
    layer = Embedding(9, 5, dtype=dtype)
    ids = torch.randint(0, 9, shape)
    assert same_bits(layer(ids), layer.weight[ids])
    with torch.no_grad():
        assert same_bits(layer(ids), layer.weight[ids])


@given(
    dtype=st.sampled_from(INTEGERS),
    table=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    seed=st.integers(0, 99),
)
def test_ids_of_any_integer_dtype_and_shape(dtype, table, shape, seed):
    layer = Embedding(100, 3, padding_idx=4, dtype=table)
    numbers = np.random.default_rng(seed).integers(0, 100, shape)
    ids = torch.from_numpy(numbers.astype(dtype))
    assert same_bits(layer(ids), layer.weight[torch.from_numpy(numbers)])
    assert same_bits(embedding(ids, layer.weight), layer(ids))


def test_ids_may_be_strided():
    layer, ids = Embedding(10, 3, dtype=torch.bfloat16), torch.arange(10).reshape(2, 5)
    for some in (ids.t(), ids[:, ::2], ids[:1].expand(3, 5)):
        layer.zero_grad()
        layer(some).sum().backward()
        want = torch.zeros(10).index_add_(0, some.reshape(-1), torch.ones(some.numel()))
        assert torch.equal(
            layer.weight.grad.clone(), want.bfloat16()[:, None].expand(10, 3)
        )


def test_numpy_and_torch_agree():
    weight = torch.randn(50, 7)
    ids = torch.randint(0, 50, (4, 30))
    dy = torch.randn(4, 30, 7)
    cases: list[dict[str, Any]] = [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}]
    cases.append({"max_norm": 2.0})
    for options in cases:
        ours = Embedding(50, 7, _weight=weight.clone(), sparse=True, **options)
        theirs = firstlayer.numpy.token.Embedding(
            50, 7, weight=weight.numpy().copy(), **options
        )
        want, pull = theirs.vjp(ids.numpy())
        got = ours(ids)
        got.backward(dy)
        rows = pull(dy.numpy())["weight"]
        np.testing.assert_allclose(got.detach().numpy(), want, atol=1e-6)
        np.testing.assert_array_equal(ours.weight.grad.indices()[0].numpy(), rows.ids)
        np.testing.assert_array_equal(ours.weight.grad.values().numpy(), rows.values)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "ids, message",
    [
        (torch.tensor([[0, 1], [2, 9]]), r"ids\[1, 1\] is 9, but num_embeddings is 5"),
        (torch.tensor([3, -1]), r"ids\[1\] is -1, but num_embeddings is 5"),
        (torch.tensor(7), "ids is 7, but num_embeddings is 5"),
        (torch.tensor([200], dtype=torch.uint8), r"ids\[0\] is 200, but"),
        (torch.tensor([-3], dtype=torch.int8), r"ids\[0\] is -3, but"),
        (torch.tensor([2**63 + 5], dtype=torch.uint64), r"ids\[0\] is 9223372036854775813"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"dtype": torch.float16}])
def test_error_names_the_id_out_of_range(ids, message, options):
    layer = Embedding(5, 2, padding_idx=0, **options)
    for wanted in (IndexError, RuntimeError):
        with pytest.raises(wanted, match=message):
            layer(ids)


@pytest.mark.rejects
@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"dtype": torch.float16}])
def test_lookup_in_an_empty_table_raises(options):
    layer = Embedding(0, 2, **options)
    assert layer(torch.zeros((3, 0), dtype=torch.int64)).shape == (3, 0, 2)
    with pytest.raises(IndexError, match=r"ids\[0, 0\] is 3, but num_embeddings is 0"):
        layer(torch.tensor([[3, 0]]))
    with pytest.raises(ValueError, match="padding_idx must be in"):
        embedding(torch.empty(0, dtype=torch.int64), layer.weight, 0, sparse=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_grad_by_freq": True},
        {"sparse": True},
        {"dtype": torch.bfloat16},
        {"max_norm": 1.0, "padding_idx": 3},
    ],
)
def test_jagged_ids_give_jagged_rows_and_the_same_gradient(options):
    layer = Embedding(9, 4, **options)
    ids = torch.tensor([1, 2, 3, 1, 1])
    ragged: Any = torch.nested.nested_tensor([ids[:2], ids[2:]], layout=torch.jagged)
    got, want = layer(ragged), layer(ids)
    assert torch.equal(got.offsets(), ragged.offsets())
    assert torch.equal(got.values(), want)
    dy = torch.arange(20.0, dtype=want.dtype).reshape(5, 4)
    results = [
        torch.autograd.grad((rows * dy).sum(), layer.weight)[0].to_dense()
        for rows in (got.values(), want)
    ]
    assert torch.equal(*results) and results[0].any()


@pytest.mark.rejects
def test_transposed_jagged_ids_raise_the_error_of_torch():
    parts = [torch.arange(6).reshape(3, 2), torch.arange(8).reshape(4, 2)]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="expected indices to be a contiguous jagged"):
        Embedding(9, 4, sparse=True)(ragged)


@pytest.mark.rejects
def test_unreadable_ids_raise_the_error_of_torch():
    with pytest.raises(IndexError, match="index out of range in self"):
        torch.vmap(Embedding(5, 2))(torch.tensor([[1], [5]]))


@pytest.mark.rejects
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float32, torch.bfloat16, torch.complex64]
)
def test_ids_must_be_integers(dtype):
    name = str(dtype).removeprefix("torch.")
    for wanted in (TypeError, RuntimeError):
        with pytest.raises(wanted, match=f"ids must be integers, got {name}"):
            Embedding(5, 2)(torch.ones(3).to(dtype))
    with pytest.raises(TypeError, match="ids must be a tensor, got list"):
        Embedding(5, 2)([1, 2])


@pytest.mark.rejects
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            {"padding_idx": 5},
            AssertionError,
            r"padding_idx must be in \[-5, 5\) for .* got 5",
        ),
        ({"padding_idx": -6}, ValueError, "got -6"),
        ({"max_norm": 0.0}, ValueError, "max_norm must be positive, got 0.0"),
        ({"max_norm": 1.0, "norm_type": -2.0}, ValueError, "norm_type .* got -2.0"),
        ({"_weight": torch.ones(5, 3)}, AssertionError, r"shape \(5, 2\), got \(5, 3\)"),
        ({"_weight": torch.ones(5, 3)}, ValueError, r"shape \(5, 2\), got \(5, 3\)"),
    ],
)
def test_invalid_arguments_raise(arguments, error, message):
    with pytest.raises(error, match=message):
        Embedding(5, 2, **arguments)


@pytest.mark.rejects
def test_sizes_and_functional_arguments_are_checked():
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match="num_embeddings must be at least 0, got -1"):
            Embedding(-1, 2)
    with pytest.raises(TypeError, match="embedding_dim must be an integer, got float"):
        Embedding(5, 2.0)  # pyright: ignore
    table = torch.ones(5, 2)
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match="padding_idx must be in .* got 5"):
            embedding(ids_of(1), table, padding_idx=5)
    with pytest.raises(ValueError, match="max_norm must be positive, got -1.0"):
        embedding(ids_of(1), table, max_norm=-1.0)


def test_lookups_in_eight_threads_give_the_same_rows():
    from concurrent.futures import ThreadPoolExecutor

    layer = Embedding(100, 8, padding_idx=3, dtype=torch.bfloat16)
    ids = torch.randint(0, 100, (500,))
    want = layer(ids)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: layer(ids), range(40)):
            assert torch.equal(got, want)


@pytest.mark.rejects
def test_import_without_torch_says_what_to_install():
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import firstlayer.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "ImportError: firstlayer.torch needs PyTorch: pip install 'firstlayer[torch]'"
        in done.stderr
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_large_lookups_equal_torchs(dtype):
    table = Embedding(50, 96, padding_idx=3, dtype=dtype)
    ids = torch.arange(3000).remainder(50).reshape(50, 60)
    want = torch.nn.functional.embedding(ids, table.weight.detach())
    frozen = Embedding.from_pretrained(table.weight.detach())
    with torch.inference_mode():
        assert torch.equal(table(ids.T), want.transpose(0, 1))
    for some in (ids, ids.int(), ids.to(torch.uint8)):
        got = frozen(some)
        assert torch.equal(got, want) and not got.requires_grad
    table(ids).square().sum().backward()
    grads = torch.zeros(50, 96, dtype=torch.float64)
    grads.index_add_(0, ids.flatten(), 2 * want.flatten(0, 1).double())
    grads[3] = 0
    assert not table.weight.grad.is_sparse
    torch.testing.assert_close(table.weight.grad, grads.to(dtype))
    ids[40, 2] = -1
    with pytest.raises(IndexError, match=re.escape("ids[40, 2] is -1")), torch.no_grad():
        table(ids)
