"""The plan of the layer's backward: which rows tokens write, and in which blocks."""

import numpy as np
import pytest

from firstlayer import kernels

rng = np.random.default_rng(0)
NUM_TOKENS = 400


def plan(position_rows, *, ids=None, mask=None, skip=None):
    return kernels.plan_backward(
        rng.integers(0, 300, NUM_TOKENS) if ids is None else ids,
        position_rows,
        tokens=np.arange(NUM_TOKENS) if mask is None else np.flatnonzero(mask),
        num_tokens=NUM_TOKENS,
        skip=skip,
        shared_rows=2,
    )


@pytest.mark.parametrize("position_rows", [None, np.arange(40), np.zeros(1, np.int64)])
def test_a_repeated_id_has_one_partial_row_for_each_block(position_rows):
    ids = rng.integers(0, 200, NUM_TOKENS)
    mask = rng.random(NUM_TOKENS) < 0.9
    skip = ids[mask][0]
    got = plan(position_rows, ids=ids, mask=mask, skip=skip)
    has_gradient = mask & (ids != skip)
    unique, counts = np.unique(ids[has_gradient], return_counts=True)
    np.testing.assert_array_equal(got.ids, unique)
    np.testing.assert_array_equal(got.repeated, np.flatnonzero(counts > 1))
    assert got.partial_starts[0] == unique.size
    assert (got.buffer_rows[~has_gradient] == -1).all()
    written = set()
    for block in np.split(got.token_order, got.block_starts[1:-1]):
        row_of_id = {}
        for token in block[has_gradient[block]]:
            row, is_first = got.buffer_rows[token], ids[token] not in row_of_id
            assert (row >= 0) == is_first
            target = row if is_first else -2 - row
            assert row_of_id.setdefault(ids[token], row) == target
        assert not written & set(row_of_id.values())
        written |= set(row_of_id.values())
        for id_, row in row_of_id.items():
            final = np.searchsorted(unique, id_)
            if counts[final] == 1:
                assert row == final
            else:
                group = np.searchsorted(got.repeated, final)
                assert got.partial_starts[group] <= row < got.partial_starts[group + 1]
    # Every row is written but those that the partial rows are summed into.
    assert written == set(range(got.partial_starts[-1])) - set(got.repeated)
    assert any(row < -1 for row in got.buffer_rows)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "kind", ["positions", "many", "one is frequent", "few", "all differ"]
)
def test_tokens_of_a_position_row_are_in_one_block_unless_rows_are_few(kind, masked):
    n = NUM_TOKENS
    position_rows = {
        "positions": np.arange(5, 45),
        "many": rng.integers(0, 60, n),
        "one is frequent": np.where(rng.random(n) < 0.5, 3, rng.integers(0, 300, n)),
        "few": rng.integers(0, 3, n),
        "all differ": rng.permutation(n),
    }[kind]
    mask = rng.random(n) < (0.7 if masked else 2.0)
    row_of_token = np.resize(position_rows, n)
    got = plan(position_rows, mask=mask)
    unique = got.unique_position_rows
    assert got.position_indices is not None
    np.testing.assert_array_equal(unique, np.unique(row_of_token[mask]))
    np.testing.assert_array_equal(np.sort(got.token_order), np.flatnonzero(mask))
    np.testing.assert_array_equal(unique[got.position_indices[mask]], row_of_token[mask])
    assert got.block_starts[0] == 0 and got.block_starts[-1] == mask.sum()
    assert got.splits_positions == (kind == "few")
    blocks = np.split(got.token_order, got.block_starts[1:-1])
    # In memory order, and several of them, so that threads can share the work.
    assert all(block.size and (np.diff(block) > 0).all() for block in blocks)
    assert len(blocks) >= 8
    if not got.splits_positions:
        rows = [set(row_of_token[block]) for block in blocks]
        assert sum(map(len, rows)) == len(set().union(*rows))


def test_a_plan_without_tokens_has_one_empty_block():
    got = plan(np.arange(10), mask=np.zeros(NUM_TOKENS, bool))
    assert got.block_starts.tolist() == [0, 0]
    assert got.unique_position_rows.size == got.ids.size == 0


def test_without_ids_each_token_has_its_own_row():
    got = kernels.plan_backward(
        None, None, tokens=np.array([0, 2]), num_tokens=3, skip=None, shared_rows=2
    )
    assert got.buffer_rows.tolist() == [0, 1, 2] and got.repeated.size == 0
    assert got.token_order.tolist() == [0, 2] and got.partial_starts.tolist() == [3]
