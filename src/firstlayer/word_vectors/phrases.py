"""Words that occur together more often than by chance, joined to phrases: ``new_york``.

A pass joins pairs of neighboring tokens from left to right (Mikolov et al. 2013), and a
second pass can join phrases of the first. The score of a pair is that of gensim's
``Phrases``::

    (count(a b) - min_count) · (number of distinct words and pairs) / (count(a) · count(b))

Pairs are found among token ids, in one pass over the ids and no more memory than the
distinct pairs need.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from .._check import not_negative_number, positive
from .corpus import UNKNOWN, Corpus, IdWriter

#: Between the words of a phrase.
JOINT = "_"
#: Distinct pairs that are counted; above it, rare pairs are forgotten, as in word2phrase.
MAX_PAIRS = 1 << 24
#: Bits of the second id in the key of a pair.
BITS = 32

#: Ids, and the document of each.
Chunk = tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]


@dataclass(frozen=True)
class Pairs:
    """Pairs of tokens that one pass joins.

    Args:
        keys: Both ids of each pair as one number, sorted.
        ids: Id of the phrase of each pair.
    """

    keys: Int64[np.ndarray, " pairs"]
    ids: Int32[np.ndarray, " pairs"]


@dataclass(frozen=True)
class Phrases:
    """Pairs of tokens that become one token, pass after pass.

    Args:
        passes: Pairs of each pass.

    Example:
        >>> words = {"new": 1, "york": 2, "times": 3, "new_york": 4, "new_york_times": 5}
        >>> pairs = [[["new", "york"]], [["new_york", "times"]]]
        >>> phrases = Phrases.from_words(pairs, words)
        >>> phrases.joined([[3, 1, 2, 3], [1], [2, 1, 2]])
        [[3, 5], [1], [2, 4]]
    """

    passes: tuple[Pairs, ...]

    @classmethod
    def from_words(
        cls, passes: Iterable[Iterable[Sequence[str]]], vocabulary: dict[str, int]
    ) -> "Phrases":
        """Return phrases from pairs of words; an unknown word is a KeyError."""
        tables = []
        for pairs in passes:
            items = {
                key_of(vocabulary[one], vocabulary[other]): vocabulary[one + JOINT + other]
                for one, other in pairs
            }
            keys = np.array(sorted(items), np.int64)
            ids = np.array([items[key] for key in keys.tolist()], np.int32)
            tables.append(Pairs(keys, ids))
        return cls(tuple(tables))

    def to_words(self, words: list[str]) -> list[list[list[str]]]:
        """Return pairs of words by pass, the argument of :meth:`from_words`."""
        return [
            [[words[i] for i in ids_of(key)] for key in pairs.keys.tolist()]
            for pairs in self.passes
        ]

    def to_json(self, words: list[str]) -> str:
        """Return the content of ``phrases.json``: pairs of words by pass."""
        return json.dumps(self.to_words(words), ensure_ascii=False)

    def joined(self, texts: list[list[int]]) -> list[list[int]]:
        """Return the ids of texts with their phrases joined."""
        lengths = [len(ids) for ids in texts]
        flat = np.array([i for ids in texts for i in ids], np.int32)
        numbers = np.repeat(np.arange(len(texts), dtype=np.int32), lengths)
        out: list[list[int]] = [[] for _ in texts]
        for ids, documents in self.join_chunks([(flat, numbers)]):
            for i, document in zip(ids.tolist(), documents.tolist(), strict=True):
                out[document].append(i)
        return out

    def join_chunks(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield ids with their phrases joined; a phrase may cross the end of a chunk."""
        stream = iter(chunks)
        for pairs in self.passes:
            stream = _join(stream, pairs)
        return stream


def key_of(one: Any, other: Any) -> Any:
    """Return the key of a pair of ids, or of arrays of them."""
    return one << BITS | other


def ids_of(key: Any) -> Any:
    """Return the two ids of a key, or of an array of keys."""
    return key >> BITS, key & (1 << BITS) - 1


