"""Read tables in parquet files with columns ``word`` and ``vector``.

pyarrow decodes the pages of a file, a few rows at a time.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..files.checkpoint import open_regular
from .table import VectorTable

MAGIC = b"PAR1"
#: Types of words. Polars writes the last one.
STRINGS = ("string", "large_string", "string_view")
#: Numbers that are read at a time.
CHUNK_NUMBERS = 1 << 18
#: The most numbers that a byte of a file may stand for. Pages can hold repeated values.
MAX_NUMBERS_PER_BYTE = 1032


def import_pyarrow(action: str) -> tuple[Any, Any]:
    """Return the modules ``pyarrow`` and ``pyarrow.parquet``.

    Args:
        action: Beginning of the message if pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{action} .parquet needs pyarrow: pip install 'firstlayer[parquet]'",
            name="pyarrow",
        ) from None
    return pyarrow, pyarrow.parquet


def read_parquet(path: Path, *, need_words: bool) -> VectorTable:
    """Return the table in a parquet file: a column of words, and one of lists of floats.

    Args:
        path: The file. Lists may have any float type; all have the same length.
        need_words: Whether a file without a column ``word`` is an error.
    """
    pa, parquet = import_pyarrow("reading")
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            metadata = parquet.read_metadata(file)
            names = _columns(pa, metadata.schema.to_arrow_schema(), path, need_words)
            file.seek(0)
            # Words stay numbers of a dictionary: a file may repeat one any number of times.
            encoded = [name for name in names if name == "word"]
            source = parquet.ParquetFile(file, metadata=metadata, read_dictionary=encoded)
            return _read(source, names, path, size=size)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{path} is a damaged parquet file: {reason[:200]}") from None


def _columns(pa: Any, schema: Any, path: Path, need_words: bool) -> list[str]:
    """Return the columns to read, or raise ValueError unless they are those of a table."""
    required = ["word", "vector"] if need_words else ["vector"]
    for name in required:
        if schema.names.count(name) != 1:
            raise ValueError(
                f"{path} must have one column {name!r}, got the columns {schema.names[:8]}"
            )
    types = pa.types
    if "word" in schema.names:
        word = schema.field("word").type
        text = word.value_type if types.is_dictionary(word) else word
        if str(text) not in STRINGS:
            raise ValueError(f"{path} must have words of type string, got {word}")
    vector = schema.field("vector").type
    is_list = (
        types.is_list(vector)
        or types.is_large_list(vector)
        or types.is_fixed_size_list(vector)
    )
    if not is_list or not types.is_floating(vector.value_type):
        raise ValueError(f"{path} must have vectors of lists of floats, got {vector}")
    return [name for name in ("word", "vector") if name in schema.names]


def _read(source: Any, columns: list[str], path: Path, *, size: int) -> VectorTable:
    metadata = source.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    numbers = sum(
        group.column(place).num_values
        for group in groups
        for place in range(group.num_columns)
        if group.column(place).path_in_schema.split(".")[0] == "vector"
    )
    if max(numbers, metadata.num_rows) > MAX_NUMBERS_PER_BYTE * size:
        raise ValueError(f"{path} claims to hold more than it can")
    words: list[str] = []
    parts: list[np.ndarray] = []
    step = max(1, CHUNK_NUMBERS * metadata.num_rows // max(1, numbers))
    for batch in source.iter_batches(step, columns=columns, use_threads=False):
        # pyarrow does not check the numbers of words that a file contains.
        batch.validate(full=True)
        parts.append(_rows(batch.column("vector"), path))
        words += _words(batch.column("word")) if "word" in columns else [""] * len(batch)
        _check_widths(parts[0].shape[1], parts[-1].shape[1], path)
    if not parts or not parts[0].size:
        raise ValueError(f"{path} must have rows and a width, got none")
    return VectorTable(words, np.concatenate(parts))


def _rows(vectors: Any, path: Path) -> np.ndarray:
    """Return the lists of a batch as float32 rows."""
    flat = vectors.flatten()
    if vectors.null_count or flat.null_count:
        raise ValueError(f"{path} must have a vector of numbers in each row, got null")
    lengths = vectors.value_lengths().to_numpy()
    _check_widths(lengths.min(), lengths.max(), path)
    rows = flat.to_numpy(zero_copy_only=False).astype(np.float32)
    return rows.reshape(len(vectors), lengths[0])


def _check_widths(first: int, second: int, path: Path) -> None:
    if first != second:
        raise ValueError(
            f"{path} must have vectors of one length, got {first} and {second}"
        )


def _words(column: Any) -> list[str]:
    """Return the words of a batch; ``""`` for null."""
    encoded = column if hasattr(column, "dictionary") else column.dictionary_encode()
    words = [word or "" for word in encoded.dictionary.to_pylist()]
    numbers = encoded.indices.to_pylist()
    return ["" if number is None else words[number] for number in numbers]
