"""Replace files and folders atomically, and read folders that are being replaced.

New content is written under a temporary name in the same folder, synced to disk, and then
renamed, so a process killed at any moment leaves the old content or the new one. A folder
is exchanged with its replacement in one step where the system can (Linux, ``renameat2``).
Elsewhere the old folder is first moved away, and :func:`recover_folder` moves it back after
a kill between the two steps.

A writer holds a lock on its temporary file or folder, which ends with the process. The next
writer in the same place removes every temporary file and folder that nobody has locked.
Network file systems may hide locks from other computers, so what another computer left is
removed only after a day.

New content has the permissions of what it replaces, owner and group included where the
system allows it, and nobody else can open it before. A symbolic link stays a link, and its
target is replaced.
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import BinaryIO, TypeVar

from .._interrupts import held_interrupts

try:
    import fcntl
except ImportError:
    # Windows has no such locks.
    fcntl = None

T = TypeVar("T")
#: Opens a file, as the ``opener`` argument of :func:`open`.
Opener = Callable[[str, int], int]


def _computer() -> str:
    """Return eight hexadecimal digits, the same for all processes that see our locks."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.blake2b(name.encode(), digest_size=4).hexdigest()


_COMPUTER = _computer()
#: Name of a temporary file or folder, or of a folder that was moved away: the computer,
#: random digits, and the name that the folder was moved away from.
_LEFTOVER = re.compile(
    r"\.firstlayer-([0-9a-f]{8})[0-9a-f]{8}\.(?:tmp|(.*)\.old)", re.DOTALL
)
#: Seconds after which a file that another computer left is removed.
_MAX_AGE = 86_400
#: ``AT_FDCWD`` and ``RENAME_EXCHANGE`` of Linux.
_CURRENT_FOLDER, _EXCHANGE = -100, 2
#: Errors of a system or file system that cannot exchange two names.
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
#: Errors when another writer created or moved away the target in the meantime.
_INTERFERENCE = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}
#: Attempts to read a folder that is replaced again and again, or that is missing.
_ATTEMPTS, _ATTEMPTS_IF_MISSING = 100, 10


@contextlib.contextmanager
def replacing(target: str) -> Generator[BinaryIO, None, None]:
    """Open a file that replaces ``target`` once it is written and synced.

    If an exception is raised inside the block, ``target`` stays as it was.

    Args:
        target: Path without symbolic links, as :func:`os.path.realpath` returns it.
    """
    old = _stat(target)
    if old is not None:
        check_regular(target, old.st_mode)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"no folder {folder} to save {target} in")
    remove_leftovers(folder)
    temporary = _temporary_name(folder)
    try:
        with _create(temporary, old) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                # Windows does not rename open files.
                file.close()
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


@contextlib.contextmanager
def replacing_folder(target: Path) -> Generator[Path, None, None]:
    """Yield a new folder that replaces ``target`` if the block succeeds.

    The block writes and syncs the files. Files that ``target`` has too get its permissions.

    Args:
        target: Path without symbolic links, which may be missing.
    """
    parent = os.fspath(target.parent)
    recover_folder(target)
    remove_leftovers(parent)
    new = _temporary_name(parent)
    try:
        with _created_folder(new, private=target.exists()):
            yield Path(new)
            _copy_all_permissions(target, Path(new))
            _sync_folder(new)
            _put_in_place(new, os.fspath(target))
            _sync_folder(parent)
    finally:
        # The old content, or the new one after an error. An interrupt may come before it
        # can be held back.
        try:
            with held_interrupts():
                shutil.rmtree(new, ignore_errors=True)
        except KeyboardInterrupt:
            shutil.rmtree(new, ignore_errors=True)
            raise


