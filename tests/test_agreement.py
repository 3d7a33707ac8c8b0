"""The three faces side by side: one state, the same numbers, errors, files and names."""

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.files import safetensors as files
from firstlayer.positions.rotary import pixtral_axial_frequencies
from firstlayer.positions.scaling import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)
from tests.support.front_ends import (
    FACES,
    Case,
    assert_agree,
    built_in_all_faces,
    called,
    class_of,
    in_all_faces,
    pulled,
    refusals,
    terms,
)
from tests.support.jax_lives import key

PLACES = np.array([[0, 7, 39], [12, -2, 3]])
AXES = np.array([[[0, 7, 39], [12, 2, 3]], [[5, 70_000, 1], [0, 3, -9]]])
PAIRS = (np.array([[0, 7, 40], [900, 3, 12]]), np.array([0, 1, 12, 41]))
IDS = np.array([[3, 7, 3, 0], [0, 1, 8, 3]])
MATRIX = [[0.5, 3.0], [7.0, 0.25], [90.0, 0.0]]
LONGROPE = LongRoPE(
    short_factors=[1.0, 1.5, 2.0, 3.0],
    long_factors=[1.0, 4.0, 8.0, 9.0],
    original_length=16,
    factor=4.0,
)


def added(name: str, width: int, at: Any = PLACES, **options: Any) -> Case:
    linear = ("x", "weight") if name == "LearnedPositions" else ("x",)
    return Case(name, options, {"x": (2, 3, width)}, (at,), linear=linear)


def rotary(at: Any = PLACES, shape: tuple[int, ...] = (2, 2, 3, 8), **options: Any) -> Case:
    options = {"head_dim": 8, **options}
    return Case("RotaryPositions", options, {"x": shape}, (at,), linear=("x",))


def bias(name: str, *linear: str, **options: Any) -> Case:
    options = {"num_heads": 3, **options}
    return Case(name, options, rest=PAIRS, method="bias", linear=linear)


def tokens(**options: Any) -> Case:
    options = {"num_embeddings": 9, "embedding_dim": 4, **options}
    return Case("Embedding", options, rest=(IDS,), linear=("weight",))


def bags(**options: Any) -> Case:
    options = {"num_embeddings": 9, "embedding_dim": 4, **options}
    real = {"per_sample_weights": (8,)}
    rest = (IDS.ravel(), np.array([0, 3, 3]))
    return Case("EmbeddingBag", options, real, rest, linear=("weight",))


def complete(*linear: str, **options: Any) -> Case:
    options = {"num_embeddings": 9, "embedding_dim": 4, **options}
    names, rest = ("positions",), (IDS, np.array([4, 0, 2, 5]))
    if "segments" in options:
        names, rest = (*names, "segments"), (*rest, IDS % 2)
    return Case("EmbeddingLayer", options, rest=rest, names=names, linear=linear)


