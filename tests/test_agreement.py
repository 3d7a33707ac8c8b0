"""The three front ends agree: outputs, gradients, tables, files, errors and names."""

import importlib
import inspect
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.files import safetensors as files
from firstlayer.positions import from_patches
from firstlayer.positions.axial import dinov3_axial_frequencies, pixtral_axial_frequencies
from firstlayer.positions.scaling import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)
from firstlayer.vector_files.table import VectorTable
from firstlayer.vector_files.writing import write_vectors
from tests.support.front_ends import (
    FRONT_ENDS,
    Case,
    assert_agree,
    built_in_all_front_ends,
    call,
    class_of,
    errors_of,
    in_all_front_ends,
    output_and_gradients,
    term_sizes,
)
from tests.support.jax_round_trips import key

POSITIONS = np.array([[0, 7, 39], [12, -2, 3]])
AXES = np.array([[[0, 7, 39], [12, 2, 3]], [[5, 70_000, 1], [0, 3, -9]]])
PAIRS = (np.array([[0, 7, 40], [900, 3, 12]]), np.array([0, 1, 12, 41]))
IDS = np.array([[3, 7, 3, 0], [0, 1, 8, 3]])
TABLE = np.random.default_rng(5).standard_normal((4, 6)).astype(np.float32)
MATRIX = [[0.5, 3.0], [7.0, 0.25], [90.0, 0.0]]
LONGROPE = LongRoPE(
    short_factors=[1.0, 1.5, 2.0, 3.0],
    long_factors=[1.0, 4.0, 8.0, 9.0],
    original_length=16,
    factor=4.0,
)


def added(name: str, width: int, at: Any = POSITIONS, **options: Any) -> Case:
    linear = ("x", "weight") if name == "LearnedPositions" else ("x",)
    return Case(name, options, {"x": (2, 3, width)}, (at,), linear=linear)


def rotary(
    at: Any = POSITIONS, shape: tuple[int, ...] = (2, 2, 3, 8), **options: Any
) -> Case:
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


def hashed(name: str, *linear: str, **options: Any) -> Case:
    options = {"embedding_dim": 4, **options}
    return Case(name, options, rest=(IDS,), linear=linear)


def complete(*linear: str, **options: Any) -> Case:
    options = {"num_embeddings": 9, "embedding_dim": 4, **options}
    names, rest = ("positions",), (IDS, np.array([4, 0, 2, 5]))
    if "segments" in options:
        names, rest = (*names, "segments"), (*rest, IDS % 2)
    return Case("EmbeddingLayer", options, rest=rest, names=names, linear=linear)


