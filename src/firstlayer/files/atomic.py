"""Replace files and folders atomically, and read folders that are being replaced.

New content is written under a temporary name in the same folder, synced to disk, and then
renamed, so a process killed at any moment leaves the old content or the new one. A folder
is exchanged with its replacement in one step where the system can (Linux, ``renameat2``).
Elsewhere the old folder is first moved away, and :func:`recover_folder` moves it back after
a kill between the two steps.

A writer holds a lock on its temporary file or folder, which ends with the process. The next
writer in the same place removes every temporary file and folder that nobody has locked.

New content has the permissions of what it replaces from its first byte on. A symbolic link
stays a link, and its target is replaced.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
#: Opens a file, as the ``opener`` argument of :func:`open`.
Opener = Callable[[str, int], int]

#: Name of a temporary file or folder, or of a folder that was moved away.
_LEFTOVER = re.compile(r"\.firstlayer-[0-9a-f]{16}\.(?:tmp|(.*)\.old)", re.DOTALL)
#: ``AT_FDCWD`` and ``RENAME_EXCHANGE`` of Linux.
_CURRENT_FOLDER, _EXCHANGE = -100, 2
#: Errors of a system or file system that cannot exchange two names.
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
#: Attempts to read a folder that is replaced again and again.
_ATTEMPTS = 100


@contextlib.contextmanager
def replacing(target: str) -> Generator[BinaryIO, None, None]:
    """Open a file that replaces ``target`` once it is written and synced.

    If an exception is raised inside the block, ``target`` stays as it was.
    """
    mode = _file_mode(target)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"no folder {folder} to save {target} in")
    remove_leftovers(folder)
    temporary = _temporary_name(folder)
    try:
        with _create(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


@contextlib.contextmanager
def replacing_folder(target: Path) -> Generator[Path, None, None]:
    """Yield a new folder that replaces ``target`` if the block succeeds.

    The block writes and syncs the files. ``target`` may be missing.
    """
    parent = os.fspath(target.parent)
    recover_folder(target)
    remove_leftovers(parent)
    new = _temporary_name(parent)
    try:
        with _created_folder(new, _folder_mode(target)):
            yield Path(new)
            _sync_folder(new)
            _put_in_place(new, os.fspath(target))
            _sync_folder(parent)
    finally:
        # The old content, or the new one after an error.
        shutil.rmtree(new, ignore_errors=True)


def recover_folder(target: Path) -> None:
    """Move a folder back that a killed writer moved away, if nothing is in its place."""
    if os.path.lexists(target):
        return
    with contextlib.suppress(OSError):
        matches = map(_LEFTOVER.fullmatch, os.listdir(target.parent))
        names = [match[0] for match in matches if match and match[1] == target.name]
        if names:
            newest = max(names, key=lambda name: (target.parent / name).stat().st_mtime_ns)
            os.rename(target.parent / newest, target)


def remove_leftovers(folder: str) -> None:
    """Remove temporary files and folders of writers that no longer run.

    A folder that was moved away is kept if nothing is in its place.
    """
    matches = [_LEFTOVER.fullmatch(name) for name in os.listdir(folder)]
    for match in filter(None, matches):
        moved_from = match[1]
        if moved_from and not os.path.lexists(os.path.join(folder, moved_from)):
            continue
        path = os.path.join(folder, match[0])
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not _lock(descriptor, wait=False):
                    continue
                if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)
            finally:
                os.close(descriptor)


def read_folder(folder: Path, read: Callable[[Opener], T]) -> T:
    """Return ``read(opener)``, whose files all come from the same version of a folder.

    The opener opens files by their name in the folder that was at this path when reading
    began. If that folder is replaced and removed while it is read, reading starts again.

    Args:
        folder: The folder.
        read: Reads files with ``open(path, opener=opener)``, and raises a ValueError if
            they do not belong together.
    """
    recover_folder(folder)
    for attempt in range(_ATTEMPTS):
        descriptor = _open_folder(folder)
        try:
            return read(_opener_in(descriptor))
        except (OSError, ValueError):
            if attempt == _ATTEMPTS - 1 or not _was_replaced(folder, descriptor):
                raise
        finally:
            if descriptor is not None:
                os.close(descriptor)
    raise RuntimeError("the last attempt returns or raises")


def check_regular(path: str | Path, mode: int) -> None:
    """Raise unless the mode of a path, as :func:`os.stat` gives it, is that of a file."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"path must be a file, but {path} is a folder")
    if not stat.S_ISREG(mode):
        raise ValueError(f"path must be a regular file, but {path} is a device or pipe")


