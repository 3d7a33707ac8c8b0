"""Tables of TorchRec 1.8.0 as layers, and back into shards."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from firstlayer.torch import Embedding
from firstlayer.torch.sharding import copy_to_torchrec, from_torchrec, shard_rows

ROWS, WIDTH = 31, 6
VALUES, LENGTHS = [0, 1, 30, 5, 7, 7], [3, 1, 1, 1]


def read_collections(rank: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Imported here, in a process that the test started: it takes seconds.
        import torchrec as tr
    torch.manual_seed(0)
    pooling = {"a": tr.PoolingType.SUM, "b": tr.PoolingType.MEAN}
    bags = [
        tr.EmbeddingBagConfig(
            name=n, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[n], pooling=p
        )
        for n, p in pooling.items()
    ]
    device = torch.device("cpu")
    collection: Any = tr.EmbeddingBagCollection(tables=bags, device=device)
    features = tr.KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b"], values=torch.tensor(VALUES), lengths=torch.tensor(LENGTHS)
    )
    layers: Any = from_torchrec(collection)
    want = collection(features)
    for name, layer in layers.items():
        got = layer(features[name].values(), features[name].offsets())
        torch.testing.assert_close(got, want[name])
        table = collection.embedding_bags[name]
        assert layer.sparse and layer.weight.data_ptr() == table.weight.data_ptr()
    config = tr.EmbeddingConfig(
        name="c", embedding_dim=WIDTH, num_embeddings=5, feature_names=["c"]
    )
    single: Any = tr.EmbeddingCollection(tables=[config], device=device)
    sequence: Any = from_torchrec(single)["c"]
    weight = single.embeddings["c"].weight
    assert torch.equal(sequence(torch.tensor([4, 0])), weight[[4, 0]])
    copy_to_torchrec({"c": Embedding(5, WIDTH, _weight=torch.ones(5, WIDTH))}, single)
    assert weight.eq(1).all()
    messages = []
    for call in (
        lambda: from_torchrec(nn.Linear(2, 2)),
        lambda: copy_to_torchrec({"a": sequence}, single),
        lambda: copy_to_torchrec({"c": layers["a"]}, single),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_collections_become_layers(processes):
    assert processes.run(read_collections, size=1) == [[
        "collection must be an EmbeddingBagCollection or EmbeddingCollection that is not "
        "sharded, got Linear",
        "layers must have the tables ['c'], got ['a']",
        "c must have shape (5, 6), got (31, 6)",
    ]]  # fmt: skip


def shard_by_torchrec(rank: Any) -> None:
    """Copy sharded tables to collections that ``DistributedModelParallel`` has sharded."""
    with warnings.catch_warnings():
        # TorchRec warns of its own functions, and an error in a process would leave the
        # other one waiting.
        warnings.simplefilter("ignore")
        for kind in ("sequence", "bags"):
            _shard_by_torchrec(rank, kind)


def _shard_by_torchrec(rank: Any, kind: str) -> None:
    import torchrec as tr
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.types import ShardingEnv

    torch.manual_seed(0)
    group, model = rank.mesh.get_group(), nn.Module()
    options: Any = {"name": "a", "embedding_dim": 8, "num_embeddings": ROWS}
    options |= {"feature_names": ["a"]}
    device = torch.device("cpu")
    if kind == "sequence":
        own: Any = tr.EmbeddingCollection([tr.EmbeddingConfig(**options)], device=device)
        sharders: Any = [EmbeddingCollectionSharder()]
        layout = "row_wise"
    else:
        own = tr.EmbeddingBagCollection([tr.EmbeddingBagConfig(**options)], device=device)
        sharders, layout = [EmbeddingBagCollectionSharder()], "table_wise"
    model.add_module("tables", own)
    layers: Any = from_torchrec(own)
    weight = layers["a"].weight.detach().clone()
    shard_rows(layers["a"], rank.mesh)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, local_world_size=2, compute_device="cpu"),
        batch_size=4,
        constraints={"a": ParameterConstraints(sharding_types=[layout])},
    )
    wrapped: Any = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=planner.collective_plan(model, sharders, group),
        sharders=sharders,
    )
    sharded = wrapped.module.tables
    copy_to_torchrec(layers, sharded)
    features = tr.KeyedJaggedTensor.from_lengths_sync(
        keys=["a"], values=torch.tensor(VALUES), lengths=torch.tensor([4, 2])
    )
    found = sharded(features).wait()["a"]
    rows = weight[VALUES]
    if kind == "sequence":
        assert torch.equal(found.values(), rows)
    else:
        want = torch.stack([rows[:4].sum(0), rows[4:].sum(0)])
        torch.testing.assert_close(found, want)


def test_tables_are_copied_to_collections_that_torchrec_has_sharded(processes):
    processes.run(shard_by_torchrec, size=2)
