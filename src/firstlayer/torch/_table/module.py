"""What the layers with one table share beside padding: norms, the tied head, its length.

``max_norm``: lookups return shortened rows and leave the table alone. The stored rows are
shortened when a gradient has arrived at the parameter, before the optimizer moves it: a
head that shares the table sees one weight from the first forward to the end of backward,
and training goes the same way as with torch's lookups, which shorten the table in place.
With such a head, losses that share a graph should be added up and sent backward once: the
second backward would find a weight that has changed, and torch says so.
"""

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import linear

from ..._check import not_negative
from ...embeddings.init import Init, Seed
from ...embeddings.resize import Resized, resize_table
from ...embeddings.token import check_norm
from .._tensors.buffers import name_of
from .._tensors.errors import WrongType, WrongValue, check_ids, torch_classes
from .._tensors.large_pages import with_large_pages
from .._tensors.memory import array_of, array_of_table, tensor_of
from ..optim.table_state import catch_up
from .grad_hooks import (
    after_backward,
    coalesce_gradient,
    install_grad_hook,
    is_alone,
    rows_with_gradient,
    shorten_rows,
    shorten_shard,
)
from .lookup import as_index, padding_of
from .padding import Padded


class Table(Padded):
    """A layer with a table of rows; see the module."""

    max_norm: float | None = None
    norm_type: float = 2.0
    sparse: bool = False

    def reset_parameters(self) -> None:
        """Draw the table as torch does; padding becomes zero."""
        with_large_pages(self.weight)
        super().reset_parameters()  # pyright: ignore

    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the output head tied to this table.

        The result has the dtype of ``x``. The padding row gets no gradient.
        """
        weight, padding_idx = self.weight, self.padding_idx
        catch_up(weight)
        out = products(x, weight)
        if padding_idx is not None:
            row = self._row_to_insert(weight)
            if row is not None or weight.requires_grad:
                row = weight[padding_idx].detach() if row is None else row
                out[..., padding_idx] = products(x, row[None])[..., 0]
        return out

    def project(self, ids: Integer[Tensor, "*batch"] | None = None) -> None:
        """Shorten the stored rows to ``max_norm``: those of ``ids``, or all.

        Training does this by itself, whenever a gradient has arrived.
        """
        if self.max_norm is not None:
            rows = None
            if ids is not None:
                rows = as_index(ids).reshape(-1).unique()
                check_ids(ids, self.num_embeddings)
            catch_up(self.weight, rows)
            self._shorten(rows)

    def resize(
        self,
        num_embeddings: int,
        *,
        init: Init | np.ndarray | Tensor = "mean",
        rng: Seed = None,
    ) -> Resized:
        """Change the number of rows in place and return what became of which row.

        Ids keep their rows and padding stays padding. ``weight`` stays the same parameter,
        so a head tied to it follows; an optimizer that has a state for it does not.

        Args:
            num_embeddings: How many rows there shall be.
            init: What new rows are; see :func:`firstlayer.embeddings.resize.resize_table`.
            rng: A seed or a generator for what is drawn; None follows torch's seed.
        """
        self._catch_up_rows()
        self.repair()
        weight = self.weight
        table, what = resized_tensor(
            weight, num_embeddings, init=init, rng=rng, padding_idx=self.padding_idx
        )
        weight.grad = None
        weight.data = table
        self.num_embeddings = num_embeddings
        self._know(weight)
        return what

    def _prepared(self, weight: Tensor) -> Tensor | None:
        """Get ready for a lookup; return the padding row if the output needs it."""
        if (self.sparse or self.max_norm is not None) and not is_compiling():
            install_grad_hook(self, weight)
        return None if self.padding_idx is None else self._row_to_insert(weight)

    def _know(self, weight: Tensor) -> None:
        super()._know(weight)
        # Here too, for a compiled lookup cannot ask for it.
        if self.sparse or self.max_norm is not None:
            install_grad_hook(self, weight, anew=True)

    def _on_grad_accumulated(self, weight: Tensor) -> None:
        if self._parameters.get("weight") is weight:
            coalesce_gradient(weight)
            if self.max_norm is not None:
                rows = rows_with_gradient(weight)
                if rows is None:
                    catch_up(weight)
                self._shorten(rows)
                if not is_alone():
                    # FSDP2 gives the layer a copy of the table, and its part of the table
                    # back once that has its gradient.
                    after_backward(self._shorten_shard)

    def _shorten_shard(self) -> None:
        weight, max_norm = self._parameters.get("weight"), self.max_norm
        if max_norm is not None:
            shorten_shard(weight, max_norm=max_norm, norm_type=self.norm_type)

    def _shorten(self, rows: Tensor | None) -> None:
        if self.max_norm is not None:
            shorten_rows(
                self.weight, rows, max_norm=self.max_norm, norm_type=self.norm_type
            )
            self.repair()


def products(
    x: Float[Tensor, "*batch width"], weight: Float[Tensor, "rows width"]
) -> Float[Tensor, "*batch rows"]:
    """Return the product of ``x`` with every row, in the dtype of ``x``."""
    if not x.is_floating_point():
        raise WrongType(f"x must be real, got {name_of(x.dtype)}")
    if x.shape[-1:] != weight.shape[1:]:
        raise WrongValue(
            f"x must end in embedding_dim {weight.shape[1]}, got shape {tuple(x.shape)}"
        )
    wide = torch.promote_types(x.dtype, weight.dtype)
    return linear(x.to(wide), weight.to(wide)).to(x.dtype)


def resized_tensor(
    weight: Tensor,
    num_embeddings: int,
    *,
    init: Init | np.ndarray | Tensor,
    rng: Seed,
    padding_idx: int | None,
) -> tuple[Tensor, Resized]:
    """Return what :func:`firstlayer.embeddings.resize.resize_table` does, as a tensor on the table's device."""
    with torch_classes():
        table, what = resize_table(
            array_of_table(weight.cpu()),
            num_embeddings,
            init=array_of(init.cpu()) if isinstance(init, Tensor) else init,
            rng=int(torch.randint(2**62, (), device="cpu")) if rng is None else rng,
            padding_idx=padding_idx,
        )
    return tensor_of(table).to(weight.device), what


def check_arguments(
    num_embeddings: int,
    embedding_dim: int,
    *,
    padding_idx: int | None,
    weight: Tensor | None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> None:
    """Refuse the arguments of a table that mean nothing."""
    padding_of(padding_idx, num_embeddings)
    with torch_classes():
        shape = (
            not_negative("num_embeddings", num_embeddings),
            not_negative("embedding_dim", embedding_dim),
        )
        check_norm(max_norm, norm_type)
        if weight is not None and tuple(weight.shape) != shape:
            raise ValueError(f"weight must have shape {shape}, got {tuple(weight.shape)}")
