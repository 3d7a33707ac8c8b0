"""Tables that a layer shards by row, on meshes of 8 devices, for ``test_sharding.py``.

Everything is compared with the same layer on one device. The checks run in the process of
:mod:`tests.support.sharded_layers`; those of training are in
:mod:`tests.support.sharded_training`.
"""

import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from firstlayer import equinox as layers
from firstlayer.equinox import Embedding, EmbeddingBag, EmbeddingLayer, optim
from firstlayer.ngram import SaltedNgram

KEY, RNG = jax.random.key(7), np.random.default_rng(3)
IDS = RNG.integers(0, 17, (8, 4)).astype(np.int32)
IDS[0, :2], IDS[1, 0] = 16, 2
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
ROWS = P("rows", None)


def mesh_of(kind: AxisType, sizes: tuple[int, ...] = (4, 2)) -> Any:
    names = ("rows", "data")[: len(sizes)]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=devices)


def on(mesh: Any, x: Any, *spec: Any) -> Any:
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def program_text(function: Callable[..., Any], *args: Any) -> str:
    """Return the text of a compiled program, with the shapes of arrays on one device."""
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None
    return text


def collectives(text: str) -> list[str]:
    """Return the names of the collectives of floating-point arrays in a program."""
    ours = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    lines = [line for line in text.splitlines() if re.search(r"= \(?(f|bf)\d+\[", line)]
    found = [re.search(r"\} ([a-z-]+?)(?:-start)?\(", line) for line in lines]
    return [match[1] for match in found if match and match[1] in ours]


def largest_array(text: str) -> int:
    """Return the number of entries of the largest array in a program."""
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)
    return max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)


def own_rows(x: Any, like: Any) -> np.ndarray:
    """Return an array without rows of zeros at its end that another does not have."""
    return np.asarray(x)[: len(like)] if x.ndim else np.asarray(x)


def run(layer: Any, *args: Any, call: Callable[..., Any]) -> Any:
    """Return the result of a call and the gradients of its floating-point arguments."""

    def loss(both: Any) -> Any:
        out = call(both[0], *both[1])
        steps = jnp.arange(out.shape[-1], dtype=jnp.float32)
        return jnp.nansum(jnp.sin(out + steps)), out

    gradients, out = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))((layer, args))
    return out, gradients


def compare(plain: Any, layer: Any, *args: Any, call: Any, place: Any) -> Any:
    """Compare results and gradients; return the result on the mesh."""
    want, (want_layer, want_args) = run(plain, *map(jnp.asarray, args), call=call)
    got, (layer_gradient, args_gradient) = run(layer, *map(place, args), call=call)
    np.testing.assert_allclose(got, want, atol=2e-6)
    for one, other in zip(
        jax.tree.leaves(args_gradient), jax.tree.leaves(want_args), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    pairs = zip(
        jax.tree.leaves(layer_gradient),
        jax.tree.leaves(want_layer),
        jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array)),
        strict=True,
    )
    for one, other, weight in pairs:
        np.testing.assert_allclose(own_rows(one, other), other, rtol=1e-5, atol=1e-5)
        assert not np.asarray(one)[len(other) :].any()
        assert one.sharding.is_equivalent_to(weight.sharding, one.ndim), one.sharding
    return got


def check_lookup(
    kind: AxisType, spec: P, rows: int, *, axis: str = "data", ambient: bool = False
) -> None:
    """Lookups of ids that are sharded over an axis, in the context of the mesh or not."""
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh) if ambient else nullcontext():
        _check_lookup(mesh, spec, rows, axis)


def _check_lookup(mesh: Any, spec: P, rows: int, axis: str) -> None:
    options = {"padding_idx": 2, "max_norm": 1.5, "scale_grad_by_freq": True}
    plain = Embedding(rows, 6, **options, key=KEY)
    layer = Embedding(rows, 6, **options, key=KEY, sharding=NamedSharding(mesh, spec))
    assert layer.num_embeddings == rows
    # The same numbers on every mesh, and rows of zeros after them.
    np.testing.assert_allclose(
        own_rows(layer.weight, plain.weight), plain.weight, rtol=1e-6
    )
    assert not np.asarray(layer.weight)[rows:].any()
    assert layer.weight.sharding == layer.sharding
    ids = np.where(IDS == 5, rows, IDS)
    ids[2, 0] = -1
    got = compare(
        plain,
        layer,
        ids,
        call=lambda layer, ids: layer(ids),
        place=lambda x: on(mesh, x, axis),
    )
    is_nan = np.isnan(np.asarray(got)).all(-1)
    np.testing.assert_array_equal(is_nan, (ids < 0) | (ids >= rows))
    with pytest.raises(IndexError, match=rf"ids\[1\] is {rows}, but num_embeddings is"):
        layer([0, rows])
    one_by_one = jax.vmap(layer)(jnp.arange(rows))
    np.testing.assert_array_equal(one_by_one, layer(jnp.arange(rows)))


