"""Training stores in folders: create one, and open one or a file to train in place.

A training store is a folder with the arrays of a table, one file each: ``weight``, the
arrays of the optimizer state under torch's names, ``row_steps`` and ``has_state``. A table
in one file of another kind stays in that file, and the folder ``<file>.training`` has the
rest.
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from .._check import float_dtype, host_array, not_negative, one_of, positive
from .folder_lock import LOCK, FolderLock
from .formats import RowFormat
from .journal import RECORD_BYTES, SPARE, UndoJournal, segment_numbers
from .journal_format import ArrayFile
from .mapped_array import MappedArray, create_array
from .recovery import recovered
from .row_store import RowStore
from .table_files import TableFile, find_table
from .training import TrainingStore

Sync = Literal["off", "full"]
SYNCS = ("off", "full")
#: Dtypes that a table can be trained in.
DTYPES = ("float32", "float16", "bfloat16")
#: File of the table in a folder that :func:`create_store` made.
WEIGHT = "weight.0.safetensors"


def create_store(
    path: str | os.PathLike[str],
    shape: tuple[int, int] | None = None,
    *,
    rows: RowStore | Float[Any, "rows width"] | Callable[[int, int], Any] | None = None,
    dtype: Any = None,
    sync: Sync = "off",
    keep: int = 2,
) -> TrainingStore:
    """Create a table on disk to train it.

    The weight, the optimizer state and an undo journal are files of one folder. A creation
    that is killed leaves no store, and can be repeated.

    Args:
        path: Folder to create. It must not exist, or be empty.
        shape: Number of rows and width; None for those of ``rows``.
        rows: Initial values: another store, such as a table in many files or in 8 bits, or
            an array. Or a function that returns the rows from its first argument up to its
            second, so that a table larger than memory is drawn in parts. None is zeros.
        dtype: float32, float16 or bfloat16; None for that of ``rows`` if it is one of
            these, else float32.
        sync: See :func:`open_store`.
        keep: See :func:`open_store`.

    Example:
        >>> import tempfile
        >>> from firstlayer.stores import MemoryStore, create_store, open_store
        >>> folder, source = tempfile.mkdtemp(), MemoryStore(np.eye(5, 2, dtype=np.float32))
        >>> with create_store(folder + "/table", rows=source) as store:
        ...     store.write([3], [[1.0, 2.0]])
        >>> with open_store(folder + "/table", mode="r+") as store:
        ...     store.read([1, 3]).tolist()
        [[0.0, 1.0], [1.0, 2.0]]
    """
    is_synced = one_of("sync", sync, SYNCS) == "full"
    # The process may change its folder while the store is open.
    keep, folder = positive("keep", keep), Path(os.path.abspath(path))
    shape, dtype = _checked_shape(shape, rows), _checked_dtype(dtype, rows)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, Path(path)) as lock:
        # Left by a creation that was killed.
        known = {LOCK, SPARE, WEIGHT}
        if others := sorted(set(os.listdir(folder)) - known):
            raise FileExistsError(f"{folder} must be empty, but it has {others[0]}")
        file = create_array(folder, "weight", WEIGHT, shape, dtype)
        mapped = MappedArray(folder, file)
        if rows is not None:
            _fill(mapped.array, rows)
        if is_synced:
            mapped.sync()
        journal = UndoJournal.create(
            folder, store=uuid.uuid4().hex, arrays=(file,), is_synced=is_synced
        )
        arrays = {"weight": mapped}
        return TrainingStore(Path(path), folder, journal, arrays, lock=lock, keep=keep)


def open_training(
    path: Path,
    tensor: str | None,
    *,
    format: str | RowFormat | None,
    at: str | int | None,
    sync: Sync,
    keep: int,
) -> TrainingStore:
    """Open a table to train it; see :func:`firstlayer.stores.open_store`."""
    is_synced, keep = one_of("sync", sync, SYNCS) == "full", positive("keep", keep)
    folder, weight = path, None
    if not is_training_folder(path):
        table = find_table(path, tensor, format)
        file = _file_of(table)
        folder = folder_beside(file)
        folder.mkdir(exist_ok=True)
        weight = _listed(table, file, folder)
    elif tensor is not None:
        raise ValueError(f"tensor must be None for a training store, got {tensor!r}")
    folder = Path(os.path.abspath(folder))
    with _locked(folder, path) as lock:
        if weight is not None and not segment_numbers(folder):
            journal = UndoJournal.create(
                folder, store=uuid.uuid4().hex, arrays=(weight,), is_synced=is_synced
            )
        else:
            journal = UndoJournal.open(folder, is_synced=is_synced)
        try:
            if weight is not None:
                _check_same_table(journal, weight)
            mapped = recovered(folder, journal)
            store = TrainingStore(path, folder, journal, mapped, lock=lock, keep=keep)
            if at is not None:
                store.return_to(at)
        except BaseException:
            journal.close()
            raise
    return store


def is_training_folder(path: Path) -> bool:
    """Return whether a path is the folder of a training store, complete or not."""
    unfinished = all((path / name).is_file() for name in (LOCK, WEIGHT))
    return unfinished or bool(segment_numbers(path))


def folder_beside(file: Path) -> Path:
    """Return the folder for training the table in a file in place."""
    return Path(f"{file}.training")


@contextlib.contextmanager
def _locked(folder: Path, path: Path) -> Generator[FolderLock, None, None]:
    """Yield the lock of a store, which an exception releases."""
    lock = FolderLock(folder, path)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def _checked_shape(shape: tuple[int, int] | None, rows: Any) -> tuple[int, int]:
    if shape is None:
        if rows is None or callable(rows):
            raise TypeError("shape must be given, unless rows is a store or an array")
        shape = np.shape(rows) if not isinstance(rows, RowStore) else rows.shape
    if len(shape) != 2:
        raise ValueError(f"shape must be the number of rows and the width, got {shape}")
    num_rows, width = shape
    shape = not_negative("shape[0]", num_rows), not_negative("shape[1]", width)
    if rows is not None and not callable(rows):
        given = rows.shape if isinstance(rows, RowStore) else np.shape(rows)
        if given != shape:
            raise ValueError(f"rows must have shape {shape}, got {given}")
    return shape


def _checked_dtype(dtype: Any, rows: Any) -> np.dtype:
    if dtype is None:
        given = getattr(rows, "dtype", None)
        name = str(given).removeprefix("torch.")
        return float_dtype(name if name in DTYPES else None)
    dtype = float_dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES} to be trained, got {dtype.name}")
    return dtype


def _fill(array: np.ndarray, rows: Any) -> None:
    """Write the initial values, some rows at a time."""
    step = max(1, RECORD_BYTES // max(1, array[:1].nbytes))
    for lo in range(0, len(array), step):
        hi = min(lo + step, len(array))
        if isinstance(rows, RowStore):
            part = rows.read(np.arange(lo, hi))
        else:
            part = host_array(rows(lo, hi) if callable(rows) else rows[lo:hi], name="rows")
        if part.shape != (hi - lo, array.shape[1]):
            raise ValueError(
                f"rows({lo}, {hi}) must have shape {(hi - lo, array.shape[1])}, "
                f"got {part.shape}"
            )
        array[lo:hi] = part.astype(array.dtype, copy=False)


def _file_of(table: TableFile) -> Path:
    """Return the file of a table that can be trained in place, or raise ValueError."""
    advice = "copy it with create_store(folder, rows=open_store(path))"
    if table.format.name not in DTYPES:
        raise ValueError(
            f"{table.path} must be in one of {DTYPES} to be trained, got format "
            f"{table.format.name}; {advice}"
        )
    rows = table.parts["weight"]
    if len(rows.segments) != 1 or rows.offsets is not None:
        places = "several places" if rows.offsets is None else "rows of no fixed length"
        raise ValueError(
            f"{table.path} must be one array to be trained in place, but it is in "
            f"{places}; {advice}"
        )
    segment = rows.segments[0]
    if segment.start % rows.dtype.itemsize:
        raise ValueError(
            f"{table.path} must start at a multiple of {rows.dtype.itemsize} bytes to be "
            f"trained in place, got {segment.start}; {advice}"
        )
    return segment.path


def _listed(table: TableFile, file: Path, folder: Path) -> ArrayFile:
    start = table.parts["weight"].segments[0].start
    name = os.path.relpath(os.path.realpath(file), os.path.realpath(folder))
    return ArrayFile("weight", name, start, table.format.name, (table.rows, table.width))


def _check_same_table(journal: UndoJournal, table: ArrayFile) -> None:
    known = next(a for a in journal.newest.commit.arrays if a.name == "weight")
    if known != table:
        raise ValueError(
            f"{journal.folder} is of another table, {known.shape} {known.dtype} at byte "
            f"{known.start}, got {table.shape} {table.dtype} at byte {table.start}; "
            "remove that folder if the table was replaced"
        )
