"""Quantized rows of GGUF files: Q8_0, Q4_0 and Q4_K. They are read, not written."""

from dataclasses import dataclass

import numpy as np

from ...kernels.quantized_rows import Q4KRows, Q4Rows, Q8Rows
from ._quantized import QuantizedFormat
from .row_format import Parts


@dataclass(frozen=True)
class Gguf(QuantizedFormat):
    """Blocks of values that begin with their scale.

    Args:
        kind: ``"q8_0"``, ``"q4_0"`` or ``"q4_k"``.

    Example:
        >>> Gguf("q4_k").row_bytes(256)
        144
    """

    kind: str
    writable = False

    @property
    def name(self) -> str:
        return self.kind

    def part_shapes(self, width: int) -> dict[str, tuple[np.dtype, int]]:
        _, block, block_bytes = KINDS[self.kind]
        if width % block:
            raise ValueError(
                f"rows of format {self.name} must have a multiple of {block} values, "
                f"got {width}"
            )
        return {"weight": (np.dtype(np.uint8), width // block * block_bytes)}

    def rows_of(self, parts: Parts, width: int) -> Q8Rows | Q4Rows | Q4KRows:
        return KINDS[self.kind][0](*self.arrays_of(parts, width))


#: Kernels' rows, values in a block and bytes of a block, by name.
KINDS = {
    "q8_0": (Q8Rows, 32, 34),
    "q4_0": (Q4Rows, 32, 18),
    "q4_k": (Q4KRows, 256, 144),
}
