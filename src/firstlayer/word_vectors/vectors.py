"""Words and their vectors, from any file that has them.

:mod:`firstlayer.vector_files.reading` reads the files. This module finds the vector of a
word: its own row, the row of the piece that begins a word, or the mean of its pieces.
"""

import difflib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from ..vector_files.folder import PHRASES
from ..vector_files.reading import read_vectors
from ..vector_files.table import Subwords, VectorTable
from ..vector_files.vocabulary import TOKENIZER
from .corpus import UNKNOWN
from .phrases import Phrases
from .text import lone_surrogate

#: Prefixes of tokens that begin a word: byte-level BPE and SentencePiece.
MARKS = ("Ġ", "▁")
#: A table marks the beginning of words if one of this many tokens does.
MARKED = 100
#: Prefix of WordPiece tokens that continue a word.
CONTINUED = "##"
#: Number of words that are compared with an unknown one.
MAX_COMPARED = 50_000


@dataclass(frozen=True)
class WordVector:
    """The vector of a word, and what it is made of.

    Args:
        word: The word that was looked up.
        vector: Its vector.
        numbers: Numbers of the words whose mean it is; one for a word with its own row.
        note: A sentence that names the rows it was made of; empty for a word with its own
            row.
    """

    word: str
    vector: Float32[np.ndarray, " width"]
    numbers: list[int]
    note: str = ""


