"""Train a tokenizer on text, and tokenize the text to ids.

A corpus is a list of documents, each read in blocks that end between words
(:mod:`firstlayer.word_vectors.text`). Only the ids must fit into memory, not the text.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from .._check import one_of, positive

#: Blocks tokenized per batch.
BATCH = 64
#: Token of every word outside the vocabulary.
UNKNOWN = "[UNK]"
KINDS = ("words", "bpe")
BYTES = 256


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents.

    Args:
        tokenizer: The ``tokenizers.Tokenizer`` that produced the ids.
        ids: Ids of all known tokens, document after document.
        bounds: Start of each document in ``ids``, and the end of the last.
    """

    tokenizer: Any
    ids: Int32[np.ndarray, " tokens"]
    bounds: Int64[np.ndarray, " documents+1"]

    @property
    def num_embeddings(self) -> int:
        """Vocabulary size, including the unknown token."""
        return self.tokenizer.get_vocab_size()

    @property
    def unknown(self) -> int | None:
        """Id of the unknown token, or None if the tokenizer can encode any text."""
        return self.tokenizer.token_to_id(UNKNOWN)


def learn_tokenizer(
    documents: Iterable[Iterable[str]],
    *,
    kind: str = "words",
    size: int = 30_000,
    min_count: int = 5,
    lower: bool = False,
) -> Any:
    """Train a ``tokenizers.Tokenizer`` on the documents.

    Args:
        documents: Documents as iterables of text blocks.
        kind: ``"words"``: runs of letters, digits and underscores; rare words are unknown.
            ``"bpe"``: byte-pair encoding (Sennrich et al. 2016), which encodes any text.
        size: Largest vocabulary size.
        min_count: Least number of occurrences of a word or of a merged pair.
        lower: Lowercase the text.
    """
    from tokenizers import (
        Regex,
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
    common: dict[str, Any] = {
        "vocab_size": size,
        "min_frequency": min_count,
        "show_progress": False,
    }
    if kind == "words":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(
            Regex(r"\w+"), behavior="removed", invert=True
        )
        trainer = trainers.WordLevelTrainer(special_tokens=[UNKNOWN], **common)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **common)
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    blocks = (block for document in documents for block in document)
    tokenizer.train_from_iterator(blocks, trainer)
    return tokenizer


def tokenized(documents: Iterable[Iterable[str]], tokenizer: Any) -> Corpus:
    """Tokenize documents to ids, dropping unknown tokens."""
    unknown = tokenizer.token_to_id(UNKNOWN)
    documents = list(documents)
    lengths, parts = np.zeros(len(documents), np.int64), []
    numbered = ((i, block) for i, blocks in enumerate(documents) for block in blocks)
    while batch := list(itertools.islice(numbered, BATCH)):
        texts = [text for _, text in batch]
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for (document, _), encoding in zip(batch, encoded, strict=True):
            ids = np.array(encoding.ids, np.int32)
            parts.append(ids if unknown is None else ids[ids != unknown])
            lengths[document] += parts[-1].size
    ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return Corpus(tokenizer, ids, np.append(0, np.cumsum(lengths)))
