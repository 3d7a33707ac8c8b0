"""Steps of a table and updates of its averages, counted as events.

Kernels and torch operators keep the rows of a table in different ways. This is what they
share: the event that the table is at, the one at which every row was last up to date, and
what averages record in between.
"""

import threading
import weakref
from typing import Any

from .missed_steps import MissedSteps
from .row_average import refuse_swapped


class TableEvents:
    """Base class of the states of tables.

    Args:
        missed: Steps that stale rows have missed.
        step: Number of steps taken before.
    """

    def __init__(self, missed: MissedSteps, step: int) -> None:
        self.missed = missed
        #: Number of steps taken.
        self.step_count = step
        #: Number of events: steps, and updates of an average.
        self.event_count = step
        #: Event at which every row was last up to date. ``missed`` counts from here.
        self.base_step = step
        #: Averages of the rows, which are caught up before rows are written.
        self.averages: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Whether a recorded step moves the weights of rows without a gradient.
        self._missed_moves = False
        self.lock = threading.RLock()

    @property
    def is_caught_up(self) -> bool:
        """Whether weight, state and average of every row are up to date."""
        return self.base_step == self.event_count

    @property
    def has_stale_weights(self) -> bool:
        """Whether the weight of some row may be out of date.

        False if only the state of rows is stale, as under RMSprop without momentum. Such
        rows may be read, but must catch up before a step with a gradient.
        """
        return self.base_step != self.event_count and self._missed_moves

    @property
    def needs_catch_up(self) -> bool:
        """Whether rows must catch up before they are read or written.

        Averages need the weights of the steps that they have missed.
        """
        return self.has_stale_weights or bool(self.averages) and not self.is_caught_up

    @property
    def is_swapped(self) -> bool:
        """Whether an average is in the table, and its weights elsewhere."""
        return any(average.is_swapped for average in self.averages)

    def attach_average(self, average: Any) -> None:
        """Catch an average up before rows are written, from now on.

        No row may have missed an update of an average that is new here.

        Args:
            average: :class:`~.row_average.RowAverage` of this table.
        """
        with self.lock:
            if average not in self.averages:
                average.start(self.missed)
                self.averages.add(average)

    def check_resize(self) -> None:
        """Raise an error unless the rows of the table may be selected or added."""
        refuse_swapped(self.averages, "a table must not be resized")

    def check_reset(self) -> None:
        """Raise an error unless rows may get the state of a new table's rows."""
        refuse_swapped(self.averages, "rows must not be reset")

    def _start_averages(self) -> None:
        for average in self.averages:
            average.start(self.missed)

    def _record_average(self, average: Any, decay: float) -> None:
        """Record an update of an average. ``missed`` must have a free column."""
        if self.is_caught_up:
            self.missed.restart_at_last_column()
            self._start_averages()
            self._missed_moves = False
        self.attach_average(average)
        average.record(self.missed, decay)
        for other in self.averages:
            if other is not average:
                other.add_column(self.missed)
        self.event_count += 1
