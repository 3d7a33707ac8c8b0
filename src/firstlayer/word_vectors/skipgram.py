"""Word vectors by skip-gram with negative sampling (Mikolov et al. 2013).

Two tables are trained. The dot product of a center word's row in the first table with a
context word's row in the second is increased for words that occur near each other, and
decreased for random negatives. The first table is the result.

Gradients are row gradients, applied by a row optimizer. All random draws depend only on the
seed, the epoch and the position in the text, and sums have a fixed order: the same seed
gives the same bits with any number of threads, with or without an interruption.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from .. import kernels
from .._check import changed_ids, not_negative, positive
from ..embeddings.row_gradient import RowGradient, sum_by_id
from ..numpy import Embedding
from ..optim import RowAdagrad
from .corpus import Corpus

#: Negatives are drawn in proportion to this power of the word counts.
NOISE_POWER = 0.75
#: Final learning rate as a fraction of the initial one.
FINAL_LR = 1e-3
MAX_WINDOW = 16
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SkipGramOptions:
    """Hyper-parameters of skip-gram training.

    Args:
        embedding_dim: Width of each row.
        window: Largest distance of a context word, from 1 to 16.
        negatives: Weight of the negatives, in negatives per context word.
        sample: Words above this frequency are subsampled.
        epochs: Number of passes over the text.
        lr: Initial learning rate. It decays linearly.
        batch: Center words per batch.
        seed: Seed of all random draws.
    """

    embedding_dim: int = 128
    window: int = 2
    negatives: int = 10
    sample: float = 1e-3
    epochs: int = 10
    lr: float = 0.08
    batch: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "window", "negatives", "epochs", "batch"):
            positive(name, getattr(self, name))
        not_negative("seed", self.seed)
        if self.window > MAX_WINDOW:
            raise ValueError(f"window must be at most {MAX_WINDOW}, got {self.window}")
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
        loss: Mean loss per context word in nats since the last report.
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
        counts = np.bincount(corpus.ids, minlength=corpus.num_embeddings)
        if np.count_nonzero(counts) < 2:
            raise ValueError(
                f"the text must have at least 2 different tokens in its vocabulary, "
                f"got {np.count_nonzero(counts)}: give more text or a lower min_count"
            )
        self._kept = kept_share(counts, sample=setting.sample)
        self._noise = kernels.noise_table(counts**NOISE_POWER)
        shape, unknown = (counts.size, setting.embedding_dim), corpus.unknown
        self.table = Embedding(*shape, padding_idx=unknown, init=_small, rng=setting.seed)
        self.others = Embedding(*shape, padding_idx=unknown, init="zeros")
        self._optimizers = [
            RowAdagrad(layer, lr=setting.lr, mode="lazy")
            for layer in (self.table, self.others)
        ]
        #: Completed epochs, and completed positions of the current epoch.
        self.epoch, self.place = 0, 0
        self._stream = self._documents = np.empty(0, np.int32)
        self._key = 0

    @property
    def done(self) -> float:
        """Completed fraction of training, from 0 to 1."""
        within = self.place / self._stream.size if self._stream.size else 0.0
        return (self.epoch + within) / self.setting.epochs

    def result(self) -> Float32[np.ndarray, "num_embeddings embedding_dim"]:
        """Return the table with its mean row subtracted.

        All rows share a direction that carries no meaning (Mu and Viswanath 2018). The row
        of unknown words stays zero.
        """
        weight, unknown = self.table.parameters()["weight"].copy(), self.corpus.unknown
        known = np.arange(len(weight)) != (-1 if unknown is None else unknown)
        weight[known] -= weight[known].mean(axis=0, dtype=np.float64).astype(np.float32)
        return weight

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
        start, losses = self.done, []
        while self.epoch < self.setting.epochs:
            if stop():
                return False
            losses.append(self._step())
            now = time.perf_counter()
            finished = self.epoch == self.setting.epochs
            if report is not None and (now - last >= every or finished):
                report(self._progress(start, now - started, losses))
                last, losses = now, []
        return True

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state that :meth:`load_state_dict` resumes from, bit for bit."""
        state = {"table": self.table.weight.copy(), "others": self.others.weight.copy()}
        for name, optimizer in zip(state.copy(), self._optimizers, strict=True):
            optimizer_state = optimizer.state_dict()
            state |= {f"{name}.{key}": value for key, value in optimizer_state.items()}
        return {**state, "place": np.array([self.epoch, self.place])}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Resume a run with the same text and hyper-parameters."""
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise ValueError(f"state must have {missing[0]}, got {sorted(state)}")
        tables = {"table": self.table, "others": self.others}
        for (name, layer), optimizer in zip(tables.items(), self._optimizers, strict=True):
            layer.load_state_dict({"weight": state[name]})
            keys = optimizer.state_dict()
            optimizer.load_state_dict({key: state[f"{name}.{key}"] for key in keys})
        self.epoch, self.place = map(int, state["place"])
        self._stream = self._stream[:0]
        self._begin_epoch()

    def _progress(self, start: float, seconds: float, losses: list[Any]) -> Progress:
        total = self.corpus.ids.size * self.setting.epochs
        loss, pairs = np.sum(losses, axis=0)
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
        ids, bounds = self.corpus.ids, self.corpus.bounds
        rng = np.random.default_rng([self.setting.seed, self.epoch])
        kept = rng.random(ids.size, dtype=np.float32) < self._kept[ids]
        documents = np.repeat(np.arange(bounds.size - 1, dtype=np.int32), np.diff(bounds))
        self._stream, self._documents = ids[kept], documents[kept]
        self._key = int(rng.integers(2**63))

    def _step(self) -> tuple[float, int]:
        """Train on one batch; return the sum of its losses and their number."""
        end = min(self.place + self.setting.batch, self._stream.size)
        # Subsampling a tiny text may leave nothing.
        loss, pairs = self._train_batch(range(self.place, end)) if end else (0.0, 0)
        self.place = end
        if end == self._stream.size:
            self.epoch, self.place = self.epoch + 1, 0
            self._stream = self._stream[:0]
            self._begin_epoch()
        return loss, pairs

    def _train_batch(self, places: range) -> tuple[float, int]:
        centers = self._stream[places.start : places.stop].astype(np.int64)
        targets, near = kernels.draw_targets(
            self._stream,
            self._documents,
            places,
            window=self.setting.window,
            noise=self._noise,
            key=self._key,
        )
        table, others = (
            _checked(layer.weight, (self._kept.size, self.setting.embedding_dim))
            for layer in (self.table, self.others)
        )
        slopes, pulls, losses = kernels.skipgram_gradients(
            table,
            others,
            centers,
            targets=targets,
            near=near,
            negatives=self.setting.negatives,
        )
        ids, bounds, rows, slopes = kernels.group_targets(
            centers, targets, near=near, slopes=slopes, num_embeddings=len(table)
        )
        sums = kernels.sum_bags(table, rows, bounds, weights=slopes)
        if sums is None:
            raise changed_ids(len(table))
        gradients = (
            sum_by_id(centers, pulls),
            RowGradient(ids, sums),
        )
        for optimizer, gradient in zip(self._optimizers, gradients, strict=True):
            optimizer.lr = self.setting.lr * max(FINAL_LR, 1 - self.done)
            optimizer.step({"weight": gradient})
        return float(losses.sum()), int(near.sum())


def _checked(weight: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return a table that has the shape it was made with."""
    if weight.shape != shape:
        raise ValueError(f"the tables must have shape {shape}, got {weight.shape}")
    return weight


def _small(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return (rng.random(shape, dtype=np.float32) - np.float32(0.5)) / np.float32(shape[1])


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
