"""Tables that are trained on disk: rows and optimizer state in mapped files, crash-safe.

The files are mapped, so memory use follows the rows in use, and the system writes changed
pages back. :mod:`firstlayer.stores.training_folder` has the files of a store.

Between two commits every changed row is in an undo journal; see
:mod:`firstlayer.stores.journal` for the files, the protocol and the proof. After a kill
at any instant, opening the store returns to the last commit.
"""

import contextlib
import json
import os
import threading
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import numpy as np
from jaxtyping import Float, Int, Int64

from .._check import changed_ids
from .._interrupts import held_interrupts
from ..files.safetensors import StreamedTensor, check_not_source
from .folder_lock import FolderLock
from .formats import format_by_name
from .journal import RECORD_BYTES, UndoJournal
from .journal_format import Commit, SavedState
from .mapped_array import MappedArray, create_array
from .recovery import remove_unlisted, return_to
from .row_store import RowStore

if TYPE_CHECKING:
    from .file import FileStore


class Trainer(Protocol):
    """Optimizer state of the table of a store."""

    lock: Any

    def catch_up(self, ids: np.ndarray | None = None) -> None:
        """Apply the missed steps to stale rows."""
        ...

    def caught_up_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return rows as they are after their missed steps; nothing is written."""
        ...

    def save(self) -> SavedState:
        """Return what is not stored per row."""
        ...

    def restore(self) -> None:
        """Continue from the store after it has returned to a commit."""
        ...

    def retire(self) -> None:
        """Refuse to be used from now on."""
        ...


class TrainingStore(RowStore):
    """Table that is trained on disk. Made by :func:`open_store` with ``mode="r+"``.

    Layers made from the store look rows up in :attr:`array`, row optimizers put their state
    into its folder, and all of them journal rows before they change them. Code that writes
    to ``array`` directly calls :meth:`before_write` first.

    Only one process at a time can open the store. A process forked from it can read.
    Reading writes nothing: missed steps of stale rows are applied to the rows that are
    returned.

    ``with`` commits at the end of the block, unless an exception is raised.

    Args:
        path: Path that was opened, for messages.
        folder: Folder of the store.
        journal: Its journal, recovered.
        arrays: Its arrays by name, mapped.
        lock: Lock of the folder.
        keep: Number of tags that the store can return to.

    Example:
        >>> import tempfile
        >>> from firstlayer.stores import create_store
        >>> store = create_store(tempfile.mkdtemp() + "/table", (1000, 4))
        >>> number = store.commit("epoch-1")
        >>> store.write([7], np.ones((1, 4)))
        >>> store.return_to("epoch-1")
        >>> bool((store.read([7]) == 1).all())
        False
        >>> store.close()
    """

    def __init__(
        self,
        path: Path,
        folder: Path,
        journal: UndoJournal,
        arrays: dict[str, MappedArray],
        *,
        lock: FolderLock,
        keep: int,
    ) -> None:
        weight = arrays["weight"].array
        rows, width = weight.shape
        super().__init__((rows, width), format_by_name(weight.dtype.name), "r+")
        self.path, self.folder, self.keep = path, folder, keep
        self._journal, self._mapped, self._file_lock = journal, arrays, lock
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._trainer: Trainer | None = None
        self._is_journalled = np.zeros(self.shape[0], bool)
        self._start_commit()

    @property
    def array(self) -> Float[np.ndarray, "rows width"]:
        """Table, a writable array over the mapped file."""
        self._check_open()
        return self._mapped["weight"].array

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """The table as its format stores it, not copied."""
        return {"weight": self.array}

    @property
    def last_commit(self) -> Commit:
        """Commit that the store opens at after a kill."""
        return self._journal.commits[-1]

    @property
    def tags(self) -> list[str]:
        """Tags that the store can return to, in order."""
        return [commit.tag for commit in self._journal.commits if commit.tag is not None]

    def __repr__(self) -> str:
        rows, width = self.shape
        return f"TrainingStore({self.path.name}: {rows} × {width}, {self.format.name})"

    def prefetch(self, ids: Any) -> None:
        """Ask the system to read the rows of ``ids`` and their state, without waiting.

        Args:
            ids: Row numbers of any shape.
        """
        rows = np.unique(self._checked_ids(ids))
        for mapped in self._mapped.values():
            mapped.will_need(rows)

    def streamed(self) -> StreamedTensor:
        """Return the table as a tensor for files, whose rows are up to date."""

        def parts() -> Iterator[np.ndarray]:
            step = max(1, RECORD_BYTES // max(1, self.array[:1].nbytes))
            for lo in range(0, len(self), step):
                yield self.read(np.arange(lo, min(lo + step, len(self))))

        source = self._mapped["weight"].path
        return StreamedTensor(self.array.dtype, self.shape, source, parts)

    def convert(self, path: str | os.PathLike[str], **options: Any) -> "FileStore":
        """Write the table, up to date, to another file; see :meth:`RowStore.convert`."""
        check_not_source(path, self._mapped["weight"].path)
        return super().convert(path, **options)

    def before_write(self, rows: Int64[np.ndarray, " n"] | None = None) -> None:
        """Journal rows that are about to change: weight, state and counters.

        An error, as on a full disk, means that the rows must not be written.

        Args:
            rows: Row numbers in range; None for all.

        Example:
            >>> import tempfile
            >>> from firstlayer.stores import create_store
            >>> with create_store(tempfile.mkdtemp() + "/table", (1000, 4)) as store:
            ...     store.before_write(np.array([7]))
            ...     store.array[7] = 1.0
        """
        with self._lock:
            self._check_usable()
            if rows is None:
                chunks = self._rows_to_journal()
            else:
                fresh = rows[~self._is_journalled[rows]]
                if not fresh.size:
                    return
                chunks = self._chunks(fresh)
            for ids in chunks:
                self._journal.append(ids, [array.copy_rows for array in self._committed])
                self._journal.sync()
                self._is_journalled[ids] = True

    def commit(self, tag: str | None = None) -> int:
        """Make all changes so far permanent, and return the number of the commit.

        With a tag the store can return to this commit later: the journal keeps what is
        needed for the last ``keep`` tags. Commit when the rest of a model is saved, under a
        tag that is saved with it, so that table and model can be restored together.

        Args:
            tag: Name of the commit, not used before.
        """
        with held_interrupts(), self._exclusive():
            self._check_usable()
            if tag is not None and not isinstance(tag, str):
                raise TypeError(f"tag must be a string, got {type(tag).__name__}")
            if tag is not None and tag in self.tags:
                raise ValueError(f"tag must be new, got {tag!r}, which is kept already")
            if self._journal.is_synced:
                self._sync_arrays()
            commit = self._journal.commit(
                tag=tag,
                arrays=tuple(mapped.file for mapped in self._mapped.values()),
                state=self._saved_state(),
            )
            self._start_commit()
            self._prune()
            return commit.number

    def return_to(self, at: str | int) -> None:
        """Return to a commit in place; later commits are removed.

        A kill before the end leaves the store at this commit or at a later one.

        Args:
            at: Tag or number of the commit.
        """
        with held_interrupts(), self._exclusive():
            self._check_usable()
            number = self._number_of(at)
            self._mapped = return_to(self._journal, self._mapped, number)
            self._start_commit()
            remove_unlisted(self.folder, self._journal)
            if self._trainer is not None:
                self._trainer.restore()

    def flush(self) -> None:
        """Write changed pages to the disk. This is not a commit."""
        self._check_usable()
        self._sync_arrays()

    def close(self) -> None:
        """Close the store. Changes since the last commit are undone when it is opened."""
        with self._lock:
            super().close()
            self._journal.close()
            self._file_lock.release()
            if self._trainer is not None:
                self._trainer.retire()
                self._trainer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        try:
            if kind is None and not self.closed:
                self.commit()
        finally:
            self.close()

    # -- For row optimizers

    @property
    def saved_state(self) -> SavedState | None:
        """Optimizer state to continue from, without the arrays that have a row per id."""
        return self._saved_state()

    @property
    def saved_state_at_commit(self) -> SavedState | None:
        """:attr:`saved_state` of the last commit."""
        return self._journal.newest.commit.state

    def bind(self, trainer: Trainer) -> None:
        """Train with this trainer, which continues from :attr:`saved_state`."""
        with self._lock:
            self._check_usable()
            if self._trainer is not None:
                self._trainer.retire()
            self._trainer = trainer

    def state_array(
        self, name: str, shape: tuple[int, ...], dtype: Any, *, fill: float = 0.0
    ) -> np.ndarray:
        """Return an array of the optimizer state, which is created if there is none.

        Args:
            name: Name of the array.
            shape: Shape.
            dtype: Dtype.
            fill: Value of a new array.
        """
        with self._lock:
            self._check_usable()
            known = self._mapped.get(name)
            if known is None:
                file = f"{name}.{self.last_commit.number}.safetensors"
                array = create_array(self.folder, name, file, shape, dtype, fill=fill)
                known = self._mapped[name] = MappedArray(self.folder, array)
            elif known.array.shape != shape or known.array.dtype != np.dtype(dtype):
                raise ValueError(
                    f"{name} in {self.folder} must be {shape} in {np.dtype(dtype).name}, "
                    f"got {known.array.shape} in {known.array.dtype.name}"
                )
            return known.array

    def discard_state(self) -> None:
        """Bring every row up to date and discard the optimizer state.

        The next optimizer starts with a new one. Like any change, this takes effect with
        the next commit.

        Example:
            >>> import tempfile
            >>> from firstlayer.numpy import Embedding
            >>> from firstlayer.optim import RowAdagrad, RowAdamW
            >>> from firstlayer.stores import create_store
            >>> with create_store(tempfile.mkdtemp() + "/table", (1000, 4)) as store:
            ...     layer = Embedding.from_store(store)
            ...     optimizer = RowAdamW(layer)
            ...     store.discard_state()
            ...     optimizer = RowAdagrad(layer)  # another rule, with a state of its own
        """
        with held_interrupts(), self._exclusive():
            self._check_usable()
            if self._trainer is not None:
                self._trainer.catch_up()
                self._trainer.retire()
                self._trainer = None
            elif self._saved_state() is not None:
                raise ValueError(
                    f"the rows of {self.path} may be stale; make an optimizer of the kind "
                    "that trained it, then discard its state"
                )
            self._mapped = {"weight": self._mapped["weight"]}

    # -- For state dicts

    def reference(self) -> Int[np.ndarray, " bytes"]:
        """Return the path and the commit as JSON in an array of uint8, for a state dict.

        Commits first, under a tag of its own, so that the state dict and the table are of
        the same step.
        """
        tag = f"state_dict-{uuid.uuid4().hex[:12]}"
        number = self.commit(tag)
        about = {
            "store": self.last_commit.store,
            "path": str(self.path),
            "commit": number,
            "tag": tag,
        }
        return np.frombuffer(json.dumps(about).encode(), np.uint8).copy()

    def load_reference(self, value: Any, *, name: str) -> None:
        """Return to the commit that a state dict refers to.

        Args:
            value: Array that :meth:`reference` returned.
            name: Name of the entry, for error messages.
        """
        self.return_to(self.check_reference(value, name=name))

    def check_reference(self, value: Any, *, name: str) -> str:
        """Return the tag that a state dict refers to, or raise if it is not kept."""
        array = np.asarray(value)
        try:
            if array.dtype != np.uint8:
                raise ValueError(f"it has dtype {array.dtype.name}")
            about = json.loads(array.tobytes())
            store, path, tag = about["store"], about["path"], about["tag"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name} must refer to a training store: {error}") from None
        if store != self.last_commit.store:
            raise ValueError(
                f"{name} refers to the store at {path}, which is not {self.path}"
            )
        if tag not in self.tags:
            raise ValueError(
                f"{name} refers to {tag!r}, which {self.path} does not keep; "
                f"it keeps {self.tags}"
            )
        return tag

    def _read(self, ids: np.ndarray, out: np.ndarray) -> None:
        trainer = self._trainer_of_rows()
        if trainer is not None:
            out[...] = trainer.caught_up_rows(ids)
        elif not self.format.gather(self.parts, ids, out):
            raise changed_ids(len(self))

    def _read_parts(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"weight": self.read(ids)}

    def _write(self, ids: np.ndarray, parts: dict[str, np.ndarray]) -> None:
        with held_interrupts():
            # A later catch-up would apply missed steps to the new values.
            trainer = self._trainer_of_rows()
            if trainer is not None:
                trainer.catch_up(ids)
            self.before_write(ids)
            self.array[ids] = parts["weight"]

    def _trainer_of_rows(self) -> Trainer | None:
        """Return the trainer, or None if there is none and every row is up to date."""
        if self._trainer is not None:
            return self._trainer
        saved = self._saved_state()
        if saved is not None and saved.has_stale_rows:
            raise ValueError(
                f"rows of {self.path} are stale; make a layer from the store, which brings "
                "them up to date"
            )
        return None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{self} cannot be copied or pickled: one process at a time trains it"
        )

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the store at {self.path} was opened by process {self._process}; "
                "a process forked from it can only read"
            )
        self._check_open()

    @contextlib.contextmanager
    def _exclusive(self) -> Generator[None, None, None]:
        """Keep other threads from stepping, catching up and committing."""
        trainer_lock = contextlib.nullcontext()
        if self._trainer is not None:
            trainer_lock = self._trainer.lock
        # The same order as in a step, which journals rows under its own lock.
        with trainer_lock, self._lock:
            yield

    def _start_commit(self) -> None:
        """Journal every row from now on, in the arrays of the last commit.

        Arrays created later are removed in a recovery.
        """
        arrays = self._journal.newest.commit.record_arrays
        self._committed = [self._mapped[array.name] for array in arrays]
        self._is_journalled[:] = False

    def _saved_state(self) -> SavedState | None:
        if self._trainer is not None:
            return self._trainer.save()
        if len(self._mapped) == 1:
            return None
        return self._journal.newest.commit.state

    def _number_of(self, at: str | int) -> int:
        for commit in self._journal.commits:
            if at in (commit.tag, commit.number):
                return commit.number
        raise ValueError(
            f"at must be a tag that {self.path} keeps, one of {self.tags}, got {at!r}"
        )

    def _row_bytes(self) -> int:
        return self._journal.newest.commit.record_row_bytes

    def _chunks(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        step = max(1, RECORD_BYTES // self._row_bytes())
        for lo in range(0, rows.size, step):
            yield np.ascontiguousarray(rows[lo : lo + step])

    def _rows_to_journal(self) -> Iterator[np.ndarray]:
        """Yield all rows that are not journalled, in chunks."""
        step = max(1, RECORD_BYTES // self._row_bytes())
        for lo in range(0, len(self), step):
            fresh = np.flatnonzero(~self._is_journalled[lo : lo + step])
            if fresh.size:
                yield fresh + lo

    def _sync_arrays(self) -> None:
        for mapped in self._mapped.values():
            mapped.sync()

    def _prune(self) -> None:
        """Remove the commits that no kept tag needs, and files that no commit lists."""
        tagged = [c.number for c in self._journal.commits if c.tag is not None]
        self._journal.prune(min([*tagged[-self.keep :], self.last_commit.number]))
        remove_unlisted(self.folder, self._journal)
