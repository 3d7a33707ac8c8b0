"""Find a table in a file: the places of its rows, their format and their width.

Nothing here reads rows. Each function reads headers, finds the table and returns a
:class:`TableFile`.
"""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..files.checkpoint import (
    MAX_NAME_IN_ERROR,
    StoredTensor,
    checkpoint_in,
    open_checkpoint,
    open_regular,
    read_json_object,
    role_of,
    shortened,
    tensor_names,
)
from ..files.gguf import MAGIC as GGUF_MAGIC
from ..files.gguf import read_gguf
from ..files.npy import MAGIC as NPY_MAGIC
from ..files.npy import read_npy_header
from ..files.word2vec import is_word2vec, read_word2vec
from .formats import RowFormat, format_by_name
from .formats.affine import Affine
from .reading import Segment, StoredRows

#: Key of the metadata that describes a table written by ``convert``.
METADATA_KEY = "firstlayer.store"
#: Version of that description.
VERSION = 1
#: Name of the one part of a table whose rows hold all parts.
INTERLEAVED = "rows"
#: Largest number of names that an error lists.
MAX_NAMES = 8
#: Row-sharded tables, such as ``ngram_embedding.shard_12.weight``.
SHARD = re.compile(r"(.+)\.(?:shard_|shards\.)(\d{1,9})\.weight")
#: Ends of the names of tensors that belong to a table.
COMPANIONS = ("scale", "weight_scale", "scales", "biases", "bias")
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTIZED_GGUF = ("Q8_0", "Q4_0", "Q4_K")


@dataclass(frozen=True)
class TableFile:
    """A table in a file or several.

    Args:
        path: The path that was opened.
        format: Format of the rows.
        width: Width of a vector.
        parts: Where the rows of each part are. A table with the only part ``"rows"`` has
            the parts of each row next to each other.
        shared: Numbers of the whole table.
    """

    path: Path
    format: RowFormat
    width: int
    parts: dict[str, StoredRows]
    shared: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = self.format.part_shapes(self.width)
        if self.is_interleaved:
            shapes = {INTERLEAVED: (np.dtype(np.uint8), self.format.row_bytes(self.width))}
        for name, (dtype, columns) in shapes.items():
            if name not in self.parts:
                raise ValueError(f"{self.path} has no {name} of format {self.format.name}")
            part = self.parts[name]
            if part.row_bytes != dtype.itemsize * columns:
                raise ValueError(
                    f"{self.path} has {name} rows of {part.row_bytes} bytes, but rows of "
                    f"{self.width} values in format {self.format.name} have "
                    f"{dtype.itemsize * columns}"
                )
            if part.rows != self.rows:
                raise ValueError(
                    f"{self.path} has {self.rows} rows, but {part.rows} rows of {name}"
                )
        for name in self.format.shared_parts:
            if name not in self.shared:
                raise ValueError(
                    f"{self.path} has no {name}, which format {self.format.name} needs"
                )

    @property
    def is_interleaved(self) -> bool:
        """Whether the parts of a row are next to each other."""
        return INTERLEAVED in self.parts

    @property
    def rows(self) -> int:
        """Number of rows."""
        return next(iter(self.parts.values())).rows


def find_table(path: Path, tensor: str | None, format: str | RowFormat | None) -> TableFile:
    """Return the table at a path; the kind of file is told by its first bytes."""
    wanted = None if format is None else format_by_name(format)
    if path.is_dir():
        path = checkpoint_in(path)
    if path.name.endswith(".index.json"):
        return _in_safetensors(path, tensor, wanted)
    with open_regular(path) as file:
        begin = file.read(64)
    if not begin:
        raise ValueError(f"{path} is empty")
    if begin.startswith(GGUF_MAGIC):
        return _in_gguf(path, tensor, wanted)
    if begin.startswith(NPY_MAGIC):
        return _in_npy(path, tensor, wanted)
    if is_word2vec(begin):
        return _in_word2vec(path, tensor, wanted)
    return _in_safetensors(path, tensor, wanted)


def _in_safetensors(path: Path, tensor: str | None, wanted: RowFormat | None) -> TableFile:
    names = tensor_names(path)
    shards = _shards(names)
    if tensor is None:
        tensor = _only_table(path, names, shards)
    weights, prefix = _weights_of(path, tensor, names, shards)
    # ``a.weight`` has companions ``a.scale`` and others.
    stems = [name.removesuffix("weight") for name in weights]
    candidates = {stem + word for stem in {*stems, prefix} for word in COMPANIONS}
    found = open_checkpoint(path, names={*weights} | (candidates & {*names}))
    missing = [name for name in weights if name not in found.tensors]
    if missing:
        raise ValueError(f"{path} lists a tensor {shortened(missing[0])} that no file has")
    source = _Safetensors(path, found.tensors, weights, stems, prefix)
    description = found.metadata.get(METADATA_KEY)
    if description is not None and weights[0] in ("weight", INTERLEAVED):
        return source.converted(_parsed(description, path), wanted)
    return source.table(wanted)


