"""Kill processes that convert a table, and open it after each kill."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from firstlayer.stores import MemoryStore, open_store
from tests.support.kills import leftovers

ROWS, WIDTH = 4000, 64
FORMATS = "int8", "float32"


def kill_conversions(path: Path, count: int) -> dict[str, int]:
    """Kill ``count`` conversions at random moments; the table must be old or new."""
    draw = random.Random(0)
    source = MemoryStore(
        np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    )
    wanted, seconds = {}, []
    for format in FORMATS * 3:
        start = time.perf_counter()
        with source.convert(path, format=format) as store:
            wanted[format] = store.read(np.arange(ROWS))
        seconds.append(time.perf_counter() - start)
    # Long enough for two or three conversions; syncing a file takes longer at times.
    longest = max(0.05, 4 * sorted(seconds)[3])
    formats, left = set(), 0
    for _ in range(count):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    for format in FORMATS:
                        source.convert(path, format=format).close()
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left += bool(leftovers(path.parent))
        with open_store(path) as store:
            formats.add(store.format.name)
            assert (store.read(np.arange(ROWS)) == wanted[store.format.name]).all()
    source.save(path)
    assert not leftovers(path.parent), leftovers(path.parent)
    return {"kills": count, "killed while writing": left, "formats": len(formats)}


if __name__ == "__main__":
    counts = kill_conversions(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write(f"{counts}\n")
