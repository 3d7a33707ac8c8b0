"""Short rotations and bags reuse the kernel arguments of a layer, which never get outdated.

The same for the complete layer is in ``test_layer_plan.py``.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from firstlayer.torch import EmbeddingBag, RotaryPositions
from firstlayer.torch.optim import RowAdamW

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IDS, OFFSETS = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([0, 2, 2, 5])


def assign(target, name, value):
    setattr(target, name, value)


def new(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


# Bags


def bag(seed=0, *, width=8, **options):
    torch.manual_seed(seed)
    return EmbeddingBag(7, width, **{"mode": "sum", **options})


def planned_bag(**options):
    """Return a layer that has a plan, which computes what the layer does without it."""
    layer = bag(**options)
    with torch.no_grad():
        want, plan = layer(IDS, OFFSETS), vars(layer)["_plan"]
        assert torch.equal(plan.run(layer, IDS, OFFSETS), want)
        assert torch.equal(layer(IDS, OFFSETS), want) and vars(layer)["_plan"] is plan
    return layer


def train(layer):
    optimizer = RowAdamW(layer.parameters(), lr=0.1)
    for ids in (IDS, IDS.flip(0)):
        with torch.enable_grad():
            layer(ids, OFFSETS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    layer.optimizer = [optimizer]


BAG_CHANGES = {
    "weight replaced": lambda x: assign(x, "weight", nn.Parameter(new(7, 8))),
    "weight data": lambda x: assign(x.weight, "data", new(7, 8)),
    "weight swapped": lambda x: torch.utils.swap_tensors(x.weight, nn.Parameter(new(7, 8))),
    "weight view": lambda x: assign(x.weight, "data", x.weight.data.view(8, 7).T),
    "weight narrowed": lambda x: assign(x.weight, "data", x.weight.data[:6]),
    "weight written": lambda x: x.weight.mul_(3),
    "resized": lambda x: x.resize(9, init="zeros"),
    "mean": lambda x: assign(x, "mode", "mean"),
    "max": lambda x: assign(x, "mode", "max"),
    "last offset": lambda x: assign(x, "include_last_offset", True),
    "padding": lambda x: assign(x, "padding_idx", 1),
    "max_norm": lambda x: assign(x, "max_norm", 0.01),
    "output device": lambda x: assign(x, "output_device", "cpu"),
    "bfloat16": lambda x: x.bfloat16(),
    "trained by rows": train,
    "trained by rows, evaluated": lambda x: train(x) or x.eval(),
    "loaded": lambda x: x.load_state_dict(bag(5).state_dict(), assign=True),
}


@pytest.mark.parametrize("change", BAG_CHANGES)
def test_a_changed_bag_is_seen_by_the_next_call(change):
    outputs = []
    # The second layer never had a plan before it was changed.
    for layer in (planned_bag(), bag()):
        with torch.no_grad():
            BAG_CHANGES[change](layer)
            outputs.append([layer(IDS, OFFSETS) for _ in range(2)])
    for ours, want in zip(*outputs, strict=True):
        assert ours.dtype is want.dtype and torch.equal(ours, want)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("width, dtype", [(3, torch.float32), (70, torch.bfloat16)])
@pytest.mark.parametrize("has_end", [False, True])
def test_bags_have_the_bits_of_other_calls(mode, width, dtype, has_end):
    options = {"mode": mode, "width": width, "dtype": dtype}
    layer = planned_bag(**options, include_last_offset=has_end)
    other = bag(**options, include_last_offset=has_end)
    with torch.no_grad():
        for offsets in ([0], [0, 0, 5, 5], [0, 1, 2, 3, 4], [0, 5]):
            got = layer(IDS, torch.tensor(offsets))
            vars(other).pop("_plan", None)
            assert torch.equal(got, other(IDS, torch.tensor(offsets)))
            assert torch.equal(got, layer(IDS.int(), torch.tensor(offsets)))
            assert torch.equal(got, layer(IDS.repeat(2, 1).T[:, 0], torch.tensor(offsets)))


def test_errors_of_bags_are_those_of_other_calls():
    layer = planned_bag()
    with torch.no_grad():
        for ids, offsets, message in [
            ([1, 7], [0], r"ids\[1\] is 7, but num_embeddings is 7"),
            ([1, -1], [0], r"ids\[1\] is -1"),
            ([1, 2], [1], "offsets must begin with 0, got 1"),
            ([1, 2], [0, 2, 1], "offsets must not decrease, got 1 after 2"),
            ([1, 2], [0, 3], "offsets must be at most 2"),
        ]:
            with pytest.raises((IndexError, ValueError), match=message):
                layer(torch.tensor(ids), torch.tensor(offsets))
        # It has no memory.
        zero = torch.ops.aten._efficientzerotensor((5,), dtype=torch.int64, device="cpu")
        with pytest.raises(RuntimeError, match="ZeroTensor"):
            layer(zero, OFFSETS)


def test_gradients_of_bags_after_calls_without():
    layer, other = planned_bag(), bag()
    for x in (layer, other):
        x(IDS, OFFSETS).square().sum().backward()
    ours, want = layer.weight.grad, other.weight.grad
    assert ours is not None and want is not None and torch.equal(ours, want)
    frozen = planned_bag().requires_grad_(False)
    assert torch.equal(frozen(IDS, OFFSETS), other(IDS, OFFSETS))


# Rotations


def rotary(**options):
    return RotaryPositions(8, **{"heads_axis": -3, **options})


def queries(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def planned_rotary(x, **options):
    """Return a layer that has a plan, which computes what the layer does without it."""
    layer = rotary(**options)
    want, plan = layer(x, offset=700), vars(layer)["_plan"]
    got = plan.run(layer, x, 700)
    assert got is not None and got.dtype is want.dtype and torch.equal(got, want)
    assert torch.equal(layer(x, offset=700), want) and vars(layer)["_plan"] is plan
    return layer


ROTARY_CHANGES = {
    "layout": lambda x: assign(x, "layout", "interleaved"),
    "heads_axis": lambda x: assign(x, "heads_axis", -2),
    "moved": lambda x: x.to("meta").to("cpu"),
    "cast": lambda x: x.double(),
    "buffer cast": lambda x: assign(x, "bits", x.bits.float()),
    "buffer replaced": lambda x: assign(x, "bits", x.bits.flip(-1)),
    "buffer data": lambda x: assign(x.bits, "data", x.bits.flip(-1)),
    "buffer written": lambda x: x.bits.copy_(x.bits.flip(-1)),
    "frequencies": lambda x: (assign(x, "frequencies", x.frequencies / 2), x._build()),
}


@pytest.mark.parametrize("change", ROTARY_CHANGES)
def test_a_changed_rotary_layer_is_seen_by_the_next_call(change):
    x, outputs = queries(1, 1, 1, 8), []
    # The second layer never had a plan before it was changed.
    for layer in (planned_rotary(x), rotary()):
        ROTARY_CHANGES[change](layer)
        outputs.append([layer(x, offset=offset) for offset in (700, 3)])
    for ours, want in zip(*outputs, strict=True):
        assert torch.equal(ours, want)


@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_to_half"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_axis", [None, -3, -2])
def test_rotations_have_the_bits_of_other_calls(layout, dtype, heads_axis):
    options = {"layout": layout, "heads_axis": heads_axis, "rotary_dim": 6, "base": 50.0}
    one = queries(2, 1, 3, 8) if heads_axis == -2 else queries(2, 3, 1, 8)
    one = one.to(dtype)
    layer = planned_rotary(one, **options)
    other = rotary(**options)
    swapped = one.transpose(1, 2).contiguous().transpose(1, 2)
    # The stride of an axis of one vector is arbitrary.
    strides = [99 if n == 1 else s for n, s in zip(one.shape, one.stride(), strict=True)]
    odd = one.as_strided(one.shape, strides)
    for x in (one, one[0:1], swapped, odd, one.flip(0), queries(2, 2, 2, 8)):
        for offset in (-5, 2**24 - 2, 2**20):
            vars(other).pop("_plan", None)
            got, want = layer(x, offset=offset), other(x, offset=offset)
            assert torch.equal(got, want) and got.stride() == want.stride()


def test_errors_of_rotations_are_those_of_other_calls():
    layer = planned_rotary(queries(1, 2, 1, 8), heads_axis=None)
    with pytest.raises(ValueError, match="smaller than 16777216 in size"):
        layer(queries(1, 2, 1, 8), offset=2**24)
    with pytest.raises(ValueError, match="heads_axis must be given"):
        layer(queries(2, 1, 8))
    with pytest.raises(RuntimeError, match="ZeroTensor"):
        layer(torch.ops.aten._efficientzerotensor((1, 2, 1, 8), device="cpu"))
    with pytest.raises(ValueError, match=r"x must have shape \(..., length, 8\)"):
        layer(queries(1, 2, 1, 6))


def test_gradients_and_transforms_of_rotations_after_calls_without():
    x = queries(1, 2, 1, 8)
    layer, other = planned_rotary(x), rotary()
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for rotate, leaf in zip((layer, other), leaves, strict=True):
        (rotate(leaf, offset=9) * new(8)).sum().backward()
    ours, want = (leaf.grad for leaf in leaves)
    assert ours is not None and want is not None and torch.equal(ours, want)
    with torch.no_grad():
        assert torch.equal(layer(leaves[0], offset=9), other(x, offset=9))
    mapped = torch.vmap(lambda row: layer(row, offset=9))(x[None])[0]
    assert torch.equal(mapped, other(x, offset=9))


@pytest.mark.parametrize("kind", ["bag", "rotary"])
def test_copies_have_no_plan_and_plans_keep_nothing_alive(kind):
    if kind == "bag":
        layer, call = planned_bag(), lambda x: x(IDS, OFFSETS)
    else:
        x = queries(1, 2, 1, 8)
        layer, call = planned_rotary(x), lambda layer: layer(x, offset=5)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert "_plan" not in vars(other)
        assert torch.equal(call(other), call(layer))
    table = weakref.ref(layer.weight if kind == "bag" else layer.bits)
    if kind == "bag":
        layer.weight = nn.Parameter(new(7, 8))
    else:
        layer.reset_parameters()
    gc.collect()
    assert table() is None
