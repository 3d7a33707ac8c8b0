"""Gates in JAX: they add the vectors of n-grams to the hidden states of a model."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._check import check_real
from ..ngram.gates import (
    EngramWeights,
    ShortConvWeights,
    engram_gate,
    ngram_average,
    short_conv_gate,
)
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
from ._module import Module, upcast_together
from ._parameters import Key, check_parameters, draw_parameter, table_dtype


class Gate(GateArguments, Module):
    """Base class of the gates: parameters and the checks of a call."""

    def _create_parameters(self, *, key: Key | None, dtype: Any) -> None:
        specs = self.options.parameters()
        count = [spec.init for spec in specs.values()].count("linear")
        keys = iter(
            [key] * count if key is None or count == 1 else jax.random.split(key, count)
        )
        for name, (shape, init) in specs.items():
            if init == "linear":
                value = draw_parameter(shape, init=_uniform, key=next(keys), dtype=dtype)
            else:
                value = jnp.full(shape, init == "ones", table_dtype(dtype))
            setattr(self, name, value)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        return {name: getattr(self, name) for name in self.options.parameters()}

    def _check(
        self, hidden: Any, memory: Any, mask: Any = None, *, name: str = "hidden"
    ) -> None:
        """Raise unless the parameters and the arguments of a call fit together."""
        specs = self.options.parameters().items()
        check_parameters(self, **{name: spec.shape for name, spec in specs})
        check_real(hidden, name=name, whole=False)
        check_real(memory, name="memory", whole=False)
        check_shapes(hidden, memory, mask, options=self.options, name=name)


class EngramGate(EngramArguments, Gate):
    """Adds n-gram vectors to hidden states, as in DeepSeek-V4.1.

    Keys, one for each stream, and one value for all streams are projections of ``memory``.
    The value is multiplied by ``sigmoid(sign(s) * sqrt(|s|))``, where ``s`` is a normalized
    product of hidden state and key. Computed in float32.

    Args:
        memory_dim: Width of the n-gram vectors.
        embedding_dim: Width of the hidden states.
        streams: Number of streams; None for hidden states without an axis of streams.
        eps: Term added to mean squares.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for the parameters.

    Shape:
        - hidden: ``(..., length, streams, embedding_dim)``, or without streams
        - memory: ``(..., length, memory_dim)``
        - mask: ``(..., length)``, True where the value is added
        - output: as ``hidden``

    Example:
        >>> gate = EngramGate(6, 4, streams=2, key=jax.random.key(0))
        >>> gate(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 6))).shape
        (1, 3, 2, 4)
    """

    projection: Float[Array, "rows memory_dim"]
    query_weight: Float[Array, "streams embedding_dim"]
    key_weight: Float[Array, "streams embedding_dim"]
    options: EngramOptions = eqx.field(static=True)

    def __init__(
        self,
        memory_dim: int,
        embedding_dim: int,
        *,
        streams: int | None = None,
        eps: float = 1e-20,
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        self.options = EngramOptions(
            memory_dim=memory_dim, embedding_dim=embedding_dim, streams=streams, eps=eps
        )
        self._create_parameters(key=key, dtype=dtype)

    def __call__(
        self,
        hidden: Float[Array, "*hidden"],
        memory: Float[Array, "*batch length memory_dim"],
        *,
        mask: Bool[Array, "*batch length"] | None = None,
    ) -> Float[Array, "*hidden"]:
        """Return the hidden states with the gated value added."""
        self._check(hidden, memory, mask)
        own = self.parameters().values()
        h, e, *weights = upcast_together(_streams(hidden, self), memory, *own)
        out = engram_gate(h, e, EngramWeights(*weights), eps=self.eps, mask=mask)
        return out.reshape(hidden.shape).astype(hidden.dtype)


class ShortConvGate(ShortConvArguments, Gate):
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
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for the parameters.

    Shape:
        - hidden: ``(..., length, streams, embedding_dim)``, or without streams
        - memory: ``(..., length, memory_dim)``
        - mask: ``(..., length)``, True where the value is added
        - state: ``(..., (kernel_size - 1) * dilation, streams, embedding_dim)``
        - output: as ``hidden``

    Qwen's checkpoints store the weights of norms minus one.

    Example:
        >>> gate = ShortConvGate(6, 4, streams=2, key=jax.random.key(0))
        >>> hidden, memory = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 6))
        >>> out, state = gate(hidden, memory), None
        >>> for t in range(3):  # the same, one position at a time
        ...     state = gate.advance(state, hidden[:, t : t + 1], memory[:, t : t + 1])
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 9, 2, 4))
    """

    key_projection: Float[Array, "streams embedding_dim memory_dim"]
    value_projection: Float[Array, "embedding_dim memory_dim"]
    key_norm: Float[Array, "streams embedding_dim"]
    query_norm: Float[Array, "streams embedding_dim"]
    conv_norm: Float[Array, "streams embedding_dim"]
    conv: Float[Array, "streams embedding_dim kernel_size"]
    key_bias: Float[Array, "streams embedding_dim"] | None
    value_bias: Float[Array, " embedding_dim"] | None
    options: ShortConvOptions = eqx.field(static=True)

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
        key: Key | None = None,
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
        self.key_bias = self.value_bias = None
        self._create_parameters(key=key, dtype=dtype)

    def __call__(
        self,
        hidden: Float[Array, "*hidden"],
        memory: Float[Array, "*batch length memory_dim"],
        *,
        mask: Bool[Array, "*batch length"] | None = None,
        state: Float[Array, "*batch before streams embedding_dim"] | None = None,
    ) -> Float[Array, "*hidden"]:
        """Return the hidden states with the gated value and its convolution added.

        Args:
            hidden: Hidden states.
            memory: N-gram vectors.
            mask: True where the value is added; None is everywhere.
            state: State of the positions before, when decoding; see :meth:`advance`.
        """
        out, _ = self._run(hidden, memory, mask=mask, state=state)
        return out.reshape(hidden.shape).astype(hidden.dtype)

    def advance(
        self,
        state: Float[Array, "*batch before streams embedding_dim"] | None,
        hidden: Float[Array, "*hidden"],
        memory: Float[Array, "*batch length memory_dim"],
        *,
        mask: Bool[Array, "*batch length"] | None = None,
    ) -> Float[Array, "*batch before streams embedding_dim"]:
        """Return the state after these positions, in float32.

        Args:
            state: State before them; None is the start of a sequence.
            hidden: Hidden states.
            memory: N-gram vectors.
            mask: As in a call.
        """
        return self._run(hidden, memory, mask=mask, state=state)[1]

    def _run(self, hidden: Array, memory: Array, **others: Any) -> tuple[Array, Array]:
        self._check(hidden, memory, others["mask"])
        own = self.parameters()
        h, e, *weights = upcast_together(_streams(hidden, self), memory, *own.values())
        return short_conv_gate(
            h,
            e,
            ShortConvWeights(**dict(zip(own, weights, strict=True))),
            eps=self.eps,
            conv_eps=self.conv_eps,
            dilation=self.dilation,
            **others,
        )


