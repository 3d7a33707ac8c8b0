"""Calls of kernels without Numba's dispatcher, whose work takes longer than a short call.

A class holds the arguments that stay the same (:mod:`firstlayer.kernels.runtime.bind`).
Only the addresses of arrays are kept: the caller makes sure that their memory exists, and
passes the addresses of the arrays of a call. Results have the bits of the other functions,
which run the same kernels.

Calls return 0, or 1 if an id was out of range, or -1 if memory could not be allocated.
"""

import ctypes
from array import array
from functools import partial

import numpy as np

from . import bags, phases, rotate
from .layer import forward
from .runtime import lanes
from .runtime.aligned import address_of
from .runtime.bind import FLAG, bind
from .runtime.compile import bits_of
from .runtime.numba_abi import Ticket
from .runtime.pool import grain_for, ticket_for


class BoundForward:
    """The kernel of the forward, with everything but ids, output and rows of positions.

    Rows of positions are not checked.

    Args:
        token_table: Contiguous table, whose dtype is that of the output.
        position_table: Table of the same dtype and width, or None.
        norm: Weight, bias and epsilon of a LayerNorm, or None.
        scale: Factor of token rows.
    """

    __slots__ = "_call", "_first", "_grain", "_row_bytes", "_rows", "_streaming_call"

    def __init__(
        self,
        token_table: np.ndarray,
        *,
        position_table: np.ndarray | None,
        norm: tuple[np.ndarray, np.ndarray, float] | None,
        scale: float,
    ) -> None:
        number = np.float64 if token_table.dtype == np.float64 else np.float32
        norm_weight, norm_bias, eps = norm or (None, None, 0.0)
        width, varying, rows = token_table.shape[1], ["ids", "out", "statistics"], None
        if position_table is not None:
            rows, varying = np.arange(len(position_table)), [*varying, "position_rows"]
        # All rows of positions in order. A call reads some of them.
        self._rows, self._first = rows, 0 if rows is None else rows.ctypes.data
        self._grain = grain_for(forward.GRAIN, width)
        self._row_bytes = width * token_table.itemsize
        bound = partial(
            bind,
            forward._write_rows,
            varying=varying,
            token_table=bits_of(token_table),
            ids=np.empty(1, np.int64),
            position_table=None if position_table is None else bits_of(position_table),
            position_rows=rows,
            segment_table=None,
            segment_rows=None,
            norm_weight=None if norm_weight is None else bits_of(norm_weight),
            norm_bias=None if norm_bias is None else bits_of(norm_bias),
            scale=number(scale),
            eps=number(eps),
            statistics=np.empty((1, 2), number),
            out=bits_of(np.empty((1, width), token_table.dtype)),
            has_bad_id=FLAG,
        )
        self._call, self._streaming_call = bound(streams=False), bound(streams=True)

    def __call__(
        self,
        ids: int,
        out: int,
        size: int,
        rows: range | None,
        statistics: np.ndarray | None = None,
    ) -> int:
        """Write output rows on the calling thread, without streaming stores.

        Args:
            ids: Address of the ids, int64.
            out: Address of the output.
            size: Number of ids.
            rows: Rows of positions, repeated if they are fewer than ids; None without
                positions.
            statistics: As in :func:`firstlayer.kernels.layer_forward`.
        """
        at = (0, 0) if statistics is None else (address_of(statistics), size)
        if rows is None:
            return self._call(0, size, 0, 0, 0, ids, size, out, size, *at)
        first = self._first + 8 * rows.start
        return self._call(0, size, 0, 0, 0, ids, size, out, size, *at, first, len(rows))

    def on_threads(
        self,
        ids: int,
        out: int,
        size: int,
        rows: range | None,
        statistics: np.ndarray | None = None,
    ) -> int:
        """Write output rows on as many threads as their number allows.

        Args:
            ids: As in a call, like the other arguments.
            out: Address of the output.
            size: Number of ids.
            rows: Rows of positions.
            statistics: Statistics of rows.
        """
        ticket: Ticket = ticket_for(size, self._grain)
        at = (0, 0) if statistics is None else (address_of(statistics), size)
        where = () if rows is None else (self._first + 8 * rows.start, len(rows))
        call, row_bytes = self._call, self._row_bytes
        if size * row_bytes >= lanes.STREAMING_BYTES:
            has_rest = row_bytes % lanes.LANES_BYTES != 0
            if lanes.fits_streams(out, row_bytes, has_rest=has_rest):
                call = self._streaming_call
        return call(*ticket, ids, size, out, size, *at, *where)