def _temporary_name(folder: str) -> str:
    return os.path.join(folder, f".firstlayer-{secrets.token_hex(8)}.tmp")


def _file_mode(target: str) -> int | None:
    """Return the permissions of a file, or None if there is none."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    check_regular(target, mode)
    return stat.S_IMODE(mode)


def _folder_mode(target: Path) -> int | None:
    try:
        return stat.S_IMODE(os.stat(target).st_mode)
    except FileNotFoundError:
        return None


def _create(path: str, mode: int | None) -> BinaryIO:
    """Create and lock a file with these permissions, or with the default ones."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags, 0o666 if mode is None else 0o600)
        if mode is not None:
            os.fchmod(descriptor, mode)
        return descriptor

    file = open(path, "xb", opener=opener)
    _lock(file.fileno(), wait=True)
    if not os.path.exists(path):
        # Another writer took the file for a leftover before it was locked.
        file.close()
        return _create(path, mode)
    return file


@contextlib.contextmanager
def _created_folder(path: str, mode: int | None) -> Generator[None, None, None]:
    """Create a folder and lock it during the block."""
    descriptor = None
    while descriptor is None:
        os.mkdir(path, 0o777 if mode is None else 0o700)
        if mode is not None:
            os.chmod(path, mode)
        descriptor = _open_folder(Path(path))
        if descriptor is None:
            break
        _lock(descriptor, wait=True)
        if not os.path.exists(path):
            # Another writer took the folder for a leftover before it was locked.
            os.close(descriptor)
            descriptor = None
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Lock a file or folder; return False if it is locked already or cannot be locked."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _put_in_place(new: str, target: str) -> None:
    """Move a folder to ``target``; what was there is at ``new`` afterwards, or removed."""
    while True:
        try:
            if not os.path.lexists(target):
                os.rename(new, target)
            else:
                _exchange(new, target)
            return
        except OSError as error:
            # Another writer created or moved away the target in the meantime.
            if error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                if os.path.lexists(new):
                    continue
            if error.errno not in _NO_EXCHANGE:
                raise
        if _move_away(new, target):
            return


def _move_away(new: str, target: str) -> bool:
    """Replace a folder in two steps; return whether no other writer interfered."""
    folder, name = os.path.split(target)
    old = os.path.join(folder, f".firstlayer-{secrets.token_hex(8)}.{name}.old")
    try:
        os.rename(target, old)
    except FileNotFoundError:
        return False
    try:
        os.rename(new, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.rename(old, target)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    finally:
        if os.path.lexists(target):
            shutil.rmtree(old, ignore_errors=True)
    return True


def _exchange(one: str, other: str) -> None:
    """Exchange two names in one step, or raise an OSError."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        raise OSError(errno.ENOSYS, "this system cannot exchange two names") from None
    paths = os.fsencode(one), os.fsencode(other)
    here = ctypes.c_int(_CURRENT_FOLDER)
    if renameat2(here, paths[0], here, paths[1], ctypes.c_uint(_EXCHANGE)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), one, None, other)


def _sync_folder(folder: str) -> None:
    # A rename is durable only once the folder is synced. Some systems cannot sync a
    # folder; the files are complete in any case.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_folder(folder: Path) -> int | None:
    """Return a descriptor of a folder, or None where files cannot be opened from one."""
    if os.open not in os.supports_dir_fd:
        return None
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


def _opener_in(descriptor: int | None) -> Opener:
    if descriptor is None:
        return os.open
    return lambda path, flags: os.open(
        os.path.basename(path), flags | os.O_NONBLOCK, dir_fd=descriptor
    )


def _was_replaced(folder: Path, descriptor: int | None) -> bool:
    if descriptor is None:
        return False
    try:
        return not os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        # Another writer replaces the folder in two steps.
        recover_folder(folder)
        return os.path.lexists(folder)
