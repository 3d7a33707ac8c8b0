"""N-gram memory on torch: rows of n-grams, and the gates that add them to a model."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn import Parameter

from .._check import not_negative_number, one_of, positive
from ..ngram.gates import (
    EngramWeights,
    ShortConvWeights,
    check_shapes,
    engram_gate,
    ngram_average,
    short_conv_gate,
)
from ..ngram.scheme import Scheme, check_num_rows
from ._table.module import TableModule
from ._tensors.dtypes import upcast_together
from ._tensors.errors import WrongType, check_tensor, torch_errors
from .token import Embedding


class NgramEmbedding(nn.Module):
    """Looks up the rows of the n-grams that end at each position.

    Args:
        scheme: Scheme of :mod:`firstlayer.ngram`.
        table: Layer with the table, or the width of the rows of a new one.
        layer: Layer of the model whose table it is; may be left out if the scheme has one.
        combine: ``"concat"``, or ``"sum"`` as in BLT.
        options: Arguments of :class:`Embedding` for a new table, such as ``sparse=True``.

    Shape:
        - ids: ``(..., length)``, any integer dtype
        - output: ``(..., length, columns * width)``, or ``(..., length, width)`` if summed

    Example:
        >>> from firstlayer.ngram import SaltedNgram
        >>> memory = NgramEmbedding(SaltedNgram(rows=1000), 8, sparse=True)
        >>> memory(torch.tensor([[5, 6, 7]])).shape
        torch.Size([1, 3, 32])
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
        super().__init__()
        with torch_errors():
            rows = scheme.layout(layer).rows
            self.combine = one_of("combine", combine, ("concat", "sum"))
            if isinstance(table, nn.Module):
                check_num_rows(table.num_embeddings, rows, options)
        if not isinstance(table, nn.Module):
            table = Embedding(rows, table, **options)
        self.scheme, self.layer, self.table = scheme, layer, table

    @property
    def embedding_dim(self) -> int:
        """Width of the output."""
        columns = self.scheme.columns if self.combine == "concat" else 1
        return columns * self.table.embedding_dim

    def forward(
        self,
        ids: Integer[Tensor, "*batch length"],
        *,
        history: Integer[Tensor, "*batch before"] | None = None,
        documents: Integer[Tensor, "*batch positions"] | None = None,
        dead: Bool[Tensor, "*batch positions"] | None = None,
    ) -> Float[Tensor, "*batch length embedding_dim"]:
        """Return the vectors of the n-grams that end at each position.

        Args:
            ids: Ids.
            history: The ids before, when decoding; see ``scheme.advance``.
            documents: Document of each id of a packed sequence.
            dead: True at ids that n-grams must not read.
        """
        try:
            rows = self._rows(ids, history=history, documents=documents, dead=dead)
        except Exception as error:
            if isinstance(self.table, TableModule):
                self.table.announce(error)
            raise
        vectors = self.table(rows)
        return vectors.flatten(-2) if self.combine == "concat" else vectors.sum(-2)

    def _rows(self, ids: Tensor, **others: Tensor | None) -> Tensor:
        check_tensor(ids, name="ids")
        with torch_errors():
            return self.scheme(ids, layer=self.layer, **others)

    def extra_repr(self) -> str:
        return f"{type(self.scheme).__name__}, combine={self.combine!r}"


