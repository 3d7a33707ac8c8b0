"""Open files of word vectors against gensim: ``python -m benchmarks.word_files``.

The files hold 100,000 words of width 50 in word2vec's text format, plain and gzipped, and
in its binary format. Words and rows are compared with gensim's first, bit for bit; then the
libraries take turns, and the median of each is reported.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from firstlayer.vector_files.reading import read_vectors
from firstlayer.vector_files.table import VectorTable
from firstlayer.vector_files.writing import write_vectors

WORDS, WIDTH = 100_000, 50
#: Required speed-up over gensim for text.
FASTER = 5.0


@dataclass(frozen=True)
class Result:
    """Seconds to open one file.

    Args:
        kind: Format of the file.
        ours: Median seconds of Firstlayer.
        gensim: Median seconds of gensim.
        ratio: The latter divided by the former.
        met: Whether the required speed-up was reached; True where there is none.
    """

    kind: str
    ours: float
    gensim: float
    ratio: float
    met: bool


def main() -> None:
    """Print the seconds of both libraries for each format."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.word_files", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--words", type=int, default=WORDS, help="number of words")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measured(Path(folder), words=options.words, rounds=options.rounds)
    if options.json:
        json.dump([asdict(result) for result in results], sys.stdout, indent=2)
        print()
        return
    for result in results:
        print(
            f"open word2vec {result.kind}, {options.words:,} × {WIDTH}: "
            f"{result.ours:.3f} s, gensim {result.gensim:.3f} s ({result.ratio:.1f}×)"
        )


def measured(folder: Path, *, words: int, rounds: int) -> list[Result]:
    """Return the seconds of both libraries for each format."""
    rows = np.random.default_rng(0).standard_normal((words, WIDTH)).astype(np.float32)
    table = VectorTable([f"word{i}" for i in range(words)], rows)
    paths = {"text": folder / "a.txt", "text, gzipped": folder / "a.txt.gz"}
    paths["binary"] = folder / "a.bin"
    results = []
    for kind, path in paths.items():
        write_vectors(table, path, "word2vec-binary" if kind == "binary" else "word2vec")
        results.append(_measured(kind, path, table, rounds=rounds))
    return results


def _measured(kind: str, path: Path, table: VectorTable, *, rounds: int) -> Result:
    from gensim.models import KeyedVectors

    def theirs() -> Any:
        return KeyedVectors.load_word2vec_format(path, binary=kind == "binary")

    got, want = read_vectors(path), theirs()
    if got.words != want.index_to_key or got.words != table.words:
        raise ValueError(f"the words of {path} differ")
    if not got.weight.tobytes() == want.vectors.tobytes() == table.weight.tobytes():
        raise ValueError(f"the rows of {path} differ")
    seconds: dict[str, list[float]] = {"ours": [], "gensim": []}
    for _ in range(rounds):
        seconds["ours"].append(_seconds(lambda: read_vectors(path)))
        seconds["gensim"].append(_seconds(theirs))
    ours, gensim = (statistics.median(seconds[name]) for name in ("ours", "gensim"))
    ratio = gensim / ours
    return Result(kind, ours, gensim, ratio, kind != "text" or ratio >= FASTER)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
