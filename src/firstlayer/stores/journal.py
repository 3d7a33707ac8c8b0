"""Undo journal of a table that is trained on disk.

The rows of a table, of its optimizer state and of the counters are written in place, in
mapped files. The journal makes them return to a commit: after a kill at any instant to the
last one, and on request to an earlier one.

**Files.** A commit has a number; numbers ascend by one. Commit ``n`` is the file
``undo-n``, its *segment*:

- a header: the tag, the files of the arrays, the numbers that are not stored per row (steps
  taken, coefficients of missed steps), and the length that segment ``n − 1`` had;
- records, appended by the writes after the commit: ids of rows and the bytes that these
  rows had at commit ``n``, in every array that the header lists.

The segment with the largest number is the *newest*. Headers and records have checksums.

**Protocol.**

1. *Write rows.* Rows that have no record in the newest segment are appended to it as one
   record. Then the rows may change.
2. *Commit.* The new segment is written under another name, with a header and no records,
   and renamed to ``undo-(n+1)``. The rename is the commit. (It overwrites a pruned segment,
   whose pages are in memory. Old records after the header have checksums that depend on
   the number of their commit, so they are no records of the new segment.)
3. *Recover.* The records of the newest segment are written back to the arrays, up to the
   first record that is incomplete. Then the records are cut off.
4. *Go back one commit.* Recover, remove the newest segment, and recover the one before it,
   which is now the newest.
5. *Prune.* Segments that no kept tag needs are removed, the oldest first.

**Why the store always opens at a commit.** Let ``n`` be the newest segment.

- *A row differs from commit n only if its bytes at commit n are in a complete record.* A
  commit leaves no row that differs. A write appends the record first, and a record that is
  cut short belongs to rows that have not changed yet. So recovering gives commit ``n``.
- *Recovering may stop anywhere and start again.* A record has the bytes of commit ``n``, so
  writing it twice, or in another order, gives the same rows. Records are cut off when all
  of them are written back.
- *Segment k < n, written back to commit k + 1, gives commit k.* Rows without a record in it
  did not change between the two. Its length is in the header of ``k + 1``, so that damage
  is an error.
- *Every step above changes the newest segment by one rename or one removal*, before which
  the old argument holds and after which the new one does.

Files that no header lists were created after the last commit, or belong to commits that
were removed. Opening deletes them.

**Power loss.** A kill keeps the pages that the process has written, in the order of the
calls. A power loss keeps any subset of the pages written since a file was last synced, and
any subset of the renames and removals since its folder was. With ``sync="full"``, a file is
therefore synced wherever the argument uses an order: records before rows change; rows
before the new header exists and before records are cut off; the folder after each rename,
and after the removal of the newest segment. With ``sync="off"`` nothing is synced, and only
kills of the process are survived, not the loss of power or a crash of the system.
"""

import contextlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

PREFIX, SPARE = "undo-", "spare"
MAGIC, RECORD_MAGIC = b"FLundo1\n", b"rows"
# Magic bytes, checksum, number of bytes of the JSON text and of the arrays after it.
_HEADER = struct.Struct("<8sIQQ")
# Magic bytes, checksum, number of rows.
_RECORD = struct.Struct("<4sIQ")
#: Bytes that are summed for one number of a checksum.
BLOCK_BYTES = 4096
#: Largest number of bytes of rows in one record.
RECORD_BYTES = 1 << 25


