"""Primes against a sieve."""

import numpy as np

from firstlayer.ngram.primes import is_prime, last_prime, next_prime


def test_primes_are_those_of_a_sieve():
    size = 20_000
    sieve = np.ones(size, bool)
    sieve[:2] = False
    for n in range(2, 142):
        sieve[2 * n :: n] = False
    assert [is_prime(n) for n in range(size)] == sieve.tolist()
    primes = np.flatnonzero(sieve).tolist()
    assert [next_prime(p) for p in primes[:-1]] == primes[1:]
    assert [last_prime(p - 1) for p in primes[1:]] == primes[:-1]


def test_large_primes_and_pseudoprimes():
    assert is_prime(2**61 - 1) and not is_prime((2**31 - 1) * (2**31 + 11))
    # Composite numbers that pass the test for the first 9 and 11 witnesses.
    assert not is_prime(3825123056546413051)
    assert next_prime(2**40) == 2**40 + 15
