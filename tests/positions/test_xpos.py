"""xPos: the formula, decay, range, gradients, caches, x-transformers, all front ends."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import firstlayer.equinox
import firstlayer.torch
from firstlayer.numpy.rotary import RotaryPositions
from firstlayer.numpy.xpos import XPosRotary
from firstlayer.positions.xpos import xpos_phases, xpos_reach, xpos_tables
from tests.support.gradients import central_difference
from tests.support.torch_round_trips import ROUND_TRIPS, built, forget_graphs, graphs

# Inductor and forward-mode AD import deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

rng = np.random.default_rng(0)
LAYOUTS = ["half", "interleaved", "interleaved_to_half"]
HALVES = [np.float16, ml_dtypes.bfloat16]


def reference(x, positions, *, keys, base, scale_base, center, layout, rotary_dim):
    """Return the rotated and scaled vectors in long double, one pair at a time."""
    x, out = np.asarray(x, np.longdouble), np.array(x, np.longdouble)
    pairs = rotary_dim // 2
    positions = np.asarray(positions, np.longdouble)
    for i in range(pairs):
        zeta = np.longdouble(2 * i + 0.4 * rotary_dim) / np.longdouble(1.4 * rotary_dim)
        power = (positions - center) / scale_base * (-1 if keys else 1)
        scale, angle = zeta**power, positions * np.longdouble(base) ** (-i / pairs)
        a, b = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        to = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + pairs)
        cos, sin = scale * np.cos(angle), scale * np.sin(angle)
        out[..., to[0]] = x[..., a] * cos - x[..., b] * sin
        out[..., to[1]] = x[..., b] * cos + x[..., a] * sin
    return out.astype(float)


# ------------------------------------------------------------------------- values


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_matches_the_formula(layout, keys):
    options = {"base": 500.0, "scale_base": 40.0, "center": 7, "rotary_dim": 6}
    layer = XPosRotary(8, layout=layout, **options, heads_axis=-3)
    positions = np.array([0, 1, 7, 8, 255, 256, 700, 1334, -1, -300, -1319])
    x = rng.standard_normal((2, 11, 8))
    for at in (positions, positions - 0.375):
        want = reference(x, at, keys=keys, layout=layout, **options)
        size = np.abs(want).max(axis=-1, keepdims=True)
        got = layer(x.astype(np.float32), at, keys=keys)
        assert got.dtype == np.float32
        assert (np.abs(got - want) < 1e-6 * size).all()
        assert (np.abs(layer(x, at, keys=keys) - want) < 1e-6 * size).all()


@given(st.integers(-16997, 16997), st.booleans())
def test_scales_are_accurate_at_any_position_in_reach(position, keys):
    options = {"center": 0, "reach": 16997, "keys": keys}
    cos, sin = xpos_phases(np.array([position]), *xpos_tables(8), **options)
    zeta = (np.arange(4, dtype=np.longdouble) / 4 + 0.4) / 1.4
    want = zeta ** (np.longdouble(-position if keys else position) / 512)
    np.testing.assert_allclose(np.hypot(cos, sin)[0], want.astype(float), rtol=1e-6)


def test_scores_depend_on_distance_only_and_not_on_the_center():
    q, k = rng.standard_normal((2, 1, 64))
    at = XPosRotary(64, base=500.0, scale_base=300.0)
    scores = [at(q, [p + 40]) @ at(k, [p], keys=True).T for p in (0, -900, 5000, 9000)]
    np.testing.assert_allclose(scores, np.broadcast_to(scores[0], (4, 1, 1)), rtol=2e-5)
    moved = XPosRotary(64, base=500.0, scale_base=300.0, center=4000)
    other = moved(q, [5040]) @ moved(k, [5000], keys=True).T
    np.testing.assert_allclose(other, scores[0], rtol=2e-5)


def test_equal_pairs_decay_by_zeta_to_the_distance():
    layer, x = XPosRotary(8, scale_base=20.0), np.ones((1, 8))
    keys = np.arange(0, 101, 20)
    angles = 10_000.0 ** (-np.arange(4) / 4)
    zeta = (np.arange(4) / 4 + 0.4) / 1.4
    for key in keys:
        got = layer(x, [100]) @ layer(x, [key], keys=True).T
        distance = 100 - key
        want = (2 * np.cos(distance * angles) * zeta ** (distance / 20)).sum()
        np.testing.assert_allclose(got.item(), want, rtol=1e-5, atol=1e-7)


def test_a_large_scale_base_gives_plain_rotary():
    x = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)
    got = XPosRotary(8, base=500.0, scale_base=1e12)(x, offset=3)
    np.testing.assert_allclose(got, RotaryPositions(8, base=500.0)(x, offset=3), rtol=1e-6)


@pytest.mark.parametrize("scale_base", [512, 100])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_matches_x_transformers(scale_base):
    """x-transformers 2.31.10 centers the scales at half of the largest position plus 1."""
    import x_transformers.x_transformers as xt

    q, k = rng.standard_normal((2, 2, 3, 31, 16)).astype(np.float32)
    module = xt.RotaryEmbedding(16, use_xpos=True, scale_base=scale_base)
    angles, scale = module(torch.arange(31))
    layer = XPosRotary(16, scale_base=scale_base, center=15, layout="interleaved")
    for x, power, keys in ((q, 1.0, False), (k, -1.0, True)):
        want = xt.apply_rotary_pos_emb(torch.from_numpy(x), angles, scale**power)
        np.testing.assert_allclose(layer(x, keys=keys), want.numpy(), atol=2e-5)
    # Their center is that of the current length; the scores are those of any center.
    other = XPosRotary(16, scale_base=scale_base, layout="interleaved")
    got, want = (one(q) @ one(k, keys=True).mT for one in (layer, other))
    np.testing.assert_allclose(got, want, atol=2e-5)


# ------------------------------------------------------------------------- positions


def test_decoding_step_by_step_equals_one_pass():
    layer = XPosRotary(8, scale_base=30.0)
    q, k = rng.standard_normal((2, 2, 3, 9, 8)).astype(np.float32)
    whole = layer(q) @ layer(k, keys=True).mT
    cache = np.concatenate(
        [layer(k[..., [n], :], offset=n, keys=True) for n in range(9)], axis=-2
    )
    for n in range(9):
        step = layer(q[..., [n], :], offset=n) @ cache.mT
        np.testing.assert_allclose(step[..., 0, :], whole[..., n, :], rtol=1e-5, atol=1e-6)


def test_positions_of_a_batch_and_heads_last():
    layer, x = (
        XPosRotary(8, scale_base=30.0, heads_axis=-3),
        rng.standard_normal((2, 3, 4, 8)),
    )
    at = np.array([[0, 5, 9, 1], [7, 7, 2, 40]])
    got = layer(x, at, keys=True)
    for row in range(2):
        np.testing.assert_array_equal(got[row], layer(x[row], at[row], keys=True))
    last = XPosRotary(8, scale_base=30.0, heads_axis=-2)
    np.testing.assert_array_equal(last(x.swapaxes(1, 2), at, keys=True), got.swapaxes(1, 2))
    counted = np.arange(4) + np.array([[3], [50]])
    np.testing.assert_array_equal(layer(x, offset=[3, 50]), layer(x, counted))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.uint64])
def test_positions_may_have_any_integer_dtype(dtype):
    layer, x = XPosRotary(8, center=100), rng.standard_normal((3, 8))
    at = np.array([0, 3, 100], dtype)
    np.testing.assert_array_equal(layer(x, at), layer(x, at.astype(np.int64)))
    small = at.astype(np.uint8)
    got = firstlayer.equinox.XPosRotary(8, center=100)(x.astype("f"), jnp.asarray(small))
    np.testing.assert_allclose(got, layer(x.astype("f"), at), atol=1e-6)


def test_no_score_overflows_within_reach():
    layer = XPosRotary(8, scale_base=64.0, center=100)
    ends = [100 - layer.reach, 100 + layer.reach]
    x = np.full((2, 8), 4.0, np.float32)
    scores = layer(x, ends) @ layer(x, ends, keys=True).T
    assert np.isfinite(scores).all() and scores.max() > 1e30
    half = x.astype(np.float16) / 8
    reach = xpos_reach(64.0, float16=True)
    ends = [100 - reach, 100 + reach]
    scores = layer(half, ends).astype("f") @ layer(half, ends, keys=True).astype("f").T
    assert np.isfinite(scores.astype(np.float16)).all()
    tiny = layer(half[:1], ends[1:]), layer(half[:1], ends[:1], keys=True)
    assert all((np.abs(y) >= np.finfo(np.float16).tiny).all() for y in tiny)


@pytest.mark.rejects
@pytest.mark.parametrize("dtype, reach", [(np.float32, 2124), (np.float16, 212)])
def test_positions_out_of_reach_are_an_error_or_nan_under_tracing(dtype, reach):
    layer, x = XPosRotary(8, scale_base=64.0, center=5), np.ones((2, 8), dtype)
    for sign in (1, -1):
        for step in (1, 0.5):
            far = 5 + sign * (reach + step)
            with pytest.raises(ValueError, match=f"at most {reach} from center 5 for"):
                layer(x, [0, far])
            traced = jnp.asarray([0, far])
            other = firstlayer.equinox.XPosRotary(8, scale_base=64.0, center=5)
            got = eqx.filter_jit(other)(jnp.asarray(x), traced)
            assert np.isnan(got[1]).all() and np.isfinite(got[0]).all()
        assert np.isfinite(layer(x, [0, 5 + sign * reach])).all()


# ------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keys", [False, True])
def test_gradient_of_the_vectors_matches_finite_differences(layout, keys):
    layer = XPosRotary(8, scale_base=9.0, center=3, layout=layout, rotary_dim=6)
    x, at = rng.standard_normal((2, 3, 8)), np.array([[4, -9, 30], [1, 2, 3]])
    y, pullback = layer.vjp(x, at, keys=keys)
    dy = rng.standard_normal(y.shape)
    want = central_difference(lambda: (layer(x, at, keys=keys) * dy).sum(), x)
    np.testing.assert_allclose(pullback(dy)["x"], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keys", [False, True])
def test_torch_and_jax_gradients_of_vectors_and_real_positions(keys):
    x, at = rng.standard_normal((2, 3, 8)), np.array([4.3, -9.6, 30.2])
    layer = firstlayer.torch.XPosRotary(8, scale_base=9.0, center=3, heads_axis=-3)
    leaves = [torch.tensor(value, requires_grad=True) for value in (x, at)]
    assert torch.autograd.gradcheck(
        lambda x, at: layer(x, at, keys=keys), leaves, atol=1e-5
    )
    dy = rng.standard_normal(x.shape)
    (layer(*leaves, keys=keys) * torch.from_numpy(dy)).sum().backward()
    other = firstlayer.equinox.XPosRotary(8, scale_base=9.0, center=3, heads_axis=-3)

    @jax.jit
    @jax.grad
    def grads(inputs):
        return (other(*inputs, keys=keys) * dy).sum()

    with jax.enable_x64(True):
        got = grads((jnp.asarray(x), jnp.asarray(at)))
    for value, leaf in zip(got, leaves, strict=True):
        np.testing.assert_allclose(value, np.asarray(leaf.grad), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_float32_rounded_once(dtype):
    layer = XPosRotary(8, scale_base=50.0, center=3, heads_axis=-3)
    x = rng.standard_normal((3, 5, 8)).astype(dtype)
    y, pullback = layer.vjp(x, offset=60, keys=True)
    want, pullback32 = layer.vjp(x.astype("float32"), offset=60, keys=True)
    np.testing.assert_array_equal(y.view("u2"), want.astype(dtype).view("u2"))
    got, want = pullback(y)["x"], pullback32(y.astype("float32"))["x"]
    np.testing.assert_array_equal(got.view("u2"), want.astype(dtype).view("u2"))


# ----------------------------------------------------------------------- front ends


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keys", [False, True])
def test_front_ends_agree_for_queries_and_keys(layout, keys):
    options = {"scale_base": 25.0, "center": 4, "layout": layout, "base": 300.0}
    x = rng.standard_normal((2, 3, 4, 8)).astype(np.float32)
    want = XPosRotary(8, **options)(x, offset=[3, 90], keys=keys)
    torch_layer = firstlayer.torch.XPosRotary(8, **options)
    got = torch_layer(torch.from_numpy(x), offset=[3, 90], keys=keys)
    jax_layer = firstlayer.equinox.XPosRotary(8, **options)
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, atol=1e-6 * scale)
    run = eqx.filter_jit(lambda layer, x, offset: layer(x, offset=offset, keys=keys))
    for offset in ([3, 90], jnp.array([3, 90])):
        got = run(jax_layer, x, offset)
        np.testing.assert_allclose(got, want, atol=1e-6 * scale)


def test_torch_operators_equal_the_kernel_and_compile_to_one_graph():
    layer, x = (
        firstlayer.torch.XPosRotary(8, scale_base=25.0, heads_axis=-3),
        torch.randn(2, 3, 4, 8),
    )
    want = layer(x, offset=7, keys=True)
    mapped = torch.func.vmap(lambda row: layer(row, offset=7, keys=True))(x)
    torch.testing.assert_close(mapped, want, atol=1e-6, rtol=1e-6)
    forget_graphs()
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for length in (4, 6, 9):
        x = torch.randn(2, 3, length, 8)
        for at in (torch.arange(length) + 7, torch.arange(length) + 7.25):
            got = compiled(x, at, keys=True)
            torch.testing.assert_close(got, layer(x, at, keys=True), atol=1e-5, rtol=1e-6)
    assert graphs() == 2
    assert compiled(x, torch.full((9,), 3000), keys=True).isnan().all()


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_torch_layer_survives_casts_moves_and_checkpoints(round_trip):
    def build():
        return firstlayer.torch.XPosRotary(8, scale_base=25.0, center=3, heads_axis=-3)

    x = torch.randn(2, 4, 8)
    layer = ROUND_TRIPS[round_trip](build)
    assert torch.equal(layer(x, keys=True), built(build)(x, keys=True))
    assert not layer.state_dict() and not list(layer.parameters())


def test_jax_layer_runs_under_vmap_and_has_no_leaves():
    layer = firstlayer.equinox.XPosRotary(8, scale_base=25.0, center=3)
    x, at = jnp.ones((3, 4, 8)), jnp.arange(12).reshape(3, 4)
    got = jax.vmap(lambda x, at: layer(x, at, keys=True))(x, at)
    np.testing.assert_allclose(got, layer(x, at, keys=True), rtol=1e-6)
    assert not jax.tree.leaves(layer)
    same = firstlayer.equinox.XPosRotary(8, scale_base=25.0, center=3)
    assert jax.tree.structure(layer) == jax.tree.structure(same)


def test_layers_do_not_share_tables():
    x = rng.standard_normal((5, 8)).astype(np.float32)
    a, b = XPosRotary(8), XPosRotary(8, scale_base=100.0)
    first = a(x)
    assert (b(x) != first).any()
    np.testing.assert_array_equal(a(x), first)


def test_config_rebuilds_the_layer():
    layer = XPosRotary(
        8,
        base=99.0,
        scale_base=7.0,
        center=-3,
        layout="interleaved",
        rotary_dim=4,
        heads_axis=-2,
    )
    again = XPosRotary(**json.loads(json.dumps(layer.config())))
    x = rng.standard_normal((4, 2, 8))
    np.testing.assert_array_equal(again(x), layer(x))
    assert repr(again) == repr(layer)
    assert repr(firstlayer.torch.XPosRotary(8, center=4)) == "XPosRotary(8, center=4)"


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: XPosRotary(7), "head_dim must be positive and even, got 7"),
        (lambda: XPosRotary(8, base=1.0), "base must be greater than 1, got 1.0"),
        (lambda: XPosRotary(8, scale_base=-1.0), "scale_base must be positive and finite"),
        (lambda: XPosRotary(8, center=2**24), "center must be smaller than 16777216 in"),
        (lambda: XPosRotary(8)(np.ones((2, 6))), r"x must have shape \(..., length, 8\)"),
        (lambda: XPosRotary(8)(np.ones((2, 8)), [1, 2, 3]), "positions must fit x of"),
        (
            lambda: XPosRotary(8).vjp(np.ones((2, 8)))[1](np.ones((2, 7))),
            r"dy must have shape \(2, 8\), got \(2, 7\)",
        ),
    ],
)
def test_invalid_arguments_are_rejected(build, message):
    with pytest.raises(ValueError, match=message):
        build()
