"""Writers of small files with tables: safetensors, GGUF and word2vec."""

import json
import struct
from pathlib import Path

import numpy as np

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def write_safetensors(
    path: Path, tensors: Tensors, *, pad: int = 8, **metadata: str
) -> None:
    """Write tensors, each a dtype code, a shape and bytes.

    Args:
        path: The file.
        tensors: Tensors by name.
        pad: The header's length is a multiple of this.
        metadata: Texts of the header.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape, content) in tensors.items():
        start, end = end, end + len(content)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % pad)
    contents = b"".join(content for _, _, content in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + contents)


def tensor(code: str, array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """Return a tensor of :func:`write_safetensors`."""
    return code, array.shape, array.tobytes()


def write_sharded(folder: Path, tensors: Tensors, *, per_file: int = 1) -> None:
    """Write tensors to several files with an index."""
    names, weight_map = list(tensors), {}
    for lo in range(0, len(names), per_file):
        file = f"model-{lo:05d}.safetensors"
        some = {name: tensors[name] for name in names[lo : lo + per_file]}
        write_safetensors(folder / file, some)
        weight_map |= dict.fromkeys(some, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def gguf_string(text: bytes) -> bytes:
    """Return a string of a GGUF file."""
    return struct.pack("<Q", len(text)) + text


def gguf_bytes(
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]],
    *,
    values: tuple[bytes, ...] = (),
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """Return a GGUF file.

    Args:
        tensors: Type number, shape and bytes of each tensor.
        values: Encoded key-value pairs.
        alignment: Alignment of the data, named in the file unless it is the default.
        version: Version of the format.
    """
    if alignment != 32:
        key = gguf_string(b"general.alignment")
        values = (*values, key + struct.pack("<II", 4, alignment))
    header, data = b"", b""
    for name, (kind, shape, content) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        header += gguf_string(name.encode()) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *shape[::-1])
        header += struct.pack("<IQ", kind, len(data))
        data += content
    counts = struct.pack("<IQQ", version, len(tensors), len(values))
    file = b"GGUF" + counts + b"".join(values) + header
    return file + b"\0" * (-len(file) % alignment) + data


def word2vec_bytes(words: list[str], table: np.ndarray, *, newline: bool) -> bytes:
    """Return a binary word2vec file, as its C program or as gensim writes it."""
    rows = [
        word.encode() + b" " + row.astype("<f4").tobytes() + (b"\n" if newline else b"")
        for word, row in zip(words, table, strict=True)
    ]
    return f"{len(words)} {table.shape[1]}\n".encode() + b"".join(rows)
