"""Interleaved timing: order of the calls, medians, repeats."""

import time

from firstlayer.analysis.timing import interleaved_medians


def recorded(names, **options):
    """Return the calls that timing makes, as names and batch numbers."""
    calls = []
    runs = {name: lambda batch, name=name: calls.append((name, batch)) for name in names}
    medians = interleaved_medians(runs, rest=0.0, **options)
    assert list(medians) == list(names)
    return calls


def test_every_function_runs_all_batches_after_its_warmup_and_the_order_rotates():
    calls = recorded("ab", batches=3, rounds=2, warmup=2)
    batches = [1, 2, 0, 1, 2]
    assert calls == [(name, batch) for name in "abba" for batch in batches]


def test_repeated_calls_use_the_following_batches():
    calls = recorded("a", batches=3, rounds=1, warmup=0, repeat=2)
    assert [batch for _, batch in calls] == [0, 1, 1, 2, 2, 0]


def test_more_warmup_calls_than_batches_wrap_around():
    calls = recorded("a", batches=2, rounds=1, warmup=3)
    assert [batch for _, batch in calls] == [1, 0, 1, 0, 1]


def test_short_calls_are_repeated_until_the_minimum_duration():
    count = len(recorded("a", batches=1, rounds=1, warmup=1, min_seconds=1e-3))
    assert 10 < count <= 10_001


def test_the_median_is_the_time_of_one_call():
    slow = {"slow": lambda batch: time.sleep(0.002), "fast": lambda batch: None}
    medians = interleaved_medians(slow, batches=4, rounds=1, repeat=2)
    assert 0.002 <= medians["slow"] < 0.006 and medians["fast"] < 1e-4


def test_functions_rest_before_their_warmup():
    start = time.perf_counter()
    interleaved_medians({"a": lambda batch: None}, batches=1, rounds=3, rest=0.01)
    assert time.perf_counter() - start >= 0.03
