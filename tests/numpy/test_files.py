"""Saving and loading NumPy layers."""

import importlib
import inspect
import json
import pkgutil
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import firstlayer.numpy
from firstlayer.files.layer_configs import LAYER_KINDS
from firstlayer.files.safetensors import read, write
from firstlayer.ngram import ByteGroups, Engram, LongCatNgram, QwenNgram, SaltedNgram
from firstlayer.numpy.alibi import AlibiBias
from firstlayer.numpy.bag import EmbeddingBag
from firstlayer.numpy.cope import CopeBias
from firstlayer.numpy.files import load, save
from firstlayer.numpy.fire import FireBias
from firstlayer.numpy.fourier import FourierFeatures
from firstlayer.numpy.gates import EngramGate, NgramAverage, ShortConvGate
from firstlayer.numpy.growing import GrowingEmbedding
from firstlayer.numpy.hashed import (
    CombinedRows,
    FrequencyEmbedding,
    HashedEmbedding,
    QuotientRemainderEmbedding,
)
from firstlayer.numpy.kerple import KerpleBias
from firstlayer.numpy.layer import EmbeddingLayer
from firstlayer.numpy.learned import LearnedPositions
from firstlayer.numpy.ngram import NgramEmbedding
from firstlayer.numpy.rotary import RotaryPositions
from firstlayer.numpy.shaw import ShawScores
from firstlayer.numpy.sinusoidal import SinusoidalPositions
from firstlayer.numpy.t5 import T5Bias
from firstlayer.numpy.table_group import Table, TableGroup
from firstlayer.numpy.time2vec import Time2Vec
from firstlayer.numpy.token import Embedding
from firstlayer.numpy.transformer_xl import TransformerXLScores
from firstlayer.numpy.xpos import XPosRotary
from firstlayer.positions.scaling import LongRoPE, YaRN

IDS = np.array([[3, 0, 9], [9, 1, 2]])
X = np.random.default_rng(1).standard_normal((2, 3, 8)).astype("float32")
Q, K = np.arange(4), np.arange(-2, 5)

# Layers with options that are not the defaults.


def grown(layer):
    """Return a layer that has given rows to ids, and lost some."""
    layer.assign([3, 9, 9, 3, 0])
    layer.assign([1, 0, 2**40])
    return layer