# Every argument at a value that is not its default somewhere.
CASES = {
    "sinusoidal": added("SinusoidalPositions", 6, embedding_dim=6),
    "sinusoidal, t2t": added(
        "SinusoidalPositions",
        *(7, PLACES * 40_000),
        **{
            "embedding_dim": 7,
            "base": 500.0,
            "layout": "half",
            "shift": 1.0,
            "odd": "zero",
        },
    ),
    "sinusoidal, fast": added(
        "SinusoidalPositions",
        *(6, PLACES + 0.375),
        **{"embedding_dim": 6, "cos_first": True, "scale": 0.5, "frequency_scale": 30.0},
    ),
    "sinusoidal, axes": added("SinusoidalPositions", 8, AXES, embedding_dim=8, axes=2),
    "learned": added(
        "LearnedPositions",
        *(6, PLACES),
        **{"max_positions": 40, "embedding_dim": 6, "row_offset": 2, "scale": 0.7},
    ),
    "learned, reals": added(
        "LearnedPositions",
        *(6, PLACES.clip(-1, 38) + 0.375),
        **{"max_positions": 40, "embedding_dim": 6, "row_offset": 2, "padding_idx": 1},
    ),
    "fourier": Case("FourierFeatures", {"matrix": MATRIX}, {"x": (3, 2)}),
    "fourier, woven": Case(
        "FourierFeatures",
        {"matrix": MATRIX[:2], "layout": "interleaved", "cos_first": False},
        {"x": (3, 2)},
    ),
    "rotary": rotary(base=500.0),
    "rotary, interleaved": rotary(layout="interleaved", rotary_dim=6),
    "rotary, yarn": rotary(
        PLACES + 0.375,
        layout="interleaved_to_half",
        scaling=YaRN(factor=4.0, original_length=64),
    ),
    "rotary, sections": rotary(AXES, sections=[3, 1], interleaved_sections=False),
    "rotary, heads last": rotary(
        shape=(2, 3, 2, 8), heads_axis=-2, frequencies=[1.0, 0.5, 0.001]
    ),
    "alibi": bias("AlibiBias"),
    "alibi, encoder": bias("AlibiBias", symmetric=True, max_bias=4.0, factor=3.0),
    "t5": bias("T5Bias", "weight"),
    "t5, decoder": bias(
        "T5Bias", "weight", num_buckets=10, max_distance=30, bidirectional=False
    ),
    "kerple": bias("KerpleBias", "r1"),
    "kerple, power": bias("KerpleBias", "r1", form="power"),
    "fire": bias(
        *("FireBias", "head_weight", "head_bias"),
        **{"width": 5, "c": 0.7, "threshold": 30.0, "eps": 1e-3},
    ),
    "shaw": Case(
        "ShawScores",
        {"head_dim": 6, "max_left": 5, "max_right": 2},
        {"q": (2, 2, 3, 6), "k": (2, 2, 4, 6)},
        PAIRS,
        method="scores",
        linear=("q",),
    ),
    "embedding": tokens(padding_idx=-1),
    "embedding, norm": tokens(
        padding_idx=0, max_norm=1.5, norm_type=1.0, scale_grad_by_freq=True
    ),
    "bag": bags(padding_idx=1, max_norm=1.5, scale_grad_by_freq=True),
    "bag, max": bags(mode="max"),
    "layer": complete(
        *("norm.weight", "norm.bias"),
        **{"max_positions": 8, "segments": 2, "layer_norm": True, "norm_eps": 1e-3},
        **{"padding_idx": 0, "zero_padding": True},
    ),
    "layer, sinusoidal": complete(
        "token.weight", position="sinusoidal", scale=True, padding_idx=-1
    ),
}
RULES = [
    Linear(factor=3.0),
    NTK(factor=4.0),
    DynamicNTK(factor=2.0, original_length=16),
    YaRN(factor=4.0, original_length=64, truncate=False),
    LONGROPE,
    Llama3(factor=8.0, original_length=64),
    Proportional(fraction=0.5),
]


#: Those whose output is rows, as they are.
GATHERS = ("t5", "t5, decoder", "embedding")

# ------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_agree(name):
    case = CASES[name]
    real = case.draw(1)
    y = called(case, in_all_faces(case)["numpy"], real, case.rest)
    dy = np.random.default_rng(2).standard_normal(y.shape).astype(np.float32)
    outputs, gradients = {}, {}
    for face in FACES:
        outputs[face], gradients[face] = pulled(face, case, real, case.rest, dy)
    sizes, by_input = terms(case, real, case.rest, dy)
    assert_agree(outputs, sizes, name)
    assert np.abs(y).max() > 0
    if name in GATHERS:
        for face in FACES:
            np.testing.assert_array_equal(outputs[face], y)
    own = in_all_faces(case)["numpy"].parameters()
    assert by_input.keys() == {*own, *(real if case.name != "AlibiBias" else ())}
    for what, size in by_input.items():
        assert_agree({f: gradients[f][what] for f in FACES}, size, f"{name}: {what}")


@pytest.mark.parametrize(
    "case",
    [
        tokens(padding_idx=2, dtype="bfloat16"),
        bias("T5Bias", num_buckets=12, max_distance=30, dtype="bfloat16"),
        Case(
            "LearnedPositions",
            {"max_positions": 40, "embedding_dim": 6, "row_offset": 2, "dtype": "bfloat16"},
            rest=(PLACES,),
            method="encode",
        ),
    ],
    ids=lambda case: case.name,
)
def test_gathers_are_equal_to_the_bit_in_half_precision(case):
    layers = in_all_faces(case)
    want, got = (
        np.asarray(called(case, layers[face], {}, case.rest))
        for face in ("numpy", "equinox")
    )
    np.testing.assert_array_equal(want.view(np.int16), got.view(np.int16))
    theirs = called(case, layers["torch"], {}, tuple(map(torch.as_tensor, case.rest)))
    bits = theirs.detach().view(torch.int16).numpy()
    np.testing.assert_array_equal(want.view(np.int16), bits)


