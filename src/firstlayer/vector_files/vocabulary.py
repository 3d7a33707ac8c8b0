"""Words of a table that a file without words needs: vocabularies next to it.

A folder may hold ``tokenizer.json``, or ``vocab.txt`` with one token per line, as BERT's
first checkpoints do. A ``.npy`` or TSV file may have a list of words of its own.
"""

from pathlib import Path

from ..files.atomic import Opener
from ..files.checkpoint import read_bytes
from .text import decoded

TOKENIZER = "tokenizer.json"
VOCABULARY = "vocab.txt"
METADATA = "metadata.tsv"


def read_optional(path: Path, *, opener: Opener | None = None) -> bytes | None:
    """Return the contents of a file, or None if there is none."""
    try:
        return read_bytes(path, opener=opener)
    except FileNotFoundError:
        return None


def words_in_lines(content: bytes) -> list[str]:
    """Return one word per line; only line feeds end lines.

    Example:
        >>> words_in_lines("the\\nnaïve\\r\\n".encode())
        ['the', 'naïve']
    """
    lines = content.split(b"\n")
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
