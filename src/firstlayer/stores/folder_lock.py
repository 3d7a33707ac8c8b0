"""Lock of a folder that one process at a time may write to."""

import os
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "lock"


class FolderLock:
    """Lock file of a store, locked until it is released or the process ends.

    Args:
        folder: Folder of the store.
        path: Path that was opened, for the error message.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        if fcntl is None:
            raise RuntimeError("training on disk needs a POSIX system")
        self._descriptor = os.open(
            folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise RuntimeError(
                f"the store at {path} is open for training already; "
                "one process at a time can train it"
            ) from None
        _held_locks.add(self)

    @property
    def is_held(self) -> bool:
        """Whether the lock is held."""
        return self._descriptor >= 0

    def release(self) -> None:
        """Release the lock, if it is held."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


# Module state: locks that are held. A forked process closes its copies, which would keep
# the locks after the process that holds them was killed.
_held_locks: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
