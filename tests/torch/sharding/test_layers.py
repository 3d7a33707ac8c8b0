"""Layers, heads and meshes: each sharded model equals the same model in one process."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import firstlayer.torch
from firstlayer.ngram import SaltedNgram
from firstlayer.torch import (
    Embedding,
    EmbeddingLayer,
    GrowingEmbedding,
    HashedEmbedding,
    NgramEmbedding,
    QuotientRemainderEmbedding,
)
from firstlayer.torch.optim import RowAdamW, RowWiseAdagrad, clip_grad_norm_
from firstlayer.torch.sharding import (
    ShardedRows,
    shard_columns,
    shard_rows,
    shard_rows_and_columns,
    sharded_parameters,
)

ROWS = 23


class TiedModel(nn.Module):
    """Lookup and a linear head with the same weight, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(ROWS, 6, padding_idx=5, sparse=True)
        self.head = nn.Linear(6, ROWS)
        self.head.weight = self.table.weight

    def forward(self, ids: Any) -> Any:
        return self.head(self.table(ids).tanh())


def complete() -> Any:
    return EmbeddingLayer(
        ROWS, 6, max_positions=9, segments=2, scale=True, layer_norm=True, padding_idx=5,
        zero_padding=True, sparse=True,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "embedding": lambda: Embedding(ROWS, 5, padding_idx=3, sparse=True),
    "complete layer": complete,
    "n-grams": lambda: NgramEmbedding(SaltedNgram(rows=50), 3, sparse=True, combine="sum"),
    "hashed": lambda: HashedEmbedding(19, 6, hashes=3, sparse=True),
    "quotient and remainder": lambda: QuotientRemainderEmbedding(ROWS, 6, combine="concat"),
    "tied": TiedModel,
}


def built(name: str) -> Any:
    torch.manual_seed(1)
    return MODELS[name]()


FUNCTIONS: dict[str, Any] = {
    "rows": shard_rows,
    "columns": shard_columns,
    "both": shard_rows_and_columns,
}


def shard(model: Any, mesh: Any, *, part: str = "rows", **options: Any) -> Any:
    function = FUNCTIONS[part]
    if isinstance(model, TiedModel):
        function(model.table, mesh, head=model.head, **options)
    else:
        function(model, mesh, **options)
    return model


def batch(rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS, (2, 4), generator=generator)


def average_others(model: Any, group: Any) -> None:
    """Average the gradients of parameters that are not shards, as DDP does."""
    shards = sharded_parameters(model)
    for parameter in model.parameters():
        if parameter not in shards and parameter.grad is not None:
            grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            torch.distributed.all_reduce(grad, group=group)
            parameter.grad = grad / torch.distributed.get_world_size(group)


def train(model: Any, ranks: list[int], *, after_backward: Any = None) -> list[float]:
    """Take four steps on the mean loss of some ranks, and return the norms."""
    optimizer = RowAdamW(model.parameters(), lr=0.05, weight_decay=0.2)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        losses = []
        for rank in ranks:
            out = model(batch(rank, step))
            factors = torch.arange(out.numel()).view(out.shape) / 9 + rank
            losses.append((out.sin() * factors).sum())
        torch.stack(losses).mean().backward()
        if after_backward is not None:
            after_backward()
        norms.append(float(clip_grad_norm_(model.parameters(), 2.0)))
        optimizer.step()
    return norms


def whole_state(model: Any) -> dict[str, Any]:
    state = model.state_dict()
    return {k: v.full_tensor() if hasattr(v, "mesh") or hasattr(v, "device_mesh") else v
            for k, v in state.items()}  # fmt: skip


def train_sharded(rank: Any, name: str, kind: str) -> Any:
    part = kind.partition(",")[0]
    mesh = rank.grid if "grid" in kind or part == "both" else rank.mesh
    options: dict[str, Any] = {"part": part}
    number = rank.rank
    if "replicated" in kind:
        options["input_layouts"] = Replicate()
        # Ranks of one row of the grid have the same ids.
        number = rank.rank // 2 if "grid" in kind else 0
    model = shard(built(name), mesh, **options)
    group = rank.mesh.get_group()
    norms = train(model, [number], after_backward=lambda: average_others(model, group))
    for parameter in sharded_parameters(model):
        assert parameter.shape != built(name).state_dict().popitem()[1].shape
    return norms, whole_state(model)


