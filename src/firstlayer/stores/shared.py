"""Tables in POSIX shared memory: one copy for all processes of a user on one computer.

A table has a name, a segment of shared memory and two lock files. A process that uses the
table has opened the first lock file itself and holds it shared (``flock``). A process that
gets it exclusively is alone:

- Opening: a process that is alone removes what a killed process left, creates the segment,
  fills it, and keeps the lock shared. Another process waits until the lock can be shared,
  that is until the segment is complete, and maps it.
- Closing: after a process released its lock, it tries to get it exclusively. If that works,
  nobody uses the table, and the process removes the segment and the lock files.
- Fork: a child would inherit its parent's lock, and the two would count as one. So the
  parent opens and locks the file once more before the fork, for the child to keep.
- Kill: the system releases the locks of a dead process. The next process that opens any
  table removes the tables that nobody has locked.

The lock files are removed under the exclusive lock. A process that got a lock therefore
checks that the file still has its name, and starts again if not.

The second lock file is held exclusively by the process that may write. A forked child of
it may only read.

Python's resource tracker is not involved: it would remove the segment as soon as the first
process ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .convert import check_writable_format, encoded_chunks, shared_parts
from .formats import RowFormat, format_by_name
from .memory import ArrayStore, MemoryStore
from .row_store import RowStore, checked_mode

if sys.platform != "win32":
    import _posixshmem
    import fcntl

MAGIC = b"firstlayer-shm-1"
#: Bytes before the rows: the magic bytes, the length of a description in JSON, and that.
HEADER_BYTES = mmap.PAGESIZE
_LENGTH = struct.Struct("<Q")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
#: Pause after another process removed the table that was being opened.
RETRY_SECONDS = 0.002

Source = RowStore | np.ndarray


class SharedStore(ArrayStore):
    """A table in shared memory, by name: one copy for many processes.

    The first process to open a name copies the table there; the others wait for it and then
    use the same memory. The memory is released when the last process closes the store or
    ends. Tables of killed processes are removed when the next one is opened. Forked
    children and processes that unpickle the store use the same memory, for example the
    workers of a ``DataLoader``.

    Any number of processes read; one at a time may write. A reader may see a row that is
    being written half old and half new.

    Args:
        name: Letters, digits, ``_``, ``.`` and ``-``.
        source: The table: an array, a store, or a function that returns one, called only
            if the name does not exist yet. None opens an existing name.
        format: Format to hold the table in; that of ``source`` if None.
        mode: ``"r"`` to read, ``"r+"`` to write rows too.

    Example:
        >>> table = np.eye(3, dtype=np.float32)
        >>> with SharedStore("example", table, mode="r+") as one:
        ...     with SharedStore("example") as other:
        ...         one.write([2], [[5, 6, 7]])
        ...         print(other.read([2]))
        [[5. 6. 7.]]
    """

    def __init__(
        self,
        name: str,
        source: Source | Callable[[], Source] | None = None,
        *,
        format: str | RowFormat | None = None,
        mode: str = "r",
    ) -> None:
        if sys.platform == "win32":
            raise RuntimeError("shared stores need POSIX shared memory")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                "name must be 1 to 100 letters, digits, '_', '.' or '-', not beginning "
                f"with '.' or '-', got {name!r}"
            )
        checked_mode(mode)
        chosen = None if format is None else format_by_name(format)
        _remove_unused_tables()
        locks, memory = _opened(name, source, chosen)
        try:
            if mode == "r+":
                locks.lock_for_writing()
            about, parts = _parts(memory, name, writable=mode == "r+")
            if chosen is not None and chosen.name != about["format"]:
                raise ValueError(
                    f"shared store {name!r} has rows of format {about['format']}, but "
                    f"format is {chosen.name!r}"
                )
            super().__init__(parts, about["width"], format_by_name(about["format"]), mode)
        except BaseException:
            locks.release()
            raise
        self._name, self._locks = name, locks
        # Also runs at the end of the process.
        self._release = weakref.finalize(self, locks.release)
        _open_stores.add(self)

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._name

    def close(self) -> None:
        """Release the table, and remove it if no other process uses it.

        Arrays that were handed out stay valid.
        """
        super().close()
        self._release()

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return SharedStore, (self._name,)

    def __repr__(self) -> str:
        rows, width = self._shape
        return f"SharedStore({self._name!r}: {rows} × {width}, {self._format.name})"

    def _become_reader(self) -> None:
        """Refuse writes in a forked child: its parent writes."""
        if self._mode == "r+":
            self._mode = "r"
            for part in self._parts.values():
                part.flags.writeable = False


class _Locks:
    """The locks of one table that this process holds.

    Args:
        name: Name of the table.
        descriptor: The lock file, held shared.
    """

    def __init__(self, name: str, descriptor: int) -> None:
        self.name, self.descriptor = name, descriptor
        self.writer: int | None = None
        # Locks for children of forks that are under way.
        self.for_children: list[int] = []

    def lock_for_writing(self) -> None:
        """Hold the lock of the only writer, or raise a ValueError."""
        descriptor = _open_lock(_writer_lock(self.name), create=True)
        if not _flock(descriptor, exclusive=True, wait=False):
            process = os.pread(descriptor, 20, 0).decode(errors="replace")
            os.close(descriptor)
            raise ValueError(
                f"shared store {self.name!r} is already open for writing, by process "
                f"{process}"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self.writer = descriptor

    def release(self) -> None:
        """Release the locks, and remove the table if no other process has it."""
        descriptors = [self.descriptor, self.writer, *self.for_children]
        self.descriptor, self.writer, self.for_children = -1, None, []
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        _remove_if_unused(self.name)

    def before_fork(self) -> None:
        """Hold the lock once more, for the child."""
        if self.descriptor < 0:
            return
        with contextlib.suppress(OSError):
            descriptor = _open_lock(_lock(self.name), create=False)
            _flock(descriptor, exclusive=False, wait=True)
            self.for_children.append(descriptor)

    def after_fork_in_parent(self) -> None:
        """Leave the lock to the child."""
        if self.for_children:
            os.close(self.for_children.pop())

    def after_fork_in_child(self) -> None:
        """Keep the lock of this process only."""
        inherited = [self.descriptor, self.writer, *self.for_children[:-1]]
        self.descriptor = self.for_children[-1] if self.for_children else -1
        self.writer, self.for_children = None, []
        for descriptor in inherited:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)


def _opened(name: str, source: Any, format: RowFormat | None) -> tuple[_Locks, mmap.mmap]:
    """Return the locks and the memory of a table, created if this process is alone."""
    while True:
        descriptor = _open_lock(_lock(name), create=True)
        try:
            if _flock(descriptor, exclusive=True, wait=False):
                if not _has_name(descriptor, _lock(name)):
                    continue
                _remove_segment(name)
                if source is None:
                    _unlink(_lock(name))
                    raise FileNotFoundError(f"no shared store {name!r}")
                try:
                    _create(name, source, format)
                except BaseException:
                    _remove_segment(name)
                    _unlink(_lock(name))
                    raise
            # The system may release the lock for a moment before it is shared. What another
            # process removes in that moment is missing below.
            _flock(descriptor, exclusive=False, wait=True)
            memory = _attached(name) if _has_name(descriptor, _lock(name)) else None
            if memory is not None:
                locks, descriptor = _Locks(name, descriptor), -1
                return locks, memory
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        time.sleep(RETRY_SECONDS)


def _create(name: str, source: Any, format: RowFormat | None) -> None:
    """Create the segment of a table and copy the table to it."""
    found = source() if callable(source) else source
    store = found if isinstance(found, RowStore) else MemoryStore(found)
    target = store.format if format is None else format
    check_writable_format(store, target)
    shared = shared_parts(store, target)
    rows, width = store.shape
    about = {"format": target.name, "rows": rows, "width": width, "shared": {}}
    end = HEADER_BYTES + rows * target.row_bytes(width)
    for part, array in shared.items():
        start = -(-end // 8) * 8
        about["shared"][part] = [array.dtype.name, start]
        end = start + array.nbytes
    descriptor = _posixshmem.shm_open(
        _segment(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600
    )
    try:
        # Memory that is only promised would end the process when it is first written.
        try:
            os.posix_fallocate(descriptor, 0, end)
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            raise OSError(
                error.errno, f"no shared memory for the {end} bytes of {name!r}: {reason}"
            ) from None
        memory = mmap.mmap(descriptor, end)
    finally:
        os.close(descriptor)
    table = np.frombuffer(memory, np.uint8, rows * target.row_bytes(width), HEADER_BYTES)
    table = table.reshape(rows, target.row_bytes(width))
    for lo, parts in encoded_chunks(store, target, shared):
        encoded = target.join(parts)
        table[lo : lo + len(encoded)] = encoded
    for part, array in shared.items():
        start = about["shared"][part][1]
        memory[start : start + array.nbytes] = array.tobytes()
    text = json.dumps(about).encode()
    memory[16 : 24 + len(text)] = _LENGTH.pack(len(text)) + text
    # Last: a segment without these bytes is incomplete.
    memory[:16] = MAGIC


def _attached(name: str) -> mmap.mmap | None:
    """Return the memory of a complete segment, or None."""
    try:
        descriptor = _posixshmem.shm_open(_segment(name), os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(descriptor).st_size < HEADER_BYTES:
            return None
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    return memory if memory[:16] == MAGIC else None


def _parts(
    memory: mmap.mmap, name: str, *, writable: bool
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the description of a segment and the parts of its table."""
    length = _LENGTH.unpack_from(memory, 16)[0]
    about = json.loads(memory[24 : 24 + min(length, HEADER_BYTES)])
    format, rows, width = format_by_name(about["format"]), about["rows"], about["width"]
    row_bytes = format.row_bytes(width)
    table = np.frombuffer(memory, np.uint8, rows * row_bytes, HEADER_BYTES)
    parts = format.split(table.reshape(rows, row_bytes), width)
    for part, (dtype, start) in about["shared"].items():
        kind = _dtype(dtype)
        parts[part] = np.frombuffer(memory, kind, 1, start).reshape(1, 1)
    for part in parts.values():
        part.flags.writeable = writable
    return about, parts


