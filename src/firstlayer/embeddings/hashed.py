"""Rows of ids that have no row of their own: hashes, quotients and remainders.

The hash of a 64-bit id is two rounds of SplitMix64's finalizer. In unsigned 64-bit
arithmetic with wrap-around::

    mix(z):  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
             z = (z ^ z >> 27) * 0x94D049BB133111EB
             return z ^ z >> 31
    G        = 0x9E3779B97F4A7C15
    key(k)   = mix(seed + (k + 2) * G)
    row(k)   = (mix(mix(id + G) ^ key(k)) >> 1) mod num_rows

An id has the same rows in every front end, process and version. Negative ids are hashed as
their two's complement. ``tests/embeddings/test_hashed.py`` has test vectors.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._array import cast, namespace_of
from .._check import integer, integers, not_negative, one_of, positive

_MASK = 2**64 - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MAX_HASHES = 64
#: Ways to combine the rows of an id, and those for more than two.
COMBINE, COMBINE_HASHES = ("multiply", "sum", "concat"), ("sum", "concat")


def splitmix64(state: int) -> int:
    """Return the output of the generator SplitMix64 after ``state``.

    Example:
        >>> hex(splitmix64(0))
        '0xe220a8397b1dcdaf'
    """
    return _mixed_int((state + _GAMMA) & _MASK)


def _mixed_int(z: int) -> int:
    z = (z ^ z >> 30) * _FIRST & _MASK
    z = (z ^ z >> 27) * _SECOND & _MASK
    return z ^ z >> 31


@dataclass(frozen=True, kw_only=True)
class HashedRows:
    """Rows of a table that an id is hashed to.

    Args:
        num_rows: Number of rows.
        hashes: Number of rows for each id, at most 64.
        seed: Seed of the hashes.
        first: Number of the first hash.

    Example:
        >>> rows = HashedRows(num_rows=1000, hashes=2)
        >>> rows(np.array([5, 2**40 + 5])).tolist()
        [[778, 359], [528, 386]]
    """

    num_rows: int
    hashes: int = 2
    seed: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        positive("num_rows", self.num_rows)
        if not 1 <= integer("hashes", self.hashes) <= MAX_HASHES:
            raise ValueError(
                f"hashes must be between 1 and {MAX_HASHES}, got {self.hashes}"
            )
        if not_negative("seed", self.seed) >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")

    @property
    def columns(self) -> int:
        """Number of rows for each id."""
        return self.hashes

    @property
    def keys(self) -> tuple[int, ...]:
        """Key of each hash."""
        numbers = range(self.first, self.first + self.hashes)
        return tuple(splitmix64(self.seed + (k + 1) * _GAMMA & _MASK) for k in numbers)

    def importance(self, num_rows: int) -> "HashedRows":
        """Return the row of each id in a table with the weights of these hashes.

        Args:
            num_rows: Number of rows of that table.
        """
        first = self.first + self.hashes
        return HashedRows(num_rows=num_rows, hashes=1, seed=self.seed, first=first)

    def __call__(self, ids: Any) -> Any:
        """Return the rows of each id, ``(..., hashes)`` int64.

        Args:
            ids: int64 array of NumPy or torch; of JAX where 64 bits are enabled.
        """
        if not ids.ndim:
            # NumPy warns about wrap-around in a single number, but not in an array.
            return self(ids[None])[0]
        mixed = _mixed(ids + _signed(_GAMMA))
        columns = [
            _shifted(_mixed(mixed ^ _signed(key)), 1) % self.num_rows for key in self.keys
        ]
        return namespace_of(ids).stack(columns, -1)


class HashedArguments:
    """Arguments of the hash as properties, for the layers of every front end."""

    rows: Any

    @property
    def _hashed(self) -> HashedRows:
        return getattr(self.rows, "hashed", self.rows)

    @property
    def num_rows(self) -> int:
        """Number of rows that ids are hashed to."""
        return self._hashed.num_rows

    @property
    def hashes(self) -> int:
        """Number of rows that an id is hashed to."""
        return self._hashed.hashes

    @property
    def seed(self) -> int:
        """Seed of the hashes."""
        return self._hashed.seed


class QuotientRemainderArguments:
    """Arguments of quotients and remainders as properties, for every front end."""

    rows: Any

    @property
    def num_embeddings(self) -> int:
        """Number of ids."""
        return self.rows.num_embeddings

    @property
    def buckets(self) -> int:
        """Number of remainders."""
        return self.rows.buckets


@dataclass(frozen=True, kw_only=True)
class QuotientRemainderRows:
    """Rows of the remainder and the quotient of an id, in one table.

    Args:
        num_embeddings: Number of ids.
        buckets: Number of remainders.

    Example:
        >>> rows = QuotientRemainderRows(num_embeddings=100, buckets=30)
        >>> rows.num_rows, rows(np.array([7, 67, 100])).tolist()
        (34, [[7, 30], [7, 32], [-1, -1]])
    """

    num_embeddings: int
    buckets: int
    columns = 2

    def __post_init__(self) -> None:
        positive("num_embeddings", self.num_embeddings)
        if not 1 <= integer("buckets", self.buckets) <= self.num_embeddings:
            raise ValueError(
                f"buckets must be between 1 and num_embeddings {self.num_embeddings}, "
                f"got {self.buckets}"
            )

    @classmethod
    def of(cls, num_embeddings: int, buckets: int | None) -> "QuotientRemainderRows":
        """Return the rows for a number of buckets; None is the root of the ids."""
        if buckets is None:
            buckets = math.isqrt(positive("num_embeddings", num_embeddings) - 1) + 1
        return cls(num_embeddings=num_embeddings, buckets=buckets)

    @property
    def num_rows(self) -> int:
        """Number of rows: one for each remainder and each quotient."""
        return self.buckets + -(-self.num_embeddings // self.buckets)

    def __call__(self, ids: Any) -> Any:
        """Return the two rows of each id, ``(..., 2)``; -1 if it is out of range."""
        xp = namespace_of(ids)
        in_range = (ids >= 0) & (ids < self.num_embeddings)
        rows = xp.stack([ids % self.buckets, self.buckets + ids // self.buckets], -1)
        return xp.where(in_range[..., None], rows, xp.full_like(rows, -1))


@dataclass(frozen=True, kw_only=True)
class FrequencyRows:
    """Own rows for frequent ids, hashed rows for all others, in one table.

    The first rows belong to the frequent ids in the order given, the next ``num_rows`` are
    hashed to. The last row is padding, which fills the further columns of frequent ids.

    Args:
        num_frequent: Number of ids with a row of their own.
        hashed: Rows of the other ids.
    """

    num_frequent: int
    hashed: HashedRows

    @property
    def columns(self) -> int:
        """Number of rows for each id, padding included."""
        return self.hashed.columns

    @property
    def num_rows(self) -> int:
        """Number of rows, padding included."""
        return self.num_frequent + self.hashed.num_rows + 1

    def __call__(self, ids: Any, *, frequent: Any, order: Any) -> Any:
        """Return the rows of each id, ``(..., hashes)``.

        Args:
            ids: int64 array of NumPy or torch; of JAX where 64 bits are enabled.
            frequent: The frequent ids, ascending.
            order: Row of each of them.
        """
        xp = namespace_of(ids)
        rows = self.hashed(ids) + self.num_frequent
        place = xp.clip(xp.searchsorted(frequent, ids), 0, self.num_frequent - 1)
        is_frequent = (frequent[place] == ids)[..., None]
        own = xp.full_like(rows, self.num_rows - 1)
        own = xp.concat([order[place][..., None], own[..., 1:]], axis=-1)
        return xp.where(is_frequent, own, rows)


def sorted_frequent(ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return frequent ids in ascending order, and the row of each.

    Args:
        ids: Different 64-bit integers, at least one.
    """
    given = np.asarray(ids)
    if given.ndim != 1 or not given.size:
        raise ValueError(
            f"frequent_ids must be a list of at least one id, got shape {given.shape}"
        )
    array = int64_bits(ids, name="frequent_ids")
    order = np.argsort(array, kind="stable")
    ordered = array[order]
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.size:
        raise ValueError(f"frequent_ids must be different, got {repeated[0]} twice")
    return ordered, order