def check_collectives(kind: AxisType) -> None:
    """A lookup is one collective, and no array is as large as the table."""
    mesh = mesh_of(kind)
    layer = Embedding(4001, 16, key=KEY, sharding=NamedSharding(mesh, ROWS))

    def program(ids: Any, out_sharding: Any) -> tuple[str, Any]:
        def call(layer: Any, ids: Any) -> Any:
            return layer(ids, out_sharding=out_sharding)

        def loss(layer: Any, ids: Any) -> Any:
            return (call(layer, ids) ** 2).sum()

        assert largest_array(program_text(jax.grad(loss), layer, ids)) < 4001 * 16 / 2
        text = program_text(call, layer, ids)
        assert largest_array(text) < 4001 * 16 / 2
        return text, jax.jit(call)(layer, ids)

    text, out = program(on(mesh, IDS, "data"), P("data", None, None))
    assert collectives(text) == ["all-reduce"]
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 3)
    np.testing.assert_array_equal(out, np.asarray(layer.weight)[IDS])
    # Ids and table are sharded over the same axis.
    out_sharding = None if kind is EXPLICIT else P("rows", None, None)
    text, out = program(on(mesh, IDS, "rows"), out_sharding)
    assert collectives(text) == ["reduce-scatter"]
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("rows")), 3)
    np.testing.assert_array_equal(out, np.asarray(layer.weight)[IDS])


def check_bags(kind: AxisType, mode: str) -> None:
    mesh = mesh_of(kind)
    options = {"mode": mode, "padding_idx": 2, "max_norm": 1.5, "scale_grad_by_freq": True}
    place = NamedSharding(mesh, ROWS)
    plain = EmbeddingBag(17, 6, **options, key=KEY)
    layer = EmbeddingBag(17, 6, **options, key=KEY, sharding=place)
    weights = RNG.uniform(0.5, 1.5, IDS.shape).astype(np.float32)
    ids = np.where(IDS == 5, 17, IDS)
    compare(
        plain,
        layer,
        ids,
        weights,
        call=lambda layer, ids, weights: layer(ids, per_sample_weights=weights),
        place=lambda x: on(mesh, x, "data"),
    )
    offsets = np.array([0, 3, 3, 20], np.int32)
    flat = IDS.reshape(-1)
    call = lambda layer, ids: layer(ids, offsets)  # noqa: E731
    place = lambda x: on(mesh, x)  # noqa: E731
    compare(plain, layer, flat, call=call, place=place)
    if mode != "max":
        # Bags travel, not rows.
        long = on(mesh, np.tile(IDS, (1, 50)))
        text = program_text(lambda layer, ids: layer(ids), layer, long)
        assert collectives(text) == ["all-reduce"]
        (line,) = (line for line in text.splitlines() if " all-reduce" in line)
        assert "f32[8,6]" in line


def check_logits(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    x = RNG.standard_normal((4, 6)).astype(np.float32)
    for rows in (17, 16):
        plain = Embedding(rows, 6, key=KEY)
        layer = Embedding(rows, 6, key=KEY, sharding=NamedSharding(mesh, ROWS))
        got = compare(
            plain,
            layer,
            x,
            call=lambda layer, x: layer.logits(x),
            place=lambda x: on(mesh, x, "data"),
        )
        if kind is EXPLICIT:
            spec = P("data", "rows" if rows == 16 else None)
            assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def check_layer(kind: AxisType, build: Any) -> None:
    """Layers that have a table as a part."""
    mesh = mesh_of(kind)
    compare(
        build(key=KEY),
        build(key=KEY, sharding=NamedSharding(mesh, ROWS)),
        IDS,
        call=lambda layer, ids: layer(ids),
        place=lambda x: on(mesh, x, "data"),
    )


def check_half_precision() -> None:
    """Lookups, the tied head and a step of an optimizer in bfloat16."""
    mesh, call = mesh_of(AUTO), lambda layer, ids: layer.logits(layer(ids))
    place = NamedSharding(mesh, ROWS)
    plain = Embedding(17, 6, dtype="bfloat16", key=KEY)
    layer = plain.with_sharding(place)
    (want, want_gradients), (got, gradients) = (
        run(table, IDS, call=call) for table in (plain, layer)
    )
    assert got.dtype == want.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want)
    for one, other in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True
    ):
        scale = np.abs(np.asarray(other, np.float32)).max()
        error = np.asarray(own_rows(one, other), np.float32) - np.asarray(other, np.float32)
        assert np.abs(error).max() < 0.02 * scale
    rule = optim.RowWiseAdagrad(0.1)
    tables = []
    for table in (plain, layer):
        model, state = rule.init(table)
        rows = rule.gather(model, state, jnp.asarray(IDS))
        ones = eqx.filter(jax.tree.map(jnp.ones_like, rows), eqx.is_inexact_array)
        tables.append(rule.flush(*rule.update(ones, state, rows)).parameters()["weight"])
    np.testing.assert_array_equal(*tables)


