"""A checkpoint in safetensors files, of which only what is asked for is read.

A safetensors file is a header, JSON with each tensor's dtype, shape and place, and then the
tensors' bytes. Large models are in several files with an index that says what is where.
Everything a header or an index claims is checked against the files before it is used.
"""

import json
import math
import os
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

#: As the format's own reader: no header is longer.
LONGEST_HEADER = 100_000_000
#: How much of a tensor's name an error tells.
LONGEST_NAME = 120
#: About how many bytes of a tensor are read at a time.
CHUNK = 1 << 23
INDEX = "model.safetensors.index.json"
MODEL = "model.safetensors"

#: NumPy's names of the dtypes; those after the first seven are ml_dtypes'.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}

#: What the last words of a tensor's name say it is, in the checkpoints that are common.
ROLES = {
    "token": (
        r"wte\.weight|word_embeddings\.weight|embed_tokens\.weight|tok_embeddings\.weight"
        r"|shared\.weight|embed_in\.weight|token_embedding\.weight|token\.weight"
        r"|embeddings|embedding\.weight|token_embd\.weight"
    ),
    "position": (
        r"wpe\.weight|position_embeddings?\.weight|embed_positions\.weight"
        r"|position\.weight|positional_embedding"
    ),
    "segment": r"token_type_embeddings\.weight|segment\.weight",
    "head": r"lm_head\.weight|embed_out\.weight|output\.weight",
    "bias": r"relative_attention_bias\.weight",
}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is.

    Args:
        name: What it is called.
        dtype: Its dtype's code in the format.
        shape: Its shape.
        path: The file it is in.
        start: Where in that file it begins.
        nbytes: How long it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int

    @property
    def role(self) -> str | None:
        """What it is to the layer after the tokenizer, None if it is no table."""
        # Of the integers, eight bits are a table that was made smaller, the rest are ids.
        is_kind = self.dtype in DTYPES and (self.dtype[0] in "FB" or self.dtype == "I8")
        is_table = len(self.shape) == 2 and is_kind
        return role_of(self.name) if is_table else None


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Args:
        files: The files it is in.
        tensors: Its tensors, by name.
        metadata: What the headers say beside.
    """

    files: list[Path]
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def tables(self) -> list[Tensor]:
        """Return the tensors that are embedding tables, largest first."""
        found = [tensor for tensor in self.tensors.values() if tensor.role]
        return sorted(found, key=lambda tensor: (-tensor.nbytes, tensor.name))

    def token_table(self) -> Tensor:
        """Return the table of tokens; none is a ValueError."""
        for tensor in self.tables():
            if tensor.role == "token":
                return tensor
        raise ValueError(f"{self.files[0]} has no table of tokens")

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return a tensor, all of it.

        Args:
            name: Which.
        """
        tensor = self.tensors[name]
        flat = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.start)
        return flat.view(_dtype(tensor)).reshape(tensor.shape)

    def chunks(self, name: str) -> Iterator[Shaped[np.ndarray, "rows width"]]:
        """Yield the rows of a table, a few megabytes at a time.

        Args:
            name: Which table.
        """
        tensor = self.tensors[name]
        rows, width = tensor.shape
        dtype = _dtype(tensor)
        step = max(1, CHUNK // max(1, width * dtype.itemsize))
        with open(tensor.path, "rb") as file:
            file.seek(tensor.start)
            for lo in range(0, rows, step):
                count = min(step, rows - lo)
                flat = np.fromfile(file, np.uint8, count * width * dtype.itemsize)
                yield flat.view(dtype).reshape(count, width)


def role_of(name: str) -> str | None:
    """Return what a name says that a tensor is, None if it says nothing of embeddings.

    Example:
        >>> role_of("transformer.wte.weight"), role_of("h.0.attn.weight")
        ('token', None)
    """
    for role, pattern in ROLES.items():
        if re.search(rf"(^|\.)({pattern})$", name):
            return role
    return None


def _dtype(tensor: Tensor) -> np.dtype:
    name = DTYPES.get(tensor.dtype)
    if name is None:
        raise ValueError(f"{tensor.name} has dtype {tensor.dtype}, which is not read")
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a checkpoint.

    Args:
        path: A safetensors file, an index of several, or a folder with either.
    """
    place = Path(path)
    if not os.path.lexists(place):
        raise FileNotFoundError(f"no file or folder {place}")
    if place.is_dir():
        place = _in_folder(place)
    files = _shards(place) if place.name.endswith(".index.json") else [place]
    tensors, metadata = {}, {}
    for file in files:
        held, said = _header(file)
        if twice := sorted(tensors.keys() & held):
            raise ValueError(f"{file} has a tensor {twice[0]!r} that another file has too")
        tensors |= held
        metadata |= said
    return Checkpoint(files, tensors, metadata)


def _in_folder(folder: Path) -> Path:
    for name in (MODEL, INDEX):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise ValueError(
            f"{folder} must hold {MODEL}, {INDEX} or one other safetensors file, "
            f"got {len(found)}"
        )
    return found[0]


def _shards(index: Path) -> list[Path]:
    held = _object(index.read_bytes(), name=index)
    names = held.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index} must have a weight_map")
    files = []
    for name in sorted(set(map(str, names.values()))):
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise ValueError(f"{index} names a file that is not beside it: {name!r}")
        if not (index.parent / name).is_file():
            raise FileNotFoundError(f"{index} names {name!r}, which is not there")
        files.append(index.parent / name)
    return files


def _header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file and its metadata."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LONGEST_HEADER, size - 8):
            raise ValueError(
                f"{path} is no safetensors file or is cut short: its header would be "
                f"{length} bytes long, but it has {size}"
            )
        held = _object(file.read(length), name=path)
    said = held.pop("__metadata__", None) or {}
    tensors = {
        name: _tensor(name, entry, path=path, start=8 + length, size=size)
        for name, entry in held.items()
    }
    return tensors, said if isinstance(said, dict) else {}


def _object(text: bytes, *, name: Path) -> dict[str, Any]:
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} has a header that is not JSON") from None
    if not isinstance(held, dict):
        raise ValueError(f"{name} has a header that is no object")
    return held


def _tensor(name: str, entry: Any, *, path: Path, start: int, size: int) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [lo, hi]} if all(
            type(number) is int and 0 <= number for number in (*shape, lo, hi)
        ):
            tensor = Tensor(name, dtype, tuple(shape), path, start + lo, hi - lo)
        case _:
            raise ValueError(f"{path} has a tensor {_short(name)} without a place")
    if lo > hi or start + hi > size:
        raise ValueError(
            f"{path} is cut short: tensor {_short(name)} would end at byte "
            f"{start + hi}, but there are {size}"
        )
    bytes_each = _dtype(tensor).itemsize if dtype in DTYPES else None
    if bytes_each is not None and math.prod(shape) * bytes_each != hi - lo:
        raise ValueError(
            f"{path} has a tensor {_short(name)} of shape {tuple(shape)} and dtype "
            f"{dtype} in {hi - lo} bytes"
        )
    return tensor


def _short(name: str) -> str:
    """Return a name that a file gives, no longer than a sentence bears."""
    cut = reprlib.Repr()
    cut.maxstring = LONGEST_NAME
    return cut.repr(name)
