"""Damaged transformers checkpoints, for tests of the errors that they cause."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", "pad_token_id": 3, "hidden_size": 4},
    {"model_type": "gemma2", "vocab_size": 9},
    {"model_type": "granite", "embedding_multiplier": 2.0},
    {"model_type": "afmoe", "mup_enabled": True},
    {"model_type": "t5", "dropout_rate": 0.2},
    {"model_type": "bert", "pad_token_id": 0, "layer_norm_eps": 1e-6},
    {"model_type": "bert", "position_embedding_type": "relative_key"},
    {"model_type": "roberta", "pad_token_id": 1, "hidden_dropout_prob": 0.3},
    {"model_type": "gpt2", "embd_pdrop": 0.1},
    {"model_type": "opt", "hidden_size": 4, "word_embed_proj_dim": 4},
    {"model_type": "electra", "hidden_size": 4, "embedding_size": 4},
    {"model_type": "llava", "text_config": {"model_type": "llama", "pad_token_id": 2}},
]
NAMES = {
    "llama": ["model.embed_tokens.weight"],
    "t5": ["shared.weight"],
    "gpt2": ["wte.weight", "wpe.weight"],
    "opt": ["model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"],
    "llava": ["language_model.model.embed_tokens.weight"],
}
BERT_NAMES = [
    *("word_embeddings.weight", "position_embeddings.weight"),
    *("token_type_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 4, 9, -9, 10, 2**31, 2**63, -(2**63), 10**400, 10**4000),
    *(0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), -float("inf"), 2.0),
    *("", "bert", "absolute", "\x00", "\ud800", "a" * 5000, "1", "nan", "NaN"),
    *([], {}, [1], [[]], {"model_type": "llama"}, {"a": {"b": []}}),
]
KEYS = sorted({key for config in CONFIGS for key in config})
TEXTS: list[bytes] = [
    *(b"", b"{", b"null", b"[]", b'"a"', b"1", b"NaN", b"\xff\xfe{}", b"\xef\xbb\xbf{}"),
    *(
        b"[" * 20_000,
        b'{"a":' * 20_000,
        b'{"model_type": ' + b"[" * 900 + b"]" * 900 + b"}",
    ),
    *(b'{"model_type": "llama", "pad_token_id": 1' + b"0" * 5000 + b"}",),
    *(b'{"model_type": "gpt2", "embd_pdrop": 1e999}', b'{"model_type": "\\ud800"}'),
    *(b'{"model_type": "bert", "model_type": 7}',),
]


def damaged_checkpoints(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Path]]:
    """Yield checkpoints with up to three faults each, and a description of the faults.

    Args:
        folder: Folder to write to. Each checkpoint replaces the one before.
        count: Number of checkpoints.
        seed: Seed of the faults.
    """
    rng = random.Random(seed)
    target = folder / "checkpoint"
    for number in range(count):
        config = json.loads(json.dumps(rng.choice(CONFIGS)))
        target.mkdir(exist_ok=True)
        files = {
            "config.json": json.dumps(config).encode(),
            "model.safetensors": save(tensors_of(config)),
        }
        for path in target.iterdir():
            if path.name not in files:
                _delete(path)
        for name, data in files.items():
            _write(target / name, data)
        faults = []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            fault = rng.choice([_config_value] * 4 + [_config_text, _header] * 2 + FAULTS)
            faults.append(f"{fault.__name__}: {fault(target, rng)}")
        yield (
            f"{number} of seed {seed}: {config['model_type']}: {'; '.join(faults)}",
            target,
        )


def tensors_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of a small checkpoint."""
    names = NAMES.get(config["model_type"])
    if names is None:
        is_bert = config["model_type"] in ("bert", "roberta", "electra")
        names = [f"embeddings.{name}" for name in BERT_NAMES] if is_bert else NAMES["llama"]
    return {
        name: np.ones((4,) if "LayerNorm" in name else (9, 4), np.float32) for name in names
    }


def _config_value(folder: Path, rng: random.Random) -> str:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else None
    except (ValueError, RecursionError):
        return "nothing"
    if not isinstance(config, dict):
        return "nothing"
    inner = config.get("text_config")
    part = inner if isinstance(inner, dict) and rng.random() < 0.5 else config
    key, value = rng.choice(KEYS), rng.choice(VALUES)
    if rng.random() < 0.2:
        part.pop(key, None)
    else:
        part[key] = value
    # Longer integers than Python converts by default are text in the file.
    text = json.dumps(config, default=str) if value != 10**4000 else '{"pad_token_id": 1e9}'
    path.write_text(text)
    return f"{key} = {value!r:.40}" if value != 10**4000 else key


