"""Change ids, positions, segments and offsets in another thread while layers read them.

Each case runs for some time and counts the calls that returned rows of the tables and those
that raised an IndexError. A row that is in no table, or another error, is a failure.
Reading outside of an array may end the process, so cases run in one of their own:
``python tests/support/memory_races.py CASE SECONDS``.
"""

import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

import firstlayer.numpy as fn
import firstlayer.torch as ft

ROWS, WIDTH, TOKENS = 50, 16, 4096
#: Numbers that the thread writes instead of valid ids.
BAD = (2**40, -1, ROWS, -(2**63), 2**62)


class Flipped:
    """An array that a thread changes between valid and invalid numbers."""

    def __init__(self, valid: np.ndarray, bad: tuple[int, ...] = BAD) -> None:
        self.array, self._bad = valid.copy(), np.array(bad)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> np.ndarray:
        self._thread.start()
        return self.array

    def __exit__(self, *error: object) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        array, number = self.array.reshape(-1), 0
        while not self._is_stopped.is_set():
            number += 1
            place = number * 7919 % array.size
            valid = int(array[place])
            array[place] = self._bad[number % len(self._bad)]
            _wait(3_000)
            array[place] = valid
            # Valid most of the time, so that checks before the kernels often pass.
            _wait(10_000)


@numba.njit(nogil=True)
def _wait(count):
    """Return after some microseconds, without the GIL."""
    total = 0.0
    for i in range(count):
        total += math.sqrt(i)
    return total


_wait(1)


def count_calls(
    call: Callable[[], Any], check: Callable[[Any], bool], seconds: float
) -> dict[str, int]:
    """Call again and again; return how often there was a result and an IndexError."""
    counts = {"results": 0, "errors": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            result = call()
        except IndexError as error:
            text = str(error)
            words = "was out of range", "but", "must not be negative"
            assert any(word in text for word in words), text
            counts["errors"] += 1
        else:
            assert check(result), "a result that is in no table"
            counts["results"] += 1
    assert sum(counts.values()), "no calls"
    return counts


def _valid_ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, ROWS, shape)


def _constant_table(rows: int = ROWS, dtype: Any = np.float32) -> np.ndarray:
    """Return a table of which every entry is 1, so that each valid row is known."""
    return np.ones((rows, WIDTH), dtype)


def _numpy_lookup(seconds: float, *, size: int, norm: float | None = None) -> Any:
    layer = fn.Embedding(weight=_constant_table(), max_norm=norm)
    with Flipped(_valid_ids(size)) as ids:
        want = 1.0 if norm is None else norm / WIDTH**0.5
        return count_calls(lambda: layer(ids), lambda y: np.allclose(y, want), seconds)


def _numpy_bags(seconds: float, *, mode: str, dtype: Any, flips_offsets: bool) -> Any:
    layer = fn.EmbeddingBag(weight=_constant_table(dtype=dtype), mode=mode)  # pyright: ignore
    ids, offsets = _valid_ids(TOKENS), np.arange(0, TOKENS, 4)
    weights = np.ones(TOKENS)

    def call(ids: Any, offsets: Any) -> Any:
        try:
            return layer(ids, offsets), *layer.vjp(ids, offsets, weights)[1](
                np.ones((offsets.size, WIDTH), dtype)
            ).values()
        except ValueError as error:
            # Offsets are refused with a ValueError.
            assert "offsets must" in str(error), error
            raise IndexError("but offsets changed") from None

    want = 4.0 if mode == "sum" else 1.0

    def check(result: Any) -> bool:
        y, rows, _ = result
        inside = bool((rows.ids >= 0).all() and (rows.ids < ROWS).all())
        return flips_offsets or ((y == want).all() and inside)

    if flips_offsets:
        with Flipped(offsets, (2**40, -5, TOKENS + 1)) as flipped:
            return count_calls(lambda: call(ids, flipped), check, seconds)
    with Flipped(ids) as flipped:
        return count_calls(lambda: call(flipped, offsets), check, seconds)


def _numpy_layer(seconds: float, *, flips: str) -> Any:
    layer = fn.EmbeddingLayer(
        ROWS, WIDTH, max_positions=ROWS, segments=ROWS, layer_norm=flips == "ids", rng=0
    )
    for weight in layer.parameters().values():
        if weight.ndim == 2:
            weight[:] = 1
    given: dict[str, Any] = dict.fromkeys(
        ("ids", "positions", "segments"), _valid_ids(4, 512)
    )
    with Flipped(given[flips]) as flipped:
        arguments = {**given, flips: flipped}
        ids = arguments.pop("ids")

        def call() -> Any:
            try:
                y, pull = layer.vjp(ids, **arguments)
                return y, pull(np.ones_like(y))["token.weight"].ids
            except ValueError as error:
                assert "positions must" in str(error), error
                raise IndexError("but positions changed") from None

        want = 0.0 if layer.norm is not None else 3.0
        return count_calls(
            call,
            lambda r: np.allclose(r[0], want, atol=1e-3) and r[1].max() < ROWS,
            seconds,
        )


