"""Train a tokenizer on text, and tokenize the text to ids.

A corpus is a sequence of documents, each read in blocks that end between words
(:mod:`firstlayer.word_vectors.documents`). The ids may be in a temporary file, so neither
they nor the text need fit into memory.
"""

import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, Int64

from .._check import one_of, positive

#: Texts and characters tokenized per batch.
MAX_TEXTS, MAX_CHARACTERS = 8192, 1 << 24
#: Ids processed at once.
CHUNK = 1 << 20
#: Token of every word outside the vocabulary.
UNKNOWN = "[UNK]"
KINDS = ("words", "bpe")
BYTES = 256
#: Scripts without spaces between words. Their characters are tokens, except kana.
CHARACTERS = r"\p{Han}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
KANA = r"\p{Hiragana}\p{Katakana}"
#: Pattern of a word, in the syntax of Oniguruma. A word is a run of letters, marks, digits
#: and underscores, with the joiners of Persian and Hindi, and with the end of an English
#: contraction (don't). Other apostrophes end a word: l'amour is two, as is b'text' in code.
WORD = (
    rf"[{CHARACTERS}]\p{{M}}*"
    r"|[\p{Hiragana}ー]+|[\p{Katakana}ー]+"
    rf"|[\w&&[^{CHARACTERS}{KANA}]][\w\x{{200C}}\x{{200D}}&&[^{CHARACTERS}{KANA}]]*"
    r"(?:'(?i:[stmd]|re|ve|ll)(?![\w']))?"
)


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents.

    Args:
        tokenizer: The ``tokenizers.Tokenizer`` that produced the ids.
        ids: Ids of the tokens, document after document; mapped if in a file. Unknown ones
            are left out, unless phrases are still to be found.
        bounds: Start of each document in ``ids``, and the end of the last.
        scratch: Folder of temporary files, or None if all arrays are in memory.
    """

    tokenizer: Any
    ids: Int32[np.ndarray, " tokens"]
    bounds: Int64[np.ndarray, " documents+1"]
    scratch: str | None = None

    @property
    def num_embeddings(self) -> int:
        """Vocabulary size, including the unknown token."""
        return self.tokenizer.get_vocab_size()

    @property
    def unknown(self) -> int | None:
        """Id of the unknown token, or None if the tokenizer can encode any text."""
        return self.tokenizer.token_to_id(UNKNOWN)

    def words(self) -> list[str]:
        """Return the token of each row."""
        return [self.tokenizer.id_to_token(row) for row in range(self.num_embeddings)]

    def counts(self) -> Int64[np.ndarray, " num_embeddings"]:
        """Return the number of occurrences of each token."""
        counts = np.zeros(self.num_embeddings, np.int64)
        for ids, _ in self.chunks():
            counts += np.bincount(ids, minlength=counts.size)
        return counts

    def chunks(
        self,
    ) -> Iterator[tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]]:
        """Yield the ids in parts, with the number of the document of each."""
        for lo in range(0, self.ids.size, CHUNK):
            hi = min(lo + CHUNK, self.ids.size)
            first = np.searchsorted(self.bounds, lo, side="right") - 1
            last = np.searchsorted(self.bounds, hi, side="left")
            lengths = np.diff(np.clip(self.bounds[first : last + 1], lo, hi))
            documents = np.repeat(np.arange(first, last, dtype=np.int32), lengths)
            yield self.ids[lo:hi], documents

    def subsampled(
        self, kept: Float32[np.ndarray, " num_embeddings"], rng: np.random.Generator
    ) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
        """Return ids drawn with the probability of each token, and their documents."""
        ids, documents = IdWriter(self.scratch), IdWriter(self.scratch)
        for some, numbers in self.chunks():
            is_kept = rng.random(some.size, dtype=np.float32) < kept[some]
            ids.append(some[is_kept])
            documents.append(numbers[is_kept])
        return ids.array(), documents.array()


class IdWriter:
    """Array of int32 that grows, in memory or in a temporary file.

    Args:
        scratch: Folder of the file, or None for memory. The file has no name there, so that
            nothing is left if the process is killed.
    """

    def __init__(self, scratch: str | os.PathLike[str] | None) -> None:
        self._file = None
        if scratch is not None:
            self._file = tempfile.TemporaryFile(dir=scratch)
        self._parts: list[np.ndarray] = []
        self.size = 0

    def append(self, ids: np.ndarray) -> None:
        """Add ids at the end."""
        ids = np.ascontiguousarray(ids, np.int32)
        self.size += ids.size
        if self._file is None:
            self._parts.append(ids)
        else:
            self._file.write(ids.data)

    def array(self) -> Int32[np.ndarray, " size"]:
        """Return all ids."""
        if self.size == 0:
            return np.empty(0, np.int32)
        if self._file is None:
            return np.concatenate(self._parts)
        self._file.flush()
        # Writable arrays alone have the type that kernels are compiled for.
        return np.asarray(np.memmap(self._file, np.int32, "r+", shape=(self.size,)))

    def __del__(self) -> None:
        # An array that is mapped needs the open file no longer.
        if self._file is not None:
            self._file.close()


def learn_tokenizer(
    documents: Iterable[Iterable[str]],
    *,
    kind: str = "words",
    size: int = 30_000,
    min_count: int = 5,
    lower: bool = False,
    pattern: str | None = None,
) -> Any:
    """Train a ``tokenizers.Tokenizer`` on the documents.

    Args:
        documents: Documents as iterables of text blocks.
        kind: ``"words"``: what ``pattern`` matches; rare words are unknown. ``"bpe"``:
            byte-pair encoding (Sennrich et al. 2016), which encodes any text.
        size: Largest vocabulary size.
        min_count: Least number of occurrences of a word or of a merged pair.
        lower: Lowercase the text.
        pattern: Regular expression of a word, in the syntax of Oniguruma. By default, a
            run of letters, digits and underscores, where contractions such as ``don't``
            are one word; in scripts without spaces between words, a character (Chinese,
            as BERT splits it; Japanese kanji; Thai, Lao, Khmer and Burmese, with its
            marks) or a run of kana.

    Example:
        >>> tokenizer = learn_tokenizer([["We don’t know 東京."]], min_count=1)
        >>> tokenizer.encode("don't 東京 We").tokens
        ["don't", '東', '京', 'We']
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    one_of("kind", kind, KINDS)
    positive("size", size)
    positive("min_count", min_count)
    if kind == "bpe" and size < BYTES:
        raise ValueError(
            f"vocabulary size must be at least {BYTES} for bpe, a piece for each byte, "
            f"got {size}"
        )
    if kind == "bpe" and pattern is not None:
        raise ValueError(f"pattern is for words, but the tokenizer is bpe, got {pattern!r}")
    common: dict[str, Any] = {
        "vocab_size": size,
        "min_frequency": min_count,
        "show_progress": False,
    }
    steps: list[Any] = [normalizers.Lowercase()] if lower else []
    if kind == "words":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(
            _regex(WORD if pattern is None else pattern), behavior="removed", invert=True
        )
        if pattern is None:
            # Both apostrophes spell the same word.
            steps.insert(0, normalizers.Replace("’", "'"))
        trainer = trainers.WordLevelTrainer(special_tokens=[UNKNOWN], **common)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **common)
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.train_from_iterator(map(_texts, _batches(documents)), trainer)
    return tokenizer


