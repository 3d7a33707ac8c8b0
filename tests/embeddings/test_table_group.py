"""Groups of tables: equal to separate layers in vectors, gradients, training and files."""

import copy
import io
import pickle
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import firstlayer.equinox as fe
import firstlayer.numpy as fn
import firstlayer.optim
import firstlayer.torch as ft
import firstlayer.torch.optim
from firstlayer.embeddings.row_gradient import GradientMemory
from firstlayer.embeddings.table_group import FeatureIds, Table
from firstlayer.equinox.optim import RowWiseAdagrad as EquinoxRowWiseAdagrad
from tests.support.optim_cases import OPTIONS

# Two features share a table; every mode; two widths; padding with and without bags.
TABLES = {
    "user": Table(20, 4),
    "item": Table(15, 4, features=["clicked", "bought"], mode="mean", padding_idx=2),
    "tag": Table(9, 4, mode=None, padding_idx=-1),
    "top": Table(11, 4, mode="max", padding_idx=0),
    "wide": Table(7, 3, features=["shown"]),
}
OWNERS = {name: owner for owner, t in TABLES.items() for name in t.features or (owner,)}
WEIGHTED = ("clicked", "user", "top")


def import_torchrec() -> Any:
    with warnings.catch_warnings():
        # FBGEMM has no kernels for SSDs on a CPU and warns about it.
        warnings.simplefilter("ignore")
        import torchrec
    return torchrec


def features_of(seed, *, batch=5):
    """Return ``(ids, offsets)`` of each feature, and weights of some."""
    rng = np.random.default_rng(seed)
    features, weights = {}, {}
    for name, owner in OWNERS.items():
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, batch))])
        ids = rng.integers(0, TABLES[owner].num_embeddings, offsets[-1])
        features[name] = ids, offsets
        if name in WEIGHTED:
            weights[name] = rng.normal(size=ids.size)
    return features, weights


def set_padding_rows(group):
    """Give padding rows values, so that reading them shows."""
    for view in group.tables.values():
        if view.table.padding_idx is not None:
            view.weight[view.table.padding_idx] = 0.5


def numpy_group(seed=0, dtype="float64"):
    group = fn.TableGroup(TABLES, rng=seed, dtype=dtype)
    set_padding_rows(group)
    return group


def torch_group(seed=0, *, dtype="float64", **options) -> Any:
    group = ft.TableGroup(TABLES, dtype=getattr(torch, dtype), **options)
    arrays = numpy_group(seed, dtype).state_dict()
    group.load_state_dict({name: torch.from_numpy(x) for name, x in arrays.items()})
    return group


def separate_layer(owner, weight) -> Any:
    table = TABLES[owner]
    if table.mode is None:
        return fn.Embedding(weight=weight, padding_idx=table.padding_idx)
    return fn.EmbeddingBag(
        weight=weight,
        mode=table.mode,
        padding_idx=table.padding_idx,
        include_last_offset=True,
    )


def separately(group, features, weights, dy):
    """Return vectors and dense gradients of layers with one table each."""
    vectors, dweights = {}, {}
    gradients = {name: np.zeros(x.shape) for name, x in group.state_dict().items()}
    for name, (ids, offsets) in features.items():
        owner = OWNERS[name]
        weight = group.tables[owner].weight
        layer = separate_layer(owner, weight)
        if TABLES[owner].mode is None:
            vectors[name], pull = layer.vjp(ids)
        else:
            vectors[name], pull = layer.vjp(ids, offsets, weights.get(name))
        pulled = pull(dy[name])
        gradients[f"tables.{owner}.weight"] += pulled["weight"].dense(len(weight))
        if name in weights:
            dweights[name] = pulled["per_sample_weights"]
    return vectors, gradients, dweights


def sum_of_squares(vectors) -> Any:
    return sum((x**2).sum() for x in vectors.values())


def gradient_of_vectors(vectors, seed=1):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=tuple(x.shape)) for name, x in vectors.items()}


