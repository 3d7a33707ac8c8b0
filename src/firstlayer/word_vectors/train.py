"""Train word vectors from text files: tokenize, train, save, resume.

The folder records its hyper-parameters and a digest of the text, so an interrupted run
resumes with the same settings and rejects a different text.
"""

import hashlib
import os
import reprlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..files.atomic import Opener
from ..files.checkpoint import read_bytes
from ..files.safetensors import KEY, OLD_KEY
from ..vector_files import folder as folders
from .corpus import Corpus, learn_tokenizer, tokenized
from .neighbors import Neighbors, neighbors
from .skipgram import Progress, SkipGram, SkipGramOptions
from .text import documents_in, standard_library
from .vectors import Vectors, parse_tokenizer

#: Words whose neighbors are shown after training on Python's source.
PYTHON_WORDS = ("TypeError", "lock", "socket", "red", "append", "wait")
#: Frequency ranks of the words shown for other texts.
SHOWN_RANKS = (10, 20, 40, 80, 160, 320)
#: Shorter words are not shown.
MIN_SHOWN_LENGTH = 4

Tell = Callable[[str], None]


@dataclass(frozen=True)
class TrainingOptions:
    """Tokenizer and training options.

    Args:
        kind: ``"words"`` or ``"bpe"``; see
            :func:`firstlayer.word_vectors.corpus.learn_tokenizer`.
        size: Largest vocabulary size.
        min_count: Least number of occurrences of a word.
        lower: Lowercase the text.
        setting: Hyper-parameters of skip-gram.
    """

    kind: str = "words"
    size: int = 30_000
    min_count: int = 5
    lower: bool = False
    setting: SkipGramOptions = field(default_factory=SkipGramOptions)


