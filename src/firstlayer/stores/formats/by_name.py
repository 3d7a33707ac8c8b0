"""Formats by name."""

import re

from .affine import Affine, Int4
from .floats import Floats
from .fp8 import Fp8, Fp8Block
from .gguf import KINDS, Gguf
from .int8 import Int8
from .row_format import RowFormat

_FORMATS: dict[str, RowFormat] = {
    **{name: Floats(name) for name in ("float32", "float16", "bfloat16")},
    **{format_.name: format_ for format_ in (Int8(), Int4(), Fp8(), Fp8Block())},
    **{kind: Gguf(kind) for kind in KINDS},
}
_MLX = re.compile(r"mlx(\d)(?:_g(\d{1,4}))?(?:_(float16|float32))?")


def format_by_name(name: "str | RowFormat") -> RowFormat:
    """Return the format of that name, or the format given.

    Args:
        name: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"``, ``"int4"``,
            ``"fp8"``, ``"fp8_block"``, ``"q8_0"``, ``"q4_0"``, ``"q4_k"``, or MLX's affine
            formats such as ``"mlx4"``, in groups of 64, and ``"mlx6_g32"``.

    Example:
        >>> format_by_name("mlx6_g32").row_bytes(160)
        140
    """
    if isinstance(name, RowFormat):
        return name
    if name in _FORMATS:
        return _FORMATS[name]
    if isinstance(name, str) and (match := _MLX.fullmatch(name)):
        bits, group_size, dtype = match.groups()
        return Affine(int(bits), int(group_size or 64), dtype or "bfloat16")
    raise ValueError(f"format must be {', '.join(_FORMATS)} or mlx2 to mlx8, got {name!r}")
