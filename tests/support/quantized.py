"""Tables in every format, and the golden files of the formats."""

import json
from pathlib import Path

import numpy as np

from firstlayer.stores.formats import RowFormat, format_by_name

DATA = Path(__file__).parent.parent / "data" / "formats"
MANIFEST = json.loads((DATA / "manifest.json").read_text())["files"]
FLOATS = ("float32", "float16", "bfloat16")
WRITABLE = (*FLOATS, "int8", "int4", "fp8", "fp8_block")
MLX = ("mlx2_g32", "mlx3", "mlx4_float16", "mlx5_g128", "mlx6_g32_float32", "mlx7", "mlx8")
GGUF = ("q8_0", "q4_0", "q4_k")
QUANTIZED = ("int8", "int4", "fp8", "fp8_block", *MLX, *GGUF)


def golden(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a golden file."""
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


def widths_of(name: str) -> tuple[int, ...]:
    """Return widths that a format can hold, with and without values left at the end."""
    if name == "q4_k":
        return 256, 512
    if name in ("fp8_block", "q8_0", "q4_0"):
        return 32, 160
    return 1, 31, 32, 33, 100, 128, 300


def random_table(
    name: str, rows: int, width: int, rng: np.random.Generator
) -> tuple[RowFormat, dict[str, np.ndarray]]:
    """Return a format and a table of random bits in it, interleaved, with finite scales."""
    format_ = format_by_name(name)
    encoded = rng.integers(0, 256, (rows, format_.row_bytes(width)), np.uint8)
    parts = format_.split(encoded, width)
    for part in parts.values():
        if part.dtype != np.uint8:
            part[:] = rng.standard_normal(part.shape)
    if name == "fp8":
        parts["scale"] = np.array([[0.3]], np.float32)
    elif name == "fp8_block":
        parts["scale"][:] = rng.integers(120, 130, parts["scale"].shape)
    elif name in GGUF:
        block_bytes = {"q8_0": 34, "q4_0": 18, "q4_k": 144}[name]
        numbers = 2 if name == "q4_k" else 1
        blocks = encoded.reshape(rows, -1, block_bytes)
        scales = rng.standard_normal((*blocks.shape[:2], numbers)).astype(np.float16)
        blocks[..., : 2 * numbers] = scales.view(np.uint8)
    return format_, parts
