"""The kernel of n-grams: remainders of any 64-bit number, for any number of threads."""

import numpy as np
import pytest

from firstlayer.kernels import set_num_threads
from firstlayer.kernels.ngram import ngram_rows
from firstlayer.kernels.runtime.threads import get_num_threads

SIZES = [
    *(1, 2, 3, 61, 64, 2**16 - 1, 2**16, 2**16 + 1, 1_000_003, 16_000_057, 2**31 - 1),
    *(2**32, 2**40 + 15, 2**62 - 57, 2**62, 2**63 - 25, 2**63 - 1),
]


def rows(numbers: np.ndarray, *, sizes: list[int], multipliers: np.ndarray) -> np.ndarray:
    """Return the rows of ids of any size, one column for each modulus."""
    return ngram_rows(
        numbers[None],
        None,
        None,
        fill=0,
        stop=None,
        negative="hashed",
        no_id=-(2**63),
        multipliers=multipliers,
        sizes=np.array(sizes),
        offsets=np.zeros(len(sizes), np.int64),
    )[0]


@pytest.mark.parametrize("size", SIZES)
def test_remainders_are_exact(size):
    rng = np.random.default_rng(0)
    near = rng.integers(-(2**63) // size + 1, 2**63 // size, 5000) * size
    limits = np.array([2**63 - 1, -(2**63) + 1, 0, -1, 1, size, -size])
    anywhere = rng.integers(-(2**63) + 1, 2**63 - 1, 5000)
    # Multiples of the size are where a quotient that is slightly wrong shows.
    numbers = np.concatenate([near, near + 1, near - 1, limits, anywhere])
    numbers = np.where(numbers == -(2**63), 0, numbers)
    found = rows(numbers, sizes=[size], multipliers=np.array([[1]]))
    assert (found[:, 0] == numbers % size).all()


@pytest.mark.parametrize("sizes", [[101, 70_001, 99], [70_001, 16_000_057, 2**40]])
def test_rows_do_not_depend_on_the_number_of_threads(sizes):
    numbers = np.random.default_rng(1).integers(0, 2**40, 100_003)
    multipliers = np.array([2**22 + 1, 2**21 - 1])
    mix = numbers[1:] * multipliers[0] ^ numbers[:-1] * multipliers[1]
    before = get_num_threads()
    for threads in (1, 3):
        set_num_threads(threads)
        try:
            found = rows(numbers, sizes=sizes, multipliers=multipliers)
        finally:
            set_num_threads(before)
        assert (found == mix[:, None] % np.array(sizes)).all()


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
