"""Saving and loading Equinox layers, and exchanging files with the other front ends."""

import json
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import firstlayer.numpy
import firstlayer.torch
from firstlayer.equinox import (
    AlibiBias,
    CopeBias,
    Embedding,
    EmbeddingBag,
    EmbeddingLayer,
    EngramGate,
    FireBias,
    FourierFeatures,
    FrequencyEmbedding,
    GrowingEmbedding,
    HashedEmbedding,
    KerpleBias,
    LearnedPositions,
    NgramAverage,
    NgramEmbedding,
    QuotientRemainderEmbedding,
    RotaryPositions,
    ShawScores,
    ShortConvGate,
    SinusoidalPositions,
    T5Bias,
    Table,
    TableGroup,
    Time2Vec,
    TransformerXLScores,
    XPosRotary,
    load,
    save,
)
from firstlayer.files.layer_configs import LAYER_KINDS
from firstlayer.files.safetensors import read, write
from firstlayer.ngram import ByteGroups, Engram
from firstlayer.positions.scaling import YaRN
from tests.equinox.test_token import bits

KEY = jax.random.key(2)
rng = np.random.default_rng(0)

# Layers with options that are not the defaults.
CASES: dict[str, Any] = {
    "Embedding": lambda: Embedding(
        10, 8, padding_idx=-1, max_norm=1.5, norm_type=1.0, scale_grad_by_freq=True, key=KEY
    ).set_padding(0.5),
    "Embedding inf": lambda: Embedding(
        10, 8, max_norm=0.5, norm_type=float("inf"), dtype="float16", key=KEY
    ),
    "EmbeddingBag": lambda: EmbeddingBag(
        10, 8, mode="max", padding_idx=2, include_last_offset=True, key=KEY
    ),
    "LearnedPositions": lambda: LearnedPositions(
        5, 8, row_offset=2, padding_idx=1, scale=0.5, dtype="float16", key=KEY
    ),
    "SinusoidalPositions": lambda: SinusoidalPositions(
        8, base=500.0, layout="half", shift=1.0, cos_first=True, scale=2.0
    ),
    "FourierFeatures": lambda: FourierFeatures.octaves(4, axes=1),
    "EmbeddingLayer": lambda: EmbeddingLayer(
        10,
        8,
        max_positions=6,
        scale=True,
        segments=3,
        layer_norm=True,
        norm_eps=1e-3,
        dropout=0.25,
        padding_idx=0,
        zero_padding=True,
        dtype="bfloat16",
        key=KEY,
    ),
    "EmbeddingLayer module": lambda: EmbeddingLayer(
        10,
        8,
        position=LearnedPositions(6, 8, row_offset=2, padding_idx=0, key=KEY),
        key=KEY,
    ),
    "EmbeddingLayer sinusoidal": lambda: EmbeddingLayer(
        10, 8, position=SinusoidalPositions(8, base=77.0), padding_idx=-2, key=KEY
    ),
    "EmbeddingLayer without positions": lambda: EmbeddingLayer(
        10, 8, position=None, key=KEY
    ),
    # All tables have the same shape and must not be mixed up.
    "EmbeddingLayer square": lambda: EmbeddingLayer(
        10, 8, max_positions=10, segments=10, key=KEY
    ),
    "RotaryPositions": lambda: RotaryPositions(
        8,
        base=500.0,
        layout="interleaved",
        scaling=YaRN(factor=4.0, original_length=32),
        rotary_dim=6,
    ),
    "AlibiBias": lambda: AlibiBias(3, symmetric=True),
    "T5Bias": lambda: T5Bias(3, num_buckets=8, max_distance=20, key=KEY),
    "KerpleBias": lambda: KerpleBias(3, form="power", key=KEY),
    "FireBias": lambda: FireBias(3, width=5, key=KEY),
    "ShawScores": lambda: ShawScores(8, max_left=3, max_right=1, key=KEY),
    "CopeBias": lambda: CopeBias(8, max_positions=5, key=KEY),
    "GrowingEmbedding": lambda: GrowingEmbedding(
        5, 8, evict=None, min_count=2, init="xavier", seed=3, dtype="bfloat16"
    ).assign([3, 2**40, 3, -1])[1],
    "HashedEmbedding": lambda: HashedEmbedding(
        9, 6, hashes=3, combine="concat", importance_rows=4, seed=5, key=KEY
    ),
    "QuotientRemainderEmbedding": lambda: QuotientRemainderEmbedding(
        100, 8, buckets=9, combine="sum", key=KEY
    ),
    "FrequencyEmbedding": lambda: FrequencyEmbedding(
        [7, 2**40, 1], 5, 8, hashes=3, seed=2, key=KEY
    ),
    "TableGroup": lambda: TableGroup(
        {
            "user": Table(9, 4),
            "item": Table(5, 4, features=["clicked", "bought"], mode="max", padding_idx=-1),
            "tag": Table(3, 2, mode=None),
        },
        dtype="float16",
        key=KEY,
    ),
    "EngramGate": lambda: EngramGate(5, 8, eps=0.1, dtype="bfloat16", key=KEY),
    "ShortConvGate": lambda: ShortConvGate(
        *(5, 4),
        streams=2,
        kernel_size=3,
        dilation=2,
        bias=True,
        eps=0.1,
        conv_eps=0.2,
        key=KEY,
    ),
    "NgramAverage": lambda: NgramAverage(2, 3, 8, key=KEY),
    "NgramEmbedding": lambda: NgramEmbedding(
        Engram(
            order=3,
            heads=2,
            base=[13, 17],
            layers=(1, 4),
            canonical=np.arange(10) // 2,
            pad=3,
            seed=2,
        ),
        Embedding(140, 3, padding_idx=2, max_norm=1.5, key=KEY),
        layer=4,
    ),
    "NgramEmbedding sum": lambda: NgramEmbedding(
        ByteGroups(sizes=(2, 3), rows=11, functions=2), 3, combine="sum", key=KEY
    ),
    "Time2Vec": lambda: Time2Vec(4, dtype="bfloat16", key=KEY),
    "TransformerXLScores": lambda: TransformerXLScores(
        1, 8, embedding_dim=6, base=90.0, max_distance=10**6, key=KEY
    ),
    "XPosRotary": lambda: XPosRotary(
        8, base=500.0, scale_base=1e6, center=10**6, layout="interleaved", rotary_dim=6
    ),
}