def tables_of(face: str, layer: Any) -> list[np.ndarray]:
    """What a layer has precomputed, whatever a face keeps it in."""
    kind = type(layer).__name__
    if kind == "AlibiBias":
        return [layer.slopes]
    names = {"T5Bias": ["buckets"], "RotaryPositions": ["tables", "frequencies"]}
    found = []
    for name in names.get(kind, ["tables", "rates"]):
        if face == "torch" and name not in ("buckets", "frequencies"):
            bits = layer.bits if name == "tables" else layer.rate_bits
            found.append(bits.numpy().view(np.float32))
        elif face == "equinox" and kind == "FourierFeatures":
            bits = layer.bits if name == "tables" else layer.rate_bits
            found.append(np.asarray(bits).view(np.float32))
        else:
            value = getattr(layer, name)
            found.append(np.asarray(getattr(value, "array", value)))
    return found


TABLES = {
    **{name: case for name, case in CASES.items() if case.name in (
        "SinusoidalPositions", "FourierFeatures", "RotaryPositions", "AlibiBias", "T5Bias"
    )},
    **{type(rule).__name__: rotary(scaling=rule) for rule in RULES},
    "dealt": rotary(sections=[2, 2], interleaved_sections=True),
    "image": rotary(frequencies=pixtral_axial_frequencies(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_equal_to_the_bit(name):
    layers = in_all_faces(TABLES[name])
    first = tables_of("numpy", layers["numpy"])
    for face in FACES[1:]:
        for mine, other in zip(first, tables_of(face, layers[face]), strict=True):
            np.testing.assert_array_equal(mine, other, err_msg=face)
    if isinstance(getattr(layers["numpy"], "scaling", None), DynamicNTK | LongRoPE):
        for face in FACES:
            longer = tables_of(face, layers[face].at_length(40))[0]
            assert (longer != first[0]).any()
            np.testing.assert_array_equal(
                longer, tables_of("numpy", layers["numpy"].at_length(40))[0]
            )


FAST = np.array([6000.0, 90.0, 2.5, 0.01])


@pytest.mark.parametrize("frequencies", [FAST, np.array([FAST, FAST[::-1]])], ids=len)
@pytest.mark.parametrize("face", FACES)
def test_pairs_that_turn_by_many_radians_are_right_at_real_positions(face, frequencies):
    layer = class_of(face, "RotaryPositions")(8, frequencies=frequencies)
    shape = (*frequencies.shape[:-1], 50)
    positions = np.random.default_rng(0).uniform(-300, 300, shape).astype(np.float32)
    angles = positions[..., None].astype(float) * frequencies[..., None, :]
    angles = angles if frequencies.ndim == 1 else angles.sum(0)
    cos, sin = (np.asarray(turn) for turn in layer.phases(array(face, positions)))
    np.testing.assert_allclose(cos, np.cos(angles), atol=4e-7)
    np.testing.assert_allclose(sin, np.sin(angles), atol=4e-7)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("norm_type", [2.0, np.inf])
@torch.no_grad()
def test_a_norm_may_be_unbounded_and_a_row_have_no_width(face, norm_type):
    ids = array(face, IDS)
    layer = in_all_faces(tokens(max_norm=np.inf, norm_type=norm_type))[face]
    want = in_all_faces(tokens())[face](ids)
    np.testing.assert_array_equal(np.asarray(layer(ids)), np.asarray(want))
    empty = made("Embedding", 9, 0, max_norm=1.0, norm_type=norm_type)(face)
    assert tuple(empty(ids).shape) == (2, 4, 0)


FAR = st.integers(-(2**24) + 1, 2**24 - 1)
NEAR = st.integers(-2, 39)
DRAWN = {
    "sinusoidal": FAR,
    "rotary": FAR,
    "rotary, interleaved": FAR,
    "learned": NEAR,
    "alibi, encoder": FAR,
    "t5": FAR,
    "kerple": FAR,
    "kerple, power": NEAR,
    "fire": st.integers(0, 2**20),
    "shaw": FAR,
}


@pytest.mark.parametrize("name", DRAWN)
def test_faces_agree_at_any_position(name):
    case, of = CASES[name], DRAWN[name]

    @settings(max_examples=8)
    @given(st.lists(of, min_size=10, max_size=10), st.integers(0, 99))
    def at(positions, seed):
        places = iter(np.array(positions, np.int32))
        rest = tuple(
            np.array([next(places) for _ in range(x.size)]).reshape(x.shape)
            for x in case.rest
        )
        real = case.draw(seed)
        y = called(case, in_all_faces(case)["numpy"], real, rest)
        found = {face: pulled(face, case, real, rest, y)[0] for face in FACES}
        assert_agree(found, terms(case, real, rest, y)[0], name)

    at()


# -------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["learned, reals", *(
    next(key for key, case in CASES.items() if case.name == kind)
    for kind in dict.fromkeys(case.name for case in CASES.values())
), "layer, sinusoidal", "rotary, yarn"])  # fmt: skip
def test_a_file_is_the_same_whoever_saved_it_and_loads_everywhere(name, tmp_path):
    # New ones: where gradients have arrived, torch has shortened rows to max_norm.
    layers, written = built_in_all_faces(CASES[name]), {}
    for face in FACES:
        path = tmp_path / f"{face}.safetensors"
        importlib.import_module(f"firstlayer.{face}").save(path, layers[face])
        written[face] = files.read(path)
    tensors, config = written["numpy"]
    for face in FACES[1:]:
        assert written[face][1] == config
        assert written[face][0].keys() == tensors.keys()
        for tensor, value in tensors.items():
            assert written[face][0][tensor].tobytes() == value.tobytes(), tensor
    loaded = importlib.import_module("firstlayer.numpy").load(
        tmp_path / "equinox.safetensors"
    )
    assert loaded.config() == layers["numpy"].config()
    theirs = importlib.import_module("firstlayer.torch").load(
        tmp_path / "equinox.safetensors"
    )
    assert type(theirs).__name__ == CASES[name].name


