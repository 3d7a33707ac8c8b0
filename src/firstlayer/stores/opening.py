"""Open a table in a file as a store."""

import os

from .file import FileStore
from .formats import RowFormat


def open_store(
    path: str | os.PathLike[str],
    tensor: str | None = None,
    *,
    mode: str = "r",
    format: str | RowFormat | None = None,
    cache_rows: int = 0,
) -> FileStore:
    """Open a table in a file, without reading it.

    Rows are read in place. Opening takes milliseconds for a table of any size; only the
    first opening of a binary word2vec file scans it once, and writes an index.

    Args:
        path: A safetensors file, the index of a sharded checkpoint or a folder with one of
            them; a GGUF file; a ``.npy`` file; or a binary word2vec file.
        tensor: Name of the table, with or without ``.weight``. A table in row shards, such
            as ``a.shard_0.weight``, ``a.shard_1.weight`` and so on, is opened as ``"a"``.
            None opens the token table, or the only table.
        mode: ``"r"`` to read, ``"r+"`` to write rows too.
        format: Format of the rows, if the file does not say it: of rows of bytes, and of
            MLX tables without a ``config.json``.
        cache_rows: Number of rows to keep decoded in memory, those read last.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(folder + "/table.npy", np.eye(4, 3, dtype=np.float32))
        ...     with open_store(folder + "/table.npy") as store:
        ...         print(store, store.read([2, 0]).tolist())
        FileStore(table.npy: 4 × 3, float32) [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    return FileStore(path, tensor, mode=mode, format=format, cache_rows=cache_rows)
