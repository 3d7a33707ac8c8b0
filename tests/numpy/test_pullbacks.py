"""Pullbacks of every NumPy layer belong to the values that a call had."""

import copy
from typing import Any

import numpy as np
import pytest

import firstlayer.numpy as fn
from firstlayer.embeddings.row_gradient import RowGradient
from firstlayer.ngram import SaltedNgram
from firstlayer.optim import RowSGD

rng = np.random.default_rng(0)
OPTIONS: Any = {"dtype": "float64", "rng": 3}
IDS = rng.integers(1, 9, (2, 4))
X, HEADS, MEMORY = (rng.normal(size=(2, *n)) for n in ((4, 8), (3, 4, 8), (4, 6)))
KEYS, WEIGHTS = rng.normal(size=(2, 3, 6, 8)), rng.normal(size=(2, 4))
PLACES, Q, K = np.array([[3, 1, 2, 4], [0, 1, 1, 1]]), np.arange(4), np.arange(6)
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "token": (fn.Embedding(9, 8, padding_idx=1, max_norm=1.5, **OPTIONS), (IDS,)),
    "bag": (fn.EmbeddingBag(9, 8, padding_idx=1, **OPTIONS), (IDS, None, WEIGHTS)),
    "max": (
        fn.EmbeddingBag(9, 8, mode="max", **OPTIONS),
        (IDS.ravel(), np.array([0, 3, 3]), WEIGHTS.ravel()),
    ),
    "learned": (fn.LearnedPositions(9, 8, scale=0.5, **OPTIONS), (X, PLACES)),
    "between": (fn.LearnedPositions(9, 8, scale=0.5, **OPTIONS), (X, PLACES + 0.25)),
    "sinusoidal": (fn.SinusoidalPositions(8, scale=0.5), (X, PLACES)),
    "rotary": (fn.RotaryPositions(8, layout="interleaved"), (HEADS, PLACES)),
    "xpos": (fn.XPosRotary(8, scale_base=99.0), (HEADS, PLACES)),
    "fourier": (fn.FourierFeatures.octaves(3, axes=2), (rng.normal(size=(5, 2)),)),
    "time2vec": (fn.Time2Vec(8, **OPTIONS), (rng.normal(size=5),)),
    "t5": (fn.T5Bias(3, num_buckets=8, **OPTIONS), (Q, K)),
    "kerple": (fn.KerpleBias(3, form="power", **OPTIONS), (Q, K)),
    "fire": (fn.FireBias(3, threshold=2.0, **OPTIONS), (Q, K)),
    "shaw": (fn.ShawScores(8, max_left=3, max_right=1, **OPTIONS), (HEADS, KEYS, Q, K)),
    "xl": (fn.TransformerXLScores(3, 8, max_distance=3, **OPTIONS), (HEADS, KEYS)),
    "cope": (
        fn.CopeBias(8, max_positions=3, init="normal", **OPTIONS),
        (HEADS, rng.normal(size=(2, 3, 4, 6))),
    ),
    "layer": (
        fn.EmbeddingLayer(
            9, 8, max_positions=7, segments=2, layer_norm=True, scale=True, **OPTIONS
        ),
        (IDS,),
    ),
    "hashed": (fn.HashedEmbedding(9, 8, importance_rows=3, **OPTIONS), (IDS,)),
    "quotient": (fn.QuotientRemainderEmbedding(9, 8, **OPTIONS), (IDS,)),
    "frequent": (fn.FrequencyEmbedding([2, 3], 9, 8, **OPTIONS), (IDS,)),
    "ngram": (fn.NgramEmbedding(SaltedNgram(rows=20), 4, **OPTIONS), (IDS,)),
    "engram": (fn.EngramGate(6, 8, eps=1e-3, **OPTIONS), (X, MEMORY)),
    "short_conv": (fn.ShortConvGate(6, 8, bias=True, **OPTIONS), (X, MEMORY)),
    "average": (fn.NgramAverage(2, 3, 8, **OPTIONS), (X, MEMORY)),
}


def dense(gradients):
    """Return gradients as arrays of float64 that nothing else refers to."""
    return {
        name: np.array(g.dense(50) if isinstance(g, RowGradient) else g, "float64", ndmin=1)
        for name, g in gradients.items()
    }


def arrays(layer):
    return [(name, np.atleast_1d(x).copy()) for name, x in layer.parameters().items()]


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, wanted[name], atol=1e-12, err_msg=name)


@pytest.fixture(params=CASES)
def case(request):
    layer, args = CASES[request.param]
    y, pull = layer.vjp(*args)
    dy = np.random.default_rng(7).normal(size=y.shape)
    return copy.deepcopy(layer), args, dy, dense(pull(dy))


def test_pullbacks_do_not_see_later_changes(case):
    layer, args, dy, wanted = case
    args = [None if arg is None else arg.copy() for arg in args]
    y, pull = layer.vjp(*args)
    y[...] = 7
    for arg in args:
        if arg is not None:
            arg[...] = 1
    for parameter in layer.parameters().values():
        parameter *= 3
    assert_same(dense(pull(dy)), wanted)
    assert_same(dense(pull(-2 * dy)), {name: -2 * g for name, g in wanted.items()})


def test_pullbacks_take_gradients_of_any_layout(case):
    layer, args, dy, wanted = case
    _, pull = layer.vjp(*args)
    readonly = dy.copy()
    readonly.flags.writeable = False
    strided = np.repeat(dy, 2, axis=-1)[..., ::2]
    for gradient in (
        readonly,
        strided,
        np.asfortranarray(dy),
        dy[..., ::-1].copy()[..., ::-1],
        dy.astype(">f8"),
        dy.tolist(),
    ):
        assert_same(dense(pull(gradient)), wanted)
    np.testing.assert_array_equal(readonly, dy)


def test_row_optimizers_take_the_gradients_of_every_layer(case):
    layer, args, dy, gradients = case
    wanted = {name: x - 0.5 * gradients[name][: len(x)] for name, x in arrays(layer)}
    _, pull = layer.vjp(*args)
    RowSGD(layer, lr=0.5).step(pull(dy))
    assert_same(dict(arrays(layer)), wanted)


@pytest.mark.rejects
def test_gradients_that_are_not_real_are_refused(case):
    layer, args, dy, _ = case
    _, pull = layer.vjp(*args)
    for kind in ("object", "complex128"):
        with pytest.raises(TypeError, match=rf"^d\w+ must be real, got {kind}$"):
            pull(dy.astype(kind))


@pytest.mark.rejects
def test_gradients_of_logits_and_groups_that_are_not_real_are_refused():
    _, pull = fn.Embedding(9, 8).logits_vjp(X)
    with pytest.raises(TypeError, match="^dlogits must be real, got object$"):
        pull(np.ones((2, 4, 9), object))
    _, pull = fn.TableGroup({"user": fn.Table(9, 4)}).vjp({"user": [[1, 2]]})
    with pytest.raises(TypeError, match=r"^dy\['user'\] must be real, got object$"):
        pull({"user": np.ones((1, 4), object)})
