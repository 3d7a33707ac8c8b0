"""Loops over rows that execute any update rule, compiled from its specification.

A rule is a named tuple of the numbers of a step, with methods on numbers; see
``firstlayer.optim.rule``. A loop is compiled for each named tuple that it is called with,
with the rule's methods inside, and runs as fast as one written by hand for the rule. The
types of the named tuples are part of the key of the cache on disk.
"""

import functools
import inspect
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, overload_method

from ..runtime.compile import (
    BYTE_POINTER,
    FUSE,
    WITHOUT_WRAPPERS,
    bits_of,
    downcast,
    inlined,
    kernel,
    njit,
    prefetch,
    prefetch_row,
    upcast,
)
from ..runtime.numba_abi import array_struct
from ..runtime.pool import pieces
from . import scalars
from .row_slice import RecordedSteps, RowSlice, StaleRows
from .rows import run_on_rows

# Rows that are prefetched ahead of the current one.
AHEAD = 4
# The same for rules with one number per row, whose loops take less time per row.
ROW_WISE_AHEAD = 8
# Smaller coefficients count as zero: arithmetic on float32 denormals is slow.
TINY = 1e-30
I64, DOUBLE = ir.IntType(64), ir.DoubleType()


def update_rows(
    rows: RowSlice,
    gradient: np.ndarray,
    values: Any,
    *,
    has_state: np.ndarray,
    row_steps: np.ndarray,
    step: int,
) -> None:
    """Take a step with a gradient for each row, in place.

    Args:
        rows: Rows to update.
        gradient: Gradient of each row, in the compute dtype or in half precision.
        values: Numbers of the step, a named tuple of the rule.
        has_state: For each row of the state, whether it may be nonzero; set here.
        row_steps: For each row of the state, the step it is at; set to ``step``.
        step: Number of the step.
    """
    numbers = _in_dtype(values, _compute_dtype(rows.weight))
    loop = _update_row_wise if _is_row_wise(rows) else _update
    arrays = bits_of(rows.weight), bits_of(gradient), rows.state
    run_on_rows(loop, rows, *arrays, numbers, has_state, row_steps, step)


def catch_up_rows(
    rows: StaleRows, missed: RecordedSteps, *, writes_state: bool = True
) -> None:
    """Apply missed steps to stale rows, in place.

    Args:
        rows: Stale rows.
        missed: Recorded steps.
        writes_state: Whether to change the state too, not only the weights.
    """
    dtype = _compute_dtype(rows.weight)
    like = _example(missed.kind, dtype)
    weight = bits_of(rows.weight)
    args = rows.from_step, rows.has_state, weight, rows.state, writes_state
    columns = missed.all_coefficients
    if _is_row_wise(rows):
        run_on_rows(_catch_up_row_wise, rows, *args, columns, like)
    elif missed.replays:
        steps, step_like = missed.all_steps, _example(type(missed.step_values), dtype)
        run_on_rows(_replay, rows, *args, columns, like, steps, step_like)
    else:
        run_on_rows(_catch_up, rows, *args, columns, like)


def average_rows(
    average: np.ndarray,
    average_rows: np.ndarray,
    rows: StaleRows,
    kind: type,
    coefficients: np.ndarray,
    kept: np.ndarray,
) -> None:
    """Apply missed updates of an average of weights to rows of the average, in place.

    A row of the average becomes ``kept`` times itself plus what :meth:`catch_up` with the
    averaged coefficients makes of the weight.

    Args:
        average: Average, in the dtype of the weight.
        average_rows: Indices of the rows in ``average``.
        rows: The same rows of table and state, which are not changed. Not in half
            precision.
        kind: Named tuple of the coefficients.
        coefficients: Averaged coefficients, one column per recorded event.
        kept: Factor of the average, one per recorded event.
    """
    run_on_rows(
        _average_row_wise if _is_row_wise(rows) else _average,
        rows,
        rows.from_step,
        rows.has_state,
        rows.weight,
        rows.state,
        average,
        average_rows,
        coefficients,
        _example(kind, _compute_dtype(rows.weight)),
        kept,
    )


def _is_row_wise(rows: RowSlice) -> bool:
    """Return whether the state has one number per row; its arrays have one shape."""
    return bool(rows.state) and rows.state[0].shape[1] != rows.weight.shape[1]


def _compute_dtype(weight: np.ndarray) -> np.dtype:
    return np.dtype(np.float64 if weight.dtype == np.float64 else np.float32)


def _in_dtype(values: Any, dtype: np.dtype) -> Any:
    """Return a named tuple with its numbers in a dtype, as kernels take it."""
    _add_methods(type(values))
    return type(values)(*map(dtype.type, values))