@dataclass(frozen=True)
class ArrayFile:
    """Array in a file, with one entry of the first axis for each row of the table.

    Args:
        name: Name of the array.
        file: Path of the file, relative to the folder of the store.
        start: Offset of the first byte.
        dtype: Name of the dtype.
        shape: Shape.
    """

    name: str
    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype:
        """Dtype of the array."""
        if self.dtype == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return self.numpy_dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Number of bytes of the array."""
        return self.shape[0] * self.row_bytes


@dataclass(frozen=True)
class SavedState:
    """Part of an optimizer state that is not stored per row.

    Args:
        numbers: Values that JSON represents exactly.
        arrays: Small arrays.
    """

    numbers: dict[str, Any]
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class Commit:
    """Header of a segment.

    Args:
        store: Identifies the store, the same for all of its commits.
        number: Number of the commit.
        tag: Name given by the caller.
        arrays: Arrays of the store.
        state: Optimizer state, or None if no optimizer has trained the table.
        previous_bytes: Length of the segment before, when this commit was made.
    """

    store: str
    number: int
    tag: str | None
    arrays: tuple[ArrayFile, ...]
    state: SavedState | None = None
    previous_bytes: int = 0

    @property
    def record_row_bytes(self) -> int:
        """Number of bytes that a record has for each row, its id included."""
        return 8 + sum(array.row_bytes for array in self.arrays)

    @property
    def record_arrays(self) -> list[ArrayFile]:
        """Arrays in the order of a record."""
        return sorted(self.arrays, key=record_order)

    def __str__(self) -> str:
        return f"commit {self.number}" + (f" ({self.tag})" if self.tag is not None else "")


@dataclass
class Segment:
    """File of a commit.

    Args:
        commit: Its header.
        path: The file.
        header_bytes: Length of the header.
        end: Length of the header and of the complete records.
        descriptor: The file, opened for reading and writing.
    """

    commit: Commit
    path: Path
    header_bytes: int
    end: int
    descriptor: int = field(repr=False)


class UndoJournal:
    """Segments of a store. See the module's docstring for the protocol.

    Args:
        folder: Folder of the store.
        is_synced: Whether writes survive a power loss.
    """

    def __init__(self, folder: Path, *, is_synced: bool) -> None:
        self.folder, self.is_synced = folder, is_synced
        #: Commits that the store can return to, in order. The last is the newest.
        self.commits: list[Commit] = []
        self.newest: Segment
        self._has_failed = False
        self._memory = np.empty(0, np.uint8)

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        store: str,
        arrays: tuple[ArrayFile, ...],
        is_synced: bool,
    ) -> "UndoJournal":
        """Make the first commit of a store; the arrays are synced already."""
        journal = cls(folder, is_synced=is_synced)
        commit = Commit(store, 1, None, arrays)
        journal._sync_folder()
        journal.newest = journal._write_segment(commit)
        journal.commits = [commit]
        return journal

    @classmethod
    def open(cls, folder: Path, *, is_synced: bool) -> "UndoJournal":
        """Open the segments of a folder. :meth:`recover` comes next."""
        numbers = segment_numbers(folder)
        if not numbers:
            raise FileNotFoundError(f"no training store in {folder}")
        journal = cls(folder, is_synced=is_synced)
        # Pruning may have removed any of the older ones; a segment below a gap is unusable.
        first = len(numbers) - 1
        while first and numbers[first - 1] == numbers[first] - 1:
            first -= 1
        for number in numbers[:first]:
            os.unlink(journal.path_of(number))
        journal.commits = [
            _read_header(journal.path_of(number), whole=False)[0]
            for number in numbers[first:]
        ]
        journal.newest = journal._open_segment(numbers[-1])
        return journal

    def path_of(self, number: int) -> Path:
        """Return the file of a commit."""
        return self.folder / f"{PREFIX}{number:010d}"

    def append(
        self, ids: np.ndarray, copy_rows: Sequence[Callable[[np.ndarray, np.ndarray], None]]
    ) -> None:
        """Append a record to the newest segment. :meth:`sync` comes before rows change.

        Args:
            ids: Rows, int64.
            copy_rows: For each array of ``commit.record_arrays``, a function that copies
                the rows of ``ids`` to a buffer of bytes.
        """
        self._check_usable()
        segment = self.newest
        commit, start = segment.commit, _RECORD.size
        record = self._buffer(start + ids.size * commit.record_row_bytes)
        record[start : start + ids.nbytes] = ids.view(np.uint8)
        start += ids.nbytes
        for array, copy in zip(commit.record_arrays, copy_rows, strict=True):
            nbytes = ids.size * array.row_bytes
            copy(ids, record[start : start + nbytes])
            start += nbytes
        checksum = _checksum(record[_RECORD.size :], ids.size, commit)
        _RECORD.pack_into(record.data, 0, RECORD_MAGIC, checksum, ids.size)
        # An error, as on a full disk, leaves an incomplete record, which the next call
        # overwrites.
        segment.end += _write(segment.descriptor, record, segment.end)

    def _buffer(self, nbytes: int) -> np.ndarray:
        """Return memory for a record. It is used again: new pages cost a fault each."""
        if self._memory.size < nbytes:
            self._memory = np.empty(max(nbytes, 2 * self._memory.size), np.uint8)
        return self._memory[:nbytes]

    def sync(self) -> None:
        """Make the records durable, if writes are synced."""
        if self.is_synced:
            with self._failing_for_good():
                os.fsync(self.newest.descriptor)

    def commit(
        self,
        *,
        tag: str | None,
        arrays: tuple[ArrayFile, ...],
        state: SavedState | None,
    ) -> Commit:
        """Add a commit; the arrays are synced already."""
        self._check_usable()
        previous = self.newest
        commit = Commit(
            previous.commit.store,
            previous.commit.number + 1,
            tag,
            arrays,
            state,
            previous.end,
        )
        # Files of new arrays must exist before a header lists them.
        self._sync_folder()
        self.newest = self._write_segment(commit)
        os.close(previous.descriptor)
        # The state of each commit can be read from its segment.
        self.commits.append(replace(commit, state=None))
        return commit

    def recover(self, write: Callable[[np.ndarray, list[np.ndarray]], None]) -> int:
        """Return to the newest commit, and return the number of rows that were written.

        Args:
            write: Writes rows to the arrays of the commit, given their ids. It does not
                sync them.
        """
        return self._write_back(self.newest, write, end=None)

    def clear(self) -> None:
        """Cut off the records of the newest segment; the arrays are synced already."""
        segment = self.newest
        os.ftruncate(segment.descriptor, segment.header_bytes)
        segment.end = segment.header_bytes
        self.sync()

    def go_back(self, write: Callable[[np.ndarray, list[np.ndarray]], None]) -> None:
        """Remove the newest commit, whose rows are in place, and recover the one before.

        The caller then syncs the arrays and calls :meth:`clear`.
        """
        removed = self.newest
        previous = self._open_segment(removed.commit.number - 1)
        # Before the removal: damage must not cost the commit that is intact.
        for _ in self._records(previous, removed.commit.previous_bytes):
            pass
        os.unlink(removed.path)
        self._sync_folder()
        os.close(removed.descriptor)
        self.newest = previous
        self.commits.pop()
        self._write_back(previous, write, end=removed.commit.previous_bytes)

    def prune(self, first: int) -> None:
        """Remove the commits before number ``first``."""
        while self.commits[0].number < first:
            # The last one is written again by the next commit: its pages are in memory.
            os.rename(self.path_of(self.commits[0].number), self._spare)
            self.commits.pop(0)

    def close(self) -> None:
        """Close the newest segment."""
        if self.newest.descriptor >= 0:
            os.close(self.newest.descriptor)
            self.newest.descriptor = -1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._spare)

    @contextlib.contextmanager
    def _failing_for_good(self) -> Generator[None, None, None]:
        """Refuse further writes after an error: it is unknown what is on the disk."""
        try:
            yield
        except OSError:
            self._has_failed = True
            raise

    def _check_usable(self) -> None:
        if self._has_failed:
            raise OSError(
                f"the store in {self.folder} must be opened again: syncing it failed"
            )

    @property
    def _spare(self) -> Path:
        """File that becomes the segment of the next commit."""
        return self.folder / SPARE

    def _write_segment(self, commit: Commit) -> Segment:
        path = self.path_of(commit.number)
        temporary = self._spare
        header = _header_of(commit)
        # Records of an old commit stay after the header. Their checksums are wrong here.
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _write(descriptor, np.frombuffer(header, np.uint8), 0)
            if self.is_synced:
                os.fsync(descriptor)
            os.rename(temporary, path)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        with self._failing_for_good():
            self._sync_folder()
        return Segment(commit, path, len(header), len(header), descriptor)

    def _open_segment(self, number: int) -> Segment:
        path = self.path_of(number)
        commit, length = _read_header(path, whole=True)
        if commit.number != number:
            raise ValueError(f"{path} is damaged: it is of commit {commit.number}")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return Segment(commit, path, length, length, descriptor)

    def _write_back(
        self,
        segment: Segment,
        write: Callable[[np.ndarray, list[np.ndarray]], None],
        *,
        end: int | None,
    ) -> int:
        count = 0
        for ids, rows, position in self._records(segment, end):
            write(ids, rows)
            segment.end = position
            count += ids.size
        return count

    def _records(
        self, segment: Segment, end: int | None
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray], int]]:
        """Yield ids and rows of each record, and the offset of the next record.

        Args:
            segment: The segment.
            end: Offset after the last record, which must all be complete; None for the
                newest segment, whose last record may be incomplete.
        """
        commit, size = segment.commit, os.fstat(segment.descriptor).st_size
        position = segment.header_bytes
        last = size if end is None else end
        if size > position:
            # Closed when no array refers to it.
            content = mmap.mmap(segment.descriptor, size, access=mmap.ACCESS_READ)
            while position < min(last, size):
                record = _read_record(content, position, min(last, size), commit)
                if record is None:
                    break
                position = record[2]
                yield record
        if end is not None and position != end:
            raise ValueError(
                f"{segment.path} is damaged after byte {position}, so the store cannot "
                f"return to {commit}"
            )

    def _sync_folder(self) -> None:
        if self.is_synced:
            sync_folder(self.folder)


def record_order(array: ArrayFile) -> int:
    """Return the key of an array's place in a record: wide dtypes first, so all align."""
    return -array.numpy_dtype.itemsize


