"""N-gram memory on NumPy: rows of n-grams, and the gates that add them to a model."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Integer

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
    NgramArguments,
    ShortConvArguments,
    ShortConvOptions,
    check_shapes,
    check_table,
    refuse_options,
)
from ..ngram.scheme import Scheme
from ..stores.row_store import RowStore
from ._bias import gradient_like, upcast_together
from ._module import Module, upcast
from ._ngram_gradients import engram_pullback, short_conv_pullback
from .token import Embedding

Pullback = Callable[[np.ndarray], dict[str, Any]]


class NgramEmbedding(NgramArguments, Module):
    """Looks up the rows of the n-grams that end at each position.

    Args:
        scheme: Scheme of :mod:`firstlayer.ngram`.
        table: Layer with the table, a store of :mod:`firstlayer.stores`, or the width of
            the rows of a new table.
        layer: Layer of the model whose table it is; may be left out if the scheme has one.
        combine: ``"concat"``, or ``"sum"`` as in BLT.
        options: Arguments of :class:`Embedding` for a new table, such as ``rng``, or of
            :meth:`Embedding.from_store` for a store.

    Shape:
        - ids: ``(..., length)``, any integer dtype, or lists
        - output: ``(..., length, columns * width)``, or ``(..., length, width)`` if summed

    Example:
        >>> from firstlayer.ngram import SaltedNgram
        >>> memory = NgramEmbedding(SaltedNgram(rows=1000), 8, rng=0)
        >>> memory([[5, 6, 7]]).shape
        (1, 3, 32)
        >>> vectors, pull = memory.vjp([[5, 6, 7]])
        >>> pull(np.ones_like(vectors))["table.weight"].values.shape
        (8, 8)
    """

    def __init__(
        self,
        scheme: Scheme,
        table: Embedding | RowStore | int,
        *,
        layer: int | None = None,
        combine: str = "concat",
        **options: Any,
    ) -> None:
        if isinstance(table, RowStore):
            table = Embedding.from_store(table, **options)
        elif isinstance(table, Module):
            refuse_options(options)
        else:
            table = Embedding(scheme.layout(layer).rows, table, **options)
        check_table(scheme, layer, combine, table.num_embeddings)
        self.scheme, self.layer, self.table = scheme, layer, table
        self.combine = combine

    def __call__(
        self,
        ids: Integer[Any, "*batch length"] | list[Any],
        *,
        history: Integer[Any, "*batch before"] | list[Any] | None = None,
        documents: Integer[Any, "*batch positions"] | list[Any] | None = None,
        dead: Bool[Any, "*batch positions"] | list[Any] | None = None,
    ) -> Float[np.ndarray, "*batch length embedding_dim"]:
        """Return the vectors of the n-grams that end at each position.

        Args:
            ids: Ids.
            history: The ids before, when decoding; see ``scheme.advance``.
            documents: Document of each id of a packed sequence.
            dead: True at ids that n-grams must not read.
        """
        rows = self.scheme(
            ids, layer=self.layer, history=history, documents=documents, dead=dead
        )
        return self._combined(self.table(rows))

    def vjp(
        self,
        ids: Integer[Any, "*batch length"] | list[Any],
        *,
        history: Integer[Any, "*batch before"] | list[Any] | None = None,
        documents: Integer[Any, "*batch positions"] | list[Any] | None = None,
        dead: Bool[Any, "*batch positions"] | list[Any] | None = None,
    ) -> tuple[np.ndarray, Pullback]:
        """Return the output and its pullback, to the row gradient of the table.

        Rows of a store that is not trained get no gradient.
        """
        rows = self.scheme(
            ids, layer=self.layer, history=history, documents=documents, dead=dead
        )
        vectors, pull_rows = self.table.vjp(rows)
        y = self._combined(vectors)

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = gradient_like(dy, y, name="dy")
            if self.combine == "sum":
                d = np.broadcast_to(d[..., None, :], vectors.shape)
            gradients = pull_rows(d.reshape(vectors.shape)).items()
            return {f"table.{name}": gradient for name, gradient in gradients}

        return y, pull

    def prefetch(
        self,
        ids: Integer[Any, "*batch length"] | list[Any],
        *,
        history: Integer[Any, "*batch before"] | list[Any] | None = None,
        documents: Integer[Any, "*batch positions"] | list[Any] | None = None,
        dead: Bool[Any, "*batch positions"] | list[Any] | None = None,
    ) -> None:
        """Start to read the rows of a coming call, if the table is on disk.

        Args:
            ids: Ids.
            history: As in a call.
            documents: As in a call.
            dead: As in a call.

        Example:
            >>> from firstlayer.ngram import SaltedNgram
            >>> from firstlayer.stores import MemoryStore
            >>> store = MemoryStore(np.ones((1000, 8), np.float32))
            >>> memory = NgramEmbedding(SaltedNgram(rows=1000), store)
            >>> memory.prefetch([[5, 6, 8]])
            >>> memory([[5, 6, 8]]).shape  # reads these rows
            (1, 3, 32)
        """
        self.table.prefetch(
            self.scheme(
                ids, layer=self.layer, history=history, documents=documents, dead=dead
            )
        )

    def parameters(self) -> dict[str, np.ndarray]:
        return {f"table.{name}": x for name, x in self.table.parameters().items()}

    def config(self) -> dict[str, Any]:
        return self._config_with(self.table.config())

    def __repr__(self) -> str:
        return f"NgramEmbedding({self.scheme!r}, {self.table!r}, combine={self.combine!r})"

    def _combined(self, vectors: np.ndarray) -> np.ndarray:
        if self.combine == "sum":
            return upcast(vectors).sum(-2).astype(vectors.dtype, copy=False)
        return vectors.reshape(*vectors.shape[:-2], -1)


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


class EngramGate(EngramArguments, Gate):
    """Adds n-gram vectors to hidden states, as in DeepSeek-V4.1.

    Each stream has a key, all share a value. The value is multiplied by the sigmoid of the
    signed root of a normalized product of hidden state and key. Computed in float32.

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

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = _streams(gradient_like(dy, y, name="dy"), self)
            gradients = engram_pullback(weights, h, e, mask, d, eps=self.eps)
            return _like_inputs(gradients, hidden, memory)

        return y, pull

    def _upcast(
        self, hidden: np.ndarray, memory: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, EngramWeights]:
        own = self.parameters().values()
        h, e, *weights = upcast_together(_streams(hidden, self), memory, *own)
        return h, e, EngramWeights(*weights)