def _shards(names: Any) -> dict[str, dict[int, str]]:
    """Return the row-sharded tensors among names: by prefix, the name of each shard."""
    shards: dict[str, dict[int, str]] = {}
    for match in filter(None, map(SHARD.fullmatch, names)):
        shards.setdefault(match[1], {})[int(match[2])] = match[0]
    return shards


def _only_table(path: Path, names: Any, shards: dict[str, dict[int, str]]) -> str:
    """Return the name of the table that is meant if the caller names none."""
    if INTERLEAVED in names or "weight" in names:
        return INTERLEAVED if INTERLEAVED in names else "weight"
    for candidates in (
        [name for name in names if role_of(name) == "token"],
        sorted(shards),
        [name for name in names if name.endswith("weight")],
        list(names),
    ):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            raise ValueError(
                f"{path} has several tables: pass tensor=, one of {_listed(candidates)}"
            )
    raise ValueError(f"{path} has no tensors")


def _weights_of(
    path: Path, tensor: str, names: Any, shards: dict[str, dict[int, str]]
) -> tuple[list[str], str]:
    """Return the tensors that hold a table in order, and how the names of others begin."""
    for name in (tensor, f"{tensor}.weight"):
        if name in names:
            return [name], name.removesuffix("weight")
    prefix = tensor.removesuffix(".weight")
    if prefix not in shards:
        raise ValueError(
            f"{path} has no tensor {shortened(tensor)}: it has {_listed(names)}"
        )
    shard_of = shards[prefix]
    if sorted(shard_of) != list(range(len(shard_of))):
        absent = next(k for k in range(len(shard_of)) if k not in shard_of)
        raise ValueError(f"{path} has no shard {absent} of {shortened(prefix)}")
    return [shard_of[number] for number in range(len(shard_of))], f"{prefix}."


def _listed(names: Any) -> str:
    shown = sorted(names)[:MAX_NAMES]
    rest = len(names) - len(shown)
    words = ", ".join(name[:MAX_NAME_IN_ERROR] for name in shown)
    return f"{words} and {rest} more" if rest else words


