"""Train word vectors from text files: tokenize, train, save, resume.

The folder records its hyper-parameters and a digest of the text, so an interrupted run
resumes with the same settings and rejects a different text. A finished run that kept its
state (both tables) can be trained for more epochs, on the same text or another.
"""

import hashlib
import os
import reprlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

import numpy as np

from .._check import not_negative, not_negative_number
from ..files.atomic import Opener
from ..files.checkpoint import read_bytes
from ..files.safetensors import KEY, OLD_KEY
from ..vector_files import folder as folders
from .corpus import Corpus, learn_tokenizer, tokenized
from .documents import Documents, ReadingOptions, documents_in
from .neighbors import Neighbors, neighbors
from .phrases import Phrases, join_phrases, learn_phrases
from .text import standard_library
from .vectors import Vectors, parse_phrases, parse_tokenizer
from .word2vec import Progress, Word2Vec, Word2VecOptions

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
        pattern: Regular expression of a word; None for the default one.
        phrases: Passes that join words to phrases, such as ``new_york``; see
            :func:`firstlayer.word_vectors.phrases.learn_phrases`.
        phrase_threshold: Least score of a phrase.
        reading: Options of reading files.
        keep_state: Whether the folder of a finished run keeps its state, from which it can
            be trained further. It takes twice the size of the table.
        setting: Hyper-parameters of training.
    """

    kind: str = "words"
    size: int = 30_000
    min_count: int = 5
    lower: bool = False
    pattern: str | None = None
    phrases: int = 0
    phrase_threshold: float = 10.0
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    keep_state: bool = False
    setting: Word2VecOptions = field(default_factory=Word2VecOptions)

    def __post_init__(self) -> None:
        not_negative("phrases", self.phrases)
        not_negative_number("phrase_threshold", self.phrase_threshold)
        if self.phrases and self.kind != "words":
            raise ValueError(f"phrases are of words, but the tokenizer is {self.kind}")
        if self.kind == "bpe" and self.setting.buckets:
            raise ValueError(
                f"buckets must be 0 with kind 'bpe', got {self.setting.buckets}: its "
                "pieces encode any word"
            )


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


@dataclass(frozen=True)
class MoreEpochs:
    """Additional epochs of a finished run.

    The learning rate starts again and decays over these epochs. The text may be another
    one; words that are not in the vocabulary are ignored.

    Args:
        epochs: Number of passes over the text.
        lr: Initial learning rate; None for that of the finished run.
    """

    epochs: int
    lr: float | None = None


def train(
    paths: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    recipe: TrainingOptions | None = None,
    more: MoreEpochs | None = None,
    replace: bool = False,
    tell: Tell = lambda what: None,
    report: Callable[[Progress], None] = lambda progress: None,
    report_reading: Callable[[float], None] = lambda share: None,
    stop: Callable[[], bool] = lambda: False,
    save_every: float = 300.0,
    scratch: str | os.PathLike[str] | None = None,
) -> Trained:
    """Train a table on text and write it atomically to a folder.

    Args:
        paths: Text files and folders of them, ``-`` for standard input, empty for Python's
            own source.
        folder: Output folder.
        recipe: Training options. None resumes the interrupted run in the folder.
        more: Additional epochs for the finished run in the folder; None for none.
        replace: Whether to replace an existing folder of word vectors.
        tell: Called with a description of each phase.
        report: Called regularly with the progress.
        report_reading: Called while the text is read with the share that was read.
        stop: Called before each batch; when it returns True the state is saved.
        save_every: Seconds between saves of the state while training, from which a killed
            run resumes.
        scratch: Folder of temporary files with the token ids, by default that of
            ``folder``. They have the size of eight to twelve bytes per token.
    """
    resume = recipe is None
    folders.check_output_folder(folder, replace=replace or resume)
    scratch = Path(folder).resolve().parent if scratch is None else scratch
    text = _Text(list(paths) or standard_library(), scratch, tell, report_reading)
    if recipe is None:
        run = _resumed_run(folder, text, more)
    else:
        run = _new_run(recipe, text)
    recipe, corpus, phrases, state = run.recipe, run.corpus, run.phrases, run.state
    model = Word2Vec(corpus, recipe.setting)
    if state is not None:
        model.load_state_dict(state)
    tell(f"training {corpus.num_embeddings:,} rows from {corpus.ids.size:,} tokens")
    about = {**asdict(recipe), "text": _digest(corpus)}

    def save(*, finished: bool) -> np.ndarray:
        weight = model.result()
        if not np.isfinite(weight).all():
            raise ValueError(
                f"training diverged with lr {model.setting.initial_lr} (not finite): use a "
                "lower lr"
            )
        is_kept = about["keep_state"] or not finished
        folders.write_folder(
            folder,
            weight,
            tokenizer=corpus.tokenizer,
            about=about,
            state=model.state_dict() if is_kept else None,
            phrases=phrases and phrases.to_json(corpus.words()),
            subwords=model.subwords,
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
        documents=corpus.bounds.size - 1,
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
        pattern=recipe.pattern,
    )


@dataclass(frozen=True)
class _Text:
    """The text of a run.

    Args:
        files: Files and folders.
        scratch: Folder of temporary files.
        tell: Called with a description of each phase.
        report: Called with the share that was read.
    """

    files: Sequence[str | os.PathLike[str]]
    scratch: str | os.PathLike[str]
    tell: Tell
    report: Callable[[float], None]

    def documents(self, options: ReadingOptions) -> Documents:
        documents = documents_in(self.files, options, scratch=self.scratch)
        documents.report = self.report
        self.tell(f"reading {documents.description}")
        return documents

    def tokenized(
        self, documents: Documents, tokenizer: Any, *, keep_unknown: bool
    ) -> Corpus:
        return tokenized(
            documents, tokenizer, keep_unknown=keep_unknown, scratch=self.scratch
        )


@dataclass(frozen=True)
class _Run:
    """Options, text and state that training begins with.

    Args:
        recipe: Its options.
        corpus: The text.
        phrases: Phrases of the text, or None.
        state: State of an earlier run, or None.
    """

    recipe: TrainingOptions
    corpus: Corpus
    phrases: Phrases | None = None
    state: dict[str, np.ndarray] | None = None


def _new_run(recipe: TrainingOptions, text: _Text) -> _Run:
    documents = text.documents(recipe.reading)
    documents.report = lambda share: text.report(share / 2)
    tokenizer = _tokenizer(documents, recipe)
    documents.report = lambda share: text.report((1 + share) / 2)
    corpus = text.tokenized(documents, tokenizer, keep_unknown=recipe.phrases > 0)
    if not recipe.phrases:
        return _Run(recipe, corpus)
    text.tell("joining phrases")
    corpus, phrases = learn_phrases(
        corpus,
        passes=recipe.phrases,
        min_count=recipe.min_count,
        threshold=recipe.phrase_threshold,
        size=recipe.size,
    )
    count = sum(one.keys.size for one in phrases.passes)
    hint = "" if count else ": a lower threshold joins more"
    text.tell(f"found {count:,} phrase{'s' * (count != 1)}{hint}")
    return _Run(recipe, corpus, phrases)


def _resumed_run(
    folder: str | os.PathLike[str], text: _Text, more: MoreEpochs | None
) -> _Run:
    """Return a run that goes on with the state in a folder."""
    name = os.fspath(folder)
    saved = folders.read_one_save(folder, lambda opener: _saved(folder, opener, more))
    recipe, state = saved.recipe, saved.state
    is_finished = _completed_epochs(state, name) >= recipe.setting.epochs
    if more is None and is_finished:
        raise ValueError(f"{name} is finished: give a number of epochs to train it further")
    if more is not None and not is_finished:
        raise ValueError(
            f"{name} holds an interrupted run: resume it before training more epochs"
        )
    documents = text.documents(recipe.reading)
    keep_unknown = saved.phrases is not None
    corpus = text.tokenized(documents, saved.tokenizer, keep_unknown=keep_unknown)
    if saved.phrases is not None:
        corpus = join_phrases(corpus, saved.phrases)
    is_same = _digest(corpus) == saved.digest
    if more is not None:
        if not is_same:
            text.tell(f"the text differs from the one {name} was trained on")
        recipe = _extended(recipe, more)
        state = {**state, "place": np.zeros(2, np.int64)}
    elif not is_same:
        raise ValueError(f"the text differs from the one {name} was started with")
    return _Run(recipe, corpus, saved.phrases, state)


@dataclass(frozen=True)
class _Saved:
    """A run in a folder: its options, tokenizer and phrases, digest of the text, state."""

    recipe: TrainingOptions
    tokenizer: Any
    phrases: Phrases | None
    digest: str
    state: dict[str, np.ndarray]


def _saved(
    folder: str | os.PathLike[str], opener: Opener, more: MoreEpochs | None
) -> _Saved:
    name = os.fspath(folder)
    try:
        state = folders.read_state(folder, opener=opener)
    except FileNotFoundError:
        if more is None:
            raise
        raise FileNotFoundError(
            f"{name} has no state to train further from: it was trained without "
            "--keep-state"
        ) from None
    config = folders.read_config(folder, opener=opener)
    about = config.get(KEY, config.get(OLD_KEY))
    match about:
        case {"setting": dict(setting), "text": str(digest), **rest}:
            rest.pop("generation", None)
            recipe = _recipe(setting, rest, folder=folder)
        case _:
            raise ValueError(f"{name} does not record how it was trained")
    tokens = Path(folder) / folders.TOKENIZER
    tokenizer = parse_tokenizer(read_bytes(tokens, opener=opener), tokens)
    phrases = None
    if recipe.phrases:
        path = Path(folder) / folders.PHRASES
        vocabulary = tokenizer.get_vocab()
        phrases = parse_phrases(read_bytes(path, opener=opener), vocabulary, path)
    return _Saved(recipe, tokenizer, phrases, digest, state)


def _completed_epochs(state: dict[str, np.ndarray], name: str) -> int:
    place = state.get("place")
    if place is None or place.shape != (2,):
        raise ValueError(f"{name} does not hold the state of a run: it has no place")
    return int(place[0])


def _extended(recipe: TrainingOptions, more: MoreEpochs) -> TrainingOptions:
    old = recipe.setting
    setting = with_changes(
        old,
        epochs=more.epochs,
        lr=old.lr if more.lr is None else more.lr,
        earlier_epochs=old.earlier_epochs + old.epochs,
    )
    return with_changes(recipe, setting=setting)


def _recipe(setting: Any, rest: Any, *, folder: str | os.PathLike[str]) -> TrainingOptions:
    try:
        # Earlier versions had no options of reading.
        reading = ReadingOptions(**rest.pop("reading", {}))
        return TrainingOptions(**rest, reading=reading, setting=Word2VecOptions(**setting))
    except (TypeError, ValueError) as error:
        reason = reprlib.repr(str(error))
        raise ValueError(
            f"{os.fspath(folder)} has a config of another program: {reason}"
        ) from None


def _run(model: Word2Vec, *, report: Any, stop: Any) -> tuple[bool, Progress]:
    last = Progress(model.done, 0, 0.0, 0.0, float("nan"))

    def remember(progress: Progress) -> None:
        nonlocal last
        last = progress
        report(progress)

    return model.run(report=remember, stop=stop), last


def _digest(corpus: Corpus) -> str:
    hashed = hashlib.blake2b(corpus.ids.data, digest_size=16)
    hashed.update(corpus.bounds.data)
    return hashed.hexdigest()


def _shown(corpus: Corpus, weight: np.ndarray, words: Sequence[str]) -> list[Neighbors]:
    vectors = Vectors(corpus.words(), weight, corpus.tokenizer)
    known = [word for word in words if word in vectors.rows]
    chosen = known or _frequent(vectors, corpus)
    found = neighbors(vectors, [[(1, word)] for word in chosen], count=5)
    return [
        with_changes(one, query=vectors.shown(vectors.rows[one.query])) for one in found
    ]


def _frequent(vectors: Vectors, corpus: Corpus) -> list[str]:
    """Return a few frequent words of several letters."""
    counts = corpus.counts()
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    order = [vectors.words[row] for row in order]
    # For BPE, only pieces that begin a word.
    order = [word for word in order if word.startswith("Ġ")] or order
    shown = (word for word in order if word.strip("Ġ").isalpha())
    long = [word for word in shown if len(word.strip("Ġ")) >= MIN_SHOWN_LENGTH]
    return [long[rank] for rank in SHOWN_RANKS if rank < len(long)] or long[:3]
