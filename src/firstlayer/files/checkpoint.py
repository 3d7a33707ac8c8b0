"""Read safetensors files, single or sharded. Nothing else in the package reads them.

Files of ``torch.save`` are read as well (:mod:`firstlayer.files.torch_pickle`).

A safetensors file is a JSON header with the dtype, shape and byte range of each tensor,
followed by their bytes. A large checkpoint is several files with an index. Opening one
reads only headers and checks every claim in them against the size of the file. Tensors are
then read one at a time: as a copy, as a memory-mapped array, or in chunks of rows.

The safetensors package is not used here because it exposes no byte ranges, so it can read
rows only through a memory map, and because it rejects a whole file for one unknown dtype.
"""

import errno
import io
import json
import math
import os
import reprlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Shaped

from .atomic import Opener, check_regular

#: Limit on the length of a header, the same as in the safetensors package.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32
#: Longest tensor name that an error message repeats in full.
MAX_NAME_IN_ERROR = 120
#: Approximate size of a chunk of rows.
CHUNK_BYTES = 1 << 23
#: Linux reads at most 2 GB at a time.
MAX_READ_BYTES = 1 << 30
#: How zip archives begin, those of ``torch.save`` among them.
ZIP_MAGIC = b"PK\x03\x04"
#: How files of torch before 1.6 begin: a pickled magic number.
OLD_TORCH_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
INDEX = "model.safetensors.index.json"
MODEL = "model.safetensors"
#: What a folder is searched for, in this order: an index of shards, or a single file.
NAMES = (INDEX, MODEL, "pytorch_model.bin.index.json", "pytorch_model.bin")

#: NumPy or ml_dtypes name of each dtype code of the format.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "U32": "uint32",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}

