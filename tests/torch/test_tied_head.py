"""``logits``: the output head tied to the table."""

# A gradient is None before the first backward.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from firstlayer.torch.token import Embedding
from tests.support.gradients import central_difference
from tests.support.run_alone import run_alone
from tests.support.torch_tables import ids_of


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_logits_are_products_with_every_row(padding_idx):
    layer = Embedding(5, 3, padding_idx=padding_idx, dtype=torch.float64)
    if padding_idx is not None:
        layer.set_padding(0.5)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    weight = layer.weight.detach().clone().numpy()
    xs = x.detach().numpy().copy()
    got = layer.logits(x)
    np.testing.assert_allclose(got.detach().numpy(), xs @ weight.T, atol=1e-12)
    (got**2).sum().backward()
    want = central_difference(lambda: float(((xs @ weight.T) ** 2).sum()), weight)
    np.testing.assert_allclose(layer.weight.grad.numpy(), want, atol=1e-6)
    want = central_difference(lambda: float(((xs @ weight.T) ** 2).sum()), xs)
    np.testing.assert_allclose(x.grad.numpy(), want, atol=1e-6)


@pytest.mark.rejects
def test_logits_check_the_width():
    with pytest.raises(
        ValueError, match=r"x must end in embedding_dim 3, got shape \(2, 4\)"
    ):
        Embedding(5, 3).logits(torch.ones(2, 4))


def test_autocast_changes_logits_and_not_lookups():
    layer = Embedding(5, 3, padding_idx=1)
    x = torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(ids_of(1, 2)).dtype == torch.float32
        got = layer.logits(x)
    want = F.linear(x.bfloat16(), layer.weight.bfloat16()).float()
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_logits_have_the_dtype_of_the_input():
    layer = Embedding(5, 3, padding_idx=1, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    got = layer.logits(torch.ones(3))
    assert got.dtype == torch.float32 and got.tolist() == [3, 3, 3, 3, 3]
    got = Embedding(5, 3).logits(torch.ones(3, dtype=torch.float16))
    assert got.dtype == torch.float16


def test_compiled_logits_pass_the_gradient_of_every_row():
    layer = Embedding(6, 3, padding_idx=1)
    layer.set_padding(2.0)
    x = torch.randn(4, 3)
    compiled = torch.compile(layer.logits, fullgraph=True, backend="aot_eager")
    got = compiled(x)
    torch.testing.assert_close(got, x @ layer.weight.T)
    got.sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(6, 3))


def test_a_tied_head_trains_the_padding_row_as_in_torch():
    layer = Embedding(6, 3, padding_idx=1, dtype=torch.float64)
    layer.set_padding(0.5)
    stock = nn.Embedding(6, 3, padding_idx=1, dtype=torch.float64)
    stock.load_state_dict(layer.state_dict())
    ids = ids_of(1, 4, 1)
    (layer.logits(layer(ids)) ** 2).sum().backward()
    (F.linear(stock(ids), stock.weight) ** 2).sum().backward()
    torch.testing.assert_close(layer.weight.grad, stock.weight.grad)
    assert layer.weight.grad[1].all()


def test_logits_of_distributed_tables(tmp_path):
    # Each rank has another x, as in data-parallel training.
    run_alone(
        """
        import os

        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

        from firstlayer.torch import Embedding

        child = os.fork()
        rank = 1 if child == 0 else 0
        dist.init_process_group(
            "gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2
        )
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        float64 = {"dtype": torch.float64}
        table, xs = torch.randn(5, 4, **float64), torch.randn(2, 3, 4, **float64)
        dys = torch.randn(2, 3, 5, **float64)
        close = torch.testing.assert_close
        for placement in (Shard(0), Shard(1), Replicate()):
            layer = Embedding(5, 4, padding_idx=2, **float64)
            layer.weight = torch.nn.Parameter(distribute_tensor(table, mesh, [placement]))
            x = xs[rank].clone().requires_grad_()
            y = layer.logits(x)
            assert type(y) is torch.Tensor
            y.backward(dys[rank])
            close(y, x @ table.T)
            close(x.grad, dys[rank] @ table)
            grad, layer.weight.grad = layer.weight.grad, None
            assert grad.placements == (placement,)
            close(grad.full_tensor(), (dys[0].T @ xs[0] + dys[1].T @ xs[1]) / 2)
            shared = distribute_tensor(xs[0], mesh, [Replicate()])
            y = layer.logits(shared)
            assert isinstance(y, DTensor)
            y.full_tensor().backward(dys[0])
            close(layer.weight.grad.full_tensor(), dys[0].T @ xs[0])
        dist.destroy_process_group()
        if rank == 0:
            assert os.waitpid(child, 0)[1] == 0
    """,
        folder=tmp_path,
    )
