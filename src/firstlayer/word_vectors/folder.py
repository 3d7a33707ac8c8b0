"""Folders of word vectors, readable by model2vec and sentence-transformers.

``model.safetensors`` holds the table as ``embeddings``, ``tokenizer.json`` the tokenizer,
``config.json`` and ``modules.json`` the metadata that model2vec
(``StaticModel.from_pretrained``) and sentence-transformers (``StaticEmbedding``) read. An
interrupted run also writes ``training.safetensors``, from which it resumes.

A folder is written under a temporary name in the same parent and renamed when complete.
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
#: Files of such a folder. A folder with any other file is never replaced.
FILES = {MODEL, TOKENIZER, CONFIG, MODULES, TRAINING}


def check_output_folder(folder: str | os.PathLike[str], *, replace: bool) -> None:
    """Raise an error if the folder cannot be created or must not be replaced."""
    path, name = Path(folder), str(Path(folder))
    parent = path.resolve().parent
    if not parent.is_dir():
        raise FileNotFoundError(f"no folder {parent} to make {name} in")
    check_writable(parent)
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise FileExistsError(f"{name} exists and is not a folder")
    names = {entry.name for entry in path.iterdir()}
    if strange := sorted(names - FILES):
        raise FileExistsError(f"{name} holds {strange[0]!r}, so it is not replaced")
    if names and not replace:
        raise FileExistsError(f"{name} exists already")


def check_writable(folder: Path) -> None:
    """Raise an error if nothing can be created in a folder, before long work starts.

    Creates and removes a folder: permissions alone do not reveal a read-only disk.
    """
    probe = _temporary(folder / "new")
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        reason = str(error.strerror).lower()
        raise type(error)(f"nothing can be written in {folder}: {reason}") from None


def _temporary(path: Path) -> Path:
    return path.with_name(f".firstlayer-{secrets.token_hex(8)}.tmp")


@contextlib.contextmanager
def replacing_folder(
    folder: str | os.PathLike[str], *, replace: bool
) -> Generator[Path, None, None]:
    """Yield a temporary folder that replaces ``folder`` if the block succeeds."""
    check_output_folder(folder, replace=replace)
    target = Path(folder).resolve()
    new, old = temporary = _temporary(target), _temporary(target)
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
        for path in temporary:
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
    """Write a table and its tokenizer atomically.

    Args:
        folder: Output folder.
        weight: The table.
        tokenizer: A ``tokenizers.Tokenizer`` with one token per row.
        about: Training options and digest of the text, for ``config.json``.
        state: State of an interrupted run.
        replace: Whether to replace an existing folder of word vectors.
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
            integers = {name: a for name, a in state.items() if a.dtype.kind != "f"}
            tensors = {name: a for name, a in state.items() if name not in integers}
            counts = {name: a.tolist() for name, a in integers.items()}
            write(new / TRAINING, tensors, {"counts": counts})


def read_state(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the state of an interrupted run."""
    path = Path(folder) / TRAINING
    if not path.exists():
        reason = "has no run to resume" if path.parent.is_dir() else "is not a folder"
        raise FileNotFoundError(f"{os.fspath(folder)} {reason}: {TRAINING} is missing")
    tensors, config = read(path)
    counts = config.get("counts")
    if not isinstance(counts, dict):
        raise ValueError(f"{path} does not hold the state of an interrupted run")
    return tensors | {name: np.array(number) for name, number in counts.items()}


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of ``config.json``, or an empty dict without that file."""
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