@dataclass(frozen=True, repr=False)
class Vectors:
    """Words and their vectors; :func:`open_vectors` opens them.

    The vector of word ``i`` is ``weight[i]``, or ``scale[i] * weight[mapping[i]]`` for
    tables in which several words share a row. ``vectors["king"]`` is the vector of a word:

    - the row of its own token; in tables of pieces, of the one that begins a word, such as
      ``▁king``;
    - that of the same text in another Unicode normal form: ``é`` is one character or two;
    - that of ``king`` for ``King`` if the table has lower case only;
    - the mean of its pieces if a tokenizer splits it into several;
    - the mean of its character n-grams in tables that have them, such as fastText's.

    Args:
        words: Words as spelled in the vocabulary.
        weight: The rows.
        tokenizer: A ``tokenizers.Tokenizer`` whose ids are word numbers, or None if only
            whole words are known.
        normalize: Whether text vectors are scaled to unit length.
        mapping: Row of each word; None if word ``i`` has row ``i``.
        scale: Factor of each word; None for ones.
        subwords: Rows of character n-grams, for unknown words; or None.
        phrases: Phrases that the ids of the tokenizer are joined to; or None.

    Example:
        >>> vectors = Vectors(["king", "queen"], np.eye(2, dtype=np.float32))
        >>> vectors
        Vectors(2 words × 2)
        >>> vectors["king"].tolist(), "queen" in vectors, len(vectors)
        ([1.0, 0.0], True, 2)
        >>> vectors[["queen", "king"]].tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """

    words: list[str]
    weight: Float32[np.ndarray, "rows width"]
    tokenizer: Any = None
    normalize: bool = False
    mapping: Int64[np.ndarray, " words"] | None = None
    scale: Float32[np.ndarray, " words"] | None = None
    subwords: Subwords | None = None
    phrases: Phrases | None = None

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and self._found(word) is not None

    def __getitem__(self, word: str | Sequence[str]) -> Float32[np.ndarray, "..."]:
        """Return the vector of a word, or one row for each of several words.

        An unknown word is a KeyError.
        """
        is_one = isinstance(word, str)
        words = list(word) if isinstance(word, Iterable) and not is_one else [word]
        if not all(isinstance(one, str) for one in words):
            raise TypeError(f"word must be a string or a list of strings, got {word!r}")
        try:
            found = [self.find(one).vector for one in words]
        except UnknownWordError as error:
            raise KeyError(str(error)) from None
        if is_one:
            return found[0]
        return np.stack(found) if found else self.take([])

    def __repr__(self) -> str:
        return f"Vectors({len(self.words):,} words × {self.weight.shape[1]})"

    @cached_property
    def rows(self) -> dict[str, int]:
        """Number of each word; the first one if a word occurs twice."""
        return {word: i for i, word in reversed(list(enumerate(self.words)))}

    @cached_property
    def nameless(self) -> list[int]:
        """Numbers that no word leads to: of ``""``, and of a word that occurs before."""
        rows = self.rows
        return [i for i, word in enumerate(self.words) if not word or rows[word] != i]

    @cached_property
    def mark(self) -> str:
        """Prefix of tokens that begin a word, or ``""`` if the table has none."""
        for mark in MARKS:
            marked = sum(word.startswith(mark) for word in self.words)
            if marked * MARKED > len(self.words):
                return mark
        return ""

    @cached_property
    def is_uncased(self) -> bool:
        """Whether upper case is read as lower case."""
        normalizer = getattr(self.tokenizer, "normalizer", None)
        if normalizer is not None:
            return "A" not in normalizer.normalize_str("A")
        has_tokenizer = self.tokenizer is not None
        return not has_tokenizer and all(word == word.lower() for word in self.words)

    def take(self, numbers: Any) -> Float32[np.ndarray, "n width"]:
        """Return the vectors of words by their numbers."""
        numbers = np.asarray(numbers, np.int64)
        rows = self.weight[numbers if self.mapping is None else self.mapping[numbers]]
        return rows if self.scale is None else rows * self.scale[numbers, None]

    @cached_property
    def unknown(self) -> int | None:
        """Row of the unknown token, or None."""
        model = getattr(self.tokenizer, "model", None)
        if type(model).__name__ == "Unigram":
            # Only its JSON names the unknown token of this model.
            return json.loads(self.tokenizer.to_str())["model"].get("unk_id")
        return self.rows.get(getattr(model, "unk_token", None) or UNKNOWN)

    def shown(self, row: int) -> str:
        """Return the word of a row without word-start prefixes."""
        word = self.words[row]
        for mark in MARKS:
            word = word.removeprefix(mark) if len(word) > 1 else word
        return word

    def find(self, word: str) -> WordVector:
        """Return the vector of a word; an unknown word is an error with a suggestion."""
        if not word.strip():
            raise UnknownWordError(f"a word must not be empty, got {word!r}")
        found = self._found(word)
        if found is not None:
            return found
        raise UnknownWordError(f"{word!r} is not in the table{self._hint(word)}")

    def _found(self, word: str) -> WordVector | None:
        number = self._own_number(word)
        if number is not None:
            return WordVector(word, self.take([number])[0], [number])
        if lone_surrogate(word) is not None:
            return None  # tokenizers and n-grams read UTF-8
        if self.tokenizer is not None:
            numbers = self._pieces(word)
            if len(numbers) == 1:
                return WordVector(word, self.take(numbers)[0], numbers)
            if numbers:
                between = " and " if " " in word else " "
                pieces = between.join(self.words[number] for number in numbers)
                note = f"{word} is the mean of {pieces}"
                if spaced := self._as_sum(word):
                    note += f": for a sum, write {spaced!r}"
                return WordVector(word, self.take(numbers).mean(axis=0), numbers, note)
        elif word in self.rows:
            # A piece inside of words, in a table without a tokenizer.
            number = self.rows[word]
            note = f"{word} is a piece inside of words" if self.mark else ""
            return WordVector(word, self.take([number])[0], [number], note)
        if self.subwords is not None and word:
            normalizer = getattr(self.tokenizer, "normalizer", None)
            spelled = word if normalizer is None else normalizer.normalize_str(word)
            means, counts = self.subwords.means([spelled.encode()], np.array([-1]))
            if counts[0]:
                note = f"{word} is the mean of {counts[0]} character n-grams"
                return WordVector(word, means[0], [], note)
        return None

    def _own_number(self, word: str) -> int | None:
        """Return the number of the token that is this word, or None."""
        # An accent may be a character of its own, in the table or in the query.
        forms = [word, *(unicodedata.normalize(form, word) for form in ("NFC", "NFD"))]
        spellings = list(dict.fromkeys(forms))
        if word != word.lower() and word not in self.rows and self.is_uncased:
            spellings += [spelling.lower() for spelling in spellings]
        for spelling in spellings:
            # Without a mark, a piece continues a word.
            is_whole = not self.mark or spelling.startswith(self.mark)
            for token in (
                (self.mark + spelling, spelling) if is_whole else (self.mark + spelling,)
            ):
                if token in self.rows:
                    return self.rows[token]
        return None

    def _pieces(self, word: str) -> list[int]:
        """Return the tokens of a word; none if one of them is unknown."""
        unknown, best = self.unknown, []
        # Some tokenizers mark a word only after a space.
        for text in (word, f" {word}") if self.mark else (word,):
            ids = self.encoded([text])[0]
            if not ids or unknown in ids:
                continue
            if not self.mark or self.words[ids[0]].startswith(self.mark):
                return ids
            best = best or ids
        return best

    def encoded(self, texts: list[str]) -> list[list[int]]:
        """Return the numbers of the tokens of texts, with phrases joined."""
        return self.joined(encoded_ids(self.tokenizer, texts))

    def joined(self, ids: list[list[int]]) -> list[list[int]]:
        """Return the numbers of tokens with phrases joined."""
        return ids if self.phrases is None else self.phrases.joined(ids)

    def _as_sum(self, word: str) -> str:
        """Return words joined by + or - with spaces between them, or ``""``."""
        terms = [term for term in re.split("[-+]", word) if term]
        # A hyphen alone joins the parts of a word.
        if "+" not in word or len(terms) < 2 or not any(term in self for term in terms):
            return ""
        return " ".join(re.sub("([-+])", r" \1 ", word).split())

    def _hint(self, word: str) -> str:
        if spaced := self._as_sum(word):
            return f": for a sum, write {spaced!r}"
        near = [other for other in self.rows if abs(len(other) - len(word)) < 2]
        same = [other for other in near if other.casefold() == word.casefold()]
        close = same or difflib.get_close_matches(word, near[:MAX_COMPARED], n=1)
        return f", but {close[0]!r} is" if close else ""


