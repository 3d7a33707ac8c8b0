"""Embedding with frozen rows in the same ``weight`` as the trained ones.

Zeroing the gradient of a row does not freeze it: weight decay and momentum move rows
without a gradient. Here a hook of the parameter drops the gradients of frozen rows, those
of a tied head included, and hooks of every torch optimizer restore frozen rows after each
step.
"""

import os
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..embeddings.init import Init, Seed
from ..embeddings.resize import Resized
from ._table.grad_hook import GradHook, coalesce_gradient, install_grad_hook
from ._table.pretrained import table_tensor
from ._tensors.errors import WrongType
from ._tensors.memory import is_eager
from ._tensors.row_parameter import RowParameter, without_catch_up
from ._tensors.shard import is_distributed
from .frozen import bool_mask
from .optim.sparse_gradient import RowGradientTensor
from .optim.table_state import catch_up
from .token import Embedding


class FrozenRowsEmbedding(Embedding):
    """``Embedding`` in which some rows are never trained.

    It has one ``weight``, as ``torch.nn.Embedding`` has, so a head can be tied to it, and
    Hugging Face and PEFT accept it. Frozen rows get a zero gradient, also from a tied head,
    and no step of a torch optimizer moves them, whatever its momentum and weight decay.
    Values that are written between steps stay.

    Cost: every optimizer step copies the frozen rows twice and, if a row optimizer in
    ``mode="exact"`` trains the table, brings them up to date. Optimizers keep a state for
    frozen rows. :class:`PartlyFrozenEmbedding` has neither cost, but no single ``weight``.

    The optimizer must be a ``torch.optim.Optimizer``: its step hooks restore frozen rows.
    Tables that such an optimizer does not step (sharded by FSDP, parametrized, or passed by
    ``torch.func.functional_call``) raise a TypeError in training. Code that updates
    ``weight`` without a torch optimizer, such as DeepSpeed's, is not noticed.

    Args:
        num_embeddings: Number of rows, one for each id.
        embedding_dim: Width of each vector.
        padding_idx: Id of padding; negative counts from the end. It is frozen.
        max_norm, norm_type: See :class:`Embedding`. The table's frozen rows are not scaled.
        scale_grad_by_freq, sparse, _weight, _freeze, device, dtype: See :class:`Embedding`.
        frozen: Ids that are not trained: a range, a list or a tensor. Rows that a resize
            adds are trained.

    Shape:
        - input: any shape, any integer dtype
        - output: ``(*input.shape, embedding_dim)``, in the table's dtype

    Example:
        >>> layer = FrozenRowsEmbedding(10, 4, frozen=range(8))
        >>> before = layer.weight.detach().clone()
        >>> optimizer = torch.optim.AdamW(layer.parameters(), weight_decay=0.1)
        >>> layer.logits(layer(torch.arange(10))).sum().backward()
        >>> optimizer.step()
        >>> (layer.weight == before).all(dim=1).tolist()
        [True, True, True, True, True, True, True, True, False, False]
    """

    #: Frozen ids in ascending order. Those beyond the table are ignored, because Hugging
    #: Face resizes a table by replacing the data of ``weight``.
    _frozen_ids: np.ndarray

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        frozen: Iterable[int] | Integer[Tensor, " ids"],
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            _freeze,
            device,
            dtype,
        )
        is_frozen = bool_mask(frozen, num_embeddings)
        if self.padding_idx is not None:
            is_frozen[self.padding_idx] = True
        self._frozen_ids = np.flatnonzero(is_frozen)
        self._bind()

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        embeddings: Float[Tensor, "num_embeddings embedding_dim"] | str | os.PathLike[str],
        *,
        frozen: Iterable[int] | Integer[Tensor, " ids"],
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Self:
        """Return a layer with these initial rows, including the padding row.

        Args:
            embeddings: The table, whose memory the layer shares, or the path of a file with
                vectors.
            frozen: Ids that are not trained.
            padding_idx: Id of padding; negative counts from the end.
            max_norm: As in the constructor.
            norm_type: As in the constructor.
            scale_grad_by_freq: As in the constructor.
            sparse: As in the constructor.
        """
        table = table_tensor(embeddings)
        return cls(
            *table.shape,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            _weight=table,
            frozen=frozen,
        )

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, frozen: Iterable[int] | Integer[Tensor, " ids"]
    ) -> Self:
        """Return a layer with the options and the ``weight`` of another one.

        ``weight`` is the same parameter, so a tied head stays tied.

        Args:
            embedding: A ``torch.nn.Embedding`` or a Firstlayer ``Embedding``.
            frozen: Ids that are not trained.

        Example:
            >>> model = nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 6, bias=False))
            >>> model[1].weight = model[0].weight
            >>> model[0] = FrozenRowsEmbedding.from_embedding(model[0], frozen=range(4))
            >>> model[1].weight is model[0].weight
            True
        """
        if not isinstance(embedding, nn.Embedding) or type(embedding).forward not in (
            nn.Embedding.forward,
            Embedding.forward,
            cls.forward,
        ):
            # A subclass may scale its output, as that of Gemma does.
            raise WrongType(
                "embedding must be a torch.nn.Embedding with its own forward, "
                f"got {type(embedding).__name__}"
            )
        layer = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            embedding.max_norm,
            embedding.norm_type,
            embedding.scale_grad_by_freq,
            embedding.sparse,
            _weight=embedding.weight.detach(),
            frozen=frozen,
        )
        layer.weight = embedding.weight
        return layer.train(embedding.training)

    @property
    def is_frozen(self) -> np.ndarray:
        """For each row, whether it is frozen."""
        mask = np.zeros(self.weight.shape[0], bool)
        mask[self._ids()] = True
        return mask

    def forward(
        self, input: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the rows of the ids.

        Args:
            input: Ids of any shape and any integer dtype.
        """
        weight: Any = self.weight
        if torch.is_grad_enabled() and weight.requires_grad:
            _check_parameter(weight)
        return super().forward(input)

    def resize(
        self,
        num_embeddings: int,
        *,
        init: Init | np.ndarray | Tensor = "mean",
        rng: Seed = None,
    ) -> Resized:
        changes = super().resize(num_embeddings, init=init, rng=rng)
        self._frozen_ids = self._ids()
        return changes

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        super().register_parameter(name, param)
        if hasattr(self, "_frozen_ids"):
            self._bind()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, frozen={len(self._ids())} rows"

    def _ids(self) -> np.ndarray:
        """Return the frozen ids that the table has."""
        return self._frozen_ids[self._frozen_ids < self.weight.shape[0]]

    def _frozen_index(self) -> Tensor:
        """Return the frozen ids on the device of the table."""
        return torch.from_numpy(self._ids()).to(self.weight.device)

    def _install_grad_hook(self, weight: Tensor, *, reattach: bool = False) -> None:
        if not torch.compiler.is_compiling():
            _install_step_hooks()
            install_grad_hook(self, weight, reattach=reattach)

    def _on_grad_accumulated(self, weight: Tensor) -> None:
        if self._parameters.get("weight") is not weight:
            return
        coalesce_gradient(weight)
        self._drop_frozen_gradients(weight)
        super()._on_grad_accumulated(weight)
        if is_distributed():
            # During the backward FSDP2 gives the layer an unsharded copy of the table.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: _check_parameter(self._parameters.get("weight")))

    def _drop_frozen_gradients(self, weight: Tensor) -> None:
        grad = weight.grad
        if grad is None or not self._frozen_ids.size:
            return
        if grad.is_sparse:
            ids = grad._indices()
            is_trained = torch.from_numpy(~self.is_frozen).to(ids.device)[ids[0]]
            kept = torch.sparse_coo_tensor(
                ids[:, is_trained],
                grad._values()[is_trained],
                grad.shape,
                check_invariants=False,
                is_coalesced=True,
            )
            weight.grad = RowGradientTensor.from_sparse(kept)
        elif grad.requires_grad:
            weight.grad = grad.index_fill(0, self._frozen_index(), 0.0)
        else:
            grad.index_fill_(0, self._frozen_index(), 0.0)

    def _renormalize(self, rows: Tensor | None) -> None:
        is_trained = torch.from_numpy(~self.is_frozen).to(self.weight.device)
        if rows is None:
            rows = is_trained
        elif rows.dtype != torch.bool:
            # Rows of a bool mask have a gradient, which frozen rows do not.
            rows = rows[is_trained[rows]]
        super()._renormalize(rows)


def _check_parameter(weight: Any) -> None:
    """Raise if a torch optimizer cannot step this table, and so not put rows back."""
    if type(weight) not in (Parameter, RowParameter) and is_eager():
        raise WrongType(
            "the weight of FrozenRowsEmbedding must be a plain torch.nn.Parameter in "
            f"training, got {type(weight).__name__}; use PartlyFrozenEmbedding"
        )


# Module state: hooks that torch calls before and after the step of every optimizer. They
# are installed with the first FrozenRowsEmbedding of the process.
_step_hooks: list[Any] = []


def _install_step_hooks() -> None:
    if not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(_before_step))
        _step_hooks.append(register_optimizer_step_post_hook(_after_step))


@_disable_dynamo
@torch.no_grad()
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Copy the frozen rows of every table that the optimizer trains."""
    copies = []
    for weight, index in _frozen_tables(optimizer):
        catch_up(weight, index)
        with without_catch_up():
            copies.append((weight, index, weight[index]))
    # A stack, because the step of a subclass may call that of its base class. Its size is
    # limited, because steps that raise leave their copies behind.
    stack = vars(optimizer).setdefault("_frozen_row_copies", [])
    del stack[:-4]
    stack.append(copies)


@_disable_dynamo
@torch.no_grad()
def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Put the frozen rows back."""
    # Empty if the first layer of the process was built by the closure of this step.
    stack = vars(optimizer).get("_frozen_row_copies") or [()]
    for weight, index, rows in stack.pop():
        # Otherwise a later catch-up would apply missed steps to the rows.
        catch_up(weight, index)
        with without_catch_up():
            weight[index] = rows


def _frozen_tables(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the tables with frozen rows among the optimizer's parameters."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            for hook in hooks.values():
                layer = hook.layer() if type(hook) is GradHook else None
                if isinstance(layer, FrozenRowsEmbedding) and layer.weight is parameter:
                    found.append((parameter, layer._frozen_index()))
    return found
