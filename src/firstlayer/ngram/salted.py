"""The salted n-gram hash of nanochat."""

from collections.abc import Sequence
from dataclasses import dataclass

from .._check import positive
from .arguments import at_least, integer_tuple, set_argument
from .hashing import Hashing, Layout
from .primes import last_prime
from .scheme import Scheme, define

#: Multiplier of each id, newest first.
_MULTIPLIERS = (1000003, 998244353, 911382323, 805306457)
#: Added to the multipliers for each salt: of the newest id, and of older ones.
_NEWEST_SALT, _SALT = 2654435761, 40503


@dataclass(frozen=True, kw_only=True, eq=False)
class SaltedNgram(Scheme):
    """Rows of nanochat's n-gram table: several hashes read one table.

    The ids of an n-gram are multiplied by numbers that depend on the salt, added, and
    reduced modulo the largest prime that is at most ``rows``. Ids before the start count as
    0, and so do ids in another document and at or before a dead or negative id. Columns
    are sorted by order, then by salt.

    Args:
        orders: Number of ids in each n-gram, at most 4.
        salts: Number of rows for each order.
        rows: Number of rows of the table.

    Example:
        >>> scheme = SaltedNgram(orders=(2, 3), salts=2, rows=1000)
        >>> scheme.layout().sizes, scheme.layout().rows
        ((997, 997, 997, 997), 1000)
        >>> scheme([1])[0].tolist() == [1000003 % 997, (1000003 + 2654435761) % 997] * 2
        True
    """

    orders: Sequence[int] = (2, 3)
    salts: int = 2
    rows: int

    def __post_init__(self) -> None:
        orders = integer_tuple("orders", self.orders, at_least=1)
        set_argument(self, "orders", orders)
        if max(orders) > len(_MULTIPLIERS):
            raise ValueError(
                f"orders must be at most {len(_MULTIPLIERS)}, got {max(orders)}"
            )
        prime = last_prime(at_least("rows", self.rows, 2))
        multipliers = [
            tuple(_multiplier(s, salt) * (s < order) for s in range(max(orders)))
            for order in orders
            for salt in range(positive("salts", self.salts))
        ]
        columns = len(multipliers)
        layout = Layout(
            sizes=(prime,) * columns,
            offsets=(0,) * columns,
            multipliers=tuple(multipliers),
            rows=int(self.rows),
        )
        define(self, {None: layout}, Hashing(span=max(orders)))


def _multiplier(s: int, salt: int) -> int:
    return _MULTIPLIERS[s] + salt * (_SALT if s else _NEWEST_SALT)
