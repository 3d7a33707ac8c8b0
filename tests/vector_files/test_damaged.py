"""Damaged files of every format: one sentence, no crash, bounded memory."""

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from firstlayer.word_vectors.encode import encode
from firstlayer.word_vectors.neighbors import neighbors, parse
from firstlayer.word_vectors.vectors import open_vectors
from tests.support.damaged import damage, open_damaged
from tests.support.damaged_tables import MAX_BYTES, damage_binary
from tests.support.traced_memory import tracing
from tests.support.vector_files import (
    WORDS,
    fasttext_bytes,
    quantized_fasttext_bytes,
    table,
    write_all,
)

COUNT = 700


def use(path: Path) -> None:
    """Open a table and use it."""
    vectors = open_vectors(path)
    list(encode(vectors, ["king red other", "queen"]))
    neighbors(vectors, parse(["king"]), count=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return each file that is damaged, with the path that is opened."""
    folder = tmp_path_factory.mktemp("damaged")
    opened = write_all(folder)
    rows = table(3).repeat(2, axis=0)
    opened["fasttext"] = folder / "grams.bin"
    opened["fasttext"].write_bytes(fasttext_bytes(WORDS, rows, buckets=5))
    opened["ftz"] = folder / "grams.ftz"
    opened["ftz"].write_bytes(
        quantized_fasttext_bytes(
            WORDS,
            np.arange(14, dtype=np.uint8).reshape(7, 2),
            [np.ones((256, 2)), np.ones((256, 1))],
            buckets=9,
            kept=[(3, 0), (8, 1)],
            norms=(np.zeros(7, np.uint8), np.ones(256)),
        )
    )
    pairs = []
    for path in opened.values():
        inner = sorted(path.iterdir()) if path.is_dir() else [path]
        pairs += [(file, path) for file in inner]
    return pairs + [(folder / "side.kv.vectors.npy", folder / "side.kv")]


@pytest.mark.rejects
def test_damaged_files_are_read_or_refused(files):
    draw = random.Random(0)
    for _, path in files:
        # Kernels and packages are loaded before memory is measured.
        use(path)
    counts = {"read": 0, "refused": 0}
    with tracing():
        for number in range(COUNT):
            file, path = files[number % len(files)]
            content = file.read_bytes()
            how = damage_binary if draw.randrange(2) else damage
            file.write_bytes(how(content, draw))
            size = file.stat().st_size
            outcome, peak = open_damaged(partial(use, path))
            counts[outcome] += 1
            file.write_bytes(content)
            assert peak < MAX_BYTES + 50 * size, f"{peak} bytes for {size}: {file}"
    assert counts["read"] > 100 and counts["refused"] > 200
