"""KERPLE: a learned penalty that grows with distance, logarithmically or as a power.

Each head has two parameters. A key at distance ``d`` from the query gets the bias
``-r1 * ln(1 + r2 * d)`` or ``-r1 * d ** r2``. Both are conditionally positive definite
kernels if the parameters are positive and the power is at most 2, which keeps the softmax
well behaved at lengths beyond training (Chi et al. 2022, https://arxiv.org/abs/2205.09921).

Parameters are clamped when they are used: to at least 0.01, and a power to at most 2.
Beyond a limit the bias is constant and the gradient zero; on a limit there is a gradient.
``kerple_limited`` also projects stored parameters after an optimizer step. ``kerple_bias``
creates no arrays and runs unchanged on NumPy, torch and JAX.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float64, Shaped

from .._array import compute_dtype, namespace_of
from .._check import one_of
from .t5 import distances

Form = Literal["log", "power"]
FORMS = ("log", "power")
MINIMUM, MAXIMUM_POWER = 1e-2, 2.0


def kerple_initial(
    num_heads: int, *, form: Form = "log", rng: np.random.Generator
) -> tuple[Float64[np.ndarray, " num_heads"], Float64[np.ndarray, " num_heads"]]:
    """Draw ``r1`` and ``r2`` uniformly within their limits, as published.

    The factor of the logarithm and the power are at most 2, the other parameter at most 1.

    Args:
        num_heads: Number of heads.
        form: ``"log"`` or ``"power"``.
        rng: Random generator.

    Example:
        >>> r1, r2 = kerple_initial(100, rng=np.random.default_rng(0))
        >>> bool(r1.max() > 1 > r2.max())
        True
    """
    limits = {"log": (2.0, 1.0), "power": (1.0, 2.0)}[one_of("form", form, FORMS)]
    r1, r2 = (rng.uniform(MINIMUM, limit, num_heads) for limit in limits)
    return r1, r2


def kerple_limited(
    r1: Float[Any, " num_heads"], r2: Float[Any, " num_heads"], *, form: Form = "log"
) -> tuple[Float[Any, " num_heads"], Float[Any, " num_heads"]]:
    """Return both parameters clamped to their limits.

    Args:
        r1: Factor of each head.
        r2: Rate of the logarithm, or power, of each head.
        form: ``"log"`` or ``"power"``.

    Example:
        >>> kerple_limited(np.array([-1.0]), np.array([3.0]), form="power")
        (array([0.01]), array([2.]))
    """
    xp = namespace_of(r1)
    one_of("form", form, FORMS)
    # Not a clip, whose gradient at the limit differs between the libraries.
    r1, r2 = xp.where(r1 < MINIMUM, MINIMUM, r1), xp.where(r2 < MINIMUM, MINIMUM, r2)
    if form == "power":
        r2 = xp.where(r2 > MAXIMUM_POWER, MAXIMUM_POWER, r2)
    return r1, r2


def kerple_bias(
    q_positions: Shaped[Any, "*#batch q_length"],
    k_positions: Shaped[Any, "*#batch k_length"],
    *,
    r1: Float[Any, " num_heads"],
    r2: Float[Any, " num_heads"],
    form: Form = "log",
) -> Float[Any, "*batch num_heads q_length k_length"]:
    """Return the bias of every query and key, in float32, or float64 if ``r1`` is.

    Args:
        q_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        k_positions: Integers or reals, ``(length,)`` or ``(batch, length)``.
        r1: Factor of each head, float32 or float64.
        r2: Rate of the logarithm, or power, of each head.
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
    """Return ``distance ** power``, 0 at distance 0, with a gradient that is never NaN."""
    xp = namespace_of(distance)
    nonzero = distance != 0
    # At 0 the derivative by the power takes a logarithm, and a power below 1 has an
    # infinite slope.
    return xp.where(nonzero, xp.where(nonzero, distance, 1.0) ** power, 0.0)
