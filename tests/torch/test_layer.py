"""The complete layer on torch: values and gradients, by kernels and by plain operators."""

import copy
import gc
import json
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from firstlayer.torch.layer import EmbeddingLayer
from firstlayer.torch.learned import LearnedPositions
from firstlayer.torch.optim import RowAdamW
from firstlayer.torch.sinusoidal import SinusoidalPositions
from firstlayer.torch.token import Embedding
from tests.support.torch_layers import (
    CONFIGURATIONS,
    IDS,
    POSITIONS,
    SEGMENTS,
    arguments,
    build,
    gradients,
    is_fused,
    numpy_arguments,
    twin,
)
from tests.support.torch_round_trips import plain_operators

# Inductor and forward-mode AD use parts of torch.jit, which torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


# Values and gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_every_configuration_equals_the_numpy_layer_bit_by_bit(options, dtype):
    layer = build(norm_eps=0.01, dtype=dtype, **options)
    want = twin(layer)(IDS.numpy(), **numpy_arguments(layer)).astype(float)
    assert is_fused(layer, IDS, **arguments(layer))
    got = layer(IDS, **arguments(layer))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.detach().double().numpy(), want)


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_plain_operators_and_kernels_agree(options):
    layer = build(norm_eps=0.01, **options)
    y = layer(IDS, **arguments(layer))
    dy = torch.randn_like(y)
    want = gradients(layer, y, dy)
    with plain_operators():
        assert not is_fused(layer, IDS, **arguments(layer))
        plain = layer(IDS, **arguments(layer))
        got = gradients(layer, plain, dy)
    torch.testing.assert_close(plain, y, atol=1e-12, rtol=0)
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-11, rtol=0)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("options", CONFIGURATIONS[::3])
def test_gradients_equal_those_of_the_numpy_layer(options, sparse):
    layer = build(sparse=sparse, **options)
    other = twin(layer)
    y = layer(IDS, **arguments(layer))
    dy = torch.randn_like(y)
    got = gradients(layer, y, dy)
    _, pull = other.vjp(IDS.numpy(), **numpy_arguments(layer))
    for name, want in pull(dy.numpy()).items():
        want = want.dense(len(got[name])) if hasattr(want, "dense") else want
        np.testing.assert_allclose(got[name].numpy(), want, atol=1e-12)


@pytest.mark.parametrize("options", [CONFIGURATIONS[k] for k in (0, 3, 6, 15, 19, 31, 46)])
def test_first_and_second_derivatives_equal_finite_differences(options):
    layer = build(**{**options, "padding_idx": None, "zero_padding": False})
    names = [name for name, _ in layer.named_parameters()]

    def rows(*values):
        state = dict(zip(names, values, strict=True))
        return functional_call(layer, state, (IDS[:, :2],))

    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert is_fused(layer, IDS)
    assert torch.autograd.gradcheck(rows, values)
    assert torch.autograd.gradgradcheck(rows, values)


def test_plain_operators_have_second_derivatives_too():
    layer, x = build(layer_norm=True), torch.randn(1, 2, 6).double().requires_grad_()
    with plain_operators():
        assert torch.autograd.gradgradcheck(lambda x: layer(inputs_embeds=x), x)