def check_writable(folder: Path) -> None:
    """Raise an error if nothing can be created in a folder, before long work starts.

    Creates and removes a folder: permissions alone do not reveal a read-only disk.
    """
    probe = _temporary_name(os.fspath(folder))
    try:
        os.mkdir(probe)
    except OSError as error:
        reason = str(error.strerror).lower()
        raise type(error)(f"nothing can be written in {folder}: {reason}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(probe)


def recover_folder(folder: Path) -> None:
    """Move a folder back that a killed writer moved away, if nothing is in its place.

    Args:
        folder: Path of the folder, or of a symbolic link to it.
    """
    target = Path(os.path.realpath(folder))
    if os.path.lexists(target):
        return
    with contextlib.suppress(OSError):
        matches = map(_LEFTOVER.fullmatch, os.listdir(target.parent))
        names = [match[0] for match in matches if match and match[2] == target.name]
        if names:
            newest = max(names, key=lambda name: (target.parent / name).stat().st_mtime_ns)
            os.rename(target.parent / newest, target)


def remove_leftovers(folder: str) -> None:
    """Remove temporary files and folders of writers that no longer run.

    A folder that was moved away is kept if nothing is in its place.
    """
    if fcntl is None:
        return
    for match in map(_LEFTOVER.fullmatch, os.listdir(folder)):
        if match is None:
            continue
        path, (computer, moved_from) = os.path.join(folder, match[0]), match.groups()
        if moved_from and not os.path.lexists(os.path.join(folder, moved_from)):
            continue
        with contextlib.suppress(OSError):
            age = time.time() - os.lstat(path).st_mtime
            if computer != _COMPUTER and age < _MAX_AGE:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not _lock(descriptor, wait=False):
                    continue
                if moved_from:
                    _remove_moved(path)
                elif stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)
            finally:
                os.close(descriptor)


def read_folder(
    folder: Path, read: Callable[[Opener], T], *, names: Collection[str] = ()
) -> T:
    """Return ``read(opener)``, whose files all come from the same version of a folder.

    The files are opened together, and a replacement of the folder in the meantime starts
    the reading again. The opener finds files by their name alone.

    Args:
        folder: The folder.
        read: Reads files with ``open(path, opener=opener)``.
        names: Names of the files that may be read. Other files are opened when they are
            first read; if the folder is replaced before that, reading starts again.
    """
    for attempt in range(_ATTEMPTS):
        recover_folder(folder)
        snapshot = None
        try:
            snapshot = _Snapshot(folder, names)
            if not snapshot.is_replaced():
                return read(snapshot.open)
        except (OSError, ValueError) as error:
            if snapshot is not None:
                if not snapshot.is_replaced():
                    raise
            elif not isinstance(error, FileNotFoundError):
                raise
            elif attempt >= _ATTEMPTS_IF_MISSING:
                raise FileNotFoundError(f"no file or folder {folder}") from None
        finally:
            if snapshot is not None:
                snapshot.close()
    raise OSError(f"{folder} is replaced faster than it can be read")


@contextlib.contextmanager
def opened_once() -> Generator[Opener, None, None]:
    """Yield an opener that opens each file once, so that replacing it has no effect."""
    snapshot = _Snapshot(None, ())
    try:
        yield snapshot.open
    finally:
        snapshot.close()


def check_regular(path: str | Path, mode: int) -> None:
    """Raise unless the mode of a path, as :func:`os.stat` gives it, is that of a file."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"path must be a file, but {path} is a folder")
    if not stat.S_ISREG(mode):
        raise ValueError(f"path must be a regular file, but {path} is a device or pipe")


def _temporary_name(folder: str, suffix: str = "tmp") -> str:
    return os.path.join(folder, f".firstlayer-{_COMPUTER}{secrets.token_hex(4)}.{suffix}")


def _stat(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _create(path: str, old: os.stat_result | None) -> BinaryIO:
    """Create and lock a file with the permissions of another, or the default ones."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags, 0o666 if old is None else 0o600)
        if old is not None:
            _copy_permissions(old, name if fcntl is None else descriptor)
        return descriptor

    file = open(path, "xb", opener=opener)
    _lock(file.fileno(), wait=True)
    if not os.path.exists(path):
        # Another writer took the file for a leftover before it was locked.
        file.close()
        return _create(path, old)
    return file


@contextlib.contextmanager
def _created_folder(path: str, *, private: bool) -> Generator[None, None, None]:
    """Create a folder and lock it during the block.

    Args:
        path: Path of the folder.
        private: Whether other users may not open it yet.
    """
    descriptor = None
    while descriptor is None:
        os.mkdir(path, 0o700 if private else 0o777)
        descriptor = _open_folder(path)
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