@dataclass(frozen=True)
class _Safetensors:
    """The tensors of one table.

    Args:
        path: The path that was opened.
        tensors: Tensors by name.
        weights: Names of the tensors with the rows, in order.
        stems: Those names without ``weight``.
        prefix: Beginning of the names of tensors that all shards share.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    weights: list[str]
    stems: list[str]
    prefix: str

    def table(self, wanted: RowFormat | None) -> TableFile:
        """Return the table, with the format that dtypes and companions imply."""
        weight = self.tensors[self.weights[0]]
        match weight.dtype:
            case "F32" | "F16" | "BF16":
                return self._floats(FLOATS[weight.dtype], wanted)
            case "F8_E4M3":
                return self._fp8(wanted)
            case "U32":
                return self._mlx(wanted)
            case "U8" if wanted is not None:
                return self._bytes(wanted)
            case "U8":
                raise ValueError(
                    f"{self.path} has rows of bytes in {shortened(weight.name)}: pass "
                    "format="
                )
        raise ValueError(
            f"{self.path} has a tensor {shortened(weight.name)} of dtype "
            f"{shortened(weight.dtype)}, which no format of rows has"
        )

    def converted(self, description: dict[str, Any], wanted: RowFormat | None) -> TableFile:
        """Return a table that ``convert`` wrote."""
        match description:
            case {"version": int(version)} if version > VERSION:
                raise ValueError(
                    f"{self.path} has a store of version {version}, but this version of "
                    f"Firstlayer reads up to {VERSION}: install a newer one"
                )
            case {"version": 1, "format": str(name), "width": int(width)} if (
                width > 0 and len(name) <= MAX_NAME_IN_ERROR
            ):
                format = format_by_name(name)
            case _:
                raise ValueError(
                    f"{self.path} has a description that Firstlayer did not write"
                )
        _check_wanted(self.path, format, wanted)
        if self.weights == [INTERLEAVED]:
            parts = {INTERLEAVED: self._rows(self.weights)}
        else:
            parts = {
                part: self._rows([part])
                for part in format.part_shapes(width)
                if part in self.tensors
            }
        shared = {
            name: self.tensors[name].read()
            for name in format.shared_parts
            if name in self.tensors and self.tensors[name].nbytes <= 8
        }
        return TableFile(self.path, format, width, parts, shared)

    def _floats(self, name: str, wanted: RowFormat | None) -> TableFile:
        format = format_by_name(name)
        _check_wanted(self.path, format, wanted)
        rows = self._rows(self.weights)
        return TableFile(self.path, format, rows.columns, {"weight": rows})

    def _fp8(self, wanted: RowFormat | None) -> TableFile:
        rows = self._rows(self.weights)
        for name in ("weight_scale", "scale"):
            scale = self.tensors.get(self.prefix + name)
            if scale is not None and scale.nbytes <= 8 and np.prod(scale.shape) == 1:
                format = format_by_name("fp8")
                _check_wanted(self.path, format, wanted)
                shared = {"scale": scale.read()}
                return TableFile(self.path, format, rows.columns, {"weight": rows}, shared)
        scales = self._companions("scale", dtypes=("F8_E8M0", "U8"))
        if scales is None:
            raise ValueError(
                f"{self.path} has no scales of {shortened(self.weights[0])}: expected "
                f"{shortened(self.prefix + 'scale')} or one that ends in weight_scale"
            )
        format = format_by_name("fp8_block")
        _check_wanted(self.path, format, wanted)
        parts = {"weight": rows, "scale": scales}
        return TableFile(self.path, format, rows.columns, parts)

    def _mlx(self, wanted: RowFormat | None) -> TableFile:
        words = self._rows(self.weights)
        scales = self._companions("scales", dtypes=tuple(FLOATS))
        biases = self._companions("biases", dtypes=tuple(FLOATS))
        if scales is None or biases is None:
            raise ValueError(
                f"{self.path} has no scales or biases of {shortened(self.weights[0])}, "
                "which rows packed in words need"
            )
        if wanted is None:
            bits, group_size = self._mlx_options(words, scales)
        elif isinstance(wanted, Affine):
            bits, group_size = wanted.bits, wanted.group_size
        else:
            raise ValueError(
                f"{self.path} has rows of a format of MLX, but format is {wanted.name!r}"
            )
        dtype = "" if scales.dtype.name == "bfloat16" else f"_{scales.dtype.name}"
        format = format_by_name(f"mlx{bits}_g{group_size}{dtype}")
        parts = {"weight": words, "scale": scales, "bias": biases}
        return TableFile(self.path, format, scales.columns * group_size, parts)

    def _mlx_options(self, words: StoredRows, scales: StoredRows) -> tuple[int, int]:
        """Return the bits and the group size that ``config.json`` in the folder says."""
        config = self.path.parent / "config.json"
        found: Any = {}
        if config.is_file():
            content = read_json_object(config)
            found = content.get("quantization", content.get("quantization_config"))
        if isinstance(found, dict):
            # Tables may have options of their own, under their name.
            own = found.get(self.prefix.removesuffix("."), found)
            match own if isinstance(own, dict) else found:
                case {"bits": int(bits), "group_size": int(group_size)}:
                    return bits, group_size
        bits_per_group = 32 * words.columns // max(1, scales.columns)
        raise ValueError(
            f"{self.path} has {bits_per_group} bits in each group of a row, and no "
            'config.json with the bits of a value: pass format=, such as "mlx4_g32"'
        )

    def _bytes(self, wanted: RowFormat) -> TableFile:
        """Return a table of interleaved rows in the format that the caller says."""
        rows = self._rows(self.weights)
        width = width_of(wanted, rows.columns)
        return TableFile(self.path, wanted, width, {INTERLEAVED: rows})

    def _companions(self, name: str, *, dtypes: tuple[str, ...]) -> StoredRows | None:
        """Return the rows of a companion of each tensor, or None if one is missing."""
        tensors = [stem + name for stem in self.stems]
        if not all(
            companion in self.tensors and self.tensors[companion].dtype in dtypes
            for companion in tensors
        ):
            return None
        return self._rows(tensors)

    def _rows(self, names: list[str]) -> StoredRows:
        """Return where the rows of tensors with the same width are."""
        first, segments = self.tensors[names[0]], []
        for name in names:
            tensor = self.tensors[name]
            if len(tensor.shape) != 2:
                raise ValueError(
                    f"{self.path} has a tensor {shortened(name)} of shape "
                    f"{tensor.shape}, but a table has 2 axes"
                )
            if (tensor.shape[1], tensor.dtype) != (first.shape[1], first.dtype):
                raise ValueError(
                    f"{self.path} has shards of width {first.shape[1]} and dtype "
                    f"{shortened(first.dtype)}, and of width {tensor.shape[1]} and dtype "
                    f"{shortened(tensor.dtype)}"
                )
            segments.append(Segment(tensor.path, tensor.start, tensor.shape[0]))
        return _checked_rows(
            StoredRows(tuple(segments), first.numpy_dtype, first.shape[1]), self.path
        )


def _in_gguf(path: Path, tensor: str | None, wanted: RowFormat | None) -> TableFile:
    tensors = read_gguf(path)
    if tensor is None:
        tensor = _only_table(path, tensors.keys(), {})
    found = tensors.get(tensor, tensors.get(f"{tensor}.weight"))
    if found is None:
        raise ValueError(
            f"{path} has no tensor {shortened(tensor)}: it has {_listed(tensors)}"
        )
    if len(found.shape) != 2:
        raise ValueError(
            f"{path} has a tensor {found.name!r} of shape {found.shape}, but a table has "
            "2 axes"
        )
    if found.type in FLOATS:
        format = format_by_name(FLOATS[found.type])
    elif found.type in QUANTIZED_GGUF:
        format = format_by_name(found.type.lower())
    else:
        raise ValueError(
            f"{path} has a tensor {found.name!r} of type {found.type}, which no format of "
            "rows has"
        )
    _check_wanted(path, format, wanted)
    rows, width = found.shape
    (name, (dtype, columns)), *_ = format.part_shapes(width).items()
    stored = StoredRows((Segment(path, found.start, rows),), dtype, columns)
    return TableFile(path, format, width, {name: _checked_rows(stored, path)})


def _in_npy(path: Path, tensor: str | None, wanted: RowFormat | None) -> TableFile:
    _check_no_tensor(path, tensor)
    array = read_npy_header(path)
    if len(array.shape) != 2:
        raise ValueError(
            f"{path} has an array of shape {array.shape}, but a table has 2 axes"
        )
    rows, columns = array.shape
    stored = StoredRows((Segment(path, array.start, rows),), array.dtype, columns)
    _checked_rows(stored, path)
    name = array.dtype.name
    if array.dtype == np.uint8 and wanted is not None:
        width = width_of(wanted, columns)
        return TableFile(path, wanted, width, {INTERLEAVED: stored})
    # NumPy writes bfloat16 as two raw bytes.
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and wanted is not None:
        name = "bfloat16" if wanted.name == "bfloat16" else name
    if name not in FLOATS.values() or not array.dtype.isnative:
        raise ValueError(
            f"{path} must have float32 or float16 numbers in native byte order, or bytes "
            f"of a given format, got {array.dtype.str}"
        )
    format = format_by_name(name)
    _check_wanted(path, format, wanted)
    stored = StoredRows(stored.segments, format.dtype, columns)
    return TableFile(path, format, columns, {"weight": stored})


def _in_word2vec(path: Path, tensor: str | None, wanted: RowFormat | None) -> TableFile:
    _check_no_tensor(path, tensor)
    format = format_by_name("float32")
    _check_wanted(path, format, wanted)
    found = read_word2vec(path)
    rows, width = found.shape
    segment = Segment(path, 0, rows)
    stored = StoredRows((segment,), np.dtype(np.float32), width, found.offsets)
    return TableFile(path, format, width, {"weight": stored})


def width_of(format: RowFormat, row_bytes: int) -> int:
    """Return the largest width whose interleaved rows have ``row_bytes`` bytes.

    Example:
        >>> width_of(format_by_name("int8"), 264)
        256
    """
    # Formats have blocks of at most 256 values, MLX's groups aside.
    unit = math.lcm(256, format.group_size if isinstance(format, Affine) else 1)
    first = format.row_bytes(0)
    return max(0, row_bytes - first) * unit // (format.row_bytes(unit) - first)


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} has a description that Firstlayer did not write")
    return content


def _check_wanted(path: Path, format: RowFormat, wanted: RowFormat | None) -> None:
    if wanted is not None and wanted != format:
        raise ValueError(
            f"{path} has rows of format {format.name}, but format is {wanted.name!r}"
        )


def _check_no_tensor(path: Path, tensor: str | None) -> None:
    if tensor is not None:
        raise ValueError(f"{path} has one table without a name, but tensor is {tensor!r}")


def _checked_rows(rows: StoredRows, path: Path) -> StoredRows:
    """Return rows of at least one byte, which bound the number of rows by the file."""
    if rows.row_bytes == 0:
        raise ValueError(f"{path} has a table of width {rows.columns}")
    return rows
