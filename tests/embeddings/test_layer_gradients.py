"""Every gradient of the complete layer equals autograd's on plain torch operators."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from firstlayer import kernels
from firstlayer._array import compute_dtype
from firstlayer.embeddings.layer import empty_statistics
from firstlayer.embeddings.layer_gradients import layer_gradients
from firstlayer.embeddings.row_gradient import RowGradient
from firstlayer.kernels.layer import backward

# Rows of the token, position and segment table.
SIZES = (50, 9, 3)
TOKEN, POSITION, SEGMENT = range(3)


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    # Small batches use several threads too.
    monkeypatch.setattr(backward, "GRAIN", 1)
    before = kernels.get_num_threads()
    kernels.set_num_threads(request.param)
    yield request.param
    kernels.set_num_threads(before)


class Case:
    """Tables, rows, a norm and an output gradient, and autograd's results in float64."""

    def __init__(self, dtype, *, tables, has_norm, tokens=1000, width=33, sizes=SIZES):
        rng = np.random.default_rng(0)
        self.dtype, self.used = dtype, tables
        self.tables = [rng.standard_normal((n, width)).astype(dtype) for n in sizes]
        self.rows = [rng.integers(0, n, tokens) for n in sizes]
        self.norm_weight = rng.standard_normal(width).astype(dtype) if has_norm else None
        self.dy = rng.standard_normal((tokens, width)).astype(dtype)
        self.mask = rng.random(tokens) < 0.8
        self.forward()

    def gradients(self, **options: Any) -> Any:
        token, position, segment = self.pairs()
        norm = None
        if self.norm_weight is not None:
            norm = self.norm_weight, self.statistics
        options = {"scale": 1.5, "norm": norm, "dy": self.dy, **options}
        return layer_gradients(token, position=position, segment=segment, **options)

    def forward(self) -> None:
        """Compute the statistics that the backward needs."""
        self.statistics = empty_statistics(
            len(self.dy), compute_dtype(np.dtype(self.dtype))
        )
        if self.norm_weight is None:
            return
        token, position, segment = self.pairs()
        kernels.layer_forward(
            token,
            position=position,
            segment=segment,
            scale=1.5,
            norm=(self.norm_weight, np.zeros_like(self.norm_weight), 0.1),
            out=np.empty_like(self.dy),
            statistics=self.statistics,
        )

    def pairs(self) -> list[Any]:
        """Return each table with the rows that are read, or None if it is not used."""
        pairs = zip(self.tables, self.rows, strict=True)
        return [pair if k in self.used else None for k, pair in enumerate(pairs)]

    def autograd(self, *, padding=(None, None), mask=None):
        tables = [torch.from_numpy(t.astype(float)).requires_grad_() for t in self.tables]
        total: Any = 0
        for k in self.used:
            rows = nn.functional.embedding(
                torch.from_numpy(self.rows[k]),
                tables[k],
                padding_idx=(*padding, None)[k],
            )
            rows.retain_grad()
            self.token_rows = rows if k == TOKEN else self.token_rows
            total = total + rows * (1.5 if k == TOKEN else 1.0)
        norm = [torch.zeros(0, requires_grad=True)] * 2
        if self.norm_weight is not None:
            norm = [torch.from_numpy(self.norm_weight.astype(float)).requires_grad_()]
            norm.append(torch.zeros_like(norm[0], requires_grad=True))
            total = nn.functional.layer_norm(total, (total.shape[1],), *norm, eps=0.1)
        dy = torch.from_numpy(self.dy.astype(float))
        if mask is not None:
            dy = torch.where(torch.from_numpy(mask)[:, None], dy, 0)
        total.backward(dy)
        return [table.grad for table in tables], [parameter.grad for parameter in norm]

    def assert_close(self, got, expected):
        assert got.dtype == compute_dtype(np.dtype(self.dtype))
        tolerance = 1e-11 if got.dtype == np.float64 else 2e-4
        np.testing.assert_allclose(got, expected.numpy(), atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "used",
    [(TOKEN,), (TOKEN, POSITION), (TOKEN, SEGMENT), (TOKEN, POSITION, SEGMENT)],
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_every_gradient_equals_autograds(dtype, used, has_norm, threads):
    case = Case(dtype, tables=used, has_norm=has_norm)
    tables, norm = case.autograd(padding=(7, 4), mask=case.mask)
    got = case.gradients(token_padding=7, position_padding=4, mask=case.mask)
    assert 7 not in got.token.ids and (np.diff(got.token.ids) > 0).all()
    case.assert_close(got.token.dense(SIZES[TOKEN]), tables[TOKEN])
    if POSITION in used:
        assert 4 not in got.position.ids
        case.assert_close(got.position.dense(SIZES[POSITION]), tables[POSITION])
    else:
        assert got.position is None
    if SEGMENT in used:
        case.assert_close(got.segment, tables[SEGMENT])
    else:
        assert got.segment is None
    if has_norm:
        case.assert_close(got.norm_weight, norm[0])
        case.assert_close(got.norm_bias, norm[1])
    else:
        assert got.norm_weight is None and got.norm_bias is None


@pytest.mark.parametrize("width", [33, 192])
@pytest.mark.parametrize("num_positions", [90, 3])
def test_streamed_gradients_and_split_position_sums_equal_autograds(
    width, num_positions, threads, monkeypatch
):
    monkeypatch.setattr(backward, "STREAMING_BYTES", 0)
    case = Case(
        np.float32,
        tables=(TOKEN, POSITION, SEGMENT),
        has_norm=True,
        width=width,
        sizes=(700, num_positions, 3),
    )
    tables, norm = case.autograd(padding=(7, 2), mask=case.mask)
    got = case.gradients(token_padding=7, position_padding=2, mask=case.mask)
    case.assert_close(got.token.dense(700), tables[TOKEN])
    case.assert_close(got.position.dense(num_positions), tables[POSITION])
    case.assert_close(got.segment, tables[SEGMENT])
    case.assert_close(got.norm_weight, norm[0])
    case.assert_close(got.norm_bias, norm[1])


def test_short_rows_of_added_tables_are_repeated(threads):
    used = TOKEN, POSITION, SEGMENT
    case = Case(np.float64, tables=used, has_norm=True, sizes=(50, 40, 3))
    # 24 rows do not divide 1000 tokens.
    short = np.random.default_rng(1).permutation(40)[:24], np.array([2])
    case.rows[1:] = [np.resize(rows, 1000) for rows in short]
    case.forward()
    tables, norm = case.autograd(mask=case.mask)
    case.rows[1:] = short
    got = case.gradients(mask=case.mask)
    case.assert_close(got.token.dense(50), tables[TOKEN])
    case.assert_close(got.position.dense(40), tables[POSITION])
    case.assert_close(got.segment, tables[SEGMENT])
    case.assert_close(got.norm_weight, norm[0])


def test_token_gradients_are_optionally_not_summed(threads):
    case = Case(np.float64, tables=(TOKEN, POSITION), has_norm=True)
    case.autograd(mask=case.mask)
    got = case.gradients(by_id=False, mask=case.mask).token
    case.assert_close(got, case.token_rows.grad)
    assert not got[~case.mask].any()


@pytest.mark.parametrize("has_norm", [False, True])
def test_nan_in_masked_tokens_reaches_no_gradient(has_norm):
    case = Case(np.float32, tables=(TOKEN, POSITION, SEGMENT), has_norm=has_norm)
    expected = case.gradients(mask=case.mask)
    case.dy[~case.mask] = np.nan
    nan_row = np.full((1, 33), np.nan, np.float32)
    case.tables[TOKEN] = np.concatenate([case.tables[TOKEN], nan_row])
    case.rows[TOKEN][~case.mask] = SIZES[TOKEN]
    got = case.gradients(mask=case.mask)
    for name in ("token", "position"):
        a, b = getattr(got, name), getattr(expected, name)
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.values, b.values)
    for name in ("segment", "norm_weight", "norm_bias")[: 3 if has_norm else 1]:
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