# ------------------------------------------------------------------------- errors


def made(name: str, *args: Any, **options: Any):
    """Return what builds a layer in the face that is asked for."""

    def make(face: str) -> Any:
        cls = class_of(face, name)
        drawn = {"key": key(0)} if "key" in inspect.signature(cls).parameters else {}
        return cls(*args, **options, **drawn)

    return make


def array(face: str, value: Any) -> Any:
    return torch.as_tensor(np.asarray(value)) if face == "torch" else np.asarray(value)


def wrong(name: str, *args: Any, method: str = "__call__", **options: Any):
    """Return what calls a layer of ``CASES`` in the face that is asked for."""

    def call(face: str) -> Any:
        given = [None if x is None else array(face, x) for x in args]
        more = {k: v if k == "offset" else array(face, v) for k, v in options.items()}
        return getattr(in_all_faces(CASES[name])[face], method)(*given, **more)

    return call


X, HEADS = np.ones((2, 3, 6), np.float32), np.ones((2, 2, 3, 8), np.float32)
REFUSED = {
    "head_dim must be positive and even, got 7": made("RotaryPositions", 7),
    "rotary_dim must be at most head_dim 8, got 10": made(
        "RotaryPositions", 8, rotary_dim=10
    ),
    "base must be greater than 1, got 0.5": made("RotaryPositions", 8, base=0.5),
    "layout must be 'half', 'interleaved' or 'interleaved_to_half', got 'neox'": made(
        "RotaryPositions", 8, layout="neox"
    ),
    "heads_axis must be -3 or -2, got 1": made("RotaryPositions", 8, heads_axis=1),
    "sections must add up to 4 pairs, got [1, 2]": made(
        "RotaryPositions", 8, sections=[1, 2]
    ),
    "give frequencies or scaling, rotary_dim and sections, not both": made(
        "RotaryPositions", 8, frequencies=[1.0], rotary_dim=2
    ),
    "n must be positive, got 0": lambda face: in_all_faces(CASES["rotary"])[face].at_length(
        0
    ),
    "embedding_dim must be positive, got 0": made("SinusoidalPositions", 0),
    "embedding_dim must be a multiple of axes 4, got 6": made(
        "SinusoidalPositions", 6, axes=4
    ),
    "layout must be 'interleaved' or 'half', got 'neox'": made(
        "SinusoidalPositions", 6, layout="neox"
    ),
    "odd must be 'sine' or 'zero', got 'cosine'": made(
        "SinusoidalPositions", 5, odd="cosine"
    ),
    "base must be positive and finite, got -1.0": made("SinusoidalPositions", 6, base=-1.0),
    "shift must be smaller than 3.0, got 3.0": made("SinusoidalPositions", 6, shift=3.0),
    "matrix must have shape (pairs, axes), got (1,)": made("FourierFeatures", [1.0]),
    "matrix must be finite, got NaN or infinity in it": made("FourierFeatures", [[np.inf]]),
    "max_positions must be positive, got 0": made("LearnedPositions", 0, 6),
    "row_offset must be at least 0, got -1": made("LearnedPositions", 4, 6, row_offset=-1),
    "padding_idx must be one of the 2 rows before position 0, got 2": made(
        "LearnedPositions", 4, 6, row_offset=2, padding_idx=2
    ),
    "weight must have shape (4, 6), got (3, 6)": made(
        "LearnedPositions", 4, 6, weight=X[0]
    ),
    "num_heads must be positive, got 0": made("AlibiBias", 0),
    "max_bias must be positive and finite, got 0": made("AlibiBias", 2, max_bias=0),
    "num_heads must be an integer, got float": made("T5Bias", 2.0),
    "num_buckets must be even and at least 4 if bidirectional, got 7": made(
        "T5Bias", 2, num_buckets=7
    ),
    "max_distance must be greater than 8, the number of distances with a bucket of their "
    "own, got 8": made("T5Bias", 2, max_distance=8),
    "form must be 'log' or 'power', got 'exp'": made("KerpleBias", 2, form="exp"),
    "r1 must have shape (2,), got (1,)": made("KerpleBias", 2, r1=[1.0], r2=[1.0, 1.0]),
    "r1 and r2 must have one dtype, got float32 and float16": made(
        *("KerpleBias", 1),
        **{"r1": np.ones(1, np.float32), "r2": np.ones(1, np.float16)},
    ),
    "width must be positive, got 0": made("FireBias", 2, width=0),
    "eps must be positive and finite, got 0.0": made("FireBias", 2, eps=0.0),
    "max_right must be at least 0, got -1": made("ShawScores", 4, max_left=1, max_right=-1),
    "padding_idx must be in [-9, 9) for num_embeddings 9, got 9": made(
        "Embedding", 9, 4, padding_idx=9
    ),
    "padding_idx must be an integer, got float": made("Embedding", 9, 4, padding_idx=2.0),
    "padding_idx must be an integer, got bool": made(
        "EmbeddingBag", 9, 4, padding_idx=True
    ),
    "max_norm must be positive, got -1.0": made("Embedding", 9, 4, max_norm=-1.0),
    "max_norm must be a number, got str": made("Embedding", 9, 4, max_norm="1"),
    "norm_type must be a number, got NoneType": made("Embedding", 9, 4, norm_type=None),
    "base must be a number, got str": made("RotaryPositions", 8, base="10000"),
    "base must be a number, got bool": made("SinusoidalPositions", 6, base=True),
    "shift must be a number, got str": made("SinusoidalPositions", 6, shift="1"),
    "scale must be a number, got list": made("SinusoidalPositions", 6, scale=[1.0]),
    "scale must be a number, got str": made("LearnedPositions", 6, 4, scale="1"),
    "max_bias must be a number, got str": made("AlibiBias", 2, max_bias="8"),
    "norm_eps must be a number, got str": made(
        "EmbeddingLayer", 9, 4, position=None, norm_eps="0"
    ),
    "padding_idx must be an integer, got str": made(
        "LearnedPositions", 6, 4, row_offset=2, padding_idx="1"
    ),
    "eps must be a number, got str": made("FireBias", 2, eps="1e-6"),
    "dropout must be a number, got str": made(
        "EmbeddingLayer", 9, 4, position=None, dropout="0.1"
    ),
    "mode must be 'sum', 'mean' or 'max', got 'median'": made(
        "EmbeddingBag", 9, 4, mode="median"
    ),
    "dropout must be between 0 and 1, got 1.5": made(
        "EmbeddingLayer", 9, 4, position=None, dropout=1.5
    ),
    "zero_padding needs padding_idx, got None": made(
        "EmbeddingLayer", 9, 4, zero_padding=True
    ),
    "position='learned' needs max_positions, got None": made("EmbeddingLayer", 9, 4),
    "norm_eps must not be negative, got -1.0": made(
        "EmbeddingLayer", 9, 4, position=None, norm_eps=-1.0
    ),
    "num_embeddings must be at least 0, got -2": made(
        "EmbeddingLayer", -2, 4, position=None
    ),
    "position must be 'learned', 'sinusoidal', None or a layer that adds positions, got "
    "the class dict": made("EmbeddingLayer", 9, 4, position=dict),
    "position must be 'learned', 'sinusoidal', None or a layer that adds positions, got "
    "ndarray": made("EmbeddingLayer", 9, 4, position=np.ones(2)),
    "inputs_embeds must be real, got int64": wrong(
        "layer", inputs_embeds=np.ones((1, 2, 4), int)
    ),
    "inputs_embeds must have shape (..., length, 4), got (1, 2, 3)": wrong(
        "layer", inputs_embeds=np.ones((1, 2, 3), np.float32)
    ),
    "offset must be integers or reals, got object": wrong("learned", X, offset=None),
    "positions must fit x of shape (2, 2, 3, 8) with heads_axis -3, got shape ()": (
        lambda face: in_all_faces(CASES["rotary"])[face](array(face, HEADS), 5)
    ),
    "delta must be smaller than 16777216 in size, got 16777216": wrong(
        "rotary", HEADS, 2**24, method="rerotate"
    ),
    "give positions or offset, not both: add the offset to positions": wrong(
        "learned", X, [1, 2, 3], offset=1
    ),
    "positions must be smaller than 16777216 in size, got -16777216": wrong(
        "sinusoidal", X, [1, -(2**24), 2]
    ),
    "positions must be smaller than 16777216 in size, got 4294967299": wrong(
        "rotary", HEADS, offset=2**32 + 3
    ),
    "positions must be smaller than max_positions 40, got 42": wrong(
        "learned", X, offset=40
    ),
    "positions must be at least -2 for row_offset 2, got -3": wrong(
        "learned", [0, -3], method="encode"
    ),
    "positions must be at most 39, the last of max_positions 40, got 39.5": wrong(
        "learned", np.array([39.5], np.float32), method="encode"
    ),
    "positions must have shape (3,) or (2, 3), got (2,)": wrong("learned", X, [1, 2]),
    "positions must be given when axes is 2, got None": wrong(
        "sinusoidal, axes", np.ones((2, 3, 8), np.float32)
    ),
    "positions must have shape (2, ...), one coordinate for each of the axes, got (3,)": (
        wrong("rotary, sections", HEADS, [1, 2, 3])
    ),
    "positions must fit x of shape (2, 2, 3, 8) with heads_axis -3, got shape (4,)": (
        wrong("rotary", HEADS, [1, 2, 3, 4])
    ),
    "positions must be integers or reals, got bool": wrong("learned", X, [True] * 3),
    "offset must be integers or reals, got bool": wrong("rotary", HEADS, offset=True),
    "x must be real, got int64": wrong("learned", np.ones((2, 3, 6), np.int64)),
    "x must have shape (..., length, 6), got (2, 3, 5)": wrong("learned", X[..., :5]),
    "x must have shape (..., length, heads, 8), got (3, 8)": wrong(
        "rotary, heads last", HEADS[0, 0]
    ),
    "delta must be a number or one per row of keys of shape (2, 2, 3, 8), got shape (3,)": (
        wrong("rotary", HEADS, [1, 2, 3], method="rerotate")
    ),
    "coordinates must have shape (..., 2), got (3,)": wrong("fourier", X[0, 0, :3]),
    "coordinates must be smaller than 16777216 in size, got 16777216.0": wrong(
        "fourier", np.array([0.0, 2**24], np.float32)
    ),
    "q_positions must be finite, got nan": wrong(
        "alibi", np.array([np.nan], np.float32), [1], method="bias"
    ),
    "k_positions must have shape (length,) or (batch, length), got (1, 1, 1)": wrong(
        "kerple", [0], [[[1]]], method="bias"
    ),
    "q_positions and k_positions must have the same batch, got 2 and 3": wrong(
        "fire", [[0], [1]], [[1], [2], [3]], method="bias"
    ),
    "k_positions must have one entry for each of the 3 rows of k, got 2": wrong(
        "shaw", X, X, [0, 1, 2], [0, 1], method="scores"
    ),
    "q must have shape (..., length, 6), got (2, 3, 5)": wrong(
        "shaw", X[..., :5], X, [0, 1, 2], [0, 1, 2], method="scores"
    ),
    "ids[1, 0] is 9, but num_embeddings is 9": wrong("embedding", [[1], [9]]),
    "ids[0] is -1, but num_embeddings is 9": wrong("embedding", [-1]),
    "ids[0] is 4294967299, but num_embeddings is 9": wrong("embedding", [2**32 + 3]),
    "ids must be integers, got bool": wrong("embedding", [True]),
    "ids must be integers, got float64": wrong("embedding", np.array([1.0])),
    "ids[1] is 9, but num_embeddings is 9 ": wrong("bag", [1, 9], [0]),
    "give ids or inputs_embeds, got neither": wrong("layer"),
    "segments[0, 1] is 2, but the number of segments is 2": wrong(
        "layer", [[1, 2]], segments=[[0, 2]]
    ),
    "x must end in embedding_dim 4, got shape (3,)": wrong(
        "embedding", X[0, 0, :3], method="logits"
    ),
    "positions must be smaller than max_positions 8, got 8": wrong(
        "layer", [[1, 2]], offset=7
    ),
}