def _dtype(name: str) -> np.dtype:
    from .._check import float_dtype

    return float_dtype(name)


def _remove_unused_tables() -> None:
    """Remove the tables of killed processes."""
    prefix, suffix = _lock("").name.removesuffix(".lock"), ".lock"
    with contextlib.suppress(OSError):
        for file in os.listdir(_folder()):
            if file.startswith(prefix) and file.endswith(suffix):
                _remove_if_unused(file.removeprefix(prefix).removesuffix(suffix))


def _remove_if_unused(name: str) -> None:
    """Remove a table that no process uses."""
    try:
        descriptor = _open_lock(_lock(name), create=False)
    except (OSError, ValueError):
        return
    try:
        alone = _flock(descriptor, exclusive=True, wait=False)
        if alone and _has_name(descriptor, _lock(name)):
            _remove_segment(name)
            _unlink(_writer_lock(name))
            _unlink(_lock(name))
    finally:
        os.close(descriptor)


def _open_lock(path: Path, *, create: bool) -> int:
    """Open a lock file of this user."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o600)
    # Anybody may create files in the folder.
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"{path} belongs to another user")
    return descriptor


def _flock(descriptor: int, *, exclusive: bool, wait: bool) -> bool:
    """Lock a file; return False if that would mean to wait."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _has_name(descriptor: int, path: Path) -> bool:
    """Return whether a path still names an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove_segment(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        _posixshmem.shm_unlink(_segment(name))


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _folder() -> Path:
    # The folder of the segments on Linux: containers that share one share the other.
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def _segment(name: str) -> str:
    return f"/firstlayer-{os.geteuid()}-{name}"


def _lock(name: str) -> Path:
    return _folder() / f".firstlayer-{os.geteuid()}-{name}.lock"


def _writer_lock(name: str) -> Path:
    return _folder() / f".firstlayer-{os.geteuid()}-{name}.writer"


_open_stores: weakref.WeakSet[SharedStore] = weakref.WeakSet()


def _before_fork() -> None:
    for store in list(_open_stores):
        store._locks.before_fork()


def _after_fork_in_parent() -> None:
    for store in list(_open_stores):
        store._locks.after_fork_in_parent()


def _after_fork_in_child() -> None:
    for store in list(_open_stores):
        store._locks.after_fork_in_child()
        store._become_reader()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
