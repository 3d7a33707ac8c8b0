"""What the embedding tables of a checkpoint are like, row by row.

Tables are read a few megabytes at a time and nothing else of the file is touched. Rows that
are zero, equal, not finite, or much shorter than the rest are tokens that training hardly
ever met; feeding them to a model does strange things (Land and Bartolo 2024).
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from ..files.checkpoint import Checkpoint, Tensor, open_checkpoint, role_of
from ..word_vectors.folder import TOKENIZER, read_config
from ._scheme import Scheme, position_scheme
from ._survey import survey

#: A row shorter than this part of the median row is called under-trained.
SHORT = 0.5
#: How many rows of each kind are listed.
LISTED = 10


@dataclass(frozen=True)
class Odd:
    """Rows that stand out in one way.

    Args:
        count: How many.
        rows: The first few.
        tokens: Their tokens, where a tokenizer lies beside the checkpoint.
    """

    count: int
    rows: list[int]
    tokens: list[str]


@dataclass(frozen=True)
class Table:
    """What a table is like.

    Args:
        name: What it is called in the checkpoint.
        role: ``token``, ``position``, ``segment``, ``head``, ``bias``, or None.
        shape: Rows and width.
        dtype: Of its numbers, by the format's code.
        nbytes: How much room it takes.
        norm_min: The shortest row, of those that are finite.
        norm_median: The median row.
        norm_max: The longest row.
        zero: Rows that are zero.
        duplicate: Rows that equal an earlier one to the bit, zeros left aside.
        not_finite: Rows with a NaN or an infinity.
        under_trained: Rows shorter than half the median, zeros left aside.
        effective_rank: In how many directions rows spread: the exponential of the entropy
            of the singular values (Roy and Vetterli 2007).
        rank_rows: How many rows, from all over the table, that was taken from.
    """

    name: str
    role: str | None
    shape: tuple[int, int]
    dtype: str
    nbytes: int
    norm_min: float
    norm_median: float
    norm_max: float
    zero: Odd
    duplicate: Odd
    not_finite: Odd
    under_trained: Odd
    effective_rank: float
    rank_rows: int


@dataclass(frozen=True)
class Report:
    """What a checkpoint's embeddings are like.

    Args:
        path: Where it is.
        files: How many files it is in.
        tensors: How many tensors it has in all.
        tables: Its embedding tables, largest first.
        tied: Whether the output head is the table of tokens; None if nothing says so.
        why_tied: How that is known.
        position: The position scheme that the config asks for.
    """

    path: str
    files: int
    tensors: int
    tables: list[Table]
    tied: bool | None
    why_tied: str
    position: Scheme


def inspect(path: str | os.PathLike[str], *, names: Sequence[str] = ()) -> Report:
    """Look at the embedding tables of a checkpoint.

    Args:
        path: A safetensors file, an index of several, or a folder with either.
        names: Which tensors to look at instead of those whose names say they are tables.
    """
    checkpoint = open_checkpoint(path)
    folder = checkpoint.files[0].parent
    config, tokens = read_config(folder), _tokens(folder / TOKENIZER)
    chosen = _chosen(checkpoint, names)
    tables = [_table(checkpoint, tensor, tokens) for tensor in chosen]
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


def _chosen(checkpoint: Checkpoint, names: Sequence[str]) -> list[Tensor]:
    if not names:
        if tables := checkpoint.tables():
            return tables
        some = ", ".join(sorted(checkpoint.tensors)[:3]) or "no tensor at all"
        raise ValueError(f"{checkpoint.files[0]} has no embedding table, but {some}")
    for name in names:
        if name not in checkpoint.tensors:
            raise ValueError(f"{checkpoint.files[0]} has no tensor {name!r}")
        shape = checkpoint.tensors[name].shape
        if len(shape) != 2:
            raise ValueError(f"{name} must have rows and a width, got shape {shape}")
    return [checkpoint.tensors[name] for name in names]


def _tokens(path: Path) -> dict[int, str]:
    """Return the token of each id, by the tokenizers package's file or nothing."""
    if not path.is_file():
        return {}
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = held["model"]["vocab"]
        added = held.get("added_tokens", ())
        more = {token["id"]: str(token["content"]) for token in added}
        if isinstance(vocabulary, list):
            return dict(enumerate(str(piece) for piece, _ in vocabulary)) | more
        return {row: token for token, row in vocabulary.items()} | more
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} holds no tokenizer") from None


def _table(checkpoint: Checkpoint, tensor: Tensor, tokens: dict[int, str]) -> Table:
    if tensor.role not in ("token", "head"):
        tokens = {}
    found = survey(checkpoint.chunks(tensor.name), rows=tensor.shape[0])
    norms, finite = found.norms, np.isfinite(found.norms)
    typical = norms[finite & (norms > 0)]
    median = float(np.median(typical)) if typical.size else 0.0
    short = finite & (norms > 0) & (norms < SHORT * median)
    return Table(
        name=tensor.name,
        role=tensor.role,
        shape=(tensor.shape[0], tensor.shape[1]),
        dtype=tensor.dtype,
        nbytes=tensor.nbytes,
        norm_min=float(norms[finite].min()) if finite.any() else 0.0,
        norm_median=median,
        norm_max=float(norms[finite].max()) if finite.any() else 0.0,
        zero=_odd(norms == 0, tokens),
        duplicate=_odd(found.duplicate, tokens),
        not_finite=_odd(~finite, tokens),
        under_trained=_odd(short, tokens),
        effective_rank=found.effective_rank,
        rank_rows=found.rank_rows,
    )


def _odd(which: Bool[np.ndarray, " rows"], tokens: dict[int, str]) -> Odd:
    rows = np.flatnonzero(which)[:LISTED].tolist()
    named = [tokens[row] for row in rows if row in tokens]
    return Odd(int(np.count_nonzero(which)), rows, named)


def _tied(checkpoint: Checkpoint, config: dict[str, Any]) -> tuple[bool | None, str]:
    """Return whether head and table of tokens are one, and how that is known."""
    roles = {tensor.role: tensor for tensor in reversed(checkpoint.tables())}
    head, token = roles.get("head"), roles.get("token")
    said = config.get("tie_word_embeddings")
    for dropped, kept in checkpoint.metadata.items():
        if {role_of(dropped), role_of(str(kept))} == {"token", "head"}:
            return True, f"the file's metadata says that {dropped} is {kept}"
    if token is None:
        return None, "there is no table of tokens"
    if head is not None:
        same = head.shape == token.shape and head.dtype == token.dtype
        if same and _equal(checkpoint, head.name, token.name):
            return True, f"{head.name} is stored too, with the same bits"
        return False, f"{head.name} differs from {token.name}"
    if said is None:
        return None, "no head is stored, and no config says"
    if said:
        return True, "no head is stored, and the config says tie_word_embeddings"
    return False, "no head is stored, and the config says not to tie"


def _equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    pairs = zip(checkpoint.chunks(first), checkpoint.chunks(second), strict=True)
    return all(one.tobytes() == other.tobytes() for one, other in pairs)
