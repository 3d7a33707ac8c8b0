"""Growing embeddings: initial values, exact training, and agreement of the front ends."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import firstlayer.equinox as fe
import firstlayer.equinox.optim
import firstlayer.numpy as fn
import firstlayer.optim
import firstlayer.torch as ft
import firstlayer.torch.optim
from firstlayer.embeddings.growing import InitialRows
from firstlayer.embeddings.hashed import splitmix64
from firstlayer.optim import AveragedRows, RowAdamW
from tests.support.growing import WIDTH, ReferenceTable
from tests.support.optim_cases import OPTIONS, assert_close

ONE_OF_EACH = [(name, options[-1]) for name, options in OPTIONS.items()]
GAMMA, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def initial(init: str, seed: int = 0, width: int = WIDTH, capacity: int = 50):
    return InitialRows(width=width, init=init, seed=seed, capacity=capacity)


def batches(steps: int, seed: int = 0, size: int = 4):
    """Return batches of ids and goals, some ids often and some rarely."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = (rng.zipf(1.5, size) % 40 - 9) * 2**41
        yield ids, rng.standard_normal((size, WIDTH))


def test_initial_rows_are_the_documented_function_of_seed_and_id():
    def mix(z):
        # splitmix64 adds GAMMA first.
        return splitmix64((z - GAMMA) & MASK)

    def draw(id_, k, seed):
        key = mix(seed + (k + 2) * GAMMA & MASK)
        return (mix(mix(id_ + GAMMA & MASK) ^ key) >> 11) / 2**53

    ids, seed = [7, -3, 2**62 + 1], 5
    u = np.array([[draw(i & MASK, k, seed) for k in range(6)] for i in ids])
    array = np.array(ids)
    uniform = initial("uniform", seed)(array)
    assert np.array_equal(uniform, (2 * u[:, :3] - 1) * 0.05)
    xavier = initial("xavier", seed, capacity=33)(array)
    np.testing.assert_allclose(xavier, uniform / 0.05 * np.sqrt(6 / 36), rtol=1e-15)
    normal = np.sqrt(-2 * np.log(1 - u[:, ::2])) * np.cos(2 * np.pi * u[:, 1::2])
    np.testing.assert_allclose(initial("normal", seed)(array), normal, rtol=1e-12)
    assert not initial("zeros")(array).any()
    # Golden values.
    assert initial("normal")(np.array([7]))[0].round(6).tolist() == [
        *(0.08684, 0.611213, 0.022741)
    ]


def test_initial_rows_have_their_distribution_and_ids_do_not_depend_on_each_other():
    ids = np.arange(-5000, 5000)
    rows = initial("normal", 3, width=16)(ids)
    assert abs(rows.mean()) < 0.01 and abs(rows.std() - 1) < 0.01
    assert abs(np.corrcoef(rows.T) - np.eye(16)).max() < 0.05
    assert abs(np.corrcoef(rows[:-1, 0], rows[1:, 0])[0, 1]) < 0.05
    truncated = initial("truncated_normal", 3, width=16)
    small = truncated(ids)
    assert abs(small).max() <= 0.04 and abs(small.std() / 0.02 - 0.8796) < 0.01
    assert np.array_equal(truncated(ids[[9, 4]]), small[[9, 4]])
    assert not np.array_equal(initial("normal", 4, width=16)(ids), rows)