#: Words for an embedding in the name of a module, such as ``tok`` ``embeddings``.
EMBEDDING_WORDS = {"emb", "embd", "embed", "embeds", "embedding", "embeddings"}
#: Words that may be beside it, by the role of the table.
ROLE_WORDS = {
    "token": {"tok", "token", "tokens", "word", "words", "vocab", "in", "input"},
    "position": {"pos", "position", "positions", "positional"},
    "segment": {"segment", "segments", "token", "type"},
    "head": {"out", "output"},
}
#: Modules whose names have no word for an embedding.
ROLES = {
    "wte": "token",
    "shared": "token",
    "token": "token",
    "wpe": "position",
    "position": "position",
    "segment": "segment",
    "lm_head": "head",
    "output": "head",
    "relative_attention_bias": "bias",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Args:
        name: Name in the checkpoint.
        dtype: Dtype code of the format.
        shape: Shape.
        path: The file.
        start: Offset of its first byte in the file.
        nbytes: Number of bytes.
        opener: Opens the file, as the ``opener`` argument of :func:`open`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int
    opener: Opener | None = field(default=None, repr=False, compare=False)

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor has rows of numbers."""
        # Matrices of int8 are quantized tables; other integers are ids.
        is_number = self.dtype in DTYPES and (self.dtype[0] in "FB" or self.dtype == "I8")
        # An empty table may declare any number of rows.
        return is_number and len(self.shape) == 2 and self.nbytes > 0

    @property
    def role(self) -> str | None:
        """Role as an embedding table, as of :func:`role_of`, or None."""
        return role_of(self.name) if self.is_matrix else None

    @property
    def numpy_dtype(self) -> np.dtype:
        """NumPy dtype; a dtype code that is not in ``DTYPES`` is a ValueError."""
        name = DTYPES.get(self.dtype)
        if name is None:
            code = self.dtype[:MAX_NAME_IN_ERROR]
            raise ValueError(f"{self.name} has dtype {code}, which is not supported")
        if name.startswith(("bfloat", "float8")):
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, name))
        return np.dtype(name)

    def read(self) -> Shaped[np.ndarray, "..."]:
        """Return a copy of the tensor."""
        with open(self.path, "rb", buffering=0, opener=self.opener) as file:
            flat = _read_at(file, self.start, self.nbytes)
        return flat.view(self.numpy_dtype).reshape(self.shape)

    def map(self) -> Shaped[np.ndarray, "..."]:
        """Return the tensor memory-mapped. Writes to it do not change the file."""
        dtype, shape = self.numpy_dtype, self.shape
        if self.nbytes == 0:
            return np.empty(shape, dtype)
        with open(self.path, "rb", opener=self.opener) as file:
            array = np.asarray(np.memmap(file, dtype, "c", self.start, shape))
        # Old writers did not align tensors, and kernels need aligned ones.
        return array if array.flags.aligned else array.copy()

    def chunks(self) -> Iterator[Shaped[np.ndarray, "rows width"]]:
        """Yield the rows of a table, a few megabytes at a time."""
        rows, width = self.shape
        dtype = self.numpy_dtype
        step = max(1, CHUNK_BYTES // max(1, width * dtype.itemsize))
        row_bytes = width * dtype.itemsize
        with open(self.path, "rb", buffering=0, opener=self.opener) as file:
            for first in range(0, rows, step):
                count = min(step, rows - first)
                flat = _read_at(file, self.start + first * row_bytes, count * row_bytes)
                yield flat.view(dtype).reshape(count, width)


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint.

    Args:
        files: Its files.
        tensors: Its tensors, by name.
        metadata: Metadata of all headers.
    """

    files: list[Path]
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]

    def tables(self) -> list[StoredTensor]:
        """Return the tensors that are embedding tables, largest first.

        If no name is that of a table, the only matrix is one, as in the state dict of a
        single layer.
        """
        tables = [tensor for tensor in self.tensors.values() if tensor.role]
        if not tables:
            matrices = [tensor for tensor in self.tensors.values() if tensor.is_matrix]
            tables = matrices if len(matrices) == 1 else []
        return sorted(tables, key=lambda tensor: (-tensor.nbytes, tensor.name))

    def token_table(self) -> StoredTensor:
        """Return the token table; a checkpoint without one is a ValueError."""
        for tensor in self.tables():
            if tensor.role in ("token", None):
                return tensor
        raise ValueError(f"{self.files[0]} has no token table")

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return a copy of a tensor."""
        return self.tensors[name].read()


def role_of(name: str) -> str | None:
    """Return the role that a tensor's name implies, or None if it is not a table's.

    The module of the weight decides: one of :data:`ROLES`, or an embedding whose other
    words all belong to one role. An embedding without other words, as in
    ``pos_emb.emb.weight``, has the role of the embedding around it, or else is a token
    table. Heads inside of numbered layers are other projections.

    Example:
        >>> role_of("transformer.wte.weight"), role_of("model.embed_positions.weight")
        ('token', 'position')
        >>> role_of("h.0.attn.weight"), role_of("embeddings.patch_embedding.weight")
        (None, None)
    """
    modules = name.removesuffix(".weight").split(".")
    role = _role_of_embedding(modules)
    if role is None and name.endswith(".weight"):
        role = ROLES.get(modules[-1])
    if role == "head" and any(module.isdigit() for module in modules):
        return None
    return role


def _role_of_embedding(modules: list[str]) -> str | None:
    """Return the role of a module by the words of its name, or None."""
    words = set(modules[-1].split("_")) if modules else set()
    others = words - EMBEDDING_WORDS
    if others == words:
        return None
    if not others:
        parent = set(modules[-2].split("_")) if len(modules) > 1 else set()
        return _role_of_embedding(modules[:-1]) if parent & EMBEDDING_WORDS else "token"
    return next((role for role in ROLE_WORDS if others <= ROLE_WORDS[role]), None)


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    names: Collection[str] | None = None,
    opener: Opener | None = None,
) -> Checkpoint:
    """Read the headers of a checkpoint.

    Args:
        path: A safetensors file or one of ``torch.save``, the index of a sharded
            checkpoint, or a folder with one of them.
        names: Tensors of interest; shards without any of them are not opened. None opens
            all shards.
        opener: Opens the files; see :func:`firstlayer.files.atomic.read_folder`. The path
            is then that of a file.
    """
    location = Path(path)
    if opener is None:
        if not os.path.lexists(location):
            raise FileNotFoundError(f"no file or folder {location}")
        if location.is_dir():
            location = checkpoint_in(location)
    files = [location]
    if location.name.endswith(".index.json"):
        files = _shards(location, names, opener)
    tensors, metadata = {}, {}
    for file in files:
        more_tensors, more_metadata = read_header(file, opener=opener)
        if repeated := sorted(tensors.keys() & more_tensors):
            raise ValueError(
                f"{file} has a tensor {repeated[0]!r} that another file has too"
            )
        tensors |= more_tensors
        metadata |= more_metadata
    return Checkpoint(files, tensors, metadata)


def tensor_names(path: Path) -> Collection[str]:
    """Return the names of the tensors of a file or of a sharded checkpoint's index."""
    if path.name.endswith(".index.json"):
        return _shard_of_each(path, None).keys()
    return read_header(path)[0].keys()


