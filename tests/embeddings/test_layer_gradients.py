"""Every gradient of the complete layer equals autograd's on plain operators."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from firstlayer import kernels
from firstlayer.embeddings.layer_gradients import layer_gradients
from firstlayer.embeddings.row_gradient import RowGradient
from firstlayer.kernels.layer import backward

SIZES = (50, 9, 3)


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    # However little there is to do.
    monkeypatch.setattr(backward, "GRAIN", 1)
    before = kernels.get_num_threads()
    kernels.set_num_threads(request.param)
    yield request.param
    kernels.set_num_threads(before)


class Case:
    """Tables, rows, a norm and a gradient, and what autograd makes of them in float64."""

    def __init__(self, dtype, *, parts, normed, places=1000, width=33, sizes=SIZES):
        rng = np.random.default_rng(0)
        self.dtype, self.parts = dtype, parts
        self.tables = [rng.standard_normal((n, width)).astype(dtype) for n in sizes]
        self.rows = [rng.integers(0, n, places) for n in sizes]
        self.gain = rng.standard_normal(width).astype(dtype) if normed else None
        self.dy = rng.standard_normal((places, width)).astype(dtype)
        self.mask = rng.random(places) < 0.8

    def ours(self, **options: Any) -> Any:
        pairs: list[Any] = list(zip(self.tables, self.rows, strict=True))
        token, position, segment = (
            pair if k in self.parts else None for k, pair in enumerate(pairs)
        )
        norm = None if self.gain is None else (self.gain, 0.1)
        options = {"scale": 1.5, "norm": norm, "dy": self.dy, **options}
        return layer_gradients(token, position=position, segment=segment, **options)

    def autograd(self, *, skips=(None, None), mask=None):
        tables = [torch.from_numpy(t.astype(float)).requires_grad_() for t in self.tables]
        total: Any = 0
        for k in self.parts:
            skip = (*skips, None)[k]
            part = nn.functional.embedding(
                torch.from_numpy(self.rows[k]), tables[k], padding_idx=skip
            )
            part.retain_grad()
            self.looked_up = part if k == 0 else self.looked_up
            total = total + part * (1.5 if k == 0 else 1.0)
        norm = [torch.zeros(0, requires_grad=True)] * 2
        if self.gain is not None:
            norm = [torch.from_numpy(self.gain.astype(float)).requires_grad_()]
            norm.append(torch.zeros_like(norm[0], requires_grad=True))
            total = nn.functional.layer_norm(total, (total.shape[1],), *norm, eps=0.1)
        dy = torch.from_numpy(self.dy.astype(float))
        if mask is not None:
            dy = torch.where(torch.from_numpy(mask)[:, None], dy, 0)
        total.backward(dy)
        return [table.grad for table in tables], [one.grad for one in norm]

    def close(self, got, want):
        work = np.float64 if self.dtype == np.float64 else np.float32
        assert got.dtype == work
        tolerance = 1e-11 if work == np.float64 else 2e-4
        np.testing.assert_allclose(got, want.numpy(), atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("parts", [(0,), (0, 1), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("normed", [False, True])
def test_every_gradient_is_autograds(dtype, parts, normed, threads):
    case = Case(dtype, parts=parts, normed=normed)
    tables, norm = case.autograd(skips=(7, 4), mask=case.mask)
    got = case.ours(token_padding=7, position_padding=4, mask=case.mask)
    assert 7 not in got.token.ids and (np.diff(got.token.ids) > 0).all()
    case.close(got.token.dense(SIZES[0]), tables[0])
    if 1 in parts:
        assert 4 not in got.position.ids
        case.close(got.position.dense(SIZES[1]), tables[1])
    else:
        assert got.position is None
    if 2 in parts:
        case.close(got.segment, tables[2])
    else:
        assert got.segment is None
    if normed:
        case.close(got.norm_weight, norm[0])
        case.close(got.norm_bias, norm[1])
    else:
        assert got.norm_weight is None and got.norm_bias is None


@pytest.mark.parametrize("width", [33, 192])
@pytest.mark.parametrize("seconds", [90, 3])
def test_positions_are_summed_block_by_block_and_rows_written_past_the_caches(
    width, seconds, threads, monkeypatch
):
    monkeypatch.setattr(backward, "LARGE", 0)
    sizes, parts, places = (700, seconds, 3), (0, 1, 2), 1000
    case = Case(
        np.float32, parts=parts, normed=True, places=places, width=width, sizes=sizes
    )
    tables, norm = case.autograd(skips=(7, 2), mask=case.mask)
    got = case.ours(token_padding=7, position_padding=2, mask=case.mask)
    case.close(got.token.dense(700), tables[0])
    case.close(got.position.dense(seconds), tables[1])
    case.close(got.segment, tables[2])
    case.close(got.norm_weight, norm[0])
    case.close(got.norm_bias, norm[1])


def test_rows_of_added_tables_begin_again_at_their_end(threads):
    case = Case(np.float64, parts=(0, 1, 2), normed=True, sizes=(50, 40, 3))
    # Not to come out even, which a caller may not know.
    few = np.random.default_rng(1).permutation(40)[:24], np.array([2])
    case.rows[1:] = [np.resize(rows, 1000) for rows in few]
    tables, norm = case.autograd(mask=case.mask)
    case.rows[1:] = few
    got = case.ours(mask=case.mask)
    case.close(got.token.dense(50), tables[0])
    case.close(got.position.dense(40), tables[1])
    case.close(got.segment, tables[2])
    case.close(got.norm_weight, norm[0])


def test_token_rows_need_not_be_summed(threads):
    case = Case(np.float64, parts=(0, 1), normed=True)
    case.autograd(mask=case.mask)
    got = case.ours(by_id=False, mask=case.mask).token
    case.close(got, case.looked_up.grad)
    assert not got[~case.mask].any()


@pytest.mark.parametrize("normed", [False, True])
def test_whatever_is_masked_trains_nothing(normed):
    case = Case(np.float32, parts=(0, 1, 2), normed=normed)
    want = case.ours(mask=case.mask)
    case.dy[~case.mask] = np.nan
    bad = np.full((1, 33), np.nan, np.float32)
    case.tables[0] = np.concatenate([case.tables[0], bad])
    case.rows[0][~case.mask] = SIZES[0]
    got = case.ours(mask=case.mask)
    for name in ("token", "position"):
        a, b = getattr(got, name), getattr(want, name)
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.values, b.values)
    for name in ("segment", "norm_weight", "norm_bias")[: 3 if normed else 1]:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_sums_do_not_depend_on_the_number_of_threads():
    case, found = Case(np.float32, parts=(0, 1, 2), normed=True, places=5000), []
    before = kernels.get_num_threads()
    try:
        for n in (1, 2, 7):
            kernels.set_num_threads(n)
            found.append(case.ours())
    finally:
        kernels.set_num_threads(before)
    for other in found[1:]:
        for name in ("segment", "norm_weight", "norm_bias"):
            np.testing.assert_array_equal(getattr(found[0], name), getattr(other, name))
        np.testing.assert_array_equal(found[0].token.values, other.token.values)
        np.testing.assert_array_equal(found[0].position.values, other.position.values)


def test_a_gradient_of_few_ids_keeps_no_large_array_alive():
    table, ids = np.ones((3, 4), np.float32), np.arange(900) % 3
    dy = np.ones((900, 4), np.float32)
    got = layer_gradients((table, ids), scale=1.0, norm=None, dy=dy).token
    assert isinstance(got, RowGradient) and got.values.tolist() == [[300.0] * 4] * 3
    base = got.values.base
    assert base is None or base.nbytes <= 4 * got.values.nbytes


def test_no_places_at_all_give_zeros():
    case = Case(np.float32, parts=(0, 1, 2), normed=True, places=0)
    got = case.ours()
    assert got.token.ids.size == 0 and got.position.ids.size == 0
    assert not got.segment.any() and not got.norm_weight.any()


@pytest.mark.rejects
@pytest.mark.parametrize(
    "part, bad, message",
    [
        (0, -100, "ids must not be negative, got -100"),
        (0, 10**9, r"ids\[0\] is 1000000000, but the number of rows is 50"),
        (1, 9, r"positions\[7\] is 9, but the number of rows is 9"),
        (1, -9, r"positions\[7\] is -9, but the number of rows is 9"),
        (2, -1, r"segments\[7\] is -1, but the number of rows is 3"),
    ],
)
def test_rows_that_have_changed_since_are_refused_and_nothing_is_read(part, bad, message):
    case = Case(np.float32, parts=(0, 1, 2), normed=True)
    case.rows[part][7] = bad
    with pytest.raises((IndexError, ValueError), match=message):
        case.ours()


@pytest.mark.rejects
def test_fewer_ids_than_rows_are_refused():
    case = Case(np.float32, parts=(0, 1), normed=False)
    case.rows[0] = case.rows[0][:999]
    with pytest.raises(ValueError, match="an id for each of 1000 rows, got 999"):
        case.ours()
