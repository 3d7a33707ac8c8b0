"""Sequence classifier of lrnnx: recurrent blocks, pooling, a linear head.

Padding is identified by ``lengths`` or by the ids. The output of a sequence does not depend
on how much padding follows it. A sequence of padding only pools to zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer, Shaped
from torch import Tensor, nn

from ..._check import one_of, positive
from ...embeddings.layer import mask_rows
from .embedding import TokenEmbedding
from .lru import LRU

POOLINGS = ("last", "mean", "max")
INTERMEDIATE = ("none", "stride", "mean", "max")
Recurrent = Callable[..., nn.Module]


class Classifier(nn.Module):
    """Classify or regress sequences of ids or of vectors.

    Args:
        input_dim: Width of the input vectors. Ignored if ``vocab_size`` is given.
        num_classes: Number of classes. 0 returns ``output_dim`` numbers instead.
        output_dim: Number of outputs if ``num_classes`` is 0.
        d_model: Width of the hidden vectors.
        d_state: State size of each recurrent layer.
        n_layers: Number of blocks.
        lrnn_cls: Class of the recurrent layers, or one class per block.
        pooling: ``"last"``, ``"mean"`` or ``"max"`` over the steps that are not padding.
        dropout: Probability of dropping an entry during training.
        intermediate_pooling: Downsampling after each block, or one per block: ``"none"``,
            ``"mean"`` or ``"max"`` over windows, or ``"stride"`` (the first step of each).
        pooling_factor: Steps per window, or one number per block.
        vocab_size: Number of ids. None accepts vectors only.
        embedding_dim: Width of the embeddings. ``d_model`` if None; another width is
            projected to ``d_model`` by ``embed_proj``.
        max_position_embeddings: Number of learned positions. None adds no positions.
        padding_idx: Id of padding.
        lrnn_params: Further arguments of ``lrnn_cls``.

    Shape:
        - x: ``(batch, length)`` ids, or ``(batch, length, embedding_dim)`` vectors
          (``input_dim`` wide without ``vocab_size``)
        - lengths: ``(batch,)``; None uses the padding ids, or every step
        - output: ``(batch, num_classes)``, or ``(batch, output_dim)``

    Example:
        >>> model = Classifier(0, 10, d_model=16, vocab_size=100, embedding_dim=8).eval()
        >>> short, long = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7, 0, 0]])
        >>> torch.allclose(model(short), model(long), atol=1e-5)
        True
    """

    def __init__(
        self,
        input_dim: int,
        num_classes: int = 0,
        output_dim: int = 1,
        d_model: int = 128,
        d_state: int = 64,
        n_layers: int = 4,
        lrnn_cls: Recurrent | Sequence[Recurrent] = LRU,
        pooling: str = "last",
        dropout: float = 0.1,
        intermediate_pooling: str | Sequence[str] = "none",
        pooling_factor: int | Sequence[int] = 2,
        vocab_size: int | None = None,
        embedding_dim: int | None = None,
        max_position_embeddings: int | None = None,
        padding_idx: int | None = 0,
        lrnn_params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.pooling = d_model, one_of("pooling", pooling, POOLINGS)
        self.has_embedding = vocab_size is not None
        if vocab_size is None:
            self.input_proj = nn.Linear(input_dim, d_model)
        else:
            width = d_model if embedding_dim is None else embedding_dim
            self.embedding = TokenEmbedding(
                vocab_size,
                width,
                padding_idx,
                max_position_embeddings,
                use_position=max_position_embeddings is not None,
                dropout=dropout,
            )
            same = width == d_model
            self.embed_proj = nn.Identity() if same else nn.Linear(width, d_model)
        arguments = {"d_model": d_model, "d_state": d_state, **(lrnn_params or {})}
        makers = _for_each("lrnn_cls", lrnn_cls, positive("n_layers", n_layers))
        shorten = _for_each("intermediate_pooling", intermediate_pooling, n_layers)
        factors = _for_each("pooling_factor", pooling_factor, n_layers)
        *blocks, last = (
            _Block(make(**arguments), d_model, dropout=dropout, shorten=mode, factor=factor)
            for make, mode, factor in zip(makers, shorten, factors, strict=True)
        )
        self.blocks, self.final_block = nn.ModuleList(blocks), last
        self.final_block.output_proj = nn.Linear(d_model, num_classes or output_dim)

    def forward(
        self,
        x: Shaped[Tensor, "batch length *width"],
        lengths: Integer[Tensor, " batch"] | None = None,
        integration_timesteps: None = None,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the logits of each sequence.

        Args:
            x: Ids or vectors.
            lengths: Number of steps of each sequence that are not padding.
            integration_timesteps: Must be None; an LRU has uniform steps.
        """
        if integration_timesteps is not None:
            raise ValueError("integration_timesteps must be None for an LRU")
        mask = self._mask(x, lengths)
        x = self._vectors(x)
        for block in (*self.blocks, self.final_block):
            x, mask = block(x, mask)
        return self.final_block.output_proj(pooled(x, mask, mode=self.pooling))

    def _vectors(self, x: Tensor) -> Tensor:
        if not self.has_embedding:
            return self.input_proj(x)
        return self.embed_proj(self.embedding(x) if x.ndim == 2 else x)

    def _mask(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        if lengths is None:
            if self.has_embedding and x.ndim == 2:
                return self.embedding.token_embedding.mask(x)
            return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if tuple(lengths.shape) != tuple(x.shape[:1]):
            raise ValueError(
                f"lengths must have shape {tuple(x.shape[:1])}, got {tuple(lengths.shape)}"
            )
        return torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]


