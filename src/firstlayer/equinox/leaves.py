"""Loading of leaves that ``eqx.tree_serialise_leaves`` wrote with any version."""

from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ._table import TableModule


def load_leaves(path: str | Path | BinaryIO, like: PyTree) -> PyTree:
    """Return ``like`` with the leaves from a file of ``eqx.tree_serialise_leaves``.

    Also reads files of version 0.1, where an ``Embedding``, an ``EmbeddingBag`` or a
    ``LearnedPositions`` with a padding row other than zero had one more leaf: the padding
    row as int32 bit patterns, before the table. That row is written into the table.
    ``eqx.tree_deserialise_leaves`` reads every other file just as well.

    Args:
        path: File to read, or an open binary file.
        like: Layer or model of the structure that was saved.

    Example:
        >>> import tempfile
        >>> from firstlayer.equinox import Embedding
        >>> layer, other = (Embedding(9, 4, key=jax.random.key(seed)) for seed in (0, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     eqx.tree_serialise_leaves(folder + "/a.eqx", layer)
        ...     bool(eqx.tree_equal(load_leaves(folder + "/a.eqx", other), layer))
        True
    """

    def reader(node: Any) -> Any:
        padding_idx = node.padding_idx if _is_table(node) else None
        if padding_idx is None:
            return eqx.default_deserialise_filter_spec
        return partial(_read_table, padding_idx=padding_idx)

    if not isinstance(path, str | Path) and not hasattr(path, "read"):
        name = type(path).__name__
        raise TypeError(f"path must be a path or an open binary file, got {name}")
    readers = jax.tree.map(reader, like, is_leaf=_is_table)
    return eqx.tree_deserialise_leaves(path, like, filter_spec=readers)


def _is_table(node: Any) -> bool:
    return isinstance(node, TableModule)


def _read_table(file: BinaryIO, leaf: Any, *, padding_idx: int) -> Any:
    """Read a table, and the padding row before it if the file has one."""
    start = file.tell()
    np.lib.format.read_magic(file)
    _, _, dtype = np.lib.format.read_array_header_1_0(file)
    file.seek(start)
    bits = np.load(file) if dtype == np.int32 else None
    weight = eqx.default_deserialise_filter_spec(file, leaf)
    if bits is None:
        return weight
    # A float64 row is stored as pairs of int32 on a last axis of size 2.
    is_float64 = bits.ndim == weight.ndim
    row = bits.view(np.float64)[..., 0] if is_float64 else bits.view(np.float32)
    return weight.at[..., padding_idx, :].set(row.astype(weight.dtype))
