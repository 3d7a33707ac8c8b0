"""The kernel of n-grams: remainders of any 64-bit number, for any number of threads."""

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.kernels import set_num_threads
from firstlayer.kernels.ngram import ngram_rows
from firstlayer.kernels.runtime.threads import get_num_threads

POWERS = [2**k + d for k in range(2, 63) for d in (-1, 0, 1)]
SIZES = [1, 2, *POWERS, 61, 1_000_003, 16_000_057, 2**62 - 57, 2**63 - 25, 2**63 - 1]
# Reduced in one step, if no column is smaller.
LARGE_SIZES = [size for size in SIZES if size >= 2**15]
NO_ID = -(2**61) - 12345
int64s = st.integers(-(2**63), 2**63 - 1).filter(lambda number: number != NO_ID)


@contextmanager
def num_threads(count: int) -> Generator[None]:
    """Set the number of threads of kernels."""
    before = get_num_threads()
    set_num_threads(count)
    try:
        yield
    finally:
        set_num_threads(before)


def rows(
    numbers: np.ndarray, *, sizes: list[int], multipliers: np.ndarray, **options: Any
) -> np.ndarray:
    """Return the rows of ids of any size, one column for each modulus."""
    defaults: dict[str, Any] = {
        "documents": None,
        "table": None,
        "fill": 0,
        "stop": None,
        "negative": "hashed",
        "no_id": NO_ID,
        "offsets": np.zeros(len(sizes), np.int64),
    }
    return ngram_rows(
        np.atleast_2d(numbers),
        multipliers=multipliers,
        sizes=np.array(sizes),
        **defaults | options,
    )


def numbers_around(size: int) -> np.ndarray:
    """Return int64 at which the remainder of a quotient that is wrong by one shows."""
    rng = np.random.default_rng(size)
    limits = -(2**63) // size + 1, 2**63 // size - 1
    quotients = [*limits, 0, 1, -1, *rng.integers(*limits, 200, endpoint=True).tolist()]
    near = [q * size + d for q in quotients for d in (-1, 0, 1, size // 2)]
    ends = [-(2**63), -(2**63) + 1, 2**63 - 1, 2**63 - 2]
    anywhere = rng.integers(-(2**63), 2**63 - 1, 200).tolist()
    return np.array([n for n in near + ends + anywhere if -(2**63) <= n < 2**63])


@pytest.mark.parametrize("sizes", [SIZES, LARGE_SIZES], ids=["any", "large"])
@pytest.mark.parametrize("is_sum", [True, False])
def test_remainders_are_exact_at_the_edges(is_sum, sizes):
    numbers = np.unique(np.concatenate([numbers_around(size) for size in sizes]))
    multipliers = np.ones((len(sizes), 1), np.int64) if is_sum else np.array([1, 0])
    full = numbers if is_sum else np.concatenate([[0], numbers])
    offsets = np.arange(len(sizes)) * 3
    found = rows(full, sizes=sizes, multipliers=multipliers, offsets=offsets)[0]
    # NumPy's remainders are integer divisions.
    assert (found == numbers[:, None] % np.array(sizes) + offsets).all()


@settings(max_examples=300)
@given(
    st.lists(st.integers(1, 2**63 - 1) | st.integers(1, 2**16), min_size=1, max_size=20),
    st.lists(int64s, min_size=2, max_size=20),
    int64s,
)
def test_rows_are_those_of_python_integers(sizes, numbers, multiplier):
    def wrapped(x: int) -> int:
        return (x + 2**63) % 2**64 - 2**63

    multipliers = np.array([1, multiplier])
    pairs = list(itertools.pairwise(numbers))
    found = rows(np.array(numbers), sizes=sizes, multipliers=multipliers)[0]
    mixes = [new ^ wrapped(old * multiplier) for old, new in pairs]
    assert found.tolist() == [[mix % size for size in sizes] for mix in mixes]
    found = rows(
        np.array(numbers), sizes=sizes, multipliers=np.tile(multipliers, (len(sizes), 1))
    )[0]
    sums = [wrapped(new + wrapped(old * multiplier)) for old, new in pairs]
    assert found.tolist() == [[total % size for size in sizes] for total in sums]


@pytest.mark.parametrize("sizes", [[101, 70_001, 99], [70_001, 16_000_057, 2**40]])
def test_rows_do_not_depend_on_the_number_of_threads(sizes):
    numbers = np.random.default_rng(1).integers(0, 2**40, 100_003)
    multipliers = np.array([2**22 + 1, 2**21 - 1])
    mix = numbers[1:] * multipliers[0] ^ numbers[:-1] * multipliers[1]
    for threads in (1, 3):
        with num_threads(threads):
            found = rows(numbers, sizes=sizes, multipliers=multipliers)[0]
        assert (found == mix[:, None] % np.array(sizes)).all()


@pytest.mark.parametrize("negative", ["dead", "fill", "hashed"])
def test_windows_do_not_depend_on_the_number_of_threads(negative):
    rng = np.random.default_rng(2)
    full, multipliers = rng.integers(-1, 9, (37, 2003)), rng.integers(0, 2**50, (11, 4))

    def on(threads: int) -> np.ndarray:
        with num_threads(threads):
            return rows(
                full,
                sizes=[10**9 + k for k in range(11)],
                multipliers=multipliers,
                # The first two ids have none, and are in the document of the third.
                documents=np.tile(np.arange(2001) // 9, (37, 1)),
                stop=3,
                fill=5,
                negative=negative,
                no_id=-1,
            )

    assert (on(1) == on(3)).all()


def test_ids_beyond_the_map_read_no_memory_outside_of_it():
    found = ngram_rows(
        np.array([[2**40, 3]]),
        None,
        np.array([5, 6, 7, 8]),
        fill=0,
        stop=None,
        negative="dead",
        no_id=-1,
        multipliers=np.array([[1]]),
        sizes=np.array([100]),
        offsets=np.array([0]),
    )
    assert found.tolist() == [[[8], [8]]]