class _Block(nn.Module):
    """Recurrent layer with residual, norm and optional downsampling."""

    output_proj: nn.Linear

    def __init__(
        self, lrnn: nn.Module, d_model: int, *, dropout: float, shorten: str, factor: int
    ) -> None:
        super().__init__()
        self.lrnn: Any = lrnn
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.shorten = one_of("intermediate_pooling", shorten, INTERMEDIATE)
        self.factor = positive("pooling_factor", factor)

    def forward(
        self, x: Float[Tensor, "batch length d_model"], mask: Bool[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch steps d_model"], Bool[Tensor, "batch steps"]]:
        x = self.norm(x + self.dropout(self.lrnn(x)))
        if self.shorten == "none":
            return x, mask
        if self.shorten == "stride":
            return x[:, :: self.factor], mask[:, :: self.factor]
        # Pad to whole windows so that no step at the end is lost.
        missing = -x.shape[1] % self.factor
        x = nn.functional.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, self.factor))
        mask = nn.functional.pad(mask, (0, missing)).unflatten(1, (-1, self.factor))
        return pooled(x, mask, mode=self.shorten), mask.any(dim=-1)


def pooled(
    x: Float[Tensor, "*batch length width"],
    mask: Bool[Tensor, "*batch length"],
    *,
    mode: str,
) -> Float[Tensor, "*batch width"]:
    """Pool the steps of each sequence where ``mask`` is True.

    Example:
        >>> x, mask = torch.tensor([[[1.0], [3], [9]]]), torch.tensor([[True, True, False]])
        >>> [pooled(x, mask, mode=mode).item() for mode in ("last", "mean", "max")]
        [3.0, 2.0, 3.0]
    """
    if mode == "mean":
        count = mask.sum(dim=-1, keepdim=True).clamp(min=1)
        return mask_rows(x, mask).sum(dim=-2) / count.to(x.dtype)
    if mode == "max":
        greatest = torch.where(mask[..., None], x, -torch.inf).amax(dim=-2)
        return mask_rows(greatest, mask.any(dim=-1))
    steps = torch.arange(mask.shape[-1], device=x.device)
    last = torch.where(mask, steps, 0).amax(dim=-1)
    index = last[..., None, None].expand(*last.shape, 1, x.shape[-1])
    return mask_rows(x.gather(-2, index)[..., 0, :], mask.any(dim=-1))


def _for_each(name: str, value: Any, count: int) -> list[Any]:
    """Return one value per block."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} must have n_layers {count} entries, got {len(value)}")
    return list(value)