def learn_phrases(
    corpus: Corpus,
    *,
    passes: int,
    min_count: int = 5,
    threshold: float = 10.0,
    size: int = 30_000,
) -> tuple[Corpus, Phrases]:
    """Find phrases; return the text with its phrases joined, and the phrases.

    The tokenizer of the result has the most frequent words and phrases, and all words that
    these phrases consist of.

    Args:
        corpus: Text with its unknown tokens.
        passes: Number of passes; each may double the length of phrases.
        min_count: Least number of occurrences of a word or phrase.
        threshold: Least score of a pair; a lower one joins more.
        size: Largest vocabulary size.
    """
    names, found = find_phrases(
        corpus, passes=passes, min_count=min_count, threshold=threshold
    )
    vocabulary = _vocabulary(names, found, corpus, size=size, min_count=min_count)
    pairs = [
        [pair for pair in one if vocabulary.keys() >= {*pair, JOINT.join(pair)}]
        for one in found.to_words(names)
    ]
    tokenizer = _with_vocabulary(corpus.tokenizer, vocabulary)
    phrases = Phrases.from_words(pairs, vocabulary)
    rows = np.array([vocabulary.get(name, vocabulary[UNKNOWN]) for name in names], np.int32)
    known = Corpus(tokenizer, corpus.ids, corpus.bounds, corpus.scratch)
    chunks = ((rows[ids], documents) for ids, documents in corpus.chunks())
    return _collected(known, phrases.join_chunks(chunks)), phrases


def join_phrases(corpus: Corpus, phrases: Phrases) -> Corpus:
    """Return a text with its phrases joined, without unknown tokens."""
    return _collected(corpus, phrases.join_chunks(corpus.chunks()))


def find_phrases(
    corpus: Corpus, *, passes: int, min_count: int, threshold: float
) -> tuple[list[str], Phrases]:
    """Return the names of words and phrases by id, and all phrases that score enough."""
    positive("passes", passes)
    positive("min_count", min_count)
    not_negative_number("threshold", threshold)
    names = corpus.words()
    numbers = {name: i for i, name in enumerate(names)}
    found = Phrases(())
    for _ in range(passes):
        counts = _PairCounts(len(names), unknown=numbers[UNKNOWN])
        for ids, documents in found.join_chunks(corpus.chunks()):
            counts.add(ids, documents)
        keys = counts.above(threshold, min_count=min_count)
        ids = np.empty(keys.size, np.int32)
        for i, key in enumerate(keys.tolist()):
            name = JOINT.join(names[part] for part in ids_of(key))
            ids[i] = numbers.setdefault(name, len(names))
            if ids[i] == len(names):
                names.append(name)
        found = Phrases((*found.passes, Pairs(keys, ids)))
    return names, found


