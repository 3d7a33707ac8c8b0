"""Tensors with a part of a table: operations that need the whole table raise an error.

The parameter of a sharded layer (:mod:`firstlayer.torch.sharding`) has some rows or columns
of its table. Operations on single entries, such as those of optimizers and of averages of
weights, are right for a part. Others would silently use the part as if it were the table:
a ``torch.nn.Linear`` with the same weight, a lookup by row, a sum or a norm. Torch calls
``__torch_function__`` for each of them, which raises an error.

Differentiable results with the shape of the part, such as ``weight.to(dtype)``, are checked
as well. ``weight.detach()`` is an ordinary tensor over the same memory, without this check.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .row_parameter import (
    ROW_CLASSES,
    ROW_TYPES,
    RowParameter,
    RowTensor,
    catch_up_arguments,
    without_catch_up,
)
from .shard import TableShard

_HEAD = "call the layer's logits, or give the linear layer to shard_rows as head"
_LOOKUP = "call the layer, or use weight.detach() for this part"
_PART = "use weight.detach() for this part"
_DRAW = "call the layer's reset_parameters or draw_rows"

#: Names of operations that need the whole table, and what to do instead.
_NEED_WHOLE_TABLE: dict[str, str] = {
    name: advice
    for advice, names in (
        (_HEAD, (
            "linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm",
            "addmm", "addmv", "baddbmm", "einsum", "tensordot", "inner", "cdist",
            "cosine_similarity", "scaled_dot_product_attention", "T", "mT", "H", "mH", "t",
            "transpose", "permute", "swapaxes", "swapdims", "movedim", "adjoint",
        )),
        (_LOOKUP, (
            "embedding", "embedding_bag", "__getitem__", "__setitem__", "__iter__",
            "select", "narrow", "unbind", "index_select", "index_add_", "index_copy_",
            "index_fill_", "index_put_", "gather", "scatter_", "take", "take_along_dim",
        )),
        (_PART, (
            "sum", "mean", "prod", "norm", "vector_norm", "linalg_vector_norm",
            "linalg_norm", "linalg_matrix_norm", "_foreach_norm", "std", "var", "std_mean",
            "var_mean", "min", "max", "amin", "amax", "aminmax", "argmin", "argmax",
            "median", "quantile", "logsumexp", "softmax", "log_softmax", "cumsum", "sort",
            "argsort", "topk", "unique", "renorm", "svd", "linalg_svd",
        )),
        # Ranks with the same seed would draw the same rows, and replicas with different
        # seeds different ones.
        (_DRAW, (
            "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_",
            "cauchy_", "geometric_", "trunc_normal_", "kaiming_uniform_",
            "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "orthogonal_",
        )),
    )
    for name in names
}  # fmt: skip
#: Names of properties by the functions that torch passes.
_PROPERTIES = {getattr(Tensor, name).__get__: name for name in ("T", "mT", "H", "mH")}
_NORMS = ("norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "_foreach_norm")


class ShardTensor(Tensor):
    """Tensor with a part of a table, which refuses operations that need the whole.

    Instances become one by assigning ``__class__``.
    """

    #: The part.
    table_shard: TableShard | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        cls.check_operation(func, args, kwargs)
        for other in types:
            ours = issubclass(other, ShardTensor | RowTensor)
            if not ours and other not in (Tensor, Parameter):
                return NotImplemented
        with without_catch_up():
            catch_up_arguments(func, args, kwargs)
            return _checked_result(func(*args, **kwargs), args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Torch copies neither the part of a parameter nor gradients of this class.
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            return super().__deepcopy__(memo)
        with without_catch_up():
            other: Any = self.detach().clone(memory_format=torch.preserve_format)
            if isinstance(self, Parameter):
                other = Parameter(other, self.requires_grad)
            other.requires_grad_(self.requires_grad)
            other.__class__ = type(self)
            vars(other)["table_shard"] = self.table_shard
        memo[id(self)] = other
        return other

    @staticmethod
    def check_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise if a torch function needs the whole table of one of its arguments."""
        name = _name_of(func)
        advice = _NEED_WHOLE_TABLE.get(name)
        if advice is not None:
            for part in _tensors(args, kwargs):
                if isinstance(part, ShardTensor):
                    _refuse(name, part.table_shard, advice)


