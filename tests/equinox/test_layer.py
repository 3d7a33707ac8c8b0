from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from firstlayer.equinox.alibi import AlibiBias
from firstlayer.equinox.bag import EmbeddingBag
from firstlayer.equinox.layer import EmbeddingLayer
from firstlayer.equinox.learned import LearnedPositions
from firstlayer.equinox.rotary import RotaryPositions
from firstlayer.equinox.sinusoidal import SinusoidalPositions
from firstlayer.numpy.layer import EmbeddingLayer as NumpyLayer
from firstlayer.numpy.rotary import RotaryPositions as NumpyRotary
from firstlayer.numpy.sinusoidal import SinusoidalPositions as NumpyPositions
from tests.equinox.test_token import bits, strict_jax
from tests.support.gradients import central_difference
from tests.support.jax_round_trips import ROUND_TRIPS, built, fast_compilation

rng = np.random.default_rng(0)
KEY = jax.random.key(5)
IDS = np.array([[1, 4, 1, 0], [6, 2, 0, 0]])
SEGMENTS = np.array([[0, 2, 1, 1], [2, 0, 0, 0]])
PLACES = np.array([[3, 0, 1, 8], [2, 2, 5, 0]])


def build(**options: Any) -> EmbeddingLayer:
    """Return a small layer with random values in every parameter."""
    options = {"padding_idx": 0, "init": "zeros", "key": KEY, **options}
    if options.get("position", "learned") == "learned":
        table = np.zeros((9, 6), jnp.dtype(options.get("dtype", jnp.result_type(float))))
        options["position"] = LearnedPositions(9, 6, weight=table)
    layer = EmbeddingLayer(7, 6, **options)
    state = {
        name: np.random.default_rng(len(name)).standard_normal(value.shape)
        for name, value in layer.parameters().items()
    }
    return layer.with_parameters(state)


@eqx.filter_jit
def run(layer, ids, **options):
    """Call a jitted layer: eager JAX would compile every operation separately."""
    return layer(ids, **options)


def in_numpy(layer: EmbeddingLayer) -> NumpyLayer:
    other = NumpyLayer(**layer.config())
    other.load_state_dict({k: np.asarray(v) for k, v in layer.parameters().items()})
    return other


# tests/test_agreement.py has more.
CONFIGURATIONS: list[dict[str, Any]] = [
    {"position": "learned", "layer_norm": True, "norm_eps": 0.01, "segments": 3},
    {"position": "sinusoidal", "layer_norm": True, "zero_padding": True, "segments": 3},
    {"position": None, "layer_norm": True, "scale": True, "norm_eps": 0.1},
]


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_outputs_and_all_gradients_equal_numpy(options):
    layer = build(**options)
    reference = in_numpy(layer)
    segments = None if layer.segment is None else SEGMENTS
    y, pull = reference.vjp(IDS, segments=segments, positions=PLACES)
    dy = rng.standard_normal(y.shape)

    def loss(layer, ids, positions, segments):
        out = layer(ids, positions=positions, segments=segments)
        return (out * dy).sum(), out

    grad_of = eqx.filter_grad(loss, has_aux=True)

    @eqx.filter_jit
    def concrete_and_traced(layer, *traced):
        return grad_of(layer, IDS, PLACES, segments), grad_of(layer, *traced)

    traced = [None if x is None else jnp.asarray(x) for x in (IDS, PLACES, segments)]
    wanted = pull(dy)
    for grads, got in concrete_and_traced(layer, *traced):
        np.testing.assert_allclose(got, y, atol=4e-6)
        parameters = gradients_of(grads, layer)
        assert parameters.keys() == wanted.keys()
        for name, value in parameters.items():
            want = wanted[name]
            want = want.dense(len(value)) if hasattr(want, "dense") else want
            np.testing.assert_allclose(value, want, atol=2e-5, err_msg=name)


def gradients_of(grads, layer):
    gradients = {"token.weight": grads.token.weight}
    if isinstance(layer.position, LearnedPositions):
        gradients["position.weight"] = grads.position.weight
    if layer.segment is not None:
        gradients["segment.weight"] = grads.segment.weight
    if layer.norm is not None:
        gradients |= {"norm.weight": grads.norm.weight, "norm.bias": grads.norm.bias}
    return gradients


