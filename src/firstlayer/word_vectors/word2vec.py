"""Word vectors by skip-gram or CBOW with negative sampling (Mikolov et al. 2013).

Two tables are trained by stochastic gradient descent. The dot product of a context word's
row in the first table with the center word's row in the second is increased, and those with
random negatives are decreased. With CBOW, the mean of the context words' rows takes the
place of each row. The first table is the result.

As in the word2vec program, frequent words are subsampled, the reach of each window is drawn
uniformly up to the largest one, and the learning rate decays linearly. Unlike there, the
context words of a position share its negatives, and a row of CBOW gets its own share of the
mean's gradient, not all of it (Irsoy et al. 2021).

With rows of character n-grams, the vector of a word is the mean of its own row and those of
its n-grams, each of which gets the gradient of the mean, as in fastText (Bojanowski et al.
2017). Words outside of the vocabulary then have vectors too.

All random draws depend only on the seed, the epoch and the position in the text, and sums
have a fixed order: the same seed gives the same bits with any number of threads, with or
without an interruption.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from .. import kernels
from .._check import not_negative, one_of, positive
from ..vector_files.folder import MAX_LENGTH
from ..vector_files.table import Subwords, bracketed
from .corpus import Corpus

#: Negatives are drawn in proportion to this power of the word counts.
NOISE_POWER = 0.75
#: Final learning rate as a fraction of the initial one.
FINAL_LR = 1e-3
MAX_WINDOW, MAX_NEGATIVES = 16, 1000
#: Default learning rate of each method.
LEARNING_RATES = {"skipgram": 0.05, "cbow": 0.3}
#: Most rows of a table: their numbers are int32.
MAX_ROWS = 2**31 - 1
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Word2VecOptions:
    """Hyper-parameters of skip-gram and CBOW.

    Args:
        method: ``"skipgram"``: each context word predicts the center word. ``"cbow"``: the
            mean of the context words predicts it.
        embedding_dim: Width of each row.
        window: Largest distance of a context word, from 1 to 16.
        negatives: Negatives per center word, shared by its context words, at most 1000.
        sample: Words above this frequency are subsampled.
        epochs: Number of passes over the text.
        lr: Initial learning rate. It decays linearly. None is 0.05 for skip-gram and 0.3
            for CBOW.
        batch: Center words that are trained in parallel. The result depends on it, but not
            on the number of threads.
        seed: Seed of all random draws.
        buckets: Number of rows of character n-grams, to which n-grams are hashed; 0 for
            none. fastText has 2,000,000.
        min_n: Shortest n-gram, in characters with the brackets of ``<word>``.
        max_n: Longest n-gram.
        earlier_epochs: Epochs that the tables were trained before; their random draws are
            not repeated.
    """

    method: str = "skipgram"
    embedding_dim: int = 128
    window: int = 5
    negatives: int = 5
    sample: float = 1e-3
    epochs: int = 5
    lr: float | None = None
    batch: int = 512
    seed: int = 0
    buckets: int = 0
    min_n: int = 3
    max_n: int = 6
    earlier_epochs: int = 0

    def __post_init__(self) -> None:
        one_of("method", self.method, tuple(LEARNING_RATES))
        for name in ("embedding_dim", "window", "negatives", "epochs", "batch", "min_n"):
            positive(name, getattr(self, name))
        for name in ("seed", "buckets", "earlier_epochs"):
            not_negative(name, getattr(self, name))
        for name, most in (
            ("window", MAX_WINDOW),
            ("negatives", MAX_NEGATIVES),
            ("buckets", MAX_ROWS // 2),
            ("max_n", MAX_LENGTH),
        ):
            if getattr(self, name) > most:
                raise ValueError(
                    f"{name} must be at most {most}, got {getattr(self, name)}"
                )
        if self.max_n < self.min_n:
            raise ValueError(
                f"max_n must be at least min_n, which is {self.min_n}, got {self.max_n}"
            )
        for name, value in (("sample", self.sample), ("lr", self.initial_lr)):
            if not 0 < value <= LARGEST:
                raise ValueError(f"{name} must be positive and a float32, got {value}")

    @property
    def initial_lr(self) -> float:
        """Learning rate of the first batch."""
        return LEARNING_RATES[self.method] if self.lr is None else self.lr


@dataclass(frozen=True)
class Progress:
    """Training progress.

    Args:
        done: Completed fraction, from 0 to 1.
        tokens: Tokens processed over all epochs.
        seconds: Duration of this run.
        tokens_per_second: Speed of this run.
        loss: Mean loss in nats since the epoch began, per context word (skip-gram) or
            center word (CBOW).
    """

    done: float
    tokens: int
    seconds: float
    tokens_per_second: float
    loss: float


class Word2Vec:
    """Trainer of word vectors.

    Args:
        corpus: Tokenized text with at least two different tokens.
        setting: Hyper-parameters.

    Example:
        >>> from firstlayer.word_vectors.corpus import learn_tokenizer, tokenized
        >>> text = [["the cat sat. the dog sat. the cat ran. the dog ran. " * 50]]
        >>> corpus = tokenized(text, learn_tokenizer(text))
        >>> model = Word2Vec(corpus, Word2VecOptions(embedding_dim=8, epochs=2))
        >>> model.run()
        True
        >>> model.result().shape
        (6, 8)
    """

    def __init__(self, corpus: Corpus, setting: Word2VecOptions) -> None:
        kernels.require_compiler("training word vectors")
        self.corpus, self.setting = corpus, setting
        counts = corpus.counts()
        if np.count_nonzero(counts) < 2:
            raise ValueError(
                f"the text must have at least 2 different tokens in its vocabulary, "
                f"got {np.count_nonzero(counts)}: give more text or a lower min_count"
            )
        self._kept = kept_share(counts, sample=setting.sample)
        self._noise = kernels.noise_table(counts**NOISE_POWER)
        rows, width = counts.size + setting.buckets, setting.embedding_dim
        self.table = _initial_rows((rows, width), seed=setting.seed)
        # Tokens that never occur have no direction: the unknown one, and words of phrases
        # that occur in the phrases alone.
        self.table[: counts.size][counts == 0] = 0
        #: Rows of center words and negatives.
        self.others = kernels.aligned_zeros((counts.size, width))
        self._word_rows = self._rows_of_words() if setting.buckets else None
        self._workspace = kernels.word2vec_workspace(
            setting.batch,
            num_embeddings=counts.size,
            embedding_dim=width,
            window=setting.window,
            negatives=setting.negatives,
            buckets=setting.buckets,
        )
        #: Completed epochs, and completed positions of the current epoch.
        self.epoch, self.place = 0, 0
        #: Sum of the losses of the current epoch, and their number.
        self._loss = np.zeros(2)
        self._stream = self._documents = np.empty(0, np.int32)
        self._key = 0

    @property
    def done(self) -> float:
        """Completed fraction of training, from 0 to 1."""
        within = self.place / self._stream.size if self._stream.size else 0.0
        return (self.epoch + within) / self.setting.epochs

    def result(self) -> Float32[np.ndarray, "num_embeddings embedding_dim"]:
        """Return the vectors of all words. The row of unknown words is zero.

        With n-grams, the vector of a word is the mean of its rows.
        """
        subwords = self.subwords
        if subwords is None:
            return self.table.copy()
        return subwords.means(self._words(), np.arange(self.corpus.num_embeddings))[0]

    @property
    def subwords(self) -> Subwords | None:
        """The table with its rows of n-grams, or None if it has none."""
        if not self.setting.buckets:
            return None
        lengths = self.setting.min_n, self.setting.max_n
        return Subwords(self.table, self.setting.buckets, lengths)

    def _words(self) -> list[bytes]:
        """Return the words in UTF-8; the unknown token, which has no n-grams, is empty."""
        tokenizer, unknown = self.corpus.tokenizer, self.corpus.unknown
        return [
            b"" if row == unknown else tokenizer.id_to_token(row).encode()
            for row in range(self.corpus.num_embeddings)
        ]

    def _rows_of_words(self) -> Any:
        setting = self.setting
        lengths = setting.min_n, setting.max_n
        text, bounds = bracketed(self._words())
        return kernels.subword_rows(text, bounds, buckets=setting.buckets, lengths=lengths)

    def run(
        self,
        *,
        report: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
        every: float = 0.2,
    ) -> bool:
        """Train until all epochs are done or ``stop()`` returns True.

        Returns whether all epochs are done.
        """
        self._begin_epoch()
        started = last = time.perf_counter()
        start = self.done
        while self.epoch < self.setting.epochs:
            if stop():
                if report is not None:
                    report(self._progress(start, time.perf_counter() - started))
                return False
            self._step()
            now = time.perf_counter()
            finished = self.epoch == self.setting.epochs
            if report is not None and (now - last >= every or finished):
                report(self._progress(start, now - started))
                last = now
        return True

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state that :meth:`load_state_dict` resumes from, bit for bit."""
        return {
            "table": self.table.copy(),
            "others": self.others.copy(),
            "loss": self._loss.copy(),
            "place": np.array([self.epoch, self.place]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Resume a run with the same text and hyper-parameters."""
        own = self.state_dict()
        if missing := sorted(own.keys() - state.keys()):
            raise ValueError(f"state must have {missing[0]}, got {sorted(state)}")
        for name, array in own.items():
            if state[name].shape != array.shape:
                raise ValueError(
                    f"{name} must have shape {array.shape}, got {state[name].shape}"
                )
        self.table[:], self.others[:] = state["table"], state["others"]
        self._loss = np.array(state["loss"], np.float64)
        self.epoch, self.place = map(int, state["place"])
        self._stream = self._stream[:0]
        self._begin_epoch()

    def _progress(self, start: float, seconds: float) -> Progress:
        total = self.corpus.ids.size * self.setting.epochs
        loss, pairs = self._loss
        return Progress(
            done=self.done,
            tokens=round(total * self.done),
            seconds=seconds,
            tokens_per_second=total * (self.done - start) / max(seconds, 1e-9),
            loss=float(loss / max(pairs, 1)),
        )

    def _begin_epoch(self) -> None:
        """Draw the subsampled text of the next epoch."""
        if self._stream.size or self.epoch == self.setting.epochs:
            return
        epoch = self.setting.earlier_epochs + self.epoch
        rng = np.random.default_rng([self.setting.seed, epoch])
        self._stream, self._documents = self.corpus.subsampled(self._kept, rng)
        self._key = int(rng.integers(2**63))

    def _step(self) -> None:
        """Train on one batch."""
        if self.place == 0:
            self._loss[:] = 0
        end = min(self.place + self.setting.batch, self._stream.size)
        words, width = self._kept.size, self.setting.embedding_dim
        # Subsampling a tiny text may leave nothing.
        if end:
            self._loss += kernels.word2vec_step(
                _checked(self.table, (words + self.setting.buckets, width)),
                _checked(self.others, (words, width)),
                self._stream,
                self._documents,
                range(self.place, end),
                noise=self._noise,
                key=self._key,
                lr=self.setting.initial_lr * max(FINAL_LR, 1 - self.done),
                workspace=self._workspace,
                cbow=self.setting.method == "cbow",
                word_rows=self._word_rows,
            )
        self.place = end
        if end == self._stream.size:
            self.epoch, self.place = self.epoch + 1, 0
            self._stream = self._stream[:0]
            self._begin_epoch()


def _checked(table: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return a table; one of another shape is a ValueError: kernels write unchecked."""
    if table.shape != shape:
        raise ValueError(f"the tables must have shape {shape}, got {table.shape}")
    return table


def _initial_rows(shape: tuple[int, int], *, seed: int) -> np.ndarray:
    rows = kernels.aligned_zeros(shape)
    np.random.default_rng(seed).random(out=rows, dtype=np.float32)
    rows -= np.float32(0.5)
    rows /= np.float32(shape[1])
    return rows


def kept_share(
    counts: Int64[np.ndarray, " words"], *, sample: float
) -> Float32[np.ndarray, " words"]:
    """Return the probability of keeping each word when subsampling.

    A word of frequency ``f`` is kept with probability ``√(t/f) + t/f``, as in the original
    word2vec program.

    Args:
        counts: Number of occurrences of each word.
        sample: The threshold ``t``.

    Example:
        >>> kept_share(np.array([1, 25, 74]), sample=0.01).round(2)
        array([1.  , 0.24, 0.13], dtype=float32)
    """
    ratio = sample * counts.sum() / np.maximum(counts, 1)
    return np.minimum(np.sqrt(ratio) + ratio, 1).astype(np.float32)