CASES = [
    *[(name, "rows", 2) for name in MODELS],
    *[(name, "rows, grid", 4) for name in ("embedding", "tied")],
    *[(name, "columns", 2) for name in ("embedding", "tied", "complete layer", "hashed")],
    *[
        (name, f"{part}, replicated", 2)
        for name in ("tied",)
        for part in ("rows", "columns")
    ],
    ("tied", "rows, replicated, grid", 4),
    ("embedding", "columns, grid", 4),
    *[(name, "both", 4) for name in ("embedding", "tied", "complete layer")],
    ("tied", "both, replicated", 4),
]


@pytest.mark.filterwarnings("ignore:the gradient of a table of:UserWarning")
@pytest.mark.parametrize(("name", "kind", "size"), CASES)
def test_training_equals_that_of_one_process(processes, name, kind, size):
    results = processes.run(train_sharded, name, kind, size=size)
    model = built(name)
    batches = size
    if "replicated" in kind:
        batches = 2 if "grid" in kind else 1
    norms = train(model, list(range(batches)))
    want = model.state_dict()
    for got_norms, state in results:
        assert got_norms == pytest.approx(norms, rel=1e-4)
        assert state.keys() == want.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, want[key], rtol=1e-4, atol=1e-5)
    # Replicas have the same bits.
    for _, state in results[1:]:
        for key, value in state.items():
            assert torch.equal(value, results[0][1][key])


def compile_rest(rank: Any) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = built("embedding")
            self.linear = nn.Linear(5, 3)

        def forward(self, ids: Any) -> Any:
            return self.linear(self.table(ids)).square()

    model = Model()
    style: Any = ShardedRows(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, rank.mesh, {"table": style})
    compiled: Any = torch.compile(model, backend="eager")
    ids = batch(0, 0)
    with warnings.catch_warnings():
        # The compiler reads .grad of the table's output.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
        out = compiled(ids)
    out.sum().backward()
    assert model.table.weight.grad is not None
    return out.detach(), model.linear(built("embedding")(ids)).square().detach()


def test_the_rest_of_a_model_compiles(processes):
    results = processes.run(compile_rest, size=2)
    for (out, _), want in zip(results, results[0][1].chunk(2, 1), strict=True):
        torch.testing.assert_close(out, want)


def tie_in_a_plan(rank: Any) -> None:
    model, reference = built("tied"), built("tied")
    plan: Any = {"table": ShardedRows(), "head": ShardedRows()}
    parallelize_module(model, rank.mesh, plan)
    assert model.head.weight is model.table.weight
    ids = batch(rank.rank, 0)
    torch.testing.assert_close(model(ids), reference(ids))
    state = whole_state(model)
    for key, value in reference.state_dict().items():
        assert torch.equal(state[key], value)
    with pytest.raises(ValueError, match="Linear with the weight of a sharded table"):
        parallelize_module(nn.Linear(6, ROWS), rank.mesh, ShardedRows())


def test_a_plan_keeps_heads_tied(processes):
    processes.run(tie_in_a_plan, size=2)


def wrap_in_ddp(rank: Any) -> Any:
    model: Any = nn.Sequential(built("embedding"), nn.Linear(5, 3))
    reference = copy.deepcopy(model)
    shard_rows(model[0], rank.mesh)
    names = [n for n, p in model.named_parameters() if p in sharded_parameters(model)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model, process_group=rank.mesh.get_group())
    wrapped(batch(rank.rank, 0)).square().sum().backward()
    losses = [reference(batch(n, 0)).square().sum() for n in range(2)]
    (torch.stack(losses).sum() / 2).backward()
    want = model[0].shard.part(reference[0].weight.grad.to_dense())
    torch.testing.assert_close(torch.Tensor(model[0].weight.grad.to_dense()), want)
    torch.testing.assert_close(model[1].weight.grad, reference[1].weight.grad)


def test_ddp_around_the_rest_leaves_the_table_alone(processes):
    processes.run(wrap_in_ddp, size=2)


def draw(rank: Any, columns: bool) -> Any:
    torch.manual_seed(7 + rank.rank)
    large = Embedding(3000, 6, padding_idx=2500, device="meta")
    layer = EmbeddingLayer(
        40, 6, position=None, padding_idx=1, scale=True, device="meta", sparse=True
    )
    function = shard_columns if columns else shard_rows
    for each in (function(large, rank.mesh), function(layer, rank.mesh)):
        each.to_empty(device="cpu")
        each.reset_parameters()
    large.set_padding(torch.arange(6.0))
    return whole_state(large)["weight"], whole_state(layer)["token.weight"]


