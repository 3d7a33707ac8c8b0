"""Layer files: the tensors of a layer and its config in one safetensors file.

Any program that reads the format (https://github.com/huggingface/safetensors) can open such
a file. The config is JSON in the header's metadata, under the key ``firstlayer``, together
with a format version. Nothing in a file is ever executed.

Writing is atomic. The bytes go to a temporary file in the same folder, are synced to disk,
and are renamed over the old file, so a process killed at any moment leaves the old file or
the new one. A kill can leave behind a file named ``.firstlayer-….tmp``, which is never read
and can be deleted. A symbolic link stays a link, and its target is replaced. An existing
file keeps its permissions.
"""

import contextlib
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Generator
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Float

from .._check import float_dtype
from .checkpoint import check_regular, read_header

Tensors = dict[str, Float[np.ndarray, "..."]]
Path = str | os.PathLike[str]

KEY = "firstlayer"
#: The key that version 0.1 wrote, when the project was called Inlay.
OLD_KEY = "inlay"
FORMAT = 1
MAX_CONFIG_LENGTH = 2**17
CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write(path: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """Write tensors and a config to one file, atomically.

    Args:
        path: Path of the file. Its folder must exist; an existing file is replaced.
        tensors: Arrays of float64, float32, float16 or bfloat16, kept bit for bit.
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
        key=lambda item: (-item[1].itemsize, item[0]),
    )
    header = _header(arrays, config)
    with replacing(os.path.realpath(path)) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, array in arrays:
            file.write(array.reshape(-1).view(np.uint8).data)


def read(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and the config that :func:`write` put into a file.

    Args:
        path: Path of the file. A file that :func:`write` did not make is a ValueError.
    """
    stored, metadata = read_header(pathlib.Path(path))
    config = _config_in(metadata, path)
    for name, tensor in stored.items():
        if tensor.dtype not in CODES.values():
            raise ValueError(
                f"{path} has a tensor {name!r} of dtype {tensor.dtype}, which no layer has"
            )
    return {name: tensor.read() for name, tensor in stored.items()}, config


@contextlib.contextmanager
def replacing(target: str) -> Generator[BinaryIO, None, None]:
    """Open a file that replaces ``target`` once it is written and synced.

    If an exception is raised inside the block, ``target`` stays as it was.
    """
    mode = _mode_to_keep(target)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"no folder {folder} to save {target} in")
    temporary = os.path.join(folder, f".firstlayer-{secrets.token_hex(8)}.tmp")
    file = open(temporary, "xb")
    try:
        with file:
            yield file
            file.flush()
            if mode is not None:
                os.chmod(temporary, mode)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def _contiguous(tensor: np.ndarray) -> np.ndarray:
    # By name, because a byte-swapped dtype has the same name as the native one.
    return np.asarray(tensor, float_dtype(tensor.dtype.name), order="C")


def _header(arrays: list[tuple[str, np.ndarray]], config: dict[str, Any]) -> bytes:
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


def _mode_to_keep(target: str) -> int | None:
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    check_regular(target, mode)
    return stat.S_IMODE(mode)


def _sync_folder(folder: str) -> None:
    # The rename is durable only once the folder is synced. Some systems cannot sync a
    # folder; the file is complete in any case.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _config_in(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    text = metadata.get(KEY, metadata.get(OLD_KEY))
    if text is None:
        raise ValueError(
            f"{path} was not saved by Firstlayer; safetensors.numpy.load_file reads its "
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
