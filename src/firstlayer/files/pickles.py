"""Read pickles as data: nothing in a file is ever called or imported.

A pickle names the classes and functions that rebuild its objects, so :mod:`pickle` runs
whatever a file asks for. Here a fixed list of names stands for inert replacements: records
that only keep what was stored, and arrays that are checked before they are built. Every
other name is an error.

:mod:`pickle`'s Python implementation is used: the C one allocates a table as long as any
index in the file says.
"""

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .checkpoint import shortened

Names = Mapping[tuple[str, str], Callable[..., Any]]


class Record:
    """An object of a pickle: the attributes that were stored, and nothing else."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2:
            # Attributes in a dict and in slots.
            state = {**(state[0] or {}), **(state[1] or {})}
        # Python 2 wrote names as bytes.
        items = state.items() if isinstance(state, dict) else ()
        self.attributes = {_text(name): value for name, value in items}

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the items of a subclass of dict."""

    def append(self, value: Any) -> None:
        """Ignore the items of a subclass of list."""


class _Array:
    """An array that is not built yet."""

    value: np.ndarray | None = None

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        match state:
            case (_, tuple(shape), _Dtype(value=np.dtype() as dtype), fortran, content):
                pass
            case _:
                raise ValueError("it has a malformed array")
        is_shape = all(type(axis) is int and axis >= 0 for axis in shape)
        if not is_shape or not isinstance(content, bytes | bytearray):
            raise ValueError("it has a malformed array")
        if math.prod(shape) * dtype.itemsize != len(content):
            raise ValueError(f"it has an array of shape {shape} in {len(content)} bytes")
        flat = np.frombuffer(content, dtype)
        self.value = flat.reshape(shape, order="F" if fortran else "C")


class _Dtype:
    """A dtype of numbers."""

    def __init__(self, code: Any, *args: Any) -> None:
        code = _text(code)
        if not isinstance(code, str) or len(code) > 16:
            raise ValueError("it has a malformed dtype")
        try:
            self.value = np.dtype(code)
        except (TypeError, ValueError, SyntaxError):
            raise ValueError(f"it has a malformed dtype {shortened(code)}") from None
        if self.value.hasobject or self.value.itemsize == 0:
            raise ValueError("it has an array of Python objects")

    def __setstate__(self, state: Any) -> None:
        match state:
            case (_, order, *_) if _text(order) in ("<", ">", "=", "|"):
                self.value = self.value.newbyteorder(_text(order))
            case _:
                raise ValueError("it has a malformed dtype")


def _scalar(dtype: Any, content: Any = b"") -> Any:
    is_valid = isinstance(dtype, _Dtype) and isinstance(content, bytes)
    if not is_valid or len(content) != dtype.value.itemsize:
        raise ValueError("it has a malformed number")
    return np.frombuffer(content, dtype.value)[0]


def _text(value: Any) -> Any:
    return value.decode("latin1") if isinstance(value, bytes) else value


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8"):
        raise ValueError("it has malformed bytes")
    return text.encode(encoding)


def _array(*args: Any) -> _Array:
    return _Array()


def _default_dict(*args: Any) -> dict[Any, Any]:
    return {}


def _whole(*args: Any) -> Any:
    return args[0] if args and isinstance(args[0], int | float) else 0


#: What NumPy's arrays and Python's containers are rebuilt with.
COMMON: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): _default_dict,
    # How Python 3.4 names it in pickles for Python 2.
    ("UserString", "defaultdict"): _default_dict,
    ("_codecs", "encode"): _encoded,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): Record,
}
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    COMMON[_module, "_reconstruct"] = _array
    COMMON[_module, "scalar"] = _scalar
for _module in ("builtins", "__builtin__"):
    COMMON |= {(_module, _name): Record for _name in ("hash", "object", "set", "frozenset")}
    COMMON |= {(_module, _name): _whole for _name in ("int", "long", "float", "bool")}


class _Unpickler(pickle._Unpickler):
    """Unpickler that knows a fixed list of names."""

    def __init__(self, content: bytes, names: Names, load: Callable[[Any], Any] | None):
        # Python 2 wrote texts and the contents of arrays alike.
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._names, self._load = names, load

    def find_class(self, module: str, name: str) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it has a malformed name")
        try:
            return self._names[module, name]
        except KeyError:
            raise ValueError(
                f"it names the Python object {shortened(f'{module}.{name}')}, which is "
                "not read"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        if self._load is None:
            raise ValueError("it refers to objects outside of it")
        return self._load(pid)


def read_pickle(
    content: bytes,
    *,
    names: Names,
    source: str,
    load: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what a pickle holds, made of containers, numbers, arrays and records.

    Args:
        content: The pickle.
        names: Replacement of each allowed name: by module and name, an inert class or
            function.
        source: Name of the file in errors.
        load: Returns the object of a persistent id; None allows none.
    """
    try:
        found = _Unpickler(content, names, load).load()
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply") from None
    except Exception as error:
        # A damaged pickle can raise anything.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{source} is not read: {reason[:300]}") from None
    return found


def array_in(value: Any) -> np.ndarray | None:
    """Return the array that a pickle holds as a value, or None."""
    return value.value if isinstance(value, _Array) else None
