"""Write a table with words in the formats of other programs, a few rows at a time.

Every file is replaced atomically (:mod:`firstlayer.files.atomic`). Formats of lines cannot
hold every word: rows whose word a format cannot hold are left out, and returned as such.
"""

import contextlib
import gzip
import json
import os
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..files.atomic import replacing
from .folder import write_folder
from .parquet import import_pyarrow
from .table import VectorTable
from .vocabulary import METADATA, VOCABULARY

#: Formats by the end of a file's name.
SUFFIXES = {
    ".txt": "word2vec",
    ".vec": "word2vec",
    ".txt.gz": "word2vec",
    ".vec.gz": "word2vec",
    ".bin": "word2vec-binary",
    ".tsv": "tsv",
    ".npy": "npy",
    ".parquet": "parquet",
}
FORMATS = ("folder", "word2vec", "word2vec-binary", "glove", "tsv", "npy", "parquet")
#: Words that a format cannot hold contain one of these.
UNWRITABLE = {
    "word2vec": r"\s",
    "word2vec-binary": r"[ \n]",
    "glove": r"\s",
    "tsv": r"[\t\r\n]",
    "npy": r"[\r\n]",
}
#: Numbers that are written at a time.
CHUNK_NUMBERS = 1 << 18
UNKNOWN = "[UNK]"

Report = Callable[[int], None]


@dataclass(frozen=True)
class Written:
    """Result of writing a table.

    Args:
        files: The files, or the folder.
        rows: Number of rows.
        width: Width of a row.
        left_out: Words that the format cannot hold; ``""`` for a row without a word.
        duplicates: Number of rows left out because their word occurs before.
    """

    files: list[str]
    rows: int
    width: int
    left_out: list[str]
    duplicates: int = 0


def format_of(path: str | os.PathLike[str]) -> str | None:
    """Return the format that a file's name implies, or None.

    Example:
        >>> [format_of(name) for name in ("a.tsv", "a.vec.gz", "vectors", "a.b")]
        ['tsv', 'word2vec', 'folder', None]
    """
    name = Path(path).name
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return SUFFIXES[suffix]
    return None if "." in name.strip(".") else "folder"


def files_of(path: str | os.PathLike[str], format: str) -> list[str]:
    """Return the files that :func:`write_vectors` writes."""
    place = os.fspath(path)
    stem = os.path.splitext(place)[0]
    second = {"tsv": f"{stem}.{METADATA}", "npy": f"{stem}.{VOCABULARY}"}
    return [place, second[format]] if format in second else [place]


def write_vectors(
    table: VectorTable,
    path: str | os.PathLike[str],
    format: str,
    *,
    replace: bool = False,
    report: Report = lambda rows: None,
) -> Written:
    """Write a table with words.

    Args:
        table: Words and rows.
        path: Output file or folder.
        format: One of :data:`FORMATS`. ``"tsv"`` writes the words to
            ``<stem>.metadata.tsv``, ``"npy"`` to ``<stem>.vocab.txt``.
        replace: Whether to replace an existing folder of vectors. Files are always
            replaced.
        report: Called with the number of rows written.
    """
    if format == "folder":
        return _write_folder(table, path, replace=replace, report=report)
    if format == "parquet":
        return _write_parquet(table, path, report)
    kept, left_out = _writable(table.words, UNWRITABLE[format])
    files, width = files_of(path, format), table.weight.shape[1]
    chunks = _chunks(table, kept, report)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_replacing(file)) for file in files]
        if format == "npy":
            _write_npy(opened, table, kept, chunks)
        elif format == "tsv":
            _write_tsv(opened, table, kept, chunks)
        else:
            _WRITERS[format](opened[0], table, kept, chunks)
    return Written(files, len(kept), width, left_out)


@contextlib.contextmanager
def _replacing(path: str) -> Generator[Any, None, None]:
    with replacing(os.path.realpath(path)) as file:
        if not path.endswith(".gz"):
            yield file
            return
        # Without a time, the same table gives the same bytes.
        with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
            yield packed


def _writable(words: list[str], pattern: str) -> tuple[np.ndarray, list[str]]:
    """Return the numbers of the words that a format can hold, and the other words."""
    find = re.compile(pattern).search
    is_kept = [bool(word) and find(word) is None for word in words]
    left_out = [word for word, kept in zip(words, is_kept, strict=True) if not kept]
    return np.flatnonzero(is_kept), left_out


Chunks = Iterator[tuple[np.ndarray, np.ndarray]]