def check_changes(kind: AxisType) -> None:
    """Files, parameters and methods that return another layer have the layer's rows."""
    mesh = mesh_of(kind)
    place = NamedSharding(mesh, ROWS)
    plain = Embedding(17, 6, max_norm=1.5, padding_idx=2, key=KEY)
    layer = Embedding(
        17, 6, max_norm=1.5, padding_idx=2, weight=plain.weight, sharding=place
    )
    table = np.asarray(plain.weight)

    def check_table(other: Any, want: Any, rows: int = 17) -> None:
        assert other.weight.sharding.is_equivalent_to(place, 2)
        assert other.weight.shape == (-(-rows // 4) * 4, 6)
        np.testing.assert_array_equal(other.parameters()["weight"], want)
        assert not np.asarray(other.weight)[rows:].any()

    check_table(layer, table)
    given = Embedding(17, 6, weight=table.astype(np.float64), sharding=place)
    check_table(given, table)
    check_table(layer.set_padding(3.0), plain.set_padding(3.0).weight)
    check_table(layer.projected(), plain.projected().weight)
    check_table(layer.projected([16, 3, 3]), plain.projected([16, 3, 3]).weight)
    check_table(layer.with_parameters({"weight": -table}), -table)
    resized, changes = layer.resize(22)
    want, want_changes = plain.resize(22)
    check_table(resized, want.weight, 22)
    assert changes == want_changes
    check_table(plain.with_sharding(place), table)
    few = layers.rows.touched(layer, IDS)
    np.testing.assert_array_equal(few(IDS), plain(IDS))
    assert eqx.tree_equal(layer.with_sharding(None), plain)
    with tempfile.TemporaryDirectory() as folder:
        layers.save(f"{folder}/a.safetensors", layer)
        assert eqx.tree_equal(layers.load(f"{folder}/a.safetensors"), plain)
    one = EmbeddingLayer(17, 8, position=None, key=KEY)
    token: Any = one.token
    whole = eqx.tree_at(lambda one: one.token, one, token.with_sharding(place))
    np.testing.assert_array_equal(whole.quantized()(IDS), one.quantized()(IDS))


def check_errors() -> None:
    mesh = mesh_of(AUTO)
    with pytest.raises(ValueError, match=r"multiple of the 2 shards of the columns, got 7"):
        Embedding(8, 7, key=KEY, sharding=NamedSharding(mesh, P("rows", "data")))
    with pytest.raises(TypeError, match=r"must be a NamedSharding, got P"):
        Embedding(8, 6, key=KEY, sharding=cast(Any, ROWS))
    with pytest.raises(ValueError, match=r"sharding must be that of a table, got P"):
        Embedding(8, 6, key=KEY, sharding=NamedSharding(mesh, P("rows", None, "data")))
    with pytest.raises(ValueError, match=r"key must be given to draw parameters, got None"):
        Embedding(8, 6, sharding=NamedSharding(mesh, ROWS))


def checks() -> dict[str, Callable[[], None]]:
    """Return every check by name."""
    every: dict[str, Callable[[], None]] = {"row shards: errors": check_errors}
    both = P(("data", "rows"), None)
    for kind, spec, rows, others in (
        (EXPLICIT, ROWS, 17, {}),
        (AUTO, ROWS, 17, {}),
        (AUTO, P("rows", "data"), 20, {"ambient": True}),
        (EXPLICIT, both, 17, {"ambient": True}),
        (EXPLICIT, P(None, "data"), 17, {"axis": "rows"}),
    ):
        name = f"row shards: lookup, {kind.name}, {spec}"
        every[name] = partial(check_lookup, kind, spec, rows, **others)
    for kind in (EXPLICIT, AUTO):
        every[f"row shards: collectives, {kind.name}"] = partial(check_collectives, kind)
        every[f"row shards: logits, {kind.name}"] = partial(check_logits, kind)
    for kind, mode in ((AUTO, "sum"), (EXPLICIT, "mean"), (AUTO, "max")):
        every[f"row shards: bags, {mode}"] = partial(check_bags, kind, mode)
    options = {"max_positions": 9, "segments": 2, "layer_norm": True, "padding_idx": -1}
    for kind, name, build in (
        (EXPLICIT, "complete layer", partial(EmbeddingLayer, 17, 6, **options)),
        (AUTO, "hashed", partial(layers.HashedEmbedding, 17, 6, importance_rows=5)),
        (AUTO, "n-grams", partial(layers.NgramEmbedding, SaltedNgram(rows=30), 6)),
    ):
        every[f"row shards: {name}"] = partial(check_layer, kind, build)
    every["row shards: half precision"] = check_half_precision
    every["row shards: changes"] = partial(check_changes, EXPLICIT)
    return every
