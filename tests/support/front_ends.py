"""One layer in three front ends: built from one file, called and differentiated alike.

A :class:`Case` is a configuration and the arguments of a call. ``in_all_front_ends`` builds
it on NumPy, with a seed, and loads NumPy's file in the others. ``output_and_gradients``
returns NumPy arrays. ``term_sizes`` returns Σ|terms| of the sums behind each number, which
tolerances are relative to.
"""

import functools
import importlib
import inspect
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import torch

from firstlayer.embeddings.row_gradient import RowGradient

FRONT_ENDS = ("numpy", "torch", "equinox")
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Case:
    """A configuration of a layer, and the arguments of a call.

    Args:
        name: Name of the layer's class.
        options: Constructor arguments.
        real: Shapes of the arguments that get a gradient, by name.
        rest: Other arguments, as arrays of integers or reals.
        method: Method that is called.
        names: Keywords of ``rest`` after the first, if they are not positional.
        linear: Parameters and inputs that the output is linear in.
    """

    name: str
    options: dict[str, Any]
    real: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rest: tuple[Any, ...] = ()
    method: str = "__call__"
    names: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()

    def draw(self, seed: int) -> Arrays:
        """Return random values of the real arguments, in float32."""
        rng = np.random.default_rng(seed)
        return {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, shape in self.real.items()
        }

    def arguments(
        self, real: dict[str, Any], rest: tuple[Any, ...]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments of the call."""
        if self.names:
            return [rest[0]], dict(zip(self.names, rest[1:], strict=True))
        if self.name == "EmbeddingBag":
            return [*rest, *real.values()], {}
        return [*real.values(), *rest], {}


def class_of(front_end: str, name: str) -> Any:
    """Return the class of a layer in a front end."""
    return getattr(importlib.import_module(f"firstlayer.{front_end}"), name)


@functools.cache
def in_all_front_ends(case: Case) -> dict[str, Any]:
    """Return the layer by front end, with one state; the layers are shared by all tests."""
    return built_in_all_front_ends(case)


def built_in_all_front_ends(case: Case) -> dict[str, Any]:
    """Return new layers by front end, with one state."""
    cls = class_of("numpy", case.name)
    seed = {"rng": 0} if "rng" in inspect.signature(cls).parameters else {}
    layers = {"numpy": cls(**case.options, **seed)}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/layer.safetensors"
        importlib.import_module("firstlayer.numpy").save(path, layers["numpy"])
        for front_end in FRONT_ENDS[1:]:
            module = importlib.import_module(f"firstlayer.{front_end}")
            layers[front_end] = module.load(path)
    return layers


def output_and_gradients(
    front_end: str, case: Case, real: Arrays, rest: tuple[Any, ...], dy: np.ndarray
) -> tuple[np.ndarray, Arrays]:
    """Return the output, and the gradients of all inputs and parameters, given ``dy``."""
    run = {"numpy": _on_numpy, "torch": _on_torch, "equinox": _on_equinox}[front_end]
    return run(in_all_front_ends(case)[front_end], case, real, rest, dy)


def call(case: Case, layer: Any, real: dict[str, Any], rest: tuple[Any, ...]) -> Any:
    """Return the output of a layer."""
    # In the order of the case: JAX sorts the keys of a dict.
    args, options = case.arguments({name: real[name] for name in case.real}, rest)
    return getattr(layer, case.method)(*args, **options)


def _on_numpy(layer: Any, case: Case, real: Arrays, rest: Any, dy: Any) -> Any:
    if not hasattr(layer, "vjp"):
        return call(case, layer, real, rest), {}
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
    y = call(case, layer, tensors, tuple(torch.as_tensor(x) for x in rest))
    if not y.requires_grad:
        return y.numpy(), {}
    layer.zero_grad()
    y.backward(torch.from_numpy(dy))
    leaves = {**dict(layer.named_parameters()), **tensors}
    return y.detach().numpy(), {
        name: x.grad.numpy().copy() for name, x in leaves.items() if x.grad is not None
    }


def _on_equinox(layer: Any, case: Case, real: Arrays, rest: Any, dy: Any) -> Any:
    y, gradients = _jitted_vjp(case, layer, real, tuple(jnp.asarray(x) for x in rest), dy)
    return np.asarray(y), {
        name: np.asarray(value) for name, value in gradients.items() if value is not None
    }


@eqx.filter_jit
def _jitted_vjp(case: Case, layer: Any, real: Any, rest: Any, dy: Any) -> Any:
    def run(layer: Any, real: Any) -> Any:
        return call(case, layer, real, rest)

    y, pullback = eqx.filter_vjp(run, layer, real)
    dlayer, dreal = pullback(dy)
    return y, {**dlayer.parameters(), **dreal}


def term_sizes(
    case: Case, real: Arrays, rest: tuple[Any, ...], dy: np.ndarray
) -> tuple[np.ndarray, Arrays]:
    """Return Σ|terms| of each output and each gradient, from the Jacobians in float64.

    A gradient is a sum over outputs. An output is a sum over the inputs that it is linear
    in, plus a term that does not depend on them.
    """
    layer = _in_float64(case)
    inputs = {name: x.astype(np.float64) for name, x in real.items()}
    if not hasattr(layer, "vjp"):
        return np.abs(call(case, layer, inputs, rest)), {}
    args, options = case.arguments(inputs, rest)
    y, pull = layer.vjp(*args, **options)
    units = np.eye(y.size).reshape(y.size, *y.shape)
    rows = [_dense(pull(unit), layer) for unit in units]
    jacobians = {n: np.stack([row[n].ravel() for row in rows]) for n in rows[0]}
    values = {**layer.parameters(), **inputs}
    linear = {n: jacobians[n] * values[n].ravel() for n in case.linear}
    constant = y.ravel() - sum(term.sum(axis=1) for term in linear.values())
    sizes = np.abs(constant) + sum(np.abs(term).sum(axis=1) for term in linear.values())
    return sizes.reshape(y.shape), {
        n: (np.abs(dy).ravel() @ np.abs(jacobian)).reshape(values[n].shape)
        for n, jacobian in jacobians.items()
    }


def _in_float64(case: Case) -> Any:
    layer = in_all_front_ends(case)["numpy"]
    if "dtype" not in layer.config():
        return layer
    options = {k: v for k, v in case.options.items() if k not in ("dtype", "weight")}
    other = type(layer)(**options, dtype="float64")
    other.load_state_dict({n: x.astype(np.float64) for n, x in layer.state_dict().items()})
    return other


def assert_agree(arrays: dict[str, np.ndarray], sizes: np.ndarray, what: str) -> None:
    """Assert that all front ends are within 1e-6 · max(1, Σ|terms|) of each other."""
    bound = 1e-6 * np.maximum(1.0, sizes)
    for a, b in itertools.combinations(FRONT_ENDS, 2):
        assert arrays[a].shape == arrays[b].shape == sizes.shape, (what, a, b)
        difference = np.abs(arrays[a].astype(np.float64) - arrays[b].astype(np.float64))
        assert (difference <= bound).all(), (what, a, b, float((difference / bound).max()))


def errors_of(run: Callable[[str], Any]) -> dict[str, tuple[str, str]]:
    """Return the class and message of the error that each front end raises."""
    errors = {}
    for front_end in FRONT_ENDS:
        try:
            run(front_end)
        except (ValueError, TypeError, IndexError) as error:
            base = next(
                base
                for base in (ValueError, TypeError, IndexError)
                if isinstance(error, base)
            )
            # Equinox appends its own explanation after a line of dashes.
            errors[front_end] = base.__name__, str(error.args[0]).split("\n----")[0]
    return errors
