"""Read the header of a GGUF file: names, types and places of its tensors.

A GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) begins with
key-value pairs, such as the vocabulary of the model, followed by a description of each
tensor. The values have no table of contents, so they must be skipped one by one: strings of
a vocabulary take about 0.2 µs each.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import open_regular

MAGIC = b"GGUF"
#: Version 1 had 32-bit counts and was replaced within weeks.
VERSIONS = (2, 3)
ALIGNMENT_KEY = b"general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 256
#: Values may be arrays of arrays.
MAX_DEPTH = 4
#: Bytes of each type of value that has a fixed size; 8 is a string and 9 an array.
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UINT32, STRING, ARRAY = 4, 8, 9
#: Name, elements and bytes of a block of each type of tensor.
BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    30: ("BF16", 1, 2),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a GGUF file.

    Args:
        name: Name.
        type: Name of its type, such as ``"Q8_0"``, or its number if that is unknown.
        shape: Shape, with the last axis contiguous in the file.
        start: Offset of its first byte in the file.
        nbytes: Number of bytes; None if the type is unknown.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int | None


def read_gguf(path: Path) -> dict[str, GGUFTensor]:
    """Return the tensors of a GGUF file by name.

    Every claim in the header is checked against the size of the file.
    """
    with open_regular(path) as file:
        state = os.fstat(file.fileno())
        if state.st_size < 24:
            raise ValueError(f"{path} is not a GGUF file or is cut short")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _tensors(data, path)
            except struct.error:
                raise ValueError(
                    f"{path} is cut short: its header would be longer than its "
                    f"{state.st_size} bytes"
                ) from None


def read_gguf_strings(path: Path, key: str) -> list[bytes]:
    """Return the array of strings under a key; an empty list if there is none."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size < 24:
            raise ValueError(f"{path} is not a GGUF file or is cut short")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _strings_under(data, key.encode(), path)
            except struct.error:
                raise ValueError(f"{path} is cut short") from None


def _strings_under(data: mmap.mmap, wanted: bytes, path: Path) -> list[bytes]:
    place = 24
    for _ in range(_U64.unpack_from(data, 16)[0]):
        key, place = _string(data, place, path)
        kind, place = _U32.unpack_from(data, place)[0], place + 4
        if key == wanted and kind == ARRAY:
            kind, count = struct.unpack_from("<IQ", data, place)
            if kind != STRING or count > len(data) // 8:
                raise ValueError(f"{path} has no list of strings {wanted.decode()!r}")
            place, strings = place + 12, []
            for _ in range(count):
                length = _U64.unpack_from(data, place)[0]
                if length > len(data) - place:
                    raise _too_long(path, "string", length)
                strings.append(data[place + 8 : place + 8 + length])
                place += 8 + length
            return strings
        place = _after_value(data, place, kind, path, depth=0)
    return []


