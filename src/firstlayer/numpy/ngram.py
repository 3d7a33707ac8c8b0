"""N-gram memory on NumPy: rows of n-grams, and the gates that add them to a model."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Integer

from .._check import (
    check_real,
    float_dtype,
    host_array,
    not_negative_number,
    one_of,
    positive,
)
from ..embeddings.init import Seed, initial_table
from ..ngram import gates
from ..ngram.gates import EngramWeights, ShortConvWeights, check_shapes
from ..ngram.scheme import Scheme, check_num_rows
from ._bias import gradient_like, sum_to, upcast_together
from ._module import Module, upcast
from .token import Embedding

Pullback = Callable[[np.ndarray], dict[str, Any]]


class NgramEmbedding(Module):
    """Looks up the rows of the n-grams that end at each position.

    Args:
        scheme: Scheme of :mod:`firstlayer.ngram`.
        table: Layer with the table, or the width of the rows of a new one.
        layer: Layer of the model whose table it is; may be left out if the scheme has one.
        combine: ``"concat"``, or ``"sum"`` as in BLT.
        options: Arguments of :class:`Embedding` for a new table, such as ``rng``.

    Shape:
        - ids: ``(..., length)``, any integer dtype, or lists
        - output: ``(..., length, columns * width)``, or ``(..., length, width)`` if summed

    Example:
        >>> from firstlayer.ngram import SaltedNgram
        >>> memory = NgramEmbedding(SaltedNgram(rows=1000), 8, rng=0)
        >>> memory([[5, 6, 7]]).shape
        (1, 3, 32)
    """

    def __init__(
        self,
        scheme: Scheme,
        table: Embedding | int,
        *,
        layer: int | None = None,
        combine: str = "concat",
        **options: Any,
    ) -> None:
        rows = scheme.layout(layer).rows
        self.combine = one_of("combine", combine, ("concat", "sum"))
        if isinstance(table, Module):
            check_num_rows(table.num_embeddings, rows, options)
        else:
            table = Embedding(rows, table, **options)
        self.scheme, self.layer, self.table = scheme, layer, table

    @property
    def embedding_dim(self) -> int:
        """Width of the output."""
        columns = self.scheme.columns if self.combine == "concat" else 1
        return columns * self.table.embedding_dim

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
        """Return the output and its pullback, to the row gradient of the table."""
        rows = self.scheme(
            ids, layer=self.layer, history=history, documents=documents, dead=dead
        )
        vectors, pull_rows = self.table.vjp(rows)
        y = self._combined(vectors)

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = gradient_like(dy, y, name="dy")
            if self.combine == "sum":
                d = np.broadcast_to(d[..., None, :], vectors.shape)
            return {"table.weight": pull_rows(d.reshape(vectors.shape))["weight"]}

        return y, pull

    def parameters(self) -> dict[str, np.ndarray]:
        return {"table.weight": self.table.parameters()["weight"]}

    def __repr__(self) -> str:
        return f"NgramEmbedding({self.scheme!r}, {self.table!r}, combine={self.combine!r})"

    def _combined(self, vectors: np.ndarray) -> np.ndarray:
        if self.combine == "sum":
            return upcast(vectors).sum(-2).astype(vectors.dtype, copy=False)
        return vectors.reshape(*vectors.shape[:-2], -1)


class EngramGate(Module):
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
    """

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
        self.memory_dim = positive("memory_dim", memory_dim)
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        self.streams = None if streams is None else positive("streams", streams)
        self.eps = not_negative_number("eps", eps)
        shape = (streams or 1, embedding_dim)
        rows = (shape[0] + 1) * embedding_dim
        self.projection = _linear((rows, memory_dim), rng=rng, dtype=dtype)
        self.query_weight = np.ones(shape, float_dtype(dtype))
        self.key_weight = np.ones(shape, float_dtype(dtype))

    def __call__(
        self,
        hidden: Float[Any, "*hidden"],
        memory: Float[Any, "*batch length memory_dim"],
        *,
        mask: Bool[Any, "*batch length"] | None = None,
    ) -> Float[np.ndarray, "*hidden"]:
        """Return the hidden states with the gated value added."""
        hidden, memory, mask = _checked(self, hidden, memory, mask)
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
        hidden, memory, mask = _checked(self, hidden, memory, mask)
        y = self(hidden, memory, mask=mask)
        h, e, weights = self._upcast(hidden.copy(), memory.copy())
        streams, dim = weights.query_weight.shape

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = _streams(gradient_like(dy, y, name="dy"), self)
            projected = e @ weights.projection.T
            key = projected[..., : streams * dim].reshape(*e.shape[:-1], streams, dim)
            value = projected[..., None, streams * dim :]
            scale = weights.query_weight * weights.key_weight
            root_h, root_k = _inverse_rms(h, self.eps), _inverse_rms(key, self.eps)
            factor = root_h * root_k / dim**0.5
            score = (h * scale * key).sum(-1, keepdims=True) * factor
            alpha, slope = _gate_and_slope(score, np.copysign(np.ones_like(score), score))
            added = gates.masked(d, mask, axes=2)
            dscore = (added * value).sum(-1, keepdims=True) * slope
            dh = d + dscore * (scale * key * factor - score * h * root_h**2 / dim)
            dkey = dscore * (h * scale * factor - score * key * root_k**2 / dim)
            dvalue = (alpha * added).sum(-2)
            dprojected = np.concatenate([dkey.reshape(*e.shape[:-1], -1), dvalue], -1)
            dscale = sum_to(dscore * h * key * factor, scale.shape)
            return {
                "hidden": dh.reshape(hidden.shape).astype(hidden.dtype, copy=False),
                "memory": (dprojected @ weights.projection).astype(
                    memory.dtype, copy=False
                ),
                "projection": _matrix(dprojected).T @ _matrix(e),
                "query_weight": dscale * weights.key_weight,
                "key_weight": dscale * weights.query_weight,
            }

        return y, pull

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in EngramWeights._fields}

    def _upcast(
        self, hidden: np.ndarray, memory: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, EngramWeights]:
        own = self.parameters().values()
        h, e, *weights = upcast_together(_streams(hidden, self), memory, *own)
        return h, e, EngramWeights(*weights)