def assert_equal(a, b):
    """Assert that two layers have the same structure and the same bits in every leaf."""
    if isinstance(a, GrowingEmbedding):
        one, other = a.state(), b.state()
        assert one.keys() == other.keys() and a.config() == b.config()
        assert all(bits(one[name]) == bits(other[name]) for name in one)
        return
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert bits(one) == bits(other)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("front_end", [None, firstlayer.numpy, firstlayer.torch])
def test_a_layer_survives_a_file_of_any_front_end(name, front_end, tmp_path):
    layer, path = CASES[name](), tmp_path / "a.safetensors"
    save(path, layer)
    tensors, config = read(path)
    if front_end is not None:
        front_end.save(path, front_end.load(path))
        assert read(path)[1] == config
    assert_equal(load(path), layer)
    kept, _ = read(path)
    assert kept.keys() == tensors.keys()
    assert all(bits(kept[key]) == bits(tensors[key]) for key in tensors)


def test_every_layer_class_is_tested():
    assert {name.split()[0] for name in CASES} == LAYER_KINDS.keys()


def test_names_and_padding_row_are_read_by_every_front_end(tmp_path):
    path = tmp_path / "a.safetensors"
    layer = CASES["EmbeddingLayer"]()
    layer = layer.with_parameters({
        k: rng.standard_normal(v.shape) for k, v in layer.parameters().items()
    })
    save(path, layer)
    names = ["norm.bias", "norm.weight", "position.weight", "segment.weight"]
    assert sorted(read(path)[0]) == [*names, "token.weight"]
    padding = np.asarray(layer.token.weight)[0]
    assert bits(read(path)[0]["token.weight"][0]) == bits(padding) and padding.all()
    ids = np.array([[3, 0, 9], [9, 1, 2]])
    run = eqx.filter_jit(lambda one: one(ids, segments=ids % 3, inference=True))
    got = np.asarray(run(load(path)))
    want = firstlayer.numpy.load(path)(ids, segments=ids % 3)
    np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=2**-7, atol=1e-6)
    assert not got[ids == 0].any()


