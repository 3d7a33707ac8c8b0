"""Rows by id. Every id is checked, and the rows are copied at the speed of memory."""

import numpy as np

from ._numba import bits_of, kernel
from ._pool import run

# Up to here one compiled pass that checks and copies costs less than NumPy's two calls.
FEW_IDS = 256
# From here a second core adds more bandwidth than waking it costs.
MANY_BYTES = 12 << 20


def gather(weight: np.ndarray, ids: np.ndarray) -> np.ndarray | None:
    """Return ``weight[ids]`` for flat ids, or None if one of them is out of range."""
    bits, width = bits_of(weight), weight.shape[1]
    if ids.size <= FEW_IDS:
        out = np.empty((ids.size, width), bits.dtype)
        return out.view(weight.dtype) if _copy(0, ids.size, bits, ids, out) else None
    # As an unsigned number a negative id is a huge one.
    if ids.view(np.uint64).max() >= weight.shape[0]:
        return None
    if ids.size * bits.strides[0] < MANY_BYTES:
        return np.take(bits, ids, axis=0, mode="clip").view(weight.dtype)
    out = np.empty((ids.size, width), bits.dtype)
    run(_take, ids.size, bits, ids, out, grain=ids.size // 2)
    return out.view(weight.dtype)


@kernel()
def _copy(lo, hi, weight, ids, out):
    num_embeddings, width = weight.shape
    for i in range(lo, hi):
        row = ids[i]
        if row < 0 or row >= num_embeddings:
            return False
        for d in range(width):
            out[i, d] = weight[row, d]
    return True


def _take(lo: int, hi: int, weight: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    # "clip" skips a check that has been made and, unlike "raise", writes without a buffer.
    np.take(weight, ids[lo:hi], axis=0, out=out[lo:hi], mode="clip")