CASES = {
    "Embedding": lambda: Embedding(
        10, 8, padding_idx=-1, max_norm=1.5, norm_type=1.0, scale_grad_by_freq=True, rng=1
    ),
    "Embedding inf": lambda: Embedding(10, 8, max_norm=0.5, norm_type=float("inf"), rng=2),
    "EmbeddingBag": lambda: EmbeddingBag(
        10, 8, mode="max", padding_idx=2, include_last_offset=True, dtype="float64", rng=3
    ),
    "LearnedPositions": lambda: LearnedPositions(
        5, 8, row_offset=2, padding_idx=1, scale=0.5, dtype="float16", rng=4
    ),
    "SinusoidalPositions": lambda: SinusoidalPositions(
        8,
        base=500.0,
        layout="half",
        shift=1.0,
        cos_first=True,
        scale=2.0,
        frequency_scale=0.5,
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
        rng=5,
    ),
    "EmbeddingLayer module": lambda: EmbeddingLayer(
        10, 8, position=LearnedPositions(6, 8, row_offset=2, padding_idx=0, rng=8), rng=6
    ),
    "EmbeddingLayer sinusoidal": lambda: EmbeddingLayer(
        10, 8, position=SinusoidalPositions(8, base=77.0), padding_idx=-2, rng=7
    ),
    "EmbeddingLayer without positions": lambda: EmbeddingLayer(10, 8, position=None, rng=8),
    # All tables have the same shape and must not be mixed up.
    "EmbeddingLayer square": lambda: EmbeddingLayer(
        10, 8, max_positions=10, segments=10, rng=9
    ),
    "RotaryPositions": lambda: RotaryPositions(
        8,
        base=500.0,
        layout="interleaved",
        scaling=YaRN(factor=4.0, original_length=32),
        rotary_dim=6,
        sections=[1, 1, 1],
        interleaved_sections=True,
        heads_axis=-2,
    ),
    "RotaryPositions long": lambda: RotaryPositions(
        4,
        scaling=LongRoPE(
            short_factors=[1.0, 2.0],
            long_factors=[1.0, 8.0],
            original_length=64,
            factor=4.0,
            length=65,
        ),
    ),
    "RotaryPositions frequencies": lambda: RotaryPositions(
        8, frequencies=[1.0, 0.3, 0.1, 0.0]
    ),
    "AlibiBias": lambda: AlibiBias(6, symmetric=True, max_bias=4.0, factor=0.5),
    "T5Bias": lambda: T5Bias(
        3, num_buckets=6, max_distance=20, bidirectional=False, dtype="float64", rng=10
    ),
    "KerpleBias": lambda: KerpleBias(3, form="power", dtype="float16", rng=11),
    "FireBias": lambda: FireBias(
        3, width=5, c=0.3, threshold=7.0, eps=1e-3, dtype="float64", rng=12
    ),
    "ShawScores": lambda: ShawScores(8, max_left=3, max_right=1, rng=13),
    "CopeBias": lambda: CopeBias(8, max_positions=5, rng=14),
    "GrowingEmbedding": lambda: grown(
        GrowingEmbedding(
            5, 8, evict="lfu", min_count=2, init="uniform", seed=3, dtype="float16"
        )
    ),
    "HashedEmbedding": lambda: HashedEmbedding(
        9, 6, hashes=3, combine="concat", importance_rows=4, seed=5, rng=14
    ),
    "QuotientRemainderEmbedding": lambda: QuotientRemainderEmbedding(
        100, 8, buckets=9, combine="sum", rng=14
    ),
    "FrequencyEmbedding": lambda: FrequencyEmbedding(
        [7, 2**40, 1], 5, 8, hashes=3, seed=2, rng=14
    ),
    "TableGroup": lambda: TableGroup(
        {
            "user": Table(9, 4),
            "item": Table(5, 4, features=["clicked", "bought"], mode="max", padding_idx=-1),
            "tag": Table(3, 2, mode=None),
        },
        dtype="float16",
        rng=14,
    ),
    "EngramGate": lambda: EngramGate(5, 8, eps=0.1, dtype="float64", rng=14),
    "ShortConvGate": lambda: ShortConvGate(
        5, 4, streams=2, kernel_size=3, dilation=2, bias=True, eps=0.1, conv_eps=0.2, rng=14
    ),
    "NgramAverage": lambda: NgramAverage(2, 3, 8, dtype="bfloat16", rng=14),
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
        Embedding(140, 3, padding_idx=2, max_norm=1.5, rng=14),
        layer=4,
    ),
    "NgramEmbedding sum": lambda: NgramEmbedding(
        ByteGroups(sizes=(2, 3), rows=11, functions=2), 3, combine="sum", rng=1
    ),
    "NgramEmbedding QwenNgram": lambda: NgramEmbedding(
        QwenNgram(order=2, heads=1, base=5, layers=(3,), vocab_size=10, eos=1, seed=4),
        2,
        rng=1,
    ),
    "NgramEmbedding LongCatNgram": lambda: NgramEmbedding(
        LongCatNgram(order=2, splits=2, ratio=1.5, vocab_size=10, eos=None), 2, rng=1
    ),
    "NgramEmbedding SaltedNgram": lambda: NgramEmbedding(
        SaltedNgram(orders=(1, 3), salts=3, rows=20), 2, dtype="float16", rng=1
    ),
    "Time2Vec": lambda: Time2Vec(4, dtype="float64", rng=14),
    "TransformerXLScores": lambda: TransformerXLScores(
        1, 8, embedding_dim=6, base=90.0, max_distance=10**6, rng=14
    ),
    "XPosRotary": lambda: XPosRotary(
        8, base=500.0, scale_base=1e6, center=10**6, layout="interleaved", rotary_dim=6
    ),
}


