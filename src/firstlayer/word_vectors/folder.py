"""A learned table in a folder that other programs open.

``model.safetensors`` holds the table as ``embeddings``, ``tokenizer.json`` the tokenizer of
the ``tokenizers`` package, ``config.json`` and ``modules.json`` what model2vec
(``StaticModel.from_pretrained``) and sentence-transformers (``StaticEmbedding``) ask for.
A run that was interrupted leaves ``training.safetensors`` too, with which it goes on.

The folder is written under another name beside its place and renamed when it is whole, so
whatever happens leaves the old folder or the new one.
"""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from ..files.safetensors import KEY, read, write

MODEL = "model.safetensors"
TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
MODULES = "modules.json"
TRAINING = "training.safetensors"
#: What such a folder may hold; one that holds anything else is never replaced.
FILES = {MODEL, TOKENIZER, CONFIG, MODULES, TRAINING}


def check_place(folder: str | os.PathLike[str], *, replace: bool) -> None:
    """Refuse a folder that is there already, unless it may be and can be replaced.

    Args:
        folder: Where something is to be written.
        replace: Whether a folder of ours may be replaced.
    """
    path, name = Path(folder), str(Path(folder))
    parent = path.resolve().parent
    if not parent.is_dir():
        raise FileNotFoundError(f"no folder {parent} to make {name} in")
    check_writable(parent)
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise FileExistsError(f"{name} exists and is no folder")
    held = {entry.name for entry in path.iterdir()}
    if strange := sorted(held - FILES):
        raise FileExistsError(f"{name} holds {strange[0]!r}, so it is not replaced")
    if held and not replace:
        raise FileExistsError(f"{name} exists already")


def check_writable(folder: Path) -> None:
    """Refuse a folder in which nothing can be made; before long work, not after it.

    Permissions do not tell of a disk that is read-only, so it is tried.

    Args:
        folder: One that is there.
    """
    beside = _beside(folder / "new")
    try:
        beside.mkdir()
        beside.rmdir()
    except OSError as error:
        reason = str(error.strerror).lower()
        raise type(error)(f"nothing can be written in {folder}: {reason}") from None


def _beside(path: Path) -> Path:
    return path.with_name(f".firstlayer-{secrets.token_hex(8)}.tmp")


@contextlib.contextmanager
def replacing_folder(
    folder: str | os.PathLike[str], *, replace: bool
) -> Generator[Path, None, None]:
    """Make a folder that takes its place once everything in it is written.

    Args:
        folder: Where it is to be.
        replace: Whether a folder of ours that is there may be replaced.
    """
    check_place(folder, replace=replace)
    target = Path(folder).resolve()
    new, old = beside = _beside(target), _beside(target)
    new.mkdir()
    try:
        yield new
        if target.exists():
            target.rename(old)
        new.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        for path in beside:
            shutil.rmtree(path, ignore_errors=True)


def write_folder(
    folder: str | os.PathLike[str],
    weight: Float[np.ndarray, "num_embeddings embedding_dim"],
    *,
    tokenizer: Any,
    about: dict[str, Any],
    state: dict[str, np.ndarray] | None = None,
    replace: bool = False,
) -> None:
    """Write a learned table, all of it or nothing.

    Args:
        folder: Where to.
        weight: The table.
        tokenizer: A ``tokenizers.Tokenizer`` with a token for each row.
        about: What the table was learned from and how, for ``config.json``.
        state: What an interrupted run goes on from.
        replace: Whether a folder of ours that is there may be replaced.
    """
    config = {
        "model_type": "model2vec",
        "architectures": ["StaticModel"],
        "hidden_dim": weight.shape[1],
        "embedding_dtype": weight.dtype.name,
        "max_length": None,
        "normalize": True,
        KEY: about,
    }
    kinds = ("StaticEmbedding", "Normalize")
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    with replacing_folder(folder, replace=replace) as new:
        write(new / MODEL, {"embeddings": weight}, {})
        _write_text(new / TOKENIZER, tokenizer.to_str())
        _write_text(new / CONFIG, json.dumps(config, indent=2))
        _write_text(new / MODULES, json.dumps(modules, indent=2))
        if state is not None:
            whole = {name: a for name, a in state.items() if a.dtype.kind != "f"}
            tensors = {name: a for name, a in state.items() if name not in whole}
            counts = {name: a.tolist() for name, a in whole.items()}
            write(new / TRAINING, tensors, {"counts": counts})


def read_state(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return what an interrupted run goes on from.

    Args:
        folder: Where :func:`write_folder` put it.
    """
    path = Path(folder) / TRAINING
    if not path.exists():
        what = "has nothing to go on from" if path.parent.is_dir() else "is no folder"
        raise FileNotFoundError(f"{os.fspath(folder)} {what}: {TRAINING} is not there")
    tensors, config = read(path)
    counts = config.get("counts")
    if not isinstance(counts, dict):
        raise ValueError(f"{path} is not what an interrupted run left")
    return tensors | {name: np.array(number) for name, number in counts.items()}


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what ``config.json`` says, nothing if there is none.

    Args:
        folder: Where it is.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object, got {type(config).__name__}")
    return config


def _write_text(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
