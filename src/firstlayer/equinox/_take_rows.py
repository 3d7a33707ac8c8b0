"""Rows of an array by index, whose gradient a kernel sums.

XLA's scatter adds rows to the rows of an array on one thread of a CPU. ``custom_vjp`` has
no forward mode, and a call of a kernel has no transpose, so taking rows and summing them
are two primitives, each of which is the transpose of the other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int32

from ._row_copies import by_kernels, copy_by_kernel, sum_by_kernel

_take_p = Primitive("firstlayer_take_rows")
_sum_p = Primitive("firstlayer_sum_rows")


def take_rows(
    array: Float[Array, "rows width"], index: Int32[Array, "*batch"]
) -> Float[Array, "*batch width"]:
    """Return a row for each index, and zeros where it is out of range.

    Args:
        array: The array.
        index: Rows in any order, also repeated ones. The gradient sums their rows in this
            order.
    """
    if not by_kernels(array, index):
        return _take(array, index)
    rows = _take_p.bind(array, index.reshape(-1))
    return rows.reshape(*index.shape, array.shape[1])


def _take(array: Array, index: Array) -> Array:
    return array.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _sum(rows: Array, index: Array, *, num_rows: int) -> Array:
    sums = jnp.zeros((num_rows, rows.shape[1]), rows.dtype)
    return sums.at[index].add(rows, mode="drop", wrap_negative_indices=False)


def _define(
    primitive: Primitive,
    run: Callable[..., Array],
    operators: Callable[..., Array],
    transpose: Callable[..., Array],
) -> None:
    """Define a function of an array and an index that is linear in the array.

    Args:
        primitive: The primitive.
        run: Computes it.
        operators: Computes it by operators, which batches use.
        transpose: Returns the cotangent of the array, given that of the result, the
            abstract array, and the index.
    """

    def jvp(primals: Any, tangents: Any, **options: Any) -> tuple[Any, Any]:
        (array, index), tangent = primals, tangents[0]
        result = primitive.bind(array, index, **options)
        if type(tangent) is ad.Zero:
            return result, ad.Zero(ShapedArray(result.shape, result.dtype))
        return result, primitive.bind(tangent, index, **options)

    def pullback(cotangent: Any, array: Any, index: Any, **_: Any) -> tuple[Any, None]:
        if type(cotangent) is ad.Zero:
            return ad.Zero(array.aval), None
        return transpose(cotangent, array.aval, index), None

    def batch(args: Any, axes: Any, **options: Any) -> tuple[Any, int]:
        return jax.vmap(partial(operators, **options), axes)(*args), 0

    primitive.def_impl(run)
    primitive.def_abstract_eval(
        lambda array, index, **options: ShapedArray(
            (options.get("num_rows", index.size), array.shape[1]), array.dtype
        )
    )
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = pullback
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(operators, multiple_results=False))
    by_kernel = mlir.lower_fun(run, multiple_results=False)
    mlir.register_lowering(primitive, by_kernel, platform="cpu")


_define(
    _take_p,
    run=copy_by_kernel,
    operators=_take,
    transpose=lambda rows, array, index: _sum_p.bind(rows, index, num_rows=array.shape[0]),
)
_define(
    _sum_p,
    run=sum_by_kernel,
    operators=_sum,
    transpose=lambda sums, rows, index: _take_p.bind(sums, index),
)
