"""Word vectors against gensim's on the same text: ``python -m benchmarks.train``.

Both train skip-gram, CBOW, or skip-gram with character n-grams (gensim's FastText), with
negative sampling on the same tokens, with the same width, window, negatives, subsampling
and epochs, on two threads, each with its default learning rate. ``--methods`` selects the
methods, and ``--tokens`` shortens the text: gensim needs half an hour for n-grams on the
whole prose.

On Python's standard library, quality is the share of a name's nearest neighbors that belong
to its category (exceptions, error numbers, methods of ``str``, …). On English prose
(``benchmarks/prose.py``), it is the rank correlation with the human scores of WordSim-353
and SimLex-999 and the accuracy on Google's analogies, from the files that gensim installs.
Results are means over the seeds.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from firstlayer import set_num_threads
from firstlayer.word_vectors.corpus import Corpus, learn_tokenizer, tokenized
from firstlayer.word_vectors.documents import documents_in
from firstlayer.word_vectors.evaluate import evaluate
from firstlayer.word_vectors.neighbors import units
from firstlayer.word_vectors.text import standard_library
from firstlayer.word_vectors.vectors import Vectors
from firstlayer.word_vectors.word2vec import Word2Vec, Word2VecOptions

from .prose import prose_files

THREADS = 2
#: Number of neighbors, and the least number of names a category must have in the text.
NEAREST, FEWEST = 5, 6
# gensim truncates longer sentences.
SENTENCE = 10_000
#: Required speed-up over gensim, by method. A step of CBOW does so little arithmetic that
#: the copies of rows, which make results independent of threads, take most of its time.
FASTER = {"skipgram": 2.0, "subwords": 2.0, "cbow": 1.0}
#: Options of each method, and those of gensim.
METHODS = {
    "skipgram": ({}, {"sg": 1}),
    "cbow": ({"method": "cbow"}, {"sg": 0}),
    "subwords": ({"buckets": 200_000}, {"sg": 1, "bucket": 200_000}),
}
#: Evaluation files that gensim installs.
FILES = {
    "WordSim-353": "wordsim353.tsv",
    "SimLex-999": "simlex999.txt",
    "analogies": "questions-words.txt",
}


@dataclass(frozen=True)
class Result:
    """Speed and quality of one library on one text, as means over seeds.

    Args:
        text: ``"Python"`` or ``"prose"``.
        method: One of :data:`METHODS`.
        library: Name of the library.
        seconds: Training time without tokenizing.
        tokens_per_second: Training speed.
        scores: Scores that must not be worse than gensim's.
        details: Further scores.
    """

    text: str
    method: str
    library: str
    seconds: float
    tokens_per_second: float
    scores: dict[str, float]
    details: dict[str, float]


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


def ours(corpus: Corpus, setting: Word2VecOptions, method: str) -> tuple[float, np.ndarray]:
    """Return the training time of Firstlayer and the table."""
    set_num_threads(THREADS)
    # Kernels compile once per machine, so compilation is not timed.
    warm = Word2Vec(corpus, setting)
    batches = iter(range(2))
    warm.run(stop=lambda: next(batches, None) is None)
    start = time.perf_counter()
    model = Word2Vec(corpus, setting)
    model.run()
    return time.perf_counter() - start, model.result()


def gensim(
    corpus: Corpus, setting: Word2VecOptions, method: str
) -> tuple[float, np.ndarray]:
    """Return the training time of gensim and the table."""
    from gensim.models import FastText
    from gensim.models import Word2Vec as GensimWord2Vec

    sentences = list(_sentences(corpus))
    model = (FastText if setting.buckets else GensimWord2Vec)(
        vector_size=setting.embedding_dim,
        window=setting.window,
        negative=setting.negatives,
        sample=setting.sample,
        epochs=setting.epochs,
        seed=setting.seed,
        min_count=1,
        **METHODS[method][1],
        workers=THREADS,
    )
    model.build_vocab(sentences)
    start = time.perf_counter()
    model.train(sentences, total_examples=len(sentences), epochs=setting.epochs)
    seconds = time.perf_counter() - start
    weight = np.zeros((corpus.num_embeddings, setting.embedding_dim), np.float32)
    names: Any = model.wv.index_to_key
    rows = np.array([corpus.tokenizer.token_to_id(name) for name in names])
    weight[rows] = model.wv.vectors
    return seconds, weight


def _sentences(corpus: Corpus) -> Iterator[list[str]]:
    names = [corpus.tokenizer.id_to_token(row) for row in range(corpus.num_embeddings)]
    for lo, hi in zip(corpus.bounds[:-1], corpus.bounds[1:], strict=True):
        for start in range(lo, hi, SENTENCE):
            yield [names[i] for i in corpus.ids[start : min(start + SENTENCE, hi)]]


def python_scores(weight: np.ndarray, corpus: Corpus) -> dict[str, float]:
    """Return the mean share of neighbors in the same category, then by category."""
    shares = purity(weight, corpus.tokenizer.get_vocab())
    return {"same category": float(np.mean([*shares.values()])), **shares}


def prose_scores(weight: np.ndarray, corpus: Corpus) -> dict[str, float]:
    """Return the scores on the evaluation files that gensim installs."""
    from gensim.test.utils import datapath

    words = [corpus.tokenizer.id_to_token(row) for row in range(len(weight))]
    vectors = Vectors(words, weight, corpus.tokenizer)
    return {
        name: evaluate(vectors, Path(datapath(file))).score for name, file in FILES.items()
    }


def measured(
    text: str,
    method: str,
    corpus: Corpus,
    setting: Word2VecOptions,
    *,
    seeds: int,
    score: Callable[[np.ndarray, Corpus], dict[str, float]],
    num_scores: int,
) -> Iterator[Result]:
    """Yield the results of both libraries on a text.

    Args:
        text: Name of the text.
        method: One of :data:`METHODS`.
        corpus: The text.
        setting: Hyper-parameters.
        seeds: Number of seeds.
        score: Function that returns scores by name.
        num_scores: Number of leading scores that are compared.
    """
    for library, train in (("firstlayer", ours), ("gensim", gensim)):
        seconds, found = [], []
        for seed in range(seeds):
            duration, weight = train(corpus, replace(setting, seed=seed), method)
            seconds.append(duration)
            found.append(score(weight, corpus))
        means = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
        names = list(means)
        yield Result(
            text=text,
            method=method,
            library=library,
            seconds=float(np.mean(seconds)),
            tokens_per_second=corpus.ids.size * setting.epochs / float(np.mean(seconds)),
            scores={name: means[name] for name in names[:num_scores]},
            details={name: means[name] for name in names[num_scores:]},
        )


def corpus_of(files: list[Path], *, lower: bool, tokens: int | None) -> Corpus:
    """Return the first ``tokens`` token ids of files."""
    documents = documents_in(files)
    corpus = tokenized(documents, learn_tokenizer(documents, lower=lower))
    bounds = np.minimum(corpus.bounds, corpus.ids.size if tokens is None else tokens)
    return replace(corpus, ids=corpus.ids[: bounds[-1]], bounds=bounds)


def main() -> None:
    """Train, print speed and quality, and exit with 1 if ours is too slow or worse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--epochs", type=int, default=Word2VecOptions.epochs)
    parser.add_argument("--dim", type=int, default=Word2VecOptions.embedding_dim)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--text", choices=["Python", "prose", "both"], default="both")
    parser.add_argument("--prose", nargs="*", type=Path, help="files instead of packages")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS)[:1])
    parser.add_argument("--tokens", type=int, help="length of each text, in tokens")
    options = parser.parse_args()
    failed, results = False, []
    for text in ("Python", "prose") if options.text == "both" else (options.text,):
        if text == "Python":
            files, score, num_scores = standard_library(), python_scores, 1
        else:
            files, score = options.prose or prose_files(), prose_scores
            num_scores = len(FILES)
        corpus = corpus_of(files, lower=text == "prose", tokens=options.tokens)
        scoring: dict[str, Any] = {"score": score, "num_scores": num_scores}
        for method in options.methods:
            setting = Word2VecOptions(
                embedding_dim=options.dim, epochs=options.epochs, **METHODS[method][0]
            )
            pair = []
            for result in measured(
                text, method, corpus, setting, seeds=options.seeds, **scoring
            ):
                pair.append(result)
                if not options.json:
                    print(_line(result), flush=True)
            mine, theirs = pair
            failed |= theirs.seconds < FASTER[method] * mine.seconds
            failed |= any(
                mine.scores[name] < value for name, value in theirs.scores.items()
            )
            results += pair
    if options.json:
        json.dump([asdict(result) for result in results], sys.stdout, indent=2)
        print()
    sys.exit(failed)


def _line(result: Result) -> str:
    scores = {**result.scores, **result.details}
    each = ", ".join(f"{name} {part:.3f}" for name, part in scores.items())
    return (
        f"{result.text:<6} {result.method:<8} {result.library:<10} "
        f"{result.seconds:6.1f} s  {result.tokens_per_second:9,.0f} tokens/s  {each}"
    )


if __name__ == "__main__":
    main()
