"""Base class of the NumPy layers, and the argument conversions they share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import check_real, float_dtype, host_array, positions_array
from ..files.layer_configs import config_of
from ..positions.ids import plain_offset, resolve
from ._disk import REFERENCE, checked_references, references_of, stores_of


class Module:
    """Base class of the NumPy layers."""

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the trainable arrays by name, not copied.

        Example:
            >>> from firstlayer.numpy import EmbeddingLayer
            >>> list(EmbeddingLayer(10, 4, max_positions=8, rng=0).parameters())
            ['token.weight', 'position.weight']
        """
        return {}

    def buffers(self) -> dict[str, np.ndarray]:
        """Return the arrays that are saved but not trained, by name, not copied.

        These are the rows of a quantized table.

        Example:
            >>> from firstlayer.numpy import EmbeddingLayer
            >>> layer = EmbeddingLayer(10, 32, max_positions=8, rng=0).quantized("int8")
            >>> sorted(layer.buffers())
            ['token.encoded']
        """
        return {}

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the state dict and of files, by name, not copied.

        Example:
            >>> from firstlayer.numpy import EmbeddingLayer
            >>> layer = EmbeddingLayer(10, 32, max_positions=8, rng=0).quantized("int8")
            >>> sorted(layer.state_arrays())
            ['position.weight', 'token.encoded']
        """
        return {**self.parameters(), **self.buffers()}

    def embeddings(self) -> dict[str, Any]:
        """Return the layers that look rows up by id, by the name of their parameter.

        Example:
            >>> from firstlayer.numpy import EmbeddingLayer
            >>> layer = EmbeddingLayer(10, 4, max_positions=8, layer_norm=True, rng=0)
            >>> sorted(layer.embeddings())
            ['position.weight', 'token.weight']
        """
        return {
            f"{part}.{name}": table
            for part, layer in vars(self).items()
            if isinstance(layer, Module)
            for name, table in layer.embeddings().items()
        }

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> from firstlayer.numpy import AlibiBias
            >>> config = AlibiBias(4, max_bias=2.0).config()
            >>> AlibiBias(**config).max_bias
            2.0
        """
        return config_of(self)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a copy of every parameter and buffer, by name.

        For a table on disk, ``"{name}.store"`` is the path of its store and the commit that
        this call makes, as JSON in an array of uint8.

        Example:
            >>> from firstlayer.numpy import Embedding
            >>> layer = Embedding(2, 1, rng=0)
            >>> state = layer.state_dict()
            >>> layer.weight[:] = 7
            >>> layer.load_state_dict(state)
            >>> bool((layer.weight == 7).any())
            False
        """
        references = references_of(self)
        own = self.state_arrays().items()
        copies = {
            name: value.copy() for name, value in own if name + REFERENCE not in references
        }
        return copies | references

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Copy ``state`` into parameters and buffers, or change nothing if it does not fit.

        A table on disk returns to the commit that ``state`` refers to.

        Args:
            state: An array of the same shape for each name in :meth:`state_arrays`. It
                is cast to the parameter's dtype.
        """
        references = checked_references(self, state)
        state = {
            name: value
            for name, value in state.items()
            if name.removesuffix(REFERENCE) not in references
        }
        own = {
            name: value
            for name, value in self.state_arrays().items()
            if name not in references
        }
        missing, unknown = sorted(own.keys() - state), sorted(state.keys() - own)
        if missing or unknown:
            raise ValueError(
                f"state must have exactly the names {sorted(own)}; "
                f"missing {missing}, unknown {unknown}"
            )
        for name, value in own.items():
            if np.shape(state[name]) != value.shape:
                raise ValueError(
                    f"state[{name!r}] must have shape {value.shape}, "
                    f"got {np.shape(state[name])}"
                )
            check_real(state[name], name=f"state[{name!r}]")
            if value.dtype == np.uint8 and np.asarray(state[name]).dtype != np.uint8:
                raise TypeError(f"state[{name!r}] must be uint8, got another dtype")
        for name, store in stores_of(self).items():
            if name in own:
                store.before_write()
        for store, tag in references.values():
            store.return_to(tag)
        for name, value in own.items():
            value[...] = state[name]

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({arguments})"


def as_parameter(
    value: Float[Any, "..."] | Sequence[Any],
    shape: tuple[int, ...],
    *,
    dtype: Any,
    name: str = "weight",
) -> Float[np.ndarray, "..."]:
    """Return ``value`` as a parameter of this shape, without a copy if possible."""
    array = host_array(value, name=name)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    check_real(array, name=name, whole=dtype is not None)
    if dtype is None:
        return np.ascontiguousarray(native_byte_order(array))
    return np.ascontiguousarray(array, dtype=float_dtype(dtype))


def checked_gradient(
    gradient: Any, shape: tuple[int, ...], *, name: str = "dy"
) -> np.ndarray:
    """Return the gradient of an output of this shape as a real array, or raise."""
    gradient = host_array(gradient, name=name)
    check_real(gradient, name=name)
    if gradient.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {gradient.shape}")
    return native_byte_order(gradient)


def native_byte_order(x: np.ndarray) -> np.ndarray:
    """Return ``x`` in this machine's byte order, which the kernels require."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def upcast(x: np.ndarray) -> np.ndarray:
    """Return ``x`` in its compute dtype."""
    return x.astype(compute_dtype(x.dtype), copy=False)


def resolve_positions(length: int, *, positions: Any, offset: Any) -> np.ndarray:
    """Return the checked ``positions``, or ``offset, offset + 1, …`` if they are None."""
    if positions is not None:
        positions = positions_array(positions)
    offset = plain_offset(offset)
    if isinstance(offset, bool) or not isinstance(offset, int):
        offset = positions_array(offset, name="offset")
    return resolve(positions, offset=offset, steps=np.arange(length))