@given(
    st.integers(0, 2**32),
    st.integers(0, 4),
    st.booleans(),
    st.sets(st.sampled_from(sorted(OWNERS))),
)
def test_numpy_equals_separate_layers(seed, batch, weighted, left_out):
    group = numpy_group(seed % 7)
    features, weights = features_of(seed, batch=batch)
    features = {name: x for name, x in features.items() if name not in left_out}
    weights = {name: x for name, x in weights.items() if weighted and name in features}
    vectors, pull = group.vjp(features, weights)
    dy = gradient_of_vectors(vectors)
    expected, gradients, dweights = separately(group, features, weights, dy)
    assert list(vectors) == list(features)
    for name, value in group(features, weights).items():
        np.testing.assert_array_equal(value, vectors[name])
        np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-12)
    pulled = pull(dy)
    joined = {
        key: pulled[f"joined.{key}.weight"].dense(rows)
        if f"joined.{key}.weight" in pulled
        else np.zeros((rows, int(key)))
        for key, rows in group.layout.num_rows.items()
    }
    for name, gradient in group.layout.split(joined).items():
        np.testing.assert_allclose(gradient, gradients[name], rtol=1e-11, atol=1e-11)
    assert dweights.keys() == pulled.get("per_sample_weights", {}).keys()
    for name, gradient in dweights.items():
        own = pulled["per_sample_weights"][name]
        np.testing.assert_allclose(own, gradient, rtol=1e-10, atol=1e-10)


def as_tensors(values, *, requires_grad=False) -> Any:
    return {
        name: tuple(map(torch.from_numpy, x))
        if isinstance(x, tuple)
        else torch.from_numpy(x).requires_grad_(requires_grad)
        for name, x in values.items()
    }


def in_form(form, features) -> Any:
    """Return features in another form that a call takes."""
    if form == "offsets":
        return as_tensors(features)
    if form == "nested":
        return {
            name: torch.nested.nested_tensor_from_jagged(ids, offsets)
            for name, (ids, offsets) in as_tensors(features).items()
        }
    return {
        name: [x.tolist() for x in np.split(ids, offsets[1:-1])]
        for name, (ids, offsets) in features.items()
    }


@pytest.mark.parametrize("form", ["offsets", "nested", "lists", "compiled"])
@pytest.mark.parametrize("sparse", [False, True])
def test_torch_equals_numpy(form, sparse):
    reference, group = numpy_group(3), torch_group(3, sparse=sparse)
    features, weights = features_of(11)
    dy = gradient_of_vectors(reference(features))
    expected, gradients, dweights = separately(reference, features, weights, dy)
    factors = as_tensors(weights, requires_grad=True)
    call = group
    if form == "compiled":
        call = torch.compile(group, fullgraph=True, backend="eager")
        vectors = call(as_tensors(features), factors)
    else:
        given_ids = in_form(form, features)
        vectors = group(
            given_ids,
            factors
            if form != "nested"
            else {
                name: torch.nested.nested_tensor_from_jagged(x, given_ids[name].offsets())
                for name, x in factors.items()
            },
        )
    flat = {name: x.values() if x.is_nested else x for name, x in vectors.items()}
    assert vectors["tag"].is_nested == (form == "nested")
    torch.autograd.backward(
        list(flat.values()), [torch.from_numpy(dy[name]) for name in flat]
    )
    for name, value in flat.items():
        np.testing.assert_allclose(value.detach(), expected[name], rtol=1e-12, atol=1e-12)
    joined = {key: bag.weight.grad for key, bag in group.joined.items()}
    assert all(x.is_sparse == sparse for x in joined.values())
    joined = {key: x.to_dense() if sparse else x for key, x in joined.items()}
    for name, gradient in group.layout.split(joined).items():
        np.testing.assert_allclose(gradient, gradients[name], rtol=1e-11, atol=1e-11)
    for name, gradient in dweights.items():
        np.testing.assert_allclose(factors[name].grad, gradient, rtol=1e-10, atol=1e-10)


def test_second_derivatives_of_mixed_modes():
    tables = {"a": Table(4, 2), "b": Table(3, 2, mode="mean"), "c": Table(3, 2, mode="max")}
    group = ft.TableGroup(tables, dtype=torch.float64)
    ids = {"a": [[3, 1], []], "b": [[2, 0], [1, 1]], "c": [[1, 2], [0]]}

    def run(table, *weights):
        bag = group.joined["2"]
        del bag.weight
        bag.weight = table
        return tuple(group(ids, dict(zip("ab", weights, strict=True))).values())

    numbers = [torch.rand(n, dtype=torch.float64) + 0.5 for n in (2, 4)]
    arguments = [torch.randn(10, 2, dtype=torch.float64), *numbers]
    arguments = [x.requires_grad_() for x in arguments]
    del group.joined["2"]._parameters["weight"]
    group.joined["2"].weight = arguments[0].detach()
    assert torch.autograd.gradcheck(run, arguments)
    assert torch.autograd.gradgradcheck(run, arguments)


