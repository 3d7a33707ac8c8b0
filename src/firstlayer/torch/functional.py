"""Functions behind the layers, with the signatures of ``torch.nn.functional``."""

from jaxtyping import Float, Integer, Real
from torch import Tensor
from torch.nn.functional import embedding_bag as torch_embedding_bag

from .._check import one_of
from ..embeddings.bag import MODES, Mode
from ..embeddings.token import check_norm
from ._bags.options import BagOptions
from ._bags.pooling import pool_bags
from ._table.lookup import checked_padding_idx, is_jagged, lookup
from ._tensors.errors import WrongValue, check_tensor, reject_torchrec
from ._tensors.memory import overrides_torch_functions
from .optim.table_state import catch_up

__all__ = ["embedding", "embedding_bag"]

WEIGHTS = "per_sample_weights"


def embedding(
    input: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Float[Tensor, "*batch embedding_dim"]:
    """Return rows of a table, with the arguments of ``torch.nn.functional.embedding``.

    Unlike torch, ``max_norm`` does not write to the table, gradients of repeated ids are
    summed in float32 even in half precision, and ids may have any integer dtype.

    Args:
        input: Ids.
        weight: The table.
        padding_idx: Id whose row gets no gradient; negative counts from the end.
        max_norm: Maximum norm of returned rows; longer ones are scaled down.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide a row's gradient by the number of times its id occurs.
        sparse: Make the gradient of the table a coalesced sparse tensor.

    Example:
        >>> import torch
        >>> table = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> embedding(torch.tensor([0, 1]), table, max_norm=1.0).round(decimals=6).tolist()
        [[0.6..., 0.8...], [0.3..., 0.4...]]
    """
    if max_norm is not None:
        _check_norm(max_norm, norm_type)
    catch_up(weight, input)
    return lookup(
        input,
        weight,
        padding_idx=padding_idx,
        max_norm=max_norm,
        norm_type=norm_type,
        scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
    )


def embedding_bag(
    input: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    offsets: Integer[Tensor, " bags"] | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Real[Tensor, "*batch"] | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Float[Tensor, "bags embedding_dim"]:
    """Pool rows over bags, with the arguments of ``torch.nn.functional.embedding_bag``.

    :mod:`firstlayer.embeddings.bag` defines the result. Unlike torch, every mode supports
    ``per_sample_weights``, ``sparse`` and ``scale_grad_by_freq``, ``max_norm`` does not
    write to the table, and second and forward-mode derivatives exist.

    Args:
        input: ``(bags, length)`` ids, or ``(n,)`` with offsets, or a jagged nested tensor.
        weight: The table.
        offsets: Start of each bag: 0 first, never decreasing.
        max_norm: Maximum norm of rows; longer ones are scaled down before pooling.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide a row's gradient by the number of times its id is pooled.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Make the gradient of the table a coalesced sparse tensor.
        per_sample_weights: Factor for each row, in the shape of ``input``.
        include_last_offset: Whether the last offset is the end of the last bag.
        padding_idx: Id that is excluded from bags; negative counts from the end.

    Example:
        >>> import torch
        >>> table = torch.tensor([[1.0], [2.0], [4.0]])
        >>> embedding_bag(torch.tensor([[0, 1], [2, 2]]), table, mode="sum").tolist()
        [[3.0], [8.0]]
    """
    if isinstance(input, Tensor) and input.is_nested:
        input, offsets, per_sample_weights = flat_bags(input, per_sample_weights)
        include_last_offset = True
    given = (input, weight, offsets, per_sample_weights)
    if not isinstance(input, Tensor):
        advice = "its values(), its offsets() with include_last_offset=True"
        reject_torchrec(input, f"{advice}, and its weights() as per_sample_weights")
    for name, value in zip(("ids", "weight", "offsets", WEIGHTS), given, strict=True):
        is_absent = value is None and name in ("offsets", WEIGHTS)
        if not is_absent and not hasattr(value, "__torch_function__"):
            check_tensor(value, name=name)
    if not isinstance(input, Tensor) or any(map(overrides_torch_functions, given)):
        return torch_embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode,
            sparse, per_sample_weights, include_last_offset, padding_idx,
        )  # fmt: skip
    if weight.dim() != 2:
        raise WrongValue(f"weight must have 2 axes, got shape {tuple(weight.shape)}")
    if max_norm is not None:
        _check_norm(max_norm, norm_type)
    catch_up(weight, input)
    options = BagOptions(
        checked_mode(mode),
        max_norm,
        norm_type,
        scale_grad_by_freq,
        sparse,
        include_last_offset,
        checked_padding_idx(padding_idx, weight.shape[0]),
    )
    return pool_bags(
        input, weight, offsets=offsets, weights=per_sample_weights, options=options
    )


def checked_mode(mode: str) -> Mode:
    """Return the mode, or raise an error if there is no such mode."""
    # Not torch_errors(): a context manager breaks the graph in compiled code.
    try:
        return one_of("mode", mode, MODES)  # pyright: ignore
    except ValueError as error:
        raise WrongValue(*error.args) from None


def _check_norm(max_norm: float, norm_type: float) -> None:
    try:
        check_norm(max_norm, norm_type)
    except ValueError as error:
        raise WrongValue(*error.args) from None


def flat_bags(
    input: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the ids, bounds and weights of bags that are a jagged nested tensor."""
    if weights is not None and not weights.is_nested:
        raise WrongValue("per_sample_weights must be nested for nested ids, got a tensor")
    for name, x in (("ids", input), (WEIGHTS, weights)):
        # Values of other nested tensors have gaps between bags, or another order.
        if x is not None and not is_jagged(x):
            raise WrongValue(
                f"nested {name} must be contiguous and jagged in the second axis"
            )
    flat = None if weights is None else weights.values().reshape(-1)
    return input.values().reshape(-1), input.offsets(), flat  # pyright: ignore
