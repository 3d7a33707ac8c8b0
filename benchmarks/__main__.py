"""Run the benchmarks: ``python -m benchmarks [--json] [--rounds N] [WORD …]``."""

import argparse
import gc
import importlib
import json
import sys
from collections.abc import Iterator

from . import correctness
from .timing import Case, Result, keep_freed_memory, measure

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
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="run only benchmarks whose name contains one of these"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--rounds", type=int, default=12, help="timed rounds per implementation"
    )
    options = parser.parse_args()
    keep_freed_memory()
    comparisons = [c for c in correctness.measured() if _selected(c.name, options.words)]
    if not options.json:
        for comparison in comparisons:
            print(_comparison(comparison), flush=True)
    results = []
    for case in _cases(options.words):
        results.append(measure(case, rounds=options.rounds))
        # Frees tables of several gigabytes.
        del case
        gc.collect()
        if not options.json:
            print(_line(results[-1]), flush=True)
    if options.json:
        everything = {
            "correctness": [comparison.as_dict() for comparison in comparisons],
            "speed": [result.as_dict() for result in results],
        }
        json.dump(everything, sys.stdout, indent=2, ensure_ascii=False)
        print()


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
