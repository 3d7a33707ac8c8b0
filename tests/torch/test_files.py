"""Layers of the torch face through a file, back, and into the NumPy face and out of it."""

import importlib
import inspect
import json
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import firstlayer.torch
from firstlayer.files.layer_configs import KINDS
from firstlayer.files.safetensors import read, write
from firstlayer.numpy import files as numpy_files
from firstlayer.positions.scaling import LongRoPE, YaRN
from firstlayer.torch.alibi import AlibiBias
from firstlayer.torch.bag import EmbeddingBag
from firstlayer.torch.files import load, save
from firstlayer.torch.fire import FireBias
from firstlayer.torch.fourier import FourierFeatures
from firstlayer.torch.kerple import KerpleBias
from firstlayer.torch.layer import EmbeddingLayer
from firstlayer.torch.learned import LearnedPositions
from firstlayer.torch.rotary import RotaryPositions
from firstlayer.torch.shaw import ShawScores
from firstlayer.torch.sinusoidal import SinusoidalPositions
from firstlayer.torch.t5 import T5Bias
from firstlayer.torch.token import Embedding

IDS = torch.tensor([[3, 0, 9], [9, 1, 2]])
X = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 3, 8)).astype("float32"))
Q, K = torch.arange(4), torch.arange(-2, 5)

# A layer with every option away from its default, and something to ask it.
CASES: dict[str, Any] = {
    "Embedding": lambda: Embedding(
        10, 8, padding_idx=-1, max_norm=1.5, norm_type=1.0, scale_grad_by_freq=True
    ),
    "Embedding inf": lambda: Embedding(10, 8, max_norm=0.5, norm_type=float("inf")),
    "EmbeddingBag": lambda: EmbeddingBag(
        10, 8, mode="max", padding_idx=2, include_last_offset=True, dtype=torch.float64
    ),
    "LearnedPositions": lambda: LearnedPositions(
        5, 8, row_offset=2, padding_idx=1, scale=0.5, dtype=torch.float16
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
        dtype=torch.bfloat16,
    ),
    "EmbeddingLayer module": lambda: EmbeddingLayer(
        10, 8, position=LearnedPositions(6, 8, row_offset=2, padding_idx=0)
    ),
    "EmbeddingLayer waves": lambda: EmbeddingLayer(
        10, 8, position=SinusoidalPositions(8, base=77.0), padding_idx=-2
    ),
    "EmbeddingLayer bare": lambda: EmbeddingLayer(10, 8, position=None),
    # Tables of one shape must not be taken for each other.
    "EmbeddingLayer square": lambda: EmbeddingLayer(10, 8, max_positions=10, segments=10),
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
    "RotaryPositions ready": lambda: RotaryPositions(8, frequencies=[1.0, 0.3, 0.1, 0.0]),
    "AlibiBias": lambda: AlibiBias(6, symmetric=True, max_bias=4.0, factor=0.5),
    "T5Bias": lambda: T5Bias(
        3, num_buckets=6, max_distance=20, bidirectional=False, dtype=torch.float64
    ),
    "KerpleBias": lambda: KerpleBias(3, form="power", dtype=torch.float16),
    "FireBias": lambda: FireBias(
        3, width=5, c=0.3, threshold=7.0, eps=1e-3, dtype=torch.float64
    ),
    "ShawScores": lambda: ShawScores(8, max_left=3, max_right=1),
}


def asked(layer: Any, as_array: Any) -> Any:
    """Return what a layer of either face computes, given its own kind of arrays."""
    name = type(layer).__name__
    if name == "EmbeddingBag":
        return layer(as_array(IDS.flatten()), as_array(torch.tensor([0, 2, 6])))
    if name in ("Embedding", "EmbeddingLayer"):
        return layer(as_array(IDS))
    if name in ("LearnedPositions", "SinusoidalPositions"):
        return layer(as_array(X), offset=1)
    if name == "RotaryPositions":
        x = X[..., : layer.head_dim].unsqueeze(layer.heads_axis)
        positions = torch.tensor([[5, 70, 1], [0, 2, 9], [4, 4, 300]])
        return layer(as_array(x), as_array(positions if layer.sections else positions[0]))
    if name == "FourierFeatures":
        return layer(as_array(X[..., :1]))
    if name == "ShawScores":
        steps = as_array(torch.arange(3))
        return layer(as_array(X), as_array(X), steps, steps)
    return layer(as_array(Q), as_array(K))


