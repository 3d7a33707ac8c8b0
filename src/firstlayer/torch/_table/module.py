"""Base class of the layers with one table: stale rows, gradient hooks, padding, tied head.

A row optimizer leaves rows without a gradient stale (:mod:`firstlayer.torch.optim`). Their
parameter catches them up before any operation on it. A :class:`TableModule` needs to catch
up only the rows that it looks up. In evaluation it corrects the rows that it returns and
leaves the table as it is.

``max_norm``: lookups return renormalized rows and do not write to the table. Stored rows
are renormalized once their gradient is accumulated, before the optimizer steps. A tied
head therefore uses the same weight from the forward to the end of the backward, and
training gives the same result as with torch, which renormalizes in the forward. A padding
row has no gradient, so only its lookups are renormalized; the same holds for rows whose
gradient is zero, such as those that no maximum of a bag selects. With a tied head, add up
losses that share a graph and call backward once: a second backward would raise an error.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import linear

from ..._check import not_masked, not_negative
from ...embeddings.init import Init, Seed
from ...embeddings.resize import Resized, resize_table
from ...embeddings.token import check_norm
from .._tensors.dtypes import dtype_name
from .._tensors.errors import (
    WrongType,
    WrongValue,
    check_ids,
    check_tensor,
    torch_errors,
)
from .._tensors.memory import array_of, array_of_table, request_large_pages, tensor_of
from .._tensors.row_parameter import without_catch_up
from .._tensors.shard import is_distributed
from ..optim.table_state import catch_up, caught_up_rows, reads_out_of_place
from .disk import (
    before_write,
    is_left_in_place,
    load_reference,
    refuse_resize,
    save_reference,
)
from .grad_hook import GradHook, coalesce_gradient, install_grad_hook
from .lookup import as_index, checked_padding_idx
from .max_norm import (
    renormalize_rows,
    renormalize_shard,
    renormalized,
    rows_with_gradient,
)


class TableModule(nn.Module):
    """Base class of layers that look up rows of ``weight`` by id."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    sparse: bool
    weight: Tensor
    #: Whether rows are read from a store, so that there is no ``weight``.
    is_stored = False

    def reset_parameters(self) -> None:
        """Draw the table as torch does; the padding row becomes zero."""
        before_write(self.weight)
        request_large_pages(self.weight)
        super().reset_parameters()  # pyright: ignore

    def draw_rows(self, std: float) -> None:
        """Draw the table from a normal distribution.

        Args:
            std: Standard deviation.
        """
        nn.init.normal_(self.weight, std=std)

    def prepare_lookup(self, ids: Integer[Tensor, "*batch"]) -> None:
        """Catch up the rows of ``ids`` and install the gradient hook if one is needed.

        For lookups that read the table itself, not :meth:`caught_up_rows`.
        """
        # Faster than the attribute; a parametrized weight is not among the parameters.
        weight = self._parameters.get("weight")
        weight = self.weight if weight is None else weight
        catch_up(weight, ids)
        self._install_grad_hook(weight)

    def announce(self, error: Exception) -> None:
        """Do nothing; a sharded table raises the error on all ranks.

        Layers call it for errors in their arguments before they look up rows.

        Args:
            error: The error.
        """

    def reads_out_of_place(self, ids: Any) -> bool:
        """Return whether a lookup catches up a copy of its rows and not the table."""
        weight = self._parameters.get("weight")
        return reads_out_of_place(weight, ids, training=self.training)

    def caught_up_rows(
        self, ids: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return copies of the rows of ``ids``, caught up; do not write to the table."""
        rows = caught_up_rows(self.weight, as_index(ids))
        if self.max_norm is None:
            return rows
        return renormalized(rows, self.max_norm, norm_type=self.norm_type)

    def mask(self, ids: Integer[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Return True where ``ids`` is a token and False where it is padding.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> Embedding(3, 2, padding_idx=0).mask(torch.tensor([[2, 1, 0]])).tolist()
            [[True, True, False]]
        """
        return is_token(ids, self.padding_idx)

    def set_padding(self, value: Float[Tensor, " embedding_dim"] | float) -> None:
        """Write a vector or a number to the padding row.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> layer = Embedding(3, 2, padding_idx=0)
            >>> layer.set_padding(0.5)
            >>> layer.weight[0].tolist()
            [0.5, 0.5]
        """
        padding_idx = checked_padding_idx(self.padding_idx, self.weight.shape[0])
        write_padding_row(self.weight, padding_idx, value)

    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the tied output head.

        The result has the dtype of ``x``. Every row gets a gradient, the padding row too.
        If the table is a DTensor and ``x`` is a plain tensor, the result is plain, and the
        gradient of the table is averaged over the ranks, as in data-parallel training.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> layer = Embedding.from_pretrained(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
            >>> layer.logits(torch.tensor([3.0, 4.0])).tolist()
            [3.0, 8.0]
        """
        weight = self.weight
        catch_up(weight)
        return tied_logits(x, weight)

    def project(self, ids: Integer[Tensor, "*batch"] | None = None) -> None:
        """Scale stored rows down to ``max_norm``: those of ``ids``, or all.

        Training does this whenever a gradient is accumulated.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> layer = Embedding.from_pretrained(torch.full((1, 4), 3.0), max_norm=1.0)
            >>> layer.project()
            >>> layer.weight.tolist()
            [[0.5, 0.5, 0.5, 0.5]]
        """
        if self.max_norm is not None:
            rows = None
            if ids is not None:
                rows = as_index(ids).reshape(-1).unique()
                check_ids(ids, self.num_embeddings)
            catch_up(self.weight, rows)
            with without_catch_up():
                self._renormalize(rows)

    def resize(
        self,
        num_embeddings: int,
        *,
        init: Init | np.ndarray | Tensor = "mean",
        rng: Seed = None,
    ) -> Resized:
        """Change the number of rows in place, and return which were kept, added, dropped.

        Ids keep their rows. ``weight`` stays the same parameter, so a tied head follows. An
        optimizer with a state for it does not; the state of a row optimizer follows with
        :meth:`firstlayer.torch.optim.RowOptimizer.resize_rows`.

        Args:
            num_embeddings: New number of rows.
            init: Initial values of new rows; see
                :func:`firstlayer.embeddings.resize.resize_table`.
            rng: Seed or generator for random values; None follows torch's seed.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> layer = Embedding(3, 2)
            >>> changes = layer.resize(5)
            >>> changes.kept, changes.added, layer.weight.shape
            (range(0, 3), range(3, 5), torch.Size([5, 2]))
        """
        weight = self.weight
        refuse_resize(weight)
        table, changes = resized_tensor(
            weight, num_embeddings, init=init, rng=rng, padding_idx=self.padding_idx
        )
        weight.grad = None
        weight.data = table
        self.num_embeddings = num_embeddings
        self._bind()
        return changes

    def _release(self) -> None:
        """Remove the gradient hook, so that torch can take over."""
        hooks: Any = getattr(self.weight, "_post_accumulate_grad_hooks", None) or {}
        for key, hook in list(hooks.items()):
            if type(hook) is GradHook and hook.layer() is self:
                del hooks[key]

    def _twin(self, cls: Any) -> Any:
        """Return a layer of torch's class ``cls`` with the same options and parameter."""
        # TorchScript reads the memory of the parameter.
        catch_up(self.weight)
        layer = cls.__new__(cls)
        # Not the constructor of cls, which may build Firstlayer's layers.
        nn.Module.__init__(layer)
        for name in cls.__constants__:
            setattr(layer, name, getattr(self, name))
        layer.weight, layer.training = self.weight, self.training
        return layer

    def _install_grad_hook(self, weight: Tensor, *, reattach: bool = False) -> None:
        if (self.sparse or self.max_norm is not None) and not is_compiling():
            install_grad_hook(self, weight, reattach=reattach)

    def _bind(self) -> None:
        """Install the gradient hook on a parameter that may be new.

        Lookups install it too, but not in compiled code.
        """
        weight = self._parameters.get("weight")
        if weight is not None:
            self._install_grad_hook(weight, reattach=True)

    def _fill_padding_idx_with_zero(self) -> None:
        # Torch's constructors and reset_parameters call this. Torch's own version writes
        # to a copy of the row if the table is a DTensor.
        if self.padding_idx is not None:
            self.set_padding(0.0)

    def _on_grad_accumulated(self, weight: Tensor) -> None:
        if self._parameters.get("weight") is not weight:
            return
        coalesce_gradient(weight)
        if self.max_norm is not None:
            rows = rows_with_gradient(weight)
            if rows is None:
                catch_up(weight)
            self._renormalize(rows)
            if is_distributed():
                # During the backward FSDP2 gives the layer an unsharded copy of the table.
                # At the end, the layer has the sharded parameter and its gradient again.
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._renormalize_shard)

    def _renormalize(self, rows: Tensor | None) -> None:
        if self.max_norm is not None:
            renormalize_rows(
                self.weight, rows, max_norm=self.max_norm, norm_type=self.norm_type
            )

    def _renormalize_shard(self) -> None:
        if self.max_norm is not None:
            weight = self._parameters.get("weight")
            renormalize_shard(weight, max_norm=self.max_norm, norm_type=self.norm_type)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        weight = self._parameters.get("weight")
        if is_left_in_place(weight, fn):
            with self.without_weight():
                return super()._apply(fn, recurse)
        super()._apply(fn, recurse)
        self._bind()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if save_reference(self._parameters.get("weight"), destination, f"{prefix}weight"):
            with self.without_weight():
                super()._save_to_state_dict(destination, prefix, keep_vars)
        else:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        weight, errors = self._parameters.get("weight"), args[-1]
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        if not load_reference(
            weight, state_dict, f"{prefix}weight", errors, is_assigned=is_assigned
        ):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
            self._bind()

    @contextmanager
    def without_weight(self) -> Generator[None, None, None]:
        """Hide the table from torch during the block."""
        weight = self._parameters["weight"]
        self._parameters["weight"] = None
        try:
            yield
        finally:
            self._parameters["weight"] = weight

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()


def is_token(
    ids: Integer[Tensor, "*batch"], padding_idx: int | None
) -> Bool[Tensor, "*batch"]:
    """Return True where an id is not padding."""
    ids = as_index(ids)
    if padding_idx is None:
        return torch.ones_like(ids, dtype=torch.bool)
    return ids != padding_idx


@torch.no_grad()
def write_padding_row(
    weight: Any, index: int | None, value: Float[Tensor, " embedding_dim"] | float
) -> None:
    """Write a vector or a number to a row of a table, which may be a DTensor.

    Args:
        weight: The table. Nothing is written to one on the meta device.
        index: Row of padding; None is an error.
        value: The vector or number.
    """
    if index is None:
        raise WrongValue("set_padding needs a layer with padding_idx, got None")
    not_masked(value, name="value")
    row = torch.as_tensor(value, dtype=weight.dtype, device=weight.device)
    if row.shape not in ((), weight.shape[1:]):
        raise WrongValue(
            f"value must be a number or have shape {tuple(weight.shape[1:])}, "
            f"got {tuple(row.shape)}"
        )
    if weight.is_meta:
        return
    # Otherwise a later catch-up would apply missed steps to the new value.
    catch_up(weight, torch.tensor([index], device="cpu"))
    before_write(weight, index)
    if not hasattr(weight, "device_mesh"):
        with without_catch_up():
            weight[index] = row
        return
    # Assigning to a row of a sharded DTensor would write to a copy.
    from torch.distributed.tensor import DTensor, Replicate

    replicated = [Replicate()] * weight.device_mesh.ndim
    is_padding = torch.arange(weight.shape[0], device=row.device)[:, None] == index
    is_padding, row = (
        DTensor.from_local(x, weight.device_mesh, replicated, run_check=False)
        for x in (is_padding, row)
    )
    weight.copy_(torch.where(is_padding, row, weight))


def tied_logits(
    x: Float[Tensor, "*batch width"], weight: Float[Tensor, "rows width"]
) -> Float[Tensor, "*batch rows"]:
    """Return the product of ``x`` with every row, in the dtype of ``x``."""
    check_tensor(x, name="x")
    if not x.is_floating_point():
        raise WrongType(f"x must be real, got {dtype_name(x.dtype)}")
    if x.shape[-1:] != weight.shape[1:]:
        raise WrongValue(
            f"x must end in embedding_dim {weight.shape[1]}, got shape {tuple(x.shape)}"
        )
    if hasattr(weight, "device_mesh") and not hasattr(x, "device_mesh"):
        weight = whole_table(weight)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return linear(x.to(dtype), weight.to(dtype)).to(x.dtype)


def whole_table(
    weight: Any,
) -> Float[Tensor, "num_embeddings embedding_dim"]:
    """Return a DTensor as a plain tensor on every rank; its gradients are averaged.

    The average over ranks is what data-parallel training computes. If all ranks have the
    same gradient, it is that gradient.
    """
    from torch.distributed.tensor import Partial

    mesh = weight.device_mesh
    table = weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if table.requires_grad:
        # Not Partial("avg"), which gloo does not support.
        table.register_hook(lambda gradient: gradient / mesh.size())
    return table


def resized_tensor(
    weight: Tensor,
    num_embeddings: int,
    *,
    init: Init | np.ndarray | Tensor,
    rng: Seed,
    padding_idx: int | None,
) -> tuple[Tensor, Resized]:
    """Resize a table on its device; see :mod:`firstlayer.embeddings.resize`."""
    with torch_errors():
        table, changes = resize_table(
            array_of_table(weight.cpu()),
            num_embeddings,
            init=array_of(init.cpu()) if isinstance(init, Tensor) else init,
            rng=int(torch.randint(2**62, (), device="cpu")) if rng is None else rng,
            padding_idx=padding_idx,
        )
    return tensor_of(table).to(weight.device), changes


def check_arguments(
    num_embeddings: int,
    embedding_dim: int,
    *,
    padding_idx: int | None,
    weight: Tensor | None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> None:
    """Check the constructor arguments of a layer with a table."""
    checked_padding_idx(padding_idx, num_embeddings)
    with torch_errors():
        shape = (
            not_negative("num_embeddings", num_embeddings),
            not_negative("embedding_dim", embedding_dim),
        )
        check_norm(max_norm, norm_type)
        if weight is not None and tuple(weight.shape) != shape:
            raise ValueError(f"weight must have shape {shape}, got {tuple(weight.shape)}")