@pytest.mark.parametrize("evict, min_count", [("lru", 1), ("lfu", 2), (None, 1)])
@pytest.mark.parametrize("name, options", ONE_OF_EACH)
def test_training_equals_a_dense_optimizer_that_never_reuses_a_row(
    name, options, evict, min_count
):
    arguments = {"evict": evict, "min_count": min_count}
    layer = fn.GrowingEmbedding(9, WIDTH, seed=4, dtype="float64", **arguments)
    optimizer = getattr(firstlayer.optim, f"Row{name}")(layer, **options)
    # Another instance, which the first must not change.
    other = fn.GrowingEmbedding(9, WIDTH, dtype="float64", **arguments)
    reference = ReferenceTable(name, options, layer.initial, 9, **arguments)
    for ids, goal in batches(40):
        places = reference.assign(ids)
        y, pull = layer.vjp(ids)
        assert_close(y, reference.weight.detach()[places], 1e-6)
        optimizer.step(pull(reference.sign * (y - goal)))
        reference.step(places, goal)
    rows = reference.map.rows.values()
    want = reference.weight.detach()[[reference.places[row] for row in rows]]
    assert_close(layer(np.array([*reference.map.rows])), want, 1e-6)
    assert evict is None or reference.count > 12
    assert not other.ids.size and not other.table.weight.any()


@pytest.mark.parametrize("is_reloaded", [False, True])
@pytest.mark.parametrize("mode", ["exact", "lazy"])
def test_averages_start_when_an_id_gets_its_row(mode, is_reloaded):
    layer = fn.GrowingEmbedding(6, WIDTH, seed=4, dtype="float64")
    optimizer = firstlayer.optim.RowAdam(layer, lr=0.1, betas=(0.8, 0.9), mode=mode)
    averaged = AveragedRows(optimizer, decay=0.7)
    (name,), expected = layer.parameters(), None
    for step, (ids, goal) in enumerate(batches(40)):
        if is_reloaded and step % 5 == 4:
            optimizer.load_state_dict(optimizer.state_dict())
        if is_reloaded and step % 7 == 6 and expected is not None:
            state = averaged.state_dict()
            averaged = AveragedRows(optimizer, decay=0.7)
            averaged.load_state_dict(state)
        before = layer.ids.copy()
        y, pull = layer.vjp(ids)
        if expected is not None:
            is_new = np.zeros(7, bool)
            is_new[1 : 1 + len(layer.ids)] = True
            is_new[1 : 1 + len(before)] = layer.ids[: len(before)] != before
            expected[is_new] = layer.table.weight[is_new]
        optimizer.step(pull(y - goal))
        if step % 3 == 2:
            now = layer.table.weight.copy()
            expected = now if expected is None else 0.7 * expected + 0.3 * now
            averaged.update_parameters()
            assert_close(averaged.average(name), expected, 1e-6)


def step_in_numpy(layer, optimizer, ids, goal):
    y, pull = layer.vjp(ids)
    optimizer.step(pull(y - goal))
    return y


@pytest.mark.parametrize("mode", ["exact", "lazy"])
def test_front_ends_have_the_same_rows_and_numbers(mode):
    options = {"evict": "lfu", "min_count": 2, "seed": 8, "init": "truncated_normal"}
    rule: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.3}
    ours = fn.GrowingEmbedding(7, WIDTH, **options)
    theirs = ft.GrowingEmbedding(7, WIDTH, **options)
    optimizer = RowAdamW(ours, mode=mode, **rule)
    other = firstlayer.torch.optim.RowAdamW(theirs.parameters(), mode=mode, **rule)
    exact = firstlayer.equinox.optim.RowAdamW(
        rule["lr"], weight_decay=rule["weight_decay"], tables=lambda model: model[0]
    )
    model, state = exact.init([fe.GrowingEmbedding(7, WIDTH, **options), jnp.ones(2)])

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, state):
        rows, goal = batch
        part = exact.gather(model, state, rows)

        def loss(part):
            return 0.5 * ((part[0].table(rows) - goal) ** 2).sum()

        return *exact.update(eqx.filter_grad(loss)(part), state, part), part[0].table(rows)

    for ids, goal in batches(30):
        y = step_in_numpy(ours, optimizer, ids, goal.astype(np.float32))
        z = theirs(torch.from_numpy(ids))
        other.zero_grad()
        (0.5 * (z - torch.from_numpy(goal).float()).square().sum()).backward()
        other.step()
        assert_close(y, z.detach(), 1e-6)
        assert ours.ids.tolist() == theirs.ids.tolist()
        if mode == "exact":
            rows, state = exact.assign(model, state, ids)
            assert rows.dtype == np.int32 and rows.tolist() == ours.rows(ids).tolist()
            batch = jnp.asarray(rows), jnp.asarray(goal, jnp.float32)
            model, state, x = step(batch, model, state)
            assert_close(y, x, 2e-6)
    ids = ours.ids
    assert_close(ours(ids), theirs.eval()(torch.from_numpy(ids)).detach(), 1e-6)
    if mode == "exact":
        assert_close(ours(ids), exact.flush(model, state)[0](ids), 2e-6)
        with pytest.raises(TypeError, match=r"call optimizer.assign\(model, state, ids\)"):
            model[0].assign(ids)


