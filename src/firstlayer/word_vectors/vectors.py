"""Open tables of word vectors.

Reads folders with a table and a tokenizer (written by Firstlayer, model2vec,
sentence-transformers or transformers) and files of word2vec (text or binary) or GloVe. The
format is detected from the content, not from the file name.
"""

import difflib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Float32, Int64

from ..files.atomic import Opener
from ..files.checkpoint import Checkpoint, checkpoint_in, open_checkpoint, read_bytes
from .corpus import UNKNOWN
from .folder import TOKENIZER, read_config, read_one_save

#: Prefixes of tokens that begin a word: byte-level BPE and SentencePiece.
MARKS = ("Ġ", "▁")
# Longest word accepted in a binary file.
LONGEST_WORD = 1 << 16
FASTTEXT = (793712314).to_bytes(4, "little")


@dataclass(frozen=True)
class Vectors:
    """Words and their vectors.

    The vector of word ``i`` is ``weight[i]``, or ``scale[i] * weight[mapping[i]]`` for
    tables in which several words share a row.

    Args:
        words: Words as spelled in the vocabulary.
        weight: The rows.
        tokenizer: A ``tokenizers.Tokenizer`` whose ids are word numbers, or None if only
            whole words are known.
        normalize: Whether text vectors are scaled to unit length.
        mapping: Row of each word; None if word ``i`` has row ``i``.
        scale: Factor of each word; None for ones.
    """

    words: list[str]
    weight: Float32[np.ndarray, "rows width"]
    tokenizer: Any = None
    normalize: bool = False
    mapping: Int64[np.ndarray, " words"] | None = None
    scale: Float32[np.ndarray, " words"] | None = None

    @cached_property
    def rows(self) -> dict[str, int]:
        """Number of each word; the first one if a word occurs twice."""
        return {word: i for i, word in reversed(list(enumerate(self.words)))}

    def take(self, numbers: Any) -> Float32[np.ndarray, "n width"]:
        """Return the vectors of words by their numbers."""
        numbers = np.asarray(numbers, np.int64)
        rows = self.weight[numbers if self.mapping is None else self.mapping[numbers]]
        return rows if self.scale is None else rows * self.scale[numbers, None]

    @property
    def unknown(self) -> int | None:
        """Row of the unknown token, or None."""
        model = getattr(self.tokenizer, "model", None)
        return self.rows.get(getattr(model, "unk_token", None) or UNKNOWN)

    def shown(self, row: int) -> str:
        """Return the word of a row without word-start prefixes."""
        word = self.words[row]
        for mark in MARKS:
            word = word.removeprefix(mark) if len(word) > 1 else word
        return word

    def row(self, word: str) -> int:
        """Return the row of a word. An unknown word is a ValueError with a suggestion."""
        for spelling in (word, *(mark + word for mark in MARKS)):
            if spelling in self.rows:
                return self.rows[spelling]
        near = [other for other in self.rows if abs(len(other) - len(word)) < 2]
        same = [other for other in near if other.casefold() == word.casefold()]
        close = same or difflib.get_close_matches(word, near[:50_000], n=1)
        hint = f", but {close[0]!r} is" if close else ""
        raise ValueError(f"{word!r} is not in the table{hint}")


def open_vectors(path: str | os.PathLike[str]) -> Vectors:
    """Open a table of word vectors.

    Args:
        path: A folder with a safetensors file and ``tokenizer.json``, that safetensors
            file, or a word2vec or GloVe file.
    """
    place = Path(path)
    # A folder may be missing for a moment while it is replaced.
    if not place.is_file():
        return read_one_save(
            place, lambda opener: _checkpoint(checkpoint_in(place, opener=opener), opener)
        )
    if _is_safetensors(place):
        return read_one_save(place.parent, lambda opener: _checkpoint(place, opener))
    with open(place, "rb") as file:
        return _lines(file, name=os.fspath(path))


