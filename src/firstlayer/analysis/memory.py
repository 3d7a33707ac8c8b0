"""Memory to train a table: parameters, gradient, optimizer state, activations.

Every figure is *computed* from the sizes and, if possible, *measured* in a training step:

- ``"allocated"``: the step was run, and the arrays that it keeps were counted;
- ``"virtual"``: the step was run on torch's meta device, which has sizes but no memory,
  because the table is larger than allowed;
- None: the step could not be run, and only the computed figure is known.

Optimizers named ``row-…`` and ``rowwise-…`` are those of :mod:`firstlayer.optim`. They take
gradients as rows, so the gradient grows with the batch and not with the table. Their state
covers every row. The computed figure leaves out the records of missed steps, at most about
two megabytes. The other optimizers are torch's, on dense gradients.

The batch is the worst case: all ids are different, up to the number of rows.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from .._check import one_of, positive

Method: TypeAlias = Literal["allocated", "virtual"] | None

#: Rows and width of tables, by name.
SCENARIOS = {
    "small": (10_000, 256),
    "medium": (50_000, 512),
    "large": (100_000, 1024),
    "GPT-3": (50_257, 12_288),
}
#: Bytes per number.
DTYPES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
#: Bytes up to which a step is run in memory.
ALLOWED = 2 << 30


@dataclass(frozen=True)
class Optimizer:
    """Size of an optimizer's state.

    Args:
        entries: Numbers per entry of the table.
        rows: Bytes per row.
        by_row: Whether it takes row gradients.
    """

    entries: int
    rows: int = 0
    by_row: bool = False


#: Optimizers by name: torch's in lower case, and those of :mod:`firstlayer.optim`.
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
    """Bytes of each part.

    Args:
        parameters: The table.
        gradient: Its gradient, dense or as rows with their ids.
        state: State of the optimizer.
        activations: Output rows, and the ids that the backward pass needs.
    """

    parameters: int
    gradient: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.parameters + self.gradient + self.state + self.activations


@dataclass(frozen=True)
class Footprint:
    """Memory to train one table with one optimizer.

    Args:
        name: Name of the scenario or the tensor.
        rows: Number of rows.
        width: Width of each row.
        dtype: Dtype of the table.
        optimizer: One of :data:`OPTIMIZERS`.
        tokens: Ids in a batch.
        computed: Bytes computed from the sizes.
        measured: Bytes measured in a step, None if it could not be run.
        how: ``"allocated"``, ``"virtual"`` or None; see the module.
    """

    name: str
    rows: int
    width: int
    dtype: str
    optimizer: str
    tokens: int
    computed: Bytes
    measured: Bytes | None
    how: Method

    @property
    def best(self) -> Bytes:
        """Measured bytes, or else computed ones."""
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
    """Return the memory to train a table, computed and, if possible, measured.

    Args:
        rows: Number of rows.
        width: Width of each row.
        name: Name of the table.
        dtype: One of :data:`DTYPES`.
        optimizer: One of :data:`OPTIMIZERS`.
        tokens: Ids in a batch.
        allowed: Bytes that the measured step may allocate.

    Example:
        >>> found = footprint(1000, 16, optimizer="sgd", tokens=10)
        >>> found.measured == found.computed, found.computed.gradient
        (True, 64000)
    """
    from .allocations import measure_step

    options: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "tokens": tokens}
    expected = computed(rows, width, **options)
    measured, how = measure_step(rows, width, allowed=allowed, **options)
    return Footprint(name, rows, width, dtype, optimizer, tokens, expected, measured, how)


def computed(rows: int, width: int, *, dtype: str, optimizer: str, tokens: int) -> Bytes:
    """Return the bytes that a training step keeps, computed from the sizes."""
    for name, value in (("rows", rows), ("width", width), ("tokens", tokens)):
        positive(name, value)
    one_of("dtype", dtype, tuple(DTYPES))
    one_of("optimizer", optimizer, tuple(OPTIMIZERS))
    kept, size, entries = OPTIMIZERS[optimizer], DTYPES[dtype], rows * width
    # Row gradients and the state of row optimizers are float32 for half-precision tables.
    compute_size = max(size, 4) if kept.by_row else size
    state = kept.entries * entries * compute_size + kept.rows * rows
    if kept.by_row:
        gradient = min(tokens, rows) * (width * compute_size + 8)
    else:
        gradient = entries * size
    return Bytes(entries * size, gradient, state, tokens * (width * size + 8))


@dataclass(frozen=True)
class PositionTable:
    """Memory of a position layer, in float32.

    Args:
        scheme: ``"learned"``, ``"sinusoidal"`` or ``"rotary"``.
        length: Number of positions.
        kept: Measured bytes of the layer's arrays.
        trained: Computed bytes of its gradient and of AdamW's state.
        whole: Computed bytes of a table with a row per position.
    """

    scheme: str
    length: int
    kept: int
    trained: int
    whole: int


def position_tables(
    width: int, *, head_dim: int, lengths: Iterable[int] = (2048, 8192, 131_072)
) -> tuple[PositionTable, ...]:
    """Return the memory of each scheme's layer for sequences of these lengths.

    Sinusoidal and rotary layers keep three tables of 256 rows for any length. The cosine
    and sine caches of other libraries have a row per position.

    Example:
        >>> learned, sinusoidal, rotary = position_tables(8, head_dim=4, lengths=[4096])
        >>> learned.kept == learned.whole, sinusoidal.kept < sinusoidal.whole
        (True, True)
    """
    import numpy as np

    from ..numpy import LearnedPositions, RotaryPositions, SinusoidalPositions
    from .allocations import bytes_of_arrays

    def learned(length: int) -> LearnedPositions:
        zeros = np.zeros((length, width), np.float32)  # not backed by memory until written
        return LearnedPositions(length, width, weight=zeros)

    tables = []
    for length in lengths:
        positive("length", length)
        table = bytes_of_arrays(partial(learned, length))
        sinusoidal = bytes_of_arrays(partial(SinusoidalPositions, width))
        rotary = bytes_of_arrays(partial(RotaryPositions, head_dim))
        whole = 4 * width * length
        tables += [
            PositionTable("learned", length, table, 3 * whole, whole),
            PositionTable("sinusoidal", length, sinusoidal, 0, whole),
            PositionTable("rotary", length, rotary, 0, 8 * head_dim * length),
        ]
    return tuple(tables)
