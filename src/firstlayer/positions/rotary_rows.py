"""Turning rows on the kernels: which turn is whose, and rows as they lie in memory.

For arrays on the host, NumPy's or those of a framework that shares its memory.
"""

import numpy as np
from jaxtyping import Float, Shaped

from .. import kernels
from .._array import repeating
from .phases import axial_phases, phases


def phases_at(
    positions: Shaped[np.ndarray, "*seq"],
    tables: Float[np.ndarray, "levels *axes 2 3 256 pairs"],
    rates: Float[np.ndarray, "levels *axes pairs"],
) -> Float[np.ndarray, "turns width"]:
    """Return the cosines of all pairs, then the sines, one row for each position.

    Args:
        positions: Within reach; with several coordinates, they come first.
        tables: What :func:`firstlayer.positions.phases.phase_tables` made, in the dtype of the result.
        rates: Likewise.

    Example:
        >>> from firstlayer.positions.phases import wave_tables
        >>> turn_at(np.array([0.0]), *wave_tables(np.ones(2)))
        array([[1., 1., 0., 0.]], dtype=float32)
    """
    if rates.ndim == 3:
        cos, sin = axial_phases(positions.reshape(len(positions), -1), tables, rates)
    elif positions.dtype.kind in "iu":
        whole = np.ascontiguousarray(positions, np.int64).reshape(-1)
        return kernels.digit_phases(whole, tables[0])
    else:
        cos, sin = phases(positions.reshape(-1), tables, rates)
    return np.concatenate([cos, sin], axis=-1)


def inverse_phases(turn: Float[np.ndarray, "turns width"]) -> np.ndarray:
    """Return the turns the other way, the same size."""
    cos, sin = np.split(turn, 2, axis=-1)
    return np.concatenate([cos, -sin], axis=-1)


def rotated(
    x: Float[np.ndarray, "*lead head_dim"],
    turn: Float[np.ndarray, "turns width"],
    seq: tuple[int, ...],
    *,
    read_half: bool,
    write_half: bool,
) -> Float[np.ndarray, "*lead head_dim"]:
    """Return ``x`` turned, laid out in memory as ``x`` is.

    Args:
        x: Queries or keys.
        turn: As many turns as ``seq`` has places.
        seq: The shape that, broadcast to that of ``x`` without its features, says which
            turn is whose.
        read_half: As in ``firstlayer.kernels.rotate_pairs``.
        write_half: Likewise.

    Example:
        >>> quarter = np.array([[0.0, 1.0]])
        >>> rotated(np.eye(2), quarter, (1,), read_half=True, write_half=True).tolist()
        [[0.0, 1.0], [-1.0, 0.0]]
    """
    moved, order = x, None
    index = np.arange(len(turn)).reshape((1,) * (x.ndim - 1 - len(seq)) + seq)
    if not x.flags.c_contiguous:
        # Heads are often a transposed view; taken as they lie, nothing is copied for them.
        order = sorted(range(x.ndim - 1), key=lambda axis: -x.strides[axis])
        moved = np.ascontiguousarray(x.transpose(*order, -1))
        index = index.transpose(order)
    out = kernels.rotate_pairs(
        moved.reshape(-1, x.shape[-1]),
        turn,
        which=repeating(index, moved.shape[:-1]),
        read_half=read_half,
        write_half=write_half,
    ).reshape(moved.shape)
    return out if order is None else out.transpose(*np.argsort(order), -1)