class BoundRotation:
    """Rotation of vectors that have the same position.

    Args:
        tables: As in :func:`firstlayer.kernels.phases.digit_phases`, in float32.
        head_dim: Number of features of a vector.
        dtype: Dtype of the vectors, of at most 32 bits.
        read_half: As in :func:`firstlayer.kernels.rotate.rotate_pairs`.
        write_half: As there.
    """

    __slots__ = "_phases", "_rotate", "_scratch", "_which"

    def __init__(
        self,
        tables: np.ndarray,
        *,
        head_dim: int,
        dtype: np.dtype,
        read_half: bool,
        write_half: bool,
    ) -> None:
        features = 2 * tables.shape[-1]
        vectors = bits_of(np.empty((1, head_dim), dtype))
        row, self._which = np.empty((1, features), np.float32), np.zeros(1, np.int64)
        # A position and its phases.
        self._scratch = _scratch_type(features)
        self._phases = bind(
            phases._digit_phases,
            varying=["positions", "out"],
            positions=np.empty(1, np.int64),
            tables=tables,
            out=row,
        )
        self._rotate = bind(
            rotate._LOOPS[read_half, write_half],
            varying=["x", "phases", "out"],
            x=vectors,
            phases=row,
            which=self._which,
            streams=False,
            out=vectors,
        )

    def __call__(self, x: int, out: int, size: int, position: int) -> int:
        """Write rotated vectors, on the calling thread.

        Args:
            x: Address of the vectors.
            out: Address of the output.
            size: Number of vectors.
            position: Their position, in range.
        """
        scratch = self._scratch(position)
        # Of the position; the phases follow it.
        at = ctypes.addressof(scratch)
        return self._phases(0, 1, 0, 0, 0, at, 1, at + 8, 1) or self._rotate(
            0, size, 0, 0, 0, x, size, at + 8, 1, out, size
        )


class BoundBags:
    """Sums and means of the rows of bags.

    Args:
        table: Contiguous table, whose dtype is that of the output.
    """

    __slots__ = "_call", "_number"

    def __init__(self, table: np.ndarray) -> None:
        absent = np.empty(0, np.float64 if table.dtype == np.float64 else np.float32)
        block, (num_rows, width) = lanes.LANES_BYTES // absent.itemsize, table.shape
        self._number = "d" if absent.itemsize == 8 else "f"
        self._call = bind(
            bags._sum_wide if width >= block else bags._sum_narrow,
            varying=["ids", "bounds", "divisors", "out"],
            table=bits_of(table).reshape(-1),
            num_rows=num_rows,
            ids=np.empty(1, np.int64),
            bounds=np.empty(2, np.int64),
            weights=absent,
            divisors=absent,
            block=block,
            out=bits_of(np.empty((1, width), table.dtype)),
            streams=False,
            has_bad_id=FLAG,
        )

    def __call__(
        self, ids: int, out: int, bounds: list[int], *, divisors: list[float]
    ) -> int:
        """Write the row of each bag, on the calling thread.

        Args:
            ids: Address of the ids, int64.
            out: Address of the output.
            bounds: Start of each bag, and the end of the last, which is the number of ids.
            divisors: Divisor of each bag's sum; none for sums.
        """
        starts, counts = array("q", bounds), array(self._number, divisors)
        size = len(bounds) - 1
        return self._call(
            0, size, 0, 0, 0,
            ids, bounds[-1],
            starts.buffer_info()[0], size + 1,
            counts.buffer_info()[0], len(counts),
            out, size,
        )  # fmt: skip


def _scratch_type(features: int) -> type[ctypes.Structure]:
    class Scratch(ctypes.Structure):
        _fields_ = ("position", ctypes.c_int64), ("phases", ctypes.c_float * features)

    return Scratch
