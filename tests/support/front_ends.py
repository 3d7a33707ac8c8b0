"""One layer in three faces: built from one file, called and differentiated alike.

A :class:`Case` is a configuration and a way to call it. ``in_all_faces`` builds it on
NumPy, with a seed, and loads it in the other faces from NumPy's file; ``pulled`` returns
the output and all gradients of a face as NumPy arrays; ``terms`` says how large the sums
are that these numbers are the results of, which is what their difference is measured by.
"""

import functools
import importlib
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import torch

from firstlayer.embeddings.row_gradient import RowGradient

FACES = ("numpy", "torch", "equinox")
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Case:
    """A configuration of a layer, and what it is called with.

    Args:
        name: The layer's class, the same in every face.
        options: What it is built with.
        real: Shapes of the real arrays that it is called with, by name.
        rest: Whatever else, as arrays of integers or reals.
        method: What is called, if not the layer itself.
        names: Under which keywords ``rest`` goes in, if not by position.
        linear: The parameters and inputs that the output is a linear function of.
    """

    name: str
    options: dict[str, Any]
    real: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rest: tuple[Any, ...] = ()
    method: str = "__call__"
    names: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()

    def draw(self, seed: int) -> Arrays:
        """Return the real arrays, in float32."""
        rng = np.random.default_rng(seed)
        return {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, shape in self.real.items()
        }

    def arguments(
        self, real: dict[str, Any], rest: tuple[Any, ...]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return how the layer is called, the names of real arrays being its own too."""
        if self.names:
            return [rest[0]], dict(zip(self.names, rest[1:], strict=True))
        if self.name == "EmbeddingBag":
            return [*rest, *real.values()], {}
        return [*real.values(), *rest], {}


def class_of(face: str, name: str) -> Any:
    """Return the class of a layer in a face."""
    return getattr(importlib.import_module(f"firstlayer.{face}"), name)


@functools.cache
def in_all_faces(case: Case) -> dict[str, Any]:
    """Return the layer by face, with one state, the same layers whenever it is asked."""
    return built_in_all_faces(case)


def built_in_all_faces(case: Case) -> dict[str, Any]:
    """Return the layer by face, with one state."""
    cls = class_of("numpy", case.name)
    seed = {"rng": 0} if "rng" in inspect.signature(cls).parameters else {}
    layers = {"numpy": cls(**case.options, **seed)}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/layer.safetensors"
        importlib.import_module("firstlayer.numpy").save(path, layers["numpy"])
        for face in FACES[1:]:
            layers[face] = importlib.import_module(f"firstlayer.{face}").load(path)
    return layers


def pulled(
    face: str, case: Case, real: Arrays, rest: tuple[Any, ...], dy: np.ndarray
) -> tuple[np.ndarray, Arrays]:
    """Return the output of a face, and the gradients of everything, given its own."""
    run = {"numpy": _on_numpy, "torch": _on_torch, "equinox": _on_equinox}[face]
    return run(in_all_faces(case)[face], case, real, rest, dy)


def called(case: Case, layer: Any, real: dict[str, Any], rest: tuple[Any, ...]) -> Any:
    """Return the output of a layer."""
    # JAX sorts the keys of a dict.
    args, options = case.arguments({name: real[name] for name in case.real}, rest)
    return getattr(layer, case.method)(*args, **options)


def _on_numpy(layer: Any, case: Case, real: Arrays, rest: Any, dy: Any) -> Any:
    if not hasattr(layer, "vjp"):
        return called(case, layer, real, rest), {}
    args, options = case.arguments(real, rest)
    y, pull = layer.vjp(*args, **options)
    return y, _dense(pull(dy), layer)


def _dense(gradients: dict[str, Any], layer: Any) -> Arrays:
    shapes = {name: value.shape for name, value in layer.parameters().items()}
    return {
        name: value.dense(shapes[name][0]) if isinstance(value, RowGradient) else value
        for name, value in gradients.items()
    }


def _on_torch(layer: Any, case: Case, real: Arrays, rest: Any, dy: Any) -> Any:
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in real.items()}
    y = called(case, layer, tensors, tuple(torch.as_tensor(x) for x in rest))
    if not y.requires_grad:
        return y.numpy(), {}
    layer.zero_grad()
    y.backward(torch.from_numpy(dy))
    found = {**dict(layer.named_parameters()), **tensors}
    return y.detach().numpy(), {
        name: x.grad.numpy().copy() for name, x in found.items() if x.grad is not None
    }


def _on_equinox(layer: Any, case: Case, real: Arrays, rest: Any, dy: Any) -> Any:
    y, gradients = _pulled(case, layer, real, tuple(jnp.asarray(x) for x in rest), dy)
    return np.asarray(y), {
        name: np.asarray(value) for name, value in gradients.items() if value is not None
    }


@eqx.filter_jit
def _pulled(case: Case, layer: Any, real: Any, rest: Any, dy: Any) -> Any:
    def run(layer: Any, real: Any) -> Any:
        return called(case, layer, real, rest)

    y, back = eqx.filter_vjp(run, layer, real)
    own, given = back(dy)
    return y, {**own.parameters(), **given}


def terms(
    case: Case, real: Arrays, rest: tuple[Any, ...], dy: np.ndarray
) -> tuple[np.ndarray, Arrays]:
    """Return the sum of the sizes of what is added up, for each output and gradient.

    From the derivatives of every output by every input, in float64. A gradient is a sum
    over the outputs. An output is a sum over the inputs that it is linear in, and of what
    depends on none of them.
    """
    layer, wide = _in_float64(case), {n: x.astype(np.float64) for n, x in real.items()}
    if not hasattr(layer, "vjp"):
        return np.abs(called(case, layer, wide, rest)), {}
    args, options = case.arguments(wide, rest)
    y, pull = layer.vjp(*args, **options)
    units = np.eye(y.size).reshape(y.size, *y.shape)
    by_unit = [_dense(pull(unit), layer) for unit in units]
    slopes = {n: np.stack([one[n].ravel() for one in by_unit]) for n in by_unit[0]}
    values = {**layer.parameters(), **wide}
    parts = {n: slopes[n] * values[n].ravel() for n in case.linear}
    rest_of = y.ravel() - sum(part.sum(axis=1) for part in parts.values())
    sizes = np.abs(rest_of) + sum(np.abs(part).sum(axis=1) for part in parts.values())
    arriving = np.abs(dy).ravel()
    return sizes.reshape(y.shape), {
        n: (arriving @ np.abs(slope)).reshape(values[n].shape)
        for n, slope in slopes.items()
    }


def _in_float64(case: Case) -> Any:
    layer = in_all_faces(case)["numpy"]
    config = layer.config()
    if "dtype" not in config:
        return layer
    options = {k: v for k, v in case.options.items() if k not in ("dtype", "weight")}
    wide = type(layer)(**options, dtype="float64")
    wide.load_state_dict({n: x.astype(np.float64) for n, x in layer.state_dict().items()})
    return wide


def assert_agree(found: dict[str, np.ndarray], sizes: np.ndarray, what: str) -> None:
    """Fail unless all faces are within 1e-6 · max(1, Σ|terms|) of each other."""
    bound = 1e-6 * np.maximum(1.0, sizes)
    for a, b in (("numpy", "torch"), ("numpy", "equinox"), ("torch", "equinox")):
        assert found[a].shape == found[b].shape == sizes.shape, (what, a, b)
        apart = np.abs(found[a].astype(np.float64) - found[b].astype(np.float64))
        assert (apart <= bound).all(), (what, a, b, float((apart / bound).max()))


def refusals(run: Callable[[str], Any]) -> dict[str, tuple[str, str]]:
    """Return the class and the sentence of the error that each face raises."""
    found = {}
    for face in FACES:
        try:
            run(face)
        except (ValueError, TypeError, IndexError) as error:
            kinds = [kind for kind in (ValueError, TypeError, IndexError)
                     if isinstance(error, kind)]  # fmt: skip
            found[face] = kinds[0].__name__, str(error.args[0]).split("\n----")[0]
    return found
