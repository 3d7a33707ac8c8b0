"""Prime numbers, which size the tables of n-gram heads."""

# Witnesses that make the test of Miller and Rabin exact below 3.3e24.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(n: int) -> bool:
    """Return whether ``n`` is prime.

    Example:
        >>> [n for n in range(-3, 12) if is_prime(n)]
        [2, 3, 5, 7, 11]
    """
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(n, witness, odd, twos) for witness in _WITNESSES)


def _passes(n: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, n)
    if power in (1, n - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % n
        if power == n - 1:
            return True
    return False


def next_prime(n: int) -> int:
    """Return the smallest prime greater than ``n``.

    Example:
        >>> next_prime(13)
        17
    """
    n += 1
    while not is_prime(n):
        n += 1
    return n


def last_prime(n: int) -> int:
    """Return the largest prime that is at most ``n``, which is at least 2.

    Example:
        >>> last_prime(16)
        13
    """
    while not is_prime(n):
        n -= 1
    return n
