"""Run the benchmarks: ``python -m benchmarks [--json] [--rounds N] [WORD …]``."""

import argparse
import gc
import importlib
import json
import sys
from collections.abc import Iterator

from . import promises
from .timing import Case, Result, keep_freed_memory, measure

MODULES = (
    "lookup",
    "layer",
    "rotary",
    "bag",
    "torch_face",
    "optim",
    "equinox_rows",
    "threads",
)


def main() -> None:
    """Print what is kept that others do not keep, and how fast ours is beside its peers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="only what has one of these words in its name"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each contestant")
    options = parser.parse_args()
    keep_freed_memory()
    kept = [p for p in promises.measured() if _wanted(p.name, options.words)]
    if not options.json:
        for promise in kept:
            print(_kept(promise), flush=True)
    results = []
    for case in _cases(options.words):
        results.append(measure(case, rounds=options.rounds))
        # Some hold tables of gigabytes.
        del case
        gc.collect()
        if not options.json:
            print(_line(results[-1]), flush=True)
    if options.json:
        everything = {
            "promises": [promise.as_dict() for promise in kept],
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
        yield from (case for case in module.cases() if _wanted(case.name, words))


def _wanted(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def _kept(promise: promises.Promise) -> str:
    theirs = "not installed" if promise.theirs is None else promise.theirs
    return f"{promise.name}: {promise.ours}  ({promise.peer}: {theirs})"


def _line(result: Result) -> str:
    parts = [f"{result.name:<58} {result.ours:8.3f} ms  memcpy {result.memcpy:.3f}"]
    for name, ratio in result.ratios.items():
        bar = result.bars.get(name)
        aim = "" if bar is None else f" (aim {bar:g})"
        parts.append(f"{name} {ratio:.2f}×{aim}")
    parts += [f"{name} not installed" for name in result.missing]
    return "  ".join(parts)


if __name__ == "__main__":
    main()
