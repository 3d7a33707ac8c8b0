"""What every layer of this face has: named parameters, a state that saves, a config.

A layer says which arrays it holds (``parameters``) and what it was built from
(``config``); loading, copying and saving follow from those two.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import check_real, float_dtype, positions_array
from ..files.layer_configs import config_of
from ..positions.ids import plain_offset, resolve


class Module:
    """Base of the NumPy layers. Holds no state of its own."""

    #: What tensor names begin with in a file: ``"token."`` for a table of tokens.
    prefix: ClassVar[str] = ""

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the arrays that are trained, by name. They are the layer's own."""
        return {}

    def embeddings(self) -> dict[str, Any]:
        """Return the layers that look rows up by id, by the name of their parameter."""
        return {
            f"{part}.{name}": table
            for part, layer in vars(self).items()
            if isinstance(layer, Module)
            for name, table in layer.embeddings().items()
        }

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values."""
        return config_of(self)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a copy of every parameter, by name."""
        return {name: value.copy() for name, value in self.parameters().items()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Copy ``state`` into the layer. Nothing is changed if a name or shape is wrong.

        Args:
            state: An array for each name in :meth:`parameters`, of the same shape. It is
                rounded to the layer's dtype.
        """
        mine = self.parameters()
        missing, unknown = sorted(mine.keys() - state), sorted(state.keys() - mine)
        if missing or unknown:
            raise ValueError(
                f"state must have exactly the names {sorted(mine)}; "
                f"missing {missing}, unknown {unknown}"
            )
        for name, value in mine.items():
            if np.shape(state[name]) != value.shape:
                raise ValueError(
                    f"state[{name!r}] must have shape {value.shape}, "
                    f"got {np.shape(state[name])}"
                )
            check_real(state[name], name=f"state[{name!r}]")
        for name, value in mine.items():
            value[...] = state[name]

    def __repr__(self) -> str:
        words = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({words})"


def given(
    value: Float[Any, "..."] | Sequence[Any],
    shape: tuple[int, ...],
    *,
    dtype: Any,
    name: str = "weight",
) -> Float[np.ndarray, "..."]:
    """Return ``value`` as a parameter of that shape, not copied if it fits.

    Args:
        value: What the caller gave.
        shape: The shape it must have.
        dtype: None keeps the one it has.
        name: What it is called in the sentence.
    """
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    check_real(array, name=name, whole=dtype is not None)
    if dtype is None:
        return np.ascontiguousarray(native(array))
    return np.ascontiguousarray(array, dtype=float_dtype(dtype))


def native(x: np.ndarray) -> np.ndarray:
    """Return ``x`` with its bytes in this machine's order, as the kernels take them."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def upcast(x: np.ndarray) -> np.ndarray:
    """Return ``x`` in the dtype that its numbers are worked on in."""
    return x.astype(compute_dtype(x.dtype), copy=False)


def positions_for(length: int, *, positions: Any, offset: Any) -> np.ndarray:
    """Return checked positions: those given, or ``0, 1, …`` moved on by ``offset``."""
    if positions is not None:
        positions = positions_array(positions)
    offset = plain_offset(offset)
    if isinstance(offset, bool) or not isinstance(offset, int):
        offset = positions_array(offset, name="offset")
    return resolve(positions, offset=offset, steps=np.arange(length))
