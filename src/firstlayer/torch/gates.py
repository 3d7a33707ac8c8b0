"""Gates on torch: they add the vectors of n-grams to the hidden states of a model."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import Parameter

from ..files.layer_configs import config_of
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
from ._tensors.dtypes import as_torch_dtype, dtype_name, upcast_together
from ._tensors.errors import WrongType, check_tensor, torch_errors


class Gate(GateArguments, nn.Module):
    """Base class of the gates: parameters, config and the checks of a call."""

    def _create_parameters(self, *, device: Any, dtype: Any) -> None:
        dtype = as_torch_dtype(dtype)
        for name in ("key_bias", "value_bias"):
            if name in type(self).__annotations__:
                self.register_parameter(name, None)
        for name, (shape, init) in self.options.parameters().items():
            parameter = Parameter(torch.empty(shape, device=device, dtype=dtype))
            setattr(self, name, parameter)
            if init == "linear":
                nn.init.uniform_(parameter, -(bound := shape[-1] ** -0.5), bound)
            else:
                nn.init.constant_(parameter, init == "ones")

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> config = EngramGate(6, 4, streams=2).config()
            >>> config["memory_dim"], config["streams"], config["dtype"]
            (6, 2, 'float32')
        """
        return config_of(self, dtype=dtype_name(next(self.parameters()).dtype))

    def _check(
        self, hidden: Any, memory: Any, mask: Any = None, *, name: str = "hidden"
    ) -> None:
        """Raise unless the arguments of a call fit together."""
        for key, x in ((name, hidden), ("memory", memory)):
            check_tensor(x, name=key)
            if not x.is_floating_point():
                raise WrongType(f"{key} must be real, got {x.dtype}")
        with torch_errors():
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

    projection: Float[Tensor, "rows memory_dim"]
    query_weight: Float[Tensor, "streams embedding_dim"]
    key_weight: Float[Tensor, "streams embedding_dim"]

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
            self.options = EngramOptions(
                memory_dim=memory_dim, embedding_dim=embedding_dim, streams=streams, eps=eps
            )
        self._create_parameters(device=device, dtype=dtype)

    def forward(
        self,
        hidden: Float[Tensor, "*hidden"],
        memory: Float[Tensor, "*batch length memory_dim"],
        *,
        mask: Bool[Tensor, "*batch length"] | None = None,
    ) -> Float[Tensor, "*hidden"]:
        """Return the hidden states with the gated value added."""
        self._check(hidden, memory, mask)
        weights = self.projection, self.query_weight, self.key_weight
        h, e, *weights = upcast_together(_streams(hidden, self), memory, *weights)
        out = engram_gate(h, e, EngramWeights(*weights), eps=self.eps, mask=mask)
        return out.reshape(hidden.shape).to(hidden.dtype)

    def extra_repr(self) -> str:
        return f"{self.memory_dim}, {self.embedding_dim}, streams={self.streams}"


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

    key_projection: Float[Tensor, "streams embedding_dim memory_dim"]
    value_projection: Float[Tensor, "embedding_dim memory_dim"]
    key_norm: Float[Tensor, "streams embedding_dim"]
    query_norm: Float[Tensor, "streams embedding_dim"]
    conv_norm: Float[Tensor, "streams embedding_dim"]
    conv: Float[Tensor, "streams embedding_dim kernel_size"]
    key_bias: Float[Tensor, "streams embedding_dim"] | None
    value_bias: Float[Tensor, " embedding_dim"] | None

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
        self._create_parameters(device=device, dtype=dtype)

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
        self._check(hidden, memory, others["mask"])
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


class NgramAverage(AverageArguments, Gate):
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

    weight: Float[Tensor, "columns embedding_dim width"]

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
            self.options = AverageOptions(
                columns=columns, width=width, embedding_dim=embedding_dim
            )
        self._create_parameters(device=device, dtype=dtype)

    def forward(
        self,
        tokens: Float[Tensor, "*batch embedding_dim"],
        memory: Float[Tensor, "*batch memory_dim"],
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the mean of the token vectors and the projected rows."""
        self._check(tokens, memory, name="tokens")
        out = ngram_average(*upcast_together(tokens, memory, self.weight))
        return out.to(tokens.dtype)

    def extra_repr(self) -> str:
        return f"{self.columns}, {self.width}, {self.embedding_dim}"


def _streams(hidden: Tensor, gate: EngramGate | ShortConvGate) -> Tensor:
    return hidden.unsqueeze(-2) if gate.streams is None else hidden
