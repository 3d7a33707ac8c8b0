"""The complete layer compiled, exported, transformed, copied and moved."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, jvp, vmap

from firstlayer.torch.layer import EmbeddingLayer
from tests.support.torch_layers import (
    IDS,
    SEGMENTS,
    build,
    gradients,
)
from tests.support.torch_round_trips import ROUND_TRIPS, built

# Inductor and forward-mode AD use parts of torch.jit, which torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


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
        # The first call may count an additional graph of Inductor itself.
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


@pytest.mark.parametrize("position", ["sinusoidal", None])
def test_other_positions_compile_without_a_break(position):
    layer = build(position=position, layer_norm=True)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(IDS, offset=2), layer(IDS, offset=2), atol=1e-12, rtol=0
    )


def test_segments_of_static_size_with_ids_of_dynamic_size():
    layer, segments = build(segments=3), (IDS[0] % 3).tolist()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    got, want = (f(IDS, segments=segments) for f in (compiled, layer))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_exported_layer_equals_the_layer():
    layer = build(**FULL).eval()
    length = torch.export.Dim("length", min=2, max=9)
    program = torch.export.export(
        layer, (IDS,), {"segments": SEGMENTS},
        dynamic_shapes={"ids": {1: length}, "segments": {1: length}},
    )  # fmt: skip
    got = program.module()(IDS[:, :3], segments=SEGMENTS[:, :3])
    torch.testing.assert_close(got, layer(IDS[:, :3], segments=SEGMENTS[:, :3]))


def test_transforms_equal_loops():
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
    results = grad(loss)({name: value.detach() for name, value in state.items()})
    for name in wanted:
        torch.testing.assert_close(results[name], wanted[name], atol=1e-11, rtol=0)
    tangents = {name: torch.randn_like(value) for name, value in state.items()}
    tangents["token.weight"][0] = 0
    moved = jvp(loss, (state,), (tangents,))[1]
    expected = sum((wanted[name] * tangents[name]).sum() for name in wanted)
    torch.testing.assert_close(moved, expected)


def test_layer_on_the_meta_device():
    layer = EmbeddingLayer(
        7, 6, max_positions=9, segments=3, layer_norm=True, padding_idx=0, device="meta"
    )
    assert layer(IDS.to("meta")).shape == (2, 4, 6)
    state = build(layer_norm=True, segments=3).state_dict()
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer(IDS), build(layer_norm=True, segments=3)(IDS))


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_output_is_unchanged_by_copies_casts_and_moves(round_trip):
    def make():
        return EmbeddingLayer(
            7, 6, position="sinusoidal", layer_norm=True, segments=2, padding_idx=0
        )

    want = built(make)(IDS)
    got = ROUND_TRIPS[round_trip](make)(IDS)
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=0)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_do_not_share_parameters(again):
    layer = build(layer_norm=True)
    other = again(layer)
    assert torch.equal(other(IDS), layer(IDS))
    with torch.no_grad():
        other.norm.bias += 1
    assert not torch.equal(other(IDS), layer(IDS))
