"""Read a table of vectors with its words from a file, and find its format."""

import gzip
import json
import os
import stat
import zipfile
import zlib
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..files.atomic import Opener
from ..files.checkpoint import (
    OLD_TORCH_MAGIC,
    ZIP_MAGIC,
    Checkpoint,
    checkpoint_in,
    open_checkpoint,
    open_regular,
)
from ..files.gguf import MAGIC as GGUF_MAGIC
from ..files.gguf import read_gguf_strings
from ..files.npy import MAGIC as NPY_MAGIC
from ..files.safetensors import KEY
from ..files.torch_pickle import ZIP_ERRORS
from ..files.word2vec import check_end, is_text_row
from ..stores import open_store
from ..stores.table_files import METADATA_KEY
from .arrays import read_npy, read_npz
from .fasttext import MAGIC as FASTTEXT_MAGIC
from .fasttext import read_fasttext
from .folder import MODEL, PHRASES, read_config, read_one_save, read_subwords
from .gensim import read_gensim
from .parquet import MAGIC as PARQUET_MAGIC
from .parquet import read_parquet
from .table import VectorTable
from .text import MAX_LINE_BYTES, counts_in, decoded, is_row, number_of, read_text
from .vocabulary import (
    BPE_MERGES,
    BPE_VOCABULARY,
    TOKENIZER,
    VOCABULARY,
    byte_level_tokenizer,
    matched_words,
    read_optional,
    words_beside,
    words_in_lines,
)

GZIP_MAGIC = b"\x1f\x8b"
#: The opcode and version that begin a pickle.
PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
GGUF_TOKENS = "tokenizer.ggml.tokens"
#: Longest word in a binary file.
MAX_WORD_BYTES = 1 << 16
FORMATS = (
    "safetensors, torch, GGUF, npy, npz, parquet, gensim, fastText, word2vec, GloVe, or "
    "TSV, with or without gzip"
)


def read_vectors(path: str | os.PathLike[str], *, need_words: bool = True) -> VectorTable:
    """Return the table in a file or folder.

    Args:
        path: A folder with a safetensors or torch checkpoint and ``tokenizer.json``,
            ``vocab.txt``, or ``vocab.json`` and ``merges.txt``; one of these files; or a
            GGUF, ``.npy``, ``.npz``, parquet, gensim, fastText, word2vec, GloVe or TSV
            file.
        need_words: Whether a checkpoint, ``.npy`` or parquet file without words is an
            error.
    """
    place = Path(path)
    if _may_be_folder(place):
        return read_one_save(
            place,
            lambda opener: _checkpoint(
                checkpoint_in(place, opener=opener), opener, need_words=need_words
            ),
        )
    with open_regular(place) as file:
        begin = file.read(64)
    if not begin:
        raise ValueError(f"{place} is empty")
    if begin.startswith(GGUF_MAGIC):
        return _gguf(place)
    if begin.startswith(NPY_MAGIC):
        return read_npy(place, need_words=need_words)
    if begin.startswith(PARQUET_MAGIC):
        return read_parquet(place, need_words=need_words)
    if begin.startswith(FASTTEXT_MAGIC):
        return read_fasttext(place)
    if begin.startswith(ZIP_MAGIC) and is_npz(place):
        return read_npz(place, need_words=need_words)
    if begin.startswith(PICKLES) and not begin.startswith(OLD_TORCH_MAGIC):
        return read_gensim(place)
    if (
        begin[8:9] == b"{"
        or begin.startswith((ZIP_MAGIC, OLD_TORCH_MAGIC))
        or place.name.endswith(".index.json")
    ):
        return read_one_save(
            place.parent,
            lambda opener: _checkpoint(place, opener, need_words=need_words),
        )
    if begin.startswith(GZIP_MAGIC):
        return _gzip(place)
    with open_regular(place) as file:
        return _lines(file, place, size=os.fstat(file.fileno()).st_size)