@pytest.mark.parametrize("jit", [False, True])
def test_equinox_equals_numpy(jit, tmp_path):
    reference = numpy_group(5, "float32")
    fn.save(tmp_path / "a.safetensors", reference)
    group = fe.load(tmp_path / "a.safetensors")
    features, weights = features_of(4)
    weights = {name: x.astype(np.float32) for name, x in weights.items()}
    dy = gradient_of_vectors(reference(features))
    expected, gradients, dweights = separately(reference, features, weights, dy)

    def loss(arguments, features):
        group, weights = arguments
        vectors = group(features, weights)
        return sum((x * dy[name]).sum() for name, x in vectors.items()), vectors

    given_ids = jax.tree.map(jnp.asarray, features) if jit else features
    run = eqx.filter_value_and_grad(loss, has_aux=True)
    run = eqx.filter_jit(run) if jit else run
    arrays = jax.tree.map(jnp.asarray, weights)
    (_, vectors), (grads, grads_of_weights) = run((group, arrays), given_ids)
    close: Any = {"rtol": 1e-5, "atol": 1e-5}
    for name, value in vectors.items():
        np.testing.assert_allclose(value, expected[name], **close)
    for name, gradient in grads.parameters().items():
        np.testing.assert_allclose(gradient, gradients[name], **close)
    for name, gradient in dweights.items():
        np.testing.assert_allclose(grads_of_weights[name], gradient, **close)