@functools.cache
def _example(kind: Any, dtype: np.dtype) -> Any:
    """Return a named tuple of zeros, which tells kernels the type of its numbers."""
    return _in_dtype(kind(*[0.0] * len(kind._fields)), dtype)


@functools.cache
def _add_methods(kind: type) -> None:
    """Make the methods of a named tuple callable in kernels, under their names.

    The number of arguments of a method must be the same in every named tuple, except for
    ``update`` and ``catch_up``, which take a state of any number of arrays.
    """
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in _added:
            _added.add(name)
            # Any: the declared signature lacks the options of overload.
            options: dict[str, Any] = {"jit_options": WITHOUT_WRAPPERS}
            method = overload_method(types.BaseNamedTuple, name, **options)
            method(_method(name, function))


# Module state: names of methods that kernels may call.
_added = {"update", "catch_up"}


def _method(name: str, function: Any) -> Any:
    def method(self, *args):
        return getattr(self.instance_class, name)

    method.__signature__ = inspect.signature(function)  # pyright: ignore
    return method


def _compiled(kind: type, name: str) -> Any:
    """Return a method of a named tuple, compiled."""
    function = getattr(kind, name)
    options = {"error_model": "numpy", "fastmath": FUSE, **WITHOUT_WRAPPERS}
    return njit(**options)(function)


# Stubs, which the functions below implement for each named tuple and number of arrays.
def _updated(values, weight, gradient, state):
    """Return ``(weight, *state)`` after a step with a gradient."""
    raise NotImplementedError


def _caught_up(coefficients, weight, state):
    """Return ``(weight, *state)`` after missed steps."""
    raise NotImplementedError


def _entries(state, row, d):
    """Return entry ``[row, d]`` of each array."""
    raise NotImplementedError


def _store(state, row, d, new):
    """Store ``new[1:]`` as entry ``[row, d]`` of each array."""
    raise NotImplementedError


def _prefetch_state(state, row):
    """Prefetch a row of each array."""
    raise NotImplementedError


@overload(_updated, jit_options=WITHOUT_WRAPPERS)
def _(values, weight, gradient, state):
    update = _compiled(values.instance_class, "update")

    def updated(values, weight, gradient, state):
        total = values.total_gradient(scalars, weight, gradient)
        return update(values, scalars, weight, total, *state)

    return updated


@overload(_caught_up, jit_options=WITHOUT_WRAPPERS)
def _(coefficients, weight, state):
    catch_up = _compiled(coefficients.instance_class, "catch_up")
    return lambda coefficients, weight, state: catch_up(
        coefficients, scalars, weight, *state
    )


@overload(_entries, jit_options=WITHOUT_WRAPPERS)
def _(state, row, d):
    return (
        lambda state, row, d: (),
        lambda state, row, d: (state[0][row, d],),
        lambda state, row, d: (state[0][row, d], state[1][row, d]),
        lambda state, row, d: (state[0][row, d], state[1][row, d], state[2][row, d]),
    )[len(state)]


@overload(_store, jit_options=WITHOUT_WRAPPERS)
def _(state, row, d, new):
    def store_0(state, row, d, new):
        pass

    def store_1(state, row, d, new):
        state[0][row, d] = new[1]

    def store_2(state, row, d, new):
        state[0][row, d], state[1][row, d] = new[1], new[2]

    def store_3(state, row, d, new):
        state[0][row, d], state[1][row, d], state[2][row, d] = new[1], new[2], new[3]

    return (store_0, store_1, store_2, store_3)[len(state)]


@overload(_prefetch_state, jit_options=WITHOUT_WRAPPERS)
def _(state, row):
    def prefetch_0(state, row):
        pass

    def prefetch_1(state, row):
        prefetch_row(state[0], row)

    def prefetch_2(state, row):
        prefetch_row(state[0], row)
        prefetch_row(state[1], row)

    def prefetch_3(state, row):
        prefetch_row(state[0], row)
        prefetch_row(state[1], row)
        prefetch_row(state[2], row)

    return (prefetch_0, prefetch_1, prefetch_2, prefetch_3)[len(state)]


