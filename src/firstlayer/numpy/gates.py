"""Gates on NumPy: they add the vectors of n-grams to the hidden states of a model."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from .._check import check_real, float_dtype, host_array
from ..embeddings.init import Seed, initial_table
from ..files.layer_configs import config_of
from ..ngram import gates
from ..ngram.gates import EngramWeights, ShortConvWeights
from ..ngram.layers import (
    AverageArguments,
    AverageOptions,
    EngramArguments,
    EngramOptions,
    GateArguments,
    ShortConvArguments,
    ShortConvOptions,
    check_shapes,
)
from ._bias import gradient_like, upcast_together
from ._gate_gradients import GateCall, engram_pullback, short_conv_pullback
from ._module import Module

Pullback = Callable[[np.ndarray], dict[str, Any]]


class Gate(GateArguments, Module):
    """Base class of the gates: parameters, config and the checks of a call."""

    def _create_parameters(self, *, rng: Seed, dtype: Any) -> None:
        rng, dtype = np.random.default_rng(rng), float_dtype(dtype)
        for name, (shape, init) in self.options.parameters().items():
            value = np.full(shape, init == "ones", dtype)
            if init == "linear":
                value = initial_table(shape, init=_uniform, rng=rng, dtype=dtype)
            setattr(self, name, value)

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in self.options.parameters()}

    def config(self) -> dict[str, Any]:
        dtype = next(iter(self.parameters().values())).dtype
        return config_of(self, dtype=dtype.name)

    def _checked(
        self, hidden: Any, memory: Any, mask: Any = None, *, name: str = "hidden"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the arguments of a call as arrays, or raise."""
        hidden, memory = host_array(hidden, name=name), host_array(memory, name="memory")
        check_real(hidden, name=name, whole=False)
        check_real(memory, name="memory", whole=False)
        mask = None if mask is None else host_array(mask, name="mask").astype(bool)
        check_shapes(hidden, memory, mask, options=self.options, name=name)
        return hidden, memory, mask