@dataclass(frozen=True)
class Trained:
    """Result of a training run.

    Args:
        folder: Output folder.
        finished: Whether all epochs are done.
        num_embeddings: Number of rows.
        embedding_dim: Width of each row.
        documents: Number of documents.
        tokens: Number of known tokens.
        progress: Final progress.
        neighbors: Neighbors of a few frequent words.
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
    recipe: TrainingOptions | None = None,
    replace: bool = False,
    tell: Tell = lambda what: None,
    report: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    save_every: float = 300.0,
) -> Trained:
    """Train a table on text and write it atomically to a folder.

    Args:
        paths: UTF-8 text files, ``-`` for standard input, empty for Python's own source.
        folder: Output folder.
        recipe: Training options. None resumes the interrupted run in the folder.
        replace: Whether to replace an existing folder of word vectors.
        tell: Called with a description of each phase.
        report: Called regularly with the progress.
        stop: Called before each batch; when it returns True the state is saved.
        save_every: Seconds between saves of the state while training, from which a killed
            run resumes.
    """
    resume = recipe is None
    folders.check_output_folder(folder, replace=replace or resume)
    files = list(paths) or standard_library()
    tell(f"reading {len(files):,} file{'s' * (len(files) != 1)}")
    documents = documents_in(files)
    state = None
    if recipe is None:
        recipe, corpus, state = folders.read_one_save(
            folder, lambda opener: _resumed(folder, documents, opener)
        )
    else:
        corpus = tokenized(documents, _tokenizer(documents, recipe))
    model = SkipGram(corpus, recipe.setting)
    if state is not None:
        model.load_state_dict(state)
    tell(f"training {corpus.num_embeddings:,} rows from {corpus.ids.size:,} tokens")
    about = {**asdict(recipe), "text": _digest(corpus)}

    def save(*, finished: bool) -> np.ndarray:
        weight = model.result()
        if not np.isfinite(weight).all():
            raise ValueError(
                f"training diverged with lr {about['setting']['lr']} (not finite): use a "
                "lower lr"
            )
        state = None if finished else model.state_dict()
        folders.write_folder(
            folder,
            weight,
            tokenizer=corpus.tokenizer,
            about=about,
            state=state,
            replace=True,
        )
        return weight

    finished, last = _run(model, report=report, stop=_saving(stop, save, save_every))
    weight = save(finished=finished)
    return Trained(
        folder=os.fspath(folder),
        finished=finished,
        num_embeddings=corpus.num_embeddings,
        embedding_dim=recipe.setting.embedding_dim,
        documents=len(documents),
        tokens=corpus.ids.size,
        progress=last,
        neighbors=_shown(corpus, weight, PYTHON_WORDS if not paths else ()),
    )


def _saving(
    stop: Callable[[], bool], save: Callable[..., Any], every: float
) -> Callable[[], bool]:
    """Return ``stop``, which also saves the state after every ``every`` seconds."""
    last = time.monotonic()

    def stop_or_save() -> bool:
        nonlocal last
        if time.monotonic() - last >= every:
            save(finished=False)
            last = time.monotonic()
        return stop()

    return stop_or_save


def _tokenizer(documents: Any, recipe: TrainingOptions) -> Any:
    return learn_tokenizer(
        documents,
        kind=recipe.kind,
        size=recipe.size,
        min_count=recipe.min_count,
        lower=recipe.lower,
    )


def _resumed(
    folder: str | os.PathLike[str], documents: Any, opener: Opener
) -> tuple[TrainingOptions, Corpus, dict[str, np.ndarray]]:
    """Return options, corpus and state of an interrupted run, if the text is the same."""
    state = folders.read_state(folder, opener=opener)
    config = folders.read_config(folder, opener=opener)
    about = config.get(KEY, config.get(OLD_KEY))
    match about:
        case {"setting": dict(setting), "text": str(digest), **rest}:
            rest.pop("generation", None)
            recipe = _recipe(setting, rest, folder=folder)
        case _:
            raise ValueError(f"{os.fspath(folder)} does not record how it was trained")
    tokens = Path(folder) / folders.TOKENIZER
    tokenizer = parse_tokenizer(read_bytes(tokens, opener=opener), tokens)
    corpus = tokenized(documents, tokenizer)
    if _digest(corpus) != digest:
        raise ValueError(
            f"the text differs from the one {os.fspath(folder)} was started with"
        )
    return recipe, corpus, state


def _recipe(setting: Any, rest: Any, *, folder: str | os.PathLike[str]) -> TrainingOptions:
    try:
        return TrainingOptions(**rest, setting=SkipGramOptions(**setting))
    except (TypeError, ValueError) as error:
        reason = reprlib.repr(str(error))
        raise ValueError(
            f"{os.fspath(folder)} has a config of another program: {reason}"
        ) from None


def _run(model: SkipGram, *, report: Any, stop: Any) -> tuple[bool, Progress]:
    last = Progress(model.done, 0, 0.0, 0.0, float("nan"))

    def remember(progress: Progress) -> None:
        nonlocal last
        last = progress
        report(progress)

    return model.run(report=remember, stop=stop), last


def _digest(corpus: Corpus) -> str:
    hashed = hashlib.blake2b(corpus.ids.tobytes(), digest_size=16)
    hashed.update(corpus.bounds.tobytes())
    return hashed.hexdigest()


def _shown(corpus: Corpus, weight: np.ndarray, words: Sequence[str]) -> list[Neighbors]:
    words_by_row = [
        corpus.tokenizer.id_to_token(row) for row in range(corpus.num_embeddings)
    ]
    vectors = Vectors(words_by_row, weight, corpus.tokenizer)
    known = [word for word in words if word in vectors.rows]
    chosen = known or _frequent(vectors, corpus)
    found = neighbors(vectors, [[(1, word)] for word in chosen], count=5)
    return [replace(one, query=vectors.shown(vectors.rows[one.query])) for one in found]


def _frequent(vectors: Vectors, corpus: Corpus) -> list[str]:
    """Return a few frequent words of several letters."""
    counts = np.bincount(corpus.ids, minlength=corpus.num_embeddings)
    order = [vectors.words[row] for row in np.argsort(-counts, kind="stable")]
    # For BPE, only pieces that begin a word.
    order = [word for word in order if word.startswith("Ġ")] or order
    shown = (word for word in order if word.strip("Ġ").isalpha())
    long = [word for word in shown if len(word.strip("Ġ")) >= MIN_SHOWN_LENGTH]
    return [long[rank] for rank in SHOWN_RANKS if rank < len(long)] or long[:3]
