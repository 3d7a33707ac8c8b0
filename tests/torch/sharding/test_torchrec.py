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


def write_shards(rank: Any) -> Any:
    """Copy a sharded table to a ShardedTensor by rows, as sharded collections have."""
    with warnings.catch_warnings():
        # Torch advises to use DTensor instead.
        warnings.simplefilter("ignore")
        from torch.distributed._shard import sharded_tensor as module

    sharded_tensor: Any = module
    sizes = [20, 11]
    part = torch.zeros(sizes[rank.rank], WIDTH)
    shard = sharded_tensor.Shard.from_tensor_and_offsets(
        part, shard_offsets=[20 * rank.rank, 0], rank=rank.rank
    )
    group = rank.mesh.get_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = sharded_tensor.init_from_local_shards(
            [shard], ROWS, WIDTH, process_group=group
        )

    class Collection(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"embedding_bags.a.weight": target}

    weight = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    layer = shard_rows(Embedding(ROWS, WIDTH, _weight=weight), rank.mesh)
    copy_to_torchrec({"a": layer}, Collection())
    return part


def test_tables_are_copied_to_shards(processes):
    parts = processes.run(write_shards, size=2)
    whole = torch.cat(parts)
    assert torch.equal(whole.flatten(), torch.arange(ROWS * WIDTH, dtype=torch.float32))