def test_batched_gradients_equal_a_loop():
    layer = build(layer_norm=True, segments=3, scale=True)
    y = layer(IDS, **arguments(layer))
    dys = torch.randn(3, *y.shape, dtype=torch.float64)
    weights = list(layer.parameters())
    got = torch.autograd.grad(y, weights, dys, is_grads_batched=True, retain_graph=True)
    for k, dy in enumerate(dys):
        want = torch.autograd.grad(y, weights, dy, retain_graph=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a[k], b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", CONFIGURATIONS[::5])
def test_inputs_embeds_enter_after_the_lookup_and_have_a_gradient(options):
    layer = build(**options)
    mask = layer.mask(IDS) if layer.zero_padding else None
    rows = layer.token(IDS).detach().requires_grad_()
    call = {**arguments(layer), "inputs_embeds": rows, "mask": mask}
    assert is_fused(layer, **call)
    torch.testing.assert_close(layer(**call), layer(IDS, **arguments(layer)))
    assert torch.autograd.gradcheck(lambda x: layer(**{**call, "inputs_embeds": x}), rows)
    torch.testing.assert_close(
        layer(IDS, **{**call, "mask": None}), layer(IDS, **arguments(layer))
    )


def test_real_positions_train_both_neighbouring_rows():
    layer, ids = build(layer_norm=True), torch.tensor([3, 5])
    where = torch.tensor([2.25, 0.5], dtype=torch.float64, requires_grad=True)
    assert is_fused(layer, ids, positions=where)
    got = layer(ids, positions=where)
    want = torch.from_numpy(twin(layer)(ids.numpy(), positions=where.detach().numpy()))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    weight = layer.position.weight

    def loss(weight, where):
        state = {"position.weight": weight}
        return functional_call(layer, state, (ids,), {"positions": where})

    assert torch.autograd.gradcheck(loss, (weight.detach().clone().requires_grad_(), where))


def test_an_offset_for_each_row_equals_calls_on_the_rows():
    layer = build(layer_norm=True)
    got = layer(IDS, offset=torch.tensor([4, 1]))
    assert torch.equal(got[0], layer(IDS[0], offset=4))
    assert torch.equal(got[1], layer(IDS[1], offset=1))
    assert not torch.allclose(got[0], layer(IDS[0]))


def test_a_position_module_may_be_given():
    position = LearnedPositions(
        4, 6, row_offset=2, padding_idx=1, scale=0.5, dtype=torch.float64
    )
    layer = build(position=position)
    want = layer.token(torch.tensor([5])) + 0.5 * position.weight[3]
    got = layer(torch.tensor([5]), positions=[1])
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    marian = SinusoidalPositions.marian(6, base=50.0)
    layer = build(position=marian)
    want = layer.token(IDS) + marian.encode(torch.arange(3, 7), dtype=torch.float64)
    torch.testing.assert_close(layer(IDS, offset=3), want, atol=1e-12, rtol=0)
    cells = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
    plane = SinusoidalPositions(6, axes=2, odd="sine")
    layer = build(position=plane)
    want = layer.token(IDS) + plane.encode(cells, dtype=torch.float64)
    torch.testing.assert_close(layer(IDS, positions=cells), want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint64])
def test_ids_may_have_any_integer_dtype(dtype):
    layer = build(layer_norm=True, segments=3)
    got = layer(IDS.to(dtype), segments=SEGMENTS.to(dtype), positions=POSITIONS.to(dtype))
    assert torch.equal(got, layer(IDS, segments=SEGMENTS, positions=POSITIONS))
    assert torch.equal(layer(IDS.tolist()), layer(IDS))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (1,), (2, 3, 4)])
def test_ids_may_have_any_shape(shape):
    layer = build(layer_norm=True)
    ids = torch.randint(7, shape)
    want = twin(layer)(ids.numpy())
    got = layer(ids)
    assert got.shape == (*shape, 6)
    np.testing.assert_array_equal(got.detach().numpy(), want)
    bare = build(position=None, scale=True)
    assert torch.equal(bare(torch.tensor(4)), bare(torch.tensor([4]))[0])
    assert layer([[], []]).shape == (2, 0, 6)


# Half precision, threads, sparse gradients


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("plain", [False, True])
def test_half_precision_equals_the_rounded_float32_result(plain, dropout):
    half = build(dtype=torch.bfloat16, layer_norm=True, segments=2, dropout=dropout)
    upcast = copy.deepcopy(half).float()
    with plain_operators() if plain else nullcontext():
        torch.manual_seed(1)
        got = half(IDS)
        torch.manual_seed(1)
        want = upcast(IDS)
    assert torch.equal(got, want.to(torch.bfloat16))


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision_layers_do_not_saturate(dtype, layer_norm):
    layer = EmbeddingLayer(
        3, 2, max_positions=1, segments=1, dtype=dtype, layer_norm=layer_norm
    )
    y = layer(torch.ones(3000, 1, dtype=torch.int64))
    y.backward(torch.ones_like(y))
    if layer_norm:
        assert layer.norm is not None
        torch.testing.assert_close(layer.norm.bias.grad, torch.full((2,), 3000.0).to(dtype))
        return
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad[-1 if "token" not in name else 1] == 3000).all(), name