def test_gradients_of_inputs_embeds_equal_finite_differences():
    x, dy = rng.standard_normal((2, 2, 4, 6))
    mask = np.array([[True, True, False, True]] * 2)
    with jax.enable_x64(True):
        layer = build(layer_norm=True, zero_padding=True, scale=True, segments=2)

        def loss(x):
            return (layer(inputs_embeds=x, mask=mask, offset=2) * dy).sum()

        f = jax.jit(jax.value_and_grad(loss))
        want = central_difference(lambda: float(f(x)[0]), x)
        np.testing.assert_allclose(f(x)[1], want, atol=1e-6)


def test_positions_count_from_the_offset():
    layer, ids = build(), np.array([[1, 2, 3, 4]])

    @jax.jit
    def outputs(ids, offset):
        def decode(offset, token):
            return offset + 1, layer(token[None], offset=offset)[0]

        _, one_by_one = jax.lax.scan(decode, 0, ids[0])
        return (
            one_by_one[None],
            jax.vmap(layer)(ids),
            jnp.concatenate([layer(ids[:, :2]), layer(ids[:, 2:], offset=2)], axis=1),
            jnp.concatenate([layer(ids[:, :2]), layer(ids[:, 2:], offset=offset)], axis=1),
            layer(ids, positions=[0, 1, 2, 3]),
            layer(ids.T, offset=[0, 1, 2, 3]).swapaxes(0, 1),
        )

    want = in_numpy(layer)(ids)
    for got in outputs(ids, np.array(2)):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_position_may_be_a_layer():
    ids = [1, 2, 3]
    given = build(position=SinusoidalPositions(6, base=50.0))
    named = build(position="sinusoidal")
    token = np.asarray(given.token.weight)[ids]
    for layer, base in ((given, 50.0), (named, 1e4)):
        want = NumpyPositions(6, base=base).encode(range(3))
        np.testing.assert_allclose(np.asarray(run(layer, ids)) - token, want, atol=1e-6)
    shared = LearnedPositions(5, 6, scale=3.0, init="zeros", key=KEY)
    layer = EmbeddingLayer(7, 6, position=shared, init="zeros", key=KEY)
    assert layer.position is shared and layer.config()["position"]["scale"] == 3.0


def test_new_tables_have_the_default_distributions():
    @jax.jit
    def draw(key):
        options: Any = {"max_positions": 500, "segments": 400, "padding_idx": 3}
        scaled = EmbeddingLayer(2000, 64, position=None, scale=True, key=key)
        layer = EmbeddingLayer(2000, 64, key=key, **options)
        return layer.parameters(), scaled.token.weight

    tables, scaled = draw(KEY)
    tables = {name: np.asarray(value) for name, value in tables.items()}
    for value in tables.values():
        assert value.std() == pytest.approx(0.02, rel=0.05)
    assert not tables["token.weight"][3].any() and np.asarray(scaled).all()
    assert not (tables["token.weight"][:400] == tables["segment.weight"]).any()
    assert np.asarray(scaled).std() == pytest.approx(1 / 8, rel=0.05)
    other, _ = draw(jax.random.key(1))
    assert not (np.asarray(other["position.weight"]) == tables["position.weight"]).any()
    zeros = EmbeddingLayer(9, 4, position=None, init="zeros", dtype="bfloat16", key=KEY)
    assert not np.asarray(zeros.token.weight).any() and zeros.dtype == jnp.bfloat16


# Dropout


def test_dropout_needs_a_key_and_is_off_in_inference():
    layer = build(dropout=0.25, position=None, layer_norm=True)
    ids = np.ones((50, 40), int)
    want = np.asarray(run(layer, ids, inference=True))
    keys = (jax.random.key(seed) for seed in (0, 0, 1))
    a, b, c = (np.asarray(run(layer, ids, key=key)) for key in keys)
    assert bits(a) == bits(b) != bits(c)
    assert (a == 0).mean() == pytest.approx(0.25, abs=0.02)
    np.testing.assert_allclose(a[a != 0], (want / 0.75)[a != 0], rtol=1e-5)
    assert bits(run(eqx.nn.inference_mode(layer), ids)) == bits(want)
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        layer(ids)


