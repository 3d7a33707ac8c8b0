"""Which position scheme should I use? One small transformer for each, tested further out.

Every scheme gets the same text, model, seed and steps, at a short length, and is then asked
for the same bytes at that length and with more and more text before them. Only the context
grows, never what is to be predicted, so losses at different lengths can be compared: a
scheme that reads further than it was trained gains from more text, or at least loses
nothing (ALiBi, https://arxiv.org/abs/2108.12409), the others come apart, sooner
(sinusoidal) or later (rotary).

Rules that let a trained model read further are tried without training it again: rotary with
position interpolation (``linear``), NTK and YaRN, and a learned table that is resized. A
learned table as it is has no row beyond the length it was trained at: its loss there is
None.

The text is bytes, so that any file will do and no tokenizer takes part. Losses are nats for
a byte; ln 256, 5.55, is knowing nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .._check import one_of, positive
from ..word_vectors.text import standard_library
from ._windows import split

SCHEMES = (
    "none",
    "learned",
    "sinusoidal",
    "rotary",
    "randomised",
    "alibi",
    "t5",
    "kerple",
    "fire",
)
#: What is tried on a trained model, by the scheme it was trained with.
RULES = {"rotary": ("linear", "ntk", "yarn"), "learned": ("resized",)}

#: Told the scheme, the step, of how many, and the training loss there.
Progress = Callable[[str, int, int, float], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything about a study but its text and its schemes.

    Args:
        layers: Blocks of the model.
        width: Of its vectors; a multiple of twice the heads.
        heads: Attention heads.
        length: Bytes in a training sequence.
        batch: Sequences in a step.
        steps: How long to train.
        rate: The highest learning rate.
        stretches: Test lengths, as multiples of ``length``; at least 1, ascending.
        windows: Places in the held-out text that are tested.
        targets: Bytes at the end of each that are predicted; at most ``length``.
        seed: Of the weights and of the batches.
    """

    layers: int = 3
    width: int = 96
    heads: int = 4
    length: int = 128
    batch: int = 16
    steps: int = 600
    rate: float = 2e-3
    stretches: tuple[float, ...] = (1.0, 1.5, 2.0, 4.0, 8.0)
    windows: int = 64
    targets: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "length", "batch", "steps", "windows"):
            positive(name, getattr(self, name))
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of twice the heads, {2 * self.heads}, "
                f"got {self.width}"
            )
        if not 1 <= self.targets <= self.length:
            raise ValueError(
                f"targets must be from 1 to length {self.length}, got {self.targets}"
            )
        ascending = list(self.stretches) == sorted(set(self.stretches))
        if not self.stretches or not ascending or self.stretches[0] < 1:
            raise ValueError(f"stretches must ascend from at least 1, got {self.stretches}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that are tested, in bytes."""
        return tuple(round(stretch * self.length) for stretch in self.stretches)


#: About a minute for six schemes on two cores, and the same order of the schemes.
QUICK = Setting(layers=2, width=64, length=64, steps=300, targets=32)


@dataclass(frozen=True)
class Curve:
    """The loss of one scheme by length.

    Args:
        scheme: What the model was trained with.
        rule: What was changed about it afterwards, without training; None is nothing.
        lengths: Bytes of text, the predicted ones included.
        losses: Nats for a byte at each length, None where the scheme has no position.
    """

    scheme: str
    rule: str | None
    lengths: tuple[int, ...]
    losses: tuple[float | None, ...]

    @property
    def name(self) -> str:
        """The scheme and its rule."""
        return self.scheme if self.rule is None else f"{self.scheme} + {self.rule}"

    @property
    def rise(self) -> float | None:
        """How much worse it is at the longest length than at the shortest."""
        first, last = self.losses[0], self.losses[-1]
        return None if first is None or last is None else last - first

    def at(self, length: int) -> float | None:
        """Return the loss at one of the lengths."""
        return self.losses[self.lengths.index(length)]


@dataclass(frozen=True)
class Profile:
    """How a trained scheme sees distance.

    Args:
        what: ``"cosine"`` of the vectors that are added, or of a query and the same query
            turned; ``"bias"`` on the score, in nats.
        distances: How far apart.
        values: One line of values for each head, or a single one for all.
    """

    what: Literal["cosine", "bias"]
    distances: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Trained:
    """One scheme's model after training.

    Args:
        scheme: What it was trained with.
        parameters: How many numbers were trained.
        seconds: How long that took.
        training: The loss of each step, on its own batch.
        curves: Its losses on held-out text, as trained and under every rule.
        profile: How it sees distance up to the longest length; None if it does not.
    """

    scheme: str
    parameters: int
    seconds: float
    training: tuple[float, ...]
    curves: tuple[Curve, ...]
    profile: Profile | None


@dataclass(frozen=True)
class Study:
    """What came of comparing schemes.

    Args:
        setting: Under which conditions.
        bytes: How much text there was, the held-out tenth included.
        trained: One for each scheme.
    """

    setting: Setting
    bytes: int
    trained: tuple[Trained, ...]

    @property
    def curves(self) -> tuple[Curve, ...]:
        """All losses, scheme by scheme."""
        return tuple(curve for trained in self.trained for curve in trained.curves)

    def best_at(self, length: int) -> Curve | None:
        """Return what has the lowest loss at one of the lengths; None if nothing has one.

        Args:
            length: One of the setting's ``lengths``.
        """
        known = [(curve.at(length), curve) for curve in self.curves]
        known = [(loss, curve) for loss, curve in known if loss is not None]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON, without the losses of training and profiles."""
        trained = [
            {
                "scheme": each.scheme,
                "parameters": each.parameters,
                "seconds": each.seconds,
                "curves": [asdict(curve) for curve in each.curves],
            }
            for each in self.trained
        ]
        return {"setting": asdict(self.setting), "bytes": self.bytes, "trained": trained}


def python_source() -> bytes:
    """Return the source of the running Python's modules, packages left aside."""
    files = standard_library()
    top = min(len(path.parts) for path in files)
    return b"".join(path.read_bytes() for path in files if len(path.parts) == top)


def compare(
    text: bytes,
    schemes: Sequence[str] = SCHEMES,
    *,
    setting: Setting | None = None,
    progress: Progress | None = None,
) -> Study:
    """Train a model for each scheme on ``text`` and test it at every length.

    The last tenth of the text is held out for the test. Needs PyTorch.

    Args:
        text: What to learn from; a megabyte or more means something.
        schemes: Which of :data:`SCHEMES`.
        setting: How long and how large; :data:`QUICK` is a minute's.
        progress: Told of every step.
    """
    setting = setting or Setting()
    for scheme in schemes:
        one_of("scheme", scheme, SCHEMES)
    trained = tuple(
        measure(text, scheme, setting=setting, progress=progress) for scheme in schemes
    )
    return Study(setting, len(text), trained)


def measure(
    text: bytes, scheme: str, *, setting: Setting, progress: Progress | None = None
) -> Trained:
    """Train and test one scheme; see :func:`compare`.

    Args:
        text: What to learn from.
        scheme: One of :data:`SCHEMES`.
        setting: How long and how large.
        progress: Told of every step.
    """
    one_of("scheme", scheme, SCHEMES)
    learn, held_out = split(text, setting=setting)
    try:
        from ._training import train
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            "the study of positions needs PyTorch: pip install firstlayer[torch]"
        ) from error
    return train(learn, held_out, scheme=scheme, setting=setting, progress=progress)
