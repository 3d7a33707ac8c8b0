"""Argument checks shared by all front ends.

Each check returns a concrete host value in canonical form or raises an error with a
message of the form *name, rule, value*.
"""

from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

FLOATS = ("float64", "float32", "float16", "bfloat16")
T = TypeVar("T", bound=str | None)
_NATIVE = frozenset(map(np.dtype, FLOATS[:-1]))


def not_negative(name: str, value: int) -> int:
    """Return ``value`` as an int if it is an integer of at least 0."""
    return _at_least(0, name, value, rule="at least 0")


def positive(name: str, value: int) -> int:
    """Return ``value`` as an int if it is an integer of at least 1.

    Example:
        >>> positive("num_heads", 0)
        Traceback (most recent call last):
        ...
        ValueError: num_heads must be positive, got 0
    """
    return _at_least(1, name, value, rule="positive")


def _at_least(minimum: int, name: str, value: int, *, rule: str) -> int:
    if integer(name, value) < minimum:
        raise ValueError(f"{name} must be {rule}, got {value}")
    return int(value)


def integer(name: str, value: int) -> int:
    """Return ``value`` as an int if it is an integer and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    return int(value)


def boolean(name: str, value: bool) -> bool:
    """Return ``value`` as a bool if it is one, and not a number or a string.

    Example:
        >>> boolean("scale", 2.0)
        Traceback (most recent call last):
        ...
        TypeError: scale must be a bool, got float
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return bool(value)


def one_of(name: str, value: T, allowed: tuple[T, ...]) -> T:
    """Return ``value`` if it is one of ``allowed``."""
    if value not in allowed:
        words = ", ".join(map(repr, allowed[:-1])) + f" or {allowed[-1]!r}"
        raise ValueError(f"{name} must be {words}, got {value!r}")
    return value


def number(name: str, value: float) -> float:
    """Return ``value`` as a float if it is a single number of Python or any array library.

    Strings, such as ``"1.5"``, and bools are not accepted.

    Example:
        >>> number("scale", "1.5")
        Traceback (most recent call last):
        ...
        TypeError: scale must be a number, got str
    """
    if type(value) is float:
        return value
    is_bool = str(getattr(value, "dtype", "")).endswith("bool")
    if not is_bool and not isinstance(value, str | bytes | bool | np.complexfloating):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def positive_number(name: str, value: float, *, finite: bool = True) -> float:
    """Return ``value`` as a float if it is greater than 0 and, by default, finite.

    Example:
        >>> positive_number("base", 0)
        Traceback (most recent call last):
        ...
        ValueError: base must be positive and finite, got 0
    """
    checked = number(name, value)
    if not checked > 0.0 or (finite and checked == float("inf")):
        raise ValueError(f"{name} must be positive{' and finite' * finite}, got {value}")
    return checked


def not_negative_number(name: str, value: float) -> float:
    """Return ``value`` as a float if it is at least 0.

    Example:
        >>> not_negative_number("norm_eps", -1e-5)
        Traceback (most recent call last):
        ...
        ValueError: norm_eps must not be negative, got -1e-05
    """
    checked = number(name, value)
    if not checked >= 0.0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return checked


def probability(name: str, value: float) -> float:
    """Return ``value`` as a float if it lies in [0, 1]."""
    checked = number(name, value)
    if not 0.0 <= checked <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")
    return checked


def padding_index(padding_idx: int | None, num_embeddings: int) -> int | None:
    """Return ``padding_idx`` as a non-negative index, or None.

    Example:
        >>> padding_index(-1, 10)
        9
    """
    if padding_idx is None:
        return None
    if not -num_embeddings <= integer("padding_idx", padding_idx) < num_embeddings:
        raise ValueError(
            f"padding_idx must be in [-{num_embeddings}, {num_embeddings}) "
            f"for num_embeddings {num_embeddings}, got {padding_idx}"
        )
    return int(padding_idx) % int(num_embeddings)


def not_masked(x: Any, *, name: str) -> Any:
    """Return ``x`` unless it is a masked array, or a list of them.

    The conversion to an ordinary array or tensor would drop the mask.

    Example:
        >>> not_masked(np.ma.masked_equal([3, -1], -1), name="ids")
        Traceback (most recent call last):
        ...
        TypeError: ids must not be a masked array: fill it, for example ids.filled(0)
    """
    kind = type(x)
    if kind is np.ndarray:
        return x
    has_mask = isinstance(x, np.ma.MaskedArray) or (
        kind in (list, tuple) and any(isinstance(row, np.ma.MaskedArray) for row in x)
    )
    if has_mask:
        raise TypeError(
            f"{name} must not be a masked array: fill it, for example {name}.filled(0)"
        )
    return x


