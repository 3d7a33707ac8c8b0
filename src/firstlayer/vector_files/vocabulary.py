"""Words of a table that a file without words needs: vocabularies next to it.

A folder may hold ``tokenizer.json``; or ``vocab.txt`` with one token per line, as BERT's
first checkpoints do; or ``vocab.json`` and ``merges.txt`` of byte-level BPE, as those of
GPT-2 and RoBERTa do. A ``.npy`` or TSV file may have a list of words of its own.
"""

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from ..files.atomic import Opener
from ..files.checkpoint import read_bytes
from .text import decoded

TOKENIZER = "tokenizer.json"
VOCABULARY = "vocab.txt"
BPE_VOCABULARY = "vocab.json"
BPE_MERGES = "merges.txt"
METADATA = "metadata.tsv"


def read_optional(path: Path, *, opener: Opener | None = None) -> bytes | None:
    """Return the contents of a file, or None if there is none."""
    try:
        return read_bytes(path, opener=opener)
    except FileNotFoundError:
        return None


def byte_level_tokenizer(folder: Path, *, opener: Opener | None = None) -> bytes | None:
    """Return the ``tokenizer.json`` of ``vocab.json`` and ``merges.txt``, or None.

    Args:
        folder: Folder of both files.
        opener: Opens files.
    """
    path = folder / BPE_VOCABULARY
    content = read_optional(path, opener=opener)
    lines = read_optional(folder / BPE_MERGES, opener=opener)
    if content is None or lines is None:
        return None
    try:
        vocabulary: Any = json.loads(content)
    except (ValueError, RecursionError):
        vocabulary = None
    if not isinstance(vocabulary, dict) or not all(
        type(row) is int and row >= 0 for row in vocabulary.values()
    ):
        raise ValueError(f"{path} must be an object with the id of each token")
    merges = []
    for number, line in enumerate(words_in_lines(lines), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        one, _, other = line.partition(" ")
        if not vocabulary.keys() >= {one, other, one + other}:
            raise ValueError(
                f"{folder / BPE_MERGES}, line {number} must join two tokens of "
                f"{BPE_VOCABULARY}, got {line!r}"
            )
        merges.append([one, other])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    return json.dumps(tokenizer).encode()


def words_in_lines(content: bytes) -> list[str]:
    """Return one word per line; only line feeds end lines.

    Example:
        >>> words_in_lines("the\\nnaïve\\r\\n".encode())
        ['the', 'naïve']
    """
    lines = content.removeprefix(BOM_UTF8).split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [decoded(line.removesuffix(b"\r")) for line in lines]


def words_beside(path: Path) -> tuple[Path, list[str]] | None:
    """Return the list of words that belongs to a file of vectors, and its path.

    It is ``<stem>.vocab.txt``, ``<stem>.metadata.tsv``, ``vocab.txt`` or ``metadata.tsv``
    in the same folder.
    """
    stem = path.name.removesuffix(path.suffix)
    names = (f"{stem}.{VOCABULARY}", f"{stem}.{METADATA}", VOCABULARY, METADATA)
    for name in names:
        file = path.with_name(name)
        content = read_optional(file)
        if content is None or file == path:
            continue
        words = words_in_lines(content)
        if file.suffix == ".tsv":
            words = [word.partition("\t")[0] for word in words]
        return file, words
    return None


def matched_words(path: Path, rows: int) -> list[str]:
    """Return the words beside a file, one for each of its rows."""
    found = words_beside(path)
    if found is None:
        stem = path.name.removesuffix(path.suffix)
        raise FileNotFoundError(
            f"{path} has no words: neither {stem}.{VOCABULARY} nor {VOCABULARY} nor "
            f"{METADATA} is in its folder"
        )
    file, words = found
    # A TSV file with several columns begins with their names.
    if file.suffix == ".tsv" and len(words) == rows + 1:
        words = words[1:]
    if len(words) != rows:
        raise ValueError(f"{file} has {len(words)} words, but {path} has {rows} rows")
    return words