def _load_column(typingctx, columns, k, like):
    """Return column ``k`` of a float64 array as a named tuple of the type of ``like``."""

    def codegen(context, builder, signature, args):
        array = array_struct(context, builder, signature.args[0], args[0])
        between_rows, between_columns = (
            builder.extract_value(array.strides, axis) for axis in (0, 1)
        )
        start = builder.mul(args[1], between_columns)
        data = builder.bitcast(array.data, BYTE_POINTER)
        number_type, numbers = context.get_value_type(like.dtype), []
        for field in range(like.count):
            offset = builder.add(start, builder.mul(between_rows, I64(field)))
            pointer = builder.bitcast(builder.gep(data, [offset]), DOUBLE.as_pointer())
            number = builder.load(pointer)
            is_tiny = builder.and_(
                builder.fcmp_ordered("<", number, DOUBLE(TINY)),
                builder.fcmp_ordered(">", number, DOUBLE(-TINY)),
            )
            number = builder.select(is_tiny, DOUBLE(0.0), number)
            if number_type != DOUBLE:
                number = builder.fptrunc(number, number_type)
            numbers.append(number)
        return context.make_tuple(builder, like, numbers)

    return like(columns, types.int64, like), codegen


# Any: the declared signature begins with the typing context that Numba passes itself.
load_column: Any = intrinsic(_load_column)


@inlined
def _mark(row, has_state, row_steps, step):
    """Record that a row was updated."""
    # A cache line that is not changed is not written back to memory.
    if not has_state[row]:
        has_state[row] = True
    row_steps[row] = step


@kernel(reorder=True)
def _update(
    ticket,
    weight_rows,
    state_rows,
    weight,
    gradient,
    state,
    values,
    has_state,
    row_steps,
    step,
):
    width = weight.shape[1]
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row = weight_rows[i], state_rows[i]
            if i + AHEAD < hi:
                prefetch_row(weight, weight_rows[i + AHEAD])
                _prefetch_state(state, state_rows[i + AHEAD])
                prefetch(has_state, state_rows[i + AHEAD])
                prefetch(row_steps, state_rows[i + AHEAD])
            for d in range(width):
                entries = _entries(state, row, d)
                w = upcast(weight[wrow, d])
                new = _updated(values, w, upcast(gradient[i, d]), entries)
                _store(state, row, d, new)
                weight[wrow, d] = downcast(new[0], weight[wrow, d])
            _mark(row, has_state, row_steps, step)


@kernel(reorder=True)
def _update_row_wise(
    ticket,
    weight_rows,
    state_rows,
    weight,
    gradient,
    state,
    values,
    has_state,
    row_steps,
    step,
):
    width, totals = weight.shape[1], state[0]
    number = type(totals[0, 0])
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row = weight_rows[i], state_rows[i]
            if i + ROW_WISE_AHEAD < hi:
                prefetch_row(weight, weight_rows[i + ROW_WISE_AHEAD])
                prefetch_row(totals, state_rows[i + ROW_WISE_AHEAD])
                prefetch(has_state, state_rows[i + ROW_WISE_AHEAD])
                prefetch(row_steps, state_rows[i + ROW_WISE_AHEAD])
            squares = number(0)
            for d in range(width):
                w = upcast(weight[wrow, d])
                g = values.total_gradient(scalars, w, upcast(gradient[i, d]))
                squares += g * g
            mean_square = squares / number(width)
            total = values.accumulate(scalars, mean_square, totals[row, 0])
            totals[row, 0] = total
            for d in range(width):
                w = upcast(weight[wrow, d])
                g = values.total_gradient(scalars, w, upcast(gradient[i, d]))
                new = values.move(scalars, w, g, total)
                weight[wrow, d] = downcast(new, weight[wrow, d])
            _mark(row, has_state, row_steps, step)


@kernel(reorder=True)
def _catch_up(
    ticket,
    weight_rows,
    state_rows,
    from_step,
    has_state,
    weight,
    state,
    writes_state,
    columns,
    like,
):
    width = weight.shape[1]
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row = weight_rows[i], state_rows[i]
            if i + AHEAD < hi:
                prefetch_row(weight, weight_rows[i + AHEAD])
                _prefetch_state(state, state_rows[i + AHEAD])
            coefficients = load_column(columns, from_step[i], like)
            if not has_state[row] and coefficients.keeps_zero_state():
                factor = coefficients.weight_factor
                if factor != 1:
                    for d in range(width):
                        w = factor * upcast(weight[wrow, d])
                        weight[wrow, d] = downcast(w, weight[wrow, d])
            elif writes_state:
                has_state[row] = True
                for d in range(width):
                    entries = _entries(state, row, d)
                    new = _caught_up(coefficients, upcast(weight[wrow, d]), entries)
                    _store(state, row, d, new)
                    weight[wrow, d] = downcast(new[0], weight[wrow, d])
            else:
                for d in range(width):
                    entries = _entries(state, row, d)
                    new = _caught_up(coefficients, upcast(weight[wrow, d]), entries)
                    weight[wrow, d] = downcast(new[0], weight[wrow, d])


