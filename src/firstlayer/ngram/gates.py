"""Formulas that add n-gram vectors to the hidden states of a model.

The functions create no arrays and run on NumPy, torch and JAX. Hidden states have an axis
of streams, ``(..., length, streams, dim)`` (hyper-connections); n-gram vectors are
``(..., length, memory)``.
"""

from typing import Any, NamedTuple

from .._array import namespace_of

#: Smallest absolute score whose root is taken.
MIN_SCORE = 1e-6


class EngramWeights(NamedTuple):
    """Parameters of the gate of DeepSeek-V4.1.

    Args:
        projection: ``((streams + 1) * dim, memory)``: a key for each stream, then a value.
        query_weight: ``(streams, dim)``.
        key_weight: ``(streams, dim)``.
    """

    projection: Any
    query_weight: Any
    key_weight: Any


class ShortConvWeights(NamedTuple):
    """Parameters of the gate of the Engram paper and of Qwen.

    Args:
        key_projection: ``(streams, dim, memory)``.
        value_projection: ``(dim, memory)``.
        key_norm, query_norm, conv_norm: ``(streams, dim)``.
        conv: ``(streams, dim, kernel_size)``, the newest position last.
        key_bias: ``(streams, dim)`` or None.
        value_bias: ``(dim,)`` or None.
    """

    key_projection: Any
    value_projection: Any
    key_norm: Any
    query_norm: Any
    conv_norm: Any
    conv: Any
    key_bias: Any = None
    value_bias: Any = None


def engram_gate(
    hidden: Any, memory: Any, weights: EngramWeights, *, eps: float, mask: Any = None
) -> Any:
    """Return hidden states with the gated value added, as in DeepSeek-V4.1.

    Args:
        hidden: Hidden states.
        memory: N-gram vectors.
        weights: Parameters.
        eps: Term added to mean squares.
        mask: True where the value is added, ``(..., length)``; None is everywhere.
    """
    streams, dim = weights.query_weight.shape
    projected = memory @ weights.projection.T
    key = projected[..., : streams * dim].reshape(*projected.shape[:-1], streams, dim)
    value = projected[..., None, streams * dim :]
    scale = weights.query_weight * weights.key_weight
    score = (hidden * scale * key).sum(-1) * _inverse_rms(hidden, eps)[..., 0]
    score = score * _inverse_rms(key, eps)[..., 0] / dim**0.5
    xp = namespace_of(score)
    added = gate(score, sign=xp.copysign(xp.ones_like(score), score))[..., None] * value
    return hidden + masked(added, mask, axes=2)


def short_conv_gate(
    hidden: Any,
    memory: Any,
    weights: ShortConvWeights,
    *,
    eps: float,
    conv_eps: float,
    dilation: int,
    mask: Any = None,
    state: Any = None,
) -> tuple[Any, Any]:
    """Return hidden states with the gated value and its convolution added, and the state.

    Args:
        hidden: Hidden states.
        memory: N-gram vectors.
        weights: Parameters.
        eps: Term added to the mean squares of keys and queries.
        conv_eps: Term added to the mean squares of gated values.
        dilation: Distance of the positions that the convolution reads.
        mask: True where the value is added, ``(..., length)``; None is everywhere.
        state: Normalized values of the ``(kernel_size - 1) * dilation`` positions before,
            ``(..., positions, streams, dim)``; None is the start of a sequence.
    """
    xp, dim = namespace_of(hidden), weights.value_projection.shape[0]
    key = xp.einsum("...m,gdm->...gd", memory, weights.key_projection)
    value = memory @ weights.value_projection.T
    if weights.key_bias is not None:
        key, value = key + weights.key_bias, value + weights.value_bias
    key = rms_norm(key, weights.key_norm, eps)
    query = rms_norm(hidden, weights.query_norm, eps)
    score = (key * query).sum(-1) / dim**0.5
    gated = gate(score, sign=xp.sign(score))[..., None] * value[..., None, :]
    gated = masked(gated, mask, axes=2)
    normalized = masked(rms_norm(gated, weights.conv_norm, conv_eps), mask, axes=2)
    window = with_state(normalized, state, kernel=weights.conv.shape[-1], dilation=dilation)
    mixed = convolved(window, weights.conv, dilation=dilation)
    added = masked(gated + mixed * sigmoid(mixed), mask, axes=2)
    start = window.shape[-3] - (weights.conv.shape[-1] - 1) * dilation
    return hidden + added, window[..., start:, :, :]


def ngram_average(tokens: Any, memory: Any, weight: Any) -> Any:
    """Return the mean of token vectors and projected n-gram rows, as in LongCat.

    Args:
        tokens: ``(..., dim)``.
        memory: ``(..., columns * width)``.
        weight: ``(columns, dim, width)``.
    """
    columns, _, width = weight.shape
    rows = memory.reshape(*memory.shape[:-1], columns, width)
    projected = namespace_of(memory).einsum("...cw,cdw->...d", rows, weight)
    return (tokens + projected) / (1 + columns)


def gate(score: Any, *, sign: Any) -> Any:
    """Return the sigmoid of the signed root of scores."""
    xp = namespace_of(score)
    return sigmoid(sign * xp.sqrt(xp.clip(xp.abs(score), MIN_SCORE, None)))


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)), without overflow."""
    return 0.5 + 0.5 * namespace_of(x).tanh(0.5 * x)


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Return ``x`` divided by the root of its mean square, times a weight."""
    return x * _inverse_rms(x, eps) * weight


def with_state(x: Any, state: Any, *, kernel: int, dilation: int) -> Any:
    """Return positions with those before them, which are zero without a state."""
    xp = namespace_of(x)
    shape = (*x.shape[:-3], (kernel - 1) * dilation, *x.shape[-2:])
    if state is None:
        state = x.new_zeros(shape) if xp.__name__ == "torch" else xp.zeros(shape, x.dtype)
    elif tuple(state.shape) != shape:
        raise ValueError(f"state must have shape {shape}, got {tuple(state.shape)}")
    return xp.concat([state, x], axis=-3)


def convolved(window: Any, weight: Any, *, dilation: int) -> Any:
    """Return the causal depthwise convolution of positions that follow a state."""
    kernel = weight.shape[-1]
    length = window.shape[-3] - (kernel - 1) * dilation
    total = None
    for j in range(kernel):
        first = j * dilation
        term = window[..., first : first + length, :, :] * weight[..., j]
        total = term if total is None else total + term
    return total


def masked(x: Any, mask: Any, *, axes: int) -> Any:
    """Return ``x`` with zeros where ``mask`` is False; ``axes`` axes follow the mask's."""
    if mask is None:
        return x
    xp = namespace_of(x)
    return xp.where(mask[(..., *(None,) * axes)], x, xp.zeros_like(x))


def _inverse_rms(x: Any, eps: float) -> Any:
    xp = namespace_of(x)
    return (xp.mean(x * x, -1, **_keep(xp)) + eps) ** -0.5


def _keep(xp: Any) -> dict[str, bool]:
    return {"keepdim" if xp.__name__ == "torch" else "keepdims": True}