def test_sums_do_not_depend_on_the_number_of_threads():
    used = TOKEN, POSITION, SEGMENT
    case, results = Case(np.float32, tables=used, has_norm=True, tokens=5000), []
    before = kernels.get_num_threads()
    try:
        for n in (1, 2, 7):
            kernels.set_num_threads(n)
            results.append(case.gradients())
    finally:
        kernels.set_num_threads(before)
    first, *others = results
    for other in others:
        for name in ("segment", "norm_weight", "norm_bias"):
            np.testing.assert_array_equal(getattr(first, name), getattr(other, name))
        np.testing.assert_array_equal(first.token.values, other.token.values)
        np.testing.assert_array_equal(first.position.values, other.position.values)


def test_a_gradient_of_few_ids_keeps_no_large_buffer_alive():
    table, ids = np.ones((3, 4), np.float32), np.arange(900) % 3
    dy = np.ones((900, 4), np.float32)
    got = layer_gradients((table, ids), scale=1.0, norm=None, dy=dy).token
    assert isinstance(got, RowGradient) and got.values.tolist() == [[300.0] * 4] * 3
    base = got.values.base
    assert base is None or base.nbytes <= 4 * got.values.nbytes


def test_no_tokens_give_zero_gradients():
    case = Case(np.float32, tables=(TOKEN, POSITION, SEGMENT), has_norm=True, tokens=0)
    got = case.gradients()
    assert got.token.ids.size == 0 and got.position.ids.size == 0
    assert not got.segment.any() and not got.norm_weight.any()