class ShortConvGate(ShortConvArguments, Gate):
    """Adds n-gram vectors and their convolution to hidden states: Engram's paper, Qwen.

    Each stream has a key, all share a value. The value is multiplied by the sigmoid of the
    signed root of the product of normalized key and hidden state; a causal depthwise
    convolution of the normalized result is added to it. The convolution starts at zero.
    Computed in float32.

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
            conv_eps=eps if conv_eps is None else conv_eps,
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

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = _streams(gradient_like(dy, y, name="dy"), self)
            gradients = short_conv_pullback(weights, h, e, mask, d, options=self.options)
            return _like_inputs(gradients, hidden, memory)

        return y, pull

    def _upcast(
        self, hidden: np.ndarray, memory: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, ShortConvWeights]:
        own = self.parameters()
        h, e, *weights = upcast_together(_streams(hidden, self), memory, *own.values())
        return h, e, ShortConvWeights(**dict(zip(own, weights, strict=True)))

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


def _streams(hidden: np.ndarray, gate: EngramGate | ShortConvGate) -> np.ndarray:
    return hidden[..., None, :] if gate.streams is None else hidden


def _like_inputs(
    gradients: dict[str, np.ndarray], hidden: np.ndarray, memory: np.ndarray
) -> dict[str, np.ndarray]:
    """Return gradients with those of the inputs in the inputs' shapes and dtypes."""
    dhidden, dmemory = gradients["hidden"], gradients["memory"]
    return gradients | {
        "hidden": dhidden.reshape(hidden.shape).astype(hidden.dtype, copy=False),
        "memory": dmemory.astype(memory.dtype, copy=False),
    }


def _uniform(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    bound = shape[-1] ** -0.5
    return rng.uniform(-bound, bound, shape).astype(np.float32)
