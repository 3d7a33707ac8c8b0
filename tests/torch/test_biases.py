"""Attention biases and Shaw scores on torch: values, score_mod, gradients, compile."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.nn.attention.flex_attention import flex_attention

from firstlayer.numpy.alibi import AlibiBias as NumpyAlibi
from firstlayer.numpy.fire import FireBias as NumpyFire
from firstlayer.numpy.kerple import KerpleBias as NumpyKerple
from firstlayer.numpy.shaw import ShawScores as NumpyShaw
from firstlayer.numpy.t5 import T5Bias as NumpyT5
from firstlayer.torch.alibi import AlibiBias
from firstlayer.torch.fire import FireBias
from firstlayer.torch.kerple import KerpleBias
from firstlayer.torch.shaw import ShawScores
from firstlayer.torch.t5 import T5Bias
from tests.support.torch_round_trips import ROUND_TRIPS, built, forget_graphs, graphs

# Inductor and forward-mode AD import deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

HALVES = [torch.float16, torch.bfloat16]
# Every argument at its default and at another value.
LAYERS = {
    "alibi": lambda **o: AlibiBias(4),
    "alibi, encoder": lambda **o: AlibiBias(4, symmetric=True, max_bias=4.0, factor=3.0),
    "t5": lambda **o: T5Bias(4, **o),
    "t5, decoder": lambda **o: T5Bias(
        4, num_buckets=10, max_distance=30, bidirectional=False, **o
    ),
    "kerple": lambda **o: KerpleBias(4, **o),
    "kerple, power": lambda **o: KerpleBias(4, form="power", **o),
    "fire": lambda **o: FireBias(4, **o),
    "fire, short": lambda **o: FireBias(
        4, width=3, c=0.7, threshold=5.0, eps=1e-3, **o
    ),
}  # fmt: skip
NUMPY: dict[type[nn.Module], Any] = {
    AlibiBias: NumpyAlibi,
    T5Bias: NumpyT5,
    KerpleBias: NumpyKerple,
    FireBias: NumpyFire,
    ShawScores: NumpyShaw,
}
LEARNED = [name for name in LAYERS if "alibi" not in name]
Q = torch.tensor([[0, 7, 40], [900, 3, 12]])
K = torch.tensor([0, 1, 5, 12, 41, 900])


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def numpy_layer(layer):
    """Return the NumPy layer with the same arguments and parameters."""
    other = NUMPY[type(layer)](**layer.config())
    other.load_state_dict({n: p.detach().numpy() for n, p in layer.named_parameters()})
    return other


def pairwise_bias(layer, q, k, **positions):
    """Return the bias that ``score_mod`` adds, for every pair."""
    mod = layer.score_mod(**positions)
    sizes = (2, layer.num_heads, q, k)
    b, h, i, j = map(torch.from_numpy, np.ix_(*map(np.arange, sizes)))
    return mod(torch.zeros(sizes), b, h, i, j)


# ------------------------------------------------------------------------------- values


def test_alibi_is_slope_times_distance():
    layer = AlibiBias(6, max_bias=4.0)
    want = torch.from_numpy(layer.slopes)[:, None, None] * (K - Q[0][:, None]).double()
    got = layer.bias(Q[0], K, dtype=torch.float64)
    torch.testing.assert_close(got, want, atol=0, rtol=1e-14)
    torch.testing.assert_close(layer(Q[0], K), want.float(), atol=0, rtol=1e-6)
    near, far = layer.bias([4095], [4094, 0], dtype=torch.bfloat16)[:, 0].T
    assert torch.equal(near, -torch.from_numpy(layer.slopes).to(torch.bfloat16))
    assert (far < near).all()


def test_kerple_matches_its_formula():
    r1, r2 = torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.1])
    distance = (K - Q[0][:, None]).abs().float()
    log = KerpleBias(2, r1=r1, r2=r2)(Q[0], K)
    power = KerpleBias(2, form="power", r1=r1, r2=r2)(Q[0], K)
    for head in range(2):
        want = -r1[head] * torch.log(1 + r2[head] * distance)
        torch.testing.assert_close(log[head], want)
        torch.testing.assert_close(power[head], -r1[head] * distance ** r2[head])


def test_fire_is_a_network_of_normalized_distance():
    layer = FireBias(4, width=3, c=0.7, threshold=30.0)
    distance, own = (K - Q[0][:, None]).abs().float(), Q[0][:, None].clamp(min=30).float()
    share = torch.log1p(0.7 * distance) / (torch.log1p(0.7 * own) + 1e-6)
    hidden = torch.relu(share[..., None] * layer.hidden_weight + layer.hidden_bias)
    want = nn.functional.linear(hidden, layer.head_weight, layer.head_bias)
    torch.testing.assert_close(layer(Q[0], K), want.permute(2, 0, 1))


@pytest.mark.parametrize("name", LAYERS)
def test_biases_match_numpy(name):
    layer = built(LAYERS[name])
    reference = numpy_layer(layer)
    for q in (Q, Q[0], Q + 0.25):
        got, want = layer(q, K).detach(), reference(q.numpy(), K.numpy())
        np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in LAYERS if "," in name])
def test_layers_do_not_share_state(name):
    plain, other = built(LAYERS[name.partition(",")[0]]), built(LAYERS[name])
    before = plain(Q, K)
    assert not torch.equal(other(Q, K), before) and torch.equal(plain(Q, K), before)


@pytest.mark.parametrize("name", LAYERS)
def test_one_query_is_a_row_of_the_full_bias(name):
    layer, positions = built(LAYERS[name]), torch.arange(30)
    full = layer(positions, positions)
    step = layer(positions[-1:], positions)
    torch.testing.assert_close(step[:, 0], full[:, -1], atol=1e-6, rtol=0)
    if "fire" not in name:
        moved = layer(positions + 5000, positions + 5000)
        torch.testing.assert_close(moved, full, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16, torch.uint64], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_positions_may_be_lists_or_any_integer_dtype(name, dtype):
    layer = built(LAYERS[name])
    want = layer(torch.tensor([0, 100]), torch.tensor([3, 120]))
    q, k = (torch.tensor(p).to(dtype) for p in ([0, 100], [3, 120]))
    assert torch.equal(layer(q, k), want)
    assert torch.equal(layer([0, 100], [3, 120]), want)


# --------------------------------------------------------------------- score_mod


@pytest.mark.parametrize("name", LAYERS)
def test_score_mod_matches_the_dense_bias(name):
    layer = built(LAYERS[name])
    for q in (Q, Q[0], Q[1] + 0.75, Q[1].to(torch.uint8) % 8):
        got = pairwise_bias(layer, 3, 6, q_positions=q, k_positions=K)
        want = layer(q, K).expand(2, 4, 3, 6)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    got = pairwise_bias(layer, 5, 9)
    want = layer(torch.arange(5), torch.arange(9)).expand(2, 4, 5, 9)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", LEARNED)
def test_score_mod_gradients_match_the_dense_bias(name):
    layer = built(LAYERS[name])
    parameters = list(layer.parameters())
    got = torch.autograd.grad(
        pairwise_bias(layer, 3, 6, q_positions=Q, k_positions=K).square().sum(), parameters
    )
    want = torch.autograd.grad(layer(Q, K).square().sum(), parameters)
    for actual, reference in zip(got, want, strict=True):
        torch.testing.assert_close(actual, reference, atol=1e-4, rtol=1e-4)


def test_compiled_flex_attention_matches_dense_attention():
    # All biases in one graph, because compiling flex_attention takes long.
    layers = [
        built(LAYERS[name])
        for name in ("alibi", "t5", "kerple", "kerple, power", "fire, short")
    ]
    q, k, v = draw(2, 4, 32, 16), draw(2, 4, 48, 16, seed=1), draw(2, 4, 48, 16, seed=2)
    positions = torch.arange(16, 48)
    mods = [layer.score_mod(positions) for layer in layers]

    def all_mods(score, b, h, q_idx, kv_idx):
        for mod in mods:
            score = mod(score, b, h, q_idx, kv_idx)
        return score

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(flex_attention, fullgraph=True)
        got = compiled(q, k, v, score_mod=all_mods)
        dense = torch.stack([layer(positions, torch.arange(48)) for layer in layers]).sum(0)
        scores = q @ k.mT / math.sqrt(16) + dense
    torch.testing.assert_close(got, scores.softmax(-1) @ v, atol=2e-5, rtol=0)


@pytest.mark.rejects
def test_score_mod_rejects_positions_with_three_axes():
    with pytest.raises(ValueError, match=r"must have shape \(length,\) or \(batch, length"):
        AlibiBias(4).score_mod(torch.zeros(2, 3, 4))


# --------------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", LEARNED)
def test_parameter_gradients_pass_gradcheck(name):
    layer = LAYERS[name](dtype=torch.float64)
    names = list(dict(layer.named_parameters()))

    def run(*values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (Q, K[:4]))

    values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
    assert torch.autograd.gradcheck(run, values, atol=1e-4)
    (run(*values) ** 2).sum().backward()
    assert all(value.grad is not None and value.grad.any() for value in values)


@pytest.mark.parametrize("name", [n for n in LAYERS if "t5" not in n])
def test_float_positions_get_a_gradient(name):
    layer = LAYERS[name]().double()
    q = torch.tensor([6.3, 20.1], dtype=torch.float64, requires_grad=True)
    k = torch.tensor([0.2, 3.7, 40.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k: layer(q, k, dtype=torch.float64), (q, k), atol=1e-4
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_half_precision_parameters_are_summed_in_float32(name, dtype):
    layer = built(LAYERS[name])
    half = built(LAYERS[name]).to(dtype)
    positions = torch.arange(150)
    for each in (layer, half):
        each(positions, positions, dtype=torch.float32).sum().backward()
    for (parameter_name, actual), reference in zip(
        half.named_parameters(), layer.parameters(), strict=True
    ):
        assert actual.grad.dtype == dtype, parameter_name
        torch.testing.assert_close(actual.grad, reference.grad.to(dtype), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_output_is_rounded_once(name, dtype):
    layer = built(LAYERS[name])
    want = layer(Q, K).to(dtype)
    assert torch.equal(layer(Q, K, dtype=dtype), want)
    half = built(LAYERS[name]).to(dtype)
    got = half(Q, K) if name in LEARNED else half(Q, K, dtype=dtype)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_does_not_change_the_output(name):
    layer = built(LAYERS[name])
    want = layer(Q, K)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(Q, K)
        pairs = pairwise_bias(layer, 3, 6, q_positions=Q, k_positions=K)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    torch.testing.assert_close(pairs, want, atol=1e-6, rtol=0)


def test_kerple_parameters_are_clamped_and_project_clamps_in_place():
    layer = KerpleBias(2, form="power", r1=[-3.0, 0.5], r2=[1.0, 9.0])
    bound = KerpleBias(2, form="power", r1=[0.01, 0.5], r2=[1.0, 2.0])
    assert torch.equal(layer(Q, K), bound(Q, K))
    layer(Q, K).sum().backward()
    assert layer.r1.grad is not None and layer.r2.grad is not None
    assert layer.r1.grad[0] == 0 != layer.r1.grad[1]
    assert layer.r2.grad[1] == 0 != layer.r2.grad[0]
    layer.project()
    assert torch.equal(layer.r1, bound.r1) and torch.equal(layer.r2, bound.r2)


@pytest.mark.parametrize("name", LAYERS)
def test_torch_func_matches_eager_calls(name):
    layer = built(LAYERS[name])
    want = layer(Q, K)
    got = torch.func.vmap(lambda q: layer(q, K))(Q)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    parameters = dict(layer.named_parameters())
    grads = torch.func.grad(lambda p: functional_call(layer, p, (Q, K)).sum())(parameters)
    for parameter_name, value in grads.items():
        (want_grad,) = torch.autograd.grad(
            layer(Q, K).sum(), layer.get_parameter(parameter_name)
        )
        torch.testing.assert_close(value, want_grad, atol=1e-4, rtol=1e-4)


# -------------------------------------------------------------------------- Shaw


def shaw(**options):
    return ShawScores(8, max_left=3, max_right=1, **options)


def test_shaw_scores_match_the_formula_and_numpy():
    layer, q, k = shaw(), draw(2, 4, 3, 8), draw(2, 4, 6, 8, seed=1)
    index = (K - Q[:, :, None]).clamp(-3, 1) + 3
    keys = k[:, :, None] + layer.weight[index][:, None]
    want = (q[..., None, :] * keys).sum(-1) / math.sqrt(8)
    got = layer(q, k, Q, K)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    reference = numpy_layer(layer)(q.numpy(), k.numpy(), Q.numpy(), K.numpy())
    np.testing.assert_allclose(got.detach(), reference, atol=1e-6)


def test_shaw_gradients_pass_gradcheck():
    layer = shaw(dtype=torch.float64)
    q, k = draw(2, 2, 3, 8, dtype=torch.float64), draw(2, 2, 4, 8, dtype=torch.float64)

    def run(weight, q, k):
        return functional_call(layer, {"weight": weight}, (q, k, Q, K[:4]))

    values = [t.detach().clone().requires_grad_() for t in (layer.weight, q, k)]
    assert torch.autograd.gradcheck(run, values)
    assert torch.autograd.gradgradcheck(run, values)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_shaw_scores_are_rounded_once_also_under_autocast(dtype):
    layer = built(shaw)
    q, k = draw(2, 4, 3, 8, dtype=dtype), draw(2, 4, 6, 8, dtype=dtype, seed=1)
    want = layer(q.float(), k.float(), Q, K)
    assert torch.equal(layer(q, k, Q, K), want.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(q, k, Q, K), want.to(dtype))
        assert torch.equal(layer(q.float(), k.float(), Q, K), want)


# ----------------------------------------------------- casts, moves, compile and export


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
@pytest.mark.parametrize("name", [*LAYERS, "shaw"])
def test_output_survives_casts_moves_and_checkpoints(name, round_trip):
    if name == "shaw":
        layer, plain = (
            ROUND_TRIPS[round_trip](shaw) if round_trip != "reset" else built(shaw),
            built(shaw),
        )
        q, k = draw(2, 3, 8), draw(2, 6, 8, seed=1)
        assert torch.equal(layer(q, k, Q, K), plain(q, k, Q, K))
        assert list(layer.state_dict()) == ["weight"]
        return
    layer, plain = ROUND_TRIPS[round_trip](LAYERS[name]), built(LAYERS[name])
    got, want = (each(Q, K, dtype=torch.float32) for each in (layer, plain))
    assert torch.equal(got, want)
    assert list(layer.state_dict()) == list(dict(layer.named_parameters()))


def test_meta_device_gives_shapes():
    q, k = torch.empty(2, 3, device="meta"), torch.empty(5, device="meta")
    for build in LAYERS.values():
        bias = build().to("meta")(q, k)
        assert bias.is_meta and bias.shape == (2, 4, 3, 5)
    x = torch.empty(2, 3, 8, device="meta")
    assert shaw(device="meta")(x, x, q, q).shape == (2, 3, 3)


def test_fire_and_shaw_compile_under_autocast():
    torch._dynamo.reset()
    layer, x = built(Stack), draw(2, 4, 5, 8)
    want = layer(x, torch.arange(5))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x, torch.arange(5)), want)


def test_precomputed_tables_are_integer_buffers():
    for build in LAYERS.values():
        assert all(buffer.dtype == torch.int32 for buffer in build().buffers())


def test_initial_parameters_follow_the_seed_and_published_ranges():
    for name in LEARNED:
        first, same, other = (built(LAYERS[name], seed=s) for s in (0, 0, 1))
        for a, b in zip(first.parameters(), same.parameters(), strict=True):
            assert torch.equal(a, b)
        pairs = zip(first.parameters(), other.parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs)
    assert T5Bias(300, num_buckets=300, max_distance=900).weight.abs().max() <= 0.04
    log, power = KerpleBias(4000), KerpleBias(4000, form="power")
    for parameter, limit in (
        (log.r1, 2.0),
        (log.r2, 1.0),
        (power.r1, 1.0),
        (power.r2, 2.0),
    ):
        assert parameter.min() >= 0.01 and limit - 0.01 < parameter.max() <= limit
    fire = FireBias(64, width=100, c=0.3)
    assert fire.c.item() == pytest.approx(0.3) and fire.multiplier == 1
    assert 0.9 < fire.hidden_weight.abs().max() <= 1
    assert 0.09 < fire.head_weight.abs().max() <= 0.1


class Stack(nn.Module):
    """All layers in one module, because a compilation by Inductor takes seconds."""

    def __init__(self):
        super().__init__()
        names = ("alibi", "t5, decoder", "kerple", "fire, short")
        self.biases = nn.ModuleList([LAYERS[name]() for name in names])
        self.shaw = shaw()

    def forward(self, x, positions):
        steps = torch.arange(x.shape[-2])
        bias = [bias(positions, steps) for bias in self.biases]
        return torch.stack(bias).sum(0) + self.shaw(x, x, positions, steps)


def test_inductor_compiles_once_for_five_lengths():
    forget_graphs()
    layer = built(Stack).requires_grad_(False)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (5, 9, 16, 24, 33):
        x, positions = draw(2, 4, length, 8), torch.arange(length) + 40
        got, want = compiled(x, positions), layer(x, positions)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert graphs() == 1


def test_export_runs_at_other_lengths():
    layer, length = built(Stack), torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        layer,
        (draw(2, 4, 5, 8), torch.arange(5)),
        dynamic_shapes={"x": {2: length}, "positions": {0: length}},
    )
    x, positions = draw(2, 4, 21, 8), torch.arange(21)
    got = program.module()(x, positions)
    torch.testing.assert_close(got, layer(x, positions), atol=1e-6, rtol=1e-6)
    assert set(program.state_dict) == set(dict(layer.named_parameters()))
    called = {n.target for n in program.graph.nodes if n.op == "call_function"}
    assert all(str(target).startswith(("aten.", "<built-in")) for target in called)


@given(
    q=st.lists(st.integers(-50, 2000), max_size=4),
    k=st.lists(st.integers(-50, 2000), max_size=4),
    name=st.sampled_from([n for n in LAYERS if "fire" not in n]),
)
def test_any_positions_match_numpy(q, k, name):
    layer = built(LAYERS[name])
    q, k = (torch.tensor(p, dtype=torch.int64) for p in (q, k))
    want = numpy_layer(layer)(q.numpy(), k.numpy())
    np.testing.assert_allclose(layer(q, k).detach(), want, atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------------ errors


@pytest.mark.parametrize("name", LAYERS)
def test_config_rebuilds_the_layer(name):
    layer = LAYERS[name]().to(torch.bfloat16)
    other = type(layer)(**layer.config())
    other.load_state_dict(layer.state_dict())
    assert other.config() == layer.config() and torch.equal(other(Q, K), layer(Q, K))
    assert ShawScores(**shaw().double().config()).weight.dtype == torch.float64


def test_repr_shows_arguments_that_are_not_default():
    assert repr(LAYERS["alibi"]()) == "AlibiBias(4)"
    want = "T5Bias(4, num_buckets=10, max_distance=30, bidirectional=False)"
    assert repr(LAYERS["t5, decoder"]()) == want
    assert repr(KerpleBias(4, form="power")) == "KerpleBias(4, form='power')"
    want = "FireBias(4, width=3, c=0.7, threshold=5.0, eps=0.001)"
    assert repr(LAYERS["fire, short"]()) == want
    assert repr(shaw()) == "ShawScores(8, max_left=3, max_right=1)"


@pytest.mark.rejects
@pytest.mark.parametrize("name", LAYERS)
def test_invalid_positions_are_rejected(name):
    layer = LAYERS[name]()
    with pytest.raises(ValueError, match="k_positions must be finite, got nan"):
        layer([0.0], [1.0, float("nan")])
    with pytest.raises(TypeError, match="q_positions must be integers or reals, got bool"):
        layer(torch.tensor([True]), [0])
    with pytest.raises(ValueError, match="must have the same batch, got 2 and 3"):
        layer(torch.zeros(2, 4), torch.zeros(3, 4))


WRONG: dict[str, Any] = {"form": "x"}


@pytest.mark.rejects
@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: AlibiBias(0), "num_heads must be positive, got 0"),
        (lambda: AlibiBias(2, max_bias=-1.0), "max_bias must be positive and finite"),
        (lambda: T5Bias(2, num_buckets=7), "must be even and at least 4 if bidirectional"),
        (lambda: T5Bias(2, num_buckets=-7), "num_buckets must be positive, got -7"),
        (lambda: T5Bias(2, weight=torch.ones(3, 2)), r"weight must have shape \(32, 2\)"),
        (lambda: KerpleBias(2, **WRONG), "form must be 'log' or 'power', got 'x'"),
        (lambda: KerpleBias(2, r1=[1.0]), r"r1 must have shape \(2,\), got \(1,\)"),
        (
            lambda: KerpleBias(1, r1=torch.ones(1), r2=torch.ones(1).double()),
            "r1 and r2 must have one dtype, got float32 and float64",
        ),
        (lambda: FireBias(2, threshold=0.0), "threshold must be positive and finite"),
        (lambda: ShawScores(4, max_left=-1, max_right=0), "max_left must be at least 0"),
        (
            lambda: shaw()(torch.ones(2, 8), torch.ones(2, 7), [0, 1], [0, 1]),
            r"k must have shape \(..., length, 8\), got \(2, 7\)",
        ),
        (
            lambda: shaw()(torch.ones(2, 8), torch.ones(2, 8), [0], [0, 1]),
            "q_positions must have one entry for each of the 2 rows of q, got 1",
        ),
    ],
)
def test_invalid_arguments_are_rejected(build, message):
    with pytest.raises(ValueError, match=message):
        build()
