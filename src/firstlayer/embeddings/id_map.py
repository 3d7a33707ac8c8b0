"""Map from ids to the rows that they were given.

Row 0 is the unknown row. All ids without a row of their own read it. The rows from 1 on are
given to ids in the order in which they are first seen. When all of them are taken, the
id that was used least recently or least frequently loses its row.

Which row an id has follows from the sequence of batches alone. Within a batch, the ids that
have a row are used first, in the order of the batch; then new ids get rows, in the order of
their first occurrence. No id of a batch loses its row to another id of it. Among ids that
were used equally often, the least recently used loses its row first.
"""

import threading
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from jaxtyping import Int64

from .._check import one_of, positive
from .._interrupts import held_interrupts
from ..kernels.id_arrays import BORN, ID, USES, IdArrays, MissingIds
from .hashed import int64_bits

#: Ways to choose the id that loses its row.
EVICT = ("lru", "lfu")
#: Uses of a row are compared up to this number.
MAX_LEVEL = 2**16 - 1
#: Names of the arrays in the state of a map.
ARRAYS = ("ids", "uses", "order")


@dataclass(frozen=True, eq=False)
class Assigned:
    """Rows of a batch of ids.

    Args:
        rows: Row of each id, in the shape of the ids; 0 for those without one.
        new_rows: Rows that were given to an id in this batch.
        new_ids: The id that each of them was given to.
        evicted: Those of ``new_rows`` that another id has lost.
        batch: Number of the batch.
    """

    rows: Int64[np.ndarray, "*batch"]
    new_rows: Int64[np.ndarray, " new"]
    new_ids: Int64[np.ndarray, " new"]
    evicted: Int64[np.ndarray, " evicted"]
    batch: int