def tokenized(
    documents: Iterable[Iterable[str]],
    tokenizer: Any,
    *,
    keep_unknown: bool = False,
    scratch: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Tokenize documents to ids.

    Args:
        documents: Documents as iterables of text blocks.
        tokenizer: A ``tokenizers.Tokenizer``.
        keep_unknown: Whether to keep unknown tokens, for phrases.
        scratch: Folder of a temporary file for the ids; None keeps them in memory.
    """
    unknown = None if keep_unknown else tokenizer.token_to_id(UNKNOWN)
    ids, bounds = IdWriter(scratch), array("q", [0])
    for batch in _batches(documents):
        encoded = tokenizer.encode_batch_fast(_texts(batch), add_special_tokens=False)
        for (is_end, _), encoding in zip(batch, encoded, strict=True):
            found = np.array(encoding.ids, np.int32)
            ids.append(found if unknown is None else found[found != unknown])
            if is_end:
                bounds.append(ids.size)
    folder = None if scratch is None else os.fspath(scratch)
    return Corpus(tokenizer, ids.array(), np.array(bounds, np.int64), folder)


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    # tokenizers raises a bare Exception.
    try:
        return Regex(pattern)
    except Exception as error:
        raise ValueError(f"pattern must be a regular expression: {error}") from None


def _batches(documents: Iterable[Iterable[str]]) -> Iterator[list[tuple[bool, str]]]:
    """Yield blocks of text in batches, each with whether it ends its document."""
    batch: list[tuple[bool, str]] = []
    size = 0
    for is_end, text in _blocks(documents):
        batch.append((is_end, text))
        size += len(text)
        if size >= MAX_CHARACTERS or len(batch) == MAX_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _blocks(documents: Iterable[Iterable[str]]) -> Iterator[tuple[bool, str]]:
    for document in documents:
        blocks = iter(document)
        text = next(blocks, "")
        for following in blocks:
            yield False, text
            text = following
        yield True, text


def _texts(batch: list[tuple[bool, str]]) -> list[str]:
    return [text for _, text in batch]
