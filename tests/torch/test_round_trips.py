"""Embedding after copies, casts, moves and loading, compiled and exported."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from firstlayer.torch.token import Embedding
from tests.support.torch_round_trips import converted, forget_graphs, graphs
from tests.support.torch_tables import ids_of, same_bits

# Inductor and forward-mode AD use torch.jit.script, which torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


ROUND_TRIPS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved_and_loaded,
    "to bfloat16": lambda layer: layer.to(torch.bfloat16),
    "half and back": lambda layer: layer.half().double(),
    "meta and back": lambda layer: layer.to("meta").to_empty(device="cpu"),
    "share_memory": lambda layer: layer.share_memory(),
    "swapped": lambda layer: converted(layer, swap=True),
    "overwritten": lambda layer: converted(layer, swap=False),
}


def test_compiled_half_precision_and_sparse_gradients():
    half = Embedding(4, 3, dtype=torch.bfloat16)
    torch.compile(half, fullgraph=True)(
        torch.ones(3000, dtype=torch.int64)
    ).sum().backward()
    assert half.weight.grad[1].tolist() == [3008.0] * 3
    rows = Embedding(4, 3, sparse=True)
    compiled = torch.compile(rows, fullgraph=True, backend="aot_eager")
    compiled(ids_of(1, 2, 1)).sum().backward()
    assert rows.weight.grad.is_coalesced()
    assert rows.weight.grad.to_dense()[:, 0].tolist() == [0, 2, 1, 0]


def test_compiled_id_out_of_range_raises():
    compiled = torch.compile(Embedding(4, 3), fullgraph=True)
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
        compiled(ids_of(1, 4))


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"max_norm": 1.0}, {"dtype": torch.bfloat16}]
)
def test_exported_lookup_has_only_aten_operators(options):
    layer = Embedding(10, 4, **options)
    layer.weight.data.mul_(3.0)
    length = torch.export.Dim("length")
    ids = torch.tensor([1, 2, 3])
    program = torch.export.export(layer, (ids,), dynamic_shapes=({0: length},))
    more = torch.tensor([5, 2, 2, 9, 1])
    assert same_bits(program.module()(more), layer(more))
    targets = {
        str(node.target) for node in program.graph.nodes if node.op == "call_function"
    }
    assert all(target.startswith("aten.") for target in targets)
    assert "aten.embedding.default" in targets and "aten.to.device" not in targets


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_padding_row_and_hooks_survive_copies_casts_and_moves(round_trip):
    layer = Embedding(4, 3, padding_idx=1, max_norm=1.0, sparse=True)
    layer.set_padding(0.25)
    layer = ROUND_TRIPS[round_trip](layer)
    assert list(layer.state_dict()) == ["weight"]
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert not list(layer.buffers())
    if round_trip != "meta and back":
        assert layer(ids_of(1)).tolist() == [[0.25] * 3]
    nn.init.constant_(layer.weight, 2.0)
    layer(ids_of(1, 2)).sum().backward()
    assert layer.weight.grad.is_coalesced() and layer.weight.grad.indices().tolist() == [
        [2]
    ]
    want = torch.tensor([[2.0], [2.0], [3**-0.5], [2.0]]).expand(4, 3)
    torch.testing.assert_close(layer.weight.detach().float(), want, atol=3e-3, rtol=0)


def test_layers_made_on_the_meta_device():
    with torch.device("meta"):
        layer = Embedding(4, 3, padding_idx=1)
    assert layer(torch.zeros(2, dtype=torch.int64, device="meta")).shape == (2, 3)
    layer.set_padding(2.0)
    assigned = Embedding.from_pretrained(torch.ones(4, 3, device="meta"), padding_idx=1)
    assigned.load_state_dict({"weight": torch.full((4, 3), 6.0)}, assign=True)
    assert assigned(ids_of(1)).tolist() == [[6, 6, 6]]


def test_a_state_that_does_not_fit_changes_nothing():
    layer = Embedding(4, 3, padding_idx=1)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": torch.ones(3, 3)})
    layer.load_state_dict({}, strict=False)
    assert torch.equal(layer.weight, before)


def test_compiled_lookup_is_one_graph_for_all_lengths():
    layer = Embedding(20, 6, padding_idx=3, max_norm=2.0)
    forget_graphs()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (3, 4, 6, 9, 11):
        layer.weight.data.normal_()
        ids = torch.randint(0, 20, (2, length))
        ids[0, 0] = 3
        got = compiled(ids)
        layer.zero_grad()
        (got**2).sum().backward()
        gradient = layer.weight.grad.clone()
        assert not gradient[3].any()
        torch.testing.assert_close(got, layer(ids))
        layer.zero_grad()
        (layer(ids) ** 2).sum().backward()
        torch.testing.assert_close(gradient, layer.weight.grad, atol=1e-5, rtol=1e-5)
        assert layer.weight.detach()[ids[ids != 3]].norm(dim=-1).max() <= 2.00001
    assert graphs() == 1


def test_compiled_lookup_has_the_hook_of_a_new_parameter():
    layer = Embedding(4, 3, padding_idx=1, max_norm=9.0)
    layer.weight = nn.Parameter(torch.full((4, 3), 6.0))
    copied = copy.deepcopy(layer)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    short = torch.full((2, 3), 27.0**0.5)
    torch.testing.assert_close(compiled(ids_of(1, 2)), short)
    compiled(ids_of(2)).sum().backward()
    torch.testing.assert_close(copied.weight.detach()[2], short[0])