class ShortConvGate(Module):
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
    """

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
        self.memory_dim = positive("memory_dim", memory_dim)
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        self.streams = None if streams is None else positive("streams", streams)
        self.kernel_size = positive("kernel_size", kernel_size)
        self.dilation = positive("dilation", dilation)
        self.eps = not_negative_number("eps", eps)
        conv_eps = eps if conv_eps is None else conv_eps
        self.conv_eps = not_negative_number("conv_eps", conv_eps)
        self.bias, shape = bool(bias), (streams or 1, embedding_dim)
        rng, dtype = np.random.default_rng(rng), float_dtype(dtype)
        self.key_projection = _linear((*shape, memory_dim), rng=rng, dtype=dtype)
        self.value_projection = _linear((embedding_dim, memory_dim), rng=rng, dtype=dtype)
        self.key_norm, self.query_norm, self.conv_norm = np.ones((3, *shape), dtype)
        self.conv = np.zeros((*shape, kernel_size), dtype)
        self.key_bias = np.zeros(shape, dtype) if bias else None
        self.value_bias = np.zeros(embedding_dim, dtype) if bias else None

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
        hidden, memory, mask = _checked(self, hidden, memory, mask)
        y = self(hidden, memory, mask=mask)
        h, e, weights = self._upcast(hidden.copy(), memory.copy())

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = _streams(gradient_like(dy, y, name="dy"), self)
            gradients = _short_conv_pullback(self, weights, h, e, mask, d)
            own = self.parameters()
            return {
                "hidden": gradients
                .pop("hidden")
                .reshape(hidden.shape)
                .astype(hidden.dtype),
                "memory": gradients.pop("memory").astype(memory.dtype),
                **{name: value for name, value in gradients.items() if name in own},
            }

        return y, pull

    def parameters(self) -> dict[str, np.ndarray]:
        values = {name: getattr(self, name) for name in ShortConvWeights._fields}
        return {name: value for name, value in values.items() if value is not None}

    def _upcast(
        self, hidden: np.ndarray, memory: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, ShortConvWeights]:
        own = self.parameters()
        h, e, *weights = upcast_together(_streams(hidden, self), memory, *own.values())
        return h, e, ShortConvWeights(**dict(zip(own, weights, strict=True)))

    def _run(
        self, hidden: Any, memory: Any, *, mask: Any, state: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        hidden, memory, mask = _checked(self, hidden, memory, mask)
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


class NgramAverage(Module):
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
    """

    def __init__(
        self,
        columns: int,
        width: int,
        embedding_dim: int,
        *,
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.columns, self.width = positive("columns", columns), positive("width", width)
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        self.weight = _linear((columns, embedding_dim, width), rng=rng, dtype=dtype)

    def __call__(
        self,
        tokens: Float[Any, "*batch embedding_dim"],
        memory: Float[Any, "*batch memory_dim"],
    ) -> Float[np.ndarray, "*batch embedding_dim"]:
        """Return the mean of the token vectors and the projected rows."""
        tokens, memory = self._arguments(tokens, memory)
        out = gates.ngram_average(*upcast_together(tokens, memory, self.weight))
        return out.astype(tokens.dtype, copy=False)

    def vjp(
        self,
        tokens: Float[Any, "*batch embedding_dim"],
        memory: Float[Any, "*batch memory_dim"],
    ) -> tuple[np.ndarray, Pullback]:
        """Return the output and its pullback, to the inputs and the parameter."""
        tokens, memory = self._arguments(tokens, memory)
        y = self(tokens, memory)
        weight, e = upcast_together(self.weight.copy(), memory.copy())

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = gradient_like(dy, y, name="dy") / (1 + self.columns)
            rows = _matrix(e).reshape(-1, self.columns, self.width)
            dmemory = np.einsum("...d,cdw->...cw", d, weight).reshape(memory.shape)
            return {
                "tokens": d.astype(tokens.dtype, copy=False),
                "memory": dmemory.astype(memory.dtype, copy=False),
                "weight": np.einsum("nd,ncw->cdw", _matrix(d), rows),
            }

        return y, pull

    def parameters(self) -> dict[str, np.ndarray]:
        return {"weight": self.weight}

    def _arguments(self, tokens: Any, memory: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, memory = (
            host_array(tokens, name="tokens"),
            host_array(memory, name="memory"),
        )
        dims, memory_dim = (self.embedding_dim,), self.columns * self.width
        check_shapes(tokens, memory, None, dims=dims, memory_dim=memory_dim)
        return tokens, memory


def _short_conv_pullback(
    layer: ShortConvGate,
    weights: ShortConvWeights,
    hidden: np.ndarray,
    memory: np.ndarray,
    mask: np.ndarray | None,
    d: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the gradients of a gate that starts a sequence, given that of its output."""
    dim, kernel, dilation = layer.embedding_dim, layer.kernel_size, layer.dilation
    raw_key = np.einsum("...m,gdm->...gd", memory, weights.key_projection)
    value = memory @ weights.value_projection.T
    if weights.key_bias is not None:
        raw_key, value = raw_key + weights.key_bias, value + weights.value_bias
    key = gates.rms_norm(raw_key, weights.key_norm, layer.eps)
    query = gates.rms_norm(hidden, weights.query_norm, layer.eps)
    score = (key * query).sum(-1, keepdims=True) / dim**0.5
    alpha, slope = _gate_and_slope(score, np.sign(score))
    gated = gates.masked(alpha * value[..., None, :], mask, axes=2)
    normalized = gates.masked(
        gates.rms_norm(gated, weights.conv_norm, layer.conv_eps), mask, axes=2
    )
    window = gates.with_state(normalized, None, kernel=kernel, dilation=dilation)
    mixed = gates.convolved(window, weights.conv, dilation=dilation)

    added = gates.masked(d, mask, axes=2)
    open_ = gates.sigmoid(mixed)
    dmixed = added * open_ * (1 + mixed * (1 - open_))
    length, dwindow = mixed.shape[-3], np.zeros_like(window)
    dconv = np.empty_like(weights.conv)
    for j in range(kernel):
        part = (..., slice(j * dilation, j * dilation + length), slice(None), slice(None))
        dwindow[part] += dmixed * weights.conv[..., j]
        dconv[..., j] = sum_to(dmixed * window[part], dconv.shape[:-1])
    dnormalized = gates.masked(dwindow[..., -length:, :, :], mask, axes=2)
    dgated, dconv_norm = _rms_pullback(
        gated, weights.conv_norm, layer.conv_eps, dnormalized
    )
    dgated = gates.masked(dgated + added, mask, axes=2)
    dvalue = (alpha * dgated).sum(-2)
    dscore = (dgated * value[..., None, :]).sum(-1, keepdims=True) * slope / dim**0.5
    draw_key, dkey_norm = _rms_pullback(
        raw_key, weights.key_norm, layer.eps, dscore * query
    )
    dhidden, dquery_norm = _rms_pullback(
        hidden, weights.query_norm, layer.eps, dscore * key
    )
    dmemory = np.einsum("...gd,gdm->...m", draw_key, weights.key_projection)
    return {
        "hidden": d + dhidden,
        "memory": dmemory + dvalue @ weights.value_projection,
        "key_projection": np.einsum(
            "ngd,nm->gdm", draw_key.reshape(-1, *raw_key.shape[-2:]), _matrix(memory)
        ),
        "value_projection": _matrix(dvalue).T @ _matrix(memory),
        "key_norm": dkey_norm,
        "query_norm": dquery_norm,
        "conv_norm": dconv_norm,
        "conv": dconv,
        "key_bias": sum_to(draw_key, weights.key_norm.shape),
        "value_bias": sum_to(dvalue, (dim,)),
    }


def _rms_pullback(
    x: np.ndarray, weight: np.ndarray, eps: float, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of the input and the weight of ``rms_norm``."""
    root = _inverse_rms(x, eps)
    d = dy * weight
    dx = root * (d - x * root**2 * (d * x).mean(-1, keepdims=True))
    return dx, sum_to(dy * x * root, weight.shape)


def _inverse_rms(x: np.ndarray, eps: float) -> np.ndarray:
    return (np.mean(x * x, -1, keepdims=True) + eps) ** -0.5


def _gate_and_slope(score: np.ndarray, sign: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the gate of scores and its derivative."""
    alpha, size = gates.gate(score, sign=sign), np.abs(score)
    root = np.sqrt(np.maximum(size, gates.MIN_SCORE))
    slope = np.where(size > gates.MIN_SCORE, 0.5 / root, 0.0)
    return alpha, alpha * (1 - alpha) * slope


def _matrix(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])


def _streams(hidden: np.ndarray, gate: EngramGate | ShortConvGate) -> np.ndarray:
    return hidden[..., None, :] if gate.streams is None else hidden


def _checked(
    gate: EngramGate | ShortConvGate, hidden: Any, memory: Any, mask: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    hidden, memory = host_array(hidden, name="hidden"), host_array(memory, name="memory")
    check_real(hidden, name="hidden", whole=False)
    check_real(memory, name="memory", whole=False)
    mask = None if mask is None else host_array(mask, name="mask").astype(bool)
    own = (gate.embedding_dim,)
    dims = own if gate.streams is None else (gate.streams, *own)
    check_shapes(hidden, memory, mask, dims=dims, memory_dim=gate.memory_dim)
    return hidden, memory, mask


def _linear(shape: tuple[int, ...], *, rng: Any, dtype: Any) -> np.ndarray:
    """Draw a projection as ``torch.nn.Linear`` does."""

    def uniform(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        bound = shape[-1] ** -0.5
        return rng.uniform(-bound, bound, shape).astype(np.float32)

    return initial_table(shape, init=uniform, rng=rng, dtype=dtype)