# Every argument has a value other than its default in some case.
CASES = {
    "sinusoidal": added("SinusoidalPositions", 6, embedding_dim=6),
    "sinusoidal, t2t": added(
        "SinusoidalPositions",
        *(7, POSITIONS * 40_000),
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
        *(6, POSITIONS + 0.375),
        **{"embedding_dim": 6, "cos_first": True, "scale": 0.5, "frequency_scale": 30.0},
    ),
    "sinusoidal, axes": added("SinusoidalPositions", 8, AXES, embedding_dim=8, axes=2),
    "learned": added(
        "LearnedPositions",
        *(6, POSITIONS),
        **{"max_positions": 40, "embedding_dim": 6, "row_offset": 2, "scale": 0.7},
    ),
    "learned, reals": added(
        "LearnedPositions",
        *(6, POSITIONS.clip(-1, 38) + 0.375),
        **{"max_positions": 40, "embedding_dim": 6, "row_offset": 2, "padding_idx": 1},
    ),
    "fourier": Case("FourierFeatures", {"matrix": MATRIX}, {"x": (3, 2)}),
    "fourier, interleaved": Case(
        "FourierFeatures",
        {"matrix": MATRIX[:2], "layout": "interleaved", "cos_first": False},
        {"x": (3, 2)},
    ),
    "rotary": rotary(base=500.0),
    "rotary, interleaved": rotary(layout="interleaved", rotary_dim=6),
    "rotary, yarn": rotary(
        POSITIONS + 0.375,
        layout="interleaved_to_half",
        scaling=YaRN(factor=4.0, original_length=64),
    ),
    "rotary, sections": rotary(AXES, sections=[3, 1], interleaved_sections=False),
    "rotary, heads last": rotary(
        shape=(2, 3, 2, 8), heads_axis=-2, frequencies=[1.0, 0.5, 0.001]
    ),
    "rotary, patches": rotary(
        from_patches((1, 3)), frequencies=dinov3_axial_frequencies(8, base=30.0)
    ),
    "xpos": Case(
        *("XPosRotary", {"head_dim": 8, "base": 500.0, "scale_base": 40.0, "center": 9}),
        *({"x": (2, 2, 3, 8)}, (POSITIONS,)),
        linear=("x",),
    ),
    "xpos, reals": Case(
        "XPosRotary",
        {"head_dim": 8, "rotary_dim": 6, "layout": "interleaved", "heads_axis": -2},
        *({"x": (2, 3, 2, 8)}, (POSITIONS + 0.375,)),
        linear=("x",),
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
    "transformer-xl": Case(
        "TransformerXLScores",
        {"num_heads": 2, "head_dim": 6},
        {"q": (2, 2, 3, 6), "k": (2, 2, 5, 6)},
        method="scores",
        linear=("weight",),
    ),
    "transformer-xl, clamped": Case(
        "TransformerXLScores",
        {
            "num_heads": 2,
            "head_dim": 6,
            "embedding_dim": 8,
            "base": 50.0,
            "max_distance": 3,
        },
        {"q": (2, 2, 5, 6), "k": (2, 2, 4, 6)},
        method="scores",
        linear=("weight",),
    ),
    "cope": Case(
        "CopeBias",
        {"head_dim": 6, "max_positions": 4, "weight": TABLE},
        {"q": (2, 2, 3, 6), "scores": (2, 2, 3, 9)},
        method="bias",
        linear=("weight",),
    ),
    "time2vec": Case("Time2Vec", {"embedding_dim": 5}, {"x": (3, 2)}),
    "embedding": tokens(padding_idx=-1),
    "embedding, norm": tokens(
        padding_idx=0, max_norm=1.5, norm_type=1.0, scale_grad_by_freq=True
    ),
    "bag": bags(padding_idx=1, max_norm=1.5, scale_grad_by_freq=True),
    "bag, max": bags(mode="max"),
    "hashed": hashed("HashedEmbedding", num_rows=40, hashes=3, seed=9),
    "hashed, concatenated": hashed(
        *("HashedEmbedding", "importance.weight"),
        **{"num_rows": 40, "combine": "concat", "importance_rows": 5},
    ),
    "hashed, weighted": hashed("HashedEmbedding", num_rows=40, importance_rows=5),
    "quotient and remainder": hashed("QuotientRemainderEmbedding", num_embeddings=9),
    "quotient and remainder, concatenated": hashed(
        *("QuotientRemainderEmbedding", "table.weight"),
        **{"num_embeddings": 9, "buckets": 4, "combine": "concat"},
    ),
    "frequent ids": hashed(
        *("FrequencyEmbedding", "table.weight"),
        **{"frequent_ids": [8, 3, 1], "num_rows": 5, "hashes": 3, "seed": 4},
    ),
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


# Cases whose output is unchanged table rows.
GATHERS = ("t5", "t5, decoder", "embedding")

# ------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_agree(name):
    case = CASES[name]
    real = case.draw(1)
    y = call(case, in_all_front_ends(case)["numpy"], real, case.rest)
    dy = np.random.default_rng(2).standard_normal(y.shape).astype(np.float32)
    outputs, gradients = {}, {}
    for front_end in FRONT_ENDS:
        outputs[front_end], gradients[front_end] = output_and_gradients(
            front_end, case, real, case.rest, dy
        )
    sizes, by_input = term_sizes(case, real, case.rest, dy)
    assert_agree(outputs, sizes, name)
    assert np.abs(y).max() > 0
    if name in GATHERS:
        for front_end in FRONT_ENDS:
            np.testing.assert_array_equal(outputs[front_end], y)
    own = in_all_front_ends(case)["numpy"].parameters()
    assert by_input.keys() == {*own, *(real if case.name != "AlibiBias" else ())}
    for what, size in by_input.items():
        assert_agree({f: gradients[f][what] for f in FRONT_ENDS}, size, f"{name}: {what}")


@pytest.mark.parametrize(
    "case",
    [
        tokens(padding_idx=2, dtype="bfloat16"),
        bias("T5Bias", num_buckets=12, max_distance=30, dtype="bfloat16"),
        Case(
            "LearnedPositions",
            {"max_positions": 40, "embedding_dim": 6, "row_offset": 2, "dtype": "bfloat16"},
            rest=(POSITIONS,),
            method="encode",
        ),
    ],
    ids=lambda case: case.name,
)
def test_half_precision_gathers_are_bitwise_equal(case):
    layers = in_all_front_ends(case)
    want, got = (
        np.asarray(call(case, layers[front_end], {}, case.rest))
        for front_end in ("numpy", "equinox")
    )
    np.testing.assert_array_equal(want.view(np.int16), got.view(np.int16))
    output = call(case, layers["torch"], {}, tuple(map(torch.as_tensor, case.rest)))
    bits = output.detach().view(torch.int16).numpy()
    np.testing.assert_array_equal(want.view(np.int16), bits)


def tables_of(front_end: str, layer: Any) -> list[np.ndarray]:
    """Return the precomputed tables of a layer as NumPy arrays."""
    class_name = type(layer).__name__
    if class_name == "AlibiBias":
        return [layer.slopes]
    names = {"T5Bias": ["buckets"], "RotaryPositions": ["tables", "frequencies"]}
    tables = []
    for name in names.get(class_name, ["tables", "rates"]):
        if front_end == "torch" and name not in ("buckets", "frequencies"):
            bits = layer.bits if name == "tables" else layer.rate_bits
            tables.append(bits.numpy().view(np.float32))
        elif front_end == "equinox" and class_name == "FourierFeatures":
            bits = layer.bits if name == "tables" else layer.rate_bits
            tables.append(np.asarray(bits).view(np.float32))
        else:
            value = getattr(layer, name)
            tables.append(np.asarray(getattr(value, "array", value)))
    return tables


TABLES = {
    **{name: case for name, case in CASES.items() if case.name in (
        "SinusoidalPositions", "FourierFeatures", "RotaryPositions", "XPosRotary",
        "AlibiBias", "T5Bias",
    )},
    **{type(rule).__name__: rotary(scaling=rule) for rule in RULES},
    "interleaved sections": rotary(sections=[2, 2], interleaved_sections=True),
    "image": rotary(frequencies=pixtral_axial_frequencies(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_precomputed_tables_are_bitwise_equal(name):
    layers = in_all_front_ends(TABLES[name])
    first = tables_of("numpy", layers["numpy"])
    for front_end in FRONT_ENDS[1:]:
        others = tables_of(front_end, layers[front_end])
        for table, other in zip(first, others, strict=True):
            np.testing.assert_array_equal(table, other, err_msg=front_end)
    if isinstance(getattr(layers["numpy"], "scaling", None), DynamicNTK | LongRoPE):
        for front_end in FRONT_ENDS:
            longer = tables_of(front_end, layers[front_end].at_length(40))[0]
            assert (longer != first[0]).any()
            np.testing.assert_array_equal(
                longer, tables_of("numpy", layers["numpy"].at_length(40))[0]
            )


FAST = np.array([6000.0, 90.0, 2.5, 0.01])


@pytest.mark.parametrize("frequencies", [FAST, np.array([FAST, FAST[::-1]])], ids=len)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_fast_pairs_are_accurate_at_real_positions(front_end, frequencies):
    layer = class_of(front_end, "RotaryPositions")(8, frequencies=frequencies)
    shape = (*frequencies.shape[:-1], 50)
    positions = np.random.default_rng(0).uniform(-300, 300, shape).astype(np.float32)
    angles = positions[..., None].astype(float) * frequencies[..., None, :]
    angles = angles if frequencies.ndim == 1 else angles.sum(0)
    cos, sin = (np.asarray(phase) for phase in layer.phases(array(front_end, positions)))
    np.testing.assert_allclose(cos, np.cos(angles), atol=4e-7)
    np.testing.assert_allclose(sin, np.sin(angles), atol=4e-7)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("norm_type", [2.0, np.inf])
@torch.no_grad()
def test_max_norm_may_be_infinite_and_width_zero(front_end, norm_type):
    ids = array(front_end, IDS)
    layer = in_all_front_ends(tokens(max_norm=np.inf, norm_type=norm_type))[front_end]
    want = in_all_front_ends(tokens())[front_end](ids)
    np.testing.assert_array_equal(np.asarray(layer(ids)), np.asarray(want))
    empty = building("Embedding", 9, 0, max_norm=1.0, norm_type=norm_type)(front_end)
    assert tuple(empty(ids).shape) == (2, 4, 0)


FAR = st.integers(-(2**24) + 1, 2**24 - 1)
NEAR = st.integers(-2, 39)
STRATEGIES = {
    "sinusoidal": FAR,
    "rotary": FAR,
    "rotary, interleaved": FAR,
    "xpos": st.integers(-1000, 1000),
    "learned": NEAR,
    "alibi, encoder": FAR,
    "t5": FAR,
    "kerple": FAR,
    "kerple, power": NEAR,
    "fire": st.integers(0, 2**20),
    "shaw": FAR,
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_front_ends_agree_at_any_position(name):
    case, position = CASES[name], STRATEGIES[name]

    @settings(max_examples=8)
    @given(st.lists(position, min_size=10, max_size=10), st.integers(0, 99))
    def check(positions, seed):
        drawn = iter(np.array(positions, np.int32))
        rest = tuple(
            np.array([next(drawn) for _ in range(x.size)]).reshape(x.shape)
            for x in case.rest
        )
        real = case.draw(seed)
        y = call(case, in_all_front_ends(case)["numpy"], real, rest)
        outputs = {
            front_end: output_and_gradients(front_end, case, real, rest, y)[0]
            for front_end in FRONT_ENDS
        }
        assert_agree(outputs, term_sizes(case, real, rest, y)[0], name)

    check()


# ------------------------------------------------------------------------ padding


def with_table(front_end: str, layer: Any, table: np.ndarray) -> Any:
    """Write a table to a layer as users of the front end do, and return the layer."""
    if front_end == "equinox":
        return eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(table))
    if front_end == "torch":
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(table))
    else:
        layer.weight[...] = table
    return layer


@pytest.mark.parametrize("name", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@torch.no_grad()
def test_new_padding_row_is_zero_and_a_written_one_is_kept(front_end, name):
    layer = building(name, 9, 4, padding_idx=2)(front_end)
    assert (np.asarray(layer.weight)[2] == 0).all()
    table = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    layer = with_table(front_end, layer, table)
    x = np.ones(4, np.float32)
    for _ in range(2):
        layer(array(front_end, [[1, 2]]))
        np.testing.assert_array_equal(np.asarray(layer.weight), table)
        logits = np.asarray(layer.logits(array(front_end, x)))
        np.testing.assert_allclose(logits, table @ x, rtol=1e-5, atol=1e-6)
    if name == "Embedding":
        np.testing.assert_array_equal(np.asarray(layer(array(front_end, [2]))), table[[2]])


def test_tied_head_passes_the_padding_row_its_gradient():
    layers = built_in_all_front_ends(tokens(padding_idx=2))
    x, dy = (np.random.default_rng(n).standard_normal((3, n)) for n in (4, 9))
    x, dy = x.astype(np.float32), dy.astype(np.float32)
    _, pull = layers["numpy"].logits_vjp(x)
    want = pull(dy)["weight"]
    np.testing.assert_allclose(want, dy.T @ x, rtol=1e-5, atol=1e-6)
    assert want[2].all()
    layers["torch"].logits(torch.from_numpy(x)).backward(torch.from_numpy(dy))
    gradient = layers["torch"].weight.grad
    np.testing.assert_allclose(gradient.to_dense().numpy(), want, rtol=1e-5, atol=1e-6)
    _, pullback = eqx.filter_vjp(lambda layer: layer.logits(x), layers["equinox"])
    (gradients,) = pullback(jnp.asarray(dy))
    np.testing.assert_allclose(gradients.parameters()["weight"], want, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["learned, reals", *(
    next(key for key, case in CASES.items() if case.name == class_name)
    for class_name in dict.fromkeys(case.name for case in CASES.values())
), "layer, sinusoidal", "rotary, yarn"])  # fmt: skip
def test_files_are_identical_and_load_in_every_front_end(name, tmp_path):
    # New layers: after a backward, torch has clipped rows to max_norm in place.
    layers, written = built_in_all_front_ends(CASES[name]), {}
    for front_end in FRONT_ENDS:
        path = tmp_path / f"{front_end}.safetensors"
        importlib.import_module(f"firstlayer.{front_end}").save(path, layers[front_end])
        written[front_end] = files.read(path)
    tensors, config = written["numpy"]
    for front_end in FRONT_ENDS[1:]:
        assert written[front_end][1] == config
        assert written[front_end][0].keys() == tensors.keys()
        for tensor, value in tensors.items():
            assert written[front_end][0][tensor].tobytes() == value.tobytes(), tensor
    loaded = importlib.import_module("firstlayer.numpy").load(
        tmp_path / "equinox.safetensors"
    )
    assert loaded.config() == layers["numpy"].config()
    torch_layer = importlib.import_module("firstlayer.torch").load(
        tmp_path / "equinox.safetensors"
    )
    assert type(torch_layer).__name__ == CASES[name].name


# ------------------------------------------------------------------------- errors


def building(name: str, *args: Any, **options: Any):
    """Return a function that builds a layer in a front end."""

    def make(front_end: str) -> Any:
        cls = class_of(front_end, name)
        drawn = {"key": key(0)} if "key" in inspect.signature(cls).parameters else {}
        return cls(*args, **options, **drawn)

    return make


def array(front_end: str, value: Any) -> Any:
    return torch.as_tensor(np.asarray(value)) if front_end == "torch" else np.asarray(value)


def calling(name: str, *args: Any, method: str = "__call__", **options: Any):
    """Return a function that calls a layer of ``CASES`` in a front end."""

    def call(front_end: str) -> Any:
        arguments = [None if x is None else array(front_end, x) for x in args]
        more = {k: v if k == "offset" else array(front_end, v) for k, v in options.items()}
        return getattr(in_all_front_ends(CASES[name])[front_end], method)(
            *arguments, **more
        )

    return call


X, HEADS = np.ones((2, 3, 6), np.float32), np.ones((2, 2, 3, 8), np.float32)
ERRORS = {
    "head_dim must be positive and even, got 7": building("RotaryPositions", 7),
    "rotary_dim must be at most head_dim 8, got 10": building(
        "RotaryPositions", 8, rotary_dim=10
    ),
    "base must be greater than 1, got 0.5": building("RotaryPositions", 8, base=0.5),
    "layout must be 'half', 'interleaved' or 'interleaved_to_half', got 'neox'": building(
        "RotaryPositions", 8, layout="neox"
    ),
    "heads_axis must be -3 or -2, got 1": building("RotaryPositions", 8, heads_axis=1),
    "sections must add up to 4 pairs, got [1, 2]": building(
        "RotaryPositions", 8, sections=[1, 2]
    ),
    "give frequencies or scaling, rotary_dim and sections, not both": building(
        "RotaryPositions", 8, frequencies=[1.0], rotary_dim=2
    ),
    "scale_base must be positive and finite, got 0": building(
        "XPosRotary", 8, scale_base=0
    ),
    "center must be an integer, got float": building("XPosRotary", 8, center=0.5),
    "positions must be at most 1327 from center 9 for scale_base 40, got 1337": calling(
        "xpos", HEADS, offset=1335
    ),
    "n must be positive, got 0": lambda front_end: in_all_front_ends(CASES["rotary"])[
        front_end
    ].at_length(0),
    "embedding_dim must be positive, got 0": building("SinusoidalPositions", 0),
    "embedding_dim must be a multiple of axes 4, got 6": building(
        "SinusoidalPositions", 6, axes=4
    ),
    "layout must be 'interleaved' or 'half', got 'neox'": building(
        "SinusoidalPositions", 6, layout="neox"
    ),
    "odd must be 'sine' or 'zero', got 'cosine'": building(
        "SinusoidalPositions", 5, odd="cosine"
    ),
    "base must be positive and finite, got -1.0": building(
        "SinusoidalPositions", 6, base=-1.0
    ),
    "shift must be smaller than 3.0, got 3.0": building(
        "SinusoidalPositions", 6, shift=3.0
    ),
    "matrix must have shape (pairs, axes), got (1,)": building("FourierFeatures", [1.0]),
    "matrix must be finite, got NaN or infinity in it": building(
        "FourierFeatures", [[np.inf]]
    ),
    "max_positions must be positive, got 0": building("LearnedPositions", 0, 6),
    "row_offset must be at least 0, got -1": building(
        "LearnedPositions", 4, 6, row_offset=-1
    ),
    "padding_idx must be one of the 2 rows before position 0, got 2": building(
        "LearnedPositions", 4, 6, row_offset=2, padding_idx=2
    ),
    "weight must have shape (4, 6), got (3, 6)": building(
        "LearnedPositions", 4, 6, weight=X[0]
    ),
    "num_heads must be positive, got 0": building("AlibiBias", 0),
    "max_bias must be positive and finite, got 0": building("AlibiBias", 2, max_bias=0),
    "num_heads must be an integer, got float": building("T5Bias", 2.0),
    "num_buckets must be even and at least 4 if bidirectional, got 7": building(
        "T5Bias", 2, num_buckets=7
    ),
    "max_distance must be greater than 8, the number of distances with a bucket of their "
    "own, got 8": building("T5Bias", 2, max_distance=8),
    "form must be 'log' or 'power', got 'exp'": building("KerpleBias", 2, form="exp"),
    "r1 must have shape (2,), got (1,)": building("KerpleBias", 2, r1=[1.0], r2=[1.0, 1.0]),
    "r1 and r2 must have one dtype, got float32 and float16": building(
        *("KerpleBias", 1),
        **{"r1": np.ones(1, np.float32), "r2": np.ones(1, np.float16)},
    ),
    "width must be positive, got 0": building("FireBias", 2, width=0),
    "eps must be positive and finite, got 0.0": building("FireBias", 2, eps=0.0),
    "max_right must be at least 0, got -1": building(
        "ShawScores", 4, max_left=1, max_right=-1
    ),
    "padding_idx must be in [-9, 9) for num_embeddings 9, got 9": building(
        "Embedding", 9, 4, padding_idx=9
    ),
    "padding_idx must be an integer, got float": building(
        "Embedding", 9, 4, padding_idx=2.0
    ),
    "padding_idx must be an integer, got bool": building(
        "EmbeddingBag", 9, 4, padding_idx=True
    ),
    "max_norm must be positive, got -1.0": building("Embedding", 9, 4, max_norm=-1.0),
    "max_norm must be a number, got str": building("Embedding", 9, 4, max_norm="1"),
    "norm_type must be a number, got NoneType": building("Embedding", 9, 4, norm_type=None),
    "base must be a number, got str": building("RotaryPositions", 8, base="10000"),
    "base must be a number, got bool": building("SinusoidalPositions", 6, base=True),
    "shift must be a number, got str": building("SinusoidalPositions", 6, shift="1"),
    "scale must be a number, got list": building("SinusoidalPositions", 6, scale=[1.0]),
    "scale must be a number, got str": building("LearnedPositions", 6, 4, scale="1"),
    "max_bias must be a number, got str": building("AlibiBias", 2, max_bias="8"),
    "norm_eps must be a number, got str": building(
        "EmbeddingLayer", 9, 4, position=None, norm_eps="0"
    ),
    "padding_idx must be an integer, got str": building(
        "LearnedPositions", 6, 4, row_offset=2, padding_idx="1"
    ),
    "eps must be a number, got str": building("FireBias", 2, eps="1e-6"),
    "dropout must be a number, got str": building(
        "EmbeddingLayer", 9, 4, position=None, dropout="0.1"
    ),
    "mode must be 'sum', 'mean' or 'max', got 'median'": building(
        "EmbeddingBag", 9, 4, mode="median"
    ),
    "dropout must be between 0 and 1, got 1.5": building(
        "EmbeddingLayer", 9, 4, position=None, dropout=1.5
    ),
    "zero_padding needs padding_idx, got None": building(
        "EmbeddingLayer", 9, 4, zero_padding=True
    ),
    "position='learned' needs max_positions, got None": building("EmbeddingLayer", 9, 4),
    "norm_eps must not be negative, got -1.0": building(
        "EmbeddingLayer", 9, 4, position=None, norm_eps=-1.0
    ),
    "num_embeddings must be at least 0, got -2": building(
        "EmbeddingLayer", -2, 4, position=None
    ),
    "position must be 'learned', 'sinusoidal', None or a layer that adds positions, got "
    "the class dict": building("EmbeddingLayer", 9, 4, position=dict),
    "position must be 'learned', 'sinusoidal', None or a layer that adds positions, got "
    "ndarray": building("EmbeddingLayer", 9, 4, position=np.ones(2)),
    "inputs_embeds must be real, got int64": calling(
        "layer", inputs_embeds=np.ones((1, 2, 4), int)
    ),
    "inputs_embeds must have shape (..., length, 4), got (1, 2, 3)": calling(
        "layer", inputs_embeds=np.ones((1, 2, 3), np.float32)
    ),
    "offset must be integers or reals, got object": calling("learned", X, offset=None),
    "positions must fit x of shape (2, 2, 3, 8) with heads_axis -3, got shape ()": (
        lambda front_end: in_all_front_ends(CASES["rotary"])[front_end](
            array(front_end, HEADS), 5
        )
    ),
    "delta must be smaller than 16777216 in size, got 16777216": calling(
        "rotary", HEADS, 2**24, method="rerotate"
    ),
    "give positions or offset, not both: add the offset to positions": calling(
        "learned", X, [1, 2, 3], offset=1
    ),
    "positions must be smaller than 16777216 in size, got -16777216": calling(
        "sinusoidal", X, [1, -(2**24), 2]
    ),
    "positions must be smaller than 16777216 in size, got 4294967299": calling(
        "rotary", HEADS, offset=2**32 + 3
    ),
    "positions must be smaller than max_positions 40, got 42": calling(
        "learned", X, offset=40
    ),
    "positions must be at least -2 for row_offset 2, got -3": calling(
        "learned", [0, -3], method="encode"
    ),
    "positions must be at most 39, the last of max_positions 40, got 39.5": calling(
        "learned", np.array([39.5], np.float32), method="encode"
    ),
    "positions must have shape (3,) or (2, 3), got (2,)": calling("learned", X, [1, 2]),
    "positions must be given when axes is 2, got None": calling(
        "sinusoidal, axes", np.ones((2, 3, 8), np.float32)
    ),
    "positions must have shape (2, ...), one coordinate for each of the axes, got (3,)": (
        calling("rotary, sections", HEADS, [1, 2, 3])
    ),
    "positions must fit x of shape (2, 2, 3, 8) with heads_axis -3, got shape (4,)": (
        calling("rotary", HEADS, [1, 2, 3, 4])
    ),
    "positions must be integers or reals, got bool": calling("learned", X, [True] * 3),
    "offset must be integers or reals, got bool": calling("rotary", HEADS, offset=True),
    "x must be real, got int64": calling("learned", np.ones((2, 3, 6), np.int64)),
    "x must have shape (..., length, 6), got (2, 3, 5)": calling("learned", X[..., :5]),
    "x must have shape (..., length, heads, 8), got (3, 8)": calling(
        "rotary, heads last", HEADS[0, 0]
    ),
    "delta must be a number or one per row of keys of shape (2, 2, 3, 8), got shape (3,)": (
        calling("rotary", HEADS, [1, 2, 3], method="rerotate")
    ),
    "coordinates must have shape (..., 2), got (3,)": calling("fourier", X[0, 0, :3]),
    "coordinates must be smaller than 16777216 in size, got 16777216.0": calling(
        "fourier", np.array([0.0, 2**24], np.float32)
    ),
    "q_positions must be finite, got nan": calling(
        "alibi", np.array([np.nan], np.float32), [1], method="bias"
    ),
    "k_positions must have shape (length,) or (batch, length), got (1, 1, 1)": calling(
        "kerple", [0], [[[1]]], method="bias"
    ),
    "q_positions and k_positions must have the same batch, got 2 and 3": calling(
        "fire", [[0], [1]], [[1], [2], [3]], method="bias"
    ),
    "k_positions must have one entry for each of the 3 rows of k, got 2": calling(
        "shaw", X, X, [0, 1, 2], [0, 1], method="scores"
    ),
    "q must have shape (..., length, 6), got (2, 3, 5)": calling(
        "shaw", X[..., :5], X, [0, 1, 2], [0, 1, 2], method="scores"
    ),
    "k must have shape (..., 2, length, 6), got (1, 3, 6)": calling(
        "transformer-xl", X[None], X[:1], method="scores"
    ),
    "max_distance must be positive, got 0": building(
        "TransformerXLScores", 2, 4, max_distance=0
    ),
    "offset must be an integer, got float": calling(
        "transformer-xl", X[None], X[None], method="scores", offset=1.5
    ),
    "scores must have shape (2, 3, k_length), got (3, 6)": calling(
        "cope", X, X[0], method="bias"
    ),
    "max_positions must be at least 2, got 1": building("CopeBias", 4, max_positions=1),
    "embedding_dim must be at least 2, got 1": building("Time2Vec", 1),
    "times must be integers or reals, got bool": calling("time2vec", [True]),
    "ids[1, 0] is 9, but num_embeddings is 9": calling("embedding", [[1], [9]]),
    "ids[0] is -1, but num_embeddings is 9": calling("embedding", [-1]),
    "ids[0] is 4294967299, but num_embeddings is 9": calling("embedding", [2**32 + 3]),
    "ids must be integers, got bool": calling("embedding", [True]),
    "ids must be integers, got float64": calling("embedding", np.array([1.0])),
    "ids[1] is 9, but num_embeddings is 9 ": calling("bag", [1, 9], [0]),
    "give ids or inputs_embeds, got neither": calling("layer"),
    "mask was given, but the layer was made without zero_padding": calling(
        "layer, sinusoidal", [[1, 2]], mask=[[True, False]]
    ),
    "segments[0, 1] is 2, but the number of segments is 2": calling(
        "layer", [[1, 2]], segments=[[0, 2]]
    ),
    "x must end in embedding_dim 4, got shape (3,)": calling(
        "embedding", X[0, 0, :3], method="logits"
    ),
    "positions must be smaller than max_positions 8, got 8": calling(
        "layer", [[1, 2]], offset=7
    ),
}


@pytest.mark.rejects
@pytest.mark.parametrize("message", ERRORS)
def test_error_messages_are_equal(message):
    errors = errors_of(ERRORS[message])
    assert errors.keys() == set(FRONT_ENDS)
    assert len({error_class for error_class, _ in errors.values()}) == 1, errors
    for front_end, (_, words) in errors.items():
        assert words == message.strip(), front_end


FLAGS = [
    (name, flag)
    for name in sorted({case.name for case in CASES.values()})
    for flag, value in inspect.signature(class_of("numpy", name)).parameters.items()
    if value.annotation is bool
]


@pytest.mark.rejects
@pytest.mark.parametrize("name, flag", FLAGS)
def test_flags_must_be_bools(name, flag):
    options = next(case.options for case in CASES.values() if case.name == name)
    errors = errors_of(building(name, **{**options, flag: 1}))
    if name in ("Embedding", "EmbeddingBag"):
        errors.pop("torch", None)  # has the constructor of torch, which takes any value
    expected = ("TypeError", f"{flag} must be a bool, got int")
    assert errors and set(errors.values()) == {expected}, errors


# -------------------------------------------------------------------------- names

# Arguments that are specific to a framework.
FRAMEWORK_ARGUMENTS = {
    "args",
    "init",
    "output_device",
    "rng",
    "device",
    "key",
    "out_sharding",
    "sharding",
    "sparse",
    "weight",
    "_weight",
    "_freeze",
}
METHODS = {
    "AlibiBias": ["bias", "config"],
    "CopeBias": ["bias", "config"],
    "Embedding": [
        *("from_pretrained", "from_store", "logits", "mask", "resize", "set_padding")
    ],
    "EmbeddingBag": [
        *("from_pretrained", "from_store", "logits", "mask", "resize", "set_padding")
    ],
    "EmbeddingLayer": ["config", "from_hf", "logits", "mask", "quantized"],
    "EngramGate": ["config"],
    "FireBias": ["bias", "config"],
    "FourierFeatures": ["config", "gaussian", "octaves"],
    "FrequencyEmbedding": ["config"],
    "GrowingEmbedding": ["assign", "config", "rows"],
    "HashedEmbedding": ["config"],
    "KerpleBias": ["bias", "config"],
    "LearnedPositions": ["config", "encode", "resize", "resize_grid", "set_padding"],
    "NgramAverage": ["config"],
    "NgramEmbedding": ["config", "prefetch"],
    "QuotientRemainderEmbedding": ["config"],
    "RotaryPositions": [
        *("at_length", "config", "dinov3", "from_hf", "phases", "pixtral", "rerotate")
    ],
    "ShawScores": ["config", "scores"],
    "ShortConvGate": ["advance", "config"],
    "SinusoidalPositions": ["config", "encode", "marian", "tensor2tensor", "timestep"],
    "T5Bias": ["bias", "config"],
    "Time2Vec": ["config"],
    "TransformerXLScores": ["config", "scores"],
    "XPosRotary": ["config"],
}


def parameters_of(function: Any) -> dict[str, Any]:
    """Return the names and defaults of a function's parameters.

    The sizes of a table default to those of a given weight, except in torch's signature.
    """
    return {
        name: None if name in ("num_embeddings", "embedding_dim") else parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in FRAMEWORK_ARGUMENTS
    }


def public_methods(cls: type) -> set[str]:
    return {
        name
        for name, value in inspect.getmembers(cls, callable)
        if not name.startswith("_")
    }


@pytest.mark.parametrize("name", METHODS)
def test_methods_and_parameters_are_the_same(name):
    classes = [class_of(front_end, name) for front_end in FRONT_ENDS]
    shared = set.intersection(*map(public_methods, classes)) - {"parameters"}
    assert sorted(shared) == METHODS[name]
    for method in ("__init__", *METHODS[name]):
        functions = [
            cls if method == "__init__" else getattr(cls, method) for cls in classes
        ]
        if method == "from_pretrained":
            # Torch's has the arguments of torch; see tests/torch/test_dropin.py.
            del functions[FRONT_ENDS.index("torch")]
        first, *others = map(parameters_of, functions)
        for other in others:
            assert other == first, method


def test_front_ends_have_the_same_layers():
    names = {
        front_end: set(importlib.import_module(f"firstlayer.{front_end}").__all__)
        for front_end in FRONT_ENDS
    }
    assert names["numpy"] == set.intersection(*names.values())
    assert {*METHODS, "load", "save"} <= names["numpy"]
    # A GrowingEmbedding maps ids on the host; see tests/embeddings/test_growing.py. The
    # layers of n-grams are compared in tests/ngram.
    elsewhere = {"EngramGate", "GrowingEmbedding", "NgramAverage", "NgramEmbedding"}
    elsewhere |= {"ShortConvGate"}
    assert {case.name for case in CASES.values()} == set(METHODS) - elsewhere


def test_a_folder_of_vectors_is_a_layer_in_every_front_end(tmp_path):
    rows = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    table = VectorTable(["a", "b", "c", "d"], rows)
    write_vectors(table, tmp_path / "vectors", "folder")
    write_vectors(table, tmp_path / "a.bin", "word2vec-binary")
    for path in (tmp_path / "vectors", str(tmp_path / "a.bin")):
        for front_end in FRONT_ENDS:
            module = importlib.import_module(f"firstlayer.{front_end}")
            layer = module.Embedding.from_pretrained(path, padding_idx=1)
            ids = torch.tensor([3, 1]) if front_end == "torch" else np.array([3, 1])
            assert np.asarray(layer(ids)).tolist() == rows[[3, 1]].tolist()
            assert layer.padding_idx == 1
            bag = module.EmbeddingBag.from_pretrained(path, mode="sum")
            total = np.asarray(bag(ids[None]))
            np.testing.assert_allclose(total, rows[[3, 1]].sum(axis=0)[None], rtol=1e-6)
    import firstlayer.torch as ft

    assert not ft.Embedding.from_pretrained(path).weight.requires_grad
    layer = ft.Embedding.from_pretrained(path, False, sparse=True)
    layer(torch.tensor([2])).sum().backward()
    gradient: Any = layer.weight.grad
    assert gradient.coalesce().indices().tolist() == [[2]]
    tensor = torch.from_numpy(rows.copy())
    assert ft.Embedding.from_pretrained(tensor).weight.data_ptr() == tensor.data_ptr()
    for layer_class in (ft.PartlyFrozenEmbedding, ft.FrozenRowsEmbedding):
        layer = layer_class.from_pretrained(path, frozen=[0])
        assert layer(torch.tensor([2])).tolist() == rows[[2]].tolist()
