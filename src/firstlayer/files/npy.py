"""Read the header of a ``.npy`` file.

NumPy's own reader allocates the length that the header claims before it looks at the file.
"""

import ast
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .checkpoint import open_regular

MAGIC = b"\x93NUMPY"
#: Limit on the length of a header, the same as in NumPy.
MAX_HEADER_BYTES = 10_000


@dataclass(frozen=True)
class NpyArray:
    """The array in a ``.npy`` file: its dtype and shape, and where its bytes begin."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


def read_npy_header(path: Path) -> NpyArray:
    """Return dtype, shape and offset of the array in a file, in C order.

    Every claim in the header is checked against the size of the file.
    """
    with open_regular(path) as file:
        return parse_npy_header(file, path, size=os.fstat(file.fileno()).st_size)


def parse_npy_header(file: BinaryIO, path: Path, *, size: int) -> NpyArray:
    """Return what :func:`read_npy_header` does, from an open file of ``size`` bytes."""
    begin = file.read(12)
    if begin[:6] != MAGIC or len(begin) < 12:
        raise ValueError(f"{path} is not a .npy file")
    version = begin[6]
    if version not in (1, 2, 3):
        raise ValueError(f"{path} must have .npy version 1, 2 or 3, got {version}")
    field = slice(8, 10) if version == 1 else slice(8, 12)
    length = int.from_bytes(begin[field], "little")
    if length > min(MAX_HEADER_BYTES, size):
        raise ValueError(
            f"{path} must have a header of at most {MAX_HEADER_BYTES} bytes, got {length}"
        )
    file.seek(field.stop)
    header = file.read(length)
    array = _parsed(header, path, start=field.stop + length)
    nbytes = array.dtype.itemsize
    for axis in array.shape:
        nbytes *= axis
    if array.start + nbytes > size:
        raise ValueError(
            f"{path} is cut short: its array would end at byte {array.start + nbytes}, "
            f"but it has {size}"
        )
    return array


def _parsed(header: bytes, path: Path, *, start: int) -> NpyArray:
    try:
        fields = ast.literal_eval(header.decode("latin1"))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        raise ValueError(f"{path} has a header that is not a Python literal") from None
    match fields:
        case {"descr": str(code), "fortran_order": bool(is_fortran), "shape": tuple(shape)}:
            pass
        case _:
            raise ValueError(f"{path} has a header without dtype, order and shape")
    if not all(type(axis) is int and 0 <= axis < 2**63 for axis in shape):
        raise ValueError(f"{path} has a header with a malformed shape")
    try:
        dtype = np.dtype(code)
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(f"{path} has a header with a malformed dtype") from None
    if dtype.hasobject:
        raise ValueError(f"{path} has Python objects, which are not read")
    if is_fortran and len(shape) > 1:
        raise ValueError(
            f"{path} is in Fortran order, so its rows are scattered: save "
            "np.ascontiguousarray(array)"
        )
    return NpyArray(dtype, shape, start)