def test_new_rows_have_the_same_bits_in_every_front_end_and_dtype():
    ids = np.array([2**40, -7, 3, 2**63 - 1])
    for dtype in ("float32", "float16", "bfloat16"):
        ours, layer = (
            fn.GrowingEmbedding(5, 4, dtype=dtype),
            fe.GrowingEmbedding(5, 4, dtype=dtype),
        )
        theirs = ft.GrowingEmbedding(5, 4, dtype=getattr(torch, dtype))
        want = ours.vjp(ids)[0]
        rows, layer = layer.assign(ids)
        got = theirs(torch.from_numpy(ids)).detach().double().numpy()
        assert np.array_equal(want.astype(np.float64), got)
        assert np.asarray(layer.table(rows)).tobytes() == want.tobytes()
        # A call of the layer looks ids up on the host, and changes nothing.
        pairs = jnp.asarray(fe.split_ids(ids))
        assert np.asarray(layer(pairs)).tobytes() == want.tobytes()
        assert not np.asarray(layer([99])).any() and not ours([99]).any()
        assert (
            layer.ids.tolist() == ours.ids.tolist() == theirs.ids.tolist() == ids.tolist()
        )
    unsigned = fn.GrowingEmbedding(5, 4).assign(np.array([2**64 - 7, 3], np.uint64))
    assert unsigned.tolist() == [1, 2]
    assert fe.GrowingEmbedding(5, 4).assign(np.array([3], np.int8))[0].tolist() == [1]


def test_a_copied_or_saved_run_continues_with_the_same_bits(tmp_path):
    def run(layer, optimizer, part):
        return [step_in_numpy(layer, optimizer, *batch) for batch in part]

    every = list(batches(40))
    layer = fn.GrowingEmbedding(7, WIDTH, evict="lfu", min_count=2, init="xavier", seed=3)
    optimizer = RowAdamW(layer, lr=0.1)
    run(layer, optimizer, every[:20])
    fn.save(tmp_path / "a.safetensors", layer)
    fresh = fn.GrowingEmbedding(7, WIDTH, evict="lfu", min_count=2, init="xavier", seed=3)
    fresh.load_state_dict(layer.state_dict())
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh]
    copies.append(fn.load(tmp_path / "a.safetensors"))
    saved = optimizer.state_dict()
    want = run(layer, optimizer, every[20:])
    for one in copies:
        again = RowAdamW(one, lr=0.1)
        again.load_state_dict(saved)
        got = run(one, again, every[20:])
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
        assert np.array_equal(one.ids, layer.ids) and one.config() == layer.config()