class ShardParameter(ShardTensor, Parameter):
    """Parameter of a sharded layer; see :class:`ShardTensor`."""


class RowShardParameter(RowParameter, ShardParameter):
    """Parameter of a sharded layer under a row optimizer."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.check_operation(func, args, kwargs or {})
        result = super().__torch_function__(func, types, args, kwargs)
        with without_catch_up():
            return _checked_result(result, args)

    def check_whole_table(self) -> None:
        """Raise: a layer that is not sharded looks up rows of this part of a table."""
        advice = "look up with the layer that was sharded"
        _refuse("a lookup", self.table_shard, advice)


ROW_CLASSES[ShardParameter] = RowShardParameter
ROW_TYPES.add(RowShardParameter)


class ShardGradient(ShardTensor):
    """Dense gradient of a :class:`ShardParameter`: its norm needs all ranks."""

    @staticmethod
    def check_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise if a torch function computes the norm of one of its arguments."""
        if _name_of(func) in _NORMS:
            for part in _tensors(args, kwargs):
                if isinstance(part, ShardGradient):
                    check_whole_norm(part.table_shard)


def check_whole_norm(shard: TableShard | None) -> None:
    """Raise if a gradient whose norm is computed has a part of a table.

    Args:
        shard: The part, or None for the whole.
    """
    if shard is not None and shard.num_parts > 1:
        raise TypeError(
            "the norm of the gradient of a sharded table needs all ranks; "
            "use firstlayer.torch.optim.clip_grad_norm_"
        )


def check_whole_table(parameter: Tensor, name: str, *, advice: str) -> None:
    """Raise if a parameter whose rows are given by id has a part of a table.

    Args:
        parameter: Parameter.
        name: Name of the function that takes the ids.
        advice: What to do instead.
    """
    if isinstance(parameter, ShardTensor):
        _refuse(name, parameter.table_shard, advice)


def mark_shard(parameter: Any, shard: TableShard) -> None:
    """Make a parameter one with a part of a table, in place.

    Args:
        parameter: Ordinary parameter, or one that has a part already.
        shard: The part.
    """
    with without_catch_up():
        if type(parameter) is Parameter:
            parameter.__class__ = ShardParameter
        vars(parameter)["table_shard"] = shard


def mark_gradient(grad: Any, shard: TableShard) -> None:
    """Make a gradient one of a part of a table, in place.

    Args:
        grad: Dense or sparse gradient.
        shard: The part.
    """
    if type(grad) is Tensor and not grad.is_sparse:
        grad.__class__ = ShardGradient
    vars(grad)["table_shard"] = shard


def _name_of(func: Any) -> str:
    # The name of an operator ends in that of its overload.
    return _PROPERTIES.get(func) or getattr(func, "__name__", "").partition(".")[0]


def _checked_result(result: Any, args: Any) -> Any:
    """Make a differentiable result with the shape of its part of a table a part too."""
    if type(result) is Tensor and result.requires_grad and args:
        first = args[0]
        if isinstance(first, ShardTensor) and result.shape == first.shape:
            result.__class__ = ShardTensor
            vars(result)["table_shard"] = first.table_shard
    return result


def _tensors(args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments of a torch function, and those in lists."""
    for value in (*args, *kwargs.values()):
        yield from value if isinstance(value, list | tuple) else (value,)


def _refuse(name: str, shard: TableShard | None, advice: str) -> None:
    if shard is None or shard.num_parts == 1:
        return
    # Not a TypeError, for which operators of torch try the other operand.
    raise RuntimeError(
        f"{name} needs the whole table, but this rank has {shard.describe()}; {advice}"
    )