def output(layer):
    """Return the output of a layer of any class."""
    if isinstance(layer, EmbeddingBag):
        return layer(IDS.ravel(), np.array([0, 2, 6]))
    looks_up = Embedding | EmbeddingLayer | CombinedRows | GrowingEmbedding | NgramEmbedding
    if isinstance(layer, looks_up):
        return layer(IDS)
    if isinstance(layer, TableGroup):
        return layer({"clicked": [[3, 0], []]})["clicked"]
    if isinstance(layer, EngramGate | ShortConvGate | NgramAverage):
        shape = (2, 3, 2, 4) if isinstance(layer, ShortConvGate) else X.shape
        return layer(X.reshape(shape), X[..., : layer.memory_dim])
    if isinstance(layer, LearnedPositions | SinusoidalPositions):
        return layer(X, offset=1)
    if isinstance(layer, RotaryPositions):
        x = np.expand_dims(X[..., : layer.head_dim], layer.heads_axis or -3)
        positions = np.array([[5, 70, 1], [0, 2, 9], [4, 4, 300]])
        return layer(x, positions if layer.sections else positions[0])
    if isinstance(layer, FourierFeatures):
        return layer(X[..., :1])
    if isinstance(layer, CopeBias):
        return layer(X, X[..., :5])
    if isinstance(layer, Time2Vec):
        return layer(X)
    if isinstance(layer, TransformerXLScores):
        return layer(X[:, None], X[:, None])
    if isinstance(layer, XPosRotary):
        return layer(X[:, None], offset=3, keys=True)
    if isinstance(layer, ShawScores):
        return layer(X[:, :, :], X, np.arange(3), np.arange(3))
    return layer(Q, K)


def bits(array):
    return array.dtype.name, array.shape, array.tobytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "layer.safetensors"


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_layer_is_equal_bit_for_bit(case, path):
    layer = CASES[case]()
    save(path, layer)
    loaded = load(path)
    assert type(loaded) is type(layer) and loaded.config() == layer.config()
    want = {name: bits(value) for name, value in layer.parameters().items()}
    assert {name: bits(value) for name, value in loaded.parameters().items()} == want
    assert bits(output(loaded)) == bits(output(layer))


@pytest.mark.parametrize("case", CASES)
def test_saving_twice_writes_the_same_bytes(case, path):
    save(path, CASES[case]())
    first = path.read_bytes()
    save(path, load(path))
    assert path.read_bytes() == first


def test_every_layer_class_can_be_saved():
    found = set()
    for module in pkgutil.iter_modules(firstlayer.numpy.__path__):
        if not module.name.startswith("_"):
            loaded = importlib.import_module(f"firstlayer.numpy.{module.name}")
            for name, value in inspect.getmembers(loaded, inspect.isclass):
                if value.__module__ == loaded.__name__ and hasattr(value, "parameters"):
                    found.add(name)
    base_classes = {"CombinedRows", "Gate", "StreamGate"}
    assert found - base_classes == set(LAYER_KINDS) == {case.split()[0] for case in CASES}


@pytest.mark.parametrize(
    "case, names",
    [
        ("Embedding", {"token.weight"}),
        ("EmbeddingBag", {"token.weight"}),
        ("LearnedPositions", {"position.weight"}),
        ("SinusoidalPositions", set()),
        (
            "EmbeddingLayer",
            {
                "token.weight",
                "position.weight",
                "segment.weight",
                "norm.weight",
                "norm.bias",
            },
        ),
    ],
)
def test_tensor_names_are_those_of_every_front_end(case, names, path):
    save(path, CASES[case]())
    assert set(read(path)[0]) == names


@pytest.mark.parametrize("case", ["Embedding", "EmbeddingBag", "EmbeddingLayer"])
def test_the_padding_row_is_loaded_as_saved(case, path):
    layer: Any = CASES[case]()
    getattr(layer, "token", layer).set_padding(np.arange(8.0))
    save(path, layer)
    loaded = load(path)
    table = getattr(loaded, "token", loaded)
    assert table.weight[table.padding_idx].tolist() == list(range(8))


def test_loaded_layers_do_not_share_memory(path):
    save(path, CASES["EmbeddingLayer"]())
    first, second = load(path), load(path)
    for value in first.parameters().values():
        value[...] = 9
    assert not (second.token.weight == 9).any() and not (load(path).norm[0] == 9).any()


def test_loading_a_large_table_draws_and_copies_nothing(path, monkeypatch):
    save(path, Embedding(20_000, 50, rng=0))
    size = 4 * 20_000 * 50
    monkeypatch.setattr(np.random, "default_rng", None)
    tracemalloc.start()
    load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * size


@pytest.mark.rejects
def test_a_subclass_is_not_saved(path):
    class Mine(Embedding):
        pass

    class MySinusoidal(SinusoidalPositions):
        pass

    with pytest.raises(TypeError, match="a class that load knows, got .*Mine"):
        save(path, Mine(3, 2))
    with pytest.raises(TypeError, match="a class that load knows, got .*MySinusoidal"):
        save(path, EmbeddingLayer(3, 2, position=MySinusoidal(2)))
    with pytest.raises(TypeError, match="a class that load knows, got dict"):
        save(path, {})  # pyright: ignore[reportArgumentType]
    assert not path.exists()


