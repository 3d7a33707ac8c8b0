"""What a table costs to train: parameters, gradient, optimizer state, activations.

Each figure is given twice. What was *computed* follows from the sizes. What was *measured*
is what one training step really asked the allocator for:

- ``"allocated"``: the step was run, and the arrays that it keeps were counted;
- ``"virtual"``: the same step was run on tensors that have sizes and no memory (torch's
  meta device), because the table would have been larger than allowed;
- None: nothing here can run it, and the computed figure stands alone.

Optimizers named ``row-…`` are :mod:`firstlayer.optim`'s. They take the gradient as rows, so that
it costs what the batch costs and not what the table does; their state is there for every
row all the same, unless it is one number a row. The computed figure leaves out the fixed
megabyte or less that they keep about missed steps. The others are torch's, on dense
gradients.

The batch is the worst one: all of its ids are different, as far as there are rows.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from .._check import one_of, positive

How: TypeAlias = Literal["allocated", "virtual"] | None

#: Tables by name: rows and width.
SCENARIOS = {
    "small": (10_000, 256),
    "medium": (50_000, 512),
    "large": (100_000, 1024),
    "GPT-3": (50_257, 12_288),
}
#: Bytes of a number.
DTYPES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
#: Up to here a step is run in memory.
ALLOWED = 2 << 30


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps.

    Args:
        entries: Numbers for each entry of the table.
        rows: Bytes for each row.
        by_row: Whether it takes row gradients.
    """

    entries: int
    rows: int = 0
    by_row: bool = False


#: Under torch's names in lower case; ``row-`` and ``rowwise-`` are :mod:`firstlayer.optim`'s.
OPTIMIZERS = {
    "sgd": Optimizer(0),
    "adagrad": Optimizer(1),
    "rmsprop": Optimizer(1),
    "adamw": Optimizer(2),
    "row-sgd": Optimizer(0, rows=5, by_row=True),
    "row-adagrad": Optimizer(1, rows=5, by_row=True),
    "rowwise-adagrad": Optimizer(0, rows=9, by_row=True),
    "row-rmsprop": Optimizer(1, rows=5, by_row=True),
    "row-lion": Optimizer(1, rows=5, by_row=True),
    "row-adamw": Optimizer(2, rows=5, by_row=True),
}


@dataclass(frozen=True)
class Bytes:
    """What each part costs.

    Args:
        parameters: The table.
        gradient: The table's gradient, dense or as rows with their ids.
        state: What the optimizer keeps from step to step.
        activations: The rows looked up, and the ids, which the backward needs.
    """

    parameters: int
    gradient: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradient + self.state + self.activations


@dataclass(frozen=True)
class Footprint:
    """What one table costs with one optimizer.

    Args:
        name: Of the scenario or the tensor.
        rows: Of the table.
        width: Of the table.
        dtype: Of the table.
        optimizer: One of :data:`OPTIMIZERS`.
        tokens: Ids in a batch.
        computed: What follows from the sizes.
        measured: What a step asked for, if one could be run.
        how: ``"allocated"`` or ``"virtual"``; see the module.
    """

    name: str
    rows: int
    width: int
    dtype: str
    optimizer: str
    tokens: int
    computed: Bytes
    measured: Bytes | None
    how: How

    @property
    def best(self) -> Bytes:
        """What was measured, or else computed."""
        return self.measured or self.computed

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def footprint(
    rows: int,
    width: int,
    *,
    name: str = "",
    dtype: str = "float32",
    optimizer: str = "adamw",
    tokens: int = 4096,
    allowed: int = ALLOWED,
) -> Footprint:
    """Return what a table costs to train, computed and, where it can be, measured.

    Args:
        rows: Of the table.
        width: Of the table.
        name: What to call it.
        dtype: One of :data:`DTYPES`.
        optimizer: One of :data:`OPTIMIZERS`.
        tokens: Ids in a batch.
        allowed: Bytes that measuring may take; 0 allocates nothing.

    Example:
        >>> cost = footprint(1000, 16, optimizer="sgd", tokens=10)
        >>> cost.measured == cost.computed, cost.computed.gradient
        (True, 64000)
    """
    from ._allocated import measured

    sizes: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "tokens": tokens}
    formula = computed(rows, width, **sizes)
    found, how = measured(rows, width, allowed=allowed, **sizes)
    return Footprint(name, rows, width, dtype, optimizer, tokens, formula, found, how)


def computed(rows: int, width: int, *, dtype: str, optimizer: str, tokens: int) -> Bytes:
    """Return what a step keeps, worked out from the sizes alone."""
    for what, value in (("rows", rows), ("width", width), ("tokens", tokens)):
        positive(what, value)
    one_of("dtype", dtype, tuple(DTYPES))
    one_of("optimizer", optimizer, tuple(OPTIMIZERS))
    kind, size, entries = OPTIMIZERS[optimizer], DTYPES[dtype], rows * width
    # Half precision is summed by row in float32, and so is what is kept about a row.
    work = max(size, 4) if kind.by_row else size
    state = kind.entries * entries * work + kind.rows * rows
    if kind.by_row:
        gradient = min(tokens, rows) * (width * work + 8)
    else:
        gradient = entries * size
    return Bytes(entries * size, gradient, state, tokens * (width * size + 8))


@dataclass(frozen=True)
class PositionTable:
    """What a position scheme keeps in memory, in float32.

    Args:
        scheme: ``"learned"``, ``"sinusoidal"`` or ``"rotary"``.
        length: How many positions it is for.
        kept: Bytes that the layer's arrays take, measured.
        trained: Bytes of gradient and AdamW's state on top, computed.
        whole: Bytes of a table with a row for each position, computed.
    """

    scheme: str
    length: int
    kept: int
    trained: int
    whole: int


def position_tables(
    width: int, *, head_dim: int, lengths: Iterable[int] = (2048, 8192, 131_072)
) -> tuple[PositionTable, ...]:
    """Return what each scheme keeps for sequences of these lengths.

    Sinusoidal and rotary layers keep three tables of 256 rows for any length. A cache of
    cosines and sines, as other libraries keep it, has a row for each position.

    Args:
        width: Of the vectors.
        head_dim: Of the queries that rotary turns.
        lengths: How many positions.

    Example:
        >>> learned, sinusoidal, rotary = position_tables(8, head_dim=4, lengths=[4096])
        >>> learned.kept == learned.whole, sinusoidal.kept < sinusoidal.whole
        (True, True)
    """
    import numpy as np

    from ..numpy import LearnedPositions, RotaryPositions, SinusoidalPositions
    from ._allocated import kept_by

    def learned(length: int) -> LearnedPositions:
        zeros = np.zeros((length, width), np.float32)  # takes no memory until written
        return LearnedPositions(length, width, weight=zeros)

    found = []
    for length in lengths:
        positive("length", length)
        rows = kept_by(partial(learned, length))
        waves = kept_by(partial(SinusoidalPositions, width))
        phases = kept_by(partial(RotaryPositions, head_dim))
        whole = 4 * width * length
        found += [
            PositionTable("learned", length, rows, 3 * whole, whole),
            PositionTable("sinusoidal", length, waves, 0, whole),
            PositionTable("rotary", length, phases, 0, 8 * head_dim * length),
        ]
    return tuple(found)