def test_gradients_of_ids_that_have_lost_their_row_are_dropped():
    layer = fn.GrowingEmbedding(2, WIDTH, dtype="float64")
    optimizer = firstlayer.optim.RowSGD(layer, lr=1.0)
    y, pull = layer.vjp([5, 6])
    first = pull(np.ones_like(y))["table.weight"]
    other, pull_other = layer.vjp([7])
    start = other[0].copy()
    # Row 1 belonged to 5 and belongs to 7.
    assert pull(np.ones_like(y))["table.weight"].ids.tolist() == [2]
    second = pull_other(2 * np.ones_like(other))["table.weight"]
    total = first + second
    assert total.ids.tolist() == [1, 2] and total.values[:, 0].tolist() == [2.0, 1.0]
    optimizer.step({"table.weight": first})
    assert np.array_equal(layer([7])[0], start)
    assert_close(layer([6])[0], y[1] - 1, 1e-15)
    # A sum is as old as the moment when it was computed.
    layer.vjp([8, 7])
    optimizer.step({"table.weight": total})
    assert_close(layer([7])[0], start - 2, 1e-15)
    assert np.array_equal(layer([8]), layer.initial(np.array([8])))


def test_compiled_steps_are_compiled_once_for_all_ids():
    count = 0

    @eqx.filter_jit
    def look_up(layer, rows):
        nonlocal count
        count += 1
        return layer.table(rows), layer

    layer = fe.GrowingEmbedding(3, 2)
    for ids in ([1, 2], [3, 2**40], [5, 1]):
        rows, layer = layer.assign(ids)
        y, layer = look_up(layer, rows)
        assert np.array_equal(y, layer(ids))
    assert count == 1


def test_an_equinox_layer_continues_from_its_state():
    layer = fe.GrowingEmbedding(3, 2, min_count=2)
    _, layer = layer.assign([1, 1, 2, 3, 3])
    other = fe.GrowingEmbedding(3, 2, min_count=2).with_state(layer.state())
    twin = copy.deepcopy(layer)
    got = [one.assign([2, 9, 1])[0].tolist() for one in (layer, other, twin)]
    assert got == [[3, 0, 1]] * 3
    # All copies of a layer but for deep ones share its ids.
    assert jax.tree.map(lambda x: x, layer).ids.tolist() == layer.ids.tolist() == [1, 3, 2]
    model, _ = firstlayer.equinox.optim.RowAdamW(0.1).init(layer)
    ids = {name: x for name, x in layer.state().items() if name != "table.weight"}
    assert model.state().keys() == ids.keys()
    assert model.with_state(model.state()).ids.tolist() == [1, 3, 2]


def test_training_in_jax_resumes_with_the_ids(tmp_path):
    optimizer = firstlayer.equinox.optim.RowAdamW(0.1, weight_decay=0.2)

    @eqx.filter_jit
    def step(rows, model, state):
        gathered = optimizer.gather(model, state, rows)
        loss = eqx.filter_grad(lambda model: (model.table(rows) ** 3).sum())
        return optimizer.update(loss(gathered), state, gathered)

    def run(model, state, batches):
        for ids in batches:
            rows, state = optimizer.assign(model, state, ids)
            model, state = step(rows, model, state)
        return model, state

    def start():
        return optimizer.init(fe.GrowingEmbedding(4, WIDTH, evict="lfu", seed=3))

    # More ids than rows, so that ids lose their rows before and after the checkpoint.
    batches = np.random.default_rng(0).integers(0, 9, (16, 3)) - 2**40
    model, state = run(*start(), batches[:8])
    eqx.tree_serialise_leaves(tmp_path / "arrays.eqx", (model, state))
    np.savez(tmp_path / "ids.npz", **model.state())
    with pytest.raises(RuntimeError, match="is in the optimizer state"):
        fe.save(tmp_path / "layer.safetensors", model)
    want = optimizer.flush(*run(model, state, batches[8:]))

    model, state = eqx.tree_deserialise_leaves(tmp_path / "arrays.eqx", start())
    model = model.with_state(dict(np.load(tmp_path / "ids.npz")))
    got = optimizer.flush(*run(model, state, batches[8:]))
    assert np.array_equal(got.ids, want.ids) and len(got.ids) == 4
    assert np.array_equal(got.table.weight, want.table.weight)


