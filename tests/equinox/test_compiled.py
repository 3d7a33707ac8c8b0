"""Programs that calls of Equinox layers compile: how many, how large, with which checks."""

import copy
import pickle
import time
from contextlib import contextmanager
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental import pallas as pl

from firstlayer.equinox import (
    Embedding,
    EmbeddingBag,
    EmbeddingLayer,
    LearnedPositions,
    RotaryPositions,
    _ids,
    rows,
)
from firstlayer.equinox._constant import Constant
from firstlayer.positions.rotary import rotate
from tests.support.jax_round_trips import (
    SCHEMES,
    all_schemes,
    call_scheme,
    fast_compilation,
    key,
)

TABLES = {
    "token": Embedding(16, 6, padding_idx=1, max_norm=1.5, key=key(0)),
    "bag": EmbeddingBag(16, 6, mode="mean", padding_idx=1, key=key(0)),
    "layer": EmbeddingLayer(
        16, 6, max_positions=64, layer_norm=True, segments=2, scale=True, key=key(0)
    ),
    "sinusoidal layer": EmbeddingLayer(16, 6, position="sinusoidal", key=key(0)),
}


@pytest.fixture(autouse=True, scope="module")
def _fast_compilation():
    with fast_compilation():
        yield


@contextmanager
def counted_compilations():
    """Count the programs that XLA compiles or loads from its cache."""
    count = [0]

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def call(name, length):
    """Return a function that calls the layer of this name with arguments of this length."""
    x, positions = np.ones((2, length, 6), np.float32), np.arange(length) * 2
    if name in TABLES:
        return partial(TABLES[name], np.ones((2, length), np.int32))
    layer = SCHEMES[name](key(0))
    if name == "rotary, axes":
        return partial(layer, x, np.stack([positions, positions]))
    return partial(call_scheme, name, layer, x, positions)


@pytest.mark.parametrize("name", [*TABLES, *SCHEMES])
def test_eager_call_compiles_one_program_for_each_shape(name):
    call(name, 3)()
    run = call(name, 4)
    with counted_compilations() as count:
        run()
        run()
    assert count[0] == 1


def test_offsets_and_positions_of_the_same_shape_share_a_program():
    layer, x = RotaryPositions(8), jnp.asarray(np.ones((2, 3, 5, 8), np.float32))
    learned, y = LearnedPositions(64, 8, key=key(0)), x[:, 0]
    for offset in (0, [1, 2]):
        layer(x, offset=offset)
        learned(y, offset=offset)
    layer(x, np.arange(5))
    with counted_compilations() as count:
        for offset in (7, 9, [3, 4]):
            layer(x, offset=offset)
            learned(y, offset=offset)
        layer(x, np.arange(5) * 1000)
    assert count[0] == 0


def test_equal_layers_share_programs_and_constants():
    build = partial(RotaryPositions, 8, base=77.0)
    first, x = build(), jnp.asarray(np.ones((2, 3, 5, 8), np.float32))
    want = first(x)
    others = [build(), pickle.loads(pickle.dumps(first)), copy.deepcopy(first)]
    with counted_compilations() as count:
        for other in others:
            np.testing.assert_array_equal(other(x), want)
            assert hash(other.tables) == hash(first.tables)
            assert other.tables == first.tables != RotaryPositions(8, base=78.0).tables
    assert count[0] == 0


def test_constants_compare_form_and_bits():
    ones = Constant(np.ones(6, np.float32))
    assert ones != Constant(np.ones((2, 3), np.float32))
    assert ones != Constant(np.ones(6, np.float32).view(np.int32))
    assert Constant(np.array([np.nan])) == Constant(np.array([np.nan]))
    assert Constant(np.array([0.0])) != Constant(np.array([-0.0]))
    assert ones != np.ones(6, np.float32).tobytes()
    with pytest.raises(ValueError, match="read-only"):
        ones.array[0] = 2.0


def test_calls_with_equal_layers_are_not_slower_than_with_the_same_layer():
    layers = [RotaryPositions(128) for _ in range(12)]

    @jax.jit
    def run(layers, x):
        return x + 1

    def best(layers):
        run(layers, 1.0)
        times = []
        for _ in range(30):
            start = time.perf_counter()
            run(layers, 1.0)
            times.append(time.perf_counter() - start)
        return min(times)

    same = best([layers[0]] * 12)
    # Comparing all bytes of the tables takes ten times as long as the call.
    assert best(layers) < 4 * same


def test_layers_of_a_model_share_one_constant_in_its_text():
    x = jnp.ones((1, 2, 5, 16))

    def model(layers, q, k):
        for layer in layers:
            q, k = layer(q), layer(k)
        return q, k

    def size(count):
        layers = [RotaryPositions(16) for _ in range(count)]
        return len(jax.jit(model).lower(layers, x, x).as_text())

    assert size(12) < size(1) + 12_000
    assert size(1) < 4 * RotaryPositions(16).tables.array.nbytes


