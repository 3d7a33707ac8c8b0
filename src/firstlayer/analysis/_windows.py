"""What a study of positions learns from, and the same bytes to predict at every length."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64, UInt8

if TYPE_CHECKING:
    from .positions import Setting

HELD_OUT = 0.1


def split(
    text: bytes, *, setting: "Setting"
) -> tuple[UInt8[np.ndarray, " learn"], UInt8[np.ndarray, " held_out"]]:
    """Return the bytes to learn from and the last tenth, to test on."""
    values = np.frombuffer(text, np.uint8)
    held = int(len(values) * HELD_OUT)
    least = max(setting.lengths) + setting.windows
    if held < least:
        raise ValueError(
            f"text must have at least {round(least / HELD_OUT)} bytes for lengths up to "
            f"{max(setting.lengths)}, got {len(values)}"
        )
    return values[: len(values) - held], values[len(values) - held :]


def windows(
    held_out: UInt8[np.ndarray, " held_out"], length: int, *, setting: "Setting"
) -> tuple[Int64[np.ndarray, "windows length"], Int64[np.ndarray, "windows targets"]]:
    """Return the bytes that are read, and those after each of the last ``targets`` of them.

    The windows end at the same places for every length, so the targets are the same.
    """
    ends = np.linspace(
        max(setting.lengths), len(held_out) - 1, setting.windows, dtype=np.int64
    )
    read = ends[:, None] + np.arange(-length, 0)
    return (
        held_out[read].astype(np.int64),
        held_out[read[:, length - setting.targets :] + 1].astype(np.int64),
    )


def batches(
    learn: UInt8[np.ndarray, " learn"], *, setting: "Setting"
) -> Iterator[Int64[np.ndarray, "batch length+1"]]:
    """Yield what each step learns from: sequences from anywhere, and the byte after."""
    rng = np.random.default_rng(setting.seed)
    steps = np.arange(setting.length + 1)
    for _ in range(setting.steps):
        starts = rng.integers(0, len(learn) - setting.length, (setting.batch, 1))
        yield learn[starts + steps].astype(np.int64)