def by_torch(layer: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return asked(layer.eval(), lambda x: x)


def by_numpy(layer: Any) -> torch.Tensor:
    return torch.from_numpy(asked(layer, lambda x: x.numpy()).astype("float64"))


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    return tmp_path / "layer.safetensors"


@pytest.mark.parametrize("case", CASES)
def test_a_layer_comes_back_to_the_bit(case, path):
    layer = CASES[case]()
    save(path, layer)
    again = load(path)
    # Fire's c is a parameter: what it once was is not kept.
    assert repr(again) == repr(layer).replace(", c=0.3", "")
    assert type(again) is type(layer)
    want, got = layer.state_dict(), again.state_dict()
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name])
    assert torch.equal(by_torch(again), by_torch(layer))
    assert all(value.requires_grad for value in again.parameters())


@pytest.mark.parametrize("case", CASES)
def test_the_numpy_face_reads_what_this_one_wrote(case, path):
    layer = CASES[case]()
    save(path, layer)
    other = numpy_files.load(path)
    assert type(other).__name__ == type(layer).__name__
    want = by_torch(layer)
    # Half a unit of the output's last place more, where both round what differs by 1e-6.
    tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(want.dtype, 1e-6)
    torch.testing.assert_close(by_numpy(other), want.double(), atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_this_face_reads_what_the_numpy_one_wrote_and_writes_the_same(case, path):
    save(path, CASES[case]())
    first = path.read_bytes()
    numpy_files.save(path, numpy_files.load(path))
    tensors, config = read(path)
    again = load(path)
    save(path, again)
    # The same file but for the order in which a config names its options.
    assert read(path)[1] == config
    assert {n: t.tobytes() for n, t in read(path)[0].items()} == {
        n: t.tobytes() for n, t in tensors.items()
    }
    path.write_bytes(first)
    assert torch.equal(by_torch(load(path)), by_torch(again))


def test_every_layer_of_the_face_can_be_saved():
    found = set()
    for module in pkgutil.iter_modules(firstlayer.torch.__path__):
        if not module.name.startswith("_"):
            loaded = importlib.import_module(f"firstlayer.torch.{module.name}")
            for name, value in inspect.getmembers(loaded, inspect.isclass):
                if value.__module__ == loaded.__name__ and issubclass(value, nn.Module):
                    found.add(name)
    # Rows that are frozen are a matter of training, not of what a layer computes, and
    # rotary modules inside of other models belong to those.
    assert found - {"PartlyFrozenEmbedding", "HFRotary"} >= set(KINDS)
    assert set(KINDS) == {case.split()[0] for case in CASES}


def test_the_padding_row_of_the_file_is_what_padding_is(path):
    layer = CASES["EmbeddingLayer"]()
    layer.token.set_padding(torch.arange(8.0))
    with torch.no_grad():
        # As an optimizer would: it is repaired before it is saved.
        layer.token.weight[0] = -5
    save(path, layer)
    again = load(path)
    assert again.token.weight[0].tolist() == list(range(8))
    with torch.no_grad():
        again.token.weight[0] = -5
    again(IDS)
    assert again.token.weight[0].tolist() == list(range(8))


def test_a_loaded_layer_is_its_own_and_learns(path):
    save(path, EmbeddingLayer(10, 8, max_positions=6, layer_norm=True, sparse=True))
    first, second = load(path), load(path)
    first(IDS).square().sum().backward()
    assert not first.token.sparse
    torch.optim.SGD(first.parameters(), lr=0.5).step()
    assert not torch.equal(first.token.weight, second.token.weight)
    assert torch.equal(load(path).token.weight, second.token.weight)


def test_parts_of_several_dtypes_keep_them(path):
    layer = EmbeddingLayer(10, 8, max_positions=6, layer_norm=True, dtype=torch.bfloat16)
    layer.norm = nn.LayerNorm(8)
    nn.init.normal_(layer.norm.weight)
    save(path, layer)
    again = load(path)
    assert again.norm.weight.dtype == torch.float32
    assert torch.equal(again(IDS), layer(IDS))


def test_a_layer_is_loaded_where_it_is_wanted(path):
    save(path, CASES["EmbeddingLayer"]())
    assert load(path, device="meta").token.weight.is_meta


def test_loading_draws_nothing(path):
    save(path, CASES["EmbeddingLayer"]())
    before = torch.get_rng_state()
    load(path)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.rejects
def test_what_load_could_not_build_is_not_saved(path):
    class Mine(Embedding):
        pass

    class Waves(SinusoidalPositions):
        pass

    with pytest.raises(TypeError, match="a class that load knows, got .*Mine"):
        save(path, Mine(3, 2))
    with pytest.raises(TypeError, match="a class that load knows, got .*Waves"):
        save(path, EmbeddingLayer(3, 2, position=Waves(2)))
    with pytest.raises(TypeError, match="a class that load knows, got Embedding"):
        save(path, nn.Embedding(3, 2))
    assert not path.exists()


WEIGHT = {"token.weight": np.zeros((3, 2), "float32")}
SMALL = {"class": "Embedding", "num_embeddings": 3, "embedding_dim": 2}
LAYER = {**SMALL, "class": "EmbeddingLayer", "position": None}


@pytest.mark.rejects
@pytest.mark.parametrize(
    "tensors, config, message",
    [
        (WEIGHT, {**SMALL, "class": "Pickle"}, "class must be that of a layer, got 'Pic"),
        (WEIGHT, {**SMALL, "class": None}, "class must be that of a layer, got None"),
        (WEIGHT, {**SMALL, "extra": 1}, "Embedding has no option 'extra'"),
        (WEIGHT, {**SMALL, "sparse": True}, "Embedding has no option 'sparse'"),
        (WEIGHT, {**SMALL, "device": "cuda"}, "Embedding has no option 'device'"),
        (WEIGHT, {**SMALL, "_weight": []}, "Embedding has no option '_weight'"),
        (WEIGHT, {**SMALL, "num_embeddings": "3"}, "must be an integer, got str"),
        (WEIGHT, {**SMALL, "padding_idx": 3}, r"padding_idx must be in \[-3, 3\)"),
        (WEIGHT, {**SMALL, "dtype": "int8"}, "dtype must be .*, got int8"),
        (WEIGHT, {**SMALL, "num_embeddings": 4}, r"shape \(4, 2\), got \(3, 2\)"),
        (WEIGHT, {**SMALL, "num_embeddings": 10**9}, "must be at most 65536 in a file"),
        ({}, SMALL, r"missing \['token.weight'\], unknown \[\]"),
        ({**WEIGHT, "more": np.ones(2)}, SMALL, r"missing \[\], unknown \['more'\]"),
        (WEIGHT, {**LAYER, "segments": 3}, r"missing \['segment.weight'\]"),
        (WEIGHT, {**LAYER, "layer_norm": True}, r"missing \['norm.bias', 'norm.weight'\]"),
        (WEIGHT, {**LAYER, "position": "learned"}, "must be a config, got 'learned'"),
        (WEIGHT, {**LAYER, "position": {"class": "Nothing"}}, "must be that of a layer"),
        (
            WEIGHT,
            {**LAYER, "position": {"class": "AlibiBias", "num_heads": 2}},
            "position must be",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tensors, config, message, path):
    write(path, tensors, json.loads(json.dumps(config)))
    with pytest.raises(ValueError, match=f"does not hold a layer: .*{message}") as caught:
        load(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
