"""The argument checks that every face shares, and their sentences.

Each check looks at concrete values on the host and either returns what it was given in a
canonical form or raises: *name, rule, value*, in the same words in every face.
"""

from contextlib import suppress
from typing import Any

import numpy as np

FLOATS = ("float64", "float32", "float16", "bfloat16")


def not_negative(name: str, value: int) -> int:
    """Return ``value`` as an int if it is a whole number of at least 0."""
    return _whole(name, value, least=0, rule="at least 0")


def positive(name: str, value: int) -> int:
    """Return ``value`` as an int if it is a whole number of at least 1.

    Example:
        >>> positive("num_heads", 0)
        Traceback (most recent call last):
        ...
        ValueError: num_heads must be positive, got 0
    """
    return _whole(name, value, least=1, rule="positive")


def _whole(name: str, value: int, *, least: int, rule: str) -> int:
    if integer(name, value) < least:
        raise ValueError(f"{name} must be {rule}, got {value}")
    return int(value)


def integer(name: str, value: int) -> int:
    """Return ``value`` as an int if it is a whole number, which a bool is not."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    return int(value)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of the words in ``allowed``."""
    if value not in allowed:
        words = ", ".join(map(repr, allowed[:-1])) + f" or {allowed[-1]!r}"
        raise ValueError(f"{name} must be {words}, got {value!r}")
    return value


def number(name: str, value: float) -> float:
    """Return ``value`` as a float if it is one number, of Python or of any library.

    Text is none, not even ``"1.5"``, and neither is a bool.

    Example:
        >>> number("scale", "1.5")
        Traceback (most recent call last):
        ...
        TypeError: scale must be a number, got str
    """
    is_bool = str(getattr(value, "dtype", "")).endswith("bool")
    if not is_bool and not isinstance(value, str | bytes | bool | np.complexfloating):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def positive_number(name: str, value: float, *, finite: bool = True) -> float:
    """Return ``value`` as a float if it is a number above 0, and ``finite`` if asked.

    Example:
        >>> positive_number("base", 0)
        Traceback (most recent call last):
        ...
        ValueError: base must be positive and finite, got 0
    """
    found = number(name, value)
    if not found > 0.0 or (finite and found == float("inf")):
        raise ValueError(f"{name} must be positive{' and finite' * finite}, got {value}")
    return found


def not_negative_number(name: str, value: float) -> float:
    """Return ``value`` as a float if it is a number of at least 0.

    Example:
        >>> not_negative_number("norm_eps", -1e-5)
        Traceback (most recent call last):
        ...
        ValueError: norm_eps must not be negative, got -1e-05
    """
    found = number(name, value)
    if not found >= 0.0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return found


def probability(name: str, value: float) -> float:
    """Return ``value`` as a float if it lies in [0, 1]."""
    found = number(name, value)
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")
    return found


def padding_index(padding_idx: int | None, num_embeddings: int) -> int | None:
    """Return ``padding_idx`` counted from the front, or None.

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


def integers(x: Any, *, name: str = "ids") -> np.ndarray:
    """Return ``x`` as a NumPy array of integers, in the dtype it came in.

    An empty list counts as integers. Floats and bools are a TypeError: a float id has
    been rounded somewhere, and a bool is a mask.

    Example:
        >>> integers([True, False])
        Traceback (most recent call last):
        ...
        TypeError: ids must be integers, got bool
    """
    array = np.asarray(x)
    if array.dtype.kind in "iu":
        return array
    if array.size == 0 and not isinstance(x, np.ndarray | np.generic):
        return array.astype(np.int64)
    raise TypeError(f"{name} must be integers, got {array.dtype.name}")


def ids_in_range(
    x: Any, num_embeddings: int, *, name: str = "ids", bound: str = "num_embeddings"
) -> np.ndarray:
    """Return ``x`` as int64 ids, all of them in ``[0, num_embeddings)``.

    Values are looked at before any conversion, so that no wide id loses its high bits on
    the way.

    Args:
        x: Integers of any dtype and shape, or nested lists of them.
        num_embeddings: How many rows there are.
        name: What the ids are called in the sentence.
        bound: What the number of rows is called in the sentence.

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
    """Tell whether all of these integers are in ``[0, num_embeddings)``.

    Example:
        >>> all_in_range(np.array([3, -1]), 5)
        False
    """
    if not ids.size:
        return True
    if ids.dtype == np.int64:
        # As an unsigned number a negative id is a huge one.
        return bool(ids.view(np.uint64).max() < num_embeddings)
    return bool(ids.max() < num_embeddings and ids.min() >= 0)


def out_of_range(
    ids: np.ndarray,
    num_embeddings: int,
    *,
    name: str = "ids",
    bound: str = "num_embeddings",
) -> IndexError:
    """Return the error that names the first id out of range, its place and the bound."""
    bad = (ids >= num_embeddings) | (ids < 0)
    place = np.unravel_index(int(np.argmax(bad)), ids.shape)
    where = f"[{', '.join(str(int(i)) for i in place)}]" if place else ""
    return IndexError(f"{name}{where} is {ids[place]}, but {bound} is {num_embeddings}")


def float_dtype(dtype: Any) -> np.dtype:
    """Return ``dtype`` as a NumPy dtype if a table may have it; None is float32.

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
    found = np.dtype(dtype).newbyteorder("=")
    if found.name not in FLOATS:
        raise TypeError(f"dtype must be {', '.join(FLOATS[:-1])} or bfloat16, got {found}")
    return found


def is_float(dtype: np.dtype) -> bool:
    """Tell whether a table may have this dtype, in any order of its bytes."""
    # Not by its name, which takes microseconds, if it can be told otherwise.
    if dtype.kind == "f":
        return dtype.itemsize in (2, 4, 8)
    return dtype.kind == "V" and dtype.name == "bfloat16"


def check_real(x: Any, *, name: str, whole: bool = True) -> None:
    """Refuse numbers that are not real, before any of them is used.

    Args:
        x: An array of NumPy or JAX, or nested lists.
        name: What it is called in the sentence.
        whole: Whether integers will do.

    Example:
        >>> check_real(np.ones(2, complex), name="weight")
        Traceback (most recent call last):
        ...
        TypeError: weight must be real, got complex128
    """
    dtype = getattr(x, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.asarray(x).dtype
    if not is_float(dtype) and not (whole and dtype.kind in "iu"):
        raise TypeError(f"{name} must be real, got {dtype.name}")


def positions_array(x: Any, *, name: str = "positions") -> np.ndarray:
    """Return ``x`` as a NumPy array of integers or reals; anything else is a TypeError."""
    array = np.asarray(x)
    if array.dtype.kind in "iu" or is_float(array.dtype):
        return array
    raise TypeError(f"{name} must be integers or reals, got {array.dtype.name}")


def positions_in_reach(
    positions: np.ndarray, limit: int, *, name: str = "positions"
) -> np.ndarray:
    """Return ``positions`` if all of them are smaller than ``limit`` in size.

    Example:
        >>> positions_in_reach(np.array([3, -400]), 256)
        Traceback (most recent call last):
        ...
        ValueError: positions must be smaller than 256 in size, got -400
    """
    if positions.dtype.kind in "iu" and positions.size:
        if int(positions.max()) < limit and int(positions.min()) > -limit:
            return positions
    # As float64: a plain number would overflow to the float16 it is compared with.
    reach = np.float64(limit)
    inside = (positions < reach) & (positions > -reach)
    if not inside.all():
        worst = positions[np.unravel_index(int(np.argmin(inside)), inside.shape)]
        raise ValueError(f"{name} must be smaller than {limit} in size, got {worst}")
    return positions
