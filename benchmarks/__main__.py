"""Run the benchmarks: ``python -m benchmarks [--json] [--rounds N] [WORD …]``.

The machine is noisy, and a process may be unlucky with its memory. ``--processes 5`` runs
everything in five processes, one after the other, and prints medians; goals are judged by
these.
"""

import argparse
import gc
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from . import correctness
from .timing import Case, Result, keep_freed_memory, measure, median_result

MODULES = (
    "lookup",
    "layer",
    "rotary",
    "bag",
    "ngram",
    "growing",
    "table_group",
    "torch_layers",
    "small_calls",
    "optim",
    "optim_operators",
    "half_precision",
    "large",
    "stores_training",
    "equinox_rows",
    "threads",
    "stores",
)


def main() -> None:
    """Print correctness comparisons, then speed against each peer."""
    options = _parser().parse_args()
    start = time.perf_counter()
    keep_freed_memory()
    comparisons = [c for c in correctness.measured() if _selected(c.name, options.words)]
    if not options.json:
        for comparison in comparisons:
            print(_comparison(comparison), flush=True)
    results = []
    for result in _results(options):
        results.append(result)
        if not options.json:
            print(_line(result), flush=True)
    if options.json:
        everything = {
            "correctness": [comparison.as_dict() for comparison in comparisons],
            "speed": [result.as_dict() for result in results],
            "minutes": (time.perf_counter() - start) / 60,
        }
        json.dump(everything, sys.stdout, indent=2, ensure_ascii=False)
        print()
        return
    with_goals = [result for result in results if result.bars]
    missed = [result for result in with_goals if not result.met]
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(with_goals) - len(missed)} of {len(with_goals)} goals met", end="")
    print(f" in {minutes:.1f} minutes" + ("; missed:" if missed else ""))
    for result in missed:
        print(_line(result))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="run only benchmarks whose name contains one of these"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--rounds", type=int, default=12, help="timed rounds per implementation"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="processes to take the medians of"
    )
    return parser


def _results(options: argparse.Namespace) -> Iterator[Result]:
    if options.processes > 1:
        yield from _results_of_processes(options)
        return
    for case in _cases(options.words):
        yield measure(case, rounds=options.rounds)
        # Frees tables of several gigabytes.
        del case
        gc.collect()


def _results_of_processes(options: argparse.Namespace) -> Iterator[Result]:
    """Yield the median of each benchmark over several processes."""
    command = [sys.executable, "-m", __package__ or "benchmarks", "--json"]
    command += ["--rounds", str(options.rounds), *options.words]
    runs: list[list[Result]] = []
    for number in range(options.processes):
        print(f"process {number + 1} of {options.processes}", file=sys.stderr, flush=True)
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
        )
        found = json.loads(done.stdout)["speed"]
        runs.append([Result.from_dict(values) for values in found])
    for results in zip(*runs, strict=True):
        yield median_result(results)


def _cases(words: list[str]) -> Iterator[Case]:
    for name in MODULES:
        try:
            module = importlib.import_module(f"{__package__}.{name}")
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        yield from (case for case in module.cases() if _selected(case.name, words))


def _selected(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def _comparison(row: correctness.Comparison) -> str:
    theirs = "not installed" if row.theirs is None else row.theirs
    return f"{row.name}: {row.ours}  ({row.peer}: {theirs})"


def _line(result: Result) -> str:
    parts = [f"{result.name:<58} {result.ours:8.3f} ms  memcpy {result.memcpy:.3f}"]
    for name, ratio in result.ratios.items():
        bar = result.bars.get(name)
        goal = "" if bar is None else f" (goal {bar:g})"
        parts.append(f"{name} {ratio:.2f}×{goal}")
    parts += [f"{name} not installed" for name in result.missing]
    return "  ".join(parts)


if __name__ == "__main__":
    main()
