"""Rows taken and summed by kernels in programs of XLA equal those of XLA's operators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.test_util import check_grads

from firstlayer import get_num_threads, set_num_threads
from firstlayer.equinox._take_rows import _take, take_rows
from tests.equinox.test_row_copies import calls_kernel

FLOATS = st.floats(-1000, 1000, width=32)


@st.composite
def cases(draw):
    """Return an array, an index with repeated rows and some out of range, and rows."""
    rows, width, count = draw(st.tuples(st.integers(1, 5), *[st.integers(0, 9)] * 2))
    index = draw(arrays(np.int32, count, elements=st.integers(-2, rows + 2)))
    array, dy = (
        draw(arrays(np.float32, (n, width), elements=FLOATS)) for n in (rows, count)
    )
    return array, index, dy


def pullback(take, array, index, dy):
    (gradient,) = jax.vjp(lambda array: take(array, index), array)[1](dy)
    return gradient


@given(cases())
def test_rows_are_copied_and_their_gradients_added_in_order(case):
    array, index, dy = case
    is_row = (index >= 0) & (index < len(array))
    want = np.where(is_row[:, None], array[np.where(is_row, index, 0)], np.float32(0))
    sums = np.zeros_like(array)
    np.add.at(sums, index[is_row], dy[is_row])
    array, index, dy = map(jnp.asarray, case)
    assert calls_kernel(take_rows, array, index)
    np.testing.assert_array_equal(take_rows(array, index), want)
    np.testing.assert_array_equal(pullback(take_rows, array, index, dy), sums)


def some_case():
    rng = np.random.default_rng(0)
    array = rng.standard_normal((6, 5), np.float32)
    return jnp.asarray(array), jnp.array([[0, 5, 2, 2], [9, 2, -1, 5]], jnp.int32)


def test_each_number_of_threads_gives_the_same_bits():
    # Enough entries for two threads, and columns that two threads cannot share evenly.
    rng, width = np.random.default_rng(1), 173
    array = jnp.asarray(rng.standard_normal((50, width), np.float32))
    index = jnp.asarray(rng.integers(0, 60, 2000, dtype=np.int32))
    dy = jnp.asarray(rng.standard_normal((2000, width), np.float32))
    want = _take(array, index), pullback(_take, array, index, dy)
    before = get_num_threads()
    try:
        for threads in (1, 2, 3):
            set_num_threads(threads)
            got = take_rows(array, index), pullback(take_rows, array, index, dy)
            for ours, theirs in zip(got, want, strict=True):
                assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    finally:
        set_num_threads(before)


def test_derivatives_equal_finite_differences_and_those_of_operators():
    array, index = some_case()

    def of(take):
        return lambda array: (jnp.sin(take(jnp.cos(array), index)) ** 2).sum()

    check_grads(of(take_rows), (array,), order=2, eps=1e-2, rtol=0.02)
    for transform in (
        jax.grad,
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        jax.hessian,
        lambda f: lambda x: jax.linearize(jax.grad(f), x)[1](x),
        lambda f: jax.grad(lambda x: jax.checkpoint(f)(x) ** 2),
    ):
        got, want = (jax.jit(transform(of(f)))(array) for f in (take_rows, _take))
        for ours, theirs in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 1)])
def test_batches_equal_those_of_operators(axes):
    array, index = some_case()
    arguments = [
        x if axis is None else jnp.stack([x, x[::-1]], axis)
        for x, axis in zip((array, index), axes, strict=True)
    ]

    def gradients(take):
        return jax.vmap(jax.grad(lambda *x: (take(*x) ** 3).sum()), axes)(*arguments)

    got, want = (jax.vmap(f, axes)(*arguments) for f in (take_rows, _take))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(gradients(take_rows), gradients(_take), rtol=1e-6)


def test_steps_of_a_loop_equal_those_of_operators():
    array, index = some_case()

    def of(take):
        def step(array, index):
            return array * 0.9, take(array, index).sum()

        return lambda array: jax.lax.scan(step, array, index)[1].sum()

    got, want = (jax.jit(jax.value_and_grad(of(f)))(array) for f in (take_rows, _take))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_operators_take_rows_of_wide_indices():
    array, index = some_case()
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(index), jnp.int64)
        assert not calls_kernel(take_rows, array, wide)
        np.testing.assert_array_equal(take_rows(array, wide), _take(array, index))


def test_programs_for_other_platforms_have_operators():
    traced = jax.jit(jax.grad(lambda array, index: take_rows(array, index).sum()))
    lowered = traced.trace(*some_case()).lower(lowering_platforms=("cuda",))
    assert "firstlayer_" not in lowered.as_text()
    assert "firstlayer_" in traced.lower(*some_case()).as_text()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_operators_take_rows_of_other_dtypes(dtype):
    array, index = some_case()
    array = array.astype(dtype)
    assert not calls_kernel(take_rows, array, index)
    np.testing.assert_array_equal(take_rows(array, index), _take(array, index))
