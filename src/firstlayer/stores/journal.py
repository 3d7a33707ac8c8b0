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
   record, through a mapping of the file, the checksum last. Then the rows may change.
2. *Commit.* The new segment is written under another name, with a header and no records,
   and renamed to ``undo-(n+1)``. The rename is the commit. (It overwrites a pruned segment,
   whose pages are in memory. Old records after the header have checksums that depend on
   the number of their commit, so they are no records of the new segment.)
3. *Recover.* The records of the newest segment are written back to the arrays, up to the
   first record that is incomplete. Then the records are cut off.
4. *Go back one commit.* Recover, remove the newest segment, and recover the one before it,
   which is now the newest.
5. *Prune.* Segments that no kept tag needs are removed, the oldest first. The disk space
   that was allocated after the records of a segment that stays is freed.

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
import mmap
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from .journal_format import (
    RECORD_START,
    ArrayFile,
    Commit,
    SavedState,
    aligned,
    finish_record,
    header_of,
    read_header,
    read_record,
)
from .mapped_array import allocate, sync_mapping

PREFIX, SPARE = "undo-", "spare"
#: Largest number of bytes of rows in one record.
RECORD_BYTES = 1 << 25
# Largest number of bytes by which a segment grows, unless a record needs more.
_GROWTH = 1 << 28


@dataclass
class Segment:
    """File of a commit.

    Args:
        commit: Its header.
        path: The file.
        header_bytes: Length of the header.
        end: Length of the header and of the complete records.
        descriptor: The file, opened for reading and writing.
        mapping: The file, mapped, after the first record was appended.
    """

    commit: Commit
    path: Path
    header_bytes: int
    end: int
    descriptor: int = field(repr=False)
    mapping: mmap.mmap | None = field(default=None, repr=False)

    def space(self, nbytes: int) -> np.ndarray:
        """Return bytes after the last record, mapped.

        Rows are copied to them without a buffer and a system call in between. The file may
        be longer than its records: what follows them has no valid checksum.
        """
        needed = aligned(self.end + nbytes)
        if self.mapping is None or len(self.mapping) < needed:
            size = os.fstat(self.descriptor).st_size
            if size < needed:
                self._grow(size, needed)
            self.mapping = mmap.mmap(self.descriptor, 0)
        return np.frombuffer(self.mapping, np.uint8, nbytes, self.end)

    def _grow(self, size: int, needed: int) -> None:
        """Allocate disk space: a write to a mapped page without any ends the process."""
        try:
            # Some ahead, so that the file is mapped again a few times only.
            allocate(self.descriptor, max(needed, size + min(size, _GROWTH)))
        except OSError:
            allocate(self.descriptor, needed)

    def cut(self, end: int) -> None:
        """Remove what follows a position."""
        self.mapping = None
        os.ftruncate(self.descriptor, end)
        self.end = end

    def sync(self) -> None:
        """Make the records durable."""
        if self.mapping is None:
            os.fsync(self.descriptor)
        else:
            sync_mapping(self.mapping, self.descriptor)


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
        # Segment before the newest, from a commit to the pruning that follows it.
        self._previous: Segment | None = None
        # The spare file, if it is mapped. Mapping a file again costs a fault for each page.
        self._spare_mapping: mmap.mmap | None = None

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
            raise FileNotFoundError(
                f"the creation of the store in {folder} was not finished; create it again"
            )
        journal = cls(folder, is_synced=is_synced)
        # Pruning may have removed any of the older ones; a segment below a gap is unusable.
        first = len(numbers) - 1
        while first and numbers[first - 1] == numbers[first] - 1:
            first -= 1
        for number in numbers[:first]:
            os.unlink(journal.path_of(number))
        journal.commits = [
            read_header(journal.path_of(number), whole=False)[0]
            for number in numbers[first:]
        ]
        journal.newest = journal._open_segment(numbers[-1])
        return journal

    def path_of(self, number: int) -> Path:
        """Return the file of a commit."""
        return path_of_commit(self.folder, number)

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
        commit, start = segment.commit, RECORD_START
        record = segment.space(start + ids.size * commit.record_row_bytes)
        record[start : start + ids.nbytes] = ids.view(np.uint8)
        start += ids.nbytes
        for array, copy in zip(commit.record_arrays, copy_rows, strict=True):
            nbytes = ids.size * array.row_bytes
            copy(ids, record[start : start + nbytes])
            start += nbytes
        # An error before this leaves an incomplete record, which the next call overwrites.
        finish_record(record, ids.size, commit)
        segment.end = aligned(segment.end + record.size)

    def sync(self) -> None:
        """Make the records durable, if writes are synced."""
        if self.is_synced:
            with self._failing_for_good():
                self.newest.sync()

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
        self._previous = previous
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
        self.newest.cut(self.newest.header_bytes)
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
        """Remove the commits before number ``first``, after a commit."""
        previous, self._previous = self._previous, None
        while (number := self.commits[0].number) < first:
            # The last one is written again by the next commit: its pages are in memory.
            os.rename(self.path_of(number), self._spare)
            self.commits.pop(0)
            self._spare_mapping = None
            if previous is not None and previous.commit.number == number:
                self._spare_mapping = previous.mapping
        if previous is not None:
            if previous.commit.number >= first:
                previous.cut(previous.end)
            os.close(previous.descriptor)

    def close(self) -> None:
        """Close the newest segment."""
        self._spare_mapping = None
        if self.newest.descriptor >= 0:
            os.close(self.newest.descriptor)
            self.newest.descriptor, self.newest.mapping = -1, None
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
        temporary, header = self._spare, header_of(commit)
        mapping, self._spare_mapping = self._spare_mapping, None
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
        return Segment(commit, path, len(header), len(header), descriptor, mapping)

    def _open_segment(self, number: int) -> Segment:
        path = self.path_of(number)
        commit, length = read_header(path, whole=True)
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
            # Closed when no array refers to it. Private, not read-only, because kernels
            # are compiled for writable arrays.
            content = mmap.mmap(segment.descriptor, size, access=mmap.ACCESS_COPY)
            while position < min(last, size):
                record = read_record(content, position, min(last, size), commit)
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


def path_of_commit(folder: Path, number: int) -> Path:
    """Return the file of a commit."""
    return folder / f"{PREFIX}{number:010d}"


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