class _PairCounts:
    """Number of occurrences of tokens and of pairs of neighbors.

    Args:
        num_tokens: Number of different ids.
        unknown: Id of unknown tokens, which are part of no pair.
    """

    def __init__(self, num_tokens: int, *, unknown: int) -> None:
        self.tokens = np.zeros(num_tokens, np.int64)
        self.unknown = unknown
        self.keys = self.counts = np.empty(0, np.int64)
        self._new: list[tuple[np.ndarray, np.ndarray]] = []
        self._last: Chunk = np.empty(0, np.int32), np.empty(0, np.int32)
        self._pruned = 0

    def add(self, ids: np.ndarray, documents: np.ndarray) -> None:
        """Count the next ids of the text."""
        self.tokens += np.bincount(ids, minlength=self.tokens.size)
        ids = np.append(self._last[0], ids)
        documents = np.append(self._last[1], documents)
        self._last = ids[-1:], documents[-1:]
        is_known = ids != self.unknown
        is_pair = is_known[1:] & is_known[:-1] & (documents[1:] == documents[:-1])
        keys = key_of(ids[:-1][is_pair].astype(np.int64), ids[1:][is_pair])
        self._new.append(np.unique(keys, return_counts=True))
        if sum(new.size for new, _ in self._new) > max(1 << 20, self.keys.size // 2):
            self._merge()

    def above(self, threshold: float, *, min_count: int) -> Int64[np.ndarray, " pairs"]:
        """Return the keys of pairs with a higher score than the threshold."""
        self._merge()
        tokens = self.tokens.copy()
        tokens[self.unknown] = 0
        distinct = np.count_nonzero(tokens) + self.keys.size
        one, other = ids_of(self.keys)
        product = tokens[one].astype(np.float64) * tokens[other]
        scores = (self.counts - min_count) / product * distinct
        return self.keys[scores > threshold]

    def _merge(self) -> None:
        parts = [(self.keys, self.counts), *self._new]
        keys = np.concatenate([keys for keys, _ in parts])
        counts = np.concatenate([counts for _, counts in parts])
        self._new = []
        if not keys.size:
            return
        order = np.argsort(keys, kind="stable")
        keys, counts = keys[order], counts[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        self.keys, self.counts = keys[starts], np.add.reduceat(counts, starts)
        while self.keys.size > MAX_PAIRS:
            self._pruned += 1
            is_kept = self.counts > self._pruned
            self.keys, self.counts = self.keys[is_kept], self.counts[is_kept]


def _join(chunks: Iterable[Chunk], pairs: Pairs) -> Iterator[Chunk]:
    """Yield ids with pairs joined from left to right."""
    # The last token of a chunk may begin a pair.
    rest: Chunk = np.empty(0, np.int32), np.empty(0, np.int32)
    for some, numbers in chunks:
        ids, documents = np.append(rest[0], some), np.append(rest[1], numbers)
        starts, phrases = _starts(ids, documents, pairs)
        ids[starts] = phrases
        is_kept = np.ones(ids.size, bool)
        is_kept[starts + 1] = False
        end = ids.size - int(ids.size > 0 and bool(is_kept[-1]))
        rest = ids[end:], documents[end:]
        is_kept = is_kept[:end]
        yield ids[:end][is_kept], documents[:end][is_kept]
    yield rest


def _starts(
    ids: np.ndarray, documents: np.ndarray, pairs: Pairs
) -> tuple[Int64[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """Return where pairs begin that do not overlap, and their phrases."""
    if not pairs.keys.size or ids.size < 2:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    keys = key_of(ids[:-1].astype(np.int64), ids[1:])
    found = np.minimum(np.searchsorted(pairs.keys, keys), pairs.keys.size - 1)
    is_pair = (pairs.keys[found] == keys) & (documents[:-1] == documents[1:])
    places = np.flatnonzero(is_pair)
    # In a run of overlapping pairs, every second one is joined, beginning with the first.
    is_first = np.append(True, np.diff(places) > 1)[: places.size]
    first = np.maximum.accumulate(np.where(is_first, places, 0))
    starts = places[(places - first) % 2 == 0]
    return starts, pairs.ids[found[starts]]


def _vocabulary(
    names: list[str], phrases: Phrases, corpus: Corpus, *, size: int, min_count: int
) -> dict[str, int]:
    """Return the ids of the most frequent words and phrases, and of all their parts."""
    counts = np.zeros(len(names), np.int64)
    for ids, _ in phrases.join_chunks(corpus.chunks()):
        counts += np.bincount(ids, minlength=counts.size)
    parts: dict[int, tuple[int, int]] = {}
    for pairs in phrases.passes:
        for key, i in zip(pairs.keys.tolist(), pairs.ids.tolist(), strict=True):
            parts.setdefault(i, ids_of(key))

    def whole(i: int) -> set[int]:
        return {i}.union(*map(whole, parts.get(i, ())))

    unknown = names.index(UNKNOWN)
    kept = {unknown}
    order = np.argsort(-counts, kind="stable")
    for i in order[counts[order] >= min_count].tolist():
        needed = whole(i) - kept
        if len(kept) + len(needed) <= size:
            kept |= needed
    ranked = [unknown, *(i for i in order.tolist() if i in kept and i != unknown)]
    return {names[i]: row for row, i in enumerate(ranked)}


def _with_vocabulary(tokenizer: Any, vocabulary: dict[str, int]) -> Any:
    """Return a tokenizer of words with another vocabulary."""
    from tokenizers import Tokenizer

    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = vocabulary
    return Tokenizer.from_str(json.dumps(content))


def _collected(corpus: Corpus, chunks: Iterable[Chunk]) -> Corpus:
    """Return a corpus of the known ids in chunks."""
    ids = IdWriter(corpus.scratch)
    lengths = np.zeros(corpus.bounds.size - 1, np.int64)
    for some, documents in chunks:
        is_known = some != corpus.unknown
        ids.append(some[is_known])
        documents = documents[is_known]
        if documents.size:
            first, last = int(documents[0]), int(documents[-1])
            lengths[first : last + 1] += np.bincount(documents - first)
    bounds = np.append(0, np.cumsum(lengths))
    return Corpus(corpus.tokenizer, ids.array(), bounds, corpus.scratch)