@pytest.mark.parametrize("columns", [False, True])
def test_initial_values_do_not_depend_on_the_number_of_ranks(processes, columns):
    tables = [processes.run(draw, columns, size=size) for size in (1, 3, 4)]
    large, token = tables[0][0]
    for result in tables:
        for each in result:
            assert torch.equal(each[0], large) and torch.equal(each[1], token)
    assert torch.equal(large[2500], torch.arange(6.0))
    others = torch.cat([large[:2500], large[2501:]])
    # Blocks are drawn from seeds of their own.
    assert others.unique(dim=0).shape == others.shape
    assert abs(float(others.std()) - 1) < 0.02 and abs(float(others.mean())) < 0.03
    assert token[1].eq(0).all() and 0.3 < float(token.std()) < 0.5


def behave_as_layers(rank: Any) -> None:
    model = built("tied")
    state = copy.deepcopy(model.state_dict())
    sharded = shard(built("tied"), rank.mesh)
    # Whole tables load, and other shapes are errors.
    sharded.load_state_dict({k: v + 1 for k, v in state.items()})
    for key, value in whole_state(sharded).items():
        assert torch.equal(value, state[key] + 1)
    with pytest.raises(RuntimeError, match="size mismatch for table.weight"):
        sharded.load_state_dict({**state, "table.weight": torch.zeros(4, 6)})
    sharded.load_state_dict(state)
    # A copy has its own parameter and the same shard.
    other = copy.deepcopy(sharded)
    with torch.no_grad():
        other.table.weight.zero_()
    assert other.head.weight is other.table.weight
    assert whole_state(other)["table.weight"].eq(0).all()
    assert torch.equal(whole_state(sharded)["table.weight"], state["table.weight"])
    assert other(batch(rank.rank, 0)).shape == (2, 4, ROWS)
    # Evaluation corrects stale rows and leaves the table as it is.
    optimizer = RowAdamW(sharded.table.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        sharded.table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    memory = _memory(sharded.table)
    sharded.eval()
    with torch.no_grad():
        rows = sharded.table(torch.arange(ROWS))
    assert torch.equal(memory, _memory(sharded.table))
    assert torch.equal(rows, whole_state(sharded)["table.weight"])


def _memory(table: Any) -> Any:
    """Return a copy of the memory of a table, stale rows included."""
    with torch._C.DisableTorchFunctionSubclass():
        return table.weight.detach().clone()


def test_sharded_layers_behave_as_layers(processes):
    processes.run(behave_as_layers, size=2)


def refuse(rank: Any) -> list[str]:
    mesh = rank.mesh
    trained = built("embedding")
    optimizer = RowAdamW(trained.parameters())
    trained(torch.tensor([1])).sum().backward()
    optimizer.step()
    sharded: Any = shard_rows(built("embedding"), mesh)
    by_columns: Any = shard_columns(built("embedding"), mesh)
    sharded(torch.tensor([1])).sum().backward()
    calls: list[Callable[[], Any]] = [
        lambda: shard_rows(nn.Embedding(3, 2), mesh),
        lambda: shard_rows(GrowingEmbedding(3, 2), mesh),
        lambda: shard_rows(trained, mesh),
        lambda: shard_rows(sharded, mesh),
        lambda: shard_rows(built("embedding"), mesh, input_layouts=Shard(1)),
        lambda: shard_rows(built("embedding"), mesh, output_layouts=Shard(1)),
        lambda: shard_rows(built("embedding"), mesh, head=nn.Linear(5, ROWS)),
        lambda: shard_rows(built("hashed"), mesh, input_layouts=Replicate(),
                           output_layouts=Shard(1)),
        lambda: shard_columns(Embedding(3, 2, max_norm=1.0), mesh),
        lambda: RowWiseAdagrad(by_columns.parameters()),
        lambda: shard_rows_and_columns(built("embedding"), mesh),
        lambda: shard_rows_and_columns(built("hashed"), mesh),
        lambda: sharded.resize(50),
        lambda: firstlayer.torch.save("unused", shard_rows(complete(), mesh)),
        lambda: shard_rows(complete(), mesh).quantized(),
        lambda: torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0),
        lambda: clip_grad_norm_(sharded.parameters(), 1.0, norm_type=0),
    ]  # fmt: skip
    messages = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_wrong_arguments_are_errors(processes):
    first, second = processes.run(refuse, size=2)
    assert first == second == [
        "shard_rows needs a layer of firstlayer.torch with a table in memory, "
        "got torch.nn.Embedding",
        "shard_rows needs a layer of firstlayer.torch with a table in memory, "
        "got GrowingEmbedding",
        "shard_rows needs a table that is an ordinary parameter without an optimizer, "
        "got RowParameter",
        "shard_rows needs a layer of firstlayer.torch with a table in memory, "
        "got ShardedEmbedding",
        "input_layouts must be Shard(0) or Replicate(), got S(1)",
        "output_layouts must be None or Replicate(), or Shard(n) with "
        "input_layouts=Replicate(), got S(1)",
        "head must be a torch.nn.Linear with the weight of the table",
        "output_layouts must be None for bags, got S(1)",
        "max_norm and scale_grad_by_freq need whole rows, but columns are sharded",
        "an optimizer with one number for each row needs whole rows, "
        "got a table whose columns are sharded",
        "mesh must have 2 axes, got 1",
        "shard_rows_and_columns needs an Embedding, got EmbeddingBag",
        "a sharded table cannot be resized; resize it before shard_rows",
        "save needs whole tensors, but token.weight is sharded; save the state_dict with "
        "torch.distributed.checkpoint",
        "a sharded table cannot be quantized; quantize the whole table",
        "the norm of the gradient of a sharded table needs all ranks; "
        "use firstlayer.torch.optim.clip_grad_norm_",
        "norm_type must be positive for sharded gradients, got 0.0",
    ]  # fmt: skip