def in_given_order(frequent: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return frequent ids in the order of their rows: undo :func:`sorted_frequent`."""
    ids = np.empty_like(frequent)
    ids[order] = frequent
    return ids


def int64_bits(ids: Any, *, name: str = "ids") -> np.ndarray:
    """Return integers of any dtype, or lists, as int64; a larger uint64 keeps its bits.

    Example:
        >>> int64_bits(np.array([2**64 - 1], np.uint64))
        array([-1])
    """
    ids = integers(ids, name=name)
    native = ids.astype(ids.dtype.newbyteorder("="), copy=False)
    return native.view(np.int64) if native.dtype == np.uint64 else native.astype(np.int64)


def hash_bits(ids: np.ndarray, *, seed: int, first: int, count: int) -> np.ndarray:
    """Return ``mix(mix(id + G) ^ key(k))`` for several ``k``, ``(n, count)`` int64.

    Args:
        ids: int64, ``(n,)``.
        seed: Seed of the hashes.
        first: The first ``k``.
        count: Number of hashes.

    Example:
        >>> rows = hash_bits(np.array([5]), seed=0, first=0, count=2) >> 1 & 2**63 - 1
        >>> (rows % 1000).tolist()
        [[778, 359]]
    """
    numbers = np.arange(first + 2, first + 2 + count, dtype=np.int64)
    keys = _mixed(numbers * _signed(_GAMMA) + _signed(seed))
    return _mixed(_mixed(ids + _signed(_GAMMA))[:, None] ^ keys)


def split_ids(ids: Any) -> np.ndarray:
    """Return 64-bit ids as pairs of 32 bits, ``(..., 2)`` uint32, the low bits first.

    JAX without ``jax_enable_x64`` drops the high bits of 64-bit ids in arguments of
    compiled functions; pairs pass unchanged.

    Args:
        ids: Integers of any dtype.

    Example:
        >>> split_ids(np.array([2**40 + 5])).tolist()
        [[5, 256]]
    """
    bits = int64_bits(ids).view(np.uint64)
    return np.stack([bits & np.uint64(2**32 - 1), bits >> np.uint64(32)], -1).astype(
        np.uint32
    )


def joined_pairs(pairs: Any) -> Any:
    """Return int64 ids from pairs of 32 bits, where 64 bits are enabled."""
    words = cast(pairs, "int64")
    return words[..., 0] | words[..., 1] << 32


def vector_width(
    embedding_dim: int, *, columns: int, combine: str, allowed: tuple[str, ...] = COMBINE
) -> int:
    """Return the width of a row, given that of the combined vector."""
    one_of("combine", combine, allowed)
    if combine != "concat":
        return positive("embedding_dim", embedding_dim)
    if positive("embedding_dim", embedding_dim) % columns:
        raise ValueError(
            f"embedding_dim must be a multiple of {columns} to concatenate as many rows, "
            f"got {embedding_dim}"
        )
    return embedding_dim // columns


def _mixed(z: Any) -> Any:
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Any, bits: int) -> Any:
    """Return int64 shifted right as unsigned numbers."""
    return z >> bits & 2 ** (64 - bits) - 1


def _signed(value: int) -> int:
    """Return an unsigned 64-bit number as a signed one with the same bits."""
    return (value + 2**63) % 2**64 - 2**63