@pytest.mark.rejects
@pytest.mark.parametrize(
    "table, bad, message",
    [
        (TOKEN, -100, r"ids\[7\] is -100, but the number of rows is 50"),
        (TOKEN, 10**9, r"ids\[7\] is 1000000000, but the number of rows is 50"),
        (POSITION, 9, r"positions\[7\] is 9, but the number of rows is 9"),
        (POSITION, -9, r"positions\[7\] is -9, but the number of rows is 9"),
        (SEGMENT, -1, r"segments\[7\] is -1, but the number of rows is 3"),
    ],
)
def test_rows_changed_since_the_forward_are_checked_again(table, bad, message):
    case = Case(np.float32, tables=(TOKEN, POSITION, SEGMENT), has_norm=True)
    case.rows[table][7] = bad
    with pytest.raises((IndexError, ValueError), match=message):
        case.gradients()


@pytest.mark.rejects
def test_fewer_ids_than_gradient_rows_raise():
    case = Case(np.float32, tables=(TOKEN, POSITION), has_norm=False)
    case.rows[TOKEN] = case.rows[TOKEN][:999]
    with pytest.raises(ValueError, match="an id for each of 1000 rows, got 999"):
        case.gradients()


@pytest.mark.rejects
def test_fewer_statistics_than_gradient_rows_raise():
    case = Case(np.float32, tables=(TOKEN,), has_norm=True)
    case.statistics = case.statistics[:7]
    with pytest.raises(ValueError, match="a row for each of 1000 tokens, got 7"):
        case.gradients()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_forward_fills_the_mean_and_inverse_deviation_of_each_row(dtype, threads):
    case = Case(dtype, tables=(TOKEN, POSITION, SEGMENT), has_norm=True)
    x: Any = 0
    for factor, (table, rows) in zip((1.5, 1, 1), case.pairs(), strict=True):
        x = x + factor * table.astype(float)[rows]
    expected = np.stack([x.mean(axis=1), 1 / np.sqrt(x.var(axis=1) + 0.1)], axis=1)
    tolerance = 1e-13 if dtype == np.float64 else 1e-5
    np.testing.assert_allclose(case.statistics, expected, atol=tolerance)
