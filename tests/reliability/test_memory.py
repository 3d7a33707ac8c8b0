"""Kernels stay inside their arrays: ids changed by a thread, and replaced weights."""

import numpy as np
import pytest
import torch

import firstlayer.numpy as fn
import firstlayer.torch as ft
from tests.support.memory_races import CASES
from tests.support.run_alone import run_alone


@pytest.mark.parametrize("front_end", ["numpy", "torch"])
def test_ids_changed_during_a_call_give_valid_rows_or_an_index_error(front_end):
    # In another process: reading outside of an array would end it.
    names = [name for name in CASES if name.startswith(front_end)]
    output = run_alone(
        f"""
        from tests.support.memory_races import CASES
        errors = 0
        for name in {names!r}:
            counts = CASES[name](0.15)
            errors += counts["errors"]
        print(errors)
        """
    )
    assert int(output) > 0


IDS = np.array([[1, 2, 9], [0, 3, 4]])


def rejects(message: str, call) -> None:
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        call()


@pytest.mark.rejects
@pytest.mark.parametrize("layer_class", [fn.Embedding, fn.EmbeddingBag])
@pytest.mark.parametrize("size", [2, 2000])
def test_the_shape_of_a_replaced_numpy_weight_counts(layer_class, size):
    layer, ids = layer_class(10, 4, rng=0), np.resize(IDS, (size, 3))
    layer.weight = weight = layer.weight[:5].copy()
    assert layer.num_embeddings == 5 and layer.embedding_dim == 4
    for call in (layer, layer.vjp):
        rejects(r"ids\[0, 2\] is 9, but num_embeddings is 5", lambda call=call: call(ids))
    layer.weight = np.random.default_rng(0).standard_normal((10, 3))
    want = layer.weight[ids] if layer_class is fn.Embedding else layer.weight[ids].mean(1)
    np.testing.assert_allclose(layer(ids), want, rtol=1e-12)
    # A view that is not contiguous, and one that is read-only.
    layer.weight = np.repeat(weight, 2, axis=0)[::2, ::2]
    valid = ids % 5
    want = weight[:, ::2][valid]
    want = want if layer_class is fn.Embedding else want.mean(1)
    np.testing.assert_allclose(layer(valid), want, rtol=1e-6)
    layer.weight = layer.weight.copy()
    layer.weight.flags.writeable = False
    np.testing.assert_allclose(layer(valid), want, rtol=1e-6)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.ones((10, 4), np.int64), "weight must be float64, .*, got int64"),
        (np.ones((10, 4), ">f4"), "weight must be .* in native byte order, got >f4"),
        (np.ma.masked_equal(np.ones((10, 4)), 0), "weight must not be a masked array"),
        (np.ones(40), r"weight must have 2 axes, got shape \(40,\)"),
        ([[1.0] * 4] * 10, "weight must be a NumPy array, got list"),
        (None, "weight must be a NumPy array, got NoneType"),
    ],
)
def test_a_replaced_numpy_weight_that_is_no_table_is_refused(weight, message):
    layers = fn.Embedding(10, 4), fn.EmbeddingBag(10, 4)
    for layer in layers:
        layer.weight = weight
        rejects(message, lambda layer=layer: layer(IDS))
    complete = fn.EmbeddingLayer(10, 4, max_positions=5, segments=2)
    for table in complete.embeddings().values():
        before, table.weight = table.weight, weight
        rejects(message, lambda: complete(IDS))
        table.weight = before
    complete(IDS)


@pytest.mark.rejects
def test_replaced_tables_of_the_complete_numpy_layer_are_checked():
    layer = fn.EmbeddingLayer(10, 4, max_positions=5, segments=2, layer_norm=True, rng=0)
    want = layer(IDS)
    messages = {
        "token": r"ids\[0, 2\] is 9, but num_embeddings is 5",
        "position": "positions must be smaller than max_positions 2",
        "segment": "segments.* is 0, but the number of segments is 0",
    }
    rows = {"token": 5, "position": 2, "segment": 0}
    for key, table in layer.embeddings().items():
        name, before = key.split(".")[0], table.weight
        table.weight = before[: rows[name]].copy()
        rejects(messages[name], lambda: layer(IDS, segments=0 * IDS))
        table.weight = before[:, :3].copy()
        rejects(f"the {name} table must have embedding_dim 4 columns", lambda: layer(IDS))
        table.weight = before
    norm = layer.norm
    layer.norm = np.ones(3), np.ones(3)
    rejects(r"the norm must have shape \(4,\), got \(3,\)", lambda: layer(IDS))
    layer.norm = norm
    np.testing.assert_array_equal(layer(IDS), want)


@pytest.mark.rejects
def test_replaced_numpy_positions_are_checked():
    layer, x = fn.LearnedPositions(9, 4, rng=0), np.zeros((2, 6, 4))
    layer.table.weight = layer.weight[:5].copy()
    rejects("positions must be smaller than max_positions 5, got 5", lambda: layer(x))
    layer.table.weight = np.ones((9, 1))
    rejects("x must", lambda: layer(x))


def replaced(layer, name, weight, how):
    """Replace a parameter of a torch layer in one of several ways."""
    *path, last = name.split(".")
    module = layer.get_submodule(".".join(path))
    parameter = getattr(module, last)
    if how == "parameter":
        setattr(module, last, torch.nn.Parameter(weight))
    elif how == "data":
        parameter.data = weight
    else:
        with torch.no_grad():
            parameter.set_(weight)


@pytest.mark.rejects
@pytest.mark.parametrize("how", ["parameter", "data", "set_"])
def test_the_shape_of_a_replaced_torch_weight_counts(how):
    ids = torch.from_numpy(IDS)
    for layer in (
        ft.Embedding(10, 4),
        ft.Embedding(10, 4, sparse=True),
        ft.EmbeddingBag(10, 4),
        ft.EmbeddingBag(10, 4, mode="max"),
    ):
        replaced(layer, "weight", layer.weight.detach()[:5].clone(), how)
        rejects(
            r"ids\[0, 2\] is 9, but num_embeddings is 5", lambda layer=layer: layer(ids)
        )
        assert layer(ids % 5).shape[-1] == 4
        replaced(layer, "weight", layer.weight.detach()[:, :3].clone(), how)
        assert layer(ids % 5).shape[-1] == 3
    layer = ft.EmbeddingLayer(10, 4, max_positions=5, segments=2, layer_norm=True)
    for name in ("token", "position", "segment"):
        before = getattr(layer, name).weight.detach().clone()
        for weight in (before[:1], before[:, :3]):
            replaced(layer, f"{name}.weight", weight.clone(), how)
            rejects("is|must", lambda: layer(ids, segments=ids % 2))
        replaced(layer, f"{name}.weight", before, how)
    assert layer(ids, segments=ids % 2).isfinite().all()


@pytest.mark.rejects
def test_a_table_whose_memory_is_freed_is_refused():
    layer = ft.EmbeddingLayer(10, 4, position=None)
    layer.token.weight.untyped_storage().resize_(0)
    rejects("memory of a table must not be freed", lambda: layer(torch.from_numpy(IDS)))
