"""The hash of byte groups of BLT, the byte latent transformer."""

from collections.abc import Sequence
from dataclasses import dataclass

from .._check import integer, positive
from .arguments import integer_tuple, set_argument
from .hashing import Hashing, Layout
from .scheme import Scheme, define

#: Base of the polynomial of each hash function.
_PRIMES = (
    *(1000000007, 5915587277, 1500450271, 3267000013, 5754853343, 4093082899),
    *(9576890767, 3628273133, 2860486313, 5463458053, 3367900313),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ByteGroups(Scheme):
    """Rows of BLT's hashed byte groups, of all tables joined into one.

    A group is a polynomial in a prime, whose coefficients are its bytes, oldest first, in
    64 bits with wrap-around, modulo ``rows``. Bytes before the start count as 0, and so do
    bytes in another document and at or before a dead or negative id. Columns are sorted by
    function, then by size. The model adds the vectors to the embedding of the byte.

    Args:
        sizes: Number of bytes in a group: ``encoder_hash_byte_group_size``.
        rows: Number of rows for each size and function:
            ``encoder_hash_byte_group_vocab``.
        functions: Number of hash functions, at most 11:
            ``encoder_hash_byte_group_nb_functions``.

    Example:
        >>> scheme = ByteGroups(sizes=(2, 3), rows=1000)
        >>> scheme.columns, scheme.layout().rows
        (2, 2000)
        >>> scheme([3, 5])[1].tolist()  # 3 + 5 p and 1000 + 3 p + 5 p**2, p = 10**9 + 7
        [38, 1266]
    """

    sizes: Sequence[int] = (3, 4, 5, 6, 7, 8)
    rows: int = 500_002
    functions: int = 1

    def __post_init__(self) -> None:
        sizes = integer_tuple("sizes", self.sizes, at_least=1)
        set_argument(self, "sizes", sizes)
        positive("rows", self.rows)
        if not 1 <= integer("functions", self.functions) <= len(_PRIMES):
            raise ValueError(
                f"functions must be between 1 and {len(_PRIMES)}, got {self.functions}"
            )
        multipliers = [
            tuple(_power(prime, size - 1 - s) for s in range(max(sizes)))
            for prime in _PRIMES[: self.functions]
            for size in sizes
        ]
        layout = Layout.of([self.rows] * len(multipliers), multipliers)
        define(self, {None: layout}, Hashing(span=max(sizes)))


def _power(prime: int, exponent: int) -> int:
    """Return a power in 64 bits with a sign, or 0 for a negative exponent."""
    power = prime**exponent if exponent >= 0 else 0
    return (power + 2**63) % 2**64 - 2**63
