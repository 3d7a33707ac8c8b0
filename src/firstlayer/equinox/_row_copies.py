"""Rows of an array, read, written and summed by the training of tables.

In a process whose only device is a CPU, kernels copy and sum float32 rows, on several
threads and with the same bits as XLA's operators. Operators do it for all other rows.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Float, Int32, Shaped

from .. import kernels
from .._array import explicit_mesh
from ._unique import INDEX_HINTS

# Names of the kernels in compiled programs.
_READ, _WRITE = "firstlayer_read_rows", "firstlayer_write_rows"
_SUM = "firstlayer_sum_rows"


def read_rows(
    array: Shaped[Array, "rows ..."], ids: Int32[Array, " n"]
) -> Shaped[Array, "n ..."]:
    """Return rows of an array, and zeros for ids out of range.

    Args:
        array: The array.
        ids: Ids of the rows, ascending and unique.
    """
    return (_read_by_kernel if by_kernels(array, ids) else _read)(array, ids)


def write_rows(
    array: Shaped[Array, "rows ..."],
    ids: Int32[Array, " n"],
    rows: Shaped[Array, "n ..."],
) -> Shaped[Array, "rows ..."]:
    """Return an array with other rows, in the same memory if XLA no longer needs the old.

    Args:
        array: The array.
        ids: Ids of the rows, ascending and unique. Those out of range are left out.
        rows: The rows, in any dtype.
    """
    rows = rows.astype(array.dtype)
    write = _write_by_kernel if by_kernels(array, ids) else _write
    return write(array, ids, rows)


def sum_by_kernel(
    rows: Float[Array, "n width"], index: Int32[Array, " n"], *, num_rows: int
) -> Float[Array, "rows width"]:
    """Return the sum of the rows of each index, in order; see :func:`by_kernels`.

    Args:
        rows: The rows, float32.
        index: Index of each. Rows whose index is out of range are left out.
        num_rows: Number of sums.
    """
    sums = jax.ShapeDtypeStruct((num_rows, rows.shape[1]), rows.dtype)
    return jax.ffi.ffi_call(_SUM, sums)(rows, index)


def _read(array: Array, ids: Array) -> Array:
    return array.at[ids].get(mode="fill", fill_value=0, **INDEX_HINTS)


def _write(array: Array, ids: Array, rows: Array) -> Array:
    return array.at[ids].set(rows, mode="drop", **INDEX_HINTS)


def copy_by_kernel(
    array: Float[Array, "rows width"], ids: Int32[Array, " n"]
) -> Float[Array, "n width"]:
    """Return rows of an array, in any order; see :func:`by_kernels`."""
    rows = jax.ShapeDtypeStruct((ids.size, array.shape[1]), array.dtype)
    return jax.ffi.ffi_call(_READ, rows, vmap_method="sequential")(array, ids)


_read_by_kernel = jax.custom_jvp(copy_by_kernel)


@_read_by_kernel.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    array, ids = primals
    return _read_by_kernel(array, ids), _read(tangents[0], ids)


@jax.custom_jvp
def _write_by_kernel(array: Array, ids: Array, rows: Array) -> Array:
    call = jax.ffi.ffi_call(
        _WRITE,
        jax.ShapeDtypeStruct(array.shape, array.dtype),
        vmap_method="sequential",
        input_output_aliases={0: 0},
    )
    return call(array, ids, rows)


@_write_by_kernel.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    array, ids, rows = primals
    d_array, _, d_rows = tangents
    return _write_by_kernel(array, ids, rows), _write(d_array, ids, d_rows)


def by_kernels(array: Array, ids: Array) -> bool:
    """Return whether kernels copy and sum rows of this array."""
    return (
        array.ndim == 2
        and array.dtype == jnp.float32
        and ids.dtype == jnp.int32
        and jax.default_backend() == "cpu"
        # A program for several devices would gather an array before the kernel's call.
        and jax.device_count() == 1
        and explicit_mesh(array, ids) is None
        and get_abstract_mesh().empty
        and _has_registered()
    )


@functools.cache
def _has_registered() -> bool:
    """Tell XLA the kernels, and return whether it accepts them."""
    if not kernels.can_bind():
        return False
    from ..kernels import row_copies

    try:
        for name, address in (
            (_READ, row_copies.read_rows_function()),
            (_WRITE, row_copies.write_rows_function()),
            (_SUM, row_copies.sum_rows_function()),
        ):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(
            f"JAX {jax.__version__} does not accept Firstlayer's kernels, so rows are "
            f"copied by XLA: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
