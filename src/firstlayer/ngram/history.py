"""The ids that an n-gram reads: a window that ends at each position, and decoding state.

A history is an array of the ids before the first position, oldest first. A negative id
stands for no id: an n-gram does not read it or anything older.
"""

import sys
from typing import Any

import numpy as np

from .._array import cast_like, namespace_of, take_last
from .._check import integers

#: The id that stands for no id.
NO_ID = -1


def as_ids(x: Any, *, name: str) -> Any:
    """Return ``x`` as an array of integers with an axis of positions.

    Example:
        >>> as_ids([[1, 2]], name="ids")
        array([[1, 2]])
    """
    x = as_integers(x, name=name)
    if x.ndim == 0:
        raise ValueError(f"{name} must have an axis of positions, got a single id")
    return x


def as_integers(x: Any, *, name: str) -> Any:
    """Return ``x`` as an array of integers: nested lists as a NumPy array."""
    if isinstance(x, list | tuple | np.ndarray | np.generic):
        x = integers(x, name=name)
    elif "int" not in str(getattr(x, "dtype", type(x).__name__)) or isinstance(x, int):
        raise TypeError(
            f"{name} must be integers, got {getattr(x, 'dtype', type(x).__name__)}"
        )
    return x


def like(x: Any, other: Any) -> Any:
    """Return ``x`` as an array of the library and on the device of ``other``.

    Example:
        >>> like([True, False], np.arange(2))
        array([ True, False])
    """
    xp = namespace_of(other)
    if xp is sys.modules.get("torch"):
        return xp.as_tensor(x, device=other.device)
    return xp.asarray(x)


def host_view(x: Any) -> np.ndarray | None:
    """Return the values of ``x`` without a copy, or None if they are not on the host.

    Values are not on the host under tracing, and on an accelerator.

    Example:
        >>> host_view(np.arange(2))
        array([0, 1])
    """
    if isinstance(x, np.ndarray):
        return x
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(x, torch.Tensor):
        # A subclass, such as the tensor of a tracer, may have no values.
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if is_traced or type(x) is not torch.Tensor or x.device.type != "cpu":
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return None
        return x.detach().numpy()
    if jax is None or isinstance(x, jax.core.Tracer):
        return None
    is_on_cpu = all(device.platform == "cpu" for device in x.devices())
    return np.asarray(x) if is_on_cpu and x.is_fully_addressable else None


def filled(shape: tuple[int, ...], value: int, other: Any) -> Any:
    """Return an int64 array of one value, of the library and device of ``other``.

    Example:
        >>> filled((2,), -1, np.arange(3))
        array([-1, -1])
    """
    xp = namespace_of(other)
    if xp is sys.modules.get("torch"):
        return xp.full(shape, value, dtype=xp.int64, device=other.device)
    return xp.full(shape, value, dtype=other.dtype if xp is not np else np.int64)


def joined(history: Any, ids: Any, *, span: int, no_id: int = NO_ID) -> Any:
    """Return the ids of n-grams of ``span`` ids: ``span - 1`` of history, then ``ids``.

    Args:
        history: At most ``span - 1`` ids, oldest first, or None.
        ids: Ids of the positions.
        span: Number of ids in the longest n-gram.
        no_id: The id before the history.

    Example:
        >>> joined(np.array([7]), np.array([8, 9]), span=4)
        array([-1, -1,  7,  8,  9])
    """
    xp, lead = namespace_of(ids), tuple(ids.shape[:-1])
    given = 0 if history is None else history.shape[-1]
    if history is not None and tuple(history.shape[:-1]) != lead:
        raise ValueError(
            f"history must have the leading axes of ids, {lead}, "
            f"got shape {tuple(history.shape)}"
        )
    if given > span - 1:
        raise ValueError(f"history must have at most {span - 1} ids, got {given}")
    parts = [filled((*lead, span - 1 - given), no_id, ids)]
    return xp.concat([*parts, *([] if history is None else [history]), ids], axis=-1)


def joined_documents(documents: Any, full: Any) -> Any:
    """Return the document of each id of :func:`joined`.

    Args:
        documents: Documents of the last ids. The ids before are in the document of the
            first of these.
        full: Result of :func:`joined`.

    Example:
        >>> joined_documents(np.array([4, 5]), np.array([1, 2, 3, 6]))
        array([4, 4, 4, 5])
    """
    xp, missing = namespace_of(documents), full.shape[-1] - documents.shape[-1]
    first = xp.broadcast_to(documents[..., :1], (*full.shape[:-1], missing))
    return xp.concat([first, documents], axis=-1)


def check_shape(x: Any, *, name: str, shape: tuple, given: int) -> None:
    """Raise unless ``x`` has one entry for each id, or for each id and the history.

    Example:
        >>> check_shape(np.arange(3), name="dead", shape=(3,), given=2)
    """
    whole = (*shape[:-1], given + shape[-1])
    if tuple(x.shape) not in (tuple(shape), whole):
        shapes = " or ".join(dict.fromkeys(map(str, (tuple(shape), whole))))
        raise ValueError(f"{name} must have shape {shapes}, got {tuple(x.shape)}")


def without_dead(ids: Any, dead: Any, *, no_id: int = NO_ID) -> Any:
    """Return ``ids`` with ``no_id`` where ``dead`` is true.

    Example:
        >>> without_dead(np.array([5, 6]), np.array([False, True]))
        array([ 5, -1])
    """
    return namespace_of(ids).where(dead != 0, filled((), no_id, ids), ids)


def last_ids(full: Any, accepted: Any, *, span: int) -> Any:
    """Return the last ``span - 1`` ids of :func:`joined` after ``accepted`` of its ids.

    Args:
        full: Result of :func:`joined`.
        accepted: Number of ids, an array of the shape of the leading axes, or an int.
        span: Number of ids in the longest n-gram.

    Example:
        >>> last_ids(np.array([1, 2, 3, 4, 5]), np.array(2), span=3)
        array([3, 4])
    """
    if isinstance(accepted, int):
        return full[..., accepted : accepted + span - 1]
    steps = like(np.arange(span - 1), full)
    return take_last(full, cast_like(accepted, full)[..., None] + steps)


def constant(values: np.ndarray, other: Any) -> Any:
    """Return a NumPy array as one of the library and on the device of ``other``.

    Example:
        >>> constant(np.arange(2), np.ones(3))
        array([0, 1])
    """
    xp = namespace_of(other)
    if xp is sys.modules.get("torch"):
        return xp.from_numpy(values).to(other.device)
    return xp.asarray(values)