class UnknownWordError(ValueError):
    """A word that has no vector."""


def open_vectors(path: str | os.PathLike[str]) -> Vectors:
    """Open a table of word vectors.

    Args:
        path: A folder that ``firstlayer train``, model2vec, sentence-transformers or
            transformers wrote, with ``tokenizer.json``, ``vocab.txt``, or ``vocab.json``
            and ``merges.txt``; its safetensors or PyTorch file; a file of gensim (``.kv``,
            ``.model``), fastText (``.bin``, ``.ftz``, ``.vec``), word2vec (text or binary),
            GloVe or GGUF; ``.npy`` or TSV next to ``vocab.txt`` or ``metadata.tsv``;
            ``.npz``; ``.parquet`` with columns ``word`` and ``vector``, if pyarrow is
            installed; or a text format with ``.gz``. The format is found from the content.
            No code in a file is run.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open(folder + "/glove.txt", "w") as file:
        ...         count = file.write("king 1 0.5\\nqueen 0 2\\n")
        ...     open_vectors(folder + "/glove.txt")["king"].tolist()
        [1.0, 0.5]
    """
    table = read_vectors(path)
    phrases = None
    if table.phrases_json is not None:
        numbers = {word: i for i, word in enumerate(table.words)}
        phrases = parse_phrases(table.phrases_json, numbers, _folder(path) / PHRASES)
    return Vectors(
        table.words,
        table.weight,
        _tokenizer(table, _folder(path)),
        table.normalize,
        table.mapping,
        table.scale,
        table.subwords,
        phrases,
    )


def _folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a table's files."""
    return Path(path) if os.path.isdir(path) else Path(path).parent


def _tokenizer(table: VectorTable, folder: Path) -> Any:
    if table.tokenizer_json is not None:
        return parse_tokenizer(table.tokenizer_json, folder / TOKENIZER)
    if "[UNK]" in table.words and any(word.startswith(CONTINUED) for word in table.words):
        return _word_piece(table.words)
    return None


def _word_piece(words: list[str]) -> Any:
    """Return the tokenizer of a ``vocab.txt`` of BERT."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    plain = (word for word in words if not re.fullmatch(r"\[.*\]", word))
    is_uncased = all(word == word.lower() for word in plain)
    vocabulary = {word: i for i, word in reversed(list(enumerate(words))) if word}
    tokenizer = Tokenizer(
        models.WordPiece(
            vocabulary,
            unk_token="[UNK]",
            continuing_subword_prefix=CONTINUED,
            max_input_chars_per_word=100,
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_uncased)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


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


def parse_phrases(content: bytes, numbers: dict[str, int], path: Path) -> Phrases:
    """Return the phrases in a file's content.

    Args:
        content: The content.
        numbers: Number of each word.
        path: Path of the file in errors.
    """
    try:
        return Phrases.from_words(json.loads(content), numbers)
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{path} does not hold phrases of known words") from None


def encoded_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the token ids of texts."""
    return [one.ids for one in _encoded(tokenizer.encode_batch_fast, texts)]


def encoded_words(tokenizer: Any, texts: list[str]) -> list[list[tuple[int, str]]]:
    """Return the token ids of texts, each with its part of the text."""
    encoded = _encoded(tokenizer.encode_batch, texts)
    return [
        [(i, text[lo:hi]) for i, (lo, hi) in zip(one.ids, one.offsets, strict=True)]
        for one, text in zip(encoded, texts, strict=True)
    ]


def _encoded(encode_batch: Any, texts: list[str]) -> list[Any]:
    # tokenizers raises a bare Exception.
    try:
        return encode_batch(texts, add_special_tokens=False)
    except Exception as error:
        raise ValueError(f"the tokenizer cannot read the text: {error}") from None
