"""Calls reuse the kernel arguments of a layer, which are never outdated."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from firstlayer.torch import (
    Embedding,
    EmbeddingLayer,
    LearnedPositions,
    SinusoidalPositions,
)
from firstlayer.torch.optim import RowAdamW

IDS = torch.tensor([[3, 1, 4], [1, 5, 0]])


def build(seed=0, **options):
    torch.manual_seed(seed)
    options = {"max_positions": 6, "layer_norm": True, "padding_idx": 0, **options}
    layer = EmbeddingLayer(7, 8, **options)
    norm: Any = layer.norm
    if norm is not None:
        with torch.no_grad():
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    return layer


def planned(**options):
    """Return a layer that has a plan, which a second call has used."""
    layer = build(**options)
    with torch.no_grad():
        want = layer(IDS)
        assert vars(layer)["_plan"] is not None
        calls = vars(layer)["_plan"]
        assert torch.equal(layer(IDS), want) and vars(layer)["_plan"] is calls
    return layer


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def train(layer):
    optimizer = RowAdamW(layer.parameters(), lr=0.1)
    for ids in (IDS, IDS[:1], IDS[1:]):
        with torch.enable_grad():
            layer(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    layer.optimizer = [optimizer]


def new(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def assign(module, name, value):
    setattr(module, name, value)


def swap_to_half(layer):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# Everything that a plan depends on, each changed by itself.
CHANGES = {
    "token weight replaced": lambda x: assign(x.token, "weight", nn.Parameter(new(7, 8))),
    "token data replaced": lambda x: assign(x.token.weight, "data", new(7, 8)),
    "token swapped": lambda x: torch.utils.swap_tensors(
        x.token.weight, nn.Parameter(new(7, 8))
    ),
    "token written": lambda x: x.token.weight.mul_(3),
    "token transposed": lambda x: assign(x.token.weight, "data", new(8, 7).T),
    "token view": lambda x: assign(x.token.weight, "data", x.token.weight.data.flip(0)),
    "token module replaced": lambda x: assign(x, "token", Embedding(7, 8)),
    "token resized": lambda x: x.token.resize(9, init="zeros"),
    "token parametrized": lambda x: parametrize.register_parametrization(
        x.token, "weight", Doubled()
    ),
    "token padding": lambda x: assign(x.token, "padding_idx", 3),
    "token sparse": lambda x: assign(x.token, "sparse", True),
    "token frequencies": lambda x: assign(x.token, "scale_grad_by_freq", True),
    "token frozen": lambda x: x.token.weight.requires_grad_(False),
    "all frozen": lambda x: x.requires_grad_(False),
    "token view of its memory": lambda x: assign(
        x.token.weight, "data", x.token.weight.data.view(8, 7).T
    ),
    "token max_norm": lambda x: assign(x.token, "max_norm", 0.01),
    "token hook": lambda x: x.token.register_forward_hook(lambda m, a, y: 2 * y),
    "token forward": lambda x: assign(x.token, "forward", lambda ids: new(*ids.shape, 8)),
    "token subclass": lambda x: assign(x.token, "__class__", type("T", (Embedding,), {})),
    "position weight": lambda x: assign(x.position, "weight", nn.Parameter(new(6, 8))),
    "position data": lambda x: assign(x.position.weight, "data", new(6, 8)),
    "position scale": lambda x: assign(x.position, "scale", 3.0),
    "position padding": lambda x: assign(x.position, "padding_idx", 1),
    "position pre-hook": lambda x: x.position.register_forward_pre_hook(
        lambda m, a: (2 * a[0], *a[1:])
    ),
    "position removed": lambda x: assign(x, "position", None),
    "position sinusoidal": lambda x: assign(x, "position", SinusoidalPositions(8)),
    "position module replaced": lambda x: assign(
        x, "position", LearnedPositions(5, 8, row_offset=1, weight=new(6, 8))
    ),
    "segments": lambda x: assign(x, "segment", Embedding(2, 8, _weight=new(2, 8))),
    "norm eps": lambda x: assign(x.norm, "eps", 0.5),
    "norm weight": lambda x: assign(x.norm, "weight", nn.Parameter(new(8))),
    "norm bias data": lambda x: assign(x.norm.bias, "data", new(8)),
    "norm removed": lambda x: assign(x, "norm", None),
    "norm replaced": lambda x: assign(x, "norm", nn.RMSNorm(8)),
    "norm hook": lambda x: x.norm.register_forward_hook(lambda m, a, y: y + 1),
    "norm parametrized": lambda x: parametrize.register_parametrization(
        x.norm, "weight", Doubled()
    ),
    "scale": lambda x: assign(x, "scale", True),
    "zero_padding": lambda x: assign(x, "zero_padding", True),
    "dropout": lambda x: assign(x.dropout, "p", 0.5),
    "dropout in evaluation": lambda x: assign(x.eval().dropout, "p", 0.5),
    "dropout replaced": lambda x: assign(x, "dropout", nn.AlphaDropout(0.5)),
    "dropout hook": lambda x: x.dropout.register_forward_hook(lambda m, a, y: y + 1),
    "bfloat16": lambda x: x.bfloat16(),
    "half by swapping": swap_to_half,
    "float64": lambda x: x.double(),
    "trained by rows": train,
    "trained by rows, evaluated": lambda x: train(x) or x.eval(),
    "loaded": lambda x: x.load_state_dict(build(seed=5).state_dict()),
    "loaded by assignment": lambda x: x.load_state_dict(
        build(seed=5).state_dict(), assign=True
    ),
}


def results(layer, *, gradient):
    """Return the outputs of two calls, and the gradients of all parameters."""
    outputs = []
    with torch.set_grad_enabled(gradient):
        for offset in (0, 2):
            torch.manual_seed(2)
            outputs.append(layer(IDS, offset=offset))
    gradients = []
    if gradient and outputs[1].requires_grad:
        (outputs[0] * outputs[1]).sum().backward()
        gradients = [x.grad for x in layer.parameters() if x.grad is not None]
        assert gradients
    return [x.detach() for x in outputs] + [x.to_dense() for x in gradients]


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_by_the_next_call(change, gradient):
    found = []
    # The second layer never had a plan before it was changed.
    for layer in (planned(), build()):
        with torch.no_grad():
            torch.manual_seed(1)
            CHANGES[change](layer)
        found.append(results(layer, gradient=gradient))
    for ours, want in zip(*found, strict=True):
        assert ours.dtype is want.dtype and torch.equal(ours, want)


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"layer_norm": False}])
def test_gradients_have_the_bits_of_calls_without_a_plan(options):
    layer, other = planned(**options), build(**options)
    gradients = []
    for x in (layer, other):
        for ids, offset in ((IDS[:1, :1], 0), (IDS, 2), (IDS, 1)):
            vars(other)["_plan"] = None
            assert (vars(layer)["_plan"].run(layer, ids, offset)) is not None
            y = x(ids, offset=offset)
            (y * torch.linspace(-1, 2, 8)).square().sum().backward()
        gradients.append([parameter.grad for parameter in x.parameters()])
    for ours, want in zip(*gradients, strict=True):
        assert ours.is_sparse == want.is_sparse
        assert torch.equal(ours.to_dense(), want.to_dense())
    assert gradients[0][0].is_sparse == layer.token.sparse


# Outputs below and above the sizes of large pages and of streaming stores.
@pytest.mark.parametrize("tokens", [(1, 1), (16, 128), (32, 128), (65, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_of_any_size_have_the_bits_of_calls_without_a_plan(tokens, dtype):
    options = {"max_positions": 128, "layer_norm": True, "sparse": True, "dtype": dtype}
    # Rows that are whole cache lines, and rows that are not.
    for width in (512, 520):
        layer, other = (EmbeddingLayer(300, width, **options) for _ in range(2))
        other.load_state_dict(layer.state_dict())
        ids, dy = torch.randint(0, 300, tokens), torch.randn(*tokens, width, dtype=dtype)
        found = []
        for x in (layer, layer, other):
            vars(other).pop("_plan", None)
            x.zero_grad(set_to_none=True)
            y = x(ids)
            y.backward(dy)
            gradients: list[Any] = [parameter.grad for parameter in x.parameters()]
            found.append([y.detach(), *(grad.to_dense() for grad in gradients)])
        assert vars(layer)["_plan"].run(layer, ids, 0) is not None
        for first, planned_, want in zip(*found, strict=True):
            assert torch.equal(first, want) and torch.equal(planned_, want)


@pytest.mark.parametrize("tokens", [(2, 3), (16, 128)])
@pytest.mark.parametrize(
    "options",
    [{}, {"layer_norm": True}, {"position": None, "max_positions": None}],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_checkpointed_calls_have_the_gradients_of_others(tokens, options, steps):
    # The first call makes the plan, and its recomputation uses it.
    gradients = []
    for is_checkpointed in (True, False):
        torch.manual_seed(0)
        layer = EmbeddingLayer(300, 512, **{"max_positions": 128, **options})
        ids = torch.randint(0, 300, tokens)
        for _ in range(steps):
            if is_checkpointed:
                y = checkpoint(layer, ids, use_reentrant=False)
            else:
                y = layer(ids)
            y.sin().sum().backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    for ours, want in zip(*gradients, strict=True):
        assert torch.equal(ours, want) and want.any()


def test_parameters_that_move_are_planned_again_only_by_short_calls():
    layer, long = EmbeddingLayer(300, 512, position=None), torch.arange(300)
    layer(long)
    plan = vars(layer)["_plan"]
    layer.token.weight = nn.Parameter(layer.token.weight.detach() + 1)
    assert torch.equal(layer(long), layer.token.weight) and vars(layer)["_plan"] is plan
    assert torch.equal(layer(long[:2]), layer.token.weight[:2])
    assert vars(layer)["_plan"] is not plan
    assert torch.equal(layer(long), layer.token.weight)


def test_ids_that_change_before_the_backward_are_detected():
    layer, ids = planned(), IDS.clone()
    y = layer(ids)
    ids[0, 0] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"position": None, "max_positions": None}])
def test_results_have_the_bits_of_calls_with_a_gradient(dtype, options):
    layer = planned(dtype=dtype, scale=True, norm_eps=0.1, **options)
    many = torch.arange(7).repeat(2000, 1)[:, :6]
    for ids in (IDS, IDS[:1, :1], IDS[0], IDS.int(), IDS.T, IDS[:0], many):
        want = layer(ids).detach()
        with torch.no_grad():
            assert torch.equal(layer(ids), want)


def test_a_moved_layer_computes_on_its_device():
    layer = planned().to("meta")
    with torch.no_grad():
        assert layer(IDS.to("meta")).device.type == "meta"


def test_copies_and_pickles_have_no_plan():
    layer = planned()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert "_plan" not in vars(other)
        with torch.no_grad():
            other.token.weight.mul_(2)
            assert torch.equal(other(IDS), other(IDS.clone()))
            assert not torch.equal(other(IDS), layer(IDS))
    quantized = layer.quantized("int8")
    assert torch.equal(quantized(IDS), build().quantized("int8")(IDS))


def test_transforms_get_operators():
    layer, twin = planned(), build()
    other = {"token.weight": new(7, 8)}
    with torch.no_grad():
        for x in (other, {}, other):
            got = torch.func.functional_call(layer, x, (IDS,))
            assert torch.equal(got, torch.func.functional_call(twin, x, (IDS,)))
        assert torch.equal(torch.vmap(layer)(IDS), torch.vmap(twin)(IDS))
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(IDS), twin(IDS), atol=1e-6)


def test_errors_are_those_of_other_calls():
    layer = planned()
    with torch.no_grad():
        with pytest.raises(IndexError, match=r"ids\[0, 1\] is 7, but num_embeddings is 7"):
            layer(torch.tensor([[1, 7]]))
        with pytest.raises(ValueError, match="ids must have a length axis"):
            layer(torch.tensor(3))
        with pytest.raises((IndexError, ValueError), match="positions"):
            layer(IDS, offset=4)
        # It has no memory.
        zero = torch.ops.aten._efficientzerotensor((2, 3), dtype=torch.int64, device="cpu")
        with pytest.raises(RuntimeError, match="ZeroTensor"):
            layer(zero)


def test_a_plan_keeps_no_parameter_alive():
    layer = planned()
    weight = weakref.ref(layer.token.weight)
    layer.token.weight = nn.Parameter(new(7, 8))
    norm = weakref.ref(layer.norm)
    layer.norm = nn.LayerNorm(8)
    gc.collect()
    assert weight() is None and norm() is None


def test_two_layers_and_an_outer_hook():
    first, second = planned(), planned(seed=3)
    seen = []
    with torch.no_grad():
        want = first(IDS)
        assert not torch.equal(second(IDS), want)
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: seen.append(type(module).__name__)
        )
        try:
            torch.testing.assert_close(first(IDS), want)
        finally:
            hook.remove()
        assert torch.equal(first(IDS), want)
    assert {"Embedding", "EmbeddingLayer"} <= set(seen)