def _tensors(data: mmap.mmap, path: Path) -> dict[str, GGUFTensor]:
    if data[:4] != MAGIC:
        raise ValueError(f"{path} is not a GGUF file")
    version = _U32.unpack_from(data, 4)[0]
    if version not in VERSIONS:
        if int.from_bytes(data[4:8], "big") in VERSIONS:
            raise ValueError(f"{path} is a GGUF file in big-endian byte order")
        raise ValueError(f"{path} must have GGUF version 2 or 3, got {version}")
    num_tensors, num_values = _U64.unpack_from(data, 8)[0], _U64.unpack_from(data, 16)[0]
    if num_tensors > MAX_TENSORS:
        raise ValueError(
            f"{path} must have at most {MAX_TENSORS} tensors, got {num_tensors}"
        )
    place, alignment = 24, DEFAULT_ALIGNMENT
    for _ in range(num_values):
        key, place = _string(data, place, path)
        kind, place = _U32.unpack_from(data, place)[0], place + 4
        if key == ALIGNMENT_KEY and kind == UINT32:
            alignment = _U32.unpack_from(data, place)[0]
            if not 0 < alignment <= MAX_ALIGNMENT:
                raise ValueError(
                    f"{path} must have an alignment in [1, {MAX_ALIGNMENT}], "
                    f"got {alignment}"
                )
        place = _after_value(data, place, kind, path, depth=0)
    found = []
    for _ in range(num_tensors):
        entry, place = _tensor(data, place, path)
        found.append(entry)
    start = -(-place // alignment) * alignment
    tensors = {}
    for name, kind, shape, offset in found:
        if name in tensors:
            raise ValueError(f"{path} has two tensors {name!r}")
        tensors[name] = _checked(path, name, kind, shape, start + offset, size=len(data))
    return tensors


def _tensor(
    data: mmap.mmap, place: int, path: Path
) -> tuple[tuple[str, int, tuple[int, ...], int], int]:
    """Return the entry of a tensor, and the offset of the next one."""
    name, place = _string(data, place, path)
    if len(name) > MAX_NAME_BYTES:
        raise ValueError(
            f"{path} must have names of at most {MAX_NAME_BYTES} bytes, got {len(name)}"
        )
    axes = _U32.unpack_from(data, place)[0]
    if axes > MAX_DIMENSIONS:
        raise ValueError(
            f"{path} must have tensors of at most {MAX_DIMENSIONS} axes, got {axes}"
        )
    shape = struct.unpack_from(f"<{axes}Q", data, place + 4)
    kind, offset = struct.unpack_from("<IQ", data, place + 4 + 8 * axes)
    # The first axis of GGUF is the contiguous one.
    entry = name.decode(errors="backslashreplace"), kind, shape[::-1], offset
    return entry, place + 16 + 8 * axes


def _checked(
    path: Path, name: str, kind: int, shape: tuple[int, ...], start: int, *, size: int
) -> GGUFTensor:
    """Return a tensor that the file can hold."""
    if kind not in BLOCKS:
        return GGUFTensor(name, str(kind), shape, start, None)
    type_name, block, block_bytes = BLOCKS[kind]
    count = 1
    for length in shape:
        count *= length
    if count and shape and shape[-1] % block:
        raise ValueError(
            f"{path} has a tensor {name!r} of width {shape[-1]}, but {type_name} has "
            f"blocks of {block}"
        )
    nbytes = count // block * block_bytes
    if start + nbytes > size:
        raise ValueError(
            f"{path} is cut short: tensor {name!r} would end at byte {start + nbytes}, but "
            f"it has {size}"
        )
    return GGUFTensor(name, type_name, shape, start, nbytes)


def _string(data: mmap.mmap, place: int, path: Path) -> tuple[bytes, int]:
    """Return a string, and the offset after it."""
    length = _U64.unpack_from(data, place)[0]
    end = place + 8 + length
    if end > len(data):
        raise _too_long(path, "string", length)
    # Only names are kept, and they are short.
    return data[place + 8 : min(end, place + 9 + MAX_NAME_BYTES)], end


def _after_value(data: mmap.mmap, place: int, kind: int, path: Path, *, depth: int) -> int:
    """Return the offset after a value."""
    if kind in VALUE_BYTES:
        return place + VALUE_BYTES[kind]
    if kind == STRING:
        return _after_strings(data, place, 1, path)
    if kind != ARRAY:
        raise ValueError(f"{path} has a value of the unknown type {kind}")
    if depth == MAX_DEPTH:
        raise ValueError(f"{path} has arrays nested deeper than {MAX_DEPTH}")
    kind, count = struct.unpack_from("<IQ", data, place)
    place += 12
    if kind in VALUE_BYTES:
        if count > len(data):
            raise _too_long(path, "array", count)
        return place + count * VALUE_BYTES[kind]
    if kind == STRING:
        return _after_strings(data, place, count, path)
    for _ in range(count):
        place = _after_value(data, place, kind, path, depth=depth + 1)
    return place


def _after_strings(data: mmap.mmap, place: int, count: int, path: Path) -> int:
    """Return the offset after ``count`` strings."""
    length_at, size = _U64.unpack_from, len(data)
    for _ in range(count):
        length = length_at(data, place)[0]
        if length > size:
            raise _too_long(path, "string", length)
        place += 8 + length
    return place


def _too_long(path: Path, what: str, length: int) -> ValueError:
    return ValueError(f"{path} is cut short: it has a {what} of length {length}")
