"""Calls of every Equinox layer on a mesh of 8 devices, for ``test_sharding.py``.

Each case is a call with shardings for the layer's parameters and for the arguments. It is
compared with the same call on one device: values, gradients and the result's sharding.
:func:`main` needs a process with 8 devices.
"""

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from firstlayer.equinox import (
    AlibiBias,
    CopeBias,
    Embedding,
    EmbeddingBag,
    EmbeddingLayer,
    FireBias,
    FourierFeatures,
    FrequencyEmbedding,
    HashedEmbedding,
    KerpleBias,
    LearnedPositions,
    NgramEmbedding,
    QuotientRemainderEmbedding,
    RotaryPositions,
    ShawScores,
    SinusoidalPositions,
    T5Bias,
    Table,
    TableGroup,
    Time2Vec,
    TransformerXLScores,
    XPosRotary,
    rows,
    split_ids,
)
from firstlayer.ngram import QwenNgram
from tests.support import row_shards, sharded_training

KEY, RNG = jax.random.key(0), np.random.default_rng(0)
ROWS, COLUMNS = P("m", None), P(None, "m")
BATCH = P("d")
DATA = P("d", None, None)
BOTH = P("d", None, "m")


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        layer: The layer.
        call: Function of the layer and the arguments.
        args: The arguments, on one device.
        specs: Sharding of each argument.
        out: Sharding of the result on an explicit mesh.
        weight: Sharding of parameters with two axes.
        auto: Whether the result has the same sharding on an automatic mesh.
    """

    layer: Any
    call: Callable[..., Any]
    args: tuple[Any, ...]
    specs: tuple[P, ...]
    out: P
    weight: P = P()
    auto: bool = True


def plain(layer, *args):
    return layer(*args)


def reals(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


IDS = RNG.integers(0, 16, (8, 4)).astype(np.int32)
FLAT, OFFSETS = IDS.reshape(-1), np.arange(0, 32, 4, dtype=np.int32)
AT = RNG.integers(0, 100_000, (8, 4)).astype(np.int32)
NEAR = RNG.integers(0, 30, (8, 4)).astype(np.int32)
X, HEADS = reals(8, 4, 6), reals(8, 2, 4, 16)
TOKEN = Embedding(16, 6, padding_idx=1, max_norm=1.5, scale_grad_by_freq=True, key=KEY)
BAG = EmbeddingBag(16, 6, mode="mean", padding_idx=1, key=KEY)
LARGEST = EmbeddingBag(16, 6, mode="max", key=KEY)
LEARNED = LearnedPositions(30, 6, row_offset=2, scale=0.5, key=KEY)
COMPLETE = EmbeddingLayer(
    16,
    6,
    max_positions=30,
    segments=2,
    layer_norm=True,
    padding_idx=1,
    zero_padding=True,
    key=KEY,
)
SINUSOIDAL = EmbeddingLayer(16, 6, position="sinusoidal", scale=True, key=KEY)
ROTARY = RotaryPositions(16, base=500.0)
T5 = T5Bias(4, num_buckets=8, max_distance=20, key=KEY)
SHAW = ShawScores(16, max_left=3, max_right=2, key=KEY)
XPOS = XPosRotary(16, scale_base=40.0, center=15)
XL = TransformerXLScores(2, 16, embedding_dim=6, max_distance=3, key=KEY)
COPE = CopeBias(16, max_positions=3, init="normal", key=KEY)
TIME = Time2Vec(6, key=KEY)
FREQUENT = FrequencyEmbedding([3, 9], 16, 6, key=KEY)
QUOTIENTS = QuotientRemainderEmbedding(20, 6, buckets=4, key=KEY)
HASHED = HashedEmbedding(16, 6, hashes=2, importance_rows=4, key=KEY)
NGRAMS = NgramEmbedding(QwenNgram(heads=2, base=20, vocab_size=16, eos=5), 3, key=KEY)
GROUP = TableGroup(
    {
        "a": Table(16, 6, padding_idx=1),
        "b": Table(20, 6, mode="mean"),
        "c": Table(16, 6, mode=None),
    },
    key=KEY,
)
ENDS = np.arange(0, 33, 8, dtype=np.int32)
GROUP_ARGS = (IDS, FLAT, IDS[::-1])
FIRE, KERPLE = FireBias(4, width=8, key=KEY), KerpleBias(4, key=KEY)


def look_up(feature, group, ids, flat, sequence):
    return group({"a": ids, "b": (flat, ENDS), "c": sequence})[feature]


def with_segments(layer, ids, segments):
    return layer(ids, segments=segments, offset=3)


def given_sharding(layer, ids):
    is_sharded = jax.typeof(ids).sharding.mesh.explicit_axes
    return layer(ids, out_sharding=P(None, "d", None) if is_sharded else None)


def shaw(layer, q, positions):
    return layer(q, q[:, :, ::-1], positions, positions + 2)


CASES: dict[str, Case] = {
    "lookup, ids sharded": Case(TOKEN, plain, (IDS,), (BATCH,), DATA),
    "lookup, rows sharded": Case(TOKEN, plain, (IDS,), (P(),), P(), ROWS),
    "lookup, columns sharded": Case(
        TOKEN, plain, (IDS,), (P(),), P(None, None, "m"), COLUMNS
    ),
    "lookup, ids and rows": Case(TOKEN, plain, (IDS,), (BATCH,), DATA, ROWS),
    "lookup, ids and columns": Case(TOKEN, plain, (IDS,), (BATCH,), BOTH, COLUMNS),
    "lookup, same axis twice": Case(
        TOKEN, plain, (IDS,), (BATCH,), DATA, P("d", None), auto=False
    ),
    "bag, ids sharded": Case(BAG, plain, (IDS,), (BATCH,), BATCH, auto=False),
    "bag, weights sharded": Case(
        BAG,
        lambda bag, ids, weights: bag(ids, per_sample_weights=weights),
        (IDS, np.abs(reals(8, 4)) + 0.5),
        (P(), BATCH),
        P(),
        ROWS,
        auto=False,
    ),
    "bag, columns and ids": Case(
        LARGEST, plain, (IDS,), (BATCH,), P("d", "m"), COLUMNS, auto=False
    ),
    "bag, offsets sharded": Case(
        BAG, plain, (FLAT, OFFSETS), (BATCH, BATCH), P("d", "m"), COLUMNS, auto=False
    ),
    "complete layer, ids sharded": Case(
        COMPLETE, with_segments, (IDS, IDS % 2), (BATCH, BATCH), DATA
    ),
    "complete layer, ids and columns": Case(
        COMPLETE, with_segments, (IDS, IDS % 2), (BATCH, P()), BOTH, COLUMNS
    ),
    "complete layer, tables by row": Case(
        COMPLETE,
        lambda layer, ids, at: layer(ids, positions=at),
        (IDS, NEAR),
        (BATCH, BATCH),
        DATA,
        ROWS,
        auto=False,
    ),
    "complete layer, sinusoidal": Case(SINUSOIDAL, plain, (IDS,), (BATCH,), DATA),
    "learned, x sharded": Case(LEARNED, plain, (X,), (BATCH,), DATA),
    "learned, positions and x": Case(LEARNED, plain, (X, NEAR), (BATCH, BATCH), DATA),
    "learned, columns and x": Case(LEARNED, plain, (X, NEAR), (BOTH, BATCH), BOTH, COLUMNS),
    "learned, rows and positions": Case(
        LEARNED, plain, (X, NEAR), (P(), BATCH), DATA, ROWS, auto=False
    ),
    "learned, reals": Case(LEARNED, plain, (X, NEAR - 0.25), (BATCH, BATCH), DATA),
    "learned, encode": Case(
        LEARNED, lambda layer, at: layer.encode(at), (NEAR,), (BATCH,), BOTH, COLUMNS
    ),
    "sinusoidal, x sharded": Case(SinusoidalPositions(6), plain, (X,), (BATCH,), DATA),
    "sinusoidal, positions": Case(
        SinusoidalPositions(6), plain, (X, AT), (P(), BATCH), DATA
    ),
    "sinusoidal, reals": Case(
        SinusoidalPositions(6, frequency_scale=50.0),
        plain,
        (X, AT / 100),
        (BOTH, BATCH),
        BOTH,
    ),
    "fourier": Case(FourierFeatures([[0.1]]), plain, (reals(8, 4, 1),), (BATCH,), DATA),
    "rotary, x sharded": Case(ROTARY, plain, (HEADS,), (BATCH,), BATCH),
    "rotary, heads sharded": Case(
        ROTARY, plain, (HEADS, AT), (P("d", "m"), BATCH), P("d", "m")
    ),
    "rotary, positions only": Case(ROTARY, plain, (HEADS, AT), (P(), BATCH), BATCH),
    "rotary, length sharded": Case(
        RotaryPositions(16, layout="interleaved"),
        plain,
        (HEADS, AT[0]),
        (P(None, None, "d"), P("d")),
        P(None, None, "d"),
    ),
    "rotary, offsets": Case(
        ROTARY,
        lambda layer, x, offset: layer(x, offset=offset),
        (HEADS, AT[:, 0]),
        (BATCH, BATCH),
        BATCH,
    ),
    "rotary, real positions": Case(
        RotaryPositions(16, layout="interleaved_to_half", rotary_dim=8),
        plain,
        (HEADS, AT / 64),
        (BATCH, BATCH),
        BATCH,
    ),
    "rotary, sections": Case(
        RotaryPositions(16, sections=(4, 2, 2)),
        plain,
        (HEADS, np.stack([AT, AT + 1, AT + 5])),
        (BATCH, P(None, "d")),
        BATCH,
    ),
    "rotary, rerotate": Case(
        ROTARY,
        lambda layer, x, delta: layer.rerotate(x, delta),
        (HEADS, AT[:, 0]),
        (BATCH, BATCH),
        BATCH,
    ),
    "rotary, phases": Case(
        ROTARY, lambda layer, at: layer.phases(at)[1], (AT,), (BATCH,), BATCH
    ),
    "alibi": Case(AlibiBias(4), plain, (AT, AT + 3), (BATCH, BATCH), BATCH),
    "t5, positions": Case(T5, plain, (NEAR, NEAR + 3), (BATCH, BATCH), BATCH),
    "t5, heads and positions": Case(
        T5, plain, (NEAR, NEAR + 3), (BATCH, P()), P("d", "m"), COLUMNS
    ),
    "t5, rows": Case(T5, plain, (NEAR, NEAR - 3), (P(), P()), P(), ROWS),
    "kerple": Case(KERPLE, plain, (NEAR, NEAR + 3), (BATCH, P()), BATCH),
    "fire": Case(FIRE, plain, (NEAR, NEAR + 3), (BATCH, BATCH), BATCH),
    "shaw, positions": Case(SHAW, shaw, (HEADS, NEAR), (BATCH, BATCH), BATCH),
    "shaw, heads": Case(SHAW, shaw, (HEADS, NEAR[0]), (P("d", "m"), P()), P("d", "m")),
    "xpos, heads sharded": Case(
        XPOS, plain, (HEADS, NEAR), (P("d", "m"), BATCH), P("d", "m")
    ),
    "xpos, real keys": Case(
        XPOS,
        lambda layer, x, at: layer(x, at, keys=True),
        (HEADS, NEAR - 0.25),
        (P(), BATCH),
        BATCH,
    ),
    "transformer-xl": Case(
        XL, plain, (HEADS[:, :, 2:], HEADS), (BATCH, BATCH), BATCH, auto=False
    ),
    "transformer-xl, heads": Case(
        XL, plain, (HEADS, HEADS), (P("d", "m"), P("d", "m")), P("d", "m"), auto=False
    ),
    "cope": Case(COPE, plain, (HEADS, HEADS[..., :4]), (BATCH, BATCH), BATCH),
    "cope, heads": Case(
        COPE, plain, (HEADS, HEADS[..., :4]), (P("d", "m"), P("d", "m")), P("d", "m")
    ),
    "frequent ids": Case(FREQUENT, plain, (IDS,), (BATCH,), DATA, auto=False),
    "quotients": Case(QUOTIENTS, plain, (IDS,), (BATCH,), DATA, auto=False),
    "hashed, pairs": Case(
        HASHED, plain, (split_ids(IDS),), (BATCH,), BOTH, COLUMNS, auto=False
    ),
    "n-grams": Case(NGRAMS, plain, (IDS,), (BATCH,), DATA, auto=False),
    "n-grams, history and documents": Case(
        NGRAMS,
        lambda layer, ids, history, documents: layer(
            ids, history=history, documents=documents
        ),
        (IDS, IDS[:, :1], IDS % 2),
        (BATCH, BATCH, P()),
        DATA,
        auto=False,
    ),
    "table group": Case(
        GROUP, partial(look_up, "a"), GROUP_ARGS, (BATCH,) * 3, BATCH, auto=False
    ),
    "table group, offsets": Case(
        GROUP,
        partial(look_up, "b"),
        GROUP_ARGS,
        (BATCH, P(), BATCH),
        P(None, "m"),
        COLUMNS,
        auto=False,
    ),
    "table group, sequence": Case(
        GROUP, partial(look_up, "c"), GROUP_ARGS, (BATCH,) * 3, DATA, auto=False
    ),
    "time2vec": Case(TIME, plain, (reals(8, 4),), (BATCH,), DATA),
    "logits": Case(
        TOKEN, lambda layer, x: layer.logits(x), (X,), (BATCH,), BOTH, ROWS, auto=False
    ),
}
#: One case of each layer, on automatic meshes too: these behave as without any mesh.
ON_BOTH_MESHES = (
    "lookup, ids and columns",
    "bag, offsets sharded",
    "complete layer, ids and columns",
    "learned, positions and x",
    "sinusoidal, positions",
    "fourier",
    "rotary, heads sharded",
    "alibi",
    "t5, heads and positions",
    "kerple",
    "fire",
    "shaw, positions",
    "xpos, heads sharded",
    "transformer-xl",
    "cope",
    "quotients",
    "n-grams",
    "time2vec",
)
GIVEN = Case(TOKEN, given_sharding, (IDS,), (BATCH,), P(None, "d"), ROWS)


def placed(case: Case, mesh: Any) -> tuple[Any, list[Any]]:
    """Return the layer and the arguments on the mesh."""

    def put(leaf: Any) -> Any:
        spec = case.weight if leaf.ndim == 2 and leaf.dtype == np.float32 else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    layer = jax.tree.map(put, case.layer)
    pairs = zip(case.args, case.specs, strict=True)
    return layer, [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def results(case: Case, layer: Any, args: Any) -> tuple[Any, Any]:
    """Return the result of a call, and the gradients of its floating-point arrays."""

    @eqx.filter_jit
    def run(layer: Any, args: Any) -> tuple[Any, Any]:
        def loss(both: Any) -> tuple[Any, Any]:
            out = case.call(both[0], *both[1])
            steps = jnp.arange(out.shape[-1], dtype=jnp.float32)
            return jnp.sum(jnp.sin(out + steps)), out

        return eqx.filter_grad(loss, has_aux=True)((layer, args))

    gradients, out = run(layer, args)
    return out, gradients


_REFERENCES: dict[Any, Any] = {}


def on_one_device(case: Case) -> tuple[Any, Any]:
    """Return the results without a mesh; cases that differ in shardings share them."""
    key = id(case.layer), case.call, *map(id, case.args)
    if key not in _REFERENCES:
        args = [jnp.asarray(x) for x in case.args]
        # The arguments are kept, so that their numbers are not those of others.
        _REFERENCES[key] = results(case, case.layer, args), case
    return _REFERENCES[key][0]


def check(case: Case, *, explicit: bool, ambient: bool = False) -> None:
    """Compare a call on the mesh with the same call on one device."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(kind, kind))
    want, want_gradients = on_one_device(case)
    layer, args = placed(case, mesh)
    if ambient:
        with jax.set_mesh(mesh):
            got, gradients = results(case, layer, args)
    else:
        got, gradients = results(case, layer, args)
    np.testing.assert_allclose(got, want, atol=2e-6)
    if explicit or case.auto:
        spec = NamedSharding(mesh, case.out)
        assert got.sharding.is_equivalent_to(spec, got.ndim), got.sharding.spec
    leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True)
    for got_gradient, want_gradient in leaves:
        np.testing.assert_allclose(got_gradient, want_gradient, rtol=1e-6, atol=1e-5)
    if explicit:
        inputs = eqx.filter((layer, args), eqx.is_inexact_array)
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(inputs), strict=True)
        for gradient, leaf in pairs:
            same = gradient.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
            assert same, (gradient.sharding.spec, leaf.sharding.spec)


