"""The layer right after the tokenizer: ids in, position-aware vectors out.

The front ends are :mod:`firstlayer.numpy`, :mod:`firstlayer.torch` and
:mod:`firstlayer.equinox`. This module holds the names they share. They are imported on
first use, so that ``import firstlayer`` loads the standard library only.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import ngram as ngram
    from . import positions as positions
    from .embeddings.row_gradient import RowGradient as RowGradient
    from .kernels.runtime.threads import get_num_threads as get_num_threads
    from .kernels.runtime.threads import set_num_threads as set_num_threads
    from .positions.rotary import convert_layout as convert_layout
    from .positions.rotary import query_temperature as query_temperature
    from .positions.scaling import NTK as NTK
    from .positions.scaling import DynamicNTK as DynamicNTK
    from .positions.scaling import Linear as Linear
    from .positions.scaling import Llama3 as Llama3
    from .positions.scaling import LongRoPE as LongRoPE
    from .positions.scaling import Proportional as Proportional
    from .positions.scaling import YaRN as YaRN
    from .word_vectors.vectors import open_vectors as open_vectors

__version__ = "0.2.0"

_MODULE_OF = {
    "DynamicNTK": "positions.scaling",
    "Linear": "positions.scaling",
    "Llama3": "positions.scaling",
    "LongRoPE": "positions.scaling",
    "NTK": "positions.scaling",
    "Proportional": "positions.scaling",
    "RowGradient": "embeddings.row_gradient",
    "YaRN": "positions.scaling",
    "convert_layout": "positions.rotary",
    "get_num_threads": "kernels.runtime.threads",
    "open_vectors": "word_vectors.vectors",
    "query_temperature": "positions.rotary",
    "set_num_threads": "kernels.runtime.threads",
}

#: Names that each front end has.
_IN_FRONT_ENDS = frozenset(
    "AlibiBias CopeBias Embedding EmbeddingBag EmbeddingLayer EngramGate FireBias "
    "FourierFeatures FrequencyEmbedding HashedEmbedding KerpleBias LearnedPositions "
    "NgramAverage NgramEmbedding QuotientRemainderEmbedding RotaryPositions ShawScores "
    "ShortConvGate SinusoidalPositions T5Bias Time2Vec TransformerXLScores XPosRotary load "
    "save".split()
)

__all__ = ["__version__", "ngram", "positions", *sorted(_MODULE_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in ("ngram", "positions"):
        return importlib.import_module(f".{name}", __name__)
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _IN_FRONT_ENDS:
        # An AttributeError would hide this message from ``from firstlayer import name``.
        raise ImportError(
            f"import {name} from a front end: firstlayer.numpy, firstlayer.torch or "
            "firstlayer.equinox"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