def raise_in_layers(rank: Any) -> list[str]:
    messages = []
    right, wrong = torch.tensor([[1, 2]]), torch.tensor([[1.5, 2.0]])
    for name in ("complete layer", "n-grams", "hashed", "quotient and remainder"):
        model = shard(built(name), rank.mesh)
        with pytest.raises((TypeError, ValueError)) as caught:
            model(wrong if rank.rank == 1 else right)
        messages.append(str(caught.value))
        model(right)
    columns = shard(built("tied"), rank.mesh, part="columns")
    for call in (columns, columns.table.logits):
        given: Any = torch.tensor([[99]]) if call is columns else torch.ones(2, 5)
        other = right if call is columns else torch.ones(2, 6)
        with pytest.raises((IndexError, ValueError)) as error:
            call(given if rank.rank == 1 else other)
        messages.append(str(error.value))
    return messages


def raise_on_a_grid(rank: Any, part: str, replicated: bool) -> list[str]:
    layout = Replicate() if replicated else None
    table: Any = FUNCTIONS[part](built("embedding"), rank.grid, input_layouts=layout)
    # The ranks 2 and 3 are the second replica.
    is_wrong = rank.rank >= 2 if replicated else rank.rank == 3
    messages = []
    for call, right, wrong in (
        (table, torch.tensor([1]), torch.tensor([23])),
        (table.logits, torch.ones(2, 5), torch.ones(2, 4)),
    ):
        with pytest.raises((IndexError, ValueError)) as caught:
            call(wrong if is_wrong else right)
        messages.append(str(caught.value))
        call(right).sum().backward()
    return messages


@pytest.mark.parametrize(
    ("part", "replicated"), [("rows", False), ("rows", True), ("both", False)]
)
def test_errors_are_raised_by_all_ranks_of_a_grid(processes, part, replicated):
    results = processes.run(raise_on_a_grid, part, replicated, size=4)
    for number, messages in enumerate(results):
        # Replicated ids are wrong on two ranks, one of each group of replicas.
        rank = 2 + number % 2 if replicated else 3
        assert messages == [
            f"ids[0] is 23, but num_embeddings is 23, on rank {rank}",
            f"x must end in embedding_dim 5, got shape (2, 4), on rank {rank}",
        ]


def test_errors_in_arguments_of_layers_are_raised_by_all(processes):
    first, second = processes.run(raise_in_layers, size=2)
    assert first == second == [
        "ids must be integers, got float32, on rank 1",
        "ids must be integers, got torch.float32, on rank 1",
        "ids must be integers, got float32, on rank 1",
        "ids must be integers, got float32, on rank 1",
        "ids[0, 0] is 99, but num_embeddings is 23, on rank 1",
        "x must end in embedding_dim 6, got shape (2, 5), on rank 1",
    ]  # fmt: skip