def read_json_object(path: Path, *, opener: Opener | None = None) -> dict[str, Any]:
    """Return the object in a JSON file."""
    content = read_bytes(path, opener=opener, max_bytes=MAX_HEADER_BYTES)
    return _parse_object(content, source=os.fspath(path))


def read_bytes(
    path: Path, *, opener: Opener | None = None, max_bytes: int | None = None
) -> bytes:
    """Return the contents of a regular file of at most ``max_bytes``."""
    with open_regular(path, opener) as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"{path} must have at most {max_bytes} bytes, got {size}")
        return file.read()


def read_header(
    path: Path, *, opener: Opener | None = None
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of one safetensors file, or one of torch, and its metadata.

    Every size in the header is checked against the size of the file, so reading all tensors
    takes no more memory than the file accounts for.
    """
    with open_regular(path, opener) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ValueError(f"{path} is empty")
        if is_torch(file.read(16)):
            return _torch_tensors(file, path, size=size, opener=opener), {}
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{path} is not a safetensors file or is cut short: its header would be "
                f"{length} bytes long, but it has {size}"
            )
        header = _parse_object(file.read(length), source=f"the header of {path}")
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        metadata = {}
    start = 8 + length
    tensors = {
        name: _checked_tensor(name, entry, path=path, start=start, size=size, opener=opener)
        for name, entry in header.items()
    }
    if sum(tensor.nbytes for tensor in tensors.values()) > size - start:
        raise ValueError(f"{path} has tensors that overlap")
    texts = {key: text for key, text in metadata.items() if isinstance(text, str)}
    return tensors, texts


def checkpoint_in(folder: Path, *, opener: Opener | None = None) -> Path:
    """Return the safetensors file in a folder, or the index of several."""
    for name in NAMES:
        if _is_file(folder / name, opener):
            return folder / name
    others = sorted(folder.glob("*.safetensors"))
    if not others:
        raise FileNotFoundError(f"no {MODEL} and no {INDEX} in {folder}")
    if len(others) > 1:
        raise ValueError(
            f"{folder} must hold {MODEL}, {INDEX} or one other safetensors file, "
            f"got {len(others)} others"
        )
    return others[0]


def _torch_tensors(
    file: BinaryIO, path: Path, *, size: int, opener: Opener | None
) -> dict[str, StoredTensor]:
    # Imported here: safetensors files need neither pickle nor zipfile.
    from .torch_pickle import read_torch

    file.seek(0)
    found = read_torch(file, size=size, source=os.fspath(path))
    return {
        name: StoredTensor(name, one.dtype, one.shape, path, one.start, one.nbytes, opener)
        for name, one in found.items()
    }


def is_torch(begin: bytes) -> bool:
    """Return whether ``torch.save`` may have written a file, by its first bytes."""
    return begin.startswith((ZIP_MAGIC, OLD_TORCH_MAGIC))


def _shards(
    index: Path, names: Collection[str] | None, opener: Opener | None
) -> list[Path]:
    shard_of = _shard_of_each(index, opener)
    for shard in map(str, shard_of.values()):
        if shard != os.path.basename(shard) or shard in ("", ".", ".."):
            raise ValueError(
                f"{index} must name files in its folder, got {shortened(shard)}"
            )
    if names is not None:
        shard_of = {name: shard_of[name] for name in names if name in shard_of}
    files = [index.parent / shard for shard in sorted(set(map(str, shard_of.values())))]
    for file in files:
        if not _is_file(file, opener):
            raise FileNotFoundError(
                f"{index} names {shortened(file.name)}, which does not exist"
            )
    return files


def _shard_of_each(index: Path, opener: Opener | None) -> dict[str, Any]:
    """Return the file of each tensor as an index names it."""
    shard_of = read_json_object(index, opener=opener).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{index} must have a weight_map")
    return shard_of


def _parse_object(text: bytes, *, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{source} is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{source} must be a JSON object, got {type(value).__name__}")
    return value


def _is_file(path: Path, opener: Opener | None) -> bool:
    if opener is None:
        # A name that is too long for the file system is an OSError in Path.is_file.
        return os.path.isfile(path)
    try:
        os.close(opener(os.fspath(path), os.O_RDONLY))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
            raise
        return False
    return True


def _read_at(file: io.FileIO, start: int, nbytes: int) -> np.ndarray:
    """Return bytes of an unbuffered file, whose position other readers may move."""
    flat = np.empty(nbytes, np.uint8)
    done = 0
    while done < nbytes:
        file.seek(start + done)
        count = file.readinto(flat.data[done : done + MAX_READ_BYTES])
        if not count:
            raise ValueError(f"{file.name} was cut short while it was read")
        done += count
    return flat


def open_regular(path: Path, opener: Opener | None = None) -> BinaryIO:
    """Open a regular file to read; never wait for the writer of a pipe."""
    if opener is None:
        if not os.path.lexists(path):
            raise FileNotFoundError(f"no file {path}")
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ValueError(f"{path} is a symbolic link to itself") from None
        # Opening a pipe would wait for its writer.
        check_regular(path, mode)
    try:
        file = open(path, "rb", opener=opener)
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"path must be a file, but {path} is a folder") from None
    try:
        check_regular(path, os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def _checked_tensor(
    name: str, entry: Any, *, path: Path, start: int, size: int, opener: Opener | None
) -> StoredTensor:
    """Return the tensor that a header entry describes, if the file can hold it."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [first, end]} if (
            len(shape) <= MAX_DIMENSIONS
            and all(
                type(number) is int and 0 <= number < 2**63
                for number in (*shape, first, end)
            )
        ):
            tensor = StoredTensor(
                name, dtype, tuple(shape), path, start + first, end - first, opener
            )
        case _:
            raise ValueError(
                f"{path} has a tensor {shortened(name)} with a malformed entry"
            )
    if first > end or start + end > size:
        raise ValueError(
            f"{path} is cut short: tensor {shortened(name)} would end at byte "
            f"{start + end}, but it has {size}"
        )
    if dtype in DTYPES and math.prod(shape) * tensor.numpy_dtype.itemsize != tensor.nbytes:
        raise ValueError(
            f"{path} has a tensor {shortened(name)} of shape {tuple(shape)} and dtype "
            f"{dtype} in {tensor.nbytes} bytes"
        )
    return tensor


def shortened(name: str) -> str:
    """Return a text from a file as an error message repeats it: quoted, not too long."""
    shortener = reprlib.Repr()
    shortener.maxstring = MAX_NAME_IN_ERROR
    return shortener.repr(name)
