"""Run the benchmarks: ``python -m benchmarks [--json] [--rounds N] [WORD …]``."""

import argparse
import json
import sys

from . import bag, layer, lookup, rotary, sinusoidal
from .timing import Result, measure

MODULES = (lookup, layer, rotary, sinusoidal, bag)


def main() -> None:
    """Measure every case whose name has one of the words in it, and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases with one of these in the name")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=60, help="readings of each contestant")
    options = parser.parse_args()
    results = []
    for case in (case for module in MODULES for case in module.cases()):
        if options.words and not any(word in case.name for word in options.words):
            continue
        results.append(measure(case, rounds=options.rounds))
        if not options.json:
            print(_line(results[-1]), flush=True)
    if options.json:
        json.dump([result.as_dict() for result in results], sys.stdout, indent=2)
        print()


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
