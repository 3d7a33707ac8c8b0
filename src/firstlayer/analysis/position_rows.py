"""Similarity of the position rows of a checkpoint."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64

from ..files.checkpoint import checkpoint_in, open_checkpoint
from ..vector_files.folder import read_one_save
from ..word_vectors.neighbors import units

#: Most positions in the picture; of more, evenly spaced ones are taken.
MOST_POSITIONS = 512


@dataclass(frozen=True)
class PositionRows:
    """Position rows of a checkpoint, compared with each other.

    Args:
        name: Name of the table.
        rows: Number of rows of the table.
        positions: Positions that are compared.
        cosines: Cosine of every pair.
        norms: Norm of each row.
    """

    name: str
    rows: int
    positions: Int64[np.ndarray, " n"]
    cosines: Float32[np.ndarray, "n n"]
    norms: Float32[np.ndarray, " n"]


def position_rows(path: str | os.PathLike[str]) -> PositionRows:
    """Compare the position rows of a checkpoint.

    Args:
        path: A safetensors file, the index of a sharded checkpoint, or a folder with one of
            them. A checkpoint without position rows is a ValueError.
    """
    place = Path(path)
    if place.is_file():
        return _position_rows(place)
    return read_one_save(
        place, lambda opener: _position_rows(checkpoint_in(place, opener=opener))
    )


def _position_rows(path: Path) -> PositionRows:
    checkpoint = open_checkpoint(path)
    tables = [table for table in checkpoint.tables() if table.role == "position"]
    if not tables:
        raise ValueError(f"{path} has no table of positions")
    table = checkpoint.read(tables[0].name).astype(np.float32)
    rows = len(table)
    positions = np.unique(
        np.linspace(0, rows - 1, min(rows, MOST_POSITIONS)).astype(np.int64)
    )
    unit = units(table[positions])
    norms = np.sqrt(np.einsum("ij,ij->i", table, table, dtype=np.float64))[positions]
    cosines = np.clip(unit @ unit.T, -1, 1)
    return PositionRows(tables[0].name, rows, positions, cosines, norms.astype(np.float32))