def read_rows(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the float32 rows of the table in a file, one for each word."""
    rows = read_vectors(path, need_words=False).rows()
    # Tensors share the memory, which must be writable.
    return np.require(rows, np.float32, ["C", "W"])


def is_npz(path: Path) -> bool:
    """Return whether a zip archive holds arrays of NumPy."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())
    except ZIP_ERRORS:
        raise ValueError(f"{path} is a damaged zip archive") from None


def _may_be_folder(path: Path) -> bool:
    """Return whether a path is a folder or missing, as a folder is while it is replaced."""
    try:
        # One call: the folder may appear between two.
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return True


def _gzip(path: Path) -> VectorTable:
    try:
        with open_regular(path) as raw, gzip.GzipFile(fileobj=raw) as file:
            return _lines(file, path, size=None)  # pyright: ignore[reportArgumentType]
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is a damaged gzip file: {error}") from None


def _stored_rows(path: Path) -> np.ndarray:
    """Return all rows of a store as float32."""
    with open_store(path) as store:
        weight = np.empty(store.shape, np.float32)
        step = max(1, (1 << 22) // max(1, store.shape[1]))
        for lo in range(0, len(weight), step):
            ids = np.arange(lo, min(lo + step, len(weight)))
            weight[lo : lo + len(ids)] = store.read(ids)
    return weight


def _gguf(path: Path) -> VectorTable:
    weight = _stored_rows(path)
    tokens = read_gguf_strings(path, GGUF_TOKENS)[: len(weight)]
    if not tokens:
        raise ValueError(f"{path} has no words: it has no {GGUF_TOKENS}")
    words = [decoded(token) for token in tokens]
    return VectorTable(words + [""] * (len(weight) - len(words)), weight)


def _checkpoint(path: Path, opener: Opener, *, need_words: bool) -> VectorTable:
    checkpoint = open_checkpoint(path, opener=opener)
    folder = checkpoint.files[0].parent
    config = read_config(folder, opener=opener)
    tokens = read_optional(folder / TOKENIZER, opener=opener)
    lines = None
    if tokens is None:
        tokens = byte_level_tokenizer(folder, opener=opener)
    if tokens is None:
        lines = read_optional(folder / VOCABULARY, opener=opener)
    if tokens is None and lines is None and need_words:
        raise FileNotFoundError(
            f"{path} has no words: neither {TOKENIZER} nor {VOCABULARY} nor "
            f"{BPE_VOCABULARY} with {BPE_MERGES} is in its folder"
        )
    mapping = scale = None
    if METADATA_KEY in checkpoint.metadata:
        weight = _stored_rows(path)
    else:
        table = checkpoint.token_table()
        weight = checkpoint.read(table.name).astype(np.float32, copy=False)
        if table.name == "embeddings":
            mapping, scale = _clusters(checkpoint, rows=len(weight))
    words = [""] * len(weight if mapping is None else mapping)
    spelled: dict[int, str] = {}
    source = folder / (TOKENIZER if tokens is not None else VOCABULARY)
    if tokens is not None:
        spelled = tokens_in(tokens, source)
    elif lines is not None:
        spelled = dict(enumerate(words_in_lines(lines)))
    for row, word in spelled.items():
        if row >= len(words):
            raise ValueError(f"{source} has token {row}, but there are {len(words)} rows")
        words[row] = word
    normalize = bool(config.get("normalize"))
    # Only Firstlayer writes such a file, with its own config.
    is_own = checkpoint.files[0].name == MODEL and KEY in config
    subwords = read_subwords(folder, weight.shape[1], opener=opener) if is_own else None
    phrases = read_optional(folder / PHRASES, opener=opener) if is_own else None
    return VectorTable(words, weight, tokens, normalize, mapping, scale, subwords, phrases)


def tokens_in(content: bytes, path: Path) -> dict[int, str]:
    """Return the tokens of ``tokenizer.json`` by id."""
    try:
        tokenizer: Any = json.loads(content)
        vocabulary = tokenizer["model"]["vocab"]
        added = tokenizer.get("added_tokens") or ()
        if isinstance(vocabulary, list):
            tokens = dict(enumerate(str(piece) for piece, _ in vocabulary))
        else:
            tokens = {row: token for token, row in vocabulary.items()}
        tokens |= {token["id"]: str(token["content"]) for token in added}
        if not all(type(row) is int and row >= 0 for row in tokens):
            raise ValueError("ids must be integers")
        return tokens
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a tokenizer") from None


def _clusters(
    checkpoint: Checkpoint, *, rows: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the mapping and the scale of a clustered model2vec table, None without them.

    The rows are not copied for each token: a file could ask for any amount of memory.
    """
    tensors = checkpoint.tensors
    mapping = checkpoint.read("mapping") if "mapping" in tensors else None
    if mapping is not None:
        is_valid = mapping.ndim == 1 and mapping.dtype.kind in "iu"
        if not is_valid or (
            mapping.size and not 0 <= mapping.min() <= mapping.max() < rows
        ):
            raise ValueError(
                f"{checkpoint.files[0]} must have a mapping to rows below {rows}, got "
                f"shape {mapping.shape} and dtype {mapping.dtype}"
            )
        mapping = mapping.astype(np.int64)
    scale = checkpoint.read("weights") if "weights" in tensors else None
    if scale is not None:
        words = rows if mapping is None else len(mapping)
        if scale.shape != (words,):
            raise ValueError(
                f"{checkpoint.files[0]} must have weights of shape {(words,)}, got "
                f"{scale.shape}"
            )
        scale = scale.astype(np.float32)
    return mapping, scale


def _lines(file: BinaryIO, path: Path, *, size: int | None) -> VectorTable:
    """Read word2vec's formats, GloVe or TSV.

    Args:
        file: The file, which need not seek.
        path: Its path.
        size: Its size; None if the file is compressed.
    """
    line = file.readline(MAX_LINE_BYTES)
    first = line.removeprefix(BOM_UTF8)
    if not first:
        raise ValueError(f"{path} is empty")
    counts = counts_in(first)
    if counts is not None:
        return _word2vec(file, *counts, path=path, left=size and size - len(line))
    fields = [field.strip() for field in first.strip().split(b"\t")]
    # A whole number may be a word, unless the words are in another file.
    has_word = number_of(fields[0]) is None or (
        fields[0].isdigit() and words_beside(path) is None
    )
    if len(fields) > 1 and not has_word and is_row(first):
        table = read_text(
            file, len(fields), name=str(path), line_number=1, begin=first, has_words=False
        )
        return VectorTable(matched_words(path, len(table.weight)), table.weight)
    if is_row(first):
        width = len(first.split()) - 1
        return read_text(file, width, name=str(path), line_number=1, begin=first)
    if words_beside(path) is None and size is None:
        raise ValueError(f"{path} holds no vectors in text: decompress it first")
    raise ValueError(f"{path} is not a file with vectors: expected {FORMATS}")


def _word2vec(
    file: BinaryIO, rows: int, width: int, *, path: Path, left: int | None
) -> VectorTable:
    if rows <= 0 or width <= 0:
        raise ValueError(
            f"{path} must declare a positive number of rows and width, got {rows} and "
            f"{width}"
        )
    # Smallest possible row: a one-byte word, a space, and two bytes per number.
    if left is not None and rows * (2 + 2 * width) > left + 1:
        raise ValueError(
            f"{path} is truncated: {rows} rows of {width} numbers in {left} bytes"
        )
    second = file.readline(MAX_LINE_BYTES)
    if is_text_row(second, width):
        return read_text(
            file, width, name=str(path), line_number=2, begin=second, num_rows=rows
        )
    return _binary(second + file.read(), rows, width, name=str(path))


def _binary(data: bytes, rows: int, width: int, *, name: str) -> VectorTable:
    """Return the rows of word2vec's binary format."""
    row_bytes, place = 4 * width, 0
    if rows * (2 + row_bytes) > len(data) + 1:
        raise ValueError(
            f"{name} is truncated: {rows} rows of {width} numbers in {len(data)} bytes"
        )
    words, weight = [], np.empty((rows, width), np.float32)
    flat = weight.reshape(-1).view(np.uint8).data
    find = data.find
    for row in range(rows):
        space = find(b" ", place, place + MAX_WORD_BYTES)
        end = space + 1 + row_bytes
        if space < 0 or end > len(data):
            raise ValueError(f"{name} is truncated: it has {row} of {rows} rows")
        # word2vec ends each row with a line feed; gensim does not.
        words.append(decoded(data[place:space].lstrip(b"\n")))
        flat[row * row_bytes : (row + 1) * row_bytes] = data[space + 1 : end]
        place = end
    check_end(len(data) - place, rows, width, name=name)
    return VectorTable(words, weight)
