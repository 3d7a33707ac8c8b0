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
    "concat": (
        fn.HashedEmbedding(9, 8, combine="concat", importance_rows=3, **OPTIONS),
        (IDS,),
    ),
    "halves": (fn.QuotientRemainderEmbedding(9, 8, combine="concat", **OPTIONS), (IDS,)),
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


#: Axis of the length in each argument; None if it has none. Ids have it at the end.
LENGTHS: dict[str, tuple[int | None, ...]] = {
    **{name: (-2, -1) for name in ("learned", "between", "sinusoidal", "rotary", "xpos")},
    **{name: (-2, -2) for name in ("engram", "short_conv", "average", "cope")},
    **{"shaw": (-2, None, 0, None), "xl": (-2, None), "bag": (-1, None, -1)},
}
#: Cases without a batch.
FLAT: dict[str, tuple[int | None, ...]] = {
    **{name: (0, None) for name in ("t5", "kerple", "fire")},
    **{"time2vec": (0,), "fourier": (0,), "max": (0, None, 0)},
}


@pytest.mark.parametrize("axis", ["batch", "length"])
@pytest.mark.parametrize("name", CASES)
def test_empty_batches_and_sequences_have_zero_gradients(name, axis):
    layer, args = CASES[name]
    axes = FLAT.get(name) or LENGTHS.get(name, (-1,))
    if axis == "batch" and name not in FLAT:
        axes = tuple(0 if np.ndim(arg) > 1 else None for arg in args)
    cut = [
        arg if at is None else arg.take([], axis=at)
        for arg, at in zip(args, axes, strict=True)
    ]
    if name == "max":
        cut[1] = np.array([0, 0])  # two bags of no ids
    y, pull = layer.vjp(*cut)
    assert y.shape == layer(*cut).shape and y.ndim == layer(*args).ndim
    assert not y.any()
    for n, gradient in dense(pull(np.ones(y.shape))).items():
        assert not gradient.any(), n
        if n in layer.parameters():
            assert gradient.shape[1:] == np.atleast_1d(layer.parameters()[n]).shape[1:]


@pytest.mark.parametrize("rows, width, count", [(0, 4, 2), (4, 0, 2), (4, 3, 0), (0, 0, 0)])
def test_logits_of_empty_tables_and_inputs_have_gradients(rows, width, count):
    logits, pull = fn.Embedding(rows, width).logits_vjp(np.ones((5, count, width)))
    gradients = pull(np.ones(logits.shape))
    assert gradients["weight"].shape == (rows, width) and not gradients["weight"].any()
    assert gradients["x"].shape == (5, count, width) and not gradients["x"].any()


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
