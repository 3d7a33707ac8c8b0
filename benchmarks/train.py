"""Word vectors against gensim's Word2Vec on the same text: ``python -m benchmarks.train``.

Both train skip-gram with negative sampling on Python's standard library, tokenized once,
with the same width, window, negatives, subsampling and epochs, on two threads. Quality is
the share of a name's nearest neighbors that belong to its category (exceptions, error
numbers, methods of ``str``, …). gensim's rows are also evaluated with their mean
subtracted, as ours are.
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
from firstlayer.word_vectors.skipgram import SkipGram, SkipGramOptions
from firstlayer.word_vectors.text import documents_in, standard_library

THREADS = 2
#: Number of neighbors, and the least number of names a category must have in the text.
NEAREST, FEWEST = 5, 6
# gensim truncates longer sentences.
SENTENCE = 10_000
#: Required speed-up over gensim.
FASTER = 2.0


@dataclass(frozen=True)
class Result:
    """Speed and quality of one library.

    Args:
        library: Name of the library.
        seconds: Training time without tokenizing.
        tokens_per_second: Training speed.
        purity: Share of nearest neighbors in the same category.
        by_category: The same by category.
    """

    library: str
    seconds: float
    tokens_per_second: float
    purity: float
    by_category: dict[str, float]


def categories() -> dict[str, list[str]]:
    """Return names by category, taken from the running Python."""

    def classes(module: object, base: type) -> list[str]:
        items = vars(module).items()
        return [n for n, v in items if isinstance(v, type) and issubclass(v, base)]

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


def purity(weight: np.ndarray, rows: dict[str, int]) -> dict[str, float]:
    """Return for each category the share of nearest neighbors in the same category."""
    unit, shares = units(weight), {}
    for category, names in categories().items():
        own = [rows[name] for name in names if name in rows]
        if len(own) < FEWEST:
            continue
        cosines = unit[own] @ unit.T
        cosines[np.arange(len(own)), own] = -np.inf
        near = np.argsort(-cosines, axis=1)[:, :NEAREST]
        shares[category] = float(np.isin(near, own).mean())
    return shares


def ours(corpus: Corpus, setting: SkipGramOptions) -> tuple[float, np.ndarray]:
    """Return the training time of Firstlayer and the table."""
    set_num_threads(THREADS)
    # Kernels compile once per machine, so compilation is not timed.
    warm = SkipGram(corpus, setting)
    batches = iter(range(2))
    warm.run(stop=lambda: next(batches, None) is None)
    start = time.perf_counter()
    model = SkipGram(corpus, setting)
    model.run()
    return time.perf_counter() - start, model.result()


def gensim(corpus: Corpus, setting: SkipGramOptions) -> tuple[float, np.ndarray]:
    """Return the training time of gensim and the table."""
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
    start = time.perf_counter()
    model.train(sentences, total_examples=len(sentences), epochs=setting.epochs)
    seconds = time.perf_counter() - start
    weight = np.zeros((corpus.num_embeddings, setting.embedding_dim), np.float32)
    names: Any = model.wv.index_to_key
    rows = np.array([int(name) for name in names])
    weight[rows] = model.wv.vectors
    return seconds, weight


def _sentences(corpus: Corpus) -> Iterator[list[str]]:
    # gensim needs strings, so each word is named by its id.
    names = list(map(str, range(corpus.num_embeddings)))
    for lo, hi in zip(corpus.bounds[:-1], corpus.bounds[1:], strict=True):
        for start in range(lo, hi, SENTENCE):
            yield [names[i] for i in corpus.ids[start : min(start + SENTENCE, hi)]]


def measured(setting: SkipGramOptions) -> Iterator[Result]:
    """Yield the results of both libraries on Python's standard library."""
    documents = documents_in(standard_library())
    corpus = tokenized(documents, learn_tokenizer(documents))
    rows = corpus.tokenizer.get_vocab()

    def result(library: str, seconds: float, weight: np.ndarray) -> Result:
        shares = purity(weight, rows)
        speed = corpus.ids.size * setting.epochs / seconds
        return Result(library, seconds, speed, float(np.mean([*shares.values()])), shares)

    yield result("firstlayer", *ours(corpus, setting))
    seconds, weight = gensim(corpus, setting)
    yield result("gensim", seconds, weight)
    weight[1:] -= weight[1:].mean(axis=0)
    yield result("gensim, mean subtracted", seconds, weight)


def main() -> None:
    """Train, print speed and quality, and exit with 1 if ours is too slow or worse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--epochs", type=int, default=SkipGramOptions.epochs)
    parser.add_argument("--dim", type=int, default=SkipGramOptions.embedding_dim)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    setting = SkipGramOptions(
        embedding_dim=options.dim, epochs=options.epochs, seed=options.seed
    )
    results = []
    for result in measured(setting):
        results.append(result)
        if not options.json:
            print(_line(result), flush=True)
    if options.json:
        json.dump([asdict(result) for result in results], sys.stdout, indent=2)
        print()
    mine, theirs, *_ = results
    sys.exit(theirs.seconds < FASTER * mine.seconds or mine.purity < theirs.purity)


def _line(result: Result) -> str:
    each = ", ".join(f"{name} {part:.2f}" for name, part in result.by_category.items())
    return (
        f"{result.library:<24} {result.seconds:6.1f} s  {result.tokens_per_second:9,.0f} "
        f"tokens/s  neighbors in the same category {result.purity:.3f} ({each})"
    )


if __name__ == "__main__":
    main()
