"""What may happen to a layer of the Equinox face after which its numbers are the same.

A life takes a function that builds a layer with a key and returns one that has lived. A
layer is a pure function of its tree, so lives are compared leaf by leaf, on bits.
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
from firstlayer.equinox.fire import FireBias
from firstlayer.equinox.fourier import FourierFeatures
from firstlayer.equinox.kerple import KerpleBias
from firstlayer.equinox.learned import LearnedPositions
from firstlayer.equinox.rotary import RotaryPositions
from firstlayer.equinox.shaw import ShawScores
from firstlayer.equinox.sinusoidal import SinusoidalPositions
from firstlayer.equinox.t5 import T5Bias
from firstlayer.positions.scaling import YaRN

Build = Callable[[Any], Any]


@contextmanager
def compiled_quickly() -> Generator[None]:
    """Compile without optimising inside, which takes longer than what is run."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


#: Every scheme, each built with a key.
SCHEMES: dict[str, Build] = {
    "sinusoidal": lambda key: SinusoidalPositions(6, base=500.0),
    "fourier": lambda key: FourierFeatures([[0.5, 3.0], [7.0, 0.25]]),
    "learned": lambda key: LearnedPositions(
        40, 6, row_offset=2, padding_idx=1, init="uniform", key=key
    ),
    "rotary": lambda key: RotaryPositions(6, scaling=YaRN(factor=2.0, original_length=64)),
    "rotary, axes": lambda key: RotaryPositions(6, sections=[2, 1]),
    "alibi": lambda key: AlibiBias(3, symmetric=True),
    "t5": lambda key: T5Bias(3, num_buckets=8, max_distance=20, init="uniform", key=key),
    "kerple": lambda key: KerpleBias(3, form="power", key=key),
    "fire": lambda key: FireBias(3, width=4, threshold=8.0, key=key),
    "shaw": lambda key: ShawScores(6, max_left=3, max_right=2, init="uniform", key=key),
}
#: Those that have something to train.
LEARNED = ("learned", "t5", "kerple", "fire", "shaw")


def key(seed: int) -> Any:
    """Return a key of the kind that compiles fastest."""
    return jax.random.key(seed, impl="rbg")


def everything(key: Any) -> dict[str, Any]:
    """Return all of them, a tree like any other."""
    return {name: build(key) for name, build in SCHEMES.items()}


def called(name: str, layer: Any, x: Any, positions: Any) -> Any:
    """Return the output of a scheme for vectors ``x`` at ``positions``, one for each."""
    if name == "fourier":
        return layer(x[..., :2])
    if name == "shaw":
        return layer.scores(x, x, positions, positions)
    if name in ("alibi", "t5", "kerple", "fire"):
        return layer.bias(positions, positions)
    if name == "rotary, axes":
        positions = jnp.stack([jnp.asarray(positions), jnp.asarray(positions)])
    return layer(x, positions)


def is_real(leaf: Any) -> bool:
    """Tell what a cast of a model rounds."""
    return eqx.is_inexact_array(leaf)


def cast(tree: Any, dtype: Any) -> Any:
    """Return a tree whose real leaves are in another dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_real(leaf) else leaf, tree)


def rounded(tree: Any) -> Any:
    """Return a tree whose real leaves half precision can hold."""
    return jax.tree.map(
        lambda leaf: (
            jnp.asarray(np.round(np.asarray(leaf) * 64) / 64) if is_real(leaf) else leaf
        ),
        tree,
    )


@functools.cache
def built(build: Build, *, seed: int = 0) -> Any:
    """Return a layer whose parameters depend on the seed alone, and survive a cast."""
    return rounded(eqx.filter_jit(build)(key(seed)))


def _serialised(build: Build, like: Any) -> Any:
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, built(build))
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, like)


@functools.cache
def stacked(build: Build) -> Any:
    """Return three layers in one tree, as an ensemble has them."""
    layers = (built(build, seed=seed) for seed in (2, 0, 1))
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *layers)


def _on_numpy(layer: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), layer)


LIVES: dict[str, Callable[[Build], Any]] = {
    "deepcopied": lambda build: copy.deepcopy(built(build)),
    "pickled": lambda build: pickle.loads(pickle.dumps(built(build))),
    "serialised": lambda build: _serialised(build, built(build, seed=1)),
    "serialised, like a shape": lambda build: _serialised(
        build, eqx.filter_eval_shape(build, key(1))
    ),
    "to bfloat16 and back": lambda build: cast(cast(built(build), "bfloat16"), "float32"),
    "one of a stack": lambda build: jax.tree.map(lambda leaf: leaf[1], stacked(build)),
    "its leaves on the host": lambda build: _on_numpy(built(build)),
}
