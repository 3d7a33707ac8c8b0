"""Embedding of ids that get a row when they are first seen, on torch.

Ids are mapped to rows on the host. Rows that are given to other ids get new values in
place, and the state of the optimizer for these rows is reset:

- A row optimizer in exact mode has its state on the parameter, which is reset at once.
- The state of any other optimizer is reset in a hook that torch calls before its step.
"""

import weakref
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._interrupts import held_interrupts
from ..embeddings.growing import GrowingArguments, InitialRows, check_new_rows
from ..embeddings.id_map import Assigned, IdMap
from ..files.layer_configs import ID_MAP, config_of
from ._table.lookup import as_index
from ._tensors.dtypes import as_torch_dtype, dtype_name
from ._tensors.errors import check_tensor, torch_errors
from ._tensors.memory import NUMPY_DTYPES, array_of, tensor_of
from ._tensors.row_parameter import is_row_tensor, without_catch_up
from .optim.row_optimizer import RowOptimizer
from .optim.table_state import catch_up
from .token import Embedding

# Number of batches after which their lists of newly assigned rows are merged.
MERGE = 64


class GrowingEmbedding(GrowingArguments, nn.Module):
    """Vectors of any 64-bit ids: an id gets a row when training first sees it.

    When all rows are taken, the id that was used least recently or least frequently
    loses its row, and its optimizer state with it: an id that comes back starts again. In
    evaluation nothing changes. Ids without a row read the unknown row, row 0 of
    ``table.weight``, which starts at zero and is trained like any other.

    Args:
        capacity: Number of rows, without the unknown row.
        embedding_dim: Width of each vector.
        evict: Which id loses its row to a new one: ``"lru"`` (least recently used),
            ``"lfu"`` (least frequently used), or None: once all rows are taken, new
            ids read the unknown row.
        min_count: Number of times that an id must have been seen to get a row. The counts
            of the last ``capacity`` ids without a row are kept.
        init: Distribution of new rows: ``"normal"`` (standard deviation 1), ``"uniform"``
            (within 0.05), ``"xavier"``, ``"truncated_normal"`` (standard deviation 0.02) or
            ``"zeros"``.
        seed: Seed of the initial values. The initial row of an id follows from the seed
            and the id alone; see :mod:`firstlayer.embeddings.growing`.
        sparse: Make the gradient of the table a coalesced sparse tensor.
        device: Device of the table.
        dtype: Dtype of the table.

    Shape:
        - ids: any shape, any integer dtype; negative ids too
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    A batch with more different ids than ``capacity`` is a ValueError. A gradient of an id
    that has lost its row in the meantime is dropped, accumulated gradients included. A
    forward that is repeated in the backward, as by ``torch.utils.checkpoint``, gives no
    rows. Compiled code calls the layer outside of its graph.

    The state dict has the ids of all rows, as ``id_map.*``. Processes have ids of their
    own: if several train one model, call ``assign`` with the ids of all of them, in the
    same order, in each.

    Example:
        >>> embedding = GrowingEmbedding(2, 4, evict="lru")
        >>> y = embedding(torch.tensor([2**40, -1, 2**40]))
        >>> embedding.rows(torch.tensor([2**40, -1, 5])).tolist()
        [1, 2, 0]
        >>> y = embedding(torch.tensor([5, 2**40]))
        >>> embedding.rows(torch.tensor([2**40, -1, 5])).tolist()
        [1, 0, 2]
    """

    def __init__(
        self,
        capacity: int,
        embedding_dim: int,
        *,
        evict: str | None = "lru",
        min_count: int = 1,
        init: str = "normal",
        seed: int = 0,
        sparse: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        with torch_errors():
            self.id_map = IdMap(capacity, evict=evict, min_count=min_count)
            self.initial = InitialRows(
                width=embedding_dim, init=init, seed=seed, capacity=capacity
            )
        shape = capacity + 1, embedding_dim
        zeros = torch.zeros(shape, device=device, dtype=as_torch_dtype(dtype))
        self.table = Embedding(*shape, sparse=sparse, _weight=zeros)
        #: Rows that ids were given and whose state in optimizers is not reset yet.
        self._given: list[np.ndarray] = []
        _register(self)

    @property
    def ids(self) -> Integer[Tensor, " ids"]:
        """Ids that have a row, in the order of their rows, from row 1 on."""
        return tensor_of(self.id_map.ids)

    def rows(self, ids: Integer[Tensor, "*batch"]) -> Integer[Tensor, "*batch"]:
        """Return the row of each id, 0 for ids without one; change nothing."""
        return self._on_device(self.id_map.find(_bits(ids)))

    def assign(self, ids: Integer[Tensor, "*batch"]) -> Integer[Tensor, "*batch"]:
        """Return the row of each id of a batch in training; new ids get a row.

        Example:
            >>> layer = GrowingEmbedding(10, 4)
            >>> layer.assign(torch.tensor([2**40, -7, 2**40])).tolist()
            [1, 2, 1]
        """
        return self._on_device(self._assign(ids).rows)

    @_disable_dynamo
    def forward(
        self, ids: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the vectors of the ids; in training, new ids get a row.

        Args:
            ids: Ids of any shape and any integer dtype.
        """
        # A forward that the backward repeats is not another batch.
        if not self.training or torch._C._current_graph_task_id() != -1:
            return self.table(self.rows(ids))
        assigned = self._assign(ids)
        vectors = self.table(self._on_device(assigned.rows))
        if vectors.requires_grad:
            drop = partial(_drop_lost, self.id_map, assigned.rows, assigned.batch)
            vectors.register_hook(drop)
        return vectors

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> config = GrowingEmbedding(2, 4, evict="lfu").config()
            >>> config["capacity"], config["evict"]
            (2, 'lfu')
        """
        return config_of(self, dtype=dtype_name(self.table.weight.dtype))

    def extra_repr(self) -> str:
        options = f"evict={self.evict!r}, min_count={self.min_count}"
        return f"{self.capacity}, {self.embedding_dim}, {options}"

    def _on_device(self, rows: np.ndarray) -> Tensor:
        return tensor_of(rows).to(self.table.weight.device)

    @torch.no_grad()
    def _assign(self, ids: Tensor) -> Assigned:
        bits, weight = _bits(ids), self.table.weight
        with held_interrupts(), torch_errors():
            check_new_rows(self.id_map, bits, vars(weight).get("table_state"))
            assigned = self.id_map.assign(bits)
            if assigned.new_rows.size:
                values = self.initial(assigned.new_ids)
                self._start_rows(weight, assigned, values)
        return assigned

    def _start_rows(self, weight: Any, assigned: Assigned, values: np.ndarray) -> None:
        """Write the initial values of new rows, and drop what others have left there."""
        rows = self._on_device(assigned.new_rows)
        # Waits for a step in the background too.
        catch_up(weight, rows)
        with without_catch_up():
            values = values.astype(NUMPY_DTYPES[weight.dtype])
            weight.index_copy_(0, rows, tensor_of(values).to(weight.device))
            if assigned.evicted.size and weight.grad is not None:
                _fill_rows(weight.grad, assigned.evicted, 0.0)
        if is_row_tensor(weight):
            weight.table_state.reset_rows(assigned.new_rows)
        else:
            self._given.append(assigned.new_rows)
            if len(self._given) > MERGE:
                self._given = [np.unique(np.concatenate(self._given))]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, array in self.id_map.state().items():
            destination[prefix + ID_MAP + name] = tensor_of(array)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state = {}
        for name in self.id_map.state_names:
            key = prefix + ID_MAP + name
            if key in state_dict:
                state[name] = array_of(state_dict.pop(key).cpu())
            else:
                missing_keys.append(key)
        if len(state) == len(self.id_map.state_names):
            try:
                self.id_map.load_state(state)
                self._given.clear()
            except ValueError as error:
                error_msgs.append(f"{prefix}{ID_MAP}*: {error}")
        args = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _register(self)


def _bits(ids: Tensor) -> np.ndarray:
    """Return ids as int64 on the host."""
    check_tensor(ids, name="ids")
    return array_of(as_index(ids.detach()).to("cpu", torch.int64))


def _drop_lost(
    id_map: IdMap, rows: np.ndarray, batch: int, gradient: Tensor
) -> Tensor | None:
    """Return a gradient that is zero where the id has lost its row since a batch."""
    is_kept = id_map.keeps(rows, batch)
    if is_kept is None:
        return None
    mask = torch.from_numpy(is_kept).to(gradient.device)[..., None]
    return torch.where(mask, gradient, torch.zeros_like(gradient))


def _fill_rows(x: Tensor, rows: np.ndarray, value: float) -> None:
    """Write one number to rows of a tensor that has a row for each row of a table."""
    index = torch.from_numpy(rows).to(x.device)
    if x.is_sparse:
        x._values()[torch.isin(x._indices()[0], index)] = value
    else:
        x.index_fill_(0, index, value)


# Module state: the layers of the process, and a hook that torch calls before the step of
# every optimizer, which is installed with the first of them.
_layers: "weakref.WeakSet[GrowingEmbedding]" = weakref.WeakSet()
_step_hooks: list[Any] = []


def _register(layer: GrowingEmbedding) -> None:
    _layers.add(layer)
    if not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(_before_step))


@_disable_dynamo
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Reset the optimizer's state for the rows that ids were given before the step.

    Returns:
        Arguments of the step with a closure that does the same for rows that it gives; None
        for a step without a closure.
    """
    if not any(_group_of(layer, optimizer) for layer in list(_layers)):
        return None
    _reset_given(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def reset_after_closure() -> Any:
        loss = closure()
        _reset_given(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], reset_after_closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": reset_after_closure}


@torch.no_grad()
def _reset_given(optimizer: Any) -> None:
    for layer in list(_layers):
        group = _group_of(layer, optimizer)
        if group is None or not layer._given:
            continue
        weight, rows = layer.table.weight, np.unique(np.concatenate(layer._given))
        if isinstance(optimizer, RowOptimizer):
            # Its averages start again, too.
            optimizer.reset_rows(weight, torch.from_numpy(rows))
        else:
            _reset_state(optimizer.state.get(weight) or {}, group, rows, len(weight))
        layer._given.clear()


def _group_of(layer: GrowingEmbedding, optimizer: Any) -> dict[str, Any] | None:
    """Return the parameter group of a layer's table, or None if it is not trained."""
    weight = layer.table.weight
    for group in optimizer.param_groups:
        if any(parameter is weight for parameter in group["params"]):
            return group
    return None


def _reset_state(
    state: dict[str, Any], group: dict[str, Any], rows: np.ndarray, num_rows: int
) -> None:
    for name, x in state.items():
        if isinstance(x, Tensor) and x.dim() and x.shape[0] == num_rows:
            _fill_rows(x, rows, _initial_value(name, group))


def _initial_value(name: str, group: dict[str, Any]) -> Any:
    """Return the value that torch's optimizers give to all of a new state tensor."""
    if name == "sum":
        return group.get("initial_accumulator_value", 0.0)
    if name == "step_size" and "etas" in group:  # Rprop
        return group["lr"]
    return 0.0