def test_dropout_of_1_gives_zeros_without_nan():
    layer = build(dropout=1.0, position=None)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def value_and_grad(one):
        off = eqx.nn.inference_mode(one)
        return one([1, 2, 0], key=KEY).sum() + off([1], key=KEY, inference=False).sum()

    with jax.debug_nans(True):
        value, grads = value_and_grad(layer)
    assert float(value) == 0 and not np.asarray(grads.token.weight).any()
    assert np.asarray(run(layer, [1, 2, 0], inference=True)).any()


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_config_and_parameters_rebuild_the_layer(options):
    layer = build(**options)
    other = EmbeddingLayer(**layer.config(), key=KEY)
    other = other.with_parameters(layer.parameters())
    assert other.config() == layer.config() and bool(other == layer)


# Padding


def test_zero_padding_passes_no_gradient_to_any_parameter():
    layer = build(zero_padding=True, layer_norm=True, segments=2, scale=True)

    @eqx.filter_jit
    @eqx.filter_grad
    def grad_of(layer, ids):
        return (layer(ids) ** 3).sum()

    grads = grad_of(layer, jnp.asarray(IDS))
    positions = np.asarray(grads.position.weight)
    assert not np.asarray(grads.token.weight)[0].any()
    # All ids at the last position are padding.
    assert not positions[3].any() and positions[2].any()
    assert not np.asarray(run(layer, jnp.asarray(IDS)))[IDS == 0].any()
    grads = grad_of(layer, jnp.zeros((2, 4), int))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(grads))


def test_adamw_decays_the_padding_row_like_any_row_without_gradient():
    layer = build(layer_norm=True)
    optimizer = optax.adamw(0.05, weight_decay=0.3)
    state = optimizer.init(eqx.filter(layer, eqx.is_array))
    before = np.asarray(layer.token.weight)

    @eqx.filter_jit
    def step(layer, state, ids):
        grads = eqx.filter_grad(lambda one: (one(ids) ** 3).sum())(layer)
        updates, state = optimizer.update(grads, state, eqx.filter(layer, eqx.is_array))
        return eqx.apply_updates(layer, updates), state

    for _ in range(3):
        layer, state = step(layer, state, jnp.asarray(IDS))
    # Rows 0 (padding) and 3 (unused) have no gradient.
    decayed = (1 - 0.05 * 0.3) ** 3 * before[[0, 3]]
    assert decayed.all()
    np.testing.assert_allclose(layer.token([0, 3]), decayed, rtol=1e-5)
    assert (np.abs(np.asarray(layer.token([1])) - before[1]) > 0.05).any()


@pytest.mark.parametrize("norm_eps", [1e-5, 0.0])
def test_mask_marks_padding_and_ignores_its_values(norm_eps):
    layer = build(zero_padding=True, layer_norm=True, norm_eps=norm_eps)
    mask = np.array([[True, False, True, True], [False, True, True, False]])
    # Masked vectors may hold anything.
    embeds = np.where(mask[..., None], 1.0, np.nan) * rng.standard_normal((2, 4, 6))

    @eqx.filter_jit
    def output_and_grads(layer, mask):
        def loss(one):
            return (one(inputs_embeds=embeds, mask=mask) ** 2).sum()

        return layer(IDS, mask=mask), eqx.filter_grad(loss)(layer)

    out, grads = output_and_grads(layer, mask)
    assert not np.asarray(out)[~mask].any() and np.asarray(out)[mask].all()
    np.testing.assert_array_equal(layer.mask(IDS), IDS != 0)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert np.asarray(grads.norm.weight).any()


# Invalid arguments