def test_float64_is_kept_with_x64_enabled(tmp_path):
    path = tmp_path / "a.safetensors"
    other = firstlayer.numpy.Embedding(5, 3, padding_idx=2, dtype="float64", rng=0)
    firstlayer.numpy.save(path, other)
    with jax.enable_x64(True):
        layer = load(path)
        assert bits(layer(range(5))) == bits(other(range(5)))
        save(path, layer)
    assert bits(firstlayer.numpy.load(path).weight) == bits(other.weight)


@pytest.mark.rejects
def test_float64_is_refused_without_x64(tmp_path):
    path = tmp_path / "a.safetensors"
    firstlayer.numpy.save(path, firstlayer.numpy.Embedding(5, 3, dtype="float64"))
    with pytest.raises(ValueError, match="does not hold a layer: dtype float64 needs jax"):
        load(path)


def rewrite(path, change):
    """Change the config and the tensors of a file."""
    tensors, config = read(path)
    config = json.loads(json.dumps(config))
    change(config, tensors)
    write(path, tensors, config)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "Embedding",
            lambda c, t: c.update({"class": "os.system"}),
            "class must be that of",
        ),
        ("Embedding", lambda c, t: c.update(key=3), "Embedding has no option 'key'"),
        (
            "Embedding",
            lambda c, t: c.update(init="zeros"),
            "Embedding has no option 'init'",
        ),
        ("Embedding", lambda c, t: t.pop("token.weight"), r"missing \['token.weight'\]"),
        ("Embedding", lambda c, t: c.update(num_embeddings=11), r"must have shape \(11, 8"),
        ("EmbeddingLayer", lambda c, t: c.update(position=3), "position must be a config"),
        (
            "EmbeddingLayer",
            lambda c, t: c.update(num_embeddings=60_000, embedding_dim=60_000),
            "position must have embedding_dim 60000|no tensor has the shape",
        ),
        (
            "EmbeddingLayer without positions",
            lambda c, t: c.update(num_embeddings=60_000, embedding_dim=60_000),
            "no tensor has the shape",
        ),
        ("EmbeddingLayer", lambda c, t: t.pop("norm.bias"), r"missing \['norm.bias'\]"),
        ("FireBias", lambda c, t: c.update(width=60_000), "needs more than the"),
    ],
)
def test_an_invalid_file_is_refused(case, change, message, tmp_path):
    path = tmp_path / "a.safetensors"
    save(path, CASES[case]())
    rewrite(path, change)
    with pytest.raises(
        ValueError, match=f"a.safetensors does not hold a layer: .*({message})"
    ):
        load(path)


@pytest.mark.rejects
def test_a_class_that_load_does_not_know_is_not_saved(tmp_path):
    class Mine(Embedding):
        pass

    with pytest.raises(TypeError, match="must be of a class that load knows, got .*Mine"):
        save(tmp_path / "a", Mine(3, 2, init="zeros", key=KEY))  # pyright: ignore
    inner = CASES["EmbeddingLayer without positions"]()
    with pytest.raises(TypeError, match="must be of a class that load knows, got Linear"):
        save(tmp_path / "a", _with_position(inner))
    assert not list(tmp_path.iterdir())


def _with_position(layer):
    linear = eqx.nn.Linear(2, 2, key=KEY)
    return eqx.tree_at(lambda one: one.position, layer, linear, is_leaf=lambda x: x is None)
