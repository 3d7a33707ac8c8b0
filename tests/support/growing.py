"""Obvious references for tables whose rows are given to ids as they are seen."""

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

from tests.support.optim_cases import dense

WIDTH = 3


class ReferenceMap:
    """What :class:`firstlayer.embeddings.id_map.IdMap` does, with dictionaries.

    Args:
        capacity: Number of rows.
        evict: ``"lru"``, ``"lfu"`` or None.
        min_count: Number of times that an id must have been seen to get a row.
    """

    def __init__(self, capacity: int, *, evict: str | None, min_count: int) -> None:
        self.capacity, self.evict, self.min_count = capacity, evict, min_count
        self.rows: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        # Least recently used first.
        self.recent: OrderedDict[int, None] = OrderedDict()
        self.counts: OrderedDict[int, int] = OrderedDict()

    def assign(self, ids: list[int]) -> tuple[list[int], dict[int, int]]:
        """Return the rows of a batch, and the new ids with their rows."""
        missing = Counter(i for i in ids if i not in self.rows)
        found = {i for i in ids if i in self.rows}
        entitled = {
            i for i, n in missing.items() if n + self.counts.get(i, 0) >= self.min_count
        }
        if self.evict is not None and len(found) + len(entitled) > self.capacity:
            raise ValueError
        for i in ids:
            if i in found:
                self.uses[i] += 1
                self.recent.move_to_end(i)
        new = {}
        for i, count in missing.items():
            total = self._count(i, count, i in entitled)
            row = self._free_row(set(ids)) if i in entitled else None
            if row is not None:
                self.rows[i], self.uses[i], self.recent[i] = row, total, None
                new[i] = row
        return [self.rows.get(i, 0) for i in ids], new

    def _count(self, id_: int, count: int, is_entitled: bool) -> int:
        total = count + self.counts.get(id_, 0)
        if self.min_count > 1 and (id_ in self.counts or not is_entitled):
            if id_ not in self.counts and len(self.counts) == self.capacity:
                self.counts.popitem(last=False)
            self.counts[id_] = 0 if is_entitled else total
            self.counts.move_to_end(id_)
        return total

    def _free_row(self, batch: set[int]) -> int | None:
        if len(self.rows) < self.capacity:
            return len(self.rows) + 1
        if self.evict is None:
            return None
        others = [i for i in self.recent if i not in batch]
        # min returns the first of equals, the least recently used.
        lost = others[0] if self.evict == "lru" else min(others, key=self.uses.__getitem__)
        del self.uses[lost], self.recent[lost]
        return self.rows.pop(lost)


class ReferenceTable:
    """A dense optimizer on a table that has another row whenever an id gets one.

    No row is ever used again, so there is no state to reset: a row is zero, and so is its
    state, until it gets its initial value.

    Args:
        name: Name of the dense optimizer.
        options: Its options.
        initial: Function that returns the initial values of ids.
        arguments: Arguments of :class:`ReferenceMap`.
    """

    def __init__(
        self, name: str, options: dict[str, Any], initial: Any, *args: Any, **arguments: Any
    ) -> None:
        self.map, self.initial = ReferenceMap(*args, **arguments), initial
        self.weight = torch.nn.Parameter(torch.zeros(400, WIDTH, dtype=torch.float64))
        self.optimizer = dense(name, [self.weight], **options)
        self.count, self.places = 1, {0: 0}
        self.sign = -1 if options.get("maximize") else 1

    def assign(self, ids: np.ndarray) -> torch.Tensor:
        """Return the places of a batch of ids in the table."""
        rows, new = self.map.assign(ids.tolist())
        for id_, row in new.items():
            with torch.no_grad():
                self.weight[self.count] = torch.from_numpy(self.initial(np.array([id_])))[0]
            self.places[row] = self.count
            self.count += 1
        return torch.tensor([self.places[row] for row in rows])

    def step(self, places: torch.Tensor, goal: np.ndarray) -> None:
        """Take a step towards a goal."""
        self.optimizer.zero_grad()
        loss = (self.weight[places] - torch.from_numpy(goal)).square().sum()
        (0.5 * self.sign * loss).backward()
        self.optimizer.step()