def _torch_lookup(seconds: float, *, dtype: torch.dtype, sparse: bool) -> Any:
    layer = ft.Embedding(ROWS, WIDTH, sparse=sparse, dtype=dtype)
    torch.nn.init.ones_(layer.weight)
    with Flipped(_valid_ids(4 * TOKENS)) as ids:
        tensor = torch.from_numpy(ids)

        def call() -> Any:
            layer.weight.grad = None
            y = layer(tensor)
            y.sum().backward()
            grad = layer.weight.grad
            assert grad is not None
            return y.detach(), grad._indices().numpy() if sparse else np.zeros(1)

        def check(result: Any) -> bool:
            return bool((result[0] == 1).all()) and 0 <= result[1].min() < ROWS

        return count_calls(call, check, seconds)


def _torch_bags(seconds: float, *, mode: str, dtype: torch.dtype, weighted: bool) -> Any:
    layer = ft.EmbeddingBag(ROWS, WIDTH, mode=mode, dtype=dtype, sparse=weighted)
    torch.nn.init.ones_(layer.weight)
    weights = torch.ones(TOKENS // 4, 4, dtype=dtype, requires_grad=True)
    with Flipped(_valid_ids(TOKENS // 4, 4)) as ids:
        tensor = torch.from_numpy(ids)

        def call() -> Any:
            layer.weight.grad = None
            y = layer(tensor, per_sample_weights=weights if weighted else None)
            y.sum().backward()
            return y.detach()

        want = 4.0 if mode == "sum" else 1.0
        return count_calls(call, lambda y: bool((y == want).all()), seconds)


def _torch_layer(seconds: float, *, flips: str, norm: bool) -> Any:
    layer = ft.EmbeddingLayer(
        ROWS, WIDTH, max_positions=ROWS, segments=ROWS, layer_norm=norm, sparse=True
    )
    for name, parameter in layer.named_parameters():
        if not name.startswith("norm"):
            torch.nn.init.ones_(parameter)
    given: dict[str, Any] = dict.fromkeys(
        ("ids", "positions", "segments"), _valid_ids(4, 512)
    )
    with Flipped(given[flips]) as flipped:
        arguments = {k: torch.from_numpy(v) for k, v in {**given, flips: flipped}.items()}
        ids = arguments.pop("ids")

        def call() -> Any:
            layer.zero_grad()
            try:
                y = layer(ids, **arguments)
                y.sum().backward()
            except ValueError as error:
                assert "positions must" in str(error), error
                raise IndexError("but positions changed") from None
            return y.detach()

        want = 0.0 if norm else 3.0
        return count_calls(
            call, lambda y: bool(torch.allclose(y, torch.tensor(want), atol=1e-3)), seconds
        )


def _numpy_optimizer(seconds: float) -> Any:
    from firstlayer.embeddings.row_gradient import RowGradient
    from firstlayer.optim import RowAdam

    layer = fn.Embedding(ROWS, WIDTH, rng=0)
    optimizer = RowAdam(layer, lr=0.0, mode="lazy")
    values = np.ones((ROWS, WIDTH), np.float32)
    with Flipped(np.arange(ROWS)) as ids:

        def call() -> bool:
            try:
                optimizer.step({"weight": RowGradient(ids, values)})
            except ValueError as error:
                assert "must be ascending" in str(error), error
                raise IndexError("but ids changed") from None
            return True

        return count_calls(call, bool, seconds)


FLOAT32, FLOAT64, HALF = torch.float32, torch.float64, torch.bfloat16
CASES: dict[str, Callable[[float], Any]] = {
    "numpy few ids": lambda s: _numpy_lookup(s, size=100),
    "numpy lookup": lambda s: _numpy_lookup(s, size=TOKENS),
    "numpy max_norm": lambda s: _numpy_lookup(s, size=TOKENS, norm=0.5),
    "numpy streamed": lambda s: _numpy_lookup(s, size=1 << 19),
    **{
        f"numpy bags {mode}": lambda s, mode=mode, dtype=dtype: _numpy_bags(
            s, mode=mode, dtype=dtype, flips_offsets=False
        )
        for mode, dtype in (("sum", np.float32), ("mean", np.float64), ("max", np.float32))
    },
    "numpy offsets": lambda s: _numpy_bags(
        s, mode="sum", dtype=np.float32, flips_offsets=True
    ),
    **{
        f"numpy layer {flips}": lambda s, flips=flips: _numpy_layer(s, flips=flips)
        for flips in ("ids", "positions", "segments")
    },
    "torch lookup": lambda s: _torch_lookup(s, dtype=FLOAT32, sparse=False),
    "torch sparse": lambda s: _torch_lookup(s, dtype=FLOAT32, sparse=True),
    "torch half": lambda s: _torch_lookup(s, dtype=HALF, sparse=False),
    "torch bags": lambda s: _torch_bags(s, mode="mean", dtype=FLOAT32, weighted=False),
    "torch bags double": lambda s: _torch_bags(
        s, mode="sum", dtype=FLOAT64, weighted=False
    ),
    "torch weighted": lambda s: _torch_bags(s, mode="sum", dtype=FLOAT32, weighted=True),
    "torch max": lambda s: _torch_bags(s, mode="max", dtype=HALF, weighted=False),
    **{
        f"torch layer {flips}": lambda s, flips=flips: _torch_layer(
            s, flips=flips, norm=flips == "ids"
        )
        for flips in ("ids", "positions", "segments")
    },
    "numpy optimizer": _numpy_optimizer,
}


if __name__ == "__main__":
    name, seconds = sys.argv[1:]
    chosen = CASES if name == "all" else {name: CASES[name]}
    for case, run in chosen.items():
        sys.stdout.write(f"{case}: ")
        sys.stdout.flush()
        sys.stdout.write(f"{run(float(seconds))}\n")
