"""Rows of files, cold and resident: ``python -m benchmarks.stores_files [--folder F]``.

A table of 8.4 million rows of 256 bytes (2.15 GB) is written to a folder on a disk. Cold
means that ``posix_fadvise(DONTNEED)`` dropped the file from the page cache before the timed
call, which is checked with ``mincore``. Every round reads new rows; libraries take turns.
Results are compared before the next call.
"""

import argparse
import ctypes
import gc
import json
import mmap
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from firstlayer.stores import open_store

from .timing import Case, Result, keep_freed_memory, measure

ROWS, WIDTH = 8_400_000, 64
PREFILL, DECODE = 98_304, 24
SHARDS, STRINGS = 128, 150_000
Read = Callable[[np.ndarray], np.ndarray]


def main() -> int:
    """Print every measurement; return 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5, help="cold reads of each kind")
    options = parser.parse_args()
    keep_freed_memory()
    met = True
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for result in measured(Path(folder), rounds=options.rounds):
            goals = {name: f" (goal {bar:.3g})" for name, bar in result.bars.items()}
            ratios = [
                f"{name} {ratio:.2f}×{goals.get(name, '')}"
                for name, ratio in result.ratios.items()
            ]
            print(f"{result.name:<58} {result.ours:10.3f} ms  {'  '.join(ratios)}")
            met &= result.met
    return int(not met)


def measured(folder: Path, *, rounds: int) -> Iterator[Result]:
    """Measure all rows of this module, with files in ``folder``."""
    path = folder / "table.safetensors"
    write_table(path)
    yield _memory(path)
    yield _cold(path, PREFILL, rounds=rounds, bars={"mmap, readahead off": 5.0})
    best = {"best of mmap and WILLNEED": 1 / 1.5}
    yield _cold(path, DECODE, rounds=4 * rounds, bars=best)
    yield _prefetched(path, rounds=rounds)
    yield _opening("open a table in 128 shards", _sharded(folder), limit=50.0)
    yield _opening("open a GGUF file with 150,000 strings", _gguf(folder), limit=300.0)
    # Last: the stores of these keep the file mapped.
    for case in cases(path):
        yield measure(case)


def cases(path: Path) -> Iterator[Case]:
    """Yield reads of rows that are in memory, against ``np.take`` of an array."""
    table = np.fromfile(path, np.float32, offset=_start(path)).reshape(ROWS, WIDTH)
    store = open_store(path)
    for count in (PREFILL, DECODE):
        ids = [np.random.default_rng(i).integers(0, ROWS, count) for i in range(12)]
        yield Case(
            f"file: {count:,} rows of 256 bytes, resident",
            lambda batch, ids=ids: store.read(ids[batch]),
            {
                "np.take in memory": lambda batch, ids=ids: np.take(
                    table, ids[batch], axis=0
                )
            },
            {"np.take in memory": 1 / 1.5} if count == PREFILL else {},
        )


def write_table(path: Path) -> None:
    """Write a table of random numbers."""
    shape, draw = (100_000, WIDTH), np.random.default_rng(0)
    with open(path, "wb") as file:
        file.write(_header({"wte.weight": ("F32", (ROWS, WIDTH))}))
        for _ in range(0, ROWS, shape[0]):
            file.write(draw.standard_normal(shape, dtype=np.float32).data)
        file.flush()
        os.fsync(file.fileno())


def drop(path: Path) -> None:
    """Drop a file from the page cache, and check that."""
    gc.collect()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as memory:
            pages = -(-len(memory) // mmap.PAGESIZE)
            states = np.empty(pages, np.uint8)
            view = np.frombuffer(memory, np.uint8)
            libc = ctypes.CDLL(None, use_errno=True)
            size, start = ctypes.c_size_t(len(memory)), ctypes.c_void_p(view.ctypes.data)
            if libc.mincore(start, size, ctypes.c_void_p(states.ctypes.data)):
                raise OSError(ctypes.get_errno(), "mincore failed")
            del view
    finally:
        os.close(descriptor)
    resident = int((states & 1).sum())
    if resident > pages // 1000:
        raise RuntimeError(f"{resident} of {pages} pages are still in memory")


def _cold(path: Path, count: int, *, rounds: int, bars: dict[str, float]) -> Result:
    """Time cold reads of random rows; each reader maps the file itself."""
    readers: dict[str, Callable[[], Read]] = {
        "ours": lambda: open_store(path).read,
        "mmap, readahead off": lambda: _taken(path),
        "mmap, WILLNEED per row": lambda: _requested(path),
    }
    times: dict[str, list[float]] = {name: [] for name in readers}
    # Kernels are compiled before the first cold read.
    open_store(path).read(np.arange(1000))
    for number in range(rounds):
        for turn, (name, open_) in enumerate(readers.items()):
            ids = np.random.default_rng(10 * number + turn).integers(0, ROWS, count)
            drop(path)
            read = open_()
            start = time.perf_counter()
            rows = read(ids)
            times[name].append(1e3 * (time.perf_counter() - start))
            np.testing.assert_array_equal(rows, _mapped(path)[0][ids])
            del read, rows
    medians = {name: statistics.median(found) for name, found in times.items()}
    ours = medians.pop("ours")
    if "best of mmap and WILLNEED" in bars:
        medians["best of mmap and WILLNEED"] = min(medians.values())
    ratios = {name: value / ours for name, value in medians.items()}
    name = f"file: {count:,} rows of 256 bytes, cold"
    return Result(name, ours, 0.0, medians, ratios, bars, ())


def _prefetched(path: Path, *, rounds: int) -> Result:
    """Time a read after a prefetch that had as long as a cold read takes."""
    cold, warm = [], []
    for number in range(rounds):
        ids = np.random.default_rng(number).integers(0, ROWS, PREFILL)
        for prefetch, times in ((False, cold), (True, warm)):
            drop(path)
            with open_store(path) as store:
                if prefetch:
                    store.prefetch(ids)
                    time.sleep(1.2 * cold[-1] / 1e3)
                start = time.perf_counter()
                store.read(ids)
                times.append(1e3 * (time.perf_counter() - start))
    ours, without = statistics.median(warm), statistics.median(cold)
    name = f"file: {PREFILL:,} rows of 256 bytes, cold, prefetched"
    return Result(
        name, ours, 0.0, {"no prefetch": without}, {"no prefetch": without / ours}, {}, ()
    )


def _memory(path: Path) -> Result:
    """Measure memory: anonymous bytes above the rows, in MB, against 64; pages of files."""
    ids = np.random.default_rng(0).integers(0, ROWS, PREFILL)
    with open_store(path) as store:
        # Kernels are compiled here.
        store.read(ids[:1000])
    drop(path)
    with open_store(path) as store:
        before, pages_before = _resident("RssAnon"), _resident("RssFile")
        rows = store.read(ids)
        growth = (_resident("RssAnon") - before - rows.nbytes) / 2**20
        pages = (_resident("RssFile") - pages_before) / 2**20
    name = f"file: RssAnon above the rows in MB; RssFile {pages:.0f} MB"
    growth = max(growth, 0.001)
    return Result(
        name, growth, 0.0, {"64 MB": 64.0}, {"64 MB": 64 / growth}, {"64 MB": 1}, ()
    )


def _opening(name: str, open_: Callable[[], object], *, limit: float) -> Result:
    times = []
    for _ in range(9):
        start = time.perf_counter()
        open_()
        times.append(1e3 * (time.perf_counter() - start))
    ours, key = statistics.median(times), f"{limit:g} ms"
    return Result(name, ours, 0.0, {key: limit}, {key: limit / ours}, {key: 1.0}, ())


def _sharded(folder: Path) -> Callable[[], object]:
    shards = folder / "shards"
    shards.mkdir()
    weight_map = {}
    for k in range(SHARDS):
        name, file = f"layers.1.ngram_embedding.shard_{k}.weight", f"m-{k}.safetensors"
        content = _header({name: ("BF16", (1000, 160))}) + bytes(320_000)
        (shards / file).write_bytes(content)
        weight_map[name] = file
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return lambda: open_store(shards, "layers.1.ngram_embedding").close()


def _gguf(folder: Path) -> Callable[[], object]:
    def text(content: bytes) -> bytes:
        return struct.pack("<Q", len(content)) + content

    tokens = b"".join(text(b"token %d" % i) for i in range(STRINGS))
    pair = text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, STRINGS) + tokens
    entry = text(b"token_embd.weight") + struct.pack("<IQQIQ", 2, 64, 1000, 0, 0)
    content = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + pair + entry
    path = folder / "table.gguf"
    path.write_bytes(content + bytes(-len(content) % 32) + bytes(256_000))
    return lambda: open_store(path).close()


def _header(tensors: dict[str, tuple[str, tuple[int, int]]]) -> bytes:
    sizes, entries, end = {"F32": 4, "BF16": 2}, {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + shape[0] * shape[1] * sizes[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _start(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _mapped(path: Path) -> tuple[np.ndarray, mmap.mmap]:
    """Return the table mapped with readahead off."""
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    memory.madvise(mmap.MADV_RANDOM)
    return np.ndarray((ROWS, WIDTH), np.float32, memory, _start(path)), memory


def _taken(path: Path) -> Read:
    table, _ = _mapped(path)
    return lambda ids: np.take(table, ids, axis=0)


def _requested(path: Path) -> Read:
    """Return a reader that requests the page of each row before it copies them."""
    table, memory = _mapped(path)
    start, page, row_bytes = _start(path), mmap.PAGESIZE, 4 * WIDTH

    def read(ids: np.ndarray) -> np.ndarray:
        first = (start + ids * row_bytes) // page
        last = (start + ids * row_bytes + row_bytes - 1) // page
        for one, end in zip(first.tolist(), last.tolist(), strict=True):
            memory.madvise(mmap.MADV_WILLNEED, one * page, (end - one + 1) * page)
        return np.take(table, ids, axis=0)

    return read


def _resident(kind: str) -> int:
    words = Path("/proc/self/status").read_text().split()
    return 1024 * int(words[words.index(f"{kind}:") + 1])


if __name__ == "__main__":
    sys.exit(main())