def _config_text(folder: Path, rng: random.Random) -> str:
    text = rng.choice(TEXTS)
    if rng.random() < 0.5 and (folder / "config.json").is_file():
        old = (folder / "config.json").read_bytes()
        at = rng.randrange(len(old) + 1)
        text = rng.choice([old[:at], old[:at] + rng.randbytes(3) + old[at:], old[at:]])
    _write(folder / "config.json", text)
    return repr(text[:40])


def _header(folder: Path, rng: random.Random) -> str:
    """Change one entry of the safetensors header."""
    path = folder / "model.safetensors"
    if not path.is_file():
        return "nothing"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        name = rng.choice(sorted(header))
        entry = header[name]
        key = rng.choice(["dtype", "shape", "data_offsets", "name"])
        if key == "name":
            header[rng.choice(["", "x", "\x00", "__metadata__"])] = header.pop(name)
        elif rng.random() < 0.5:
            entry[key] = rng.choice(VALUES[:14] + VALUES[15:])
        else:
            shapes: list[Any] = [
                [36],
                [9, 4],
                [0, 4],
                [4, 9],
                [2**62, 4],
                [1] * 40,
                [-1, 4],
            ]
            choices = {
                "dtype": ["F16", "BF16", "F64", "I32", "F8_E4M3", "F4", "BOOL", "C64"],
                "shape": [*shapes, [9, 4.0], [True, 36], ["9", 4], [0, 2**62], []],
                "data_offsets": [[0, 0], [144, 0], [0, 10**9], [0], [0, 144, 9], [-8, 144]],
            }
            entry[key] = rng.choice(choices[key])
        text = json.dumps(header).encode()
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return "nothing"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"{key} of {name!r}"


def _safetensors_bytes(folder: Path, rng: random.Random) -> str:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes() if path.is_file() else b"")
    kind = rng.choice(["cut", "flip", "length", "nested", "empty"])
    if kind == "cut":
        del data[rng.randrange(len(data) + 1) :]
    elif kind == "flip" and data:
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(min(len(data), 300))] = rng.randrange(256)
    elif kind == "length":
        data[:8] = rng.choice([0, 1, 2**32, 2**63 - 1, 2**64 - 1, 7]).to_bytes(8, "little")
    elif kind == "nested":
        text = rng.choice([b'{"a":' * 20_000, b"[" * 20_000, b'{"a":1}', b"[]", b"{}"])
        data = bytearray(len(text).to_bytes(8, "little") + text)
    else:
        data = bytearray()
    _write(path, bytes(data))
    return kind


def _index(folder: Path, rng: random.Random) -> str:
    """Add the index of a sharded checkpoint."""
    shards: list[Any] = [
        *(
            "model.safetensors",
            "missing.safetensors",
            "",
            ".",
            "..",
            "../model.safetensors",
        ),
        *("\x00", "a" * 300, "a" * 5000, "\ud800", 7, None, [], {}, "config.json"),
    ]
    names = ["model.embed_tokens.weight", "wte.weight", "shared.weight", "other"]
    weight_map: Any = {name: rng.choice(shards) for name in names}
    index = rng.choice([{"weight_map": weight_map}] * 4 + [{}, [], None, {"weight_map": 3}])
    _write(folder / "model.safetensors.index.json", json.dumps(index).encode())
    return repr(index)[:80]


def _entry(folder: Path, rng: random.Random) -> str:
    """Delete a file or put something else in its place."""
    names = ["config.json", "model.safetensors", "model.safetensors.index.json"]
    path, kind = folder / rng.choice(names), rng.choice(["none", "folder", "loop", "pipe"])
    _delete(path)
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    return f"{kind} for {path.name}"


def _second_file(folder: Path, rng: random.Random) -> str:
    """Rename the safetensors file, and sometimes copy it."""
    path = folder / "model.safetensors"
    if path.is_file() and not path.is_symlink():
        path.rename(folder / "a.safetensors")
        if rng.random() < 0.5:
            shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    return "renamed"


FAULTS = [_safetensors_bytes, _safetensors_bytes, _index, _entry, _second_file]


def _write(path: Path, data: bytes) -> None:
    # Writing is faster than deleting.
    if path.is_symlink() or not path.is_file():
        _delete(path)
    path.write_bytes(data)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    elif os.path.lexists(path):
        path.unlink()