@pytest.mark.parametrize("sparse", [False, True])
def test_results_do_not_depend_on_the_number_of_threads(sparse):
    torch.manual_seed(0)
    layer = EmbeddingLayer(
        500, 96, max_positions=64, layer_norm=True, segments=2, sparse=sparse
    )
    ids = torch.randint(500, (40, 64))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            y = layer(ids, segments=ids % 2)
            dy = torch.sin(torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape)
            results.append([y, *gradients(layer, y, dy).values()])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients_equal_dense_ones_and_are_coalesced(dtype):
    dense = build(layer_norm=True, dtype=dtype)
    rows = build(layer_norm=True, dtype=dtype, sparse=True)
    rows.load_state_dict(dense.state_dict())
    dy = torch.randn(2, 4, 6).to(dtype)
    want = gradients(dense, dense(IDS), dy)
    rows(IDS).backward(dy)
    grad = rows.token.weight.grad
    assert grad is not None and grad.is_sparse and grad.is_coalesced()
    assert grad.indices()[0].tolist() == [1, 2, 4, 6]
    assert torch.equal(grad.to_dense(), want["token.weight"])
    rows(IDS).backward(dy)
    assert rows.token.weight.grad is not None and rows.token.weight.grad.is_coalesced()


# Padding and dropout


@pytest.mark.parametrize("plain", [False, True])
def test_zero_padding_zeroes_after_the_norm_and_passes_no_gradient(plain):
    layer = build(layer_norm=True, zero_padding=True, segments=2)
    with plain_operators() if plain else nullcontext():
        got = layer(IDS)
        assert (got[0, 3] == 0).all() and (got[1, 2:] == 0).all()
        assert (got[0, :3] != 0).all()
        y = layer(torch.zeros(2, 4, dtype=torch.int64))
        for value in gradients(layer, y, torch.ones_like(y)).values():
            assert (value == 0).all()


@pytest.mark.parametrize("norm_eps", [1e-5, 0.0])
@pytest.mark.parametrize("plain", [False, True])
def test_nan_at_padding_does_not_reach_any_gradient(norm_eps, plain):
    layer = build(layer_norm=True, norm_eps=norm_eps, zero_padding=True)
    x, results = torch.randn(2, 4, 6, dtype=torch.float64), []
    for padding in (1.0, torch.nan):
        x[IDS == 0] = padding
        embeds = x.clone().requires_grad_()
        with plain_operators() if plain else nullcontext():
            y = layer(IDS, inputs_embeds=embeds)
            trained = [p for n, p in layer.named_parameters() if n != "token.weight"]
            results.append([y, *torch.autograd.grad(y.sum(), [embeds, *trained])])
    assert len(results[0]) == 5
    for clean, other in zip(*results, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, other)


@pytest.mark.parametrize("sparse", [False, True])
def test_lookups_pass_no_gradient_to_padding_rows(sparse):
    position = LearnedPositions(6, 6, row_offset=2, padding_idx=1, dtype=torch.float64)
    layer = build(position=position, layer_norm=True, sparse=sparse)
    position.set_padding(0.25)
    layer.token.set_padding(torch.arange(6.0))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    where = torch.tensor([[0, 1, 2, -1], [0, 1, -1, -1]])
    assert is_fused(layer, IDS, positions=where)
    layer(IDS, positions=where).square().sum().backward()
    token_grad, position_grad = layer.token.weight.grad, position.weight.grad
    assert token_grad is not None and position_grad is not None
    assert (token_grad.to_dense()[0] == 0).all() and (position_grad[1] == 0).all()
    optimizer.step()
    assert layer.token.weight[0].tolist() == list(range(6))
    assert (position.weight[1] == 0.25).all()
    with torch.no_grad():
        layer.token.weight[0] = position.weight[1] = -5
    layer(IDS, positions=where)
    assert (layer.token.weight[0] == -5).all() and (position.weight[1] == -5).all()


@pytest.mark.parametrize("hooked", [False, True])
def test_lookups_catch_up_and_install_hooks_with_and_without_kernels(hooked):
    tables = []
    for sparse in (False, True):
        layer = build(padding_idx=None, segments=3, sparse=sparse, dtype=torch.float32)
        if hooked:
            layer.token.register_forward_hook(lambda *_: None)
        assert is_fused(layer, IDS) != hooked
        options: Any = {"lr": 0.1, "weight_decay": 0.5}
        make = RowAdamW if sparse else torch.optim.AdamW
        optimizer = make(layer.parameters(), **options)
        for ids in ([[1, 2]], [[3, 3]], [[2, 4]]):
            optimizer.zero_grad()
            layer(torch.tensor(ids)).square().sum().backward()
            grad: Any = layer.token.weight.grad
            assert not sparse or grad.is_coalesced()
            optimizer.step()
        tables.append(layer.state_dict()["token.weight"])
    torch.testing.assert_close(*tables)


