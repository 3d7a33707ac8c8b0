"""Gates of n-gram memory: golden values, gradients, decoding, masks."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import firstlayer.equinox as fe
import firstlayer.numpy as fn
import firstlayer.torch as ft
from firstlayer.ngram import ByteGroups, Engram, LongCatNgram, QwenNgram, SaltedNgram
from firstlayer.ngram.gates import gate, sigmoid
from firstlayer.torch.optim import RowAdamW
from tests.support.gradients import central_difference
from tests.support.ngram import golden

FRONT_ENDS = {"numpy": fn, "torch": ft, "equinox": fe}
F32_EPS = float(np.finfo(np.float32).eps)


def built(front_end: str, name: str, options: dict, weights: dict):
    """Return a layer of a front end with these weights."""
    module = FRONT_ENDS[front_end]
    cls = getattr(module, name)
    weights = {key: np.asarray(value) for key, value in weights.items()}
    if front_end == "numpy":
        layer = cls(**options, rng=0)
        layer.load_state_dict(weights)
        return layer
    if front_end == "torch":
        layer = cls(**options)
        layer.load_state_dict({k: torch.tensor(v) for k, v in weights.items()})
        return layer
    return cls(**options, key=jax.random.key(0)).with_parameters(weights)


def called(front_end: str, layer, *args, **options) -> np.ndarray:
    """Return the output of a call with NumPy arguments as a NumPy array."""
    make = {"numpy": np.asarray, "torch": torch.tensor, "equinox": jnp.asarray}[front_end]
    args = [make(x) for x in args]
    options = {k: None if x is None else make(x) for k, x in options.items()}
    out = (eqx.filter_jit(layer) if front_end == "equinox" else layer)(*args, **options)
    return out.detach().numpy() if front_end == "torch" else np.asarray(out)


def stacked(data, name: str) -> np.ndarray:
    return np.stack([data[name.format(g)] for g in range(4)])


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_engram_gate_equals_nemo(front_end):
    _, data = golden("engram_v41_gate_0")
    weights = {
        "projection": data["wkv.weight"],
        "query_weight": data["q_weight"],
        "key_weight": data["k_weight"],
    }
    options = {"memory_dim": 32, "embedding_dim": 24, "streams": 4}
    layer = built(front_end, "EngramGate", options, weights)
    memory = data["embed.weight"][data["rows"]].reshape(2, 9, -1)
    out = called(front_end, layer, data["hidden"], memory)
    np.testing.assert_allclose(out, data["out"], atol=2e-6)
    out = called(front_end, layer, data["hidden"], memory, mask=data["mask"])
    np.testing.assert_allclose(out, data["out_mask"], atol=2e-6)
    unchanged = ~data["mask"]
    np.testing.assert_array_equal(out[unchanged], data["hidden"][unchanged])


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_short_conv_gate_equals_the_demo(front_end):
    _, data = golden("engram_demo_layer_0")
    scheme = Engram(
        order=3, heads=2, base=[60, 70], layers=(1,), canonical=data["canonical"], pad=2
    )
    weights = {
        "key_projection": stacked(data, "key_projs.{}.weight"),
        "key_bias": stacked(data, "key_projs.{}.bias"),
        "value_projection": data["value_proj.weight"],
        "value_bias": data["value_proj.bias"],
        "key_norm": stacked(data, "norm1.{}.weight"),
        "query_norm": stacked(data, "norm2.{}.weight"),
        "conv_norm": stacked(data, "short_conv.norms.{}.weight"),
        "conv": data["short_conv.conv.weight"].reshape(4, 16, 4),
    }
    options = {"memory_dim": 16, "embedding_dim": 16, "streams": 4, "bias": True}
    options |= {"eps": F32_EPS, "conv_eps": 1e-5, "dilation": 3}
    layer = built(front_end, "ShortConvGate", options, weights)
    memory = _memory(front_end, scheme, data["multi_head_embedding.embedding.weight"])
    vectors = called(front_end, memory, data["ids"])
    out = called(front_end, layer, data["hidden"], vectors)
    np.testing.assert_allclose(out - data["hidden"], data["out"], atol=2e-6)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_short_conv_gate_equals_qwen(front_end):
    _, data = golden("qwen4_layer_0")
    scheme = QwenNgram(
        order=3, heads=4, base=200, layers=(1,), vocab_size=1000, eos=9, seed=1234
    )
    weights = {
        "key_projection": data["key_proj.weight"].reshape(2, 16, 64),
        "value_projection": data["value_proj.weight"],
        "key_norm": 1 + data["norm_key.weight"].reshape(2, 16),
        "query_norm": 1 + data["norm_query.weight"].reshape(2, 16),
        "conv_norm": 1 + data["norm_conv.weight"].reshape(2, 16),
        "conv": data["conv1d.weight"].reshape(2, 16, 4),
    }
    options = {"memory_dim": 64, "embedding_dim": 16, "streams": 2, "eps": 1e-6}
    layer = built(front_end, "ShortConvGate", options, weights)
    table = data["ple_embedding.ngram_embedding.weight"]
    vectors = called(front_end, _memory(front_end, scheme, table), data["ids"])
    hidden = data["hidden"].reshape(2, 14, 2, 16)
    out = called(front_end, layer, hidden, vectors)
    expected = hidden + data["out"].reshape(hidden.shape)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    mask = data["conv_mask"].astype(bool)
    out = called(front_end, layer, hidden, vectors, mask=mask)
    expected = hidden + data["out_mask"].reshape(hidden.shape)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_ngram_average_equals_longcat(front_end):
    _, data = golden("longcat_layer_0")
    scheme = LongCatNgram(order=3, splits=2, ratio=3, vocab_size=40, eos=None)
    weight = np.stack([data[f"proj_{i}"] for i in range(4)])
    options = {"columns": 4, "width": 4, "embedding_dim": 16}
    layer = built(front_end, "NgramAverage", options, {"weight": weight})
    table = np.concatenate([data[f"table_{i}"] for i in range(4)])
    vectors = called(front_end, _memory(front_end, scheme, table), data["ids"])
    out = called(front_end, layer, data["word"][data["ids"]], vectors)
    np.testing.assert_allclose(out, data["out"], atol=1e-6)


def _memory(front_end: str, scheme, table: np.ndarray):
    module = FRONT_ENDS[front_end]
    if front_end == "torch":
        embedding = ft.Embedding.from_pretrained(torch.tensor(table))
    else:
        embedding = module.Embedding(weight=table)
    return module.NgramEmbedding(scheme, embedding)


GATES = {
    "engram": ("EngramGate", {"memory_dim": 5, "embedding_dim": 4, "streams": 2}),
    "engram, one stream": ("EngramGate", {"memory_dim": 5, "embedding_dim": 4, "eps": 0.1}),
    "short conv": (
        "ShortConvGate",
        {"memory_dim": 5, "embedding_dim": 4, "streams": 3, "kernel_size": 3},
    ),
    "short conv, bias": (
        "ShortConvGate",
        {"memory_dim": 5, "embedding_dim": 4, "bias": True, "dilation": 2, "eps": 0.01},
    ),
}


def random_gate(front_end: str, name: str, dtype: str = "float64"):
    """Return a gate with random parameters, and random arguments."""
    class_name, options = GATES[name]
    rng = np.random.default_rng(3)
    reference = getattr(fn, class_name)(**options, rng=0, dtype=dtype)
    weights = {
        key: rng.standard_normal(value.shape).astype(dtype)
        for key, value in reference.parameters().items()
    }
    if front_end == "numpy":
        layer = reference
        layer.load_state_dict(weights)
    else:
        layer = built(front_end, class_name, options, weights)
    streams = (options["streams"],) if "streams" in options else ()
    hidden = rng.standard_normal((2, 7, *streams, 4)).astype(dtype)
    memory = rng.standard_normal((2, 7, 5)).astype(dtype)
    mask = rng.random((2, 7)) < 0.7
    return layer, hidden, memory, mask


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_gradients_equal_finite_differences(name, has_mask):
    layer, hidden, memory, mask = random_gate("numpy", name)
    mask = mask if has_mask else None
    y, pull = layer.vjp(hidden, memory, mask=mask)
    dy = np.random.default_rng(4).standard_normal(y.shape)
    gradients = pull(dy)
    inputs = {"hidden": hidden, "memory": memory, **layer.parameters()}
    assert gradients.keys() == inputs.keys()
    for key, x in inputs.items():
        expected = central_difference(
            lambda: float((layer(hidden, memory, mask=mask) * dy).sum()), x
        )
        np.testing.assert_allclose(gradients[key], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", GATES)
def test_gradients_agree_in_every_front_end(name):
    layer, hidden, memory, mask = random_gate("numpy", name, "float32")
    y, pull = layer.vjp(hidden, memory, mask=mask)
    dy = np.random.default_rng(4).standard_normal(y.shape).astype(np.float32)
    expected = pull(dy)
    module = random_gate("torch", name, "float32")[0]
    inputs = [torch.tensor(x, requires_grad=True) for x in (hidden, memory)]
    out = module(*inputs, mask=torch.tensor(mask))
    out.backward(torch.tensor(dy))
    leaves: dict[str, Any] = {
        **dict(module.named_parameters()),
        "hidden": inputs[0],
        "memory": inputs[1],
    }
    got = {key: value.grad.numpy() for key, value in leaves.items()}
    other = random_gate("equinox", name, "float32")[0]

    @eqx.filter_jit
    def run(other, hidden, memory):
        def loss(args):
            return jnp.vdot(args[0](args[1], args[2], mask=jnp.asarray(mask)), dy)

        return eqx.filter_grad(loss)((other, hidden, memory))

    grads = run(other, jnp.asarray(hidden), jnp.asarray(memory))
    in_jax = {**grads[0].parameters(), "hidden": grads[1], "memory": grads[2]}
    assert got.keys() == in_jax.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(in_jax[key], value, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", ["short conv", "short conv, bias"])
def test_decoding_equals_one_pass(name, front_end):
    layer, hidden, memory, mask = random_gate(front_end, name, "float32")
    make = {"numpy": np.asarray, "torch": torch.tensor, "equinox": jnp.asarray}[front_end]
    expected = called(front_end, layer, hidden, memory, mask=mask)
    run, advance = layer, layer.advance
    if front_end == "equinox":
        run, advance = eqx.filter_jit(run), eqx.filter_jit(advance)
    for sizes in ((1,) * 7, (3, 4)):
        state, parts, at = None, [], 0
        for size in sizes:
            part = [make(x[:, at : at + size]) for x in (hidden, memory, mask)]
            out = run(*part[:2], mask=part[2], state=state)
            parts.append(out.detach().numpy() if front_end == "torch" else np.asarray(out))
            state = advance(state, *part[:2], mask=part[2])
            at += size
        np.testing.assert_allclose(np.concatenate(parts, 1), expected, atol=5e-6)


def test_a_zero_score_gives_each_models_gate():
    # The demo and Qwen take the sign of the score, which is 0; V4.1 copies its sign bit.
    zero = np.zeros(1)
    assert gate(zero, sign=np.sign(zero))[0] == 0.5
    assert gate(zero, sign=np.copysign(1.0, zero))[0] == pytest.approx(
        1 / (1 + np.exp(-0.001))
    )
    # No overflow, which NumPy would warn about.
    assert sigmoid(np.array([-1e4, 1e4])).tolist() == [0.0, 1.0]


def test_a_new_short_conv_gate_adds_the_gated_value_only():
    gate_ = fn.ShortConvGate(5, 4, rng=0)
    hidden = np.random.default_rng(0).standard_normal((6, 4))
    memory = np.random.default_rng(1).standard_normal((6, 5))
    added = gate_(hidden, memory) - hidden
    value = memory @ gate_.value_projection.T
    ratio = added / value
    np.testing.assert_allclose(ratio, ratio[:, :1].repeat(4, 1), rtol=1e-5)
    assert ((ratio > 0) & (ratio < 1)).all()


def test_half_precision_is_computed_in_float32():
    layer, hidden, memory, _ = random_gate("torch", "engram", "float32")
    half = [torch.tensor(x).bfloat16() for x in (hidden, memory)]
    expected = layer(*(x.float() for x in half)).bfloat16()
    torch.testing.assert_close(layer(*half), expected, rtol=0, atol=0)


SCHEMES = {
    "concat": (SaltedNgram(orders=(2, 3), salts=2, rows=50), "concat"),
    "sum": (ByteGroups(sizes=(3, 4), rows=50, functions=2), "sum"),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_ngram_embedding_combines_the_rows(name):
    scheme, combine = SCHEMES[name]
    memory = fn.NgramEmbedding(scheme, 3, combine=combine, rng=0)
    ids = np.random.default_rng(0).integers(0, 20, (2, 6))
    rows = memory.table.weight[scheme(ids)]
    expected = rows.reshape(2, 6, -1) if combine == "concat" else rows.sum(-2)
    assert memory.embedding_dim == expected.shape[-1]
    np.testing.assert_allclose(memory(ids), expected, rtol=1e-6)
    # Decoded one by one, with the history.
    history = scheme.advance(None, ids[:, :2])
    later = memory(ids[:, 2:3], history=history)
    np.testing.assert_allclose(later, expected[:, 2:3], rtol=1e-6)
    torch_memory = ft.NgramEmbedding(scheme, 3, combine=combine)
    torch_memory.load_state_dict({"table.weight": torch.tensor(memory.table.weight)})
    documents = np.array([[0, 0, 1, 1, 1, 2]] * 2)
    options = {"documents": documents, "dead": ids == 3}
    packed = memory(ids, **options)
    got = called("torch", torch_memory, ids, **options)
    np.testing.assert_allclose(got, packed, rtol=1e-6)
    assert np.abs(packed - expected).max() > 0
    jax_memory = fe.NgramEmbedding(
        scheme, fe.Embedding(weight=memory.table.weight), combine=combine
    )
    got = called("equinox", eqx.filter_jit(jax_memory), ids, **options)
    np.testing.assert_allclose(got, packed, rtol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_ngram_embedding_has_row_gradients(name):
    scheme, combine = SCHEMES[name]
    memory = fn.NgramEmbedding(scheme, 3, combine=combine, rng=0, dtype="float64")
    ids = np.array([[1, 2, 1, 2, 1]])
    y, pull = memory.vjp(ids)
    dy = np.random.default_rng(0).standard_normal(y.shape)
    gradient = pull(dy)["table.weight"]
    weight = memory.table.weight
    expected = central_difference(lambda: float((memory(ids) * dy).sum()), weight)
    np.testing.assert_allclose(gradient.dense(len(weight)), expected, atol=1e-8)
    module = ft.NgramEmbedding(scheme, 3, combine=combine, sparse=True, dtype=torch.float64)
    module.load_state_dict({"table.weight": torch.tensor(weight)})
    module(torch.tensor(ids)).backward(torch.tensor(dy))
    sparse: Any = module.table.weight.grad
    assert sparse.is_sparse
    np.testing.assert_allclose(sparse.to_dense().numpy(), expected, atol=1e-8)


def test_a_gated_memory_trains_by_rows():
    torch.manual_seed(0)
    scheme = SaltedNgram(orders=(2, 3), salts=1, rows=200)
    memory = ft.NgramEmbedding(scheme, 8, sparse=True)
    gate_ = ft.EngramGate(16, 12)
    model = torch.nn.ModuleList([memory, gate_])
    optimizer = RowAdamW(model, lr=0.02)
    ids = torch.randint(30, (8, 12), generator=torch.Generator().manual_seed(1))
    hidden, target = torch.randn(8, 12, 12), torch.randn(8, 12, 12)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (gate_(hidden, memory(ids)) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.rejects
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_bad_arguments_are_refused(front_end):
    module, key = FRONT_ENDS[front_end], {}
    if front_end == "equinox":
        key = {"key": jax.random.key(0)}
    small = module.Embedding(10, 3, **key)
    with pytest.raises(ValueError, match="table must have 50 rows, got 10"):
        module.NgramEmbedding(SaltedNgram(rows=50), small)
    with pytest.raises(TypeError, match="a given table takes no other options"):
        module.NgramEmbedding(SaltedNgram(rows=5), small, dtype="float16")
    with pytest.raises(TypeError, match="^scheme must be an n-gram scheme, .*, got int$"):
        module.NgramEmbedding(50, 3, **key)
    with pytest.raises(ValueError, match="combine must be 'concat' or 'sum', got 'mean'"):
        module.NgramEmbedding(SaltedNgram(rows=50), 3, combine="mean", **key)
    layer = module.EngramGate(5, 4, streams=2, **key)
    with pytest.raises(ValueError, match=r"hidden must end in \(2, 4\), got shape"):
        called(front_end, layer, np.ones((3, 4)), np.ones((3, 5)))
    with pytest.raises(ValueError, match=r"memory must have shape \(3, 5\), got \(3, 6\)"):
        called(front_end, layer, np.ones((3, 2, 4)), np.ones((3, 6)))
    conv = module.ShortConvGate(5, 4, **key)
    with pytest.raises(ValueError, match=r"state must have shape \(9, 1, 4\), got"):
        called(front_end, conv, np.ones((3, 4)), np.ones((3, 5)), state=np.ones((2, 1, 4)))