class EngramGate(nn.Module):
    """Adds n-gram vectors to hidden states, as in DeepSeek-V4.1.

    Each stream has a key, all share a value. The value is multiplied by the sigmoid of the
    signed root of a normalized product of hidden state and key. Computed in float32.

    Args:
        memory_dim: Width of the n-gram vectors.
        embedding_dim: Width of the hidden states.
        streams: Number of streams; None for hidden states without an axis of streams.
        eps: Term added to mean squares.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        - hidden: ``(..., length, streams, embedding_dim)``, or without streams
        - memory: ``(..., length, memory_dim)``
        - mask: ``(..., length)``, True where the value is added
        - output: as ``hidden``

    Example:
        >>> gate = EngramGate(6, 4, streams=2)
        >>> gate(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 6)).shape
        torch.Size([1, 3, 2, 4])
    """

    def __init__(
        self,
        memory_dim: int,
        embedding_dim: int,
        *,
        streams: int | None = None,
        eps: float = 1e-20,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        with torch_errors():
            self.memory_dim = positive("memory_dim", memory_dim)
            self.embedding_dim = positive("embedding_dim", embedding_dim)
            self.streams = None if streams is None else positive("streams", streams)
            self.eps = not_negative_number("eps", eps)
        shape = (streams or 1, embedding_dim)
        options = {"device": device, "dtype": dtype}
        rows = (shape[0] + 1) * embedding_dim
        self.projection = Parameter(torch.empty(rows, memory_dim, **options))
        self.query_weight = Parameter(torch.ones(shape, **options))
        self.key_weight = Parameter(torch.ones(shape, **options))
        _init_linear(self.projection, fan_in=memory_dim)

    def forward(
        self,
        hidden: Float[Tensor, "*hidden"],
        memory: Float[Tensor, "*batch length memory_dim"],
        *,
        mask: Bool[Tensor, "*batch length"] | None = None,
    ) -> Float[Tensor, "*hidden"]:
        """Return the hidden states with the gated value added."""
        _check_arguments(self, hidden, memory, mask)
        weights = self.projection, self.query_weight, self.key_weight
        h, e, *weights = upcast_together(_streams(hidden, self), memory, *weights)
        out = engram_gate(h, e, EngramWeights(*weights), eps=self.eps, mask=mask)
        return out.reshape(hidden.shape).to(hidden.dtype)

    def extra_repr(self) -> str:
        return f"{self.memory_dim}, {self.embedding_dim}, streams={self.streams}"


class ShortConvGate(nn.Module):
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
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        - hidden: ``(..., length, streams, embedding_dim)``, or without streams
        - memory: ``(..., length, memory_dim)``
        - mask: ``(..., length)``, True where the value is added
        - state: ``(..., (kernel_size - 1) * dilation, streams, embedding_dim)``
        - output: as ``hidden``

    Qwen's checkpoints store the weights of norms minus one.

    Example:
        >>> gate = ShortConvGate(6, 4, streams=2)
        >>> hidden, memory = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 6)
        >>> out, state = gate(hidden, memory), None
        >>> for t in range(3):  # the same, one position at a time
        ...     state = gate.advance(state, hidden[:, t : t + 1], memory[:, t : t + 1])
        >>> out.shape, state.shape
        (torch.Size([1, 3, 2, 4]), torch.Size([1, 9, 2, 4]))
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
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        with torch_errors():
            self.memory_dim = positive("memory_dim", memory_dim)
            self.embedding_dim = positive("embedding_dim", embedding_dim)
            self.streams = None if streams is None else positive("streams", streams)
            self.kernel_size = positive("kernel_size", kernel_size)
            self.dilation = positive("dilation", dilation)
            self.eps = not_negative_number("eps", eps)
            conv_eps = eps if conv_eps is None else conv_eps
            self.conv_eps = not_negative_number("conv_eps", conv_eps)
        self.bias, shape = bool(bias), (streams or 1, embedding_dim)
        options = {"device": device, "dtype": dtype}
        self.key_projection = Parameter(torch.empty(*shape, memory_dim, **options))
        self.value_projection = Parameter(torch.empty(embedding_dim, memory_dim, **options))
        for name in ("key_norm", "query_norm", "conv_norm"):
            setattr(self, name, Parameter(torch.ones(shape, **options)))
        self.conv = Parameter(torch.zeros(*shape, kernel_size, **options))
        self.key_bias = self.value_bias = None
        if bias:
            self.key_bias = Parameter(torch.zeros(shape, **options))
            self.value_bias = Parameter(torch.zeros(embedding_dim, **options))
        for weight in (self.key_projection, self.value_projection):
            _init_linear(weight, fan_in=memory_dim)

    def forward(
        self,
        hidden: Float[Tensor, "*hidden"],
        memory: Float[Tensor, "*batch length memory_dim"],
        *,
        mask: Bool[Tensor, "*batch length"] | None = None,
        state: Float[Tensor, "*batch before streams embedding_dim"] | None = None,
    ) -> Float[Tensor, "*hidden"]:
        """Return the hidden states with the gated value and its convolution added.

        Args:
            hidden: Hidden states.
            memory: N-gram vectors.
            mask: True where the value is added; None is everywhere.
            state: State of the positions before, when decoding; see :meth:`advance`.
        """
        out, _ = self._run(hidden, memory, mask=mask, state=state)
        return out.reshape(hidden.shape).to(hidden.dtype)

    def advance(
        self,
        state: Float[Tensor, "*batch before streams embedding_dim"] | None,
        hidden: Float[Tensor, "*hidden"],
        memory: Float[Tensor, "*batch length memory_dim"],
        *,
        mask: Bool[Tensor, "*batch length"] | None = None,
    ) -> Float[Tensor, "*batch before streams embedding_dim"]:
        """Return the state after these positions, in float32.

        Args:
            state: State before them; None is the start of a sequence.
            hidden: Hidden states.
            memory: N-gram vectors.
            mask: As in a call.
        """
        return self._run(hidden, memory, mask=mask, state=state)[1]

    def _run(self, hidden: Tensor, memory: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        _check_arguments(self, hidden, memory, others["mask"])
        own = dict(self.named_parameters())
        h, e, *weights = upcast_together(_streams(hidden, self), memory, *own.values())
        with torch_errors():
            return short_conv_gate(
                h,
                e,
                ShortConvWeights(**dict(zip(own, weights, strict=True))),
                eps=self.eps,
                conv_eps=self.conv_eps,
                dilation=self.dilation,
                **others,
            )

    def extra_repr(self) -> str:
        return f"{self.memory_dim}, {self.embedding_dim}, streams={self.streams}"


class NgramAverage(nn.Module):
    """Averages token vectors and projected n-gram rows, as LongCat-Flash-Lite does.

    Args:
        columns: Number of rows for each position.
        width: Width of a row.
        embedding_dim: Width of the token vectors.
        device: Device of the parameter.
        dtype: Dtype of the parameter.

    Shape:
        - tokens: ``(..., embedding_dim)``
        - memory: ``(..., columns * width)``
        - output: ``(..., embedding_dim)``, in the dtype of ``tokens``

    Example:
        >>> average = NgramAverage(2, 3, 4)
        >>> average(torch.ones(5, 4), torch.zeros(5, 6))[0]
        tensor([0.3333, 0.3333, 0.3333, 0.3333], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self,
        columns: int,
        width: int,
        embedding_dim: int,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        with torch_errors():
            self.columns, self.width = (
                positive("columns", columns),
                positive("width", width),
            )
            self.embedding_dim = positive("embedding_dim", embedding_dim)
        shape = columns, embedding_dim, width
        self.weight = Parameter(torch.empty(shape, device=device, dtype=dtype))
        _init_linear(self.weight, fan_in=width)

    def forward(
        self,
        tokens: Float[Tensor, "*batch embedding_dim"],
        memory: Float[Tensor, "*batch memory_dim"],
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the mean of the token vectors and the projected rows."""
        for name, x in (("tokens", tokens), ("memory", memory)):
            check_tensor(x, name=name)
        dims, memory_dim = (self.embedding_dim,), self.columns * self.width
        with torch_errors():
            check_shapes(tokens, memory, None, dims=dims, memory_dim=memory_dim)
        out = ngram_average(*upcast_together(tokens, memory, self.weight))
        return out.to(tokens.dtype)

    def extra_repr(self) -> str:
        return f"{self.columns}, {self.width}, {self.embedding_dim}"


def _streams(hidden: Tensor, gate: EngramGate | ShortConvGate) -> Tensor:
    return hidden.unsqueeze(-2) if gate.streams is None else hidden


def _check_arguments(
    gate: EngramGate | ShortConvGate, hidden: Any, memory: Any, mask: Any
) -> None:
    for name, x in (("hidden", hidden), ("memory", memory)):
        check_tensor(x, name=name)
        if not x.is_floating_point():
            raise WrongType(f"{name} must be real, got {x.dtype}")
    own = (gate.embedding_dim,)
    dims = own if gate.streams is None else (gate.streams, *own)
    with torch_errors():
        check_shapes(hidden, memory, mask, dims=dims, memory_dim=gate.memory_dim)


def _init_linear(weight: Tensor, *, fan_in: int) -> None:
    """Draw a projection as ``torch.nn.Linear`` does."""
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound)
