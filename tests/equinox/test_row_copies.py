"""Rows copied and summed by kernels in programs of XLA equal those of XLA's operators."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from firstlayer.equinox._row_copies import (
    _read,
    _write,
    by_kernels,
    read_rows,
    write_rows,
)
from tests.support.run_alone import run_alone

ROOT = Path(__file__).parents[2]
# Every bit pattern, NaNs among them.
BITS = st.integers(0, 2**32 - 1)


def calls_kernel(function, *args):
    return "firstlayer_" in jax.jit(function).lower(*args).as_text()


@st.composite
def cases(draw):
    """Return a table, ascending ids with some out of range, and a row for each id."""
    rows, width, count = draw(st.tuples(st.integers(1, 9), *[st.integers(0, 8)] * 2))
    ids = draw(
        st.lists(st.integers(-3, rows + 3), min_size=count, max_size=count, unique=True)
    )
    shapes = (rows, width), (count, width)
    table, new = (draw(arrays(np.uint32, shape, elements=BITS)) for shape in shapes)
    return table.view(np.float32), np.array(sorted(ids), np.int32), new.view(np.float32)


@given(cases())
def test_rows_have_the_bits_that_numpy_copies(case):
    table, ids, new = case
    is_row = (ids >= 0) & (ids < len(table))
    want = np.zeros_like(new)
    want[is_row] = table[ids[is_row]]
    assert by_kernels(jnp.asarray(table), jnp.asarray(ids))
    assert np.asarray(read_rows(jnp.asarray(table), jnp.asarray(ids))).tobytes() == (
        want.tobytes()
    )
    got = write_rows(*map(jnp.asarray, case))
    changed = table.copy()
    changed[ids[is_row]] = new[is_row]
    assert np.asarray(got).tobytes() == changed.tobytes()


def some_case():
    rng = np.random.default_rng(0)
    table, new = (rng.standard_normal((n, 5), np.float32) for n in (40, 7))
    ids = np.sort(rng.choice(44, 7, replace=False)).astype(np.int32)
    return jnp.asarray(table), jnp.asarray(ids), jnp.asarray(new)


def test_the_callers_table_is_unchanged_unless_it_is_donated():
    table, ids, new = some_case()
    before, write = np.array(table), jax.jit(write_rows, donate_argnums=0)
    write_rows(table, ids, new)
    jax.jit(write_rows)(table, ids, new)
    np.testing.assert_array_equal(table, before)
    got = write(table, ids, new)
    assert table.is_deleted()
    np.testing.assert_array_equal(got, _write(jnp.asarray(before), ids, new))


def test_a_donated_table_that_is_read_first_is_not_copied():
    def double(table, ids):
        return write_rows(table, ids, 2 * read_rows(table, ids))

    table, ids = jnp.ones((10_000, 16)), jnp.arange(3, dtype=jnp.int32)
    compiled = jax.jit(double, donate_argnums=0).lower(table, ids).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == table.nbytes
    assert memory.temp_size_in_bytes < table.nbytes / 100


def test_derivatives_equal_those_of_operators():
    table, ids, new = some_case()

    def of(read, write):
        def loss(table, new):
            table = write(jnp.sin(table), ids, jnp.cos(new) * read(table, ids))
            return (table**3).sum()

        return loss

    ours, want = of(read_rows, write_rows), of(_read, _write)
    for transform in (
        lambda f: jax.grad(f, (0, 1)),
        lambda f: lambda *x: jax.jvp(f, x, x),
        lambda f: jax.jacfwd(jax.grad(f, 1), 1),
        lambda f: jax.grad(lambda *x: jax.checkpoint(f)(*x) ** 2, (0, 1)),
    ):
        got, expected = (jax.jit(transform(f))(table, new) for f in (ours, want))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
            got,
            expected,
        )


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0), (None, 0, 0)])
def test_batched_rows_equal_those_of_operators(axes):
    table, ids, new = some_case()
    batches = [
        jnp.stack([x, x + 1]) if axis == 0 else x
        for x, axis in zip((table, ids, new), axes, strict=True)
    ]
    for ours, want, count in ((read_rows, _read, 2), (write_rows, _write, 3)):
        got, expected = (jax.vmap(f, axes[:count])(*batches[:count]) for f in (ours, want))
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(4, 3), (4,), (4, 3, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_kernels_copy_rows_of_float32_and_operators_all_others(shape, dtype):
    array = jnp.arange(np.prod(shape)).reshape(shape).astype(dtype)
    ids = jnp.array([1, 3, 4], jnp.int32)
    assert calls_kernel(read_rows, array, ids) == (dtype == "float32" and len(shape) == 2)
    got = read_rows(array, ids)
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got[:2], array[jnp.array([1, 3])])
    assert not got[2].any()
    changed = write_rows(array, ids, jnp.zeros((3, *shape[1:])))
    np.testing.assert_array_equal(changed[jnp.array([0, 2])], array[jnp.array([0, 2])])
    assert not changed[jnp.array([1, 3])].any()


def test_programs_with_a_mesh_use_operators():
    table, ids, _ = some_case()
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        assert not calls_kernel(read_rows, table, ids)


def test_programs_for_several_devices_use_operators():
    run_alone(
        """
        import os

        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        from tests.equinox.test_row_copies import calls_kernel, read_rows, some_case

        assert not calls_kernel(read_rows, *some_case()[:2])
        """,
        folder=ROOT,
    )


def test_a_jax_that_refuses_the_kernels_is_warned_of_once():
    run_alone(
        """
        import warnings

        from firstlayer.kernels.runtime import xla

        xla.MAJOR = 99
        from tests.equinox.test_row_copies import _read, np, read_rows, some_case

        table, ids, _ = some_case()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                np.testing.assert_array_equal(read_rows(table, ids), _read(table, ids))
        (warning,) = [one for one in caught if "Firstlayer" in str(one.message)]
        assert "does not accept Firstlayer's kernels" in str(warning.message), warning
        assert "99.1" in str(warning.message), warning
        """,
        folder=ROOT,
    )


def test_without_numbas_compiler_operators_copy_rows():
    run_alone(
        """
        import os

        os.environ["NUMBA_DISABLE_JIT"] = "1"
        from tests.equinox.test_row_copies import calls_kernel, read_rows, some_case

        assert not calls_kernel(read_rows, *some_case()[:2])
        """,
        folder=ROOT,
    )


def test_threads_that_call_the_kernels_first_at_once_get_them():
    run_alone(
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from tests.equinox.test_row_copies import calls_kernel, read_rows, some_case

        table, ids, _ = some_case()
        started = threading.Barrier(4)

        def call(_):
            started.wait()
            return calls_kernel(read_rows, table, ids)

        with ThreadPoolExecutor(4) as callers:
            assert all(callers.map(call, range(4)))
        """,
        folder=ROOT,
    )