def test_dropout_drops_its_share_after_the_norm_and_keeps_the_mean():
    torch.manual_seed(0)
    layer = EmbeddingLayer(5, 400, position=None, dropout=0.3, layer_norm=True)
    with torch.no_grad():
        for value in layer.norm.parameters():  # pyright: ignore
            value.fill_(7 * (value[0] == 0))
    ids = torch.ones(50, dtype=torch.int64)
    dropped = layer(ids)
    gone = dropped == 0
    assert gone.double().mean().item() == pytest.approx(0.3, abs=0.02)
    torch.testing.assert_close(dropped[~gone], torch.full_like(dropped[~gone], 10.0))
    assert (layer.eval()(ids) == 7).all()
    layer = build(dropout=1.0).train()
    assert (layer(IDS) == 0).all()


def test_dropout_module_may_be_active_in_eval_hooked_or_replaced():
    layer = EmbeddingLayer(9, 64, max_positions=8, dropout=0.5).eval()
    still, seen = layer(IDS), []
    layer.dropout.train()
    assert (layer(IDS) == 0).double().mean().item() == pytest.approx(0.5, abs=0.1)
    layer.dropout.eval().register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(layer(IDS), still) and seen == [1]
    layer.dropout = torch.nn.Identity()  # pyright: ignore
    assert torch.equal(layer.train()(IDS), still)
    assert layer.config()["dropout"] == 0.0


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_the_default_device_is_ignored(position):
    longest = 8 if position == "learned" else None
    layer = EmbeddingLayer(9, 4, position=position, max_positions=longest, layer_norm=True)
    want, seed = layer(IDS), torch.randn(2, 4, 4)
    wanted = torch.autograd.grad(want, list(layer.parameters()), seed)
    with torch.device("meta"):
        got = layer(IDS)
        gradients = torch.autograd.grad(got, list(layer.parameters()), seed)
    assert torch.equal(got, want)
    assert all(map(torch.equal, gradients, wanted))


# Hooks and replaced submodules


def test_half_precision_norm_with_hook_is_called_and_gives_the_same():
    layer: Any = EmbeddingLayer(
        9, 4, max_positions=5, layer_norm=True, dtype=torch.bfloat16, scale=True
    )
    ids, seen = torch.tensor([[1, 2]]), []
    want = layer(ids)
    layer.norm.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(ids), want)
    assert seen == [1]
    layer(ids).pow(2).sum().backward()
    assert type(layer.norm.weight) is torch.nn.Parameter
    gradient = layer.norm.weight.grad
    assert gradient is not None and gradient.dtype == torch.bfloat16


def test_submodules_with_hooks_or_another_forward_are_called():
    layer: Any = build(layer_norm=True, segments=2)
    want, seen = layer(IDS), []
    for part in (layer.token, layer.position, layer.segment, layer.norm):
        handle = part.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(layer(IDS), want)
        handle.remove()
    assert len(seen) == 4 and is_fused(layer, IDS)
    layer.token.forward = lambda ids: torch.zeros(*ids.shape, 6).double()
    assert not torch.allclose(layer(IDS), want)


def test_submodules_may_be_replaced():
    layer: Any = build(layer_norm=True)
    ids = torch.tensor([[1, 2]])
    layer.token = Embedding(7, 6, max_norm=0.5, dtype=torch.float64)
    layer.norm = nn.RMSNorm(6, dtype=torch.float64)
    want = layer.norm(layer.token(ids) + layer.position.weight[:2])
    torch.testing.assert_close(layer(ids), want)
    layer.norm = nn.LayerNorm(6, dtype=torch.float32)
    layer.token = Embedding(7, 6, dtype=torch.float64)
    total = (layer.token(ids) + layer.position.weight[:2]).double()
    want = nn.functional.layer_norm(total, (6,))
    torch.testing.assert_close(layer(ids), want)


def test_a_shorter_table_is_not_read_beyond_its_end():
    layer = build(padding_idx=None)
    layer.token.weight = nn.Parameter(torch.ones(3, 6, dtype=torch.float64))
    with pytest.raises(IndexError, match="is 4, but num_embeddings is 3"):
        layer(IDS)


