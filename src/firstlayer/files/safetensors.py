"""A layer in one file: its tensors, and the config it is built from again.

The file is a safetensors file (https://github.com/huggingface/safetensors), which any
program that knows the format opens: a header of names, dtypes and shapes, then the bytes
of the tensors. The config is JSON in the header's metadata, under the one key ``firstlayer``,
beside the version of this arrangement. Nothing in a file is ever executed.

Writing is all or nothing. The bytes go to a temporary file in the same folder, are synced
to the disk, and are renamed over the old file, so a process killed at any moment leaves
the old file or the new one, whole. What a kill can leave behind is a file named
``.firstlayer-….tmp``, which nothing reads and anyone may delete. A symbolic link stays a link:
what it points to is replaced. An existing file's permissions are kept.

Reading checks every length against the size of the file before memory is set aside, and
says in one sentence what is wrong with a file that is cut short, foreign or forged.
"""

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Generator
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Float

from .._check import float_dtype

Tensors = dict[str, Float[np.ndarray, "..."]]
Path = str | os.PathLike[str]

KEY = "firstlayer"
# The key of version 0.1, under the name that the project had then.
OLD_KEY = "inlay"
FORMAT = 1
LONGEST_CONFIG = 2**17
CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write(path: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """Write ``tensors`` and ``config`` to one file, all of it or nothing.

    Args:
        path: Where. The folder must exist; a file that is there is replaced.
        tensors: Arrays of float64, float32, float16 or bfloat16, kept to the bit.
        config: What the tensors' layer is built from: whatever JSON can say.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(folder + "/a.safetensors", {"w": np.ones(2)}, {"scale": 0.5})
        ...     read(folder + "/a.safetensors")
        ({'w': array([1., 1.])}, {'scale': 0.5})
    """
    # Widest first, as the format's own writer does, so that every tensor is aligned.
    arrays = sorted(
        ((name, _plain(tensor)) for name, tensor in tensors.items()),
        key=lambda item: (-item[1].itemsize, item[0]),
    )
    header = _header(arrays, config)
    with replacing(os.path.realpath(path)) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, array in arrays:
            file.write(array.reshape(-1).view(np.uint8).data)


def read(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and the config that :func:`write` put into a file.

    Each tensor is copied once, from the file into an array of its own.

    Args:
        path: The file. One that :func:`write` did not make is a ValueError.
    """
    from safetensors import SafetensorError, safe_open

    path = os.fsdecode(path)
    _check_length(path)
    try:
        with safe_open(path, framework="numpy") as file:
            config = _config_in(file.metadata(), path)
            return {name: _tensor(file, name, path) for name in file.keys()}, config
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ValueError(f"{path} is damaged or cut short: {reason}") from None


def _plain(tensor: np.ndarray) -> np.ndarray:
    # By name: a byte-swapped dtype has the name of the native one.
    return np.asarray(tensor, float_dtype(tensor.dtype.name), order="C")


def _header(arrays: list[tuple[str, np.ndarray]], config: dict[str, Any]) -> bytes:
    text = json.dumps({"format": FORMAT, "config": config})
    if len(text) > LONGEST_CONFIG:
        raise ValueError(
            f"config must take at most {LONGEST_CONFIG} characters, got {len(text)}"
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


@contextlib.contextmanager
def replacing(target: str) -> Generator[BinaryIO, None, None]:
    """Open a file that takes the place of ``target`` once it is written and synced.

    Whatever is raised inside leaves what was there before.
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


def _mode_to_keep(target: str) -> int | None:
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    _check_regular(target, mode)
    return stat.S_IMODE(mode)


def _sync_folder(folder: str) -> None:
    # The name is in the folder, which has to reach the disk too. Some systems cannot
    # sync a folder; the file is whole all the same.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_regular(path: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"path must be a file, but {path} is a folder")
    if not stat.S_ISREG(mode):
        raise ValueError(f"path must be an ordinary file, but {path} is a device or pipe")


def _check_length(path: str) -> None:
    """Refuse a file that is shorter than its first eight bytes say its header is."""
    if not os.path.lexists(path):
        raise FileNotFoundError(f"no file {path}")
    status = os.stat(path)
    _check_regular(path, status.st_mode)
    if status.st_size == 0:
        raise ValueError(f"{path} is empty")
    with open(path, "rb") as file:
        end = 8 + int.from_bytes(file.read(8), "little")
    if end > status.st_size:
        raise ValueError(
            f"{path} is no safetensors file or is cut short: its header would end at "
            f"byte {end}, but it has {status.st_size}"
        )


def _config_in(metadata: dict[str, str] | None, path: str) -> dict[str, Any]:
    found = metadata or {}
    text = found.get(KEY, found.get(OLD_KEY))
    if text is None:
        raise ValueError(
            f"{path} was not saved by Firstlayer; safetensors.numpy.load_file reads its tensors"
        )
    # Text can grow thirtyfold as Python objects, and no config comes near this.
    if len(text) > LONGEST_CONFIG:
        raise ValueError(f"{path} has a config of {len(text)} characters")
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{path} has a config that is not JSON") from None
    match held:
        case {"format": int(version), "config": dict(config)} if version == FORMAT:
            return config
        case {"format": int(version)} if version > FORMAT:
            raise ValueError(
                f"{path} has format {version}, but this version of Firstlayer reads up to "
                f"{FORMAT}: install a newer one"
            )
    raise ValueError(f"{path} has a config that Firstlayer did not write")


def _tensor(file: Any, name: str, path: str) -> np.ndarray:
    code = file.get_slice(name).get_dtype()
    for dtype, known in CODES.items():
        if known == code:
            float_dtype(dtype)  # safetensors finds bfloat16 once ml_dtypes is imported
            return file.get_tensor(name)
    raise ValueError(f"{path} has a tensor {name!r} of dtype {code}, which no layer has")
