"""Float32 outputs at whole positions, whose bits must not change between versions."""

import hashlib

import numpy as np

from firstlayer.numpy import EmbeddingLayer, RotaryPositions, SinusoidalPositions
from firstlayer.positions.fourier import fourier_tables
from firstlayer.positions.scaling import YaRN

POSITIONS = np.array([0, 1, 2, 3, 255, 256, 65_535, 65_536, 1_234_567, 2**24 - 1])
POSITIONS = np.concatenate([POSITIONS, -POSITIONS])


def float32_outputs() -> dict[str, np.ndarray]:
    """Return float32 arrays that contain no library's own cosine of a float32 angle.

    No angle is above one radian per position: NumPy's float64 cosines of large angles
    depend on the CPU.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, len(POSITIONS), 32)).astype(np.float32)
    yarn = YaRN(factor=4.0, original_length=4096)
    layer = EmbeddingLayer(9, 32, position="sinusoidal", rng=0)
    ids = np.arange(len(POSITIONS)) % 9
    outputs = {
        "rotary": RotaryPositions(32, heads_axis=-3)(x, POSITIONS),
        "rotary, interleaved": RotaryPositions(
            32, layout="interleaved", base=5e5, heads_axis=-3
        )(x, POSITIONS),
        "rotary, yarn": RotaryPositions(32, scaling=yarn, heads_axis=-3)(x, POSITIONS),
        "rotary, half precision": RotaryPositions(32, heads_axis=-3)(
            x.astype(np.float16), POSITIONS
        ),
        "rotary, sections": RotaryPositions(32, sections=[8, 4, 4], heads_axis=-3)(
            x, np.stack([POSITIONS, POSITIONS[::-1], POSITIONS // 3])
        ),
        "sinusoidal": SinusoidalPositions(32).encode(POSITIONS),
        "sinusoidal, tensor2tensor": SinusoidalPositions.tensor2tensor(31).encode(
            POSITIONS
        ),
        "layer": layer(ids, positions=POSITIONS),
    }
    tables, rates = fourier_tables(10.0 * rng.standard_normal((8, 2)))
    return {**outputs, "fourier tables": tables, "fourier rates": rates}


def hashes() -> dict[str, str]:
    """Return the SHA-256 of the bytes of each output."""
    return {
        name: hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        for name, value in float32_outputs().items()
    }