class IdMap:
    """Rows of ids. Changes in place.

    Args:
        capacity: Number of rows, without the unknown row.
        evict: ``"lru"``, ``"lfu"``, or None if no id loses its row.
        min_count: Number of times that an id must have been seen to get a row.

    Example:
        >>> id_map = IdMap(2, evict="lru")
        >>> id_map.assign(np.array([70, -5, 70])).rows.tolist()
        [1, 2, 1]
        >>> id_map.assign(np.array([-5, 2**40])).rows.tolist()
        [2, 1]
        >>> id_map.find(np.array([70, -5, 2**40])).tolist()
        [0, 2, 1]
    """

    def __init__(
        self, capacity: int, *, evict: str | None = "lru", min_count: int = 1
    ) -> None:
        self.capacity = positive("capacity", capacity)
        if self.capacity >= 2**31 - 1:
            raise ValueError(f"capacity must be below 2**31 - 1, got {capacity}")
        one_of("evict", evict, (*EVICT, None))
        self.evict, self.min_count = evict, positive("min_count", min_count)
        self._arrays = _new_arrays(capacity, self._num_levels)
        # Counts of the ids without a row: those of the last ``capacity`` of them. The least
        # recently seen is forgotten, so memory is bounded and old counts do not add up.
        self._candidates = self._arrays
        if self.min_count > 1:
            self._candidates = _new_arrays(capacity, 1)
        self._lock = threading.Lock()

    @property
    def _num_levels(self) -> int:
        return MAX_LEVEL if self.evict == "lfu" else 1

    @property
    def size(self) -> int:
        """Number of ids that have a row."""
        return int(self._arrays.numbers[0])

    @property
    def batch(self) -> int:
        """Number of the last batch."""
        return int(self._arrays.numbers[1])

    @property
    def ids(self) -> Int64[np.ndarray, " size"]:
        """Id of each row, from row 1 on."""
        return self._arrays.rows[1 : self.size + 1, ID].copy()

    def find(self, ids: Int64[np.ndarray, "*batch"]) -> Int64[np.ndarray, "*batch"]:
        """Return the row of each id, 0 for ids without one; change nothing."""
        from ..kernels.id_map import find_rows

        flat = np.array(ids, np.int64).reshape(-1)
        rows = np.empty(flat.size, np.int64)
        with self._lock, np.errstate(over="ignore"):
            find_rows(self._arrays, flat.view(np.uint64), rows)
        return rows.reshape(np.shape(ids))

    def assign(self, ids: Int64[np.ndarray, "*batch"]) -> Assigned:
        """Return the row of each id of a batch in training; new ids get a row.

        Args:
            ids: Ids of the batch.

        Raises:
            ValueError: If the batch has more ids than there are rows. Nothing changes.
        """
        from ..kernels.id_map import assign_rows, list_missing

        # A copy: another thread may change the ids.
        flat = np.array(ids, np.int64).reshape(-1)
        rows, totals = np.empty(flat.size, np.int64), np.zeros(3, np.int64)
        missing = MissingIds(
            np.zeros(_num_slots(flat.size), np.int64),
            np.empty(flat.size, np.uint64),
            np.empty(flat.size, np.int64),
            np.empty(flat.size, np.int64),
        )
        arrays, candidates, least = self._arrays, self._candidates, self.min_count
        with held_interrupts(), self._lock, np.errstate(over="ignore"):
            list_missing(
                arrays, candidates, flat.view(np.uint64), rows, missing, least, totals
            )
            found, count, room = totals.tolist()
            size = self.size
            if self.evict is None:
                room = min(room, self.capacity - size)
            elif found + room > self.capacity:
                raise ValueError(
                    f"capacity must be at least the number of different ids in a batch, "
                    f"{found + room}, got {self.capacity}"
                )
            assign_rows(arrays, candidates, rows, missing, count, room, least)
            batch = self.batch
        is_new = missing.rows[:count] > 0
        new_rows = missing.rows[:count][is_new]
        return Assigned(
            rows.reshape(np.shape(ids)),
            new_rows,
            missing.ids[:count][is_new].view(np.int64),
            new_rows[new_rows <= size],
            batch,
        )

    def keeps(self, rows: Int64[np.ndarray, "*batch"], batch: int) -> np.ndarray | None:
        """Return which rows still belong to the ids they had in a batch, or None for all.

        Args:
            rows: Rows of the ids of the batch.
            batch: Number of the batch.
        """
        arrays = self._arrays
        if arrays.numbers[1] == batch:
            return None
        is_kept = arrays.rows[rows, BORN] <= batch
        return None if is_kept.all() else is_kept

    def state(self) -> dict[str, Int64[np.ndarray, " rows"]]:
        """Return arrays to continue from, by name; all have ``capacity + 1`` entries.

        ``ids`` and ``uses`` are those of each row, and ``order`` counts the rows from 1 in
        the order of eviction; it is 0 for rows without an id. The names of ids that were
        seen fewer than ``min_count`` times begin with ``candidate_``.
        """
        from ..kernels.id_map import eviction_order

        state = {}
        parts = {"": self._arrays}
        if self.min_count > 1:
            parts["candidate_"] = self._candidates
        with self._lock:
            for prefix, arrays in parts.items():
                order = np.zeros(self.capacity + 1, np.int64)
                eviction_order(arrays, order)
                ids, uses = arrays.rows[:, ID].copy(), arrays.rows[:, USES].copy()
                values = dict(zip(ARRAYS, (ids, uses, order), strict=True))
                state |= {prefix + name: value for name, value in values.items()}
        return state

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the arrays of :meth:`state`."""
        more = [f"candidate_{name}" for name in ARRAYS] if self.min_count > 1 else []
        return *ARRAYS, *more

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from arrays of :meth:`state`. Nothing changes if they do not fit."""
        self.take_over(self.restored(state))

    def restored(self, state: dict[str, np.ndarray]) -> Self:
        """Return a map like this one with the rows of a state."""
        new = type(self)(self.capacity, evict=self.evict, min_count=self.min_count)
        new._arrays = new._candidates = self._restored(state, "", self._num_levels)
        if self.min_count > 1:
            new._candidates = self._restored(state, "candidate_", 1)
        return new

    def take_over(self, other: Self) -> None:
        """Continue with the arrays of another map, which must not be used afterwards."""
        new = other._arrays
        with self._lock:
            # Gradients of earlier batches belong to the earlier ids of these rows.
            new.numbers[1] = self._arrays.numbers[1] + 1
            new.rows[:, BORN] = new.numbers[1]
            self._arrays, self._candidates = new, other._candidates

    def _restored(self, state: dict[str, np.ndarray], prefix: str, levels: int) -> IdArrays:
        from ..kernels.id_map import restore_rows

        given = [_checked_array(state, prefix + name, self.capacity + 1) for name in ARRAYS]
        ids, uses, order = given
        size = int(np.count_nonzero(order))
        places = np.argsort(order[1 : size + 1], kind="stable")
        expected = np.arange(1, size + 1)
        if order[0] or not np.array_equal(order[1 : size + 1][places], expected):
            raise ValueError(
                f"{prefix}order must count the rows that are in use, from row 1 on, "
                "got something else"
            )
        least = 1 if not prefix else 0
        if size and uses[1 : size + 1].min() < least:
            raise ValueError(
                f"{prefix}uses must be at least {least}, got {uses[1 : size + 1].min()}"
            )
        new = _new_arrays(self.capacity, levels)
        used = [np.ascontiguousarray(array[1 : size + 1]) for array in (ids, uses)]
        with np.errstate(over="ignore"):
            count = restore_rows(new, used[0].view(np.uint64), used[1], places)
        if count != size:
            raise ValueError(f"{prefix}ids must be different, got one twice")
        return new

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {**self.__dict__, "_lock": None}
            state["_arrays"] = IdArrays(*(array.copy() for array in self._arrays))
            state["_candidates"] = None
            if self.min_count > 1:
                copies = (array.copy() for array in self._candidates)
                state["_candidates"] = IdArrays(*copies)
            return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.min_count == 1:
            self._candidates = self._arrays
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        evict, count = self.evict, self.min_count
        return f"IdMap({self.capacity}, evict={evict!r}, min_count={count})"


def _num_slots(count: int) -> int:
    """Return the number of slots of a hash table of ``count`` entries, a power of two."""
    return 1 << max(2, (2 * count - 1).bit_length())


def _new_arrays(capacity: int, num_levels: int) -> IdArrays:
    return IdArrays(
        np.zeros(_num_slots(capacity), np.int64),
        np.zeros((capacity + 1, 6), np.int64),
        np.zeros(num_levels + 1, np.int64),
        np.zeros(2, np.int64),
    )


def _checked_array(state: dict[str, np.ndarray], name: str, size: int) -> np.ndarray:
    if name not in state:
        raise ValueError(f"the state of the ids must have {name!r}, got {sorted(state)}")
    array = np.asarray(state[name])
    if array.shape != (size,) or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be {size} integers, got {array.dtype} of shape {array.shape}"
        )
    return int64_bits(array, name=name)