WEIGHT = {"token.weight": np.zeros((3, 2), "float32")}
SMALL = {"class": "Embedding", "num_embeddings": 3, "embedding_dim": 2}


@pytest.mark.rejects
@pytest.mark.parametrize(
    "tensors, change, message",
    [
        (WEIGHT, {"class": "Pickle"}, "class must be that of a layer, got 'Pickle'"),
        (WEIGHT, {"class": "Module"}, "class must be that of a layer, got 'Module'"),
        (WEIGHT, {"class": "os.system"}, "class must be that of a layer, got 'os.sys"),
        (WEIGHT, {"class": None}, "class must be that of a layer, got None"),
        (WEIGHT, {"class": ["Embedding"]}, r"class must be .*, got \['Embedding'\]"),
        (WEIGHT, {"class": "x" * 9999}, r"class must be .*, got 'x+\.\.\.x+'$"),
        (WEIGHT, {"extra": 1}, "Embedding has no option 'extra'"),
        (WEIGHT, {"rng": 0}, "Embedding has no option 'rng'"),
        (WEIGHT, {"init": "zeros"}, "Embedding has no option 'init'"),
        ({}, {"weight": [[0.0, 0.0]] * 3}, "Embedding has no option 'weight'"),
        (WEIGHT, {"num_embeddings": "3"}, "num_embeddings must be an integer, got str"),
        (WEIGHT, {"num_embeddings": 3.0}, "num_embeddings must be an integer, got float"),
        (WEIGHT, {"num_embeddings": -3}, "num_embeddings must be at least 0, got -3"),
        (WEIGHT, {"embedding_dim": None}, "embedding_dim must be an integer, got None"),
        (WEIGHT, {"padding_idx": 3}, r"padding_idx must be in \[-3, 3\)"),
        (WEIGHT, {"dtype": "int8"}, "dtype must be .*, got int8"),
        (WEIGHT, {"max_norm": [[]]}, "."),
        (WEIGHT, {"num_embeddings": 4}, r"must have shape \(4, 2\), got \(3, 2\)"),
        ({}, {}, r"tensors \['token.weight'\]; missing \['token.weight'\], unknown \[\]"),
        (
            {**WEIGHT, "more": np.ones(2)},
            {},
            r"tensors \['token.weight'\]; missing \[\], unknown \['more'\]",
        ),
    ],
)
def test_an_invalid_config_is_refused(tensors, change, message, path):
    write(path, tensors, {**SMALL, **change})
    with pytest.raises(ValueError, match=f"does not hold a layer: .*{message}") as caught:
        load(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    write(path, WEIGHT, SMALL)
    assert load(path)([1]).tolist() == [[0, 0]]


@pytest.mark.rejects
def test_a_config_without_a_required_option_is_refused(path):
    write(path, WEIGHT, {"class": "Embedding", "num_embeddings": 3})
    with pytest.raises(ValueError, match="not hold a layer: .*missing.* 'embedding_dim'"):
        load(path)


LAYER = {
    "class": "EmbeddingLayer",
    "num_embeddings": 3,
    "embedding_dim": 2,
    "position": None,
}


@pytest.mark.rejects
@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_embeddings": 5}, r"no tensor has the shape \(5, 2\)"),
        ({"segments": 4}, r"no tensor has the shape \(4, 2\)"),
        ({"segments": 3}, r"missing \['segment.weight'\]"),
        ({"layer_norm": True}, r"missing \['norm.bias', 'norm.weight'\]"),
        ({"position": "learned"}, "position must be a config, got 'learned'"),
        ({"position": {"class": "Nothing"}}, "class must be that of a layer"),
        ({"position": {"class": "AlibiBias", "num_heads": 2}}, "position must be"),
        (
            {
                "position": {
                    "class": "LearnedPositions",
                    "max_positions": 60_000,
                    "embedding_dim": 60_000,
                }
            },
            r"LearnedPositions has the tensors .*missing \['position.weight'\]",
        ),
    ],
)
def test_an_invalid_config_of_a_complete_layer_is_refused(change, message, path):
    write(path, WEIGHT, {**LAYER, **change})
    with pytest.raises(ValueError, match=f"does not hold a layer: .*{message}"):
        load(path)
    write(path, WEIGHT, LAYER)
    assert load(path)([1]).tolist() == [[0, 0]]


