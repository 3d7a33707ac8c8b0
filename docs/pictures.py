"""Draw the pictures of the pages into docs/pictures.

Run it after changing a picture: ``python docs/pictures.py``. Lines and text are readable on
a light and on a dark page, and the background is transparent.
"""

import dataclasses
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from firstlayer.analysis import plot
from firstlayer.analysis.lookup import Lookups, Reading
from firstlayer.numpy import Embedding, EmbeddingBag, RotaryPositions
from firstlayer.optim import RowAdamW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent / "pictures"
GREY, BLUE, ORANGE, GREEN, PINK = "#7b7b7b", "#2f86cc", "#d9730d", "#159a6a", "#c2569b"
STYLE: Any = {
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": GREY,
    "axes.titlesize": 11,
    "font.family": "sans-serif",
    "font.size": 10,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "svg.fonttype": "none",
    "svg.hashsalt": "firstlayer",
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def _figure(height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(9, height), layout="constrained")


def rotations(positions: Any, head_dim: int, pair: int) -> Any:
    """Return cosine and sine by which RotaryPositions rotates a pair, in float32."""
    x = np.zeros((len(positions), head_dim), np.float32)
    x[:, pair] = 1
    return RotaryPositions(head_dim)(x, positions)[:, [pair, pair + head_dim // 2]]


def rotary() -> "Figure":
    """Draw two pairs at several positions, and the product of a query and a key."""
    from matplotlib.patches import Circle

    figure = _figure(3.2)
    fast, slow, products = figure.subplots(1, 3, width_ratios=[1, 1, 1.4])
    for axes, pair, title in (fast, 0, "pair 0: 1 radian"), (slow, 4, "pair 4: 0.1 radian"):
        axes.add_patch(Circle((0, 0), 1, fill=False, color=GREY, lw=0.6))
        for position, (x, y) in enumerate(rotations(np.arange(6), 32, pair)):
            axes.annotate(
                "",
                (x, y),
                (0, 0),
                arrowprops={
                    "arrowstyle": "->",
                    "color": BLUE,
                    "alpha": 1 - 0.13 * position,
                },
            )
            if pair == 0 or position in (0, 5):  # others would touch
                axes.text(1.18 * x, 1.18 * y, str(position), ha="center", va="center")
        axes.set(
            xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal", title=f"{title} a step"
        )
        axes.axis("off")
    _draw_products(products)
    return figure


def _draw_products(axes: "Axes") -> None:
    layer, rng = RotaryPositions(32), np.random.default_rng(3)
    q, k = rng.standard_normal((2, 1, 32))
    distances = np.arange(0, 33)
    for first, color, mark in (
        (40, BLUE, "-"),
        (5_000, ORANGE, "o"),
        (1_000_000, GREEN, "x"),
    ):
        keys = layer(np.repeat(k, 33, axis=0), first - distances)
        scores = (layer(q, [first]) * keys).sum(-1)
        axes.plot(distances, scores, mark, color=color, ms=4.5, label=f"query at {first:,}")
    axes.set(xlabel="distance of the key", title="query · key, both rotated")
    axes.legend(fontsize=8.5)


def large_positions() -> "Figure":
    """Draw the error of cosines at growing positions, and cosines at ten million."""
    figure = _figure(3.4)
    errors, cosines = figure.subplots(1, 2)
    at = 2 ** np.arange(4, 24)
    near = at[:, None] + np.arange(-8, 8)
    frequency = 10_000.0 ** (-1 / 16)
    exact = np.cos(near * frequency)
    lines = {
        "position and angle in bfloat16": (PINK, _half_precision_angles(near, frequency)),
        "angle in float32": (ORANGE, near.astype(np.float32) * np.float32(frequency)),
    }
    for label, (color, angle) in lines.items():
        found = np.abs(np.cos(angle.astype(float)) - exact).max(1)
        errors.loglog(at, found, color=color, marker=".", label=label)
    ours = rotations(near.ravel(), 32, 1)[:, 0].reshape(near.shape)
    error = np.abs(ours - exact).max(1)
    errors.loglog(at, error, color=BLUE, marker=".", label="Firstlayer, float32 output")
    errors.set(xlabel="position", title="largest error of a cosine", ylim=(1e-9, 3e4))
    errors.axvline(1e6, color=GREY, lw=0.6, ls=":")
    errors.legend(fontsize=8.5, loc="upper left")

    start, steps = 10_000_000, np.arange(25)
    dense = np.linspace(0, 24, 200)
    cosines.plot(
        dense, np.cos((start + dense) * frequency), color=GREY, lw=0.7, label="exact"
    )
    wrong = np.cos(
        ((start + steps).astype(np.float32) * np.float32(frequency)).astype(float)
    )
    cosines.plot(steps, wrong, "s", color=ORANGE, ms=4, label="angle in float32")
    ours = rotations(start + steps, 32, 1)[:, 0]
    cosines.plot(steps, ours, "o", color=BLUE, ms=4, label="Firstlayer")
    cosines.set(xlabel="position − 10,000,000", title="cosine of pair 1", ylim=(-1.1, 1.75))
    cosines.legend(fontsize=8.5, ncols=3, loc="upper center", columnspacing=1)
    return figure


def _half_precision_angles(positions: Any, frequency: float) -> Any:
    return _bfloat16(_bfloat16(positions) * _bfloat16(frequency))


def _bfloat16(values: Any) -> Any:
    """Round to the nearest bfloat16, ties to even, as float32."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


GRADIENTS = {1: 1.0, 2: 0.7, 12: -0.4, 40: 0.5}  # of one weight, by step
STEPS = 50


def dense_weights() -> Any:
    """Return one weight in each step of AdamW with gradients GRADIENTS, by the formula."""
    lr, beta1, beta2, eps, decay = 0.1, 0.9, 0.999, 1e-8, 0.2
    weight, mean, square, found = 1.0, 0.0, 0.0, [1.0]
    for step in range(1, STEPS + 1):
        gradient = GRADIENTS.get(step, 0.0)
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        root = np.sqrt(square / (1 - beta2**step)) + eps
        weight = weight * (1 - lr * decay) - lr * mean / (1 - beta1**step) / root
        found.append(weight)
    return np.array(found)


def row_weights(mode: Literal["exact", "lazy"]) -> Any:
    """Return the stored weight after each step of RowAdamW, and what lookups return."""
    layer = Embedding(weight=np.ones((2, 1)))
    optimizer = RowAdamW(layer, lr=0.1, weight_decay=0.2, mode=mode)
    array, read = layer.weight, {0: 1.0}  # the array itself, which the optimizer updates
    stored = [1.0]
    for step in range(1, STEPS + 1):
        row = 0 if step in GRADIENTS else 1
        value, pull = layer.vjp([row])  # catches the row up
        if row == 0:
            read[step - 1] = float(value[0, 0])
        optimizer.step(pull(np.full((1, 1), GRADIENTS.get(step, 0.0))))
        stored.append(float(array[0, 0]))
    return np.array(stored), read


def missed_steps() -> "Figure":
    """Draw one weight under dense AdamW, exact row updates and lazy row updates."""
    figure = _figure(3.4)
    axes, steps = figure.subplots(), np.arange(STEPS + 1)
    stored, read = row_weights("exact")
    lazy, _ = row_weights("lazy")
    axes.plot(steps, dense_weights(), color=GREY, lw=1.2, label="dense AdamW")
    axes.step(
        steps, stored, where="post", color=BLUE, ls="--", label="RowAdamW: stored row"
    )
    axes.plot(
        *zip(*read.items(), strict=True), "o", color=BLUE, label="RowAdamW: row as read"
    )
    axes.step(steps, lazy, where="post", color=ORANGE, lw=1.2, label='mode="lazy"')
    low = axes.get_ylim()[0]
    for step in GRADIENTS:
        axes.plot([step], [low], "^", color=PINK, clip_on=False, zorder=5)
    axes.plot([], [], "^", color=PINK, label="step with a gradient")
    axes.set(xlabel="step", title="one weight of a row", ylim=(low, None))
    axes.legend(fontsize=8.5, ncols=2)
    return figure


def bags() -> "Figure":
    """Draw ids, offsets and rows of three bags, and their sums."""
    from matplotlib.patches import FancyArrowPatch

    figure = _figure(3.3)
    axes = figure.subplots()
    table = np.array([[1.0, 0], [0, 1], [2, 2], [3, 1], [0, 4]])
    ids, offsets, colors = [4, 1, 2, 3, 3], [0, 3, 3], [BLUE, ORANGE, GREEN]
    pooled = EmbeddingBag(weight=table, mode="sum")(ids, offsets=offsets)
    bounds = [*offsets, len(ids)]
    for name, y in ("index", 3.35), ("ids", 2.6), ("rows", 1.3), ("sums", -0.55):
        axes.text(-0.4, y, name, ha="right", va="center")
    for bag, color in enumerate(colors):
        first, last = bounds[bag], bounds[bag + 1]
        center = [1.0, 2.5, 4.0][bag]
        for at in range(first, last):
            x = at if bag == 0 else at + 0.5
            axes.text(x, 3.35, str(at), ha="center", va="center", fontsize=8.5)
            _box(axes, x, 2.6, [ids[at]], color)
            _box(axes, x, 1.3, table[ids[at]], color)
            arrow = {"arrowstyle": "-|>", "mutation_scale": 9, "color": color, "lw": 0.8}
            axes.add_patch(FancyArrowPatch((x, 2.28), (x, 1.98), **arrow))
            axes.add_patch(FancyArrowPatch((x, 0.62), (center, 0.15), **arrow))
        _box(axes, center, -0.55, pooled[bag], color)
        text = f"bag {bag}: offset {offsets[bag]}" + (", empty" if first == last else "")
        axes.text(center, -1.5, text, ha="center", va="center", color=color)
    axes.set(xlim=(-1.2, 5.2), ylim=(-1.8, 3.7))
    axes.axis("off")
    return figure


def _box(axes: "Axes", x: float, y: float, numbers: Any, color: str) -> None:
    from matplotlib.patches import Rectangle

    height = 0.62 * len(numbers)
    corner = (x - 0.28, y - height / 2)
    axes.add_patch(Rectangle(corner, 0.56, height, fill=False, edgecolor=color))
    for line, number in enumerate(numbers):
        at = y + height / 2 - 0.62 * (line + 0.5)
        axes.text(x, at, f"{number:g}", ha="center", va="center")


# Places in a model, and the layers that act there; the first two are one EmbeddingLayer.
PLACES = {
    "rows of a table": (
        BLUE,
        ("Embedding", "HashedEmbedding", "GrowingEmbedding", "EmbeddingBag", "TableGroup"),
    ),
    "+ positions": (ORANGE, ("LearnedPositions", "SinusoidalPositions")),
    "+ n-gram memory": (PINK, ("NgramEmbedding", "with EngramGate,", "ShortConvGate …")),
    "queries and keys": (GREEN, ("RotaryPositions", "XPosRotary")),
    "attention scores": (
        GREEN,
        ("AlibiBias", "T5Bias", "KerpleBias", "FireBias", "CopeBias", "ShawScores …"),
    ),
    "logits": (BLUE, ("layer.logits(x)", "(tied head)")),
}


def layers() -> "Figure":
    """Draw where in a transformer each layer acts."""
    from matplotlib.patches import FancyArrowPatch, Rectangle

    figure = _figure(2.7)
    axes = figure.subplots()
    axes.text(-0.6, 0, "ids", ha="right", va="center")
    for x, (place, (color, names)) in enumerate(PLACES.items()):
        axes.add_patch(Rectangle((x - 0.43, -0.3), 0.86, 0.6, fill=False, edgecolor=color))
        axes.text(x, 0, place, ha="center", va="center", fontsize=8.5)
        arrow: Any = {"arrowstyle": "-|>", "mutation_scale": 9, "color": GREY, "lw": 0.8}
        arrow |= {"shrinkA": 0, "shrinkB": 0}
        axes.add_patch(FancyArrowPatch((x - 0.57, 0), (x - 0.43, 0), **arrow))
        for line, name in enumerate(names):
            y = -0.65 - 0.34 * line
            axes.text(x, y, name, ha="center", va="center", fontsize=8, color=color)
    for first, last, name in (0, 1, "EmbeddingLayer"), (3, 4, "attention, in every block"):
        left, right = first - 0.43, last + 0.43
        axes.plot([left, left, right, right], [0.4, 0.5, 0.5, 0.4], color=GREY, lw=0.8)
        axes.text((left + right) / 2, 0.7, name, ha="center", va="center", fontsize=9)
    axes.set(xlim=(-0.9, 5.5), ylim=(-2.5, 0.9))
    axes.axis("off")
    return figure


def lookups() -> "Figure":
    """Draw the times in ``lookups.json``, the output of ``firstlayer bench --json``."""
    found = json.loads((FOLDER / "lookups.json").read_text())
    names = [field.name for field in dataclasses.fields(Reading)]
    readings = [Reading(*(each[name] for name in names)) for each in found["readings"]]
    measured = Lookups(found["threads"], found["bandwidth"], (), tuple(readings))
    return plot.lookups(measured, palette=(BLUE, ORANGE, GREEN, PINK), limit=GREY)


# Colors and markers of the schemes; rules that extend a model have its color.
SCHEMES = {
    "none": (GREY, "o"),
    "learned": (PINK, "s"),
    "sinusoidal": (ORANGE, "^"),
    "rotary": (BLUE, "D"),
    "randomised": ("#3fa7b5", "v"),
    "xpos": ("#7c6fdc", ">"),
    "alibi": (GREEN, "P"),
    "t5": ("#b58a00", "X"),
    "kerple": ("#c0504d", "*"),
    "fire": ("#8a7a5c", "<"),
}
DASHES: Any = {
    None: "-",
    "linear": (0, (1, 1.5)),
    "ntk": (0, (5, 2)),
    "yarn": (0, (6, 1.5, 1, 1.5)),
    "resized": (0, (3, 2)),
}


def positions() -> "Figure":
    """Draw the losses of position schemes at growing lengths.

    The data are those of ``firstlayer positions --quick --seeds 3 --json``, with every
    scheme as a ``--scheme``.
    """
    study = json.loads((FOLDER / "positions.json").read_text())
    figure = _figure(4.4)
    axes, length = figure.subplots(), study["setting"]["length"]
    curves = [curve for trained in study["trained"] for curve in trained["curves"]]
    # The legend lists curves in the order of their right ends, from the top.
    for curve in sorted(curves, key=lambda curve: -(curve["losses"][-1] or math.inf)):
        color, marker = SCHEMES[curve["scheme"]]
        points = zip(curve["lengths"], curve["losses"], strict=True)
        axes.plot(
            *zip(*((n, loss) for n, loss in points if loss is not None), strict=True),
            color=color,
            linestyle=DASHES[curve["rule"]],
            marker=marker,
            ms=4.5,
            lw=1.3,
            label=" + ".join(filter(None, (curve["scheme"], curve["rule"])))
            + (" (no rows beyond)" if None in curve["losses"] else ""),
        )
    axes.axvline(length, color=GREY, lw=6, alpha=0.25, zorder=0)
    axes.set_xscale("log", base=2)
    stretches = study["setting"]["stretches"]
    lengths = [round(stretch * length) for stretch in stretches]
    labels = [f"{n}\n{s:g}×" for n, s in zip(lengths, stretches, strict=True)]
    axes.set_xticks(lengths, labels)
    axes.minorticks_off()
    axes.set(xlabel="context length in bytes", title="loss (nats per byte)")
    figure.legend(loc="outside right center", fontsize=8.5, handlelength=3.5)
    return figure


PICTURES: dict[str, Callable[[], "Figure"]] = {
    "rotary": rotary,
    "large_positions": large_positions,
    "missed_steps": missed_steps,
    "bags": bags,
    "layers": layers,
    "lookups": lookups,
    "positions": positions,
}


def svg(name: str) -> str:
    """Return a picture as SVG."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        PICTURES[name]().savefig(file, format="svg", transparent=True, metadata=metadata)
    return file.getvalue()


if __name__ == "__main__":
    for name in PICTURES:
        (FOLDER / f"{name}.svg").write_text(svg(name))
