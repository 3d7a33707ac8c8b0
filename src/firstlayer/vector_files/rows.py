"""Rows of the table in any file, with or without words, a few at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files.checkpoint import (
    CHUNK_BYTES,
    ZIP_MAGIC,
    checkpoint_in,
    open_regular,
    read_header,
    tensor_names,
)
from ..files.gguf import MAGIC as GGUF_MAGIC
from ..files.npy import MAGIC as NPY_MAGIC
from ..files.word2vec import is_text_row
from ..stores import FileStore, open_store
from ..stores.table_files import METADATA_KEY
from .parquet import MAGIC as PARQUET_MAGIC
from .reading import is_npz, read_vectors
from .text import MAX_LINE_BYTES, counts_in


@dataclass(frozen=True)
class FileRows:
    """The rows of a file that is not a checkpoint.

    Args:
        name: Name of the table.
        shape: Number of rows and width.
        dtype: Name of the format of the rows in the file.
        nbytes: Bytes of the rows in the file.
        words: Word of each row, or empty.
        chunks: Yields the rows, some megabytes at a time.
    """

    name: str
    shape: tuple[int, int]
    dtype: str
    nbytes: int
    words: list[str]
    chunks: Callable[[], Iterator[np.ndarray]]
    role: str = "token"


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a folder, or a safetensors or torch file or an index.

    A file of one table that :meth:`firstlayer.stores.RowStore.convert` wrote is none.
    """
    if path.is_dir() or path.name.endswith(".index.json"):
        return True
    if path.name.endswith(".safetensors"):
        return not _is_store(path)
    with open_regular(path) as file:
        begin = file.read(16)
    if begin[8:9] == b"{" and not begin.startswith(PARQUET_MAGIC):
        return True
    return begin.startswith(ZIP_MAGIC) and not is_npz(path)


def _is_store(path: Path) -> bool:
    return path.name.endswith(".safetensors") and METADATA_KEY in read_header(path)[1]


def open_in_place(path: Path, tensor: str | None = None) -> FileStore | None:
    """Return a store that reads rows in place, or None if the format does not allow it."""
    if is_checkpoint(path) or _is_store(path):
        return None if tensor is None and _is_scaled(path) else open_store(path, tensor)
    with open_regular(path) as file:
        first = file.readline(MAX_LINE_BYTES)
        counts = counts_in(first)
        is_binary = (
            counts is not None
            and min(counts) > 0
            and not is_text_row(file.readline(MAX_LINE_BYTES), counts[1])
        )
    if is_binary or first.startswith((GGUF_MAGIC, NPY_MAGIC)):
        return open_store(path, tensor)
    return None


def _is_scaled(path: Path) -> bool:
    """Return whether words of a model2vec table share rows, or have factors."""
    file = checkpoint_in(path) if path.is_dir() else path
    names = tensor_names(file)
    return "embeddings" in names and not {"mapping", "weights"}.isdisjoint(names)


def open_rows(path: Path) -> FileRows:
    """Return the rows of a file that is not a checkpoint."""
    with open_regular(path) as file:
        begin = file.read(8)
    if begin.startswith((GGUF_MAGIC, NPY_MAGIC)) or _is_store(path):
        with open_store(path) as store:
            shape, format, nbytes = store.shape, store.format.name, store.nbytes
        return FileRows(path.name, shape, format, nbytes, [], lambda: _stored(path))
    table = read_vectors(path, need_words=False)
    rows, width = table.weight.shape
    step = max(1, CHUNK_BYTES // max(1, 4 * width))
    parts = range(0, rows, step)
    return FileRows(
        path.name,
        (rows, width),
        "float32",
        table.weight.nbytes,
        table.words,
        lambda: (table.weight[lo : lo + step] for lo in parts),
    )


def _stored(path: Path) -> Iterator[np.ndarray]:
    with open_store(path) as store:
        step = max(1, CHUNK_BYTES // max(1, 4 * store.shape[1]))
        for lo in range(0, len(store), step):
            yield store.read(np.arange(lo, min(lo + step, len(store))))