HUGE = [
    (
        {"table.weight": np.zeros((4, 2)), "id_map.ids": np.zeros(4, np.int64)},
        {"class": "GrowingEmbedding", "capacity": 2**16, "embedding_dim": 2**16},
    ),
    (WEIGHT, {**SMALL, "num_embeddings": 10**12}),
    (WEIGHT, {**SMALL, "num_embeddings": 2**16, "embedding_dim": 2**16}),
    ({}, {**SMALL, "num_embeddings": 2**16, "embedding_dim": 2**16}),
    (WEIGHT, {**LAYER, "num_embeddings": 2**16, "embedding_dim": 2**16}),
    (WEIGHT, {**LAYER, "segments": 2**16, "embedding_dim": 2**16}),
    ({}, {"class": "SinusoidalPositions", "embedding_dim": 10**9}),
    ({}, {"class": "RotaryPositions", "head_dim": 10**9}),
    ({}, {"class": "SinusoidalPositions", "embedding_dim": 2**14 + 2}),
    ({}, {"class": "RotaryPositions", "head_dim": 2**14 + 2}),
    ({}, {"class": "RotaryPositions", "head_dim": 2, "frequencies": [[0]] * 2**14}),
    ({}, {"class": "FourierFeatures", "matrix": [[0]] * 2**14}),
    ({}, {"class": "RotaryPositions", "head_dim": 2**16, "sections": [1] * 2**15}),
    ({}, {"class": "RotaryPositions", "head_dim": 2**12, "sections": [1] * 2**11}),
    ({}, {"class": "AlibiBias", "num_heads": 10**10}),
    ({}, {"class": "T5Bias", "num_heads": 2**16, "num_buckets": 2**16}),
    (
        {"bias.weight": np.zeros((32, 2))},
        {"class": "T5Bias", "num_heads": 2, "max_distance": 10**11},
    ),
    ({}, {"class": "ShawScores", "head_dim": 2**16, "max_left": 2**16, "max_right": 1}),
    ({}, {"class": "TransformerXLScores", "num_heads": 2**14, "head_dim": 2**14}),
    ({}, {"class": "XPosRotary", "head_dim": 2**16}),
    ({}, {"class": "KerpleBias", "num_heads": 10**10}),
    (
        {f"bias.{name}": np.zeros(1) for name in LAYER_KINDS["FireBias"].parameters},
        {"class": "FireBias", "num_heads": 2**16, "width": 2**16},
    ),
    # An empty tensor accounts for no memory, whatever its length.
    (
        {"bias.weight": np.zeros((10**8, 0))},
        {"class": "T5Bias", "num_heads": 2, "max_distance": 10**8},
    ),
    # Computing these bucket boundaries exactly would take hours.
    (
        {"bias.weight": np.zeros((1, 2))},
        {"class": "T5Bias", "num_heads": 2, "num_buckets": 2**16, "max_distance": 2**16},
    ),
]


@pytest.mark.rejects
@pytest.mark.parametrize("tensors, config", HUGE, ids=lambda x: str(x)[:60])
def test_a_forged_config_cannot_allocate_more_than_its_file(tensors, config, path):
    write(path, tensors, config)
    tracemalloc.start()
    with pytest.raises(ValueError, match="does not hold a layer: "):
        load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30_000_000


@pytest.mark.rejects
def test_a_layer_that_could_not_be_loaded_is_not_saved(path):
    wide = SinusoidalPositions(2**14 + 2)
    with pytest.raises(ValueError, match="^pairs must be at most 8192 in a file of 0 "):
        save(path, wide)
    assert not path.exists()
    # A token table of the same width accounts for it.
    layer = EmbeddingLayer(2, 2**14 + 2, position=wide, init="zeros")
    save(path, layer)
    np.testing.assert_array_equal(load(path)([1], offset=7), layer([1], offset=7))


@pytest.mark.rejects
@given(data=st.data())
def test_a_file_with_changed_bytes_loads_or_raises_a_value_error(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    case = data.draw(st.sampled_from(["Embedding", "EmbeddingLayer sinusoidal", "T5Bias"]))
    save(path, CASES[case]())
    raw = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header - 1))
        raw[place] = data.draw(st.sampled_from(b'0123456789{}[]",:.-eEtfn \x00\xff'))
    path.write_bytes(raw)
    try:
        layer = load(path)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        json.dumps(layer.config())
