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
from jaxtyping import Float32

from .corpus import UNKNOWN
from .folder import TOKENIZER, read_config

#: Prefixes of tokens that begin a word: byte-level BPE and SentencePiece.
MARKS = ("Ġ", "▁")
# Longest word accepted in a binary file.
LONGEST_WORD = 1 << 16
FASTTEXT = (793712314).to_bytes(4, "little")


@dataclass(frozen=True)
class Vectors:
    """Words and their rows.

    Args:
        words: One word per row, as spelled in the vocabulary.
        weight: The rows.
        tokenizer: A ``tokenizers.Tokenizer`` whose ids are row numbers, or None if only
            whole words are known.
        normalize: Whether text vectors are scaled to unit length.
    """

    words: list[str]
    weight: Float32[np.ndarray, "rows width"]
    tokenizer: Any = None
    normalize: bool = False

    @cached_property
    def rows(self) -> dict[str, int]:
        """Row of each word; the first row if a word occurs twice."""
        return {word: i for i, word in reversed(list(enumerate(self.words)))}

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
    if not os.path.lexists(place):
        raise FileNotFoundError(f"no file or folder {place}")
    if place.is_dir() or _is_safetensors(place):
        return _checkpoint(place)
    with open(place, "rb") as file:
        return _lines(file, name=os.fspath(path))


def _is_safetensors(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"


def _checkpoint(path: Path) -> Vectors:
    from ..files.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    folder = path if path.is_dir() else path.parent
    config, tokens = read_config(folder), folder / TOKENIZER
    if not tokens.is_file():
        raise FileNotFoundError(
            f"{path} has no words: {TOKENIZER} is missing in its folder"
        )
    table = checkpoint.token_table()
    weight = checkpoint.read(table.name).astype(np.float32, copy=False)
    # Clustered model2vec tables: several tokens share a row, each with its own scale.
    names = checkpoint.tensors.keys()
    if table.name == "embeddings" and "mapping" in names:
        weight = weight[checkpoint.read("mapping")]
    if table.name == "embeddings" and "weights" in names:
        weight = weight * checkpoint.read("weights").astype(np.float32)[:, None]
    tokenizer = open_tokenizer(tokens)
    words = [""] * len(weight)
    for word, row in tokenizer.get_vocab().items():
        if row >= len(words):
            raise ValueError(f"{tokens} has token {row}, but there are {len(words)} rows")
        words[row] = word
    return Vectors(words, weight, tokenizer, bool(config.get("normalize")))


def open_tokenizer(path: Path) -> Any:
    """Load a tokenizer with padding and truncation disabled."""
    from tokenizers import Tokenizer

    # tokenizers raises a bare Exception.
    try:
        tokenizer = Tokenizer.from_file(str(path))
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
