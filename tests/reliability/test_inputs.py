"""Random arguments of every layer, and the command that runs the long form."""

import subprocess
import sys

import pytest

from tests.support.random_inputs import check_random_inputs
from tests.support.run_alone import run_alone

COUNTS = {"numpy": 1_000, "torch": 1_000, "equinox": 100}


@pytest.mark.parametrize("front_end", COUNTS)
def test_random_arguments_raise_documented_errors_and_leave_the_layer_usable(front_end):
    # In another process, which a crash ends alone.
    count = COUNTS[front_end]
    output = run_alone(
        f"""
        from tests.support.random_inputs import check_random_inputs
        counts = check_random_inputs({front_end!r}, {count}, seed=1)
        assert min(counts.values()) > {count} / 20, counts
        print(sum(counts.values()))
        """
    )
    assert int(output) == count


def test_an_undocumented_error_is_reported(monkeypatch):
    def fails(*args, **options):
        raise KeyError("x")

    monkeypatch.setattr("firstlayer.numpy.token.ids_in_range", fails)
    monkeypatch.setattr("firstlayer.numpy.token.integers", fails)
    with pytest.raises(AssertionError, match=r"Embedding.*KeyError"):
        check_random_inputs("numpy", 1_000, seed=0)


def run_command(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.reliability", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.parametrize("name", ["kills of a file", "damaged files", "inputs of numpy"])
def test_the_command_prints_counts(name):
    done = run_command("--scale", "0.0005", "--only", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(name) and " s  " in done.stdout


def test_the_command_refuses_an_unknown_name():
    done = run_command("--only", "nothing")
    assert done.returncode == 1 and "no check has 'nothing'" in done.stderr
