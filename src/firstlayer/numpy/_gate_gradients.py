"""Gradients of the gates of n-gram memory on NumPy."""

from typing import NamedTuple

import numpy as np

from ..ngram import gates
from ..ngram.gates import EngramWeights, ShortConvWeights
from ..ngram.layers import EngramOptions, ShortConvOptions
from ._bias import sum_to


class GateCall(NamedTuple):
    """Arguments of a gate in the compute dtype, and the gradient of its output.

    Args:
        hidden: Hidden states, with an axis of streams.
        memory: N-gram vectors.
        mask: True where the value is added, or None.
        gradient: Gradient of the output, with an axis of streams.
    """

    hidden: np.ndarray
    memory: np.ndarray
    mask: np.ndarray | None
    gradient: np.ndarray


def engram_pullback(
    weights: EngramWeights, call: GateCall, *, options: EngramOptions
) -> dict[str, np.ndarray]:
    """Return the gradients of the inputs and parameters of ``EngramGate``."""
    (hidden, memory, mask, d), eps = call, options.eps
    streams, dim = weights.query_weight.shape
    lead = memory.shape[:-1]
    projected = memory @ weights.projection.T
    key = projected[..., : streams * dim].reshape(*lead, streams, dim)
    value = projected[..., None, streams * dim :]
    scale = weights.query_weight * weights.key_weight
    root_h, root_k = _inverse_rms(hidden, eps), _inverse_rms(key, eps)
    factor = root_h * root_k / dim**0.5
    score = (hidden * scale * key).sum(-1, keepdims=True) * factor
    alpha, slope = _gate_and_slope(score, np.copysign(np.ones_like(score), score))
    added = gates.masked(d, mask, axes=2)
    dscore = (added * value).sum(-1, keepdims=True) * slope
    dhidden = d + dscore * (scale * key * factor - score * hidden * root_h**2 / dim)
    dkey = dscore * (hidden * scale * factor - score * key * root_k**2 / dim)
    dvalue = (alpha * added).sum(-2)
    dprojected = np.concatenate([dkey.reshape(*lead, streams * dim), dvalue], -1)
    dscale = sum_to(dscore * hidden * key * factor, scale.shape)
    return {
        "hidden": dhidden,
        "memory": dprojected @ weights.projection,
        "projection": _matrix(dprojected).T @ _matrix(memory),
        "query_weight": dscale * weights.key_weight,
        "key_weight": dscale * weights.query_weight,
    }


def short_conv_pullback(
    weights: ShortConvWeights, call: GateCall, *, options: ShortConvOptions
) -> dict[str, np.ndarray]:
    """Return the gradients of a ``ShortConvGate`` at the start of a sequence."""
    hidden, memory, mask, d = call
    dim, kernel, dilation = options.embedding_dim, options.kernel_size, options.dilation
    eps, conv_eps = options.eps, options.conv_eps
    raw_key = np.einsum("...m,gdm->...gd", memory, weights.key_projection)
    value = memory @ weights.value_projection.T
    if weights.key_bias is not None:
        raw_key, value = raw_key + weights.key_bias, value + weights.value_bias
    key = gates.rms_norm(raw_key, weights.key_norm, eps)
    query = gates.rms_norm(hidden, weights.query_norm, eps)
    score = (key * query).sum(-1, keepdims=True) / dim**0.5
    alpha, slope = _gate_and_slope(score, np.sign(score))
    gated = gates.masked(alpha * value[..., None, :], mask, axes=2)
    normalized = gates.masked(
        gates.rms_norm(gated, weights.conv_norm, conv_eps), mask, axes=2
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
    dnormalized = gates.masked(dwindow[..., (kernel - 1) * dilation :, :, :], mask, axes=2)
    dgated, dconv_norm = _rms_pullback(gated, weights.conv_norm, conv_eps, dnormalized)
    dgated = gates.masked(dgated + added, mask, axes=2)
    dvalue = (alpha * dgated).sum(-2)
    dscore = (dgated * value[..., None, :]).sum(-1, keepdims=True) * slope / dim**0.5
    draw_key, dkey_norm = _rms_pullback(raw_key, weights.key_norm, eps, dscore * query)
    dhidden, dquery_norm = _rms_pullback(hidden, weights.query_norm, eps, dscore * key)
    dmemory = np.einsum("...gd,gdm->...m", draw_key, weights.key_projection)
    gradients = {
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
    }
    if options.bias:
        gradients["key_bias"] = sum_to(draw_key, weights.key_norm.shape)
        gradients["value_bias"] = sum_to(dvalue, (dim,))
    return gradients


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
