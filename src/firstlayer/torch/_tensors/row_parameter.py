"""Parameters under a row optimizer: stale rows catch up before values are read or written.

A row optimizer changes the class of a parameter that it trains to :class:`RowParameter`
while some of its rows may be stale (:mod:`firstlayer.torch.optim.table_state`). Torch then
calls ``__torch_function__`` for every operation on the parameter. Operations that neither
read nor write values, such as ``shape`` and ``grad``, run at once. All others catch up
first: every row, or the looked up rows for ``torch.nn.functional.embedding``.

Code that has caught up the rows it reads runs inside :func:`without_catch_up`. The
microseconds of ``__torch_function__`` are then not spent either.
"""

import copy
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn import Parameter
from torch.nn.functional import embedding, embedding_bag

#: Context in which operations on parameters do not catch up.
without_catch_up = torch._C.DisableTorchFunctionSubclass


class RowTensor(Tensor):
    """Leaf tensor under a row optimizer. Instances become one by assigning ``__class__``.

    Copies and pickles are up to date, and of the class that the tensor had before.
    """

    #: State of the row optimizer.
    table_state: Any

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_catch_up():
            if func not in WITHOUT_VALUES:
                catch_up_arguments(func, args, kwargs)
            for other in types:
                if not issubclass(RowParameter, other) and other not in ROW_TYPES:
                    # The other class decides. The rows that it may read are up to date.
                    return NotImplemented
            return func(*args, **kwargs)

    def check_whole_table(self) -> None:
        """Do nothing; a part of a table raises, because its rows have other numbers."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(_plain(self), memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def as_subclass(self, cls: Any) -> Any:
        # Torch does not call __torch_function__ for this method.
        with without_catch_up():
            self.table_state.before_access(self)
            return super().as_subclass(cls)

    def __repr__(self, **options: Any) -> str:
        return repr(_plain(self))


class RowParameter(RowTensor, Parameter):
    """Parameter under a row optimizer; see :class:`RowTensor`."""


#: The class of a tensor under a row optimizer, by its class before. Parts of tables have
#: classes of their own (:mod:`firstlayer.torch._tensors.shard_tensor`).
ROW_CLASSES: dict[type, type] = {Tensor: RowTensor, Parameter: RowParameter}
#: Classes of tensors under a row optimizer.
ROW_TYPES: set[type] = set(ROW_CLASSES.values())
#: Classes of tensors without behaviour of their own.
PLAIN_CLASSES = frozenset({Tensor, Parameter, RowTensor, RowParameter})


def is_row_tensor(x: Any) -> bool:
    """Return whether ``x`` is under a row optimizer, so that rows of it may be stale."""
    return type(x) in ROW_TYPES


def catch_up_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Catch up the arguments of a torch function that are under a row optimizer.

    Args:
        func: The function.
        args: Its positional arguments. Lists of tensors are searched.
        kwargs: Its keyword arguments.
    """
    weight: Any = None
    ids: Any = None
    if func is embedding or func is embedding_bag:
        ids, weight = args[:2]
    elif func is torch.embedding or func is torch.ops.aten.embedding.default:
        weight, ids = args[:2]
    if is_row_tensor(weight) and isinstance(ids, Tensor):
        weight.table_state.before_access(weight, ids)
        return
    for value in args:
        _catch_up(value)
    for value in kwargs.values():
        _catch_up(value)


def _catch_up(value: Any) -> None:
    if is_row_tensor(value):
        value.table_state.before_access(value)
    elif isinstance(value, list | tuple):
        for part in value:
            _catch_up(part)
    elif isinstance(value, dict):
        for part in value.values():
            _catch_up(part)


def _plain(x: RowTensor) -> Tensor:
    """Return a tensor of the class that ``x`` had before, with its memory and attributes.

    It shares the gradient too, which only copies of plain tensors keep.
    """
    with without_catch_up():
        x.table_state.before_access(x)
        plain = x.detach().requires_grad_(x.requires_grad)
        if isinstance(x, RowParameter):
            plain = Parameter(plain.detach(), x.requires_grad)
            plain.__class__ = next(k for k, v in ROW_CLASSES.items() if v is type(x))
        else:
            plain.grad = x.grad
        others = {key: value for key, value in vars(x).items() if key != "table_state"}
        vars(plain).update(others)
    return plain


def _reduce_shared(x: RowTensor) -> Any:
    return reduce_tensor(_plain(x))


# Sent to another process, the parameter shares its memory, as any tensor does.
for _cls in ROW_CLASSES.values():
    ForkingPickler.register(_cls, _reduce_shared)


# Names that a version of torch does not have are skipped.
_PROPERTIES = (
    "_backward_hooks", "_base", "_cdata", "_grad", "_grad_fn",
    "_has_symbolic_sizes_strides", "_post_accumulate_grad_hooks", "_version", "device",
    "dtype", "grad", "grad_dtype", "grad_fn",
    "is_cpu", "is_cuda", "is_ipu", "is_leaf", "is_maia", "is_meta", "is_mkldnn", "is_mps",
    "is_mtia", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan",
    "is_xla", "is_xpu", "itemsize", "layout", "name", "names", "nbytes", "ndim",
    "output_nr", "requires_grad", "retains_grad", "shape", "volatile",
)  # fmt: skip
_SETTABLE = (
    "_backward_hooks", "_grad", "_post_accumulate_grad_hooks", "grad", "requires_grad",
)  # fmt: skip
_METHODS = (
    "__hash__", "__len__", "_is_view", "_nnz", "_use_count", "dense_dim", "dim",
    "dim_order", "element_size", "get_device", "has_names", "is_coalesced", "is_complex",
    "is_contiguous", "is_distributed", "is_floating_point", "is_inference", "is_neg",
    "is_conj", "is_pinned", "is_same_size", "is_shared", "is_signed", "ndimension",
    "nelement", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
    "retain_grad", "size", "sparse_dim", "storage_offset", "stride",
)  # fmt: skip
_FUNCTIONS = (
    "empty_like", "full_like", "is_complex", "is_conj", "is_floating_point", "is_inference",
    "is_neg", "is_same_size", "is_signed", "numel", "ones_like", "rand_like",
    "randint_like", "randn_like", "result_type", "zeros_like",
)  # fmt: skip


def _named(owner: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(owner, name) for name in names if hasattr(owner, name)]


#: Torch functions that neither read nor write the values of their arguments. Operators of
#: this library that catch up by themselves are added to it.
WITHOUT_VALUES: set[Any] = set(
    [each.__get__ for each in _named(Tensor, _PROPERTIES)]
    + [each.__set__ for each in _named(Tensor, _SETTABLE)]
    + [each.__delete__ for each in _named(Tensor, _SETTABLE)]
    + _named(Tensor, _METHODS)
    + _named(torch, _FUNCTIONS)
    # Reads the graph, and the tensors that the operations have saved.
    + [torch.autograd.grad]
)