@pytest.mark.rejects
@pytest.mark.parametrize("message", REFUSED)
def test_errors_have_the_same_words(message):
    found = refusals(REFUSED[message])
    assert found.keys() == set(FACES)
    assert len({kind for kind, _ in found.values()}) == 1, found
    for face, (_, words) in found.items():
        assert words == message.strip(), face


# -------------------------------------------------------------------------- names

# What only says how a layer is made, in the ways of its framework.
OF_A_FACE = {"init", "rng", "device", "key", "sparse", "weight", "_weight", "_freeze"}
METHODS = {
    "AlibiBias": ["bias", "config"],
    "Embedding": ["logits", "mask", "resize", "set_padding"],
    "EmbeddingBag": ["logits", "mask", "resize", "set_padding"],
    "EmbeddingLayer": ["config", "logits", "mask"],
    "FireBias": ["bias", "config"],
    "FourierFeatures": ["config", "gaussian", "octaves"],
    "KerpleBias": ["bias", "config"],
    "LearnedPositions": ["config", "encode", "resize", "resize_grid", "set_padding"],
    "RotaryPositions": ["at_length", "config", "from_hf", "phases", "rerotate"],
    "ShawScores": ["config", "scores"],
    "SinusoidalPositions": ["config", "encode", "marian", "tensor2tensor", "timestep"],
    "T5Bias": ["bias", "config"],
}