class StreamGate(Gate):
    """Base class of gates whose hidden states may have an axis of streams."""

    streams: int | None
    #: Named tuple of the parameters, and the function that returns their gradients.
    _weights_class: type[Any]
    _pullback: Callable[..., dict[str, np.ndarray]]
    __call__: Callable[..., np.ndarray]

    def vjp(
        self,
        hidden: Float[Any, "*hidden"],
        memory: Float[Any, "*batch length memory_dim"],
        *,
        mask: Bool[Any, "*batch length"] | None = None,
    ) -> tuple[np.ndarray, Pullback]:
        """Return the output and its pullback, to the inputs and the parameters."""
        hidden, memory, mask = self._checked(hidden, memory, mask)
        y = self(hidden, memory, mask=mask)
        h, e, weights = self._upcast(hidden.copy(), memory.copy())
        # Copies: the caller may change the parameters before calling the pullback.
        weights = self._weights_class(*(w if w is None else w.copy() for w in weights))

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = self._with_streams(gradient_like(dy, y, name="dy"))
            call = GateCall(h, e, mask, d)
            gradients = type(self)._pullback(weights, call, options=self.options)
            dhidden, dmemory = gradients["hidden"], gradients["memory"]
            return gradients | {
                "hidden": dhidden.reshape(hidden.shape).astype(hidden.dtype, copy=False),
                "memory": dmemory.astype(memory.dtype, copy=False),
            }

        return y, pull

    def _upcast(
        self, hidden: np.ndarray, memory: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return the inputs and the parameters in one compute dtype."""
        own = self.parameters()
        h, e, *weights = upcast_together(self._with_streams(hidden), memory, *own.values())
        return h, e, self._weights_class(**dict(zip(own, weights, strict=True)))

    def _with_streams(self, hidden: np.ndarray) -> np.ndarray:
        return hidden[..., None, :] if self.streams is None else hidden


class EngramGate(EngramArguments, StreamGate):
    """Adds n-gram vectors to hidden states, as in DeepSeek-V4.1.

    Keys, one for each stream, and one value for all streams are projections of ``memory``.
    The value is multiplied by ``sigmoid(sign(s) * sqrt(|s|))``, where ``s`` is a normalized
    product of hidden state and key. Computed in float32.

    Args:
        memory_dim: Width of the n-gram vectors.
        embedding_dim: Width of the hidden states.
        streams: Number of streams; None for hidden states without an axis of streams.
        eps: Term added to mean squares.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for the parameters.

    Shape:
        - hidden: ``(..., length, streams, embedding_dim)``, or without streams
        - memory: ``(..., length, memory_dim)``
        - mask: ``(..., length)``, True where the value is added
        - output: as ``hidden``

    Example:
        >>> gate = EngramGate(6, 4, streams=2, rng=0)
        >>> gate(np.ones((1, 3, 2, 4)), np.ones((1, 3, 6))).shape
        (1, 3, 2, 4)
        >>> out, pull = gate.vjp(np.ones((1, 3, 2, 4)), np.ones((1, 3, 6)))
        >>> sorted(pull(np.ones_like(out)))
        ['hidden', 'key_weight', 'memory', 'projection', 'query_weight']
    """

    _weights_class, _pullback = EngramWeights, staticmethod(engram_pullback)
    projection: Float[np.ndarray, "rows memory_dim"]
    query_weight: Float[np.ndarray, "streams embedding_dim"]
    key_weight: Float[np.ndarray, "streams embedding_dim"]

    def __init__(
        self,
        memory_dim: int,
        embedding_dim: int,
        *,
        streams: int | None = None,
        eps: float = 1e-20,
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.options = EngramOptions(
            memory_dim=memory_dim, embedding_dim=embedding_dim, streams=streams, eps=eps
        )
        self._create_parameters(rng=rng, dtype=dtype)

    def __call__(
        self,
        hidden: Float[Any, "*hidden"],
        memory: Float[Any, "*batch length memory_dim"],
        *,
        mask: Bool[Any, "*batch length"] | None = None,
    ) -> Float[np.ndarray, "*hidden"]:
        """Return the hidden states with the gated value added."""
        hidden, memory, mask = self._checked(hidden, memory, mask)
        h, e, weights = self._upcast(hidden, memory)
        out = gates.engram_gate(h, e, weights, eps=self.eps, mask=mask)
        return out.reshape(hidden.shape).astype(hidden.dtype, copy=False)


class ShortConvGate(ShortConvArguments, StreamGate):
    """Adds n-gram vectors and their convolution to hidden states: Engram's paper, Qwen.

    Keys, one for each stream, and one value for all streams are projections of ``memory``.
    The value is multiplied by ``sigmoid(sign(s) * sqrt(|s|))``, where ``s`` is the product
    of normalized key and hidden state; a causal depthwise convolution of the normalized
    result is added to it. The convolution starts at zero. Computed in float32.

    Args:
        memory_dim: Width of the n-gram vectors.
        embedding_dim: Width of the hidden states.
        streams: Number of streams; None for hidden states without an axis of streams.
        kernel_size: Number of positions that the convolution reads.
        dilation: Distance between them; the order of the n-grams in the paper and in Qwen.
        bias: Whether keys and values have a bias, as in the paper.
        eps: Term added to the mean squares of keys and hidden states.
        conv_eps: The same before the convolution; None is ``eps``.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for the parameters.

    Shape:
        - hidden: ``(..., length, streams, embedding_dim)``, or without streams
        - memory: ``(..., length, memory_dim)``
        - mask: ``(..., length)``, True where the value is added
        - state: ``(..., (kernel_size - 1) * dilation, streams, embedding_dim)``
        - output: as ``hidden``

    Qwen's checkpoints store the weights of norms minus one.

    Example:
        >>> gate = ShortConvGate(6, 4, streams=2, rng=0)
        >>> hidden, memory = np.ones((1, 3, 2, 4)), np.ones((1, 3, 6))
        >>> out, state = gate(hidden, memory), None
        >>> for t in range(3):  # the same, one position at a time
        ...     state = gate.advance(state, hidden[:, t : t + 1], memory[:, t : t + 1])
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 9, 2, 4))
        >>> out, pull = gate.vjp(hidden, memory)
        >>> pull(np.ones_like(out))["memory"].shape
        (1, 3, 6)
    """

    _weights_class, _pullback = ShortConvWeights, staticmethod(short_conv_pullback)
    key_projection: Float[np.ndarray, "streams embedding_dim memory_dim"]
    value_projection: Float[np.ndarray, "embedding_dim memory_dim"]
    key_norm: Float[np.ndarray, "streams embedding_dim"]
    query_norm: Float[np.ndarray, "streams embedding_dim"]
    conv_norm: Float[np.ndarray, "streams embedding_dim"]
    conv: Float[np.ndarray, "streams embedding_dim kernel_size"]
    key_bias: Float[np.ndarray, "streams embedding_dim"] | None = None
    value_bias: Float[np.ndarray, " embedding_dim"] | None = None

    def __init__(
        self,
        memory_dim: int,
        embedding_dim: int,
        *,
        streams: int | None = None,
        kernel_size: int = 4,
        dilation: int = 3,
        bias: bool = False,
        eps: float = 1e-6,
        conv_eps: float | None = None,
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.options = ShortConvOptions(
            memory_dim=memory_dim,
            embedding_dim=embedding_dim,
            streams=streams,
            kernel_size=kernel_size,
            dilation=dilation,
            bias=bias,
            eps=eps,
            conv_eps=conv_eps,
        )
        self._create_parameters(rng=rng, dtype=dtype)

    def __call__(
        self,
        hidden: Float[Any, "*hidden"],
        memory: Float[Any, "*batch length memory_dim"],
        *,
        mask: Bool[Any, "*batch length"] | None = None,
        state: Float[Any, "*batch before streams embedding_dim"] | None = None,
    ) -> Float[np.ndarray, "*hidden"]:
        """Return the hidden states with the gated value and its convolution added.

        Args:
            hidden: Hidden states.
            memory: N-gram vectors.
            mask: True where the value is added; None is everywhere.
            state: State of the positions before, when decoding; see :meth:`advance`.
        """
        out, _ = self._run(hidden, memory, mask=mask, state=state)
        hidden = host_array(hidden, name="hidden")
        return out.reshape(hidden.shape).astype(hidden.dtype, copy=False)

    def advance(
        self,
        state: Float[Any, "*batch before streams embedding_dim"] | None,
        hidden: Float[Any, "*hidden"],
        memory: Float[Any, "*batch length memory_dim"],
        *,
        mask: Bool[Any, "*batch length"] | None = None,
    ) -> Float[np.ndarray, "*batch before streams embedding_dim"]:
        """Return the state after these positions, in float32.

        Args:
            state: State before them; None is the start of a sequence.
            hidden: Hidden states.
            memory: N-gram vectors.
            mask: As in a call.
        """
        return self._run(hidden, memory, mask=mask, state=state)[1]

    def _run(
        self, hidden: Any, memory: Any, *, mask: Any, state: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        hidden, memory, mask = self._checked(hidden, memory, mask)
        h, e, weights = self._upcast(hidden, memory)
        return gates.short_conv_gate(
            h,
            e,
            weights,
            eps=self.eps,
            conv_eps=self.conv_eps,
            dilation=self.dilation,
            mask=mask,
            state=None if state is None else host_array(state, name="state"),
        )


class NgramAverage(AverageArguments, Gate):
    """Averages token vectors and projected n-gram rows, as LongCat-Flash-Lite does.

    Args:
        columns: Number of rows for each position.
        width: Width of a row.
        embedding_dim: Width of the token vectors.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for the parameter.

    Shape:
        - tokens: ``(..., embedding_dim)``
        - memory: ``(..., columns * width)``
        - output: ``(..., embedding_dim)``, in the dtype of ``tokens``

    Example:
        >>> average = NgramAverage(2, 3, 4, rng=0)
        >>> average(np.ones((5, 4)), np.zeros((5, 6)))[0]
        array([0.33333333, 0.33333333, 0.33333333, 0.33333333])
        >>> out, pull = average.vjp(np.ones((5, 4)), np.zeros((5, 6)))
        >>> sorted(pull(np.ones_like(out)))
        ['memory', 'tokens', 'weight']
    """

    weight: Float[np.ndarray, "columns embedding_dim width"]

    def __init__(
        self,
        columns: int,
        width: int,
        embedding_dim: int,
        *,
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.options = AverageOptions(
            columns=columns, width=width, embedding_dim=embedding_dim
        )
        self._create_parameters(rng=rng, dtype=dtype)

    def __call__(
        self,
        tokens: Float[Any, "*batch embedding_dim"],
        memory: Float[Any, "*batch memory_dim"],
    ) -> Float[np.ndarray, "*batch embedding_dim"]:
        """Return the mean of the token vectors and the projected rows."""
        tokens, memory, _ = self._checked(tokens, memory, name="tokens")
        out = gates.ngram_average(*upcast_together(tokens, memory, self.weight))
        return out.astype(tokens.dtype, copy=False)

    def vjp(
        self,
        tokens: Float[Any, "*batch embedding_dim"],
        memory: Float[Any, "*batch memory_dim"],
    ) -> tuple[np.ndarray, Pullback]:
        """Return the output and its pullback, to the inputs and the parameter."""
        tokens, memory, _ = self._checked(tokens, memory, name="tokens")
        y = self(tokens, memory)
        weight, e = upcast_together(self.weight.copy(), memory.copy())

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = gradient_like(dy, y, name="dy") / (1 + self.columns)
            rows = e.reshape(-1, self.columns, self.width)
            dmemory = np.einsum("...d,cdw->...cw", d, weight).reshape(memory.shape)
            return {
                "tokens": d.astype(tokens.dtype, copy=False),
                "memory": dmemory.astype(memory.dtype, copy=False),
                "weight": np.einsum("nd,ncw->cdw", d.reshape(-1, d.shape[-1]), rows),
            }

        return y, pull


def _uniform(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    bound = shape[-1] ** -0.5
    return rng.uniform(-bound, bound, shape).astype(np.float32)
