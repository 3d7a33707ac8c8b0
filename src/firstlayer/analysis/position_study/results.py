"""Settings and results of a comparison of position schemes, as plain values."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, stdev
from typing import Any, Literal

from ..._check import positive

#: Rules that extend a trained model without further training, by its scheme.
RULES = {"rotary": ("linear", "ntk", "yarn"), "learned": ("resized",)}

#: Called after every step with the scheme, the step, the number of steps and the loss.
Progress = Callable[[str, int, int, float], None]


_COUNTS = ("layers", "width", "heads", "length", "batch", "steps", "windows", "seeds")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Size of the models, their training and their test.

    Args:
        layers: Number of transformer blocks.
        width: Width of the vectors; a multiple of twice the heads.
        heads: Number of attention heads.
        length: Bytes in a training sequence.
        batch: Sequences per step.
        steps: Number of training steps.
        rate: Highest learning rate.
        stretches: Test lengths as multiples of ``length``; at least 1, ascending.
        windows: Number of windows of held-out text.
        targets: Bytes predicted at the end of each window; at most ``length``.
        seed: Seed of the weights and of the batches of the first model.
        seeds: Number of models per scheme, with consecutive seeds.
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
    seeds: int = 3

    def __post_init__(self) -> None:
        for name in _COUNTS:
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
        """Test lengths in bytes."""
        return tuple(round(stretch * self.length) for stretch in self.stretches)


#: Takes about two minutes for six schemes on two cores and ranks them in the same order.
QUICK = Setting(layers=2, width=64, length=64, steps=300, targets=32, seeds=2)


@dataclass(frozen=True)
class Curve:
    """Loss of a scheme by length, averaged over the seeds.

    Args:
        scheme: Position scheme that the model was trained with.
        rule: Rule applied after training, or None.
        lengths: Bytes of text, including the predicted ones.
        losses: Nats per byte at each length; None at lengths without positions.
        spreads: Standard deviation over the seeds at each length; empty for one seed.
    """

    scheme: str
    rule: str | None
    lengths: tuple[int, ...]
    losses: tuple[float | None, ...]
    spreads: tuple[float | None, ...] = ()

    @property
    def name(self) -> str:
        """Name of the scheme and the rule."""
        return self.scheme if self.rule is None else f"{self.scheme} + {self.rule}"

    @property
    def rise(self) -> float | None:
        """Loss at the longest length minus loss at the shortest."""
        first, last = self.losses[0], self.losses[-1]
        return None if first is None or last is None else last - first

    def at(self, length: int) -> float | None:
        """Return the loss at one of the lengths."""
        return self.losses[self.lengths.index(length)]

    def spread_at(self, length: int) -> float | None:
        """Return the standard deviation over the seeds at one of the lengths."""
        return self.spreads[self.lengths.index(length)] if self.spreads else None


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the average of the curves of one scheme and rule with different seeds.

    Example:
        >>> a, b = Curve("t5", None, (8,), (1.0,)), Curve("t5", None, (8,), (2.0,))
        >>> mean_curve([a, b])
        Curve(scheme='t5', rule=None, lengths=(8,), losses=(1.5,), spreads=(0.707...,))
    """
    first = curves[0]
    if len(curves) == 1:
        return first
    columns = list(zip(*(curve.losses for curve in curves), strict=True))
    known = [[loss for loss in column if loss is not None] for column in columns]
    losses = tuple(mean(column) if column else None for column in known)
    spreads = tuple(stdev(column) if len(column) > 1 else None for column in known)
    return replace(first, losses=losses, spreads=spreads)


@dataclass(frozen=True)
class Profile:
    """Effect of distance in a trained model.

    Args:
        what: ``"cosine"`` between added vectors, or between a query and the same query
            rotated; ``"bias"`` on the attention score, in nats.
        distances: Distances in positions.
        values: A tuple of values per head, or a single one for all heads.
    """

    what: Literal["cosine", "bias"]
    distances: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Trained:
    """Result of training and testing one scheme.

    Args:
        scheme: The scheme.
        parameters: Number of trained parameters of one model.
        seconds: Duration of the training of all models.
        training: Training loss of each step of the first model.
        curves: Losses on held-out text, as trained and with each rule.
        profile: Effect of distance up to the longest length in the first model; None
            without positions.
    """

    scheme: str
    parameters: int
    seconds: float
    training: tuple[float, ...]
    curves: tuple[Curve, ...]
    profile: Profile | None


@dataclass(frozen=True)
class Study:
    """Result of a comparison of schemes.

    Args:
        setting: Its settings.
        bytes: Size of the text, including the held-out tenth.
        trained: A result per scheme.
    """

    setting: Setting
    bytes: int
    trained: tuple[Trained, ...]

    @property
    def curves(self) -> tuple[Curve, ...]:
        """Curves of all schemes."""
        return tuple(curve for trained in self.trained for curve in trained.curves)

    def ranking(self, length: int) -> list[Curve]:
        """Return the curves with a loss at a length, lowest first."""
        curves = [curve for curve in self.curves if curve.at(length) is not None]
        return sorted(curves, key=lambda curve: curve.at(length) or 0.0)

    def conclusion(self) -> list[str]:
        """Return what the losses at the shortest and the longest length say, in words.

        Schemes are told apart if their losses differ by more than twice the standard
        deviation of the difference of two averages.
        """
        lengths = self.setting.lengths
        sentences = [
            self._verdict(length, self.ranking(length))
            for length in dict.fromkeys((lengths[0], lengths[-1]))
            if self.ranking(length)
        ]
        if self.setting.seeds == 1:
            sentences.append("With one seed, differences may be chance; compare several.")
        return sentences

    def _verdict(self, length: int, ranking: list[Curve]) -> str:
        best, *others = ranking
        loss = best.at(length) or 0.0
        spread = best.spread_at(length)
        figure = f"{loss:.3f}" if spread is None else f"{loss:.3f} ± {spread:.3f}"
        stretch = f"{length / self.setting.length:g}× the training length"
        place = "the training length" if length == self.setting.length else stretch
        sentence = f"At {length} bytes ({place}) the lowest loss is {best.name}'s, {figure}"
        equal = [o.name for o in others if not _is_higher(o, best, length, self.setting)]
        if equal and spread is not None:
            return f"{sentence}; not told apart from it: {', '.join(equal)}."
        if others:
            behind = (others[0].at(length) or 0.0) - loss
            sentence += f"; {others[0].name} follows with {behind:.3f} more"
        return f"{sentence}."

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON, without training losses and profiles."""
        trained = [
            {
                "scheme": each.scheme,
                "parameters": each.parameters,
                "seconds": each.seconds,
                "curves": [asdict(curve) for curve in each.curves],
            }
            for each in self.trained
        ]
        return {
            "setting": asdict(self.setting),
            "bytes": self.bytes,
            "trained": trained,
            "conclusion": self.conclusion(),
        }


def _is_higher(curve: Curve, best: Curve, length: int, setting: Setting) -> bool:
    """Return whether a loss is higher than the best by more than chance explains."""
    spreads = curve.spread_at(length) or 0.0, best.spread_at(length) or 0.0
    deviation = (sum(spread**2 for spread in spreads) / setting.seeds) ** 0.5
    return (curve.at(length) or 0.0) - (best.at(length) or 0.0) > 2 * deviation
