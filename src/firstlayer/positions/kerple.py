"""KERPLE: a learned penalty that grows with distance, logarithmically or as a power.

Two numbers a head say how fast the score of a key falls with its distance ``d`` from the
query: ``-r1 * ln(1 + r2 * d)`` or ``-r1 * d ** r2``. Both are conditionally positive
definite kernels, which is what keeps a softmax over them well behaved at lengths never
trained on, as long as the numbers are positive and the power is at most 2 (Chi et al. 2022,
https://arxiv.org/abs/2205.09921).

The numbers are used within these limits: at least 0.01, a power at most 2. Beyond them the
bias does not change, so there the gradient is zero; ``kerple_limited`` also brings stored
parameters back after an optimizer step, and a parameter on its limit has a gradient.
``kerple_bias`` creates no arrays and runs unchanged on NumPy, torch and JAX.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float64, Shaped

from .._array import compute_dtype, namespace_of
from .._check import one_of
from .t5 import distances

Form = Literal["log", "power"]
FORMS = ("log", "power")
LEAST, GREATEST_POWER = 1e-2, 2.0


def kerple_initial(
    num_heads: int, *, form: Form = "log", rng: np.random.Generator
) -> tuple[Float64[np.ndarray, " num_heads"], Float64[np.ndarray, " num_heads"]]:
    """Draw ``r1`` and ``r2`` evenly, as published, within their limits.

    The factor of the logarithm and the power are at most 2, the other number at most 1.

    Args:
        num_heads: How many of each.
        form: ``"log"`` or ``"power"``.
        rng: Where the numbers come from.

    Example:
        >>> r1, r2 = kerple_initial(100, rng=np.random.default_rng(0))
        >>> bool(r1.max() > 1 > r2.max())
        True
    """
    most = {"log": (2.0, 1.0), "power": (1.0, 2.0)}[one_of("form", form, FORMS)]
    r1, r2 = (rng.uniform(LEAST, limit, num_heads) for limit in most)
    return r1, r2


def kerple_limited(
    r1: Float[Any, " num_heads"], r2: Float[Any, " num_heads"], *, form: Form = "log"
) -> tuple[Float[Any, " num_heads"], Float[Any, " num_heads"]]:
    """Return the two numbers as they are used: within their limits.

    Args:
        r1: The factor.
        r2: The rate of the logarithm, or the power.
        form: ``"log"`` or ``"power"``.

    Example:
        >>> kerple_limited(np.array([-1.0]), np.array([3.0]), form="power")
        (array([0.01]), array([2.]))
    """
    xp = namespace_of(r1)
    one_of("form", form, FORMS)
    # Not a clip: that hides which side a gradient at the limit belongs to.
    r1, r2 = xp.where(r1 < LEAST, LEAST, r1), xp.where(r2 < LEAST, LEAST, r2)
    if form == "power":
        r2 = xp.where(r2 > GREATEST_POWER, GREATEST_POWER, r2)
    return r1, r2


def kerple_bias(
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
    *,
    r1: Float[Any, " num_heads"],
    r2: Float[Any, " num_heads"],
    form: Form = "log",
) -> Float[Any, "*batch num_heads q_length k_length"]:
    """Return the bias of every query and key, in float32 or in the float64 of ``r1``.

    Args:
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Likewise.
        r1: The factor of each head, float32 or float64.
        r2: The rate of the logarithm, or the power, of each head.
        form: ``"log"`` or ``"power"``.

    Example:
        >>> two, half = np.array([2.0]), np.array([0.5])
        >>> kerple_bias(np.array([4]), np.array([0]), r1=two, r2=half, form="power").item()
        -4.0
    """
    r1, r2 = (r[:, None, None] for r in kerple_limited(r1, r2, form=form))
    dtype = compute_dtype(r1.dtype)
    distance = distances(q_positions, k_positions, dtype=dtype)[..., None, :, :]
    if form == "log":
        return -r1 * namespace_of(r1).log1p(r2 * distance)
    return -r1 * zero_safe_power(distance, r2)


def zero_safe_power(
    distance: Float[Any, "*#pairs"], power: Float[Any, "*#pairs"]
) -> Float[Any, "*pairs"]:
    """Return ``distance ** power``, with zero for zero and a gradient that is never NaN."""
    xp = namespace_of(distance)
    apart = distance != 0
    # At zero a power has a logarithm in its derivative, and below one an infinite slope.
    return xp.where(apart, xp.where(apart, distance, 1.0) ** power, 0.0)
