"""Training batches, and test windows that predict the same bytes at every length."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64, UInt8

from .results import Setting

HELD_OUT = 0.1


def split(
    text: bytes, *, setting: Setting
) -> tuple[UInt8[np.ndarray, " learn"], UInt8[np.ndarray, " held_out"]]:
    """Return the bytes to train on, and the last tenth to test on."""
    values = np.frombuffer(text, np.uint8)
    held_out = int(len(values) * HELD_OUT)
    required = max(setting.lengths) + setting.windows
    if held_out < required:
        raise ValueError(
            f"text must have at least {round(required / HELD_OUT)} bytes for lengths up to "
            f"{max(setting.lengths)}, got {len(values)}"
        )
    return values[: len(values) - held_out], values[len(values) - held_out :]


def windows(
    held_out: UInt8[np.ndarray, " held_out"], length: int, *, setting: Setting
) -> tuple[Int64[np.ndarray, "windows length"], Int64[np.ndarray, "windows targets"]]:
    """Return the input bytes, and the byte after each of the last ``targets`` of them.

    Windows end at the same places for every length, so the targets are the same.
    """
    ends = np.linspace(
        max(setting.lengths), len(held_out) - 1, setting.windows, dtype=np.int64
    )
    inputs = ends[:, None] + np.arange(-length, 0)
    return (
        held_out[inputs].astype(np.int64),
        held_out[inputs[:, length - setting.targets :] + 1].astype(np.int64),
    )


def batches(
    learn: UInt8[np.ndarray, " learn"], *, setting: Setting
) -> Iterator[Int64[np.ndarray, "batch length+1"]]:
    """Yield a batch per step: random sequences, each with the byte after it."""
    rng = np.random.default_rng(setting.seed)
    steps = np.arange(setting.length + 1)
    for _ in range(setting.steps):
        starts = rng.integers(0, len(learn) - setting.length, (setting.batch, 1))
        yield learn[starts + steps].astype(np.int64)
