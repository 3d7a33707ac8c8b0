"""From text to a folder of vectors: tokenizer, learning, saving, going on.

What is written says what it was learned from and how, so that an interrupted run goes on
with the same setting and refuses another text.
"""

import hashlib
import os
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..files.safetensors import KEY, OLD_KEY
from . import folder as folders
from .corpus import Corpus, learn_tokenizer, tokenized
from .neighbors import Neighbors, neighbors
from .skipgram import Progress, Setting, SkipGram
from .text import documents_in, standard_library
from .vectors import Vectors, open_tokenizer

#: Words whose neighbours show what was learned from Python's source.
OF_PYTHON = ("TypeError", "lock", "socket", "red", "append", "wait")
#: Which of the frequent words stand for another text, counted from the most frequent.
RANKS = (10, 20, 40, 80, 160, 320)
#: Frequent words that are shorter say little.
SHORTEST = 4

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that a table follows from, beside the text.

    Args:
        kind: ``"words"`` or ``"bpe"``; see :func:`firstlayer.word_vectors.corpus.learn_tokenizer`.
        size: How many words or pieces to have at most.
        min_count: How often a word must occur.
        lower: Whether capitals are made small.
        setting: How to learn.
    """

    kind: str = "words"
    size: int = 30_000
    min_count: int = 5
    lower: bool = False
    setting: Setting = field(default_factory=Setting)


@dataclass(frozen=True)
class Trained:
    """What came of it.

    Args:
        folder: Where it was written.
        finished: Whether all epochs are done.
        num_embeddings: How many rows the table has.
        embedding_dim: Their width.
        documents: How many documents there were.
        tokens: How many tokens they had that are in the vocabulary.
        progress: How far it got, and how fast.
        neighbors: Of a few frequent words.
    """

    folder: str
    finished: bool
    num_embeddings: int
    embedding_dim: int
    documents: int
    tokens: int
    progress: Progress
    neighbors: list[Neighbors]


def train(
    paths: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    recipe: Recipe | None = None,
    replace: bool = False,
    tell: Tell = lambda what: None,
    report: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Learn a table from text and write it to a folder, all of it or nothing.

    Args:
        paths: Files of UTF-8 text, ``-`` for standard input; none for Python's own source.
        folder: Where to.
        recipe: How; None goes on with what an interrupted run has left in the folder.
        replace: Whether a folder of ours that is there may be replaced.
        tell: Called with what is being done.
        report: Called now and then with how far learning is.
        stop: Asked again and again; what has been learned is saved once it says so.
    """
    resume = recipe is None
    folders.check_place(folder, replace=replace or resume)
    state = folders.read_state(folder) if resume else None
    files = list(paths) or standard_library()
    tell(f"reading {len(files):,} file{'s' * (len(files) != 1)}")
    documents = documents_in(files)
    if recipe is None:
        recipe, corpus = _again(folder, documents)
    else:
        corpus = tokenized(documents, _learned(documents, recipe))
    model = SkipGram(corpus, recipe.setting)
    if state is not None:
        model.load_state_dict(state)
    tell(f"learning {corpus.num_embeddings:,} rows from {corpus.ids.size:,} tokens")
    finished, last = _run(model, report=report, stop=stop)
    weight = model.result()
    if not np.isfinite(weight).all():
        raise ValueError(
            f"learning came apart with lr {recipe.setting.lr}: take a lower lr"
        )
    folders.write_folder(
        folder,
        weight,
        tokenizer=corpus.tokenizer,
        about={**asdict(recipe), "text": _digest(corpus)},
        state=None if finished else model.state_dict(),
        replace=True,
    )
    return Trained(
        folder=os.fspath(folder),
        finished=finished,
        num_embeddings=corpus.num_embeddings,
        embedding_dim=recipe.setting.embedding_dim,
        documents=len(documents),
        tokens=corpus.ids.size,
        progress=last,
        neighbors=_shown(corpus, weight, OF_PYTHON if not paths else ()),
    )


def _learned(documents: Any, recipe: Recipe) -> Any:
    return learn_tokenizer(
        documents,
        kind=recipe.kind,
        size=recipe.size,
        min_count=recipe.min_count,
        lower=recipe.lower,
    )


def _again(folder: str | os.PathLike[str], documents: Any) -> tuple[Recipe, Corpus]:
    """Return the recipe of an interrupted run and its text, if it is the same."""
    config = folders.read_config(folder)
    about = config.get(KEY, config.get(OLD_KEY))
    match about:
        case {"setting": dict(setting), "text": str(digest), **rest}:
            recipe = _recipe(setting, rest, folder=folder)
        case _:
            raise ValueError(f"{os.fspath(folder)} does not say how it was learned")
    corpus = tokenized(documents, open_tokenizer(Path(folder) / folders.TOKENIZER))
    if _digest(corpus) != digest:
        raise ValueError(f"the text is not the one that {os.fspath(folder)} began with")
    return recipe, corpus


def _recipe(setting: Any, rest: Any, *, folder: str | os.PathLike[str]) -> Recipe:
    try:
        return Recipe(**rest, setting=Setting(**setting))
    except (TypeError, ValueError) as error:
        what = reprlib.repr(str(error))
        raise ValueError(
            f"{os.fspath(folder)} has a config that is not ours: {what}"
        ) from None


def _run(model: SkipGram, *, report: Any, stop: Any) -> tuple[bool, Progress]:
    last = Progress(model.done, 0, 0.0, 0.0, float("nan"))

    def keep(progress: Progress) -> None:
        nonlocal last
        last = progress
        report(progress)

    return model.run(report=keep, stop=stop), last


def _digest(corpus: Corpus) -> str:
    hashed = hashlib.blake2b(corpus.ids.tobytes(), digest_size=16)
    hashed.update(corpus.bounds.tobytes())
    return hashed.hexdigest()


def _shown(corpus: Corpus, weight: np.ndarray, words: Sequence[str]) -> list[Neighbors]:
    spelled = [corpus.tokenizer.id_to_token(row) for row in range(corpus.num_embeddings)]
    vectors = Vectors(spelled, weight, corpus.tokenizer)
    known = [word for word in words if word in vectors.rows]
    chosen = known or _frequent(vectors, corpus)
    found = neighbors(vectors, [[(1, word)] for word in chosen], count=5)
    return [replace(one, query=vectors.shown(vectors.rows[one.query])) for one in found]


def _frequent(vectors: Vectors, corpus: Corpus) -> list[str]:
    """Return a few frequent words that have a meaning of their own, mostly."""
    counts = np.bincount(corpus.ids, minlength=corpus.num_embeddings)
    order = [vectors.words[row] for row in np.argsort(-counts, kind="stable")]
    # Of pieces, those that begin a word.
    order = [word for word in order if word.startswith("Ġ")] or order
    shown = (word for word in order if word.strip("Ġ").isalpha())
    long = [word for word in shown if len(word.strip("Ġ")) >= SHORTEST]
    return [long[rank] for rank in RANKS if rank < len(long)] or long[:3]
