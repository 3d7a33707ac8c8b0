"""Equinox layers to test, and round trips that must not change them.

A round trip takes a function that builds a layer from a key and returns the layer after the
trip. Layers are pure functions of their trees, so the leaves are compared bit by bit.
"""

import copy
import functools
import io
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from firstlayer.equinox.alibi import AlibiBias
from firstlayer.equinox.cope import CopeBias
from firstlayer.equinox.fire import FireBias
from firstlayer.equinox.fourier import FourierFeatures
from firstlayer.equinox.kerple import KerpleBias
from firstlayer.equinox.learned import LearnedPositions
from firstlayer.equinox.rotary import RotaryPositions
from firstlayer.equinox.shaw import ShawScores
from firstlayer.equinox.sinusoidal import SinusoidalPositions
from firstlayer.equinox.t5 import T5Bias
from firstlayer.equinox.time2vec import Time2Vec
from firstlayer.equinox.transformer_xl import TransformerXLScores
from firstlayer.equinox.xpos import XPosRotary
from firstlayer.positions.scaling import YaRN

Build = Callable[[Any], Any]


@contextmanager
def fast_compilation() -> Generator[None]:
    """Compile without optimizations, which take longer than these tests run."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


#: A builder for every position scheme.
SCHEMES: dict[str, Build] = {
    "sinusoidal": lambda key: SinusoidalPositions(6, base=500.0),
    "fourier": lambda key: FourierFeatures([[0.5, 3.0], [7.0, 0.25]]),
    "learned": lambda key: LearnedPositions(
        40, 6, row_offset=2, padding_idx=1, init="uniform", key=key
    ),
    "rotary": lambda key: RotaryPositions(
        6, scaling=YaRN(factor=2.0, original_length=64), heads_axis=-3
    ),
    "rotary, axes": lambda key: RotaryPositions(6, sections=[2, 1], heads_axis=-3),
    "xpos": lambda key: XPosRotary(6, scale_base=40.0, center=3, heads_axis=-3),
    "alibi": lambda key: AlibiBias(3, symmetric=True),
    "t5": lambda key: T5Bias(3, num_buckets=8, max_distance=20, init="uniform", key=key),
    "kerple": lambda key: KerpleBias(3, form="power", key=key),
    "fire": lambda key: FireBias(3, width=4, threshold=8.0, key=key),
    "shaw": lambda key: ShawScores(6, max_left=3, max_right=2, init="uniform", key=key),
    "transformer-xl": lambda key: TransformerXLScores(1, 6, max_distance=5, key=key),
    "cope": lambda key: CopeBias(6, max_positions=4, init="uniform", key=key),
    "time2vec": lambda key: Time2Vec(3, key=key),
}
#: The schemes with parameters.
LEARNED = ("learned", "t5", "kerple", "fire", "shaw", "transformer-xl", "cope", "time2vec")


def key(seed: int) -> Any:
    """Return a random key of the implementation that compiles fastest."""
    return jax.random.key(seed, impl="rbg")


def all_schemes(key: Any) -> dict[str, Any]:
    """Return one layer of every scheme, as one tree."""
    return {name: build(key) for name, build in SCHEMES.items()}


def call_scheme(name: str, layer: Any, x: Any, positions: Any) -> Any:
    """Return the output of a scheme for vectors ``x`` at ``positions``."""
    if name == "fourier":
        return layer(x[..., :2])
    if name == "shaw":
        return layer.scores(x, x, positions, positions)
    if name == "transformer-xl":
        x = x[..., None, :, :]
        return layer.scores(x, x)
    if name == "cope":
        return layer.bias(x, x)
    if name == "time2vec":
        return layer(x[..., 0])
    if name in ("alibi", "t5", "kerple", "fire"):
        return layer.bias(positions, positions)
    if name == "rotary, axes":
        positions = jnp.stack([jnp.asarray(positions), jnp.asarray(positions)])
    return layer(x, positions)


def cast(tree: Any, dtype: Any) -> Any:
    """Return a tree with its floating-point leaves in another dtype."""
    return _map_real(lambda leaf: leaf.astype(dtype), tree)


@functools.cache
def built(build: Build, *, seed: int = 0) -> Any:
    """Return a layer whose parameters depend on the seed only and are exact in bfloat16."""
    layer = eqx.filter_jit(build)(key(seed))
    return _map_real(lambda leaf: jnp.asarray(np.round(np.asarray(leaf) * 64) / 64), layer)


@functools.cache
def stacked(build: Build) -> Any:
    """Return three layers stacked in one tree, as in an ensemble."""
    layers = (built(build, seed=seed) for seed in (2, 0, 1))
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *layers)


def _map_real(function: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: function(leaf) if eqx.is_inexact_array(leaf) else leaf, tree
    )


def _serialised(build: Build, like: Any) -> Any:
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, built(build))
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, like)


ROUND_TRIPS: dict[str, Callable[[Build], Any]] = {
    "deepcopy": lambda build: copy.deepcopy(built(build)),
    "pickle": lambda build: pickle.loads(pickle.dumps(built(build))),
    "serialise": lambda build: _serialised(build, built(build, seed=1)),
    "serialise, like a shape": lambda build: _serialised(
        build, eqx.filter_eval_shape(build, key(1))
    ),
    "bfloat16 and back": lambda build: cast(cast(built(build), "bfloat16"), "float32"),
    "unstack": lambda build: jax.tree.map(lambda leaf: leaf[1], stacked(build)),
    "to the host and back": lambda build: jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf)), built(build)
    ),
}