@kernel(reorder=True)
def _catch_up_row_wise(
    ticket,
    weight_rows,
    state_rows,
    from_step,
    has_state,
    weight,
    state,
    writes_state,
    columns,
    like,
):
    width, zero = weight.shape[1], type(state[0][0, 0])(0)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row = weight_rows[i], state_rows[i]
            coefficients = load_column(columns, from_step[i], like)
            entries = _entries(state, row, 0)
            if coefficients.weight_factor != 1:
                for d in range(width):
                    new = _caught_up(coefficients, upcast(weight[wrow, d]), entries)
                    weight[wrow, d] = downcast(new[0], weight[wrow, d])
            if has_state[row] and writes_state:
                _store(state, row, 0, _caught_up(coefficients, zero, entries))


@kernel(reorder=True)
def _replay(
    ticket,
    weight_rows,
    state_rows,
    from_step,
    has_state,
    weight,
    state,
    writes_state,
    columns,
    like,
    steps,
    step_like,
):
    width, zero = weight.shape[1], type(state[0][0, 0])(0)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row, start = weight_rows[i], state_rows[i], from_step[i]
            if i + AHEAD < hi:
                prefetch_row(weight, weight_rows[i + AHEAD])
                _prefetch_state(state, state_rows[i + AHEAD])
            coefficients = load_column(columns, start, like)
            if not has_state[row] and coefficients.keeps_zero_state():
                factor = coefficients.weight_factor
                if factor != 1:
                    for d in range(width):
                        w = factor * upcast(weight[wrow, d])
                        weight[wrow, d] = downcast(w, weight[wrow, d])
                continue
            # The last recorded step has accurate coefficients.
            accurate = start
            while not coefficients.is_accurate(scalars):
                accurate += 1
                coefficients = load_column(columns, accurate, like)
            if accurate == start and writes_state:
                for d in range(width):
                    entries = _entries(state, row, d)
                    new = _caught_up(coefficients, upcast(weight[wrow, d]), entries)
                    _store(state, row, d, new)
                    weight[wrow, d] = downcast(new[0], weight[wrow, d])
            elif accurate == start:
                for d in range(width):
                    entries = _entries(state, row, d)
                    new = _caught_up(coefficients, upcast(weight[wrow, d]), entries)
                    weight[wrow, d] = downcast(new[0], weight[wrow, d])
            else:
                for d in range(width):
                    w, entries = upcast(weight[wrow, d]), _entries(state, row, d)
                    for k in range(start + 1, accurate + 1):
                        values = load_column(steps, k, step_like)
                        # Zero for events that change nothing.
                        if values.sign != 0:
                            new = _updated(values, w, zero, entries)
                            w, entries = new[0], new[1:]
                    new = _caught_up(coefficients, w, entries)
                    if writes_state:
                        _store(state, row, d, new)
                    weight[wrow, d] = downcast(new[0], weight[wrow, d])


@kernel(reorder=True)
def _average(
    ticket,
    weight_rows,
    state_rows,
    from_step,
    has_state,
    weight,
    state,
    average,
    average_rows,
    columns,
    like,
    kept,
):
    width, number = weight.shape[1], type(weight[0, 0])
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row, arow = weight_rows[i], state_rows[i], average_rows[i]
            if i + AHEAD < hi:
                prefetch_row(weight, weight_rows[i + AHEAD])
                prefetch_row(average, average_rows[i + AHEAD])
                _prefetch_state(state, state_rows[i + AHEAD])
            coefficients = load_column(columns, from_step[i], like)
            share = number(kept[from_step[i]])
            if has_state[row]:
                for d in range(width):
                    entries = _entries(state, row, d)
                    new = _caught_up(coefficients, weight[wrow, d], entries)[0]
                    average[arow, d] = share * average[arow, d] + new
            else:
                factor = coefficients.weight_factor
                for d in range(width):
                    new = factor * weight[wrow, d]
                    average[arow, d] = share * average[arow, d] + new


@kernel(reorder=True)
def _average_row_wise(
    ticket,
    weight_rows,
    state_rows,
    from_step,
    has_state,
    weight,
    state,
    average,
    average_rows,
    columns,
    like,
    kept,
):
    width, number = weight.shape[1], type(weight[0, 0])
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            wrow, row, arow = weight_rows[i], state_rows[i], average_rows[i]
            coefficients = load_column(columns, from_step[i], like)
            share, entries = number(kept[from_step[i]]), _entries(state, row, 0)
            for d in range(width):
                new = _caught_up(coefficients, weight[wrow, d], entries)[0]
                average[arow, d] = share * average[arow, d] + new