def test_traced_id_or_segment_out_of_range_is_nan_and_has_no_gradient():
    layer = build(layer_norm=True, segments=3, scale=True, zero_padding=True)
    ids, segments = IDS.copy(), SEGMENTS.copy()
    ids[0, 1], ids[1, 0], segments[0, 2] = 7, -1, 3
    wrong = np.zeros(ids.shape, bool)
    wrong[0, 1] = wrong[1, 0] = wrong[0, 2] = True

    def loss(one, ids, segments):
        out = one(ids, segments=segments)
        return (out**3).sum(), out

    def loss_without_wrong(one):
        return jnp.where(wrong[..., None], 0, one(IDS, segments=SEGMENTS) ** 3).sum()

    @eqx.filter_jit
    def gradients(layer, ids, segments):
        wanted = eqx.filter_grad(loss_without_wrong)(layer)
        return eqx.filter_grad(loss, has_aux=True)(layer, ids, segments), wanted

    (grads, out), want = gradients(layer, jnp.asarray(ids), jnp.asarray(segments))
    is_nan = np.isnan(np.asarray(out))
    np.testing.assert_array_equal(is_nan, np.broadcast_to(wrong[..., None], is_nan.shape))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"ids": [[1, 7]]}, IndexError, r"^ids\[0, 1\] is 7, but num_embeddings is 7$"),
        ({"ids": np.array([2**33])}, IndexError, r"^ids\[0\] is 8589934592, but num_emb"),
        (
            {"ids": [1], "segments": [3]},
            IndexError,
            r"^segments\[0\] is 3, but the number of segments is 3$",
        ),
        (
            {"ids": [1], "segments": [[0, 1]]},
            ValueError,
            r"^segments must have shape \(1,\)",
        ),
        ({"ids": [1], "segments": [0.0]}, TypeError, "^segments must be integers, got fl"),
        ({}, ValueError, "^give ids or inputs_embeds, got neither"),
        ({"ids": 1}, ValueError, "^ids must have a length axis when there are positions"),
        (
            {"ids": [1], "inputs_embeds": np.ones((2, 6))},
            ValueError,
            r"^ids must have the shape \(2,\) of inputs_embeds, got \(1,\)",
        ),
        ({"inputs_embeds": np.ones((2, 6))}, ValueError, "^zero_padding needs ids or a m"),
        (
            {"ids": [1], "mask": [1]},
            ValueError,
            r"^mask must be bools of shape \(1,\), got int64 \(1,\)",
        ),
        ({"ids": [1] * 10}, ValueError, "^positions must be smaller than max_positions 9"),
    ],
)
def test_invalid_calls_raise_the_same_errors_as_numpy(call, error, message):
    layer = build(segments=3, zero_padding=True)
    for one in (layer, in_numpy(layer)):
        with pytest.raises(error, match=message):
            one(**call)


@pytest.mark.rejects
def test_constructor_rejects_invalid_arguments():
    def rejects(message, error: Any = ValueError, **options):
        with pytest.raises(error, match=message):
            EmbeddingLayer(7, 6, **{"position": None, "key": KEY, **options})

    rejects("^position='learned' needs max_positions, got None", position="learned")
    rejects("^max_positions is for position='learned', got 4 with None", max_positions=4)
    rejects(
        "^position must be 'learned', 'sinusoidal', None or a layer that adds positions, "
        "got 'rotary': use None with layers that act on attention, such as "
        "RotaryPositions$",
        position="rotary",
    )
    rejects("^position must be 'learned', 'sinusoi", TypeError, position=AlibiBias(2))
    rejects("^position must have embedding_dim 6, got 8", position=SinusoidalPositions(8))
    rejects("^zero_padding needs padding_idx, got None", zero_padding=True)
    rejects("^norm_eps must not be negative, got -1", norm_eps=-1.0)
    # Checked before tables are drawn, so the missing key is not reported.
    rejects("^dropout must be between 0 and 1, got 1.5", dropout=1.5, key=None)
    rejects(r"^position\['class'\] must be 'LearnedPositions' or", position={"class": "x"})
    rejects("^segments must be positive, got 0", segments=0)
    rejects("^key must be given to draw parameters, got None", key=None)
    with pytest.raises(ValueError, match="^embedding_dim must be positive, got 0"):
        EmbeddingLayer(7, 0, position=None, key=KEY)
    with pytest.raises(ValueError, match="^segments were given, but the layer was made w"):
        EmbeddingLayer(7, 6, position=None, key=KEY)([1], segments=[0])


# Precision, trees and strict modes of JAX


def test_half_precision_is_rounded_once():
    layer = build(layer_norm=True, segments=3, scale=True, dtype="bfloat16")
    full = jax.tree.map(lambda x: np.asarray(x).astype("float32"), layer)
    call = {"segments": SEGMENTS, "positions": PLACES}
    got, want = (np.asarray(run(one, IDS, **call)) for one in (layer, full))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(float), want, rtol=2**-8, atol=1e-6)
    assert (got == want.astype(jnp.bfloat16)).mean() > 0.95


