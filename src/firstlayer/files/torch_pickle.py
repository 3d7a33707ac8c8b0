"""Read the header of a file that ``torch.save`` wrote: names and places of its tensors.

Such a file is a zip archive: a pickle describes the tensors, and each storage is an
uncompressed member. PyTorch is not needed, and nothing in the pickle is run
(:mod:`firstlayer.files.pickles`).
"""

import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from .checkpoint import OLD_TORCH_MAGIC
from .pickles import COMMON, Record, read_pickle

#: What :mod:`zipfile` raises for damaged archives, besides ValueError.
ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    EOFError,
    KeyError,
)
MAX_PICKLE_BYTES = 100_000_000
#: Dtype code of the safetensors format and bytes of a number, by the class of a storage.
STORAGES = {
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}
#: Keys of dicts that hold a state dict among other things.
STATE_DICTS = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True)
class TorchTensor:
    """A tensor in a file of torch.

    Args:
        dtype: Dtype code of the safetensors format; it begins with ``strided`` if the rows
            of the tensor are not next to each other.
        shape: Shape.
        start: Offset of its first byte in the file.
        nbytes: Number of bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class _Storage:
    dtype: str
    itemsize: int
    start: int
    nbytes: int


def read_torch(file: BinaryIO, *, size: int, source: str) -> dict[str, TorchTensor]:
    """Return the tensors of a file by name.

    Args:
        file: The file.
        size: Its size; every tensor is checked against it.
        source: Name of the file in errors.
    """
    if file.read(len(OLD_TORCH_MAGIC)) == OLD_TORCH_MAGIC:
        raise ValueError(
            f"{source} is in the format of torch before 1.6: load it with torch and save "
            "it again"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            return _tensors(file, archive, size=size, source=source)
    except ZIP_ERRORS:
        raise ValueError(f"{source} is a damaged zip archive") from None


def _tensors(
    file: BinaryIO, archive: zipfile.ZipFile, *, size: int, source: str
) -> dict[str, TorchTensor]:
    members = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise ValueError(f"{source} is a zip archive that torch.save did not write")
    info = members[pickles[0]]
    # Reading a member allocates the size that it claims to have.
    if any(member.compress_size > size for member in members.values()):
        raise ValueError(f"{source} claims to hold more than it can")
    if info.file_size > min(MAX_PICKLE_BYTES, size):
        raise ValueError(f"{source} has a description of {info.file_size} bytes")
    prefix = pickles[0].removesuffix("data.pkl")
    order = members.get(f"{prefix}byteorder")
    if order is not None and order.file_size <= 16 and archive.read(order) != b"little":
        raise ValueError(f"{source} is in big-endian byte order")

    def load(pid: Any) -> _Storage:
        match pid:
            case ("storage", _StorageClass() as kind, str(key), *_):
                pass
            case _:
                raise ValueError("it refers to something that is not a storage")
        member = members.get(f"{prefix}data/{key}")
        if member is None or member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"it has no uncompressed storage {key[:40]!r}")
        start = _content_start(file, member)
        if start + member.file_size > size:
            raise ValueError(f"it is cut short: storage {key[:40]!r} does not fit")
        return _Storage(kind.dtype, kind.itemsize, start, member.file_size)

    content = read_pickle(archive.read(info), names=_NAMES, source=source, load=load)
    return _named(content, source)


def _content_start(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    # The header in front of a member has lengths of its own.
    file.seek(member.header_offset + 26)
    lengths = file.read(4)
    name, extra = (
        int.from_bytes(lengths[:2], "little"),
        int.from_bytes(lengths[2:], "little"),
    )
    return member.header_offset + 30 + name + extra


def _named(content: Any, source: str) -> dict[str, TorchTensor]:
    """Return the tensors of a state dict, which may be inside of another dict."""
    candidates = [content]
    if isinstance(content, dict):
        candidates += [content[key] for key in STATE_DICTS if key in content]
    for found in candidates:
        if isinstance(found, dict):
            tensors = {
                str(name): tensor
                for name, tensor in found.items()
                if isinstance(tensor, TorchTensor)
            }
            if tensors:
                return tensors
    raise ValueError(f"{source} has no tensors by name")


@dataclass(frozen=True)
class _StorageClass:
    dtype: str
    itemsize: int

    def __call__(self, *args: Any) -> Any:
        raise ValueError("it makes a storage outside of the archive")


def _tensor(
    storage: Any, offset: Any = None, shape: Any = None, stride: Any = None, *rest: Any
) -> TorchTensor:
    is_valid = (
        isinstance(storage, _Storage)
        and isinstance(shape, tuple)
        and isinstance(stride, tuple)
        and len(shape) == len(stride) <= 32
        and all(type(n) is int and 0 <= n < 2**63 for n in (offset, *shape, *stride))
    )
    if not is_valid:
        raise ValueError("it has a malformed tensor")
    nbytes = math.prod(shape) * storage.itemsize
    start = offset * storage.itemsize
    if start + nbytes > storage.nbytes:
        raise ValueError(
            f"it has a tensor of shape {shape} in a storage of {storage.nbytes} bytes"
        )
    expected, contiguous = 1, True
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        contiguous = contiguous and (length == 1 or step == expected)
        expected *= length
    dtype = storage.dtype if contiguous or not nbytes else f"strided {storage.dtype}"
    return TorchTensor(dtype, shape, storage.start + start, nbytes)


def _parameter(tensor: Any = None, *rest: Any) -> Any:
    return tensor


def _names() -> dict[tuple[str, str], Callable[..., Any]]:
    names = dict(COMMON)
    for name, (dtype, itemsize) in STORAGES.items():
        names["torch", name] = _StorageClass(dtype, itemsize)
    names["torch._utils", "_rebuild_tensor_v2"] = _tensor
    names["torch._utils", "_rebuild_parameter"] = _parameter
    names["torch", "Size"] = lambda shape=(): tuple(shape)
    names["torch", "device"] = Record
    names["torch.serialization", "_get_layout"] = Record
    return names


_NAMES = _names()
