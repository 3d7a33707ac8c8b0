"""Read the files of gensim: ``KeyedVectors.save`` and ``Word2Vec.save``, from 0.12 on.

Such a file is a pickle, next to ``.npy`` files with its large arrays. gensim is not needed,
and nothing in the pickle is run (:mod:`firstlayer.files.pickles`).
"""

from pathlib import Path
from typing import Any

import numpy as np

from ..files.checkpoint import open_regular, read_bytes, shortened
from ..files.npy import read_npy_header
from ..files.pickles import COMMON, Record, array_in, read_pickle
from .table import Subwords, VectorTable
from .text import decoded

#: Classes whose attributes are read, and those that occur in models.
CLASSES = {
    "gensim.models.keyedvectors": (
        "KeyedVectors",
        "Word2VecKeyedVectors",
        "WordEmbeddingsKeyedVectors",
        "EuclideanKeyedVectors",
        "FastTextKeyedVectors",
        "Doc2VecKeyedVectors",
        "Vocab",
        "CompatVocab",
        "SimpleVocab",
    ),
    "gensim.models.word2vec": (
        "Word2Vec",
        "Word2VecVocab",
        "Word2VecTrainables",
        "Vocab",
    ),
    "gensim.models.fasttext": (
        "FastText",
        "FastTextKeyedVectors",
        "FastTextVocab",
        "FastTextTrainables",
    ),
    "gensim.models.deprecated.keyedvectors": ("KeyedVectors", "Vocab"),
    "gensim.models.deprecated.word2vec": ("Word2Vec", "Vocab"),
    "gensim.models.wrappers.fasttext": ("FastText", "FastTextKeyedVectors"),
    "gensim.models.callbacks": ("CallbackAny2Vec",),
    "gensim.utils": ("call_on_class_only",),
    "numpy.random": ("__RandomState_ctor",),
    "numpy.random._pickle": (
        "__randomstate_ctor",
        "__bit_generator_ctor",
        "__generator_ctor",
    ),
    "numpy.random._mt19937": ("MT19937",),
}
NAMES = COMMON | {(m, name): Record for m, names in CLASSES.items() for name in names}
#: The attribute with the words, and that with the rows, newest first.
WORDS = ("index_to_key", "index2word", "index2entity")
ROWS = ("vectors", "syn0")
#: Largest pickle: words and small arrays. Rows of a large table are in a file of their own.
MAX_PICKLE_BYTES = 1 << 33


def read_gensim(path: Path) -> VectorTable:
    """Return the words and rows of a file."""
    content = read_bytes(path, max_bytes=MAX_PICKLE_BYTES)
    saved = read_pickle(content, names=NAMES, source=str(path))
    if not isinstance(saved, Record):
        raise ValueError(f"{path} is a pickle without gensim's vectors")
    model, prefix = saved.attributes, f"{path}"
    vectors = model.get("wv")
    if isinstance(vectors, Record):
        # Word2Vec keeps its vectors in an object of their own.
        prefix, own = f"{path}.wv", vectors.attributes
    else:
        own = model
    words = _words(own, path)
    subwords = _subwords(own, len(words), prefix, path)
    if subwords is not None:
        numbers = np.arange(len(words))
        encoded = [word.encode() for word in words]
        return VectorTable(words, subwords.means(encoded, numbers)[0], subwords=subwords)
    rows = _array(own, ROWS, prefix, path)
    if rows is None:
        raise ValueError(f"{path} has no vectors that are known from gensim")
    if rows.ndim != 2 or len(rows) < len(words):
        raise ValueError(
            f"{path} has {len(words)} words, but vectors of shape {rows.shape}"
        )
    return VectorTable(words, _float32(rows[: len(words)], path))


def _words(own: dict[str, Any], path: Path) -> list[str]:
    for name in WORDS:
        words = own.get(name)
        if isinstance(words, list):
            if not words:
                raise ValueError(f"{path} has no words")
            return [_word(word) for word in words]
    raise ValueError(f"{path} has no list of words that is known from gensim")


def _word(key: Any) -> str:
    if isinstance(key, str):
        return key
    # A pickle of Python 2 has bytes.
    if isinstance(key, bytes):
        return decoded(key)
    return str(key) if isinstance(key, int | np.integer) else repr(key)[:100]


def _array(
    own: dict[str, Any], names: tuple[str, ...], prefix: str, path: Path
) -> np.ndarray | None:
    """Return an array of the pickle, or of the file that gensim puts it into."""
    separate = own.get("__numpys")
    for name in names:
        array = array_in(own.get(name))
        if array is not None:
            return array
        if isinstance(separate, list) and (name in separate or name.encode() in separate):
            return _separate_array(Path(f"{prefix}.{name}.npy"), path)
    return None


def _separate_array(file: Path, path: Path) -> np.ndarray:
    try:
        header = read_npy_header(file)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} keeps its vectors in {file.name}, which is missing in its folder"
        ) from None
    with open_regular(file) as opened:
        array = np.memmap(opened, header.dtype, "c", header.start, header.shape)
        return np.asarray(array)


def _subwords(
    own: dict[str, Any], num_words: int, prefix: str, path: Path
) -> Subwords | None:
    """Return the n-grams of a FastText model of gensim 4, or None."""
    vocabulary = _array(own, ("vectors_vocab",), prefix, path)
    ngrams = _array(own, ("vectors_ngrams",), prefix, path)
    if vocabulary is None or ngrams is None:
        return None
    match own:
        case {"min_n": int(least), "max_n": int(most), "bucket": int(buckets)}:
            pass
        case _:
            return None
    if not own.get("compatible_hash", True):
        return None
    # Before version 4, gensim kept only the rows of n-grams that occur.
    if ngrams.ndim != 2 or len(ngrams) != buckets or len(vocabulary) != num_words:
        return None
    if vocabulary.shape[1:] != ngrams.shape[1:] or not 0 < least <= most <= 64:
        raise ValueError(
            f"{path} has n-grams of lengths {shortened(str((least, most)))} and shape "
            f"{ngrams.shape}, but words of shape {vocabulary.shape}"
        )
    table = np.concatenate([_float32(vocabulary, path), _float32(ngrams, path)])
    return Subwords(table, buckets, (least, most))


def _float32(array: np.ndarray, path: Path) -> np.ndarray:
    if array.dtype.kind != "f":
        raise ValueError(f"{path} must have vectors of floats, got {array.dtype}")
    return np.ascontiguousarray(array, np.float32)
