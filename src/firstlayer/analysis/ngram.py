"""Measure how a text uses the rows of an n-gram table: distinct rows, collisions, pages."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..files.checkpoint import read_json_object
from ..ngram.scheme import Scheme

#: Bytes of a page, the unit in which a mapped file is read.
PAGE = 4096


@dataclass(frozen=True)
class Table:
    """The table of one layer.

    Args:
        layer: Layer of the model, None if there is one table for all.
        columns: Rows that each position reads.
        rows: Number of rows.
        smallest, largest: Numbers of rows that a column hashes to.
        nbytes: Size of the table, None if the bytes of a row are not known.
    """

    layer: int | None
    columns: int
    rows: int
    smallest: int
    largest: int
    nbytes: int | None


@dataclass(frozen=True)
class Usage:
    """Rows of one table that a text reads.

    Args:
        layer: Layer of the model, None if there is one table for all.
        tokens: Number of tokens.
        reads: Rows read in all.
        distinct_rows: Different rows among them.
        distinct_ngrams: Different n-grams, counted in each column.
        collided: Those of them whose row belongs to another n-gram of the text too.
        pages: Different pages that the rows are on, None if the bytes of a row are not
            known.
    """

    layer: int | None
    tokens: int
    reads: int
    distinct_rows: int
    distinct_ngrams: int
    collided: int
    pages: int | None

    @property
    def collision_share(self) -> float:
        """Share of the n-grams whose row belongs to another n-gram too."""
        return self.collided / self.distinct_ngrams if self.distinct_ngrams else 0.0


def tables(scheme: Scheme, *, row_bytes: int | None = None) -> list[Table]:
    """Return the tables of a scheme.

    Args:
        scheme: Scheme of :mod:`firstlayer.ngram`.
        row_bytes: Bytes of a row.

    Example:
        >>> from firstlayer.ngram import SaltedNgram
        >>> scheme = SaltedNgram(orders=(2,), salts=2, rows=1000)
        >>> tables(scheme, row_bytes=256)[0].nbytes
        256000
    """
    found = []
    for layer in layers_of(scheme):
        layout = scheme.layout(layer)
        nbytes = None if row_bytes is None else layout.rows * row_bytes
        sizes = layout.sizes
        found.append(Table(layer, len(sizes), layout.rows, min(sizes), max(sizes), nbytes))
    return found


def usage(
    scheme: Scheme,
    documents: Iterable[np.ndarray],
    *,
    layer: int | None = None,
    row_bytes: int | None = None,
) -> Usage:
    """Return how documents use the rows of a table.

    Args:
        scheme: Scheme of :mod:`firstlayer.ngram`.
        documents: Ids of each document. N-grams do not cross from one into the next.
        layer: Layer whose table is read.
        row_bytes: Bytes of a row; pages are counted if they are given.

    Example:
        >>> from firstlayer.ngram import ByteGroups
        >>> scheme = ByteGroups(sizes=(2,), rows=3)
        >>> found = usage(scheme, [np.array([1, 2, 1, 2, 1])])
        >>> found.reads, found.distinct_ngrams
        (5, 3)
    """
    parts = [np.asarray(ids) for ids in documents if len(ids)]
    if not parts:
        return Usage(layer, 0, 0, 0, 0, 0, None if row_bytes is None else 0)
    rows = np.concatenate([scheme(ids, layer=layer) for ids in parts])
    ngrams = np.concatenate([scheme.ngrams(ids) for ids in parts])
    distinct, collided, orders = 0, 0, scheme.column_orders(layer)
    for order in sorted(set(orders)):
        # One position for each n-gram; the rows of different n-grams may be equal.
        _, first = np.unique(ngrams[:, :order], axis=0, return_index=True)
        for column in np.flatnonzero(np.array(orders) == order):
            _, counts = np.unique(rows[first, column], return_counts=True)
            distinct += first.size
            collided += int(counts[counts > 1].sum())
    used = np.unique(rows)
    pages = None if row_bytes is None else _pages(used, row_bytes)
    return Usage(layer, len(rows), rows.size, used.size, distinct, collided, pages)


def layers_of(scheme: Scheme) -> list[int | None]:
    """Return the layers of a scheme that have a table; [None] if one serves all."""
    return list(getattr(scheme, "layers", (None,)))


def row_bytes_of(config: dict[str, Any]) -> int | None:
    """Return the bytes of a row that a model's config states, in the released format.

    Example:
        >>> row_bytes_of({"engram_head_dim": 256})
        264
    """
    if isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    if width := config.get("engram_head_dim"):
        return width + width // 32  # fp8 and one scale for 32 numbers
    if (width := config.get("ple_embed_dim")) and (size := config.get("ngram_size")):
        columns = (size - 1) * config.get("heads_per_ngram", 8)
        return 2 * (width // columns)  # bfloat16
    return None


def read_model(path: str) -> tuple[dict[str, Any], Any]:
    """Return the config of a model and its tokenizer, None if there is none.

    Args:
        path: Folder with ``config.json`` and perhaps ``tokenizer.json``, or the config.
    """
    place = Path(path)
    config = place / "config.json" if place.is_dir() else place
    tokenizer, file = None, config.with_name("tokenizer.json")
    if file.exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    return read_json_object(config), tokenizer


def _pages(rows: np.ndarray, row_bytes: int) -> int:
    first = rows * row_bytes // PAGE
    last = ((rows + 1) * row_bytes - 1) // PAGE
    if (first == last).all():
        return np.unique(first).size
    spans = [first + step for step in range(int((last - first).max()) + 1)]
    return np.unique(np.concatenate([s[s <= last] for s in spans])).size