def host_array(x: Any, *, name: str) -> np.ndarray:
    """Return ``x`` as a NumPy array, not copied if it is one; refuse a masked array."""
    return np.asarray(not_masked(x, name=name))


def dtype_text(dtype: np.dtype) -> str:
    """Return the name of a dtype without the size of strings and raw bytes.

    Example:
        >>> dtype_text(np.dtype("<U32")), dtype_text(np.dtype(np.float16))
        ('str', 'float16')
    """
    if dtype.kind in "SUV" and dtype.name != "bfloat16":
        return {"S": "bytes", "U": "str", "V": "void"}[dtype.kind]
    return dtype.name


def integers(x: Any, *, name: str = "ids") -> np.ndarray:
    """Return ``x`` as a NumPy array of integers, in its own integer dtype.

    An empty list is accepted. Floats and bools raise a TypeError: a float id may have been
    rounded, and a bool array is a mask.

    Example:
        >>> integers([True, False])
        Traceback (most recent call last):
        ...
        TypeError: ids must be integers, got bool
    """
    array = host_array(x, name=name)
    if array.dtype.kind in "iu":
        return array
    if array.size == 0 and not isinstance(x, np.ndarray | np.generic):
        return array.astype(np.int64)
    raise TypeError(f"{name} must be integers, got {dtype_text(array.dtype)}")


def ids_in_range(
    x: Any, num_embeddings: int, *, name: str = "ids", bound: str = "num_embeddings"
) -> np.ndarray:
    """Return ``x`` as int64 ids if all of them are in ``[0, num_embeddings)``.

    Values are checked before the conversion to int64, which could wrap large ids.

    Args:
        x: Integers of any dtype and shape, or nested lists of them.
        num_embeddings: Number of rows.
        name: Name of the ids in the error message.
        bound: Name of the number of rows in the error message.

    Example:
        >>> ids_in_range([3, -1], 5)
        Traceback (most recent call last):
        ...
        IndexError: ids[1] is -1, but num_embeddings is 5
    """
    ids = integers(x, name=name)
    if not all_in_range(ids, num_embeddings):
        raise out_of_range(ids, num_embeddings, name=name, bound=bound)
    return ids.astype(np.int64, copy=False)


def all_in_range(ids: np.ndarray, num_embeddings: int) -> bool:
    """Return whether all ``ids`` are in ``[0, num_embeddings)``.

    Example:
        >>> all_in_range(np.array([3, -1]), 5)
        False
    """
    if not ids.size:
        return True
    if ids.dtype == np.int64:
        # As unsigned integers, negative ids are larger than any bound: one pass, not two.
        return bool(ids.view(np.uint64).max() < num_embeddings)
    return bool(ids.max() < num_embeddings and ids.min() >= 0)


def out_of_range(
    ids: np.ndarray,
    num_embeddings: int,
    *,
    name: str = "ids",
    bound: str = "num_embeddings",
) -> IndexError:
    """Return an IndexError with the first id out of range, its index and the bound."""
    ids = ids.copy()  # another thread may be changing them
    bad = (ids >= num_embeddings) | (ids < 0)
    if not bad.any():
        return changed_ids(num_embeddings, name=name, bound=bound)
    index = np.unravel_index(int(np.argmax(bad)), ids.shape)
    suffix = f"[{', '.join(str(int(i)) for i in index)}]" if index else ""
    return IndexError(f"{name}{suffix} is {ids[index]}, but {bound} is {num_embeddings}")


def changed_ids(
    num_embeddings: int, *, name: str = "ids", bound: str = "num_embeddings"
) -> IndexError:
    """Return the error for ids that were out of range only while a kernel read them.

    Example:
        >>> print(changed_ids(10))
        ids changed during the call, and one was out of range: num_embeddings is 10
    """
    return IndexError(
        f"{name} changed during the call, and one was out of range: "
        f"{bound} is {num_embeddings}"
    )


