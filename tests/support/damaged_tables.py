"""Damage files with tables and open them: one sentence, no crash, bounded memory."""

import json
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from firstlayer.stores import MemoryStore, open_store
from firstlayer.stores.formats import format_by_name
from tests.support.damaged import damage, open_damaged
from tests.support.table_files import (
    gguf_bytes,
    gguf_string,
    tensor,
    word2vec_bytes,
    write_safetensors,
    write_sharded,
)
from tests.support.traced_memory import tracing

#: Memory above this and the size of the file is not accounted for; Python's table of names
#: may grow by two megabytes at any time.
MAX_BYTES = 4 << 20
#: Numbers that replace those of binary headers.
NUMBERS = (0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1)


def use(path: Path, **arguments: Any) -> None:
    """Open a table and read some of its rows."""
    with open_store(path, **arguments) as store:
        last = len(store) - 1
        ids = [0, last // 2, last] if len(store) else []
        store.prefetch(ids)
        rows = store.read(ids)
        assert rows.shape == (len(ids), store.shape[1])


def make_files(folder: Path) -> dict[Path, Callable[[], Any]]:
    """Write one file of each kind; return what reads each of them."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((6, 64)).astype(np.float32)
    readers: dict[Path, Callable[[], Any]] = {}

    plain = folder / "plain.safetensors"
    write_safetensors(plain, {"wte.weight": tensor("F32", table)}, note="x")
    converted = folder / "int8.safetensors"
    MemoryStore(table).convert(converted, format="int8").close()
    fp8 = folder / "fp8.safetensors"
    parts = format_by_name("fp8_block").encode(table)
    codes = {"weight": "F8_E4M3", "scale": "F8_E8M0"}
    write_safetensors(fp8, {f"e.{n}": tensor(codes[n], p) for n, p in parts.items()})
    (folder / "table.npy").touch()
    np.save(folder / "table.npy", table)
    for path in (plain, converted, fp8, folder / "table.npy"):
        readers[path] = partial(use, path)

    sharded = folder / "sharded"
    sharded.mkdir()
    shards = {
        f"e.shard_{k}.weight": tensor("F32", table[2 * k : 2 * k + 2]) for k in range(3)
    }
    write_sharded(sharded, shards)
    mlx = folder / "mlx"
    mlx.mkdir()
    numbers = np.ones((6, 2), np.float16)
    words = {"e.weight": tensor("U32", rng.integers(0, 9, (6, 8), dtype=np.uint32))}
    words |= {name: tensor("F16", numbers) for name in ("e.scales", "e.biases")}
    write_safetensors(mlx / "model.safetensors", words)
    config = {"quantization": {"bits": 4, "group_size": 32}}
    (mlx / "config.json").write_text(json.dumps(config))
    for inner in (sharded, mlx):
        readers |= {path: partial(use, inner) for path in inner.iterdir()}

    tokens = b"".join(gguf_string(f"t{i}".encode()) for i in range(40))
    values = (
        gguf_string(b"name") + struct.pack("<I", 8) + gguf_string(b"x"),
        gguf_string(b"tokens") + struct.pack("<IIQ", 9, 8, 40) + tokens,
        gguf_string(b"scores") + struct.pack("<IIQ", 9, 6, 3) + bytes(12),
        gguf_string(b"nested") + struct.pack("<IIQIQ", 9, 9, 1, 4, 1) + bytes(4),
    )
    blocks = rng.integers(0, 99, (6, 68)).astype(np.uint8).tobytes()
    tensors = {"a.bias": (0, (3,), bytes(12)), "token_embd.weight": (8, (6, 64), blocks)}
    gguf = folder / "table.gguf"
    gguf.write_bytes(gguf_bytes(tensors, values=values, alignment=64))
    vectors = folder / "vectors.bin"
    vectors.write_bytes(word2vec_bytes(list("abcdef"), table, newline=True))
    readers[gguf], readers[vectors] = partial(use, gguf), partial(use, vectors)
    use(vectors)
    readers[folder / "vectors.bin.rows"] = partial(use, vectors)
    return readers


def damage_binary(content: bytes, draw: random.Random) -> bytes:
    """Return a copy in which a number near the beginning is another one."""
    size = draw.choice([1, 4, 8])
    place = draw.randrange(min(len(content), 2000))
    number = draw.choice(NUMBERS) % (1 << 8 * size)
    return content[:place] + number.to_bytes(size, "little") + content[place + size :]


def open_damaged_tables(folder: Path, count: int, *, seed: int = 0) -> dict[str, int]:
    """Open ``count`` damaged files; return how many were read and how many refused."""
    draw = random.Random(seed)
    readers = make_files(folder)
    originals = {path: path.read_bytes() for path in readers}
    index = folder / "vectors.bin.rows"
    for read in readers.values():
        # Kernels are loaded before memory is measured.
        read()
    counts = {"read": 0, "refused": 0, "peak KB": 0}
    paths = sorted(readers)
    with tracing():
        for number in range(count):
            path = paths[number % len(paths)]
            content = originals[path]
            is_binary = path.suffix in (".gguf", ".rows") or draw.randrange(4) == 0
            how = damage_binary if is_binary and draw.randrange(4) else damage
            path.write_bytes(how(content, draw))
            if path.name == "vectors.bin":
                index.unlink(missing_ok=True)
            outcome, peak = open_damaged(readers[path])
            counts[outcome] += 1
            size = path.stat().st_size
            assert peak < MAX_BYTES + 8 * size, f"{peak} bytes for {size}: {path}"
            counts["peak KB"] = max(counts["peak KB"], peak >> 10)
            path.write_bytes(content)
            if path.name.startswith("vectors.bin"):
                index.write_bytes(originals[index])
    return counts