class NgramAverage(AverageArguments, Gate):
    """Averages token vectors and projected n-gram rows, as LongCat-Flash-Lite does.

    Args:
        columns: Number of rows for each position.
        width: Width of a row.
        embedding_dim: Width of the token vectors.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for the parameter.

    Shape:
        - tokens: ``(..., embedding_dim)``
        - memory: ``(..., columns * width)``
        - output: ``(..., embedding_dim)``, in the dtype of ``tokens``

    Example:
        >>> average = NgramAverage(2, 3, 4, key=jax.random.key(0))
        >>> average(jnp.ones((5, 4)), jnp.zeros((5, 6)))[0]
        Array([0.33333334, 0.33333334, 0.33333334, 0.33333334], dtype=float32)
    """

    weight: Float[Array, "columns embedding_dim width"]
    options: AverageOptions = eqx.field(static=True)

    def __init__(
        self,
        columns: int,
        width: int,
        embedding_dim: int,
        *,
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        self.options = AverageOptions(
            columns=columns, width=width, embedding_dim=embedding_dim
        )
        self._create_parameters(key=key, dtype=dtype)

    def __call__(
        self,
        tokens: Float[Array, "*batch embedding_dim"],
        memory: Float[Array, "*batch memory_dim"],
    ) -> Float[Array, "*batch embedding_dim"]:
        """Return the mean of the token vectors and the projected rows."""
        self._check(tokens, memory, name="tokens")
        out = ngram_average(*upcast_together(tokens, memory, self.weight))
        return out.astype(tokens.dtype)


def _streams(hidden: Array, gate: EngramGate | ShortConvGate) -> Array:
    return hidden[..., None, :] if gate.streams is None else hidden


def _uniform(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    bound = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)