def _chunks(table: VectorTable, kept: np.ndarray, report: Report) -> Chunks:
    """Yield numbers of words and their rows, a few at a time."""
    step = max(1, CHUNK_NUMBERS // max(1, table.weight.shape[1]))
    for lo in range(0, len(kept), step):
        numbers = kept[lo : lo + step]
        yield numbers, table.take(numbers)
        report(lo + len(numbers))


def _write_glove(
    file: BinaryIO, table: VectorTable, kept: np.ndarray, chunks: Chunks
) -> None:
    for numbers, rows in chunks:
        lines = (
            f"{table.words[number]} {' '.join(map(str, row))}\n"
            for number, row in zip(numbers, rows, strict=True)
        )
        file.write("".join(lines).encode(errors="surrogatepass"))


def _write_word2vec(
    file: BinaryIO, table: VectorTable, kept: np.ndarray, chunks: Chunks
) -> None:
    file.write(f"{len(kept)} {table.weight.shape[1]}\n".encode())
    _write_glove(file, table, kept, chunks)


def _write_binary(
    file: BinaryIO, table: VectorTable, kept: np.ndarray, chunks: Chunks
) -> None:
    file.write(f"{len(kept)} {table.weight.shape[1]}\n".encode())
    for numbers, rows in chunks:
        rows = rows.astype("<f4", copy=False)
        lines = (
            table.words[number].encode(errors="surrogatepass")
            + b" "
            + row.tobytes()
            + b"\n"
            for number, row in zip(numbers, rows, strict=True)
        )
        file.write(b"".join(lines))


def _write_tsv(
    files: list[BinaryIO], table: VectorTable, kept: np.ndarray, chunks: Chunks
) -> None:
    for numbers, rows in chunks:
        lines = ("\t".join(map(str, row)) + "\n" for row in rows)
        files[0].write("".join(lines).encode())
        _write_words(files[1], table, numbers)


def _write_npy(
    files: list[BinaryIO], table: VectorTable, kept: np.ndarray, chunks: Chunks
) -> None:
    from numpy.lib import format as npy

    shape = (len(kept), table.weight.shape[1])
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(files[0], header)
    for numbers, rows in chunks:
        files[0].write(rows.astype("<f4", copy=False).tobytes())
        _write_words(files[1], table, numbers)


def _write_words(file: BinaryIO, table: VectorTable, numbers: np.ndarray) -> None:
    lines = (f"{table.words[number]}\n" for number in numbers)
    file.write("".join(lines).encode(errors="surrogatepass"))


_WRITERS = {
    "glove": _write_glove,
    "word2vec": _write_word2vec,
    "word2vec-binary": _write_binary,
}


def _write_folder(
    table: VectorTable, path: str | os.PathLike[str], *, replace: bool, report: Report
) -> Written:
    left_out, duplicates = [], 0
    if table.tokenizer_json is not None:
        rows, tokenizer = table.rows(), table.tokenizer_json.decode()
    else:
        first: dict[str, int] = {}
        for number, word in enumerate(table.words):
            first.setdefault(word, number)
        left_out = [""] * table.words.count("")
        duplicates = len(table.words) - len(left_out) - len(first.keys() - {""})
        first.pop("", None)
        rows = table.take(list(first.values()))
        vocabulary = {word: row for row, word in enumerate(first)}
        if UNKNOWN not in vocabulary:
            # Words outside of the table have a vector of zeros.
            vocabulary[UNKNOWN] = len(vocabulary)
            rows = np.concatenate([rows, np.zeros((1, rows.shape[1]), np.float32)])
        tokenizer = word_level_tokenizer(vocabulary)
    report(len(rows) // 2)
    about = {"source": "converted"}
    write_folder(
        path,
        rows,
        tokenizer=tokenizer,
        about=about,
        phrases=None if table.phrases_json is None else table.phrases_json.decode(),
        subwords=table.subwords if has_all_ngrams(table) else None,
        replace=replace,
        normalize=table.normalize,
    )
    report(len(rows))
    num_rows, width = rows.shape
    return Written([os.fspath(path)], num_rows, width, left_out, duplicates)


def has_all_ngrams(table: VectorTable) -> bool:
    """Return whether a folder can hold the n-grams of a table: all of them have a row."""
    return table.subwords is not None and table.subwords.bucket_rows is None


def word_level_tokenizer(vocabulary: dict[str, int]) -> str:
    """Return the ``tokenizer.json`` of whole words, separated by spaces.

    Args:
        vocabulary: Row of each word, ``[UNK]`` among them.
    """
    is_uncased = all(word == word.lower() for word in vocabulary if word != UNKNOWN)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"} if is_uncased else None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN},
    }
    return json.dumps(tokenizer, ensure_ascii=False)


def _write_parquet(
    table: VectorTable, path: str | os.PathLike[str], report: Report
) -> Written:
    """Write columns ``word`` and ``vector``."""
    pa, parquet = import_pyarrow("writing")
    width = table.weight.shape[1]
    kept = np.arange(len(table.words))
    schema = pa.schema([("word", pa.string()), ("vector", pa.list_(pa.float32(), width))])
    with (
        replacing(os.path.realpath(path)) as file,
        parquet.ParquetWriter(file, schema) as writer,
    ):
        for numbers, rows in _chunks(table, kept, report):
            words = pa.array([table.words[number] for number in numbers], pa.string())
            flat = pa.array(rows.reshape(-1), pa.float32())
            vectors = pa.FixedSizeListArray.from_arrays(flat, width)
            writer.write_batch(pa.RecordBatch.from_arrays([words, vectors], schema=schema))
    return Written([os.fspath(path)], len(kept), width, [])
