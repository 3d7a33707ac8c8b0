"""A thread that reads rows into memory, so that a later read finds them in memory."""

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

#: Requests that may wait. If there are more, the oldest one is dropped, because its rows
#: have likely been read by now.
MAX_WAITING = 32
#: An idle thread ends after this many seconds.
IDLE_SECONDS = 10.0


class Prefetcher:
    """Calls ``fetch(ids)`` on a thread of its own, which starts with the first call.

    Args:
        fetch: Reads rows into memory.
    """

    def __init__(self, fetch: Callable[[np.ndarray], None]) -> None:
        self.fetch = fetch
        self.waiting: deque[np.ndarray] = deque(maxlen=MAX_WAITING)
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.is_busy = self.is_closed = False
        self.error: BaseException | None = None

    def submit(self, ids: np.ndarray) -> None:
        """Add ids, which must not change later, and return at once."""
        with self.changed:
            self.waiting.append(ids)
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._run, name="firstlayer-prefetch", daemon=True
                )
                self.thread.start()
            self.changed.notify_all()

    def raise_error(self) -> None:
        """Raise the error of an earlier request, once."""
        if self.error is not None:
            with self.changed:
                error, self.error = self.error, None
            if error is not None:
                raise error

    def wait(self) -> None:
        """Return when no request is waiting or in work."""
        with self.changed:
            self.changed.wait_for(lambda: not self.waiting and not self.is_busy)

    def close(self) -> None:
        """Drop waiting requests and wait for the one in work."""
        with self.changed:
            self.waiting.clear()
            self.is_closed = True
            self.changed.notify_all()
            thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self.changed:
                has_work = self.changed.wait_for(
                    lambda: self.waiting or self.is_closed, IDLE_SECONDS
                )
                if not has_work or self.is_closed:
                    self.thread = None
                    return
                ids, self.is_busy = self.waiting.popleft(), True
            error = None
            try:
                self.fetch(ids)
            # Raised again by the next call of the store.
            except BaseException as caught:
                error = caught
            with self.changed:
                self.error, self.is_busy = error or self.error, False
                self.changed.notify_all()