def check_rows(*, explicit: bool) -> None:
    """Compare three steps of a row optimizer on the mesh with those on one device."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(kind, kind))
    optimizer = rows.RowOptimizer(optax.adam(0.1))

    @eqx.filter_jit
    def step(table: Any, state: Any, ids: Any) -> Any:
        def loss(table: Any, ids: Any) -> Any:
            return jnp.sum(jnp.sin(table(ids)))

        _, gradients = optimizer.value_and_grad(loss, ids)(table, ids)
        return optimizer.update(gradients, state, table)

    def train(table: Any, state: Any, batches: Any) -> Any:
        for ids in batches:
            table, state = step(table, state, ids)
        return table, state

    batches = [jnp.asarray(ids) for ids in (IDS, (IDS + 3) % 16, IDS % 5)]
    want = train(TOKEN, optimizer.init(TOKEN), batches)
    for spec in (COLUMNS, P("d", "m"))[: 1 + explicit]:

        def put(leaf: Any, spec: P = spec) -> Any:
            spec = spec if leaf.ndim == 2 else P()
            return jax.device_put(leaf, NamedSharding(mesh, spec))

        table, state = jax.tree.map(put, (TOKEN, optimizer.init(TOKEN)))
        sharded = [jax.device_put(ids, NamedSharding(mesh, BATCH)) for ids in batches]
        with jax.set_mesh(mesh):
            table, state = train(table, state, sharded)
        pairs = zip(jax.tree.leaves((table, state)), jax.tree.leaves(want), strict=True)
        for got, wanted in pairs:
            np.testing.assert_allclose(got, wanted, atol=1e-5)
        if explicit:
            for leaf in (table.weight, state.rows[0].mu):
                wanted = NamedSharding(mesh, spec)
                assert leaf.sharding.is_equivalent_to(wanted, 2), leaf.sharding


def check_placement() -> None:
    """Eager calls return arrays on the devices of their arguments."""
    device = jax.devices()[3]
    for name in ON_BOTH_MESHES:
        case = CASES[name]
        args = [jax.device_put(x, device) for x in case.args]
        out = case.call(case.layer, *args)
        assert out.devices() == {device}, name
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    ids = jax.device_put(IDS, NamedSharding(mesh, BATCH))
    for layer in (TOKEN, COMPLETE):
        out = layer(ids)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, BATCH), 3), out.sharding


def checks() -> dict[str, Callable[[], None]]:
    """Return every check by name."""
    every: dict[str, Callable[[], None]] = {}
    for name, case in CASES.items():
        every[f"explicit: {name}"] = lambda c=case: check(c, explicit=True)
        if name in ON_BOTH_MESHES:
            every[f"auto: {name}"] = lambda c=case: check(c, explicit=False)
    every["explicit: out_sharding"] = lambda: check(GIVEN, explicit=True, ambient=True)
    for explicit in (True, False):
        name = "explicit" if explicit else "auto"
        every[f"{name}: row optimizer"] = lambda e=explicit: check_rows(explicit=e)
    every["eager placement"] = check_placement
    return every | row_shards.checks() | sharded_training.checks()


def main() -> None:
    """Run every check and print the errors by name."""
    errors = {}
    # Compiled without optimizations, which take longer than the checks run.
    jax.config.update("jax_disable_most_optimizations", True)
    for name, run in checks().items():
        try:
            run()
        except Exception:  # every error is reported under its name
            errors[name] = traceback.format_exc(limit=-3)
    json.dump({"names": list(checks()), "errors": errors}, sys.stdout)


if __name__ == "__main__":
    main()
