"""Return the arrays of a training store to a commit, and check that a file is at one."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .journal import UndoJournal, path_of_commit, segment_numbers
from .journal_format import Commit, read_header, read_record, record_order
from .mapped_array import MappedArray


def recovered(folder: Path, journal: UndoJournal) -> dict[str, MappedArray]:
    """Return the arrays of the last commit, after returning to it."""
    mapped = {
        array.name: MappedArray(folder, array) for array in journal.newest.commit.arrays
    }
    _write_back(journal, mapped, journal.recover)
    remove_unlisted(folder, journal)
    return mapped


def return_to(
    journal: UndoJournal, mapped: dict[str, MappedArray], number: int
) -> dict[str, MappedArray]:
    """Return to a commit, one commit after the other, and return its arrays."""
    arrays = _with_listed(journal, mapped, journal.commits[-1])
    _write_back(journal, arrays, journal.recover)
    while journal.commits[-1].number > number:
        arrays = _with_listed(journal, arrays, journal.commits[-2])
        _write_back(journal, arrays, journal.go_back)
    return arrays


def _with_listed(
    journal: UndoJournal, mapped: dict[str, MappedArray], commit: Commit
) -> dict[str, MappedArray]:
    """Return the arrays that a commit lists, mapped."""
    arrays = {}
    for file in commit.arrays:
        known = mapped.get(file.name)
        if known is None or known.file != file:
            known = MappedArray(journal.folder, file)
        arrays[file.name] = known
    return arrays


def _write_back(
    journal: UndoJournal, mapped: dict[str, MappedArray], recover: Callable[[Any], Any]
) -> None:
    """Write records back to the arrays of their commit, then cut the records off."""
    files = sorted((array.file for array in mapped.values()), key=record_order)
    arrays = [mapped[file.name] for file in files]

    def write(ids: np.ndarray, rows: list[np.ndarray]) -> None:
        if ids.min() < 0 or ids.max() >= arrays[0].file.shape[0]:
            raise ValueError(f"{journal.newest.path} is damaged: it has unknown rows")
        for array, part in zip(arrays, rows, strict=True):
            array.write_bytes(ids, part)

    recover(write)
    if journal.is_synced:
        for array in arrays:
            array.sync()
    journal.clear()


def remove_unlisted(folder: Path, journal: UndoJournal) -> None:
    """Remove the files of arrays that no commit lists."""
    listed = {array.file for commit in journal.commits for array in commit.arrays}
    for name in os.listdir(folder):
        if name.endswith(".safetensors") and name not in listed:
            os.unlink(folder / name)


def check_readable(folder: Path, path: Path) -> None:
    """Raise ValueError if a table that was trained in its file must not be read there.

    Args:
        folder: Folder of its training store, which need not exist.
        path: Path of the table, for the message.
    """
    numbers = segment_numbers(folder)
    if not numbers:
        return
    segment = path_of_commit(folder, numbers[-1])
    commit, start = read_header(segment, whole=True)
    with open(segment, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if read_record(content, start, len(content), commit) is not None:
        raise ValueError(
            f"{path} has rows that changed after its last commit; open it with "
            'mode="r+", which returns to that commit'
        )
    if commit.state is not None and commit.state.has_stale_weights:
        raise ValueError(
            f"{path} has rows that its optimizer has not brought up to date; call "
            "flush() of the optimizer, then commit() of the store"
        )