def _is_safetensors(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"


def _checkpoint(path: Path, opener: Opener) -> Vectors:
    checkpoint = open_checkpoint(path, opener=opener)
    folder = checkpoint.files[0].parent
    config, tokens = read_config(folder, opener=opener), folder / TOKENIZER
    try:
        tokenizer_json = read_bytes(tokens, opener=opener)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} has no words: {TOKENIZER} is missing in its folder"
        ) from None
    table = checkpoint.token_table()
    weight = checkpoint.read(table.name).astype(np.float32, copy=False)
    mapping = scale = None
    if table.name == "embeddings":
        mapping, scale = _clusters(checkpoint, rows=len(weight))
    tokenizer = parse_tokenizer(tokenizer_json, tokens)
    words = [""] * len(weight if mapping is None else mapping)
    for word, row in tokenizer.get_vocab().items():
        if row >= len(words):
            raise ValueError(f"{tokens} has token {row}, but there are {len(words)} rows")
        words[row] = word
    return Vectors(words, weight, tokenizer, bool(config.get("normalize")), mapping, scale)


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


def parse_tokenizer(content: bytes, path: Path) -> Any:
    """Return the tokenizer in a file's content, with padding and truncation disabled."""
    from tokenizers import Tokenizer

    # tokenizers raises a bare Exception.
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _lines(file: BinaryIO, *, name: str) -> Vectors:
    first = file.readline(LONGEST_WORD)
    if not first:
        raise ValueError(f"{name} is empty")
    if first.startswith(FASTTEXT):
        raise ValueError(
            f"{name} is in fastText's binary format: use the .vec file instead"
        )
    match first.split():
        case [rows, width] if rows.isdigit() and width.isdigit():
            return _word2vec(file, int(rows), int(width), name=name)
        case [_, *numbers] if numbers and _numbers(numbers) is not None:
            file.seek(0)
            return _text(file, len(numbers), name=name)
    raise ValueError(f"{name} is neither safetensors nor word2vec nor GloVe")


def _word2vec(file: BinaryIO, rows: int, width: int, *, name: str) -> Vectors:
    start = file.tell()
    left = os.fstat(file.fileno()).st_size - start
    # Smallest possible row: a one-byte word, a space, and two bytes per number.
    if rows * (2 + 2 * width) > left:
        raise ValueError(
            f"{name} is truncated: {rows} rows of {width} numbers in {left} bytes"
        )
    line = file.readline(LONGEST_WORD)
    file.seek(start)
    if _numbers(line.split()[1:]) is None or len(line.split()) != width + 1:
        return _binary(file, rows, width, name=name)
    found = _text(file, width, name=name)
    if len(found.words) != rows:
        raise ValueError(f"{name} declares {rows} rows, but has {len(found.words)}")
    return found


def _numbers(fields: list[bytes]) -> np.ndarray | None:
    try:
        with np.errstate(over="ignore"):
            return np.array(fields, dtype=np.float32)
    except ValueError:
        return None


def _text(file: BinaryIO, width: int, *, name: str) -> Vectors:
    words, rows = [], []
    for number, line in enumerate(file, start=1):
        # Split from the right: some GloVe words contain spaces.
        fields = line.strip().rsplit(b" ", width)
        values = _numbers(fields[1:])
        if len(fields) != width + 1 or values is None:
            raise ValueError(
                f"{name} must have a word and {width} numbers in line {number}"
            )
        words.append(_word(fields[0]))
        rows.append(values)
    return Vectors(words, np.array(rows, np.float32).reshape(-1, width))


def _binary(file: BinaryIO, rows: int, width: int, *, name: str) -> Vectors:
    data, place = file.read(), 0
    words, weight = [], np.empty((rows, width), np.float32)
    for row in range(rows):
        space = data.find(b" ", place, place + LONGEST_WORD)
        end = space + 1 + 4 * width
        if space < 0 or end > len(data):
            raise ValueError(f"{name} is truncated: it has {row} of {rows} rows")
        # word2vec ends each row with a line feed; gensim does not.
        words.append(_word(data[place:space].lstrip(b"\n")))
        weight[row] = np.frombuffer(data, "<f4", width, space + 1)
        place = end
    return Vectors(words, weight)


def _word(spelling: bytes) -> str:
    # Published files contain words truncated inside a character.
    return spelling.decode(errors="backslashreplace")
