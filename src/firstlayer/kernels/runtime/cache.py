"""Cache of compiled kernels on disk, which may be damaged, read-only or full.

Numba's own cache raises at the first lookup if one of its files is empty, truncated or
unreadable, and runs whatever machine code a damaged file holds. Here every file begins with
a digest of its content. A file that fails the check is ignored and overwritten. If code
cannot be read or written, kernels are compiled in memory, with one warning per process.

Compiling takes seconds. A process that spends more than one second on it says so once, on
stderr if that is a terminal.

Numba compiles a kernel again if its own file changed. Here a change of any file of
``kernels`` and ``optim`` counts, because kernels contain the functions that they call.
"""

import contextlib
import functools
import gc
import hashlib
import pickle
import sys
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

from numba.core import event
from numba.core.caching import FunctionCache, IndexDataCacheFile

DIGEST_BYTES = 16
# Seconds of compiling after which a process says what it is doing.
NOTICE_SECONDS = 1.0


def cached(dispatcher: Any) -> Any:
    """Return a compiled function whose code is kept on disk if possible."""
    # Without a compiler, njit returns the Python function.
    if hasattr(dispatcher, "_cache"):
        try:
            dispatcher._cache = _KernelCache(dispatcher.py_func)
        except (RuntimeError, OSError) as error:
            _warnings.warn_once(f"no folder can hold the cache ({error})")
    return dispatcher


class _Warnings:
    """Warns at most once in a process."""

    def __init__(self) -> None:
        self.has_warned = False

    def warn_once(self, reason: str) -> None:
        if not self.has_warned:
            self.has_warned = True
            message = f"Firstlayer's kernels are compiled in this process: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


_warnings = _Warnings()


class _Compiling(event.Listener):
    """Pauses the garbage collector while a kernel is compiled, and says what takes long.

    Numba makes millions of objects that live until the kernel is done; the collector would
    take a seventh of the time to find nothing. The notice is written once in a process.
    Kernels and functions that a kernel calls are compiled within it, and not counted again.
    """

    def __init__(self) -> None:
        self.has_said, self.seconds = False, 0.0
        self._depth, self._start, self._collects = 0, 0.0, False

    def on_start(self, event: Any) -> None:
        if not _is_kernel(event):
            return
        if not self._depth:
            self._start, self._collects = time.perf_counter(), gc.isenabled()
            gc.disable()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        if not _is_kernel(event):
            return
        self._depth -= 1
        if self._depth:
            return
        if self._collects:
            gc.enable()
        self.seconds += time.perf_counter() - self._start
        if self.has_said or self.seconds <= NOTICE_SECONDS:
            return
        self.has_said = True
        # None if the process has no console.
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(
                "firstlayer: compiling kernels for their first calls; later processes use "
                f"the cache in {event.data['dispatcher']._cache.cache_path} "
                "(see firstlayer warmup)\n"
            )


def _is_kernel(event: Any) -> bool:
    """Return whether an event is about a kernel, not a function of another library."""
    return isinstance(event.data["dispatcher"]._cache, _KernelCache)


# Module state: Numba calls this at the beginning and end of each compilation.
_compiling = _Compiling()
event.register("numba:compile", _compiling)


class _Compilations(event.Listener):
    """Number of kernels compiled, without the functions that are compiled into them."""

    def __init__(self) -> None:
        self.count = 0

    def on_start(self, event: Any) -> None:
        self.count += _is_kernel(event)

    def on_end(self, event: Any) -> None:
        pass


@contextlib.contextmanager
def counted_compilations() -> Generator[_Compilations]:
    """Count the kernels that are compiled in the block, without a notice on stderr."""
    said, _compiling.has_said = _compiling.has_said, True
    try:
        with event.install_listener("numba:compile", _Compilations()) as compilations:
            yield compilations
    finally:
        _compiling.has_said = said


def cache_files() -> list[Path]:
    """Return the files of the cache, of all kernels whose modules are imported."""
    kernels = __name__.partition(".runtime.")[0] + "."
    modules = [module for name, module in sys.modules.items() if name.startswith(kernels)]
    found = [getattr(value, "_cache", None) for m in modules for value in vars(m).values()]
    folders = {cache.cache_path for cache in found if isinstance(cache, _KernelCache)}
    return sorted(path for folder in folders for path in Path(folder).glob("*.nb[ic]"))


class _KernelCache(FunctionCache):
    """Numba's cache, with checked files and without exceptions."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        files = self._cache_file
        self._cache_file = _CheckedFiles(
            cache_path=files._cache_path,
            # Numba's own files have another format.
            filename_base=f"{self._impl.filename_base}.checked",  # pyright: ignore
            source_stamp=(files._source_stamp, _source_stamps()),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Numba's method imports the whole compiler first, although it may not be needed.
        try:
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)
        # Broad, because unpickling can raise anything.
        except Exception as error:
            _warnings.warn_once(f"{self.cache_path} cannot be read ({_text(error)})")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _warnings.warn_once(f"{self.cache_path} cannot be written ({_text(error)})")


@functools.cache
def _source_stamps() -> tuple[tuple[str, int, int], ...]:
    """Return the name, size and time of change of all files that kernels come from."""
    package = Path(__file__).parents[2]
    folders = package / "kernels", package / "optim"
    paths = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    found = ((path.name, path.stat()) for path in paths)
    return tuple((name, status.st_size, status.st_mtime_ns) for name, status in found)


class _CheckedFiles(IndexDataCacheFile):
    """Index and code of one kernel, each file with a digest."""

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (key, data))

    def load(self, key: Any) -> Any:
        found = super().load(key)
        # Two processes that compile at once can give two kernels the same file name.
        return found[1] if found is not None and found[0] == key else None

    def _load_index(self) -> dict[Any, str]:
        try:
            version, stamp, pickled = _read(self._index_path)
        except FileNotFoundError:
            return {}
        except _Damaged as error:
            _warnings.warn_once(str(error))
            return {}
        is_current = version == self._version and stamp == self._source_stamp
        # Another version of Numba may lack the classes of the types in it.
        return pickle.loads(pickled) if is_current else {}

    def _save_index(self, overloads: dict[Any, str]) -> None:
        content = self._version, self._source_stamp, self._dump(overloads)
        self._write(self._index_path, content)

    def _load_data(self, name: str) -> Any:
        try:
            return _read(self._data_path(name))
        except _Damaged as error:
            _warnings.warn_once(str(error))
            # Numba treats a missing file as code that is not in the cache.
            raise FileNotFoundError(name) from None

    def _save_data(self, name: str, data: Any) -> None:
        self._write(self._data_path(name), data)

    def _write(self, path: str, content: Any) -> None:
        data = self._dump(content)
        with self._open_for_write(path) as file:
            file.write(_digest(data) + data)


class _Damaged(Exception):
    """A file differs from what was written to it."""


def _read(path: str) -> Any:
    content = Path(path).read_bytes()
    digest, data = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if _digest(data) != digest:
        raise _Damaged(f"{path} is damaged and is replaced")
    return pickle.loads(data)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