@pytest.mark.rejects
@pytest.mark.parametrize("front_end", [fn, ft, fe])
def test_invalid_arguments_raise(front_end):
    cases = {
        "capacity must be positive, got 0": lambda: front_end.GrowingEmbedding(0, 4),
        "evict must be 'lru', 'lfu' or None, got 'x'": lambda: front_end.GrowingEmbedding(
            3, 4, evict="x"
        ),
        "init must be 'normal', .*, got 'mean'": lambda: front_end.GrowingEmbedding(
            3, 4, init="mean"
        ),
        "seed must be below": lambda: front_end.GrowingEmbedding(3, 4, seed=2**63),
        "min_count must be positive, got 0": lambda: front_end.GrowingEmbedding(
            3, 4, min_count=0
        ),
        "embedding_dim must be at least 0, got -1": lambda: front_end.GrowingEmbedding(
            3, -1
        ),
        "capacity must be at least the number of different ids in a batch, 3, got 2": (
            lambda: front_end.GrowingEmbedding(2, 4).assign(
                torch.arange(3) if front_end is ft else np.arange(3)
            )
        ),
    }
    for message, run in cases.items():
        with pytest.raises(ValueError, match=message):
            run()
    with pytest.raises(TypeError, match="ids must be integers, got float"):
        layer = front_end.GrowingEmbedding(2, 4)
        layer.rows(torch.ones(3) if front_end is ft else np.ones(3, np.float32))


@pytest.mark.rejects
def test_states_and_ids_that_do_not_fit_raise():
    layer = fn.GrowingEmbedding(3, 2)
    layer.assign([4, 5])
    state = layer.state_dict()
    with pytest.raises(ValueError, match=r"missing \['id_map.uses'\]"):
        layer.load_state_dict({n: x for n, x in state.items() if n != "id_map.uses"})
    with pytest.raises(ValueError, match="ids must be different"):
        layer.load_state_dict({**state, "id_map.ids": np.array([0, 4, 4, 0])})
    assert layer.ids.tolist() == [4, 5]
    with pytest.raises(ValueError, match=r"dy must have shape \(1, 2\), got \(2, 3\)"):
        layer.vjp([4])[1](np.ones((2, 3)))
    other = fe.GrowingEmbedding(3, 2)
    with pytest.raises(
        ValueError, match=r"a state of ids has no arrays \['candidate_ids'\]"
    ):
        other.with_state({**other.state(), "id_map.candidate_ids": np.zeros(4, int)})
    with pytest.raises(TypeError, match="ids must have values on the host, got traced"):
        eqx.filter_jit(lambda layer, ids: layer(ids))(other, jnp.arange(2))
    with pytest.raises(ValueError, match=r"must be pairs .* got shape \(3,\)"):
        other.rows(jnp.arange(3, dtype=jnp.uint32))


@pytest.mark.rejects
@pytest.mark.parametrize("front_end", [fn, ft])
def test_new_ids_while_averages_replace_the_weights_change_nothing(front_end):
    layer: Any = front_end.GrowingEmbedding(2, 3, evict="lru", seed=5)
    optim = firstlayer.optim if front_end is fn else firstlayer.torch.optim
    as_ids = np.array if front_end is fn else torch.tensor
    if front_end is fn:
        optimizer: Any = optim.RowAdamW(layer, lr=0.1)
        y, pull = layer.vjp([8, 2**40])
        optimizer.step(pull(y))
    else:
        layer.table.sparse = True
        optimizer = optim.RowAdamW(layer, lr=0.1)
        layer(as_ids([8, 2**40])).sum().backward()
        optimizer.step()
    averaged = optim.AveragedRows(optimizer, decay=0.5)
    averaged.update_parameters()
    look_up = layer.vjp if front_end is fn else layer
    ids, before = as_ids([8, 2**40, -7]), [1, 2, 0]
    with averaged.swapped():
        look_up(as_ids([8]))
        with pytest.raises(ValueError, match="rows must not be reset while averages"):
            look_up(ids[1:])
    assert layer.rows(ids).tolist() == before
