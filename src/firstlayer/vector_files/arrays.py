"""Read tables in ``.npy`` and ``.npz`` files."""

import io
import math
import os
import zipfile
from pathlib import Path

import numpy as np

from ..files.checkpoint import open_regular
from ..files.npy import parse_npy_header, read_npy_header
from ..files.torch_pickle import ZIP_ERRORS
from .table import VectorTable
from .vocabulary import matched_words, words_beside

#: The most that deflate can expand.
MAX_RATIO = 1032


def read_npy(path: Path, *, need_words: bool) -> VectorTable:
    """Return the table in a ``.npy`` file, with the words of a file next to it."""
    header = read_npy_header(path)
    check_table(path, header.dtype, header.shape)
    with open_regular(path) as file:
        mapped = np.memmap(file, header.dtype, "c", header.start, header.shape)
    weight = np.ascontiguousarray(mapped, np.float32)
    return VectorTable(_words(path, len(weight), need_words), np.asarray(weight))


def read_npz(path: Path, *, need_words: bool) -> VectorTable:
    """Return the table in a ``.npz`` file: an array of two axes, and one of words."""
    arrays = _arrays(path)
    tables = {k: a for k, a in arrays.items() if a.ndim == 2 and a.dtype.kind == "f"}
    if len(tables) != 1:
        raise ValueError(
            f"{path} must have one table of floats, got {', '.join(tables) or 'none'}"
        )
    ((_, table),) = tables.items()
    check_table(path, table.dtype, table.shape)
    weight = np.ascontiguousarray(table, np.float32)
    for array in arrays.values():
        if array.dtype.kind in "US" and array.shape == (len(weight),):
            if array.dtype.kind == "S":
                array = np.char.decode(array, errors="backslashreplace")
            return VectorTable([str(word) for word in array], weight)
    return VectorTable(_words(path, len(weight), need_words), weight)


def _words(path: Path, rows: int, need_words: bool) -> list[str]:
    if need_words or words_beside(path) is not None:
        return matched_words(path, rows)
    return [""] * rows


def check_table(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Raise unless an array is a table of floats."""
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"{path} has an array of shape {shape}, but a table has rows and a width"
        )
    if dtype.kind != "f":
        raise ValueError(f"{path} must have a table of floats, got {dtype.str}")


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of numbers and texts in a file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(file) as archive:
                members = [
                    info for info in archive.infolist() if info.filename.endswith(".npy")
                ]
                if sum(info.file_size for info in members) > MAX_RATIO * size:
                    raise ValueError(f"{path} claims to hold more than it can")
                return {
                    info.filename.removesuffix(".npy"): _array(archive.read(info), path)
                    for info in members
                }
        except ZIP_ERRORS:
            raise ValueError(f"{path} is a damaged zip archive") from None


def _array(content: bytes, path: Path) -> np.ndarray:
    header = parse_npy_header(io.BytesIO(content), path, size=len(content))
    count = math.prod(header.shape)
    flat = np.frombuffer(content, header.dtype, count, header.start)
    return flat.reshape(header.shape)