def test_dense_ids_and_bags_of_one_id():
    group, tensors = numpy_group(1), torch_group(1)
    arrays = fe.TableGroup(TABLES, key=jax.random.key(0)).with_parameters(
        group.state_dict()
    )
    features = {
        "user": np.array([[1, 19], [3, 3]], np.int32),
        "clicked": np.array([2, 14], np.uint8),
        "tag": np.array([[[8, 1]], [[0, 3]]]),
    }
    user, item, tag = (group.tables[name].weight for name in ("user", "item", "tag"))
    expected = {
        "user": np.stack([user[1] + user[19], 2 * user[3]]),
        "clicked": np.stack([np.zeros(4), item[14]]),
        "tag": tag[features["tag"]],
    }
    made = [
        group(features),
        tensors({name: torch.from_numpy(x) for name, x in features.items()}),
        arrays(features),
        eqx.filter_jit(arrays)(jax.tree.map(jnp.asarray, features)),
    ]
    for vectors in made:
        for name, value in expected.items():
            own = vectors[name]
            own = own.detach().numpy() if isinstance(own, torch.Tensor) else np.asarray(own)
            np.testing.assert_allclose(own, value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_once(dtype):
    group = torch_group(2, dtype="float32")
    group = group.to(getattr(torch, dtype))
    features, weights = features_of(9)
    ids, factors = as_tensors(features), as_tensors(weights)
    vectors = group(ids, factors)
    wide = copy.deepcopy(group).double()
    factors = {name: x.float().double() for name, x in factors.items()}
    for name, value in wide(ids, factors).items():
        rounded = value.to(vectors[name].dtype)
        # One float32 sum lies between two float64 roundings.
        torch.testing.assert_close(vectors[name], rounded, rtol=2**-7, atol=1e-6)
        assert (vectors[name] == rounded).float().mean() > 0.99


@pytest.mark.parametrize("rule", OPTIONS)
def test_row_optimizers_of_joined_tables_equal_separate_ones(rule):
    group = torch_group(6, sparse=True)
    layers = {}
    for name, view in group.tables.items():
        table = TABLES[name]
        options = {"padding_idx": table.padding_idx, "sparse": True, "dtype": torch.float64}
        shape = table.num_embeddings, table.embedding_dim
        if table.mode is None:
            layer = ft.Embedding(*shape, **options)
        else:
            options["include_last_offset"] = True
            layer = ft.EmbeddingBag(*shape, mode=table.mode, **options)
        layer.load_state_dict({"weight": view.weight.detach().clone()})
        layers[name] = layer
    make = getattr(firstlayer.torch.optim, f"Row{rule}")
    options = OPTIONS[rule][-1]
    joined = make(group, **options)
    others = make([layer.weight for layer in layers.values()], **options)
    for step in range(6):
        features, weights = features_of(step, batch=2)
        if step == 3:
            features.pop("user")
            weights.pop("user")
        ids, factors = as_tensors(features), as_tensors(weights)
        joined.zero_grad()
        others.zero_grad()
        sum_of_squares(group(ids, factors)).backward()
        for name, (own, offsets) in ids.items():
            layer = layers[OWNERS[name]]
            if TABLES[OWNERS[name]].mode is None:
                vectors = layer(own)
            else:
                vectors = layer(own, offsets, factors.get(name))
            (vectors**2).sum().backward()
        joined.step()
        if step == 3:
            # A parameter without a gradient does not move, but rows of a joined one do.
            layers["user"].weight.grad = torch.sparse_coo_tensor(
                torch.zeros(1, 0, dtype=torch.int64),
                torch.zeros(0, 4).double(),
                (20, 4),
                check_invariants=False,
            )
        others.step()
    state = group.state_dict()
    for name, layer in layers.items():
        own = state[f"tables.{name}.weight"]
        torch.testing.assert_close(own, layer.weight.detach(), rtol=1e-9, atol=1e-9)


def test_evaluation_leaves_stale_rows_as_they_are():
    group = torch_group(6, sparse=True)
    optimizer = firstlayer.torch.optim.RowAdamW(group, lr=0.1, weight_decay=0.3)
    features, weights = features_of(0)
    for step in range(3):
        optimizer.zero_grad()
        ids = as_tensors(features_of(step, batch=1)[0])
        sum_of_squares(group(ids)).backward()
        optimizer.step()
    ids, factors = as_tensors(features), as_tensors(weights)
    group.eval()
    with torch.no_grad():
        states = list(optimizer._table_states.values())
        assert any(state.has_stale_weights for state in states)
        out_of_place = group(ids, factors)
        assert any(state.has_stale_weights for state in states)
        optimizer.flush()
        in_place = group(ids, factors)
    for name, value in in_place.items():
        torch.testing.assert_close(out_of_place[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_equals_torchrec(weighted):
    torchrec = import_torchrec()
    configs = [
        torchrec.EmbeddingBagConfig(
            name="item",
            num_embeddings=15,
            embedding_dim=8,
            feature_names=["clicked", "bought"],
        ),
        torchrec.EmbeddingBagConfig(
            name="user",
            num_embeddings=20,
            embedding_dim=4,
            feature_names=["age"],
            pooling=torchrec.PoolingType.SUM if weighted else torchrec.PoolingType.MEAN,
        ),
    ]
    theirs = torchrec.EmbeddingBagCollection(configs, is_weighted=weighted)
    ours: Any = ft.TableGroup.from_torchrec(theirs, sparse=True)
    lengths = torch.tensor([2, 0, 1, 3, 1, 1, 0, 2, 2])
    values = torch.tensor([14, 3, 3, 0, 1, 2, 9, 9, 0, 19, 4, 4])
    weights = torch.linspace(0.1, 2.0, len(values)) if weighted else None
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["bought", "age", "clicked"],
        values=values % 15,
        lengths=lengths,
        weights=weights,
    )
    expected, vectors = theirs(features).to_dict(), ours(features)
    assert vectors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(vectors[name], value)
    sum_of_squares(expected).backward()
    sum_of_squares(vectors).backward()
    for config in configs:
        view = ours.layout.places[config.name]
        gradient = ours.joined[view.key].weight.grad.to_dense()[view.rows]
        layer: Any = theirs.embedding_bags[config.name]
        other = layer.weight.grad
        torch.testing.assert_close(gradient, other)
    jagged = features.to_dict()
    again = ours({name: jagged[name] for name in vectors})
    torch.testing.assert_close(again["age"], vectors["age"], rtol=0, atol=0)


def test_reads_torchrec_configs():
    torchrec = import_torchrec()
    configs = [
        torchrec.EmbeddingConfig(
            name="word",
            num_embeddings=30,
            embedding_dim=4,
            feature_names=["ids"],
            weight_init_min=2.0,
            weight_init_max=3.0,
        )
    ]
    group = ft.TableGroup.from_torchrec(configs)
    weight = group.tables["word"].weight
    assert bool(((weight >= 2) & (weight <= 3)).all()) and weight.std() > 0
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["other", "ids"], values=torch.arange(5), lengths=torch.tensor([1, 0, 3, 1])
    )
    torch.testing.assert_close(group(features)["ids"], weight[1:5], rtol=0, atol=0)
    theirs = torchrec.EmbeddingCollection(configs)
    again = ft.TableGroup.from_torchrec(theirs)
    expected = theirs(features)["ids"].values()
    torch.testing.assert_close(again(features)["ids"], expected, rtol=0, atol=0)
    two = [
        *configs,
        torchrec.EmbeddingConfig(
            name="b",
            num_embeddings=3,
            embedding_dim=4,
            data_type=torchrec.modules.embedding_configs.DataType.FP16,
        ),
    ]
    with pytest.raises(ValueError, match=r"one data_type of FP32, FP16 or BF16, got"):
        ft.TableGroup.from_torchrec(two)
    with pytest.raises(TypeError, match="a collection of TorchRec .* got Linear"):
        ft.TableGroup.from_torchrec(torch.nn.Linear(1, 1))


def test_numpy_optimizer_resumes():
    groups = [numpy_group(2) for _ in range(2)]
    optimizers = [firstlayer.optim.RowAdamW(x, lr=0.1, weight_decay=0.2) for x in groups]

    def train(i, steps):
        for step in steps:
            features, weights = features_of(step, batch=2)
            vectors, pull = groups[i].vjp(features, weights)
            optimizers[i].step(pull(vectors))

    train(0, range(6))
    train(1, range(3))
    saved, state = groups[1].state_dict(), optimizers[1].state_dict()
    assert sorted(saved) == sorted(f"tables.{name}.weight" for name in TABLES)
    groups[1] = fn.TableGroup(TABLES, rng=9, dtype="float64")
    groups[1].load_state_dict(saved)
    optimizers[1] = firstlayer.optim.RowAdamW(groups[1], lr=0.1, weight_decay=0.2)
    optimizers[1].load_state_dict(state)
    train(1, range(3, 6))
    for name, value in groups[0].state_dict().items():
        np.testing.assert_allclose(groups[1].state_dict()[name], value, rtol=1e-10)


def test_torch_checkpoint_resumes_and_checks_shapes():
    results = []
    for is_interrupted in (False, True):
        group = torch_group(2, sparse=True)
        optimizer = firstlayer.torch.optim.RowAdamW(group, lr=0.1, weight_decay=0.2)
        for step in range(6):
            if step == 3 and is_interrupted:
                model, state = group.state_dict(), optimizer.state_dict()
                assert list(model) == [f"tables.{name}.weight" for name in TABLES]
                group = ft.TableGroup(TABLES, sparse=True, dtype=torch.float64)
                group.load_state_dict(copy.deepcopy(model))
                optimizer = firstlayer.torch.optim.RowAdamW(group, lr=0.1, weight_decay=0.2)
                optimizer.load_state_dict(copy.deepcopy(state))
            optimizer.zero_grad()
            vectors = group(as_tensors(features_of(step, batch=2)[0]))
            sum_of_squares(vectors).backward()
            optimizer.step()
        results.append(group.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-10, atol=1e-10)
    before = copy.deepcopy(results[0])
    bad = {**before, "tables.item.weight": torch.ones(3, 4)}
    with pytest.raises(RuntimeError, match=r"tables.item.weight: .*\(3, 4\).*\(15, 4\)"):
        group.load_state_dict(bad)
    missing = {name: x for name, x in before.items() if "tag" not in name}
    with pytest.raises(RuntimeError, match='Missing key.*"tables.tag.weight"'):
        group.load_state_dict({**missing, "tables.other.weight": torch.ones(1)})
    assert group.load_state_dict(missing, strict=False).missing_keys == [
        "tables.tag.weight"
    ]


def test_memory_of_gradients_is_used_again_but_never_under_one_that_is_kept(monkeypatch):
    monkeypatch.setattr(GradientMemory, "MIN_BYTES", 64)
    group = torch_group(1, sparse=True)
    bag = group.joined["4"]
    addresses: list[Any] = []
    kept: list[Any] = []
    copies: list[Any] = []
    features = as_tensors(features_of(7)[0])
    # Not those with a maximum, whose gradient torch would add to the others.
    features = {name: features[name] for name in ("user", "clicked", "tag")}
    for step in range(4):
        sum_of_squares(group(features)).backward()
        grad: Any = bag.weight.grad
        addresses.append(grad._values().data_ptr())
        if step == 1:
            kept.append(grad)
            copies.append(grad.to_dense().clone())
        del grad
        bag.weight.grad = None
    assert addresses[0] == addresses[1] != addresses[2] == addresses[3]
    torch.testing.assert_close(kept[0].to_dense(), copies[0], rtol=0, atol=0)
    assert copy.deepcopy(bag).gradient_memory is not bag.gradient_memory


def test_copies_pickles_meta_and_two_groups():
    first, second = torch_group(1), torch_group(2)
    ids = as_tensors(features_of(3)[0])
    expected = [group(ids) for group in (first, second)]
    buffer = io.BytesIO()
    torch.save(first, buffer)
    buffer.seek(0)
    on_meta = ft.TableGroup(TABLES, device="meta", dtype=torch.float64)
    on_meta.load_state_dict(first.state_dict(), assign=True)
    nested = torch.nn.Sequential(ft.TableGroup(TABLES, dtype=torch.float64))
    nested.load_state_dict({f"0.{key}": x for key, x in first.state_dict().items()})
    copies = [copy.deepcopy(first), torch.load(buffer, weights_only=False), on_meta]
    for group in (*copies, pickle.loads(pickle.dumps(first)), nested):
        for name, value in group(ids).items():
            torch.testing.assert_close(value, expected[0][name], rtol=0, atol=0)
    for name, value in second(ids).items():
        torch.testing.assert_close(value, expected[1][name], rtol=0, atol=0)
    assert not torch.equal(expected[0]["user"], expected[1]["user"])
    with torch.no_grad():
        first.tables["item"].weight.fill_(7)
    assert first.joined["4"].weight[20:35].eq(7).all()
    assert not first.joined["4"].weight[:20].eq(7).any()
    first.reset_parameters()
    assert first.tables["item"].weight[2].eq(0).all()


@pytest.mark.parametrize("front_end", [fn, ft, fe])
def test_files_agree(front_end, tmp_path):
    made = fn.TableGroup(TABLES, rng=0)
    fn.save(tmp_path / "a.safetensors", made)
    loaded = front_end.load(tmp_path / "a.safetensors")
    front_end.save(tmp_path / "b.safetensors", loaded)
    again = fn.load(tmp_path / "b.safetensors")
    assert again.config() == made.config() == loaded.config()
    features = features_of(1)[0]
    for name, value in again(features).items():
        np.testing.assert_array_equal(value, made(features)[name])


def test_equinox_row_optimizer_equals_numpy(tmp_path):
    reference = numpy_group(8, "float32")
    fn.save(tmp_path / "a.safetensors", reference)
    model = fe.load(tmp_path / "a.safetensors")
    theirs = firstlayer.optim.RowWiseAdagrad(reference, lr=0.3, eps=1e-3)
    optimizer = EquinoxRowWiseAdagrad(0.3, eps=1e-3, tables=lambda group: group.joined)
    model, state = optimizer.init(model)

    @eqx.filter_jit
    def step(model, state, features):
        small = optimizer.gather(model, state, model.joined_ids(features))

        def loss(group):
            return sum_of_squares(group(features)) / 2

        return optimizer.update(eqx.filter_grad(loss)(small), state, small)

    rng = np.random.default_rng(0)
    for _ in range(3):
        features = {
            name: rng.integers(0, TABLES[owner].num_embeddings, (2, 3))
            for name, owner in OWNERS.items()
        }
        model, state = step(model, state, jax.tree.map(jnp.asarray, features))
        vectors, pull = reference.vjp(features)
        theirs.step(pull(vectors))
    trained = optimizer.flush(model, state).parameters()
    for name, value in reference.state_dict().items():
        np.testing.assert_allclose(trained[name], value, rtol=1e-4, atol=1e-5)


def test_traced_ids_out_of_range_are_nan_and_no_row_of_another_table():
    group = fe.TableGroup(TABLES, key=jax.random.key(0))
    ids = {"user": jnp.array([[0, 20], [1, 1]]), "tag": jnp.array([3, -1])}
    vectors = eqx.filter_jit(group)(ids)
    assert np.isnan(vectors["user"]).any(axis=1).tolist() == [True, False]
    assert np.isnan(vectors["tag"]).any(axis=1).tolist() == [False, True]
    offsets = {"user": (jnp.arange(3), jnp.array([0, 2])), "shown": jnp.array([[1]])}
    vectors = eqx.filter_jit(group)(offsets)
    assert np.isnan(vectors["user"]).all() and np.isfinite(vectors["shown"]).all()
    compiled = torch.compile(torch_group(), fullgraph=True, backend="eager")
    with pytest.raises((IndexError, RuntimeError)):
        compiled({"user": torch.tensor([[0, 20]])})


@pytest.mark.rejects
@pytest.mark.parametrize("front_end", [fn, ft, fe])
def test_bad_arguments_are_refused_alike(front_end):
    key = {"key": jax.random.key(0)} if front_end is fe else {}
    group = front_end.TableGroup(TABLES, **key)
    array = torch.tensor if front_end is ft else np.array

    def make(tables):
        return lambda: front_end.TableGroup(tables, **key)

    def call(*args):
        return lambda: group(*args)

    cases = {
        "clicked[1, 0] is 15, but num_embeddings of table 'item' is 15": call({
            "clicked": array([[3, 2], [15, 1]])
        }),
        "shown[2] is -1, but num_embeddings of table 'wide' is 7": call({
            "shown": (array([3, 2, -1]), array([0, 3]))
        }),
        "features must be of ['bought', 'clicked', 'shown', 'tag', 'top', 'user'], got "
        "['age']": call({"age": array([1])}),
        "features must be a dict": call(array([1])),
        "offsets of user must end with 3, the number of ids, got 2": call({
            "user": (array([1, 2, 3]), array([0, 2]))
        }),
        "offsets of user must not decrease, got 1 after 2": call({
            "user": (array([1, 2, 3]), array([0, 2, 1, 3]))
        }),
        "user with offsets must have 1 axis, got shape (1, 2)": call({
            "user": (array([[1, 2]]), array([0, 2]))
        }),
        "user must have 1 or 2 axes, got shape (1, 1, 2)": call({
            "user": array([[[1, 2]]])
        }),
        "user must be ids or (ids, offsets), got 3 values": call({"user": (1, 2, 3)}),
        "user must be integers, got float": call({"user": array([[1.0]])}),
        "per_sample_weights of user must have the shape (1, 2) of ids, got (1,)": call(
            {"user": array([[1, 2]])}, {"user": array([1.0])}
        ),
        "per_sample_weights must be of features with ids, got ['user']": call(
            {"shown": array([1])}, {"user": array([1.0])}
        ),
        "per_sample_weights must be of pooled features, got 'tag', but table 'tag' has "
        "mode None": call({"tag": array([1])}, {"tag": array([1.0])}),
        "a feature must be of one table, got 'x' in 'a' and 'b'": make({
            "a": Table(2, 1, features=["x"]),
            "b": Table(2, 1, features=["x"]),
        }),
        "a table needs a name without dots, got 'a.b'": make({"a.b": Table(2, 1)}),
        "tables['a'] must be a Table, got int": make({"a": 3}),
        "tables must have a table, got none": make({}),
        "tables must be a dict, got list": make([Table(2, 1)]),
    }
    for message, run in cases.items():
        with pytest.raises((ValueError, TypeError, IndexError)) as error:
            run()
        assert message in str(error.value), str(error.value)


@pytest.mark.rejects
def test_bad_tables_are_refused():
    cases = {
        "mode must be 'sum', 'mean', 'max' or None, got 'median'": {"mode": "median"},
        "features must be a list of names, got 'x'": {"features": "x"},
        "padding_idx must be in [-3, 3)": {"padding_idx": 3},
    }
    for message, options in cases.items():
        with pytest.raises((ValueError, TypeError)) as error:
            Table(3, 2, **options)
        assert message in str(error.value)
    with pytest.raises(ValueError, match=r"user\[1\] must have 1 axis, got shape \(1, 1\)"):
        FeatureIds.of([[1], [[2]]], "user")
    group = numpy_group()
    vectors, pull = group.vjp({"user": [1]})
    with pytest.raises(ValueError, match=r"dy\['user'\] must have shape \(1, 4\)"):
        pull({"user": np.ones((2, 4))})
    with pytest.raises(ValueError, match=r"dy must be of \['user'\], got \['tag'\]"):
        pull({"tag": vectors["user"]})
