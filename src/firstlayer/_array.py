"""Array namespaces, and the operations that NumPy, JAX and torch spell differently.

The math of the core runs unchanged on all three. No framework is imported here: an array
of a framework can only exist once the caller has imported it.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any


def namespace_of(x: Any, *, name: str = "x") -> ModuleType:
    """Return the array namespace of ``x``: ``numpy``, ``jax.numpy`` or ``torch``.

    Args:
        x: An array.
        name: Its name in the error.

    Example:
        >>> import numpy as np
        >>> namespace_of(np.ones(3)).__name__
        'numpy'
    """
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return torch
    raise TypeError(f"{name} must be a NumPy, JAX or torch array, got {type(x).__name__}")


def cast(x: Any, dtype: str) -> Any:
    """Return ``x`` cast to the dtype of that name, in its own library.

    Example:
        >>> import numpy as np
        >>> cast(np.arange(2), "float32")
        array([0., 1.], dtype=float32)
    """
    xp = namespace_of(x)
    if xp is sys.modules.get("torch"):
        return x.to(getattr(xp, dtype))
    return x if x.dtype == dtype else x.astype(dtype)


def cast_like(x: Any, other: Any) -> Any:
    """Return ``x`` in the dtype of ``other``, an array of the same library.

    Example:
        >>> import numpy as np
        >>> cast_like(np.arange(2), np.ones(3, np.float32))
        array([0., 1.], dtype=float32)
    """
    if namespace_of(x) is sys.modules.get("torch"):
        return x.to(other.dtype)
    return x if x.dtype == other.dtype else x.astype(other.dtype)


def exact_integers(x: Any) -> AbstractContextManager[Any]:
    """Return a context in which the library of ``x`` computes with 64-bit integers.

    Example:
        >>> import numpy as np
        >>> x = np.array([2**40], np.int64)
        >>> with exact_integers(x):
        ...     (x * 4).tolist()
        [4398046511104]
    """
    return x64_enabled() if namespace_of(x).__name__ == "jax.numpy" else nullcontext()


def x64_enabled() -> AbstractContextManager[Any]:
    """Return a context in which JAX computes with 64-bit numbers."""
    return sys.modules["jax"].enable_x64(True)


def float64_from_bits(bits: Any) -> Any:
    """Return the float64 numbers of these int64 bit patterns.

    Example:
        >>> import numpy as np
        >>> float64_from_bits(np.array([0x3FF0000000000000]))
        array([1.])
    """
    xp = namespace_of(bits)
    return bits.view(xp.float64)


def is_real(x: Any) -> bool:
    """Return whether ``x`` has a floating-point dtype, half precision included.

    Example:
        >>> import numpy as np
        >>> is_real(np.ones(2, np.float16)), is_real(np.arange(2))
        (True, False)
    """
    # `dtype.kind` first: the name of a NumPy or JAX dtype takes microseconds to build.
    kind = getattr(x.dtype, "kind", None)
    return kind == "f" or (kind not in ("i", "u", "b") and "float" in str(x.dtype))


def compute_dtype(dtype: Any) -> str:
    """Return the name of the dtype in which values of ``dtype`` are computed.

    ``"float64"`` for float64, ``"float32"`` for everything else.

    Example:
        >>> import numpy as np
        >>> compute_dtype(np.dtype("float16")), compute_dtype(np.float64)
        ('float32', 'float64')
    """
    if hasattr(dtype, "kind"):  # NumPy and JAX, whose dtype names are slow to build
        return "float64" if dtype.kind == "f" and dtype.itemsize == 8 else "float32"
    name = getattr(dtype, "__name__", None) or str(dtype)
    return "float64" if name.endswith("float64") else "float32"


def trunc(x: Any) -> Any:
    """Return reals rounded to whole numbers, towards zero.

    Example:
        >>> import numpy as np
        >>> trunc(np.array([1.5, -1.5])).tolist()
        [1.0, -1.0]
    """
    xp = namespace_of(x)
    if xp is sys.modules.get("torch") and xp.jit.is_tracing():
        return xp.where(x < 0, xp.ceil(x), xp.floor(x))  # traces have no trunc in ONNX
    return xp.trunc(x)


def row_index(x: Any) -> Any:
    """Return integers in a dtype that indexes rows: int64 in torch, else unchanged.

    Torch converts other integers itself, but ONNX accepts no others.

    Example:
        >>> import numpy as np
        >>> row_index(np.array([1], np.int32)).dtype
        dtype('int32')
    """
    return cast(x, "int64") if namespace_of(x) is sys.modules.get("torch") else x


def repeating(x: Any, lead: tuple[int, ...]) -> Any:
    """Return ``x`` broadcast to ``lead`` and flattened, without repeats of leading axes.

    Tiling the result gives the whole broadcast array.

    Example:
        >>> import numpy as np
        >>> repeating(np.arange(3), (4, 3)).tolist()
        [0, 1, 2]
        >>> repeating(np.array([[5], [7]]), (2, 2)).tolist()
        [5, 5, 7, 7]
    """
    shape = tuple(x.shape)
    while shape[:1] == (1,):
        shape = shape[1:]
    tail = lead[len(lead) - len(shape) :]
    x = x.reshape(shape)
    return (x if shape == tail else namespace_of(x).broadcast_to(x, tail)).reshape(-1)


def take_last(x: Any, index: Any) -> Any:
    """Return the entries of ``x`` at ``index`` along the last axis.

    Example:
        >>> import numpy as np
        >>> take_last(np.array([[5, 6, 7]]), np.array([[2, 0]])).tolist()
        [[7, 5]]
    """
    xp = namespace_of(x)
    if xp is sys.modules.get("torch"):
        # Not take_along_dim: torch.compile specializes every size in it.
        lead = xp.broadcast_shapes(x.shape[:-1], index.shape[:-1])
        index = xp.broadcast_to(cast(index, "int64"), (*lead, index.shape[-1]))
        return xp.gather(xp.broadcast_to(x, (*lead, x.shape[-1])), -1, index)
    mesh = explicit_mesh(x, index) if xp.__name__ == "jax.numpy" else None
    if mesh is None:
        return xp.take_along_axis(x, index, axis=-1)
    sharding, specs = sys.modules["jax"].sharding, axis_specs(index)
    # The other axes are those of both arrays, and sharded as in either of them.
    lead = zip(axis_specs(x)[:-1], specs[:-1], strict=True)
    spec = (*(a if a is not None else b for a, b in lead), specs[-1])
    spec = sharding.NamedSharding(mesh, sharding.PartitionSpec(*spec))
    take = partial(xp.take_along_axis, axis=-1)
    take = sharding.auto_axes(take, axes=mesh.explicit_axes, out_sharding=spec)
    return take(x, index)


def take_rows(x: Any, index: Any) -> Any:
    """Return the rows of ``x`` at ``index``, which is in range and may have any shape.

    Example:
        >>> import numpy as np
        >>> take_rows(np.array([[5, 6], [7, 8]]), np.array([[1]])).tolist()
        [[[7, 8]]]
    """
    if namespace_of(x).__name__ != "jax.numpy":
        return x[row_index(index)]
    sharding = _gather_sharding(x, index, axis=0)
    return x.at[index].get(mode="promise_in_bounds", out_sharding=sharding)


def running_max(x: Any) -> Any:
    """Return the running maximum along the last axis.

    Example:
        >>> import numpy as np
        >>> running_max(np.array([0, 2, 1, 3])).tolist()
        [0, 2, 2, 3]
    """
    xp = namespace_of(x)
    if xp is sys.modules.get("torch"):
        return xp.cummax(x, -1).values
    if xp.__name__ == "jax.numpy":
        return sys.modules["jax"].lax.cummax(x, axis=x.ndim - 1)
    return xp.maximum.accumulate(x, axis=-1)


def take_columns(x: Any, index: Any) -> Any:
    """Return the columns ``index`` of a matrix; ``index`` may have any shape.

    Example:
        >>> import numpy as np
        >>> take_columns(np.array([[5, 6], [7, 8]]), np.array([[1]])).tolist()
        [[[6]], [[8]]]
    """
    xp = namespace_of(x)
    if xp is sys.modules.get("torch"):
        return x[:, row_index(index)]
    if xp.__name__ != "jax.numpy":
        return xp.take(x, index, axis=1)
    sharding = _gather_sharding(x, index, axis=1)
    return x.at[:, index].get(mode="promise_in_bounds", out_sharding=sharding)


def move_axis(x: Any, source: int, target: int) -> Any:
    """Return ``x`` with axis ``source`` moved to ``target``.

    Example:
        >>> import numpy as np
        >>> move_axis(np.zeros((2, 3, 4)), 0, -1).shape
        (3, 4, 2)
    """
    xp = namespace_of(x)
    if xp is sys.modules.get("torch"):
        # Not torch.moveaxis: vmap has no rule for it. Axes from the front: an exporter of
        # ONNX copies them into the graph as they are.
        return xp.movedim(x, source % x.ndim, target % x.ndim)
    return xp.moveaxis(x, source, target)


def explicit_mesh(*arrays: Any) -> Any:
    """Return the mesh of the first JAX array whose type has explicit axes, else None."""
    typeof = sys.modules["jax"].typeof
    meshes = (typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def axis_specs(x: Any) -> tuple[Any, ...]:
    """Return the mesh axes that each axis of a JAX array is sharded over, None for none."""
    spec = tuple(sys.modules["jax"].typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def _gather_sharding(x: Any, index: Any, *, axis: int) -> Any:
    """Return the sharding that keeps those of ``index`` and of the other axes of ``x``.

    JAX infers it for none but replicated indices. None without explicit mesh axes.
    """
    mesh = explicit_mesh(x, index)
    if mesh is None:
        return None
    sharding, spec = sys.modules["jax"].sharding, axis_specs(x)
    spec = (*spec[:axis], *axis_specs(index), *spec[axis + 1 :])
    return sharding.NamedSharding(mesh, sharding.PartitionSpec(*spec))