def _copy_all_permissions(old: Path, new: Path) -> None:
    """Copy the permissions of a folder and its files to those with the same names."""
    for path in (*new.iterdir(), new):
        state = _stat(old if path == new else old / path.name)
        if state is not None:
            _copy_permissions(state, path)


def _copy_permissions(old: os.stat_result, path: str | Path | int) -> None:
    """Give a file, folder or descriptor the owner, group and mode of another file."""
    mode, new = stat.S_IMODE(old.st_mode), os.stat(path)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            # Only the administrator may change the owner.
            os.chown(path, old.st_uid if os.geteuid() == 0 else -1, old.st_gid)
        except OSError:
            # Another group gets no more than everybody.
            mode = mode & ~0o070 | (mode & 0o007) << 3
    os.chmod(path, mode)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Lock a file or folder; return False if it is locked already or cannot be locked."""
    if fcntl is None:
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
            if error.errno in _INTERFERENCE and os.path.lexists(new):
                continue
            if error.errno not in _NO_EXCHANGE:
                raise
        if _move_away(new, target):
            return


def _move_away(new: str, target: str) -> bool:
    """Replace a folder in two steps; return whether no other writer interfered."""
    folder, name = os.path.split(target)
    old = _temporary_name(folder, f"{name}.old")
    try:
        os.rename(target, old)
        os.rename(new, target)
        return True
    except OSError as error:
        if error.errno in _INTERFERENCE:
            return False
        raise
    finally:
        try:
            with held_interrupts():
                _settle(old, target)
        except KeyboardInterrupt:
            _settle(old, target)
            raise


def _settle(old: str, target: str) -> None:
    """Remove a folder that was moved away, or move it back if nothing is in its place."""
    if os.path.lexists(target):
        _remove_moved(old)
    else:
        with contextlib.suppress(OSError):
            os.rename(old, target)


def _remove_moved(old: str) -> None:
    """Remove a folder that was moved away, first giving it a name that nobody recovers."""
    name = _temporary_name(os.path.dirname(old))
    with contextlib.suppress(OSError):
        os.rename(old, name)
        shutil.rmtree(name, ignore_errors=True)


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


def _open_folder(folder: str) -> int | None:
    """Return a descriptor of a folder, or None where files cannot be opened from one."""
    if os.open not in os.supports_dir_fd:
        return None
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


class _Snapshot:
    """Open files of one folder, or of any folder if ``folder`` is None.

    Args:
        folder: The folder.
        names: Files to open at once if they exist.
    """

    def __init__(self, folder: Path | None, names: Collection[str]) -> None:
        self.folder = folder
        self.descriptor = None if folder is None else _open_folder(os.fspath(folder))
        self.files: dict[str, int | None] = {}
        try:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.close(self.open(os.path.join(folder or "", name), os.O_RDONLY))
        except BaseException:
            self.close()
            raise

    def open(self, path: str, flags: int) -> int:
        """Return a new descriptor of a file, positioned at its first byte."""
        key = path if self.folder is None else os.path.basename(path)
        if key not in self.files:
            self.files[key] = self._opened(path, flags)
        descriptor = self.files[key]
        if descriptor is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        # A pipe has no position; the reader refuses it.
        with contextlib.suppress(OSError):
            os.lseek(descriptor, 0, os.SEEK_SET)
        return os.dup(descriptor)

    def is_replaced(self) -> bool:
        """Return whether another folder is in place of this one."""
        if self.folder is None or self.descriptor is None:
            return False
        try:
            return not os.path.samestat(os.stat(self.folder), os.fstat(self.descriptor))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        for descriptor in (*self.files.values(), self.descriptor):
            if descriptor is not None:
                os.close(descriptor)
        self.files, self.descriptor = {}, None

    def _opened(self, path: str, flags: int) -> int | None:
        # Without this flag, opening a pipe would wait for its writer.
        flags |= getattr(os, "O_NONBLOCK", 0)
        try:
            if self.descriptor is None:
                return os.open(path, flags)
            return os.open(os.path.basename(path), flags, dir_fd=self.descriptor)
        except FileNotFoundError:
            return None
