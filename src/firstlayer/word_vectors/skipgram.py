"""Word vectors by skip-gram with negative sampling (Mikolov et al. 2013).

Two tables are trained by stochastic gradient descent. The dot product of a context word's
row in the first table with the center word's row in the second is increased, and those with
random negatives are decreased. The first table is the result.

As in the word2vec program, frequent words are subsampled, the reach of each window is drawn
uniformly up to the largest one, and the learning rate decays linearly. Unlike there, the
context words of a position share its negatives.

All random draws depend only on the seed, the epoch and the position in the text, and sums
have a fixed order: the same seed gives the same bits with any number of threads, with or
without an interruption.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64

from .. import kernels
from .._check import not_negative, positive
from .corpus import Corpus

#: Negatives are drawn in proportion to this power of the word counts.
NOISE_POWER = 0.75
#: Final learning rate as a fraction of the initial one.
FINAL_LR = 1e-3
MAX_WINDOW, MAX_NEGATIVES = 16, 1000
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SkipGramOptions:
    """Hyper-parameters of skip-gram training.

    Args:
        embedding_dim: Width of each row.
        window: Largest distance of a context word, from 1 to 16.
        negatives: Negatives per center word, shared by its context words, at most 1000.
        sample: Words above this frequency are subsampled.
        epochs: Number of passes over the text.
        lr: Initial learning rate. It decays linearly.
        batch: Center words that are trained in parallel. The result depends on it, but not
            on the number of threads.
        seed: Seed of all random draws.
    """

    embedding_dim: int = 128
    window: int = 5
    negatives: int = 5
    sample: float = 1e-3
    epochs: int = 5
    lr: float = 0.05
    batch: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "window", "negatives", "epochs", "batch"):
            positive(name, getattr(self, name))
        not_negative("seed", self.seed)
        for name, most in (("window", MAX_WINDOW), ("negatives", MAX_NEGATIVES)):
            if getattr(self, name) > most:
                raise ValueError(
                    f"{name} must be at most {most}, got {getattr(self, name)}"
                )
        for name in ("sample", "lr"):
            if not 0 < getattr(self, name) <= LARGEST:
                raise ValueError(
                    f"{name} must be positive and a float32, got {getattr(self, name)}"
                )


@dataclass(frozen=True)
class Progress:
    """Training progress.

    Args:
        done: Completed fraction, from 0 to 1.
        tokens: Tokens processed over all epochs.
        seconds: Duration of this run.
        tokens_per_second: Speed of this run.
        loss: Mean loss per context word in nats since the epoch began.
    """

    done: float
    tokens: int
    seconds: float
    tokens_per_second: float
    loss: float


class SkipGram:
    """Skip-gram trainer.

    Args:
        corpus: Tokenized text with at least two different tokens.
        setting: Hyper-parameters.

    Example:
        >>> from firstlayer.word_vectors.corpus import learn_tokenizer, tokenized
        >>> text = [["the cat sat. the dog sat. the cat ran. the dog ran. " * 50]]
        >>> corpus = tokenized(text, learn_tokenizer(text))
        >>> model = SkipGram(corpus, SkipGramOptions(embedding_dim=8, epochs=2))
        >>> model.run()
        True
        >>> model.result().shape
        (6, 8)
    """

    def __init__(self, corpus: Corpus, setting: SkipGramOptions) -> None:
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
        self.table = _small((counts.size, setting.embedding_dim), rng=setting.seed)
        # Tokens that never occur have no direction: the unknown one, and words of phrases
        # that occur in the phrases alone.
        self.table[counts == 0] = 0
        self.others = np.zeros_like(self.table)
        self._workspace = kernels.skipgram_workspace(
            setting.batch,
            num_embeddings=counts.size,
            embedding_dim=setting.embedding_dim,
            window=setting.window,
            negatives=setting.negatives,
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
        """Return the table. The row of unknown words is zero."""
        return self.table.copy()

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
        rng = np.random.default_rng([self.setting.seed, self.epoch])
        self._stream, self._documents = self.corpus.subsampled(self._kept, rng)
        self._key = int(rng.integers(2**63))

    def _step(self) -> None:
        """Train on one batch."""
        if self.place == 0:
            self._loss[:] = 0
        end = min(self.place + self.setting.batch, self._stream.size)
        shape = self._kept.size, self.setting.embedding_dim
        # Subsampling a tiny text may leave nothing.
        if end:
            self._loss += kernels.skipgram_step(
                _checked(self.table, shape),
                _checked(self.others, shape),
                self._stream,
                self._documents,
                range(self.place, end),
                noise=self._noise,
                key=self._key,
                lr=self.setting.lr * max(FINAL_LR, 1 - self.done),
                workspace=self._workspace,
            )
        self.place = end
        if end == self._stream.size:
            self.epoch, self.place = self.epoch + 1, 0
            self._stream = self._stream[:0]
            self._begin_epoch()


def _checked(table: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return a table that has the shape it was made with."""
    if table.shape != shape:
        raise ValueError(f"the tables must have shape {shape}, got {table.shape}")
    return table


def _small(shape: tuple[int, int], *, rng: int) -> np.ndarray:
    numbers = np.random.default_rng(rng).random(shape, dtype=np.float32)
    return (numbers - np.float32(0.5)) / np.float32(shape[1])


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
