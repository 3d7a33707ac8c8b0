"""Open a table in a file or folder as a store."""

import os
from pathlib import Path
from typing import Literal, overload

from .file import FileStore
from .formats import RowFormat
from .recovery import check_readable
from .row_store import checked_mode
from .training import TrainingStore
from .training_folder import Sync, folder_beside, is_training_folder, open_training


@overload
def open_store(
    path: str | os.PathLike[str],
    tensor: str | None = None,
    *,
    mode: Literal["r"] = "r",
    format: str | RowFormat | None = None,
    cache_rows: int = 0,
) -> FileStore: ...


@overload
def open_store(
    path: str | os.PathLike[str],
    tensor: str | None = None,
    *,
    mode: Literal["r+"],
    format: str | RowFormat | None = None,
    at: str | int | None = None,
    sync: Sync = "off",
    keep: int = 2,
) -> TrainingStore: ...


def open_store(
    path: str | os.PathLike[str],
    tensor: str | None = None,
    *,
    mode: str = "r",
    format: str | RowFormat | None = None,
    cache_rows: int = 0,
    at: str | int | None = None,
    sync: Sync = "off",
    keep: int = 2,
) -> FileStore | TrainingStore:
    """Open a table on disk without reading it: to read rows, or to train it.

    Rows are read and written in place. Opening takes milliseconds for a table of any size;
    only the first opening of a binary word2vec file scans it once, and writes an index.

    ``mode="r+"`` opens a table to train it, at its last commit. It must be one array in
    float32, float16 or bfloat16: a folder made by :func:`create_store`, or a table in one
    file, which is then trained in place. The optimizer state and the undo journal are files
    beside it, in that folder or in ``<file>.training``. Files in other formats are only
    read; :meth:`RowStore.convert` writes a new one.

    Args:
        path: A safetensors file, the index of a sharded checkpoint or a folder with one of
            them; a GGUF file; a ``.npy`` file; or a binary word2vec file. With
            ``mode="r+"`` also a folder made by :func:`create_store`.
        tensor: Name of the table, with or without ``.weight``. A table in row shards, such
            as ``a.shard_0.weight``, ``a.shard_1.weight`` and so on, is opened as ``"a"``.
            None opens the token table, or the only table.
        mode: ``"r"`` to read, ``"r+"`` to train.
        format: Format of the rows, if the file does not say it: of rows of bytes, and of
            MLX tables without a ``config.json``.
        cache_rows: Number of rows to keep decoded in memory, those read last. Only with
            ``mode="r"``; the next ones only with ``mode="r+"``.
        at: Tag or number of a commit to return to. Later commits are removed.
        sync: ``"off"`` survives a kill of the process at any instant, ``"full"`` also the
            loss of power, and waits for the disk before rows first change after a commit.
        keep: Number of tags that the store can return to.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> np.save(folder + "/table.npy", np.eye(4, 3, dtype=np.float32))
        >>> with open_store(folder + "/table.npy") as store:
        ...     print(store, store.read([2, 0]).tolist())
        FileStore(table.npy: 4 × 3, float32) [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
        >>> with open_store(folder + "/table.npy", mode="r+") as store:
        ...     store.write([2], [[5.0, 5.0, 5.0]])
        ...     store.commit("first"), store.write([2], [[9.0, 9.0, 9.0]])
        (2, None)
        >>> with open_store(folder + "/table.npy", mode="r+", at="first") as store:
        ...     store.read([2]).tolist()
        [[5.0, 5.0, 5.0]]
    """
    path = Path(path)
    if checked_mode(mode) == "r+":
        if cache_rows:
            raise ValueError(f'cache_rows must be 0 with mode="r+", got {cache_rows}')
        return open_training(path, tensor, format=format, at=at, sync=sync, keep=keep)
    for name, value, default in (
        ("at", at, None),
        ("sync", sync, "off"),
        ("keep", keep, 2),
    ):
        if value != default:
            raise ValueError(f'{name} must be left out unless mode is "r+", got {value!r}')
    if is_training_folder(path):
        raise ValueError(
            f'{path} is a table that is trained: open it with mode="r+"; save() of that '
            "store writes a file to read"
        )
    store = FileStore(path, tensor, format=format, cache_rows=cache_rows)
    try:
        if store.file is not None:
            check_readable(folder_beside(store.file), path)
    except BaseException:
        store.close()
        raise
    return store
