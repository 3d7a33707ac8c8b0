"""Layers over stores, and quantized layers, in every front end."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import firstlayer.equinox
import firstlayer.numpy
import firstlayer.torch
from firstlayer.equinox import _stored as equinox_stored
from firstlayer.files import safetensors
from firstlayer.numpy import _stored as numpy_stored
from firstlayer.stores import MemoryStore, open_store
from firstlayer.stores.quantize import QuantizationReport, quantize_table
from firstlayer.torch._table import stored as torch_stored
from firstlayer.torch._table.stored import decoded

FRONT_ENDS = {
    "numpy": firstlayer.numpy,
    "torch": firstlayer.torch,
    "equinox": firstlayer.equinox,
}
FORMATS = ["int8", "int4"]
in_every_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)
in_every_format = pytest.mark.parametrize("format_", FORMATS)
rng = np.random.default_rng(0)
TABLE = (rng.standard_normal((50, 40)) * rng.uniform(0.1, 9, (50, 1))).astype(np.float32)
IDS = rng.integers(0, 50, (3, 7))
IDS[0, 2] = IDS[2, 0] = 4
NO_WEIGHT = "has no weight to read or train: look rows up by id, or train a float table"


def as_input(front_end, array):
    """Return an array as an argument of a layer."""
    return torch.from_numpy(np.asarray(array)) if front_end == "torch" else array


def as_array(output):
    """Return the output of a layer as a NumPy array."""
    return (
        output.detach().numpy() if isinstance(output, torch.Tensor) else np.asarray(output)
    )


def call(front_end, layer, *arguments, **options):
    """Call a layer with arrays and return an array."""
    options = {name: as_input(front_end, value) for name, value in options.items()}
    return as_array(layer(*(as_input(front_end, x) for x in arguments), **options))


def complete_layer(front_end: str, dtype: Any = "float32", **options: Any) -> Any:
    """Return a complete layer with every part, the same parameters in every front end."""
    draw = np.random.default_rng(7)
    parameters = {
        "token.weight": TABLE,
        "position.weight": draw.standard_normal((9, 40)),
        "segment.weight": draw.standard_normal((2, 40)),
        "norm.weight": draw.standard_normal(40),
        "norm.bias": draw.standard_normal(40),
    }
    parts = {"max_positions": 9, "segments": 2, "layer_norm": True, "norm_eps": 1e-3}
    options = {"padding_idx": 4, "zero_padding": True, "scale": True, **parts, **options}
    if front_end == "torch":
        layer = firstlayer.torch.EmbeddingLayer(50, 40, dtype=dtype, **options)
        state = {name: torch.from_numpy(x) for name, x in parameters.items()}
        layer.load_state_dict(state)
        return layer
    if front_end == "numpy":
        layer = firstlayer.numpy.EmbeddingLayer(50, 40, dtype=dtype, **options)
        layer.load_state_dict(parameters)
        return layer
    key = jax.random.key(0)
    layer = firstlayer.equinox.EmbeddingLayer(50, 40, dtype=dtype, key=key, **options)
    return layer.with_parameters(parameters)


# ------------------------------------------------------------------------- from_store


@in_every_front_end
@pytest.mark.parametrize("format_", ["float32", "float16", "int8", "int4", "fp8"])
def test_rows_are_those_of_the_store(front_end, format_):
    store = MemoryStore(TABLE, format=format_)
    layer = FRONT_ENDS[front_end].Embedding.from_store(store, padding_idx=-1)
    got = call(front_end, layer, IDS)
    assert got.dtype == store.dtype and got.tobytes() == store.read(IDS).tobytes()
    assert (layer.num_embeddings, layer.embedding_dim, layer.padding_idx) == (50, 40, 49)
    np.testing.assert_array_equal(as_array(layer.mask(as_input(front_end, IDS))), IDS != 49)


@in_every_front_end
def test_rows_of_a_file(front_end, tmp_path):
    path = tmp_path / "table.safetensors"
    with MemoryStore(TABLE).convert(path, format="int4"), open_store(path) as store:
        layer = FRONT_ENDS[front_end].Embedding.from_store(store)
        np.testing.assert_array_equal(call(front_end, layer, IDS), store.read(IDS))
        bag = FRONT_ENDS[front_end].EmbeddingBag.from_store(store, mode="sum")
        want = store.read(IDS).sum(axis=1)
        np.testing.assert_allclose(call(front_end, bag, IDS), want, rtol=1e-5, atol=1e-5)


@in_every_front_end
def test_long_rows_are_scaled_down(front_end):
    store = MemoryStore(TABLE, format="int8")
    options = {"max_norm": 5.0, "norm_type": 3.0}
    layer = FRONT_ENDS[front_end].Embedding.from_store(store, **options)
    norms = (np.abs(call(front_end, layer, IDS)) ** 3).sum(axis=-1) ** (1 / 3)
    want = np.minimum(5.0, (np.abs(store.read(IDS)) ** 3).sum(axis=-1) ** (1 / 3))
    np.testing.assert_allclose(norms, want, rtol=1e-5)


@in_every_front_end
def test_output_has_the_given_dtype(front_end):
    dtype = torch.bfloat16 if front_end == "torch" else "bfloat16"
    store = MemoryStore(TABLE, format="int8")
    layer = FRONT_ENDS[front_end].Embedding.from_store(store, dtype=dtype)
    rows = layer(as_input(front_end, IDS))
    assert "bfloat16" in str(rows.dtype)
    rows = rows.float().numpy() if front_end == "torch" else np.asarray(rows)
    want = torch.from_numpy(store.read(IDS)).bfloat16().float().numpy()
    np.testing.assert_array_equal(rows.astype(np.float32), want)


@in_every_front_end
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("max_norm", [None, 4.0])
def test_bags_equal_those_of_the_decoded_table(front_end, mode, max_norm):
    store = MemoryStore(TABLE, format="int4")
    bag = FRONT_ENDS[front_end].EmbeddingBag
    options = {"mode": mode, "padding_idx": 4, "max_norm": max_norm}
    layer = bag.from_store(store, **options)
    reference = firstlayer.numpy.EmbeddingBag(weight=store.read(range(50)), **options)
    weights = rng.standard_normal(IDS.shape).astype(np.float32)
    offsets = np.array([0, 0, 5, 21])
    for arguments in (
        {},
        {"per_sample_weights": weights},
        {"offsets": offsets},
        {"offsets": offsets, "per_sample_weights": weights.ravel()},
    ):
        ids = IDS.ravel() if "offsets" in arguments else IDS
        got = call(front_end, layer, ids, **arguments)
        np.testing.assert_allclose(got, reference(ids, **arguments), rtol=1e-4, atol=1e-4)


def test_weights_of_bags_get_a_gradient():
    store = MemoryStore(TABLE, format="int8")
    weights = rng.standard_normal(IDS.shape)
    table = store.read(range(50)).astype(np.float64)

    def loss(weights):
        return (weights[..., None] * table[IDS]).sum(axis=1)

    want = table[IDS].sum(axis=-1)
    layer = firstlayer.numpy.EmbeddingBag.from_store(store, mode="sum")
    y, pull = layer.vjp(IDS, per_sample_weights=weights.astype(np.float32))
    np.testing.assert_allclose(y, loss(weights), rtol=1e-4, atol=1e-4)
    gradients = pull(np.ones_like(y))
    assert [*gradients] == ["per_sample_weights"]
    np.testing.assert_allclose(gradients["per_sample_weights"], want, rtol=1e-4, atol=1e-4)
    other = firstlayer.torch.EmbeddingBag.from_store(store, mode="sum")
    given = torch.tensor(weights, dtype=torch.float32, requires_grad=True)
    other(torch.from_numpy(IDS), per_sample_weights=given).sum().backward()
    assert given.grad is not None
    np.testing.assert_allclose(given.grad.numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.rejects
@in_every_front_end
@pytest.mark.parametrize("bad", [50, -1])
def test_an_id_out_of_range_is_named(front_end, bad):
    store = MemoryStore(TABLE, format="int8")
    ids = IDS.copy()
    ids[1, 3] = bad
    for name in ("Embedding", "EmbeddingBag"):
        layer = getattr(FRONT_ENDS[front_end], name).from_store(store)
        message = rf"ids\[1, 3\] is {bad}, but num_embeddings is 50"
        with pytest.raises(IndexError, match=message):
            layer(as_input(front_end, ids))


@pytest.mark.rejects
def test_float64_outputs_of_jax_need_x64():
    store = MemoryStore(TABLE)
    for layer in (firstlayer.equinox.Embedding, firstlayer.equinox.EmbeddingBag):
        with pytest.raises(ValueError, match="^dtype float64 needs jax.config.update"):
            layer.from_store(store, dtype="float64")
        with jax.enable_x64(True):
            stored = layer.from_store(store, dtype="float64")
            assert stored(IDS).dtype == stored.dtype == np.float64


@pytest.mark.rejects
@in_every_front_end
def test_there_is_no_weight_and_nothing_to_train(front_end):
    store = MemoryStore(TABLE, format="int8")
    for name in ("Embedding", "EmbeddingBag"):
        layer = getattr(FRONT_ENDS[front_end], name).from_store(store)
        with pytest.raises(TypeError, match=rf"MemoryStore\(50 × 40, int8\) {NO_WEIGHT}"):
            _ = layer.weight
        if front_end == "equinox":
            assert jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array)) == []
        else:
            assert [*layer.parameters()] == []
            with pytest.raises(TypeError, match=NO_WEIGHT):
                layer.project()
            with pytest.raises(TypeError, match=NO_WEIGHT):
                layer.set_padding(0.0)
            with pytest.raises(TypeError, match=NO_WEIGHT):
                layer.resize(60)


@in_every_front_end
def test_logits_are_products_with_decoded_rows(front_end, monkeypatch):
    module = {
        "numpy": numpy_stored,
        "torch": torch_stored,
        "equinox": equinox_stored,
    }[front_end]
    store = MemoryStore(TABLE, format="int4")
    layer = FRONT_ENDS[front_end].Embedding.from_store(store)
    x = rng.standard_normal((2, 3, 40)).astype(np.float32)
    want = x @ store.read(range(50)).T
    for chunk in (1 << 22, 40 * 8):
        monkeypatch.setattr(module, "CHUNK", chunk)
        jax.clear_caches()
        got = as_array(layer.logits(as_input(front_end, x)))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
        dx = np.broadcast_to(store.read(range(50)).sum(axis=0), x.shape)
        if front_end == "torch":
            given = torch.tensor(x, requires_grad=True)
            layer.logits(given).sum().backward()
            assert given.grad is not None
            gradient = given.grad.numpy()
        elif front_end == "numpy":
            gradient = layer.logits_vjp(x)[1](np.ones_like(want))["x"]
        else:
            gradient = jax.grad(lambda x: layer.logits(x).sum())(jnp.asarray(x))
        np.testing.assert_allclose(gradient, dx, rtol=1e-4, atol=1e-3)


@in_every_front_end
@pytest.mark.rejects
def test_logits_of_integers_raise(front_end):
    layer = FRONT_ENDS[front_end].Embedding.from_store(MemoryStore(TABLE))
    with pytest.raises(TypeError, match="x must be real, got int32"):
        layer.logits(as_input(front_end, np.ones((2, 40), np.int32)))


# -------------------------------------------------------------------------- quantized


@in_every_format
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_quantized_layers_agree(format_, dtype):
    outputs, rows = [], []
    for front_end in FRONT_ENDS:
        name = getattr(torch, dtype) if front_end == "torch" else dtype
        layer = complete_layer(front_end, name).quantized(format_)
        segments = IDS % 2
        outputs.append(call(front_end, layer, IDS, segments=segments))
        assert outputs[-1].dtype == dtype and not outputs[-1][IDS == 4].any()
        rows.append(call(front_end, layer.token, IDS))
    assert rows[0].tobytes() == rows[1].tobytes() == rows[2].tobytes()
    bound = 2e-6 if dtype == "float32" else 4e-3
    for output in outputs[1:]:
        np.testing.assert_allclose(output, outputs[0], rtol=bound, atol=bound)


@in_every_front_end
@in_every_format
def test_only_the_token_table_changes(front_end, format_):
    """The layer equals the same layer with the decoded rows in its float table."""
    layer = complete_layer(front_end)
    small = layer.quantized(format_)
    table = MemoryStore(TABLE, format=format_).read(range(50))
    embeds = table[IDS]
    want = call(front_end, layer, IDS, inputs_embeds=embeds)
    got = call(front_end, small, IDS)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    given = call(front_end, small, IDS, inputs_embeds=embeds)
    np.testing.assert_allclose(given, want, rtol=1e-6, atol=1e-6)
    exact = call(front_end, layer, IDS)
    assert 0 < np.abs(got - exact).max() < (0.1 if format_ == "int8" else 1.0)
    assert small.padding_idx == layer.padding_idx == 4
    report = small.token.quantization
    assert report.nbytes == 50 * (48 if format_ == "int8" else 40)
    assert report.original_nbytes == TABLE.nbytes
    assert report.largest_error == pytest.approx(np.abs(table - TABLE).max(), rel=1e-6)
    relative = np.linalg.norm(table - TABLE) / np.linalg.norm(TABLE)
    assert report.relative_error == pytest.approx(relative, rel=1e-5)


@in_every_front_end
@in_every_format
def test_files_are_the_same_in_every_front_end(front_end, format_, tmp_path):
    layer = complete_layer(front_end, dropout=0.3).quantized(format_)
    if front_end == "torch":
        layer.eval()
    elif front_end == "equinox":
        layer = eqx.nn.inference_mode(layer)
    path = tmp_path / "layer.safetensors"
    FRONT_ENDS[front_end].save(path, layer)
    tensors, config = safetensors.read(path)
    assert tensors["token.encoded"].dtype == np.uint8 and "token.weight" not in tensors
    assert config["quantized"] == format_ and config["num_embeddings"] == 50
    want = call(front_end, layer, IDS)
    for other, package in FRONT_ENDS.items():
        loaded = package.load(path)
        if other == "torch":
            loaded.eval()
        elif other == "equinox":
            loaded = eqx.nn.inference_mode(loaded)
        assert loaded.padding_idx == 4 and loaded.token.format_name == format_
        got = call(other, loaded, IDS)
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
        again = tmp_path / "again.safetensors"
        package.save(again, loaded)
        assert again.read_bytes() == path.read_bytes()


@pytest.mark.rejects
@in_every_front_end
def test_damaged_files_are_refused(front_end, tmp_path):
    layer = complete_layer(front_end).quantized("int8")
    path = tmp_path / "layer.safetensors"
    FRONT_ENDS[front_end].save(path, layer)
    tensors, config = safetensors.read(path)
    without = {name: x for name, x in tensors.items() if name != "token.encoded"}
    cases = [
        (tensors, {**config, "quantized": "int4"}, "must have shape"),
        (tensors, {**config, "quantized": "q8_0"}, "format must be 'int8' or 'int4'"),
        (tensors, {**config, "quantized": None}, "a quantized layer needs 'quantized'"),
        (without, config, "a quantized layer needs 'quantized' and 'token.encoded'"),
        (tensors, {**config, "num_embeddings": 10**12}, "must have 1000000000000 rows"),
        (tensors, {**config, "embedding_dim": 10**12}, "must"),
        (tensors, {**config, "padding_idx": 77}, "padding_idx must be in"),
        (tensors, {**config, "class": "Embedding"}, "only an EmbeddingLayer can be"),
        (
            {**tensors, "norm.bias": np.zeros(40, np.uint8)},
            config,
            "norm.bias must not have dtype uint8",
        ),
        (
            {**tensors, "norm.bias": np.zeros(40, np.int64)},
            config,
            "norm.bias must not have dtype int64",
        ),
        (
            {**tensors, "token.encoded": np.zeros((50, 48), np.float32)},
            config,
            "token.encoded must not have dtype float32",
        ),
    ]
    for content, about, message in cases:
        safetensors.write(path, content, about)
        with pytest.raises(ValueError, match=f"does not hold a layer: .*{message}"):
            FRONT_ENDS[front_end].load(path)


@in_every_format
def test_copies_and_states_of_numpy_layers(format_):
    layer = complete_layer("numpy").quantized(format_)
    want = layer(IDS)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(copied(IDS), want)
        state = copied.state_dict()
        assert state["token.encoded"].dtype == np.uint8
        copied.load_state_dict({**state, "token.encoded": state["token.encoded"] * 0})
        assert not copied.token(IDS).any()
        copied.load_state_dict(layer.state_dict())
        np.testing.assert_array_equal(copied(IDS), want)
        with pytest.raises(TypeError, match="must be uint8"):
            wrong = state["token.encoded"].astype(float)
            copied.load_state_dict({**state, "token.encoded": wrong})
    np.testing.assert_array_equal(layer(IDS), want)
    _, pull = layer.vjp(IDS)
    rest = ["norm.bias", "norm.weight", "position.weight", "segment.weight"]
    assert sorted(pull(np.ones_like(want))) == sorted(layer.parameters()) == rest


@in_every_format
def test_copies_and_states_of_torch_layers(format_):
    layer = complete_layer("torch").quantized(format_)
    ids = torch.from_numpy(IDS)
    want = layer(ids)
    assert "token.encoded" in layer.state_dict()
    assert sorted(name for name, _ in layer.named_parameters()) == [
        *("norm.bias", "norm.weight", "position.weight", "segment.weight")
    ]
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(ids), want)
        copied.token.encoded.zero_()
        assert not copied.token(ids).any() and torch.equal(layer(ids), want)
        for assign in (False, True):
            copied.load_state_dict(copy.deepcopy(layer.state_dict()), assign=assign)
            assert torch.equal(copied(ids), want)
    half = copy.deepcopy(layer).half()
    assert torch.equal(half.token.encoded, layer.token.encoded)
    assert half(ids).dtype == half.token(ids).dtype == torch.float16
    assert torch.equal(half.token(ids), layer.token(ids).half())
    assert copy.deepcopy(layer).to(torch.bfloat16)(ids).dtype == torch.bfloat16
    want.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@in_every_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantized_torch_layer_uses_the_fused_kernels(format_, dtype, monkeypatch):
    layer = complete_layer("torch", dtype)
    small = layer.quantized(format_)
    ids = torch.tensor([[3, 0, 7], [7, 49, 1]])
    decoded_rows = small.token.upcast_rows(ids)
    monkeypatch.setattr(type(small), "_by_modules", None)
    got, want = small(ids), layer(ids, inputs_embeds=decoded_rows)
    assert got.dtype == getattr(torch, dtype) and torch.equal(got, want)
    with torch.no_grad():
        # The output takes the memory of decoded rows, but not of rows that the caller has.
        given = decoded_rows.clone()
        outputs = [small(ids), small(ids, inputs_embeds=given), small(ids.flip(0))]
        assert torch.equal(given, decoded_rows) and torch.equal(outputs[2].flip(0), want)
        assert all(torch.equal(output, want) for output in outputs[:2])
    small(ids).square().sum().backward()
    grads = [p.grad.clone() for p in small.parameters()]
    small.zero_grad()
    layer(ids, inputs_embeds=decoded_rows).square().sum().backward()
    wanted = {id(p): p.grad for p in layer.parameters()}
    assert grads and all(
        torch.equal(grad, wanted[id(p)])
        for grad, p in zip(grads, small.parameters(), strict=True)
    )


def test_hooks_of_a_quantized_torch_layer_are_its_own():
    layer = complete_layer("torch")
    small = layer.quantized()
    small.register_forward_hook(lambda *arguments: torch.zeros(()))
    assert layer(torch.from_numpy(IDS)).shape == (3, 7, 40)
    assert layer.position is small.position and layer.token is not small.token


@in_every_format
def test_torch_operators_decode_the_same_rows(format_):
    encoded, _ = quantize_table(TABLE, format_)
    layer = complete_layer("torch").quantized(format_)
    rows = decoded(torch.from_numpy(encoded), 40, format_)
    assert torch.equal(rows, layer.token(torch.arange(50)))
    compiled = torch.compile(layer.token, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.from_numpy(IDS)), layer.token(torch.from_numpy(IDS)))
    batched = torch.vmap(layer.token)(torch.from_numpy(IDS))
    assert torch.equal(batched, layer.token(torch.from_numpy(IDS)))
    meta = copy.deepcopy(layer.token).to("meta")
    assert meta(torch.zeros(3, dtype=torch.int64, device="meta")).shape == (3, 40)


@in_every_format
def test_quantized_equinox_layers_under_transformations(format_):
    layer = complete_layer("equinox").quantized(format_)
    rows = MemoryStore(TABLE, format=format_).read(range(50))
    bits = np.asarray(eqx.filter_jit(layer.token)(jnp.arange(50)))
    assert bits.tobytes() == rows.tobytes()
    got = jax.vmap(layer.token)(jnp.asarray(IDS))
    np.testing.assert_array_equal(got, rows[IDS])
    outside = eqx.filter_jit(layer.token)(jnp.array([3, 50, -1]))
    np.testing.assert_array_equal(np.isnan(outside[:, 0]), [False, True, True])
    gradient = eqx.filter_grad(lambda layer: layer(IDS).sum())(layer)
    assert gradient.norm.weight.any() and gradient.token.rows.encoded is None
    store_layer = firstlayer.equinox.Embedding.from_store(
        MemoryStore(TABLE, format=format_), padding_idx=2
    )
    np.testing.assert_array_equal(eqx.filter_jit(store_layer)(jnp.asarray(IDS)), rows[IDS])
    np.testing.assert_array_equal(jax.vmap(store_layer)(jnp.asarray(IDS)), rows[IDS])
    outside = eqx.filter_jit(store_layer)(jnp.array([3, 50, -1]))
    np.testing.assert_array_equal(np.isnan(outside[:, 0]), [False, True, True])


@pytest.mark.rejects
@in_every_front_end
def test_unknown_formats_and_bad_tables_are_refused(front_end):
    layer = complete_layer(front_end)
    with pytest.raises(ValueError, match="format must be 'int8' or 'int4', got 'fp8'"):
        layer.quantized("fp8")
    with pytest.raises(TypeError, match=NO_WEIGHT):
        layer.quantized("int8").quantized("int4")
    bad = TABLE.copy()
    bad[7, 3] = np.nan
    if front_end == "torch":
        layer.load_state_dict({**layer.state_dict(), "token.weight": torch.from_numpy(bad)})
    elif front_end == "numpy":
        layer.load_state_dict({**layer.state_dict(), "token.weight": bad})
    else:
        layer = layer.with_parameters({**layer.parameters(), "token.weight": bad})
    with pytest.raises(ValueError, match=r"rows\[7, 3\] is nan, but int8 holds numbers"):
        layer.quantized("int8")


def test_a_report_is_one_line():
    report = QuantizationReport("int4", 1600, 10240, 0.0123, 0.075)
    assert str(report) == (
        "int4: 1,600 bytes instead of 10,240, largest error 0.012, relative error 0.075"
    )
