"""Short calls reuse the kernel arguments of a layer, which are never outdated."""

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

from firstlayer.numpy import (
    Embedding,
    EmbeddingLayer,
    LearnedPositions,
    SinusoidalPositions,
)
from firstlayer.optim import RowAdamW

IDS = np.array([[3, 1, 4], [1, 5, 0]])


def build(seed=0, **options):
    options = {"max_positions": 6, "layer_norm": True, "padding_idx": 0, **options}
    layer = EmbeddingLayer(7, 8, rng=seed, **options)
    rng = np.random.default_rng(seed)
    if layer.norm is not None:
        for x in layer.norm:
            x[:] = rng.uniform(0.5, 2, 8)
    return layer


def planned(**options):
    """Return a layer that has a plan, which a second call has used."""
    layer = build(**options)
    want, plan = layer(IDS), vars(layer)["_plan"]
    out = plan.run(layer, IDS, 0)
    assert out is not None and out.dtype == want.dtype and np.array_equal(out, want)
    assert np.array_equal(layer(IDS), want) and vars(layer)["_plan"] is plan
    return layer


def assign(target, name, value):
    setattr(target, name, value)


def new(*shape, dtype: Any = np.float32):
    return np.linspace(-1, 1, np.prod(shape), dtype=dtype).reshape(shape)


def transpose_in_place(x):
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        x.strides = x.itemsize, x.itemsize * len(x)


# Everything that a plan depends on, each changed by itself.
CHANGES = {
    "token weight": lambda x: assign(x.token, "weight", new(7, 8)),
    "token rows": lambda x: assign(x.token, "weight", new(9, 8)),
    "token dtype": lambda x: assign(x.token, "weight", new(7, 8, dtype=np.float64)),
    "token transposed": lambda x: assign(x.token, "weight", new(8, 7).T),
    "token strides": lambda x: transpose_in_place(x.token.weight),
    "token written": lambda x: x.token.weight.__imul__(3),
    "token module": lambda x: assign(x, "token", Embedding(7, 8, rng=3)),
    "token resized": lambda x: x.token.resize(9, init="zeros"),
    "token subclass": lambda x: assign(x.token, "__class__", type("T", (Embedding,), {})),
    "position weight": lambda x: assign(x.position.table, "weight", new(6, 8)),
    "position scale": lambda x: assign(x.position, "scale", 3.0),
    "position offset": lambda x: assign(x.position, "row_offset", 1),
    "position removed": lambda x: assign(x, "position", None),
    "position sinusoidal": lambda x: assign(x, "position", SinusoidalPositions(8)),
    "position module": lambda x: assign(
        x, "position", LearnedPositions(5, 8, row_offset=1, weight=new(6, 8))
    ),
    "segments": lambda x: assign(x, "segment", Embedding(2, 8, rng=4)),
    "norm": lambda x: assign(x, "norm", (new(8), new(8) + 1)),
    "norm bias": lambda x: assign(x, "norm", (x.norm[0], new(8))),
    "norm written": lambda x: x.norm[1].__iadd__(1),
    "norm removed": lambda x: assign(x, "norm", None),
    "norm eps": lambda x: assign(x, "norm_eps", 0.5),
    "scale": lambda x: assign(x, "scale", True),
    "zero_padding": lambda x: assign(x, "zero_padding", True),
    "dropout": lambda x: (assign(x, "dropout", 0.5), x.train()),
    "loaded": lambda x: x.load_state_dict(build(seed=5).state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_by_the_next_call(change):
    outputs = []
    # The second layer never had a plan before it was changed.
    for layer in (planned(), build()):
        CHANGES[change](layer)
        layer.rng = np.random.default_rng(1)
        outputs.append([layer(IDS, offset=offset) for offset in (0, 2)])
    for ours, want in zip(*outputs, strict=True):
        assert ours.dtype == want.dtype and np.array_equal(ours, want)


def test_stale_rows_are_caught_up():
    outputs = []
    for layer in (planned(), build()):
        optimizer = RowAdamW(layer, lr=0.1)
        for ids in (IDS, IDS[:1], IDS[1:]):
            y, pull = layer.vjp(ids)
            optimizer.step(pull(y))
        outputs.append(layer(IDS))
    assert np.array_equal(*outputs)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("position", [{}, {"position": None, "max_positions": None}])
def test_results_have_the_bits_of_other_calls(dtype, position):
    options: Any = {"dtype": dtype, "scale": True, "norm_eps": 0.1, **position}
    layer, other = planned(**options), build(**options)
    many = np.arange(7).repeat(2000).reshape(2, -1)[:, :6]
    for ids in (IDS, IDS[:1, :1], IDS[0], IDS.astype(np.uint8), IDS.T, IDS[:0], many):
        vars(other).pop("_plan", None)
        assert np.array_equal(layer(ids), other(ids))


def test_errors_are_those_of_other_calls():
    layer = planned()
    with pytest.raises(IndexError, match=r"ids\[0, 1\] is 7, but num_embeddings is 7"):
        layer(np.array([[1, 7]]))
    for offset in (4, -1):
        with pytest.raises(ValueError, match="positions must be"):
            layer(IDS, offset=offset)
    with pytest.raises(ValueError, match="ids must have a length axis"):
        layer(np.array(3))
    # Far below the memory of the row numbers.
    layer.position.row_offset = -(2**30)
    with pytest.raises(ValueError, match="positions must be at least 1073741824"):
        layer(IDS)


def test_copies_have_no_plan_and_a_plan_keeps_no_array_alive():
    layer = planned()
    for other in (
        copy.copy(layer),
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
    ):
        assert "_plan" not in vars(other)
        assert np.array_equal(other(IDS), layer(IDS))
    quantized = layer.quantized("int8")
    assert np.array_equal(quantized(IDS), build().quantized("int8")(IDS))
    weight = weakref.ref(layer.token.weight)
    layer.token.weight = new(7, 8)
    del other, quantized
    gc.collect()
    assert weight() is None
