"""Folders of word vectors, readable by model2vec and sentence-transformers.

``model.safetensors`` holds the table as ``embeddings``, ``tokenizer.json`` the tokenizer,
``config.json`` and ``modules.json`` the metadata that model2vec
(``StaticModel.from_pretrained``) and sentence-transformers (``StaticEmbedding``) read. A
table trained with character n-grams has their rows, as ``ngrams``, in
``subwords.safetensors``; the rows of ``embeddings`` are those of complete words. A table
with phrases has ``phrases.json``: for each pass, the pairs of tokens that are joined. A run
that can go on has its state in ``training.safetensors``. Other libraries ignore these
files.

A folder is replaced atomically (:mod:`firstlayer.files.atomic`). The files of one save
carry the same generation, a digest of what was saved, in ``config.json`` and in the headers
of the safetensors files. Firstlayer reads all files from one version of the folder and
compares the generations, so it never mixes two saves; other libraries' readers have no such
check.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from ..files.atomic import (
    Opener,
    check_writable,
    read_folder,
    recover_folder,
    replacing_folder,
)
from ..files.checkpoint import read_header, read_json_object
from ..files.safetensors import KEY, config_in, read, write
from .table import Subwords

T = TypeVar("T")

MODEL = "model.safetensors"
TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
MODULES = "modules.json"
TRAINING = "training.safetensors"
PHRASES = "phrases.json"
SUBWORDS = "subwords.safetensors"
#: Files of such a folder. A folder with any other file is never replaced.
FILES = {MODEL, TOKENIZER, CONFIG, MODULES, TRAINING, PHRASES, SUBWORDS}
#: Longest n-gram that is read, in characters.
MAX_LENGTH = 64


def check_output_folder(folder: str | os.PathLike[str], *, replace: bool) -> None:
    """Raise an error if the folder cannot be created or must not be replaced."""
    path, name = Path(folder).resolve(), str(Path(folder))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to make {name} in")
    check_writable(path.parent)
    recover_folder(path)
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise FileExistsError(f"{name} exists and is not a folder")
    names = {entry.name for entry in path.iterdir()}
    if strange := sorted(names - FILES):
        raise FileExistsError(f"{name} holds {strange[0]!r}, so it is not replaced")
    if names and not replace:
        raise FileExistsError(f"{name} exists already")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        # Its files could not be removed afterwards.
        raise PermissionError(f"{name} is read-only, so it is not replaced")


def write_folder(
    folder: str | os.PathLike[str],
    weight: Float[np.ndarray, "num_embeddings embedding_dim"],
    *,
    tokenizer: Any,
    about: dict[str, Any],
    state: dict[str, np.ndarray] | None = None,
    phrases: str | None = None,
    subwords: Subwords | None = None,
    replace: bool = False,
    normalize: bool = True,
) -> None:
    """Write a table and its tokenizer atomically.

    Args:
        folder: Output folder.
        weight: The table.
        tokenizer: A ``tokenizers.Tokenizer`` with one token per row, or its JSON.
        about: Training options and digest of the text, for ``config.json``.
        state: State of a run that can go on.
        phrases: Content of ``phrases.json``, or None without phrases.
        subwords: Rows of character n-grams, or None.
        replace: Whether to replace an existing folder of word vectors.
        normalize: Whether vectors of texts are scaled to unit length.
    """
    tokenizer_json = tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()
    check_output_folder(folder, replace=replace)
    ngrams = {} if subwords is None else {"ngrams": subwords.table[-subwords.buckets :]}
    arrays = {**ngrams, **(state or {})}
    generation = _digest(weight, tokenizer_json + (phrases or ""), about, arrays)
    config = {
        "model_type": "model2vec",
        "architectures": ["StaticModel"],
        "hidden_dim": weight.shape[1],
        "embedding_dtype": weight.dtype.name,
        "max_length": None,
        "normalize": normalize,
        KEY: {**about, "generation": generation},
    }
    kinds = ("StaticEmbedding", "Normalize") if normalize else ("StaticEmbedding",)
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    with replacing_folder(Path(folder).resolve()) as new:
        write(new / MODEL, {"embeddings": weight}, {"generation": generation})
        _write_text(new / TOKENIZER, tokenizer_json)
        _write_text(new / CONFIG, json.dumps(config, indent=2))
        _write_text(new / MODULES, json.dumps(modules, indent=2))
        if phrases is not None:
            _write_text(new / PHRASES, phrases)
        if subwords is not None:
            lengths = {"lengths": list(subwords.lengths), "generation": generation}
            write(new / SUBWORDS, ngrams, lengths)
        if state is not None:
            integers = {name: a for name, a in state.items() if a.dtype.kind != "f"}
            tensors = {name: a for name, a in state.items() if name not in integers}
            counts = {name: a.tolist() for name, a in integers.items()}
            write(new / TRAINING, tensors, {"counts": counts, "generation": generation})


def read_one_save(folder: str | os.PathLike[str], read: Callable[[Opener], T]) -> T:
    """Return ``read(opener)``; all files that the opener opens are of the same save."""
    path = Path(folder)

    def read_checked(opener: Opener) -> T:
        result = read(opener)
        _check_generations(path, opener)
        return result

    return read_folder(path, read_checked, names=FILES)


def read_state(
    folder: str | os.PathLike[str], *, opener: Opener | None = None
) -> dict[str, np.ndarray]:
    """Return the state of a run that can be resumed."""
    path = Path(folder) / TRAINING
    try:
        tensors, config = read(path, opener=opener)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{os.fspath(folder)} has no run to resume: {TRAINING} is missing; a "
            "finished run has it only after --keep-state"
        ) from None
    counts = config.get("counts")
    if not isinstance(counts, dict):
        raise ValueError(f"{path} does not hold the state of a run")
    return tensors | {name: np.array(number) for name, number in counts.items()}


def read_subwords(
    folder: str | os.PathLike[str], width: int, *, opener: Opener | None = None
) -> Subwords | None:
    """Return the rows of character n-grams, or None if the folder has none.

    Args:
        folder: The folder.
        width: Width of the rows of words.
        opener: Opens the file.
    """
    path = Path(folder) / SUBWORDS
    try:
        tensors, config = read(path, opener=opener)
    except FileNotFoundError:
        return None
    table, lengths = tensors.get("ngrams"), config.get("lengths")
    if table is None or table.ndim != 2 or table.shape[1] != width or not len(table):
        found = None if table is None else table.shape
        raise ValueError(f"{path} must have rows of n-grams of width {width}, got {found}")
    match lengths:
        case [int(least), int(most)] if 1 <= least <= most <= MAX_LENGTH:
            rows = table.astype(np.float32, copy=False)
            return Subwords(rows, len(rows), (int(least), int(most)))
    raise ValueError(
        f"{path} must have n-grams of 1 to {MAX_LENGTH} characters, got {lengths!r}"
    )


def read_config(
    folder: str | os.PathLike[str], *, opener: Opener | None = None
) -> dict[str, Any]:
    """Return the contents of ``config.json``, or an empty dict without that file."""
    try:
        return read_json_object(Path(folder) / CONFIG, opener=opener)
    except FileNotFoundError:
        return {}


def _check_generations(folder: Path, opener: Opener) -> None:
    """Raise a ValueError if the files of a folder are of different saves."""
    about = read_config(folder, opener=opener).get(KEY)
    expected = about.get("generation") if isinstance(about, dict) else None
    if expected is None:
        # Another program wrote the folder.
        return
    for name in (MODEL, TRAINING, SUBWORDS):
        found = _generation(folder / name, opener)
        if found is not None and found != expected:
            raise ValueError(
                f"{folder} holds files of different saves: the generation of {CONFIG} is "
                f"{expected!r}, but that of {name} is {found!r}"
            )


def _generation(path: Path, opener: Opener) -> Any:
    try:
        _, metadata = read_header(path, opener=opener)
    except FileNotFoundError:
        return None
    return config_in(metadata, path).get("generation") if KEY in metadata else None


def _digest(
    weight: np.ndarray, tokenizer: str, about: dict[str, Any], state: dict[str, np.ndarray]
) -> str:
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    digest.update(tokenizer.encode())
    for name, array in [("", weight), *sorted(state.items())]:
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def _write_text(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