@pytest.mark.parametrize("fused", [False, True])
def test_without_a_norm_tables_may_change_before_the_backward(fused):
    layer = build()
    with nullcontext() if fused else plain_operators():
        y = layer(IDS)
        with torch.no_grad():
            layer.token.weight += 1
        assert gradients(layer, y, torch.ones_like(y))["token.weight"][1, 0] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    layer = build(layer_norm=True, segments=3, dtype=dtype)
    want = layer(IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(IDS)
        with plain_operators():
            plain = layer(IDS)
        logits = layer.logits(got)
    assert got.dtype == plain.dtype == dtype
    assert torch.equal(got, want)
    torch.testing.assert_close(
        plain, want, atol=1e-2 if dtype != torch.float32 else 1e-6, rtol=0
    )
    assert logits.dtype == dtype


# Parameters, config, repr


def test_state_dict_has_one_entry_per_parameter():
    layer = build(layer_norm=True, segments=2)
    assert list(layer.state_dict()) == [
        "token.weight",
        "position.weight",
        "segment.weight",
        "norm.weight",
        "norm.bias",
    ]
    assert list(build(position="sinusoidal").state_dict()) == ["token.weight"]


@pytest.mark.parametrize("options", CONFIGURATIONS[::5])
def test_config_and_state_build_an_equal_layer(options):
    layer = build(dropout=0.25, norm_eps=0.5, sparse=True, **options).eval()
    config = layer.config()
    other = EmbeddingLayer(**config).eval()
    assert other.config() == config and json.loads(json.dumps(config)) == config
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(IDS), layer(IDS))


def test_standard_deviation_of_initial_tables():
    torch.manual_seed(0)
    layer = EmbeddingLayer(2000, 64, max_positions=300, segments=500, padding_idx=3)
    for name in ("token.weight", "position.weight", "segment.weight"):
        std = layer.get_parameter(name).std().item()
        assert std == pytest.approx(0.02, rel=0.03), name
    assert (layer.token.weight[3] == 0).all()
    scaled = EmbeddingLayer(2000, 64, position=None, scale=True)
    assert scaled(torch.arange(2000)).std().item() == pytest.approx(1, rel=0.02)
    with torch.no_grad():
        for value in layer.parameters():
            value.fill_(9)
    layer.reset_parameters()
    assert layer.position.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert (layer.token.weight[3] == 0).all()


def test_tied_head_reads_and_trains_the_token_table():
    layer = build(padding_idx=None)
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(layer.logits(x), x @ layer.token.weight.T)
    weight = layer.token.weight.detach().clone().requires_grad_()

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, ids):
            return self.layer.logits(self.layer(ids))

    tied = Tied()
    assert torch.autograd.gradcheck(
        lambda w: functional_call(tied, {"layer.token.weight": w}, (IDS,)), weight
    )


def test_subclasses_have_the_config_and_repr_of_their_base():
    class Positions(LearnedPositions):
        def __init__(self, size: int):
            super().__init__(size, 6, scale=0.5)

    class Layer(EmbeddingLayer):
        def __init__(self, size: int):
            super().__init__(size, 6, position=None, segments=2)

    want = EmbeddingLayer(9, 6, position=None, segments=2).config()
    assert Layer(9).config() == want and "num_embeddings" in want
    assert Positions(4).config() == LearnedPositions(4, 6, scale=0.5).config()
    assert "Positions()" in repr(Positions(4))


def test_repr_shows_the_options():
    text = repr(build(scale=True, layer_norm=True))
    assert "scale=True" in text and "padding_idx=0" in text and "LayerNorm((6,)" in text


@pytest.mark.parametrize(
    "options",
    [
        {"padding_idx": 0},
        {"max_norm": 0.01},
        {"scale_grad_by_freq": True},
        {"sparse": True},
    ],
)
def test_replaced_segment_tables_keep_their_options(options):
    layer = build(segments=3, dtype=torch.float32)
    layer.segment = Embedding(3, 6, **options)
    segments = torch.tensor([[0, 1, 1, 2]] * 2)
    ids = torch.tensor([[1, 2, 3, 4]] * 2)
    y = layer(ids, segments=segments)
    y.square().sum().backward()
    table: Any = layer.segment.weight
    got = table.grad
    layer.zero_grad()
    with plain_operators():
        want = layer(ids, segments=segments)
        want.square().sum().backward()
    torch.testing.assert_close(y, want)
    assert got.is_sparse == bool(options.get("sparse"))
    torch.testing.assert_close(got.to_dense(), table.grad.to_dense())


@pytest.mark.parametrize("layer_norm", [False, True])
def test_backward_frees_the_saved_tensors(layer_norm):
    layer = build(layer_norm=layer_norm, dtype=torch.float32)
    embeds = torch.randn(2, 4, 6, requires_grad=True)
    x = embeds * 2
    y, kept = layer(inputs_embeds=x), weakref.ref(x)
    del x
    y.sum().backward()
    gc.collect()
    assert kept() is None and y.grad_fn is not None