def test_layers_run_where_rank_promotion_raises():
    schemes, x = all_schemes(key(0)), jnp.ones((2, 3, 4, 6))
    tables, ids = TABLES, np.arange(8, dtype=np.int32).reshape(2, 4)

    def run():
        out = {
            name: call_scheme(name, layer, x, np.arange(4))
            for name, layer in schemes.items()
        }
        for name, table in tables.items():
            out[name] = table(ids)
        out["bag, offsets"] = tables["bag"](ids.reshape(-1), [0, 3])
        out["segments"] = tables["layer"](ids, segments=[0, 0, 1, 1], offset=[0, 7])
        out["offsets"] = schemes["rotary"](x, offset=jnp.array([3, 9]))
        out["rerotate"] = schemes["rotary"].rerotate(x, jnp.array([3, 9]))
        out["logits"] = tables["token"].logits(x)
        out["projected"] = tables["token"].projected(ids).weight
        out["touched"] = rows.touched(tables["token"], ids)(ids)
        return out

    want = run()
    with jax.numpy_rank_promotion("raise"):
        got, compiled = run(), jax.jit(run)()
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)
        np.testing.assert_allclose(compiled[name], values, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("bad", [-1, 16, 2**31 - 1])
@pytest.mark.parametrize("name", TABLES)
def test_checkify_reports_ids_out_of_range(name, bad):
    layer = TABLES[name]

    run = jax.jit(checkify.checkify(lambda ids: layer(ids), errors=checkify.index_checks))
    ids = jnp.array([[3, 5], [2, 7]])
    error, out = run(ids)
    assert error.get() is None
    np.testing.assert_allclose(out, layer(ids), atol=1e-6)
    error, out = run(ids.at[1, 0].set(bad))
    assert f"index {bad} is out of bounds for axis 0 with size 16" in str(error.get())
    assert np.isnan(out[1]).any() and not np.isnan(out[0]).any()


def test_checkify_accepts_the_gradient_of_padding():
    layer = TABLES["token"]
    gradient = jax.grad(lambda layer, ids: layer(ids).sum())
    run = jax.jit(checkify.checkify(gradient, errors=checkify.index_checks))
    error, grads = run(layer, jnp.array([3, 1, 1]))
    assert error.get() is None
    has_gradient = np.any(np.asarray(grads.weight), axis=1)
    assert np.flatnonzero(has_gradient).tolist() == [3]
    assert "out of bounds" in str(run(layer, jnp.array([3, 1, 16]))[0].get())


def test_checkify_reports_positions_out_of_range():
    layer = LearnedPositions(30, 6, row_offset=2, key=key(0))

    def run(positions):
        return layer(jnp.zeros((2, 6)), positions)

    checked = jax.jit(checkify.checkify(run, errors=checkify.index_checks))
    assert checked(jnp.array([-2, 29]))[0].get() is None
    for position in (-3, 30):
        message = str(checked(jnp.array([0, position]))[0].get())
        assert f"index {position + 2} is out of bounds for axis 0 with size 32" in message


def test_ids_on_an_accelerator_are_neither_copied_nor_checked(monkeypatch):
    monkeypatch.setattr(_ids, "is_on_host", lambda x: not isinstance(x, jax.Array))
    ids = jnp.array([[3, 16], [-1, 5]])
    for name in ("token", "layer"):
        out = TABLES[name](ids)
        np.testing.assert_array_equal(np.isnan(out).all(-1), [[False, True], [True, False]])
        np.testing.assert_array_equal(np.isnan(out).any(-1), [[False, True], [True, False]])
    assert np.isnan(TABLES["bag"](ids)).all()
    offsets = jnp.array([0, 9])
    assert np.isnan(TABLES["bag"](jnp.array([3, 4]), offsets)).all()
    assert np.isnan(RotaryPositions(6)(jnp.ones((1, 6)), jnp.array([2**24]))).all()
    with pytest.raises(IndexError, match=r"ids\[0, 1\] is 16, but num_embeddings is 16"):
        TABLES["token"](np.asarray(ids))


def test_rotary_phases_rotate_in_a_pallas_kernel():
    layer = RotaryPositions(8, layout="interleaved", heads_axis=-3)
    x = jnp.ones((4, 5, 8))
    cos, sin = layer.phases(jnp.arange(5) + 70_000)

    def kernel(x, cos, sin, out):
        out[...] = rotate(x[...], cos[...], sin[...], layout="interleaved")

    run = pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    np.testing.assert_allclose(run(x, cos, sin), layer(x, offset=70_000), atol=1e-6)


def test_an_offset_array_is_not_static_under_filter_jit():
    layer, x, traced = RotaryPositions(8), jnp.ones((5, 8)), []

    @eqx.filter_jit
    def run(x, offset):
        traced.append(offset)
        return layer(x, offset=offset)

    for offset in (3, 90_000):
        got = run(x, jnp.asarray(offset))
        np.testing.assert_allclose(got, layer(x, offset=offset), atol=1e-6)
    assert len(traced) == 1
