"""Inspect the embedding tables of a checkpoint: norms, odd rows, ranks, tied heads.

Tables are read a few megabytes at a time, and nothing else of a file is read. Rows that are
zero, duplicated, not finite or much shorter than the rest belong to tokens that training
hardly saw; such tokens make models misbehave (Land and Bartolo 2024).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from ..files.atomic import Opener
from ..files.checkpoint import (
    Checkpoint,
    StoredTensor,
    checkpoint_in,
    open_checkpoint,
    role_of,
)
from ..vector_files.folder import TOKENIZER, read_config, read_one_save
from ..vector_files.reading import tokens_in
from ..vector_files.rows import FileRows, is_checkpoint, open_rows
from ..vector_files.vocabulary import read_optional
from .position_scheme import Scheme, position_scheme
from .row_statistics import row_statistics

#: Under-trained rows have a norm below this fraction of the median, and are also outliers:
#: the logarithm of their norm is below the outer fence (Tukey 1977), so many interquartile
#: ranges below the lower quartile. The norms of word vectors differ widely by frequency.
UNDER_TRAINED = 0.5
OUTER_FENCE = 3.0
#: Number of rows listed of each kind.
LISTED = 10


@dataclass(frozen=True)
class OddRows:
    """Rows of one odd kind.

    Args:
        count: Number of rows.
        rows: The first few row numbers.
        tokens: Their tokens, if the checkpoint has a tokenizer.
    """

    count: int
    rows: list[int]
    tokens: list[str]


@dataclass(frozen=True)
class Table:
    """Statistics of one table.

    Args:
        name: Name in the checkpoint.
        role: ``token``, ``position``, ``segment``, ``head``, ``bias``, or None.
        shape: Number of rows and width.
        dtype: Dtype code of the safetensors format.
        nbytes: Size in bytes.
        norm_min: Smallest norm of a finite row.
        norm_median: Median norm of finite rows that are not zero.
        norm_max: Largest norm of a finite row.
        zero: Rows of zeros.
        duplicate: Rows that equal an earlier one bit for bit, except zero rows.
        not_finite: Rows with a NaN or an infinity.
        under_trained: Rows with less than half the median norm that are outliers, except
            zero rows.
        effective_rank: Exponential of the entropy of the singular values (Roy and Vetterli
            2007).
        rank_rows: Number of rows, sampled evenly, used for the effective rank.
    """

    name: str
    role: str | None
    shape: tuple[int, int]
    dtype: str
    nbytes: int
    norm_min: float
    norm_median: float
    norm_max: float
    zero: OddRows
    duplicate: OddRows
    not_finite: OddRows
    under_trained: OddRows
    effective_rank: float
    rank_rows: int


@dataclass(frozen=True)
class Report:
    """Embeddings of a checkpoint.

    Args:
        path: Path of the checkpoint.
        files: Number of files.
        tensors: Number of tensors.
        tables: Embedding tables, largest first.
        tied: Whether the output head shares the token table; None if unknown.
        why_tied: Reason for that answer.
        position: Position scheme of the config.
    """

    path: str
    files: int
    tensors: int
    tables: list[Table]
    tied: bool | None
    why_tied: str
    position: Scheme


def inspect(path: str | os.PathLike[str], *, names: Sequence[str] = ()) -> Report:
    """Inspect the embedding tables of a checkpoint.

    Args:
        path: A safetensors or torch file, the index of a sharded checkpoint, a folder with
            one of them, or another file with a table; see
            :func:`firstlayer.open_vectors`.
        names: Tensors to inspect instead of those with the name of an embedding table.
    """
    place = Path(path)
    if place.exists() and not place.is_dir() and not is_checkpoint(place):
        return _report_of_rows(place, names)
    folder = place.parent if place.is_file() else place
    return read_one_save(folder, lambda opener: _report(place, names, opener))


def _report_of_rows(path: Path, names: Sequence[str]) -> Report:
    """Return the report of a file with one table."""
    if names:
        raise ValueError(f"{path} has one table without a name, but names has {names[0]!r}")
    rows = open_rows(path)
    tokens = {row: word for row, word in enumerate(rows.words) if word}
    return Report(
        path=os.fspath(path),
        files=1,
        tensors=1,
        tables=[_table(rows, tokens)],
        tied=None,
        why_tied="the file has one table",
        position=position_scheme({}, positions=None),
    )


def _report(path: Path, names: Sequence[str], opener: Opener) -> Report:
    location = path if path.is_file() else checkpoint_in(path, opener=opener)
    checkpoint = open_checkpoint(location, opener=opener)
    folder = checkpoint.files[0].parent
    config = read_config(folder, opener=opener)
    tokens = _tokens(folder / TOKENIZER, opener)
    tables = [_table(tensor, tokens) for tensor in _selected(checkpoint, names)]
    positions = next(
        (t.shape[0] for t in checkpoint.tables() if t.role == "position"), None
    )
    tied, why = _tied(checkpoint, config)
    return Report(
        path=os.fspath(path),
        files=len(checkpoint.files),
        tensors=len(checkpoint.tensors),
        tables=tables,
        tied=tied,
        why_tied=why,
        position=position_scheme(config, positions=positions),
    )


def _selected(checkpoint: Checkpoint, names: Sequence[str]) -> list[StoredTensor]:
    if not names:
        if tables := checkpoint.tables():
            return tables
        names = sorted(checkpoint.tensors)
        some = ", ".join(names[:3] + ["…"] * (len(names) > 3))
        among = f" among its tensors {some}" if names else ""
        raise ValueError(f"{checkpoint.files[0]} has no embedding table{among}")
    for name in names:
        if name not in checkpoint.tensors:
            raise ValueError(f"{checkpoint.files[0]} has no tensor {name!r}")
        shape = checkpoint.tensors[name].shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"{name} must have rows and a width, got shape {shape}")
    return [checkpoint.tensors[name] for name in names]


def _tokens(path: Path, opener: Opener) -> dict[int, str]:
    """Return the tokens by id from a file of the tokenizers package, if there is one."""
    content = read_optional(path, opener=opener)
    return {} if content is None else tokens_in(content, path)


def _table(tensor: StoredTensor | FileRows, tokens: dict[int, str]) -> Table:
    if tensor.role not in ("token", "head"):
        tokens = {}
    found = row_statistics(tensor.chunks(), rows=tensor.shape[0])
    norms, finite = found.norms, np.isfinite(found.norms)
    typical = finite & (norms > 0)
    median = float(np.median(norms[typical])) if typical.any() else 0.0
    return Table(
        name=tensor.name,
        role=tensor.role,
        shape=(tensor.shape[0], tensor.shape[1]),
        dtype=tensor.dtype,
        nbytes=tensor.nbytes,
        norm_min=float(norms[finite].min()) if finite.any() else 0.0,
        norm_median=median,
        norm_max=float(norms[finite].max()) if finite.any() else 0.0,
        zero=_odd_rows(norms == 0, tokens),
        duplicate=_odd_rows(found.duplicate, tokens),
        not_finite=_odd_rows(~finite, tokens),
        under_trained=_odd_rows(typical & (norms < _fence(norms[typical])), tokens),
        effective_rank=found.effective_rank,
        rank_rows=found.rank_rows,
    )


def _fence(norms: np.ndarray) -> float:
    """Return the norm below which a row is far shorter than most."""
    if not norms.size:
        return 0.0
    low, median, high = np.quantile(np.log(norms), [0.25, 0.5, 0.75])
    fence = low - OUTER_FENCE * (high - low)
    return float(np.exp(min(fence, median + np.log(UNDER_TRAINED))))


def _odd_rows(is_odd: Bool[np.ndarray, " rows"], tokens: dict[int, str]) -> OddRows:
    rows = np.flatnonzero(is_odd)[:LISTED].tolist()
    names = [tokens[row] for row in rows if row in tokens]
    return OddRows(int(np.count_nonzero(is_odd)), rows, names)


def _tied(checkpoint: Checkpoint, config: dict[str, Any]) -> tuple[bool | None, str]:
    """Return whether the head shares the token table, and the reason."""
    roles = {tensor.role: tensor for tensor in reversed(checkpoint.tables())}
    head, token = roles.get("head"), roles.get("token")
    is_tied = config.get("tie_word_embeddings")
    for dropped, kept in checkpoint.metadata.items():
        if {role_of(dropped), role_of(str(kept))} == {"token", "head"}:
            return True, f"the file's metadata says that {dropped} is {kept}"
    if token is None:
        return None, "there is no token table"
    if head is not None:
        is_alike = head.shape == token.shape and head.dtype == token.dtype
        if is_alike and _equal(head, token):
            return True, f"{head.name} is stored too, with the same bits"
        return False, f"{head.name} differs from {token.name}"
    if is_tied is None:
        return None, "no head is stored, and no config says whether it is tied"
    if is_tied:
        return True, "no head is stored, and the config says tie_word_embeddings"
    return False, "no head is stored, and the config says not to tie"


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    pairs = zip(first.chunks(), second.chunks(), strict=True)
    return all(one.tobytes() == other.tobytes() for one, other in pairs)
