"""Word vectors beside gensim's Word2Vec, on one text: ``python -m benchmarks.train``.

Both learn skip-gram with negative sampling from Python's standard library, tokenized once,
with the same width, window, noise, thinning and epochs, on two threads. How good a table
is, Python says itself: names of a kind (exceptions, error numbers, methods of ``str``) are
used alike, so a name's nearest neighbours should be of its kind. gensim's rows are also
judged with their mean taken away, as ours are.
"""

import argparse
import ast
import builtins
import calendar
import errno
import json
import keyword
import math
import signal
import sys
import time
import token
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from firstlayer import set_num_threads
from firstlayer.word_vectors.corpus import Corpus, learn_tokenizer, tokenized
from firstlayer.word_vectors.neighbors import units
from firstlayer.word_vectors.skipgram import SkipGramOptions, SkipGram
from firstlayer.word_vectors.text import documents_in, standard_library

THREADS = 2
#: How many neighbours are looked at, and how many names a kind must have in the text.
NEAREST, FEWEST = 5, 6
# gensim drops what a sentence has beyond this.
SENTENCE = 10_000
#: How many times as fast as gensim ours has to be.
FASTER = 2.0


@dataclass(frozen=True)
class Learned:
    """What one of them made of the text.

    Args:
        who: Which library.
        seconds: How long learning took, tokenizing left aside.
        tokens_per_second: How fast that was.
        alike: Part of a name's nearest neighbours that are of its kind.
        kinds: The same by kind.
    """

    who: str
    seconds: float
    tokens_per_second: float
    alike: float
    kinds: dict[str, float]


def kinds() -> dict[str, list[str]]:
    """Return names of a kind, as the running Python knows them."""

    def classes(module: object, base: type) -> list[str]:
        held = vars(module).items()
        return [n for n, v in held if isinstance(v, type) and issubclass(v, base)]

    def methods(of: type, dunder: bool) -> list[str]:
        return [name for name in dir(of) if name.startswith("__") == dunder]

    return {
        "exceptions": classes(builtins, BaseException),
        "keywords": list(keyword.kwlist),
        "error numbers": [name for name in dir(errno) if name.startswith("E")],
        "signals": [name for name in dir(signal) if name.startswith("SIG")],
        "syntax": classes(ast, ast.AST),
        "methods of str": methods(str, dunder=False),
        "operators": methods(int, dunder=True),
        "mathematics": [name for name in dir(math) if not name.startswith("_")],
        "tokens": [name for name in token.__all__ if name.isupper()],
        "months": list(calendar.month_name)[1:],
    }


def alike(weight: np.ndarray, rows: dict[str, int]) -> dict[str, float]:
    """Return for each kind the part of its names' neighbours that are of that kind."""
    unit, found = units(weight), {}
    for kind, names in kinds().items():
        own = [rows[name] for name in names if name in rows]
        if len(own) < FEWEST:
            continue
        cosines = unit[own] @ unit.T
        cosines[np.arange(len(own)), own] = -np.inf
        near = np.argsort(-cosines, axis=1)[:, :NEAREST]
        found[kind] = float(np.isin(near, own).mean())
    return found


def ours(corpus: Corpus, setting: SkipGramOptions) -> tuple[float, np.ndarray]:
    """Return how long it takes with Firstlayer, and the table."""
    set_num_threads(THREADS)
    # Compiling is done once on a machine; a second's worth of it is no speed of learning.
    warm = SkipGram(corpus, setting)
    batches = iter(range(2))
    warm.run(stop=lambda: next(batches, None) is None)
    begun = time.perf_counter()
    model = SkipGram(corpus, setting)
    model.run()
    return time.perf_counter() - begun, model.result()


def gensims(corpus: Corpus, setting: SkipGramOptions) -> tuple[float, np.ndarray]:
    """Return how long it takes with gensim, and the table."""
    from gensim.models import Word2Vec

    sentences = list(_sentences(corpus))
    model = Word2Vec(
        vector_size=setting.embedding_dim,
        window=setting.window,
        negative=setting.negatives,
        sample=setting.sample,
        epochs=setting.epochs,
        seed=setting.seed,
        sg=1,
        min_count=1,
        workers=THREADS,
    )
    model.build_vocab(sentences)
    begun = time.perf_counter()
    model.train(sentences, total_examples=len(sentences), epochs=setting.epochs)
    seconds = time.perf_counter() - begun
    weight = np.zeros((corpus.num_embeddings, setting.embedding_dim), np.float32)
    names: Any = model.wv.index_to_key
    rows = np.array([int(name) for name in names])
    weight[rows] = model.wv.vectors
    return seconds, weight


def _sentences(corpus: Corpus) -> Iterator[list[str]]:
    # A word's name is its id: gensim asks for strings.
    names = list(map(str, range(corpus.num_embeddings)))
    for lo, hi in zip(corpus.bounds[:-1], corpus.bounds[1:], strict=True):
        for start in range(lo, hi, SENTENCE):
            yield [names[i] for i in corpus.ids[start : min(start + SENTENCE, hi)]]


def measured(setting: SkipGramOptions) -> Iterator[Learned]:
    """Yield what each of them makes of Python's standard library."""
    documents = documents_in(standard_library())
    corpus = tokenized(documents, learn_tokenizer(documents))
    rows = corpus.tokenizer.get_vocab()

    def result(who: str, seconds: float, weight: np.ndarray) -> Learned:
        found = alike(weight, rows)
        speed = corpus.ids.size * setting.epochs / seconds
        return Learned(who, seconds, speed, float(np.mean(list(found.values()))), found)

    yield result("firstlayer", *ours(corpus, setting))
    seconds, weight = gensims(corpus, setting)
    yield result("gensim", seconds, weight)
    weight[1:] -= weight[1:].mean(axis=0)
    yield result("gensim, mean taken away", seconds, weight)


def main() -> None:
    """Learn, print speed and quality, and fail if ours is slower than it has to be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--epochs", type=int, default=SkipGramOptions.epochs)
    parser.add_argument("--dim", type=int, default=SkipGramOptions.embedding_dim)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    setting = SkipGramOptions(embedding_dim=options.dim, epochs=options.epochs, seed=options.seed)
    found = []
    for learned in measured(setting):
        found.append(learned)
        if not options.json:
            print(_line(learned), flush=True)
    if options.json:
        json.dump([asdict(learned) for learned in found], sys.stdout, indent=2)
        print()
    mine, theirs, *_ = found
    sys.exit(theirs.seconds < FASTER * mine.seconds or mine.alike < theirs.alike)


def _line(learned: Learned) -> str:
    each = ", ".join(f"{kind} {part:.2f}" for kind, part in learned.kinds.items())
    return (
        f"{learned.who:<24} {learned.seconds:6.1f} s  {learned.tokens_per_second:9,.0f} "
        f"tokens/s  neighbours of a kind {learned.alike:.3f} ({each})"
    )


if __name__ == "__main__":
    main()
