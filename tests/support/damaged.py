"""Damage files at random and open them: one sentence, no crash, bounded memory."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

import firstlayer.numpy as fn
from firstlayer.analysis.inspect import inspect
from firstlayer.files.safetensors import write
from firstlayer.vector_files.folder import read_one_save, read_state, write_folder
from firstlayer.vector_files.table import Subwords
from firstlayer.word_vectors.encode import encode
from firstlayer.word_vectors.neighbors import neighbors, parse
from firstlayer.word_vectors.vectors import open_vectors
from tests.support.traced_memory import peak_since, start_peak, tracing

#: Exceptions that readers document.
ALLOWED = (ValueError, OSError)
#: Memory above this is not accounted for by the small files of this module.
MAX_BYTES = 64 << 20
#: Values that replace numbers in JSON and in text headers.
NUMBERS = ["0", "-1", "1e999", "4294967296", "9223372036854775807", "1" * 400, "null"]
NUMBERS += ["1.5", '"1"', "[]", "{}", "true", "NaN", "[" * 2000]


def make_files(folder: Path) -> dict[Path, Callable[[], Any]]:
    """Write one file of each kind; return what reads each of them."""
    rng = np.random.default_rng(0)
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "king", "queen", "red"])}
    weight = rng.standard_normal((4, 6)).astype(np.float32)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = folder / "vectors"
    state = {"table": weight, "place": np.array([1, 2])}
    subwords = Subwords(weight[:3], 3, (3, 6))
    write_folder(
        vectors,
        weight,
        tokenizer=tokenizer,
        about={"v": 1},
        state=state,
        subwords=subwords,
    )
    lines = [
        f"{word} {' '.join(map(str, row))}"
        for word, row in zip(vocabulary, weight, strict=True)
    ]
    (folder / "glove.txt").write_text("\n".join(lines) + "\n")
    (folder / "word2vec.txt").write_text("4 6\n" + "\n".join(lines) + "\n")
    rows = (
        f"{word} ".encode() + row.tobytes()
        for word, row in zip(vocabulary, weight, strict=True)
    )
    (folder / "word2vec.bin").write_bytes(b"4 6\n" + b"\n".join(rows))
    layer = fn.EmbeddingLayer(5, 4, max_positions=3, layer_norm=True, rng=0)
    fn.save(folder / "layer.safetensors", layer)
    write(folder / "any.safetensors", {"wte.weight": weight, "lm_head.weight": weight}, {})

    def use(path: Path) -> None:
        table = open_vectors(path)
        neighbors(table, parse(["king"]), count=3)
        list(encode(table, ["king red", "queen kingly"]))

    readers: dict[Path, Callable[[], Any]] = {
        path: lambda: (use(vectors), inspect(vectors))
        for path in vectors.iterdir()
        if path.name != "training.safetensors"
    }
    readers[vectors / "training.safetensors"] = lambda: read_one_save(
        vectors, lambda opener: read_state(vectors, opener=opener)
    )
    for name in ("glove.txt", "word2vec.txt", "word2vec.bin"):
        readers[folder / name] = lambda path=folder / name: use(path)
    readers[folder / "layer.safetensors"] = lambda: fn.load(folder / "layer.safetensors")
    readers[folder / "any.safetensors"] = lambda: inspect(folder / "any.safetensors")
    return readers


def damage(content: bytes, draw: random.Random) -> bytes:
    """Return a damaged copy of a file's content."""
    place = draw.randrange(len(content))
    match draw.randrange(6):
        case 0:
            changed = bytearray(content)
            for _ in range(draw.choice([1, 1, 4, 50])):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            return bytes(changed)
        case 1:
            return content[:place]
        case 2:
            return (
                content[:place] + draw.randbytes(draw.choice([1, 8, 100])) + content[place:]
            )
        case 3:
            end = draw.randrange(place, len(content))
            return content[:place] + content[end:]
        case 4:
            numbers = list(re.finditer(rb"-?\d+(\.\d+)?", content[:5000]))
            if not numbers:
                return b""
            number, new = draw.choice(numbers), draw.choice(NUMBERS).encode()
            changed = content[: number.start()] + new + content[number.end() :]
            return _with_header_length(content, changed)
        case _:
            words = list(re.finditer(rb'"[^"]*"|true|null', content[:5000]))
            if not words:
                return content[place:]
            one, other = draw.choice(words), draw.choice(words)
            changed = content[: one.start()] + other[0] + content[one.end() :]
            return _with_header_length(content, changed)


def _with_header_length(content: bytes, changed: bytes) -> bytes:
    """Correct the header's length, so that the damage inside the header is seen."""
    length = int.from_bytes(content[:8], "little")
    if not 0 < length < len(content) or content[8:9] != b"{":
        return changed
    length = max(0, length + len(changed) - len(content))
    return length.to_bytes(8, "little") + changed[8:]


def open_damaged(read: Callable[[], Any]) -> tuple[str, int]:
    """Call the reader of a damaged file in a traced block.

    An error must be an expected one, with a message of one line.

    Returns:
        ``"read"`` or ``"refused"``, and the peak of the memory.
    """
    start, outcome = start_peak(), "read"
    try:
        read()
    except ALLOWED as error:
        outcome, text = "refused", str(error)
        assert text.strip(), f"{type(error).__name__} without a message"
        assert len(text) < 1500 and "\n" not in text, text[:300]
    return outcome, peak_since(start)


def open_damaged_files(folder: Path, count: int, *, seed: int = 0) -> dict[str, int]:
    """Open ``count`` damaged files; return how many were read and how many refused."""
    draw = random.Random(seed)
    readers = make_files(folder)
    originals = {path: path.read_bytes() for path in readers}
    counts = {"read": 0, "refused": 0, "peak MB": 0}
    paths = sorted(readers)
    with tracing():
        for number in range(count):
            path = paths[number % len(paths)]
            content = originals[path]
            path.write_bytes(damage(content, draw))
            outcome, peak = open_damaged(readers[path])
            counts[outcome] += 1
            assert peak < MAX_BYTES, f"{peak} bytes for {path.stat().st_size}"
            counts["peak MB"] = max(counts["peak MB"], peak >> 20)
            path.write_bytes(content)
    return counts