def parameters_of(run: Any) -> dict[str, Any]:
    """The names of a function's parameters and their defaults, those of a face left out."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(run).parameters.items()
        if name not in OF_A_FACE
    }


def public(cls: type) -> set[str]:
    return {
        name
        for name, value in inspect.getmembers(cls, callable)
        if not name.startswith("_")
    }


@pytest.mark.parametrize("name", METHODS)
def test_names_and_parameters_are_the_same(name):
    classes = [class_of(face, name) for face in FACES]
    shared = set.intersection(*map(public, classes)) - {"parameters", "repair"}
    assert sorted(shared) == METHODS[name]
    for what in (None, *METHODS[name]):
        runs = [cls if what is None else getattr(cls, what) for cls in classes]
        first, *others = map(parameters_of, runs)
        for other in others:
            assert other == first, what
    for cls in (classes[0], classes[2]):
        kinds = [(p.name, p.kind) for p in inspect.signature(cls).parameters.values()]
        leading = [
            key for key, kind in kinds if kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        theirs = list(inspect.signature(classes[1]).parameters)
        assert leading == theirs[: len(leading)]


def test_every_layer_of_a_face_is_in_the_others():
    names = {
        face: set(importlib.import_module(f"firstlayer.{face}").__all__) for face in FACES
    }
    assert names["numpy"] == set.intersection(*names.values())
    assert {*METHODS, "load", "save"} <= names["numpy"]
    assert {case.name for case in CASES.values()} == set(METHODS)