def check_table(weight: Any, *, name: str = "weight") -> np.ndarray:
    """Return a table that kernels can read, or raise an error.

    Args:
        weight: Array that a caller may have put in place of another.
        name: Name of the table in the error message.

    Example:
        >>> check_table(np.ones(3))
        Traceback (most recent call last):
        ...
        ValueError: weight must have 2 axes, got shape (3,)
    """
    # First what almost every table is: the checks below take half a microsecond.
    if type(weight) is np.ndarray and weight.dtype in _NATIVE and weight.ndim == 2:
        return weight
    if not isinstance(not_masked(weight, name=name), np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, got {type(weight).__name__}")
    dtype = weight.dtype
    if not is_float(dtype) or not dtype.isnative:
        raise TypeError(
            f"{name} must be {', '.join(FLOATS[:-1])} or bfloat16 in native byte order, "
            f"got {dtype_text(dtype) if dtype.isnative else dtype.str}"
        )
    if weight.ndim != 2:
        raise ValueError(f"{name} must have 2 axes, got shape {weight.shape}")
    return weight


def float_dtype(dtype: Any) -> np.dtype:
    """Return ``dtype`` as a native NumPy dtype if it is a float dtype; None is float32.

    Example:
        >>> float_dtype("bfloat16").itemsize
        2
    """
    if dtype is None:
        return np.dtype(np.float32)
    if isinstance(dtype, np.dtype) and dtype.isnative and is_float(dtype):
        return dtype
    if str(dtype) == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    native = np.dtype(dtype).newbyteorder("=")
    if native.name not in FLOATS:
        raise TypeError(f"dtype must be {', '.join(FLOATS[:-1])} or bfloat16, got {native}")
    return native


def same_dtype(names: str, *dtypes: str) -> None:
    """Raise a ValueError unless all dtypes, given by name, are the same.

    Example:
        >>> same_dtype("u and v", "float32", "float64")
        Traceback (most recent call last):
        ...
        ValueError: u and v must have one dtype, got float32 and float64
    """
    if len(set(dtypes)) > 1:
        words = ", ".join(dtypes[:-1]) + f" and {dtypes[-1]}"
        raise ValueError(f"{names} must have one dtype, got {words}")


def is_float(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is one of :data:`FLOATS`, in either byte order."""
    # `dtype.kind` first: `dtype.name` takes microseconds.
    if dtype.kind == "f":
        return dtype.itemsize in (2, 4, 8)
    return dtype.kind == "V" and dtype.name == "bfloat16"


def check_real(x: Any, *, name: str, whole: bool = True) -> None:
    """Raise a TypeError unless ``x`` has a float or integer dtype.

    Args:
        x: NumPy or JAX array, or nested lists.
        name: Name of ``x`` in the error message.
        whole: Accept integers as well as floats.

    Example:
        >>> check_real(np.ones(2, complex), name="weight")
        Traceback (most recent call last):
        ...
        TypeError: weight must be real, got complex128
    """
    dtype = getattr(not_masked(x, name=name), "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.asarray(x).dtype
    if not is_float(dtype) and not (whole and dtype.kind in "iu"):
        raise TypeError(f"{name} must be real, got {dtype_text(dtype)}")


def positions_array(x: Any, *, name: str = "positions") -> np.ndarray:
    """Return ``x`` as a NumPy array of integers or floats, or raise a TypeError."""
    array = host_array(x, name=name)
    if array.dtype.kind in "iu" or is_float(array.dtype):
        return array
    if array.dtype.kind == "O":
        large = [n for n in array.flat if type(n) is int and not -(2**63) <= n < 2**64]
        if large:
            raise ValueError(f"{name} must be smaller than {2**63} in size, got {large[0]}")
    raise TypeError(f"{name} must be integers or reals, got {dtype_text(array.dtype)}")


def positions_in_reach(
    positions: np.ndarray, limit: int, *, name: str = "positions"
) -> np.ndarray:
    """Return ``positions`` if the absolute value of each is less than ``limit``.

    Example:
        >>> positions_in_reach(np.array([3, -400]), 256)
        Traceback (most recent call last):
        ...
        ValueError: positions must be smaller than 256 in size, got -400
    """
    if positions.dtype.kind in "iu" and positions.size:
        if int(positions.max()) < limit and int(positions.min()) > -limit:
            return positions
    # As float64: a Python int would overflow when it is cast to a float16 array's dtype.
    bound = np.float64(limit)
    inside = (positions < bound) & (positions > -bound)
    if not inside.all():
        first = positions[np.unravel_index(int(np.argmin(inside)), inside.shape)]
        raise ValueError(f"{name} must be smaller than {limit} in size, got {first}")
    return positions
