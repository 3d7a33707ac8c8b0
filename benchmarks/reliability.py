"""Run long tests of reliability: ``python -m benchmarks.reliability``.

The tests run the same checks with small counts. At full scale these are 1,000 kills per
writer and of training on disk, 100,000 random inputs per front end, 100,000 damaged files
and configs, and 10,000
interrupts in every phase. Counts are printed as they are known. A failure is printed with
its message, and the exit code is then 1.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

Counts = dict[str, Any]
#: A process may grow by this many bytes over many calls.
MAX_GROWTH = 32 << 20


def _alone(code: str) -> Counts:
    """Run code that prints counts, in a process of its own: it may crash or be killed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-3000:]}")
    return ast.literal_eval(done.stdout.splitlines()[-1])


def _in_folder(code: str) -> Counts:
    """Run code with ``folder``, a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        return _alone(f"from pathlib import Path\nfolder = Path({folder!r})\n{code}")


def _writer(function: str, name: str, *, exchange: bool, count: float) -> Counts:
    patch = "" if exchange else "kills.without_exchange()\n"
    return _in_folder(
        f"from tests.support import kills\n{patch}"
        f"print(kills.{function}(folder / {name!r}, {count!r}))"
    )


def _damaged_files(count: int) -> Counts:
    return _in_folder(
        "from tests.support.damaged import open_damaged_files\n"
        f"print(open_damaged_files(folder, {count}))"
    )


def _damaged_tables(count: int) -> Counts:
    return _in_folder(
        "from tests.support.damaged_tables import open_damaged_tables\n"
        f"print(open_damaged_tables(folder, {count}))"
    )


def _killed_conversions(count: int) -> Counts:
    return _in_folder(
        "from tests.support.table_kills import kill_conversions\n"
        f"print(kill_conversions(folder / 'a.safetensors', {count}))"
    )


def _killed_shared_stores(count: int) -> Counts:
    return _alone(
        "from tests.support.shared_stores import kill_processes\n"
        f"print(kill_processes('reliability', {count}))"
    )


def _checkpoints(count: int) -> Counts:
    return _in_folder(
        "from tests.files.test_hf_embeddings import check_damaged_checkpoints\n"
        f"layers, errors = check_damaged_checkpoints(folder, count={count}, seed=0)\n"
        "print({'layers': layers, 'errors': errors})"
    )


def _rope_configs(count: int) -> Counts:
    return _alone(
        "from tests.files.test_hf import fault_of\n"
        "from tests.support.rope_fuzz import mutated_configs\n"
        f"for config in mutated_configs({count}, seed=0):\n"
        "    fault = fault_of(*config)\n"
        "    assert fault is None, f'{fault}: {config}'\n"
        f"print({{'configs': {count}}})"
    )


def _store(function: str, count: int) -> Counts:
    return _in_folder(
        "from tests.support import store_kills\n"
        f"print(store_kills.{function}(folder, {count}))"
    )


def _interrupts(training: str, count: int) -> Counts:
    return _alone(
        "from tests.support.reliability_interrupts import check_interrupts\n"
        f"print(check_interrupts({training!r}, count={count}))"
    )


def _inputs(front_end: str, count: int) -> Counts:
    return _alone(
        "from tests.support.random_inputs import check_random_inputs\n"
        f"print(check_random_inputs({front_end!r}, {count}))"
    )


def _races(case: str, seconds: float) -> Counts:
    return _alone(
        f"from tests.support.memory_races import CASES\nprint(CASES[{case!r}]({seconds!r}))"
    )


def _growth(front_end: str, count: int) -> Counts:
    """Make many random calls; the memory of the process must not grow with their number."""
    return _alone(
        "from tests.support.random_inputs import check_random_inputs\n"
        "def resident():\n"
        "    words = open('/proc/self/status').read().split()\n"
        "    return 1024 * int(words[words.index('RssAnon:') + 1])\n"
        f"check_random_inputs({front_end!r}, {count})\n"
        "before = resident()\n"
        "for _ in range(3):\n"
        f"    check_random_inputs({front_end!r}, {count})\n"
        "growth = resident() - before\n"
        f"assert growth < {MAX_GROWTH}, f'{{growth}} bytes'\n"
        f"print({{'calls': 4 * {count}, 'growth KB': growth >> 10}})"
    )


def checks(scale: float) -> dict[str, Callable[[], Counts]]:
    """Return every check by name, with counts multiplied by ``scale``."""

    def times(count: int) -> int:
        return max(1, round(scale * count))

    found: dict[str, Callable[[], Counts]] = {}
    for kind, name, exchange in (
        ("file", "a.safetensors", True),
        ("folder", "vectors", True),
        ("folder in two steps", "vectors", False),
    ):
        for word, function, count in (
            ("kills", "kill_writers", times(1_000)),
            ("races", "race_writers", max(0.5, scale * 60)),
            ("interrupts", "interrupt_writer", times(1_000)),
        ):
            found[f"{word} of a {kind}"] = partial(
                _writer, function, name, exchange=exchange, count=count
            )
    found["damaged files"] = partial(_damaged_files, times(100_000))
    found["damaged tables"] = partial(_damaged_tables, times(20_000))
    found["kills of conversions"] = partial(_killed_conversions, times(1_000))
    found["kills of shared stores"] = partial(_killed_shared_stores, times(1_000))
    found["damaged checkpoints"] = partial(_checkpoints, times(100_000))
    found["mutated rope configs"] = partial(_rope_configs, times(100_000))
    found["kills of training on disk"] = partial(_store, "kill_training", times(1_000))
    found["power losses on disk"] = partial(_store, "lose_power", times(10_000))
    for training in ("numpy-adamw", "numpy-sgd", "torch-adamw"):
        found[f"interrupts of {training}"] = partial(_interrupts, training, times(10_000))
    for front_end in ("numpy", "torch", "equinox"):
        found[f"inputs of {front_end}"] = partial(_inputs, front_end, times(100_000))
    for case in (
        "numpy lookup",
        "numpy bags sum",
        "numpy layer ids",
        "torch sparse",
        "torch weighted",
        "torch layer ids",
    ):
        found[f"changed ids, {case}"] = partial(_races, case, max(0.3, scale * 60))
    found["memory of numpy"] = partial(_growth, "numpy", times(20_000))
    found["memory of torch"] = partial(_growth, "torch", times(20_000))
    return found


def main() -> int:
    """Run the checks and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability", description=__doc__
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all counts")
    parser.add_argument("--only", help="run the checks whose name contains this")
    options = parser.parse_args()
    failed = []
    selected = {
        name: check
        for name, check in checks(options.scale).items()
        if options.only is None or options.only in name
    }
    if not selected:
        print(f"no check has {options.only!r} in its name", file=sys.stderr)
        return 1
    for name, check in selected.items():
        start = time.monotonic()
        try:
            counts = check()
        except RuntimeError as error:
            failed.append(name)
            print(f"{name:<36} FAILED: {error}", flush=True)
            continue
        words = ", ".join(f"{value:,} {key}" for key, value in counts.items())
        print(f"{name:<36} {time.monotonic() - start:7.1f} s  {words}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