def segment_numbers(folder: Path) -> list[int]:
    """Return the numbers of the commits in a folder, in order."""
    names = os.listdir(folder) if folder.is_dir() else []
    digits = (name[len(PREFIX) :] for name in names if name.startswith(PREFIX))
    return sorted(int(text) for text in digits if text.isdecimal())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, content: np.ndarray, position: int) -> int:
    """Write bytes at an offset of a file and return their number."""
    written = 0
    while written < content.size:
        # A full disk may write a part first.
        written += os.pwrite(descriptor, content[written:].data, position + written)
    return written


def _checksum(body: np.ndarray, count: int, commit: Commit) -> int:
    """Return the checksum of a record: CRC-32 of the sums of the words of each block.

    CRC-32 of the bytes themselves would take longer than writing them. A page that is
    missing, old or changed changes the sum of its words. The checksum depends on the
    commit, so that records of other segments are never taken for its own.

    Args:
        body: Ids and rows, as bytes.
        count: Number of rows.
        commit: Commit of the segment.
    """
    checksum = zlib.crc32(f"{commit.store} {commit.number} {count}".encode())
    whole = body.size - body.size % BLOCK_BYTES
    if whole:
        words = body[:whole].view(np.uint64).reshape(-1, BLOCK_BYTES // 8)
        checksum = zlib.crc32(np.add.reduce(words, axis=1).data, checksum)
    return zlib.crc32(body[whole:].data, checksum)


def _header_of(commit: Commit) -> bytes:
    about = {
        "store": commit.store,
        "number": commit.number,
        "tag": commit.tag,
        "arrays": [asdict(array) for array in commit.arrays],
        "previous_bytes": commit.previous_bytes,
        "state": None,
    }
    content = b""
    if commit.state is not None:
        arrays = {
            name: np.ascontiguousarray(array) for name, array in commit.state.arrays.items()
        }
        content = b"".join(array.tobytes() for array in arrays.values())
        about["state"] = {
            "numbers": commit.state.numbers,
            "arrays": {
                name: {"dtype": array.dtype.name, "shape": array.shape}
                for name, array in arrays.items()
            },
            "checksum": zlib.crc32(content),
        }
    text = json.dumps(about).encode()
    prefix = _HEADER.pack(MAGIC, zlib.crc32(text), len(text), len(content))
    return prefix + text + content


def _read_header(path: Path, *, whole: bool) -> tuple[Commit, int]:
    """Return the header of a segment and its length.

    Args:
        path: The file.
        whole: Read the optimizer state too.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_HEADER.size)
        if len(prefix) == _HEADER.size:
            magic, checksum, text_bytes, content_bytes = _HEADER.unpack(prefix)
            length = _HEADER.size + text_bytes + content_bytes
            if magic == MAGIC and length <= size:
                text = file.read(text_bytes)
                content = file.read(content_bytes) if whole else None
                if zlib.crc32(text) == checksum:
                    return _parse_header(path, text, content), length
    raise ValueError(f"{path} is damaged: its header is incomplete or was changed")


def _parse_header(path: Path, text: bytes, content: bytes | None) -> Commit:
    about = json.loads(text)
    arrays = (
        ArrayFile(**{**array, "shape": tuple(array["shape"])}) for array in about["arrays"]
    )
    state = about["state"]
    if state is not None and content is not None:
        if zlib.crc32(content) != state["checksum"]:
            raise ValueError(f"{path} is damaged: its optimizer state was changed")
        start, values = 0, {}
        for name, array in state["arrays"].items():
            dtype, shape = np.dtype(array["dtype"]), array["shape"]
            count = int(np.prod(shape, dtype=np.int64))
            values[name] = np.frombuffer(content, dtype, count, start).reshape(shape)
            start += count * dtype.itemsize
        state = SavedState(state["numbers"], values)
    return Commit(**{
        **about,
        "arrays": tuple(arrays),
        "state": state if content is not None else None,
    })


def _read_record(
    content: mmap.mmap, position: int, end: int, commit: Commit
) -> tuple[np.ndarray, list[np.ndarray], int] | None:
    """Return ids and rows of a record and its end, or None if it is incomplete."""
    start = position + _RECORD.size
    if start > end:
        return None
    magic, checksum, count = _RECORD.unpack_from(content, position)
    stop = start + count * commit.record_row_bytes
    if magic != RECORD_MAGIC or not count or stop > end:
        return None
    body = np.frombuffer(content, np.uint8, stop - start, start)
    if _checksum(body, count, commit) != checksum:
        return None
    ids = np.frombuffer(content, np.int64, count, start)
    start += ids.nbytes
    rows = []
    for array in commit.record_arrays:
        nbytes = count * array.row_bytes
        part = np.frombuffer(content, np.uint8, nbytes, start)
        rows.append(part.reshape(count, array.row_bytes))
        start += nbytes
    return ids, rows, stop
