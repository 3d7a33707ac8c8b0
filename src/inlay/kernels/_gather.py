"""Rows by id. Every id is checked, and the rows are copied at the speed of memory."""

import numpy as np

from ._numba import bits_of, kernel
from ._pool import run

# Up to here one compiled pass that checks and copies costs less than NumPy's two calls.
FEW_IDS = 256
# From here a second core adds more bandwidth than waking it costs.
MANY_BYTES = 4 << 20


def gather(weight: np.ndarray, ids: np.ndarray) -> np.ndarray | None:
    """Return ``weight[ids]`` for flat ids, or None if one of them is out of range."""
    bits = bits_of(weight)
    out = np.empty((ids.size, weight.shape[1]), bits.dtype)
    if ids.size <= FEW_IDS:
        inside = _copy(0, ids.size, bits, ids, out)
    else:
        # As an unsigned number a negative id is a huge one.
        inside = ids.view(np.uint64).max() < weight.shape[0]
        if inside:
            grain = MANY_BYTES // 2 // max(out.strides[0], 1)
            run(_take, ids.size, bits, ids, out, grain=grain)
    return out.view(weight.dtype) if inside else None


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
