"""Layer files: the tensors of a layer and its config in one safetensors file.

Any program that reads the format (https://github.com/huggingface/safetensors) can open such
a file. The config is JSON in the header's metadata, under the key ``firstlayer``, together
with a format version. Nothing in a file is ever executed.

Writing is atomic; see :mod:`firstlayer.files.atomic`. A kill can leave behind a file named
``.firstlayer-….tmp``, which is never read; the next save in that folder removes it.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped

from .._check import float_dtype
from .atomic import Opener, opened_once, replacing
from .checkpoint import read_header, shortened

Tensors = dict[str, Shaped[np.ndarray, "..."]]
Path = str | os.PathLike[str]

KEY = "firstlayer"
#: The key that version 0.1 wrote, when the project was called Inlay.
OLD_KEY = "inlay"
FORMAT = 1
MAX_CONFIG_LENGTH = 2**17
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",  # id maps
    "uint8": "U8",  # rows of quantized tables
}


@dataclass(frozen=True)
class StreamedTensor:
    """Tensor that is written in parts, because it may be larger than memory.

    Args:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        source: File that the tensor is read from.
        parts: Returns the tensor as arrays of consecutive rows.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    source: pathlib.Path
    parts: Callable[[], Iterator[Shaped[np.ndarray, "..."]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    path: Path, tensors: Mapping[str, np.ndarray | StreamedTensor], config: dict[str, Any]
) -> None:
    """Write tensors and a config to one file, atomically.

    Args:
        path: Path of the file. Its folder must exist; an existing file is replaced.
        tensors: Arrays of float64, float32, float16, bfloat16, int64 or uint8, kept bit for
            bit, or tensors that are written in parts.
        config: Options of the layer, as values that JSON can represent.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(folder + "/a.safetensors", {"w": np.ones(2)}, {"scale": 0.5})
        ...     read(folder + "/a.safetensors")
        ({'w': array([1., 1.])}, {'scale': 0.5})
    """
    # Widest dtype first, so that every tensor is aligned.
    arrays = sorted(
        ((name, _contiguous(tensor)) for name, tensor in tensors.items()),
        key=lambda item: (-item[1].dtype.itemsize, item[0]),
    )
    header = _header(arrays, config)
    for _, array in arrays:
        if isinstance(array, StreamedTensor):
            check_not_source(path, array.source)
    with replacing(os.path.realpath(path)) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, array in arrays:
            parts = array.parts() if isinstance(array, StreamedTensor) else [array]
            for part in parts:
                file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)


def check_not_source(path: Path, source: Path) -> None:
    """Raise ValueError if a file would replace the one that its rows are trained in."""
    if os.path.realpath(path) == os.path.realpath(source):
        raise ValueError(
            f"path must not be the file of a table that is trained, got {path}"
        )


def read(path: Path, *, opener: Opener | None = None) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and the config that :func:`write` put into a file.

    Args:
        path: Path of the file. A file that :func:`write` did not make is a ValueError.
        opener: Opens the file; see :func:`firstlayer.files.atomic.read_folder`.
    """
    if opener is None:
        with opened_once() as opener:
            return read(path, opener=opener)
    stored, metadata = read_header(pathlib.Path(path), opener=opener)
    config = config_in(metadata, path)
    for name, tensor in stored.items():
        if tensor.dtype not in CODES.values():
            raise ValueError(
                f"{path} has a tensor {shortened(name)} of dtype "
                f"{shortened(tensor.dtype)}, which no layer has"
            )
    return {name: tensor.read() for name, tensor in stored.items()}, config


def _contiguous(tensor: np.ndarray | StreamedTensor) -> np.ndarray | StreamedTensor:
    if isinstance(tensor, StreamedTensor):
        return tensor
    if tensor.dtype in (np.uint8, np.int64):
        return np.ascontiguousarray(tensor)
    # By name, because a byte-swapped dtype has the same name as the native one.
    return np.asarray(tensor, float_dtype(tensor.dtype.name), order="C")


def _header(
    arrays: list[tuple[str, np.ndarray | StreamedTensor]], config: dict[str, Any]
) -> bytes:
    text = json.dumps({"format": FORMAT, "config": config})
    if len(text) > MAX_CONFIG_LENGTH:
        raise ValueError(
            f"config must take at most {MAX_CONFIG_LENGTH} characters, got {len(text)}"
        )
    header: dict[str, Any] = {"__metadata__": {KEY: text}}
    end = 0
    for name, array in arrays:
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8)


def config_in(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    """Return the config in the metadata of a file that :func:`write` made."""
    text = metadata.get(KEY, metadata.get(OLD_KEY))
    if text is None:
        raise ValueError(
            f"{path} has no config in its metadata, so it was not written by save: "
            "Embedding.from_pretrained reads a table, safetensors.numpy.load_file all "
            "tensors"
        )
    # Parsed JSON can take thirty times the memory of its text.
    if len(text) > MAX_CONFIG_LENGTH:
        raise ValueError(f"{path} has a config of {len(text)} characters")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{path} has a config that is not JSON") from None
    match content:
        case {"format": int(version), "config": dict(config)} if version == FORMAT:
            return config
        case {"format": int(version)} if version > FORMAT:
            raise ValueError(
                f"{path} has format {version}, but this version of Firstlayer reads up to "
                f"{FORMAT}: install a newer one"
            )
    raise ValueError(f"{path} has a config that Firstlayer did not write")
