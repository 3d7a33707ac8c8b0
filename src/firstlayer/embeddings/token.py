"""Row lookups: ``max_norm``, and masking of ids that are out of range."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from .._array import cast, namespace_of
from .._check import positive_number


def mask_out_of_range(
    ids: Integer[Any, "*batch"], *, first: int = 0, last: int
) -> tuple[Bool[Any, "*batch"], Int[Any, "*batch"]]:
    """Return which ids lie in ``[first, last]``, and the ids with 0 in place of the others.

    Used where ids are traced and cannot raise. Takes any integer dtype.

    Example:
        >>> import numpy as np
        >>> inside, safe = mask_out_of_range(np.array([3, -1, 100], np.int8), last=300)
        >>> inside.tolist(), safe.tolist()
        ([True, False, True], [3, 0, 100])
    """
    xp = namespace_of(ids)
    if ids.dtype.itemsize < 4:
        ids = cast(ids, "int32")  # int8 cannot be compared with 1024
    inside = ids <= last
    if "uint" not in str(ids.dtype):
        inside = inside & (ids >= first)
    elif last < 0:
        inside = xp.zeros_like(inside)  # JAX wraps a negative bound to a large uint32
    return inside, cast(xp.where(inside, ids, xp.zeros_like(ids)), "int32")


def clip_norms(
    rows: Float[Any, "*lead embedding_dim"], *, max_norm: float, norm_type: float = 2.0
) -> Float[Any, "*lead embedding_dim"]:
    """Return ``min(1, max_norm / ‖row‖) · row`` for each row.

    Args:
        rows: float32 or float64 array of any library.
        max_norm: Largest norm of a row. Positive.
        norm_type: The p of the p-norm; ``inf`` is the largest absolute entry.

    Example:
        >>> import numpy as np
        >>> clip_norms(np.array([[3.0, 4.0], [0.3, 0.4]]), max_norm=1.0).round(6).tolist()
        [[0.6, 0.8], [0.3, 0.4]]
    """
    if max_norm == float("inf") or not rows.shape[-1]:
        return rows  # inf / inf is NaN, and rows of width 0 have no maximum
    xp = namespace_of(rows)
    magnitude = xp.abs(rows)
    if norm_type == float("inf"):
        norm = xp.amax(magnitude, axis=-1, keepdims=True)
    elif norm_type == 2.0:
        norm = xp.sqrt(xp.sum(rows * rows, axis=-1, keepdims=True))
    else:
        norm = xp.sum(magnitude**norm_type, axis=-1, keepdims=True) ** (1.0 / norm_type)
    return rows * (max_norm / xp.clip(norm, max_norm, None))


def table_sizes(
    num_embeddings: int | None, embedding_dim: int | None, weight: Any
) -> tuple[Any, Any]:
    """Return the sizes of a table; those that are None are the sizes of ``weight``.

    Example:
        >>> table_sizes(None, 2, [[0.0, 1.0]])
        (1, 2)
    """
    if num_embeddings is not None and embedding_dim is not None:
        return num_embeddings, embedding_dim
    if weight is None:
        name = "num_embeddings" if num_embeddings is None else "embedding_dim"
        raise TypeError(f"{name} must be an integer if no weight is given, got None")
    try:
        shape = tuple(np.shape(weight))
    except ValueError:
        raise ValueError("weight must have rows of one length, got several") from None
    if len(shape) != 2:
        raise ValueError(
            "weight must have shape (num_embeddings, embedding_dim), "
            f"got {shape or type(weight).__name__}"
        )
    return (
        shape[0] if num_embeddings is None else num_embeddings,
        shape[1] if embedding_dim is None else embedding_dim,
    )


def check_norm(max_norm: float | None, norm_type: float) -> tuple[float | None, float]:
    """Return ``max_norm`` and ``norm_type`` as positive floats; both may be infinite."""
    if max_norm is not None:
        max_norm = positive_number("max_norm", max_norm, finite=False)
    return max_norm, positive_number("norm_type", norm_type, finite=False)
