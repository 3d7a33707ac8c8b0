"""Firstlayer: the layer right after the tokenizer. Ids in, position-aware vectors out.

The faces are :mod:`firstlayer.numpy`, :mod:`firstlayer.torch` and :mod:`firstlayer.equinox`; what stands
here is what they share. Importing this module imports nothing heavier than the standard
library: a name is fetched when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import positions as positions
    from .kernels._threads import get_num_threads as get_num_threads
    from .kernels._threads import set_num_threads as set_num_threads
    from .rotary import convert_layout as convert_layout
    from .rotary import query_temperature as query_temperature
    from .rows import Rows as Rows
    from .scaling import NTK as NTK
    from .scaling import DynamicNTK as DynamicNTK
    from .scaling import Linear as Linear
    from .scaling import Llama3 as Llama3
    from .scaling import LongRoPE as LongRoPE
    from .scaling import Proportional as Proportional
    from .scaling import YaRN as YaRN

__version__ = "0.1.0"

_HOME = {
    "DynamicNTK": "scaling",
    "Linear": "scaling",
    "Llama3": "scaling",
    "LongRoPE": "scaling",
    "NTK": "scaling",
    "Proportional": "scaling",
    "Rows": "rows",
    "YaRN": "scaling",
    "convert_layout": "rotary",
    "get_num_threads": "kernels._threads",
    "query_temperature": "rotary",
    "set_num_threads": "kernels._threads",
}

__all__ = ["__version__", "positions", *sorted(_HOME)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "positions":
        return importlib.import_module(".positions", __name__)
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