@pytest.mark.parametrize("trip", ["serialise", "unstack"])
def test_round_trips_do_not_change_the_layer(trip):
    def make(key):
        return EmbeddingLayer(
            7, 6, position="sinusoidal", padding_idx=0, segments=2, layer_norm=True, key=key
        )

    want, got = built(make), ROUND_TRIPS[trip](make)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    assert bits(run(got, IDS)) == bits(run(want, IDS))


def test_plain_jax_grad_of_the_tied_head_is_that_of_lookup_and_head():
    layer = build()

    # All leaves are floating-point arrays, so jax.grad and jax.jit accept the layer.
    @jax.jit
    @jax.grad
    def grad_of(one):
        return one.logits(one(IDS)).sum()

    out, table = np.asarray(run(layer, IDS)), np.asarray(layer.token.weight)
    grads = np.asarray(grad_of(layer).token.weight)
    want = np.tile(out.reshape(-1, 6).sum(axis=0), (7, 1))
    counts = np.bincount(IDS.ravel(), minlength=7)
    counts[0] = 0  # the lookup passes padding no gradient, the head does
    want += counts[:, None] * table.sum(axis=0)
    np.testing.assert_allclose(grads, want, atol=1e-4)


def test_layers_and_gradients_run_in_strict_modes_with_x64():
    def run(layers, ids, segments):
        results = []
        for layer in layers:

            def loss(one):
                out = one(ids, segments=segments, offset=1, key=KEY)
                return out.astype(jnp.float32).sum(), out

            grads, out = eqx.filter_grad(loss, has_aux=True)(layer)
            results += [out, grads.token.weight]
        return results

    options: dict[str, Any] = {"segments": 3, "layer_norm": True, "dtype": "bfloat16"}
    with jax.enable_x64(True):
        layer = build(scale=True, zero_padding=True, **options)
        other = build(position="sinusoidal", dropout=0.5, **options)
        call = [layer, other], jnp.asarray(IDS), jnp.asarray(SEGMENTS)
        with jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
            results = eqx.filter_jit(run)(*call)
    assert all(one.dtype == jnp.bfloat16 and np.asarray(one).any() for one in results)
    want = in_numpy(layer)(IDS, segments=SEGMENTS, offset=1)
    np.testing.assert_allclose(
        np.asarray(results[0], float), want.astype(float), rtol=2**-7, atol=1e-6
    )


def test_layer_without_positions_runs_in_strict_modes():
    layer = build(position=None, segments=3, layer_norm=True, zero_padding=True)
    with strict_jax():
        got = np.asarray(eqx.filter_jit(layer)(jnp.asarray(IDS), segments=SEGMENTS))
    want = in_numpy(layer)(IDS, segments=SEGMENTS)
    np.testing.assert_allclose(got, want, atol=4e-6)


def test_layers_export_with_symbolic_batch_and_length():
    rows = rng.standard_normal((9, 4)).astype("float32")
    layer = LearnedPositions(5, 4, weight=rows[:5])
    bag = EmbeddingBag(9, 4, mode="sum", weight=rows)

    def run(ids):
        x = SinusoidalPositions(4)(layer(bag(ids)[:, None] + rows[0] * ids[..., None]))
        return RotaryPositions(4, sections=[1, 1], heads_axis=-3)(x, offset=2)

    sizes = jax.export.symbolic_shape("batch, length")
    ids = np.array([[4, 0, 8, 1, 1, 3, 2], [5, 5, 2, 7, 0, 0, 1]], "int32")
    with fast_compilation():
        program = jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct(sizes, "int32"))
        got = np.asarray(program.call(ids))
    x = rows[ids].sum(axis=1, keepdims=True) + rows[0] * ids[..., None]
    x = NumpyPositions(4)(x[:, :5] + rows[:5])
    want = NumpyRotary(4, heads_axis=-3)(x, offset=2)
    np.testing.assert_allclose(got[:, :5], want, atol=1e-5)
    # Positions beyond the table cannot raise in an exported program.
    assert np.isnan(got[:, 5:]).all()
