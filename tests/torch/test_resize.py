"""``resize``: another number of rows."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import pytest
import torch

from firstlayer.torch.token import Embedding
from tests.support.torch_tables import ids_of


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_resize_follows_seeds():
    def grown(**options):
        layer = Embedding(4, 3, _weight=torch.randn(4, 3))
        layer.resize(6, init="gaussian", **options)
        return layer.weight.detach()

    torch.manual_seed(3)
    a = grown()
    torch.manual_seed(3)
    assert torch.equal(a, grown())
    assert not torch.equal(a[4:], grown(rng=5)[4:])
    layer = Embedding(2, 3)
    layer.resize(4, init=torch.full((2, 3), 9.0))
    assert layer.weight[2:].tolist() == [[9] * 3] * 2


@pytest.mark.rejects
def test_resize_refuses_to_drop_padding():
    layer = Embedding(4, 3, padding_idx=3)
    with pytest.raises(ValueError, match="must leave the padding row 3 in place, got 2"):
        layer.resize(2)
    assert layer.num_embeddings == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resize_keeps_rows_and_the_parameter(dtype):
    layer = Embedding(4, 3, padding_idx=1, dtype=dtype)
    layer.set_padding(7.0)
    weight, before = layer.weight, layer.weight.detach().clone()
    layer(ids_of(0)).sum().backward()
    what = layer.resize(6)
    # All empty ranges are equal, but this one is shown.
    assert str(what) == "Resized(kept=range(0, 4), added=range(4, 6), dropped=range(6, 6))"
    assert (
        layer.weight is weight and layer.num_embeddings == 6 and layer.weight.grad is None
    )
    assert torch.equal(weight[:4], before)
    mean = before[[0, 2, 3]].double().mean(0).to(dtype)
    assert torch.equal(weight[4:].detach(), mean.expand(2, 3))
    layer(ids_of(5, 1)).sum().backward()
    assert weight.grad.shape == (6, 3) and not weight.grad[1].any()
    layer.resize(2)
    assert layer(ids_of(1)).tolist() == [[7] * 3]
