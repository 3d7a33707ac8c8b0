"""lrnnx's sequence classifier: vectors in, recurrent blocks, pooling, a linear head.

Padding is told apart by ``lengths``, or by the ids themselves: a sequence gives the same
answer however much padding follows it. A sequence that is all padding pools to zeros.
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
    """Classifies sequences of ids or of vectors, or gives numbers for them.

    Args:
        input_dim: Width of the vectors; not looked at if ``vocab_size`` is given.
        num_classes: How many classes; 0 gives ``output_dim`` numbers instead.
        output_dim: How many numbers, if there are no classes.
        d_model: Width inside.
        d_state: Size of the state of each recurrent layer.
        n_layers: How many blocks.
        lrnn_cls: What makes a recurrent layer, or one for each block.
        pooling: ``"last"``, ``"mean"`` or ``"max"`` over what is not padding.
        dropout: Probability that an entry is dropped while training.
        intermediate_pooling: What shortens the sequence after a block, or one for each:
            ``"none"``, or the ``"mean"`` or ``"max"`` of windows, or their first step,
            ``"stride"``.
        pooling_factor: Steps in a window, or one number for each block.
        vocab_size: How many ids there are; None takes vectors only.
        embedding_dim: Width of the embeddings, ``d_model`` if None. If it is another,
            ``embed_proj`` makes them ``d_model`` wide.
        max_position_embeddings: How many learned positions are added to the embeddings;
            None adds none, which a recurrent layer does not need.
        padding_idx: The id that is padding.
        lrnn_params: More arguments for ``lrnn_cls``, beside ``d_model`` and ``d_state``.

    Shape:
        - x: ``(batch, length)`` ids; or ``(batch, length, embedding_dim)`` vectors,
          ``input_dim`` wide without ``vocab_size``
        - lengths: ``(batch,)``; None is up to where ids are padding, or everything
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
            _Block(make(**arguments), d_model, dropout=dropout, shorten=how, factor=factor)
            for make, how, factor in zip(makers, shorten, factors, strict=True)
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
            lengths: How many steps of each sequence are not padding.
            integration_timesteps: Must be None: all steps of an LRU are alike.
        """
        if integration_timesteps is not None:
            raise ValueError("integration_timesteps must be None for an LRU")
        mask = self._mask(x, lengths)
        x = self._vectors(x)
        for block in (*self.blocks, self.final_block):
            x, mask = block(x, mask)
        return self.final_block.output_proj(pooled(x, mask, how=self.pooling))

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
    """A recurrent layer with a residual and a norm, and perhaps fewer steps after it."""

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
        # Filled up to whole windows: no step at the end is lost.
        missing = -x.shape[1] % self.factor
        x = nn.functional.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, self.factor))
        mask = nn.functional.pad(mask, (0, missing)).unflatten(1, (-1, self.factor))
        return pooled(x, mask, how=self.shorten), mask.any(dim=-1)


def pooled(
    x: Float[Tensor, "*batch length width"],
    mask: Bool[Tensor, "*batch length"],
    *,
    how: str,
) -> Float[Tensor, "*batch width"]:
    """Return one vector for each sequence, made of the steps where ``mask`` is True.

    Example:
        >>> x, mask = torch.tensor([[[1.0], [3], [9]]]), torch.tensor([[True, True, False]])
        >>> [pooled(x, mask, how=how).item() for how in ("last", "mean", "max")]
        [3.0, 2.0, 3.0]
    """
    if how == "mean":
        count = mask.sum(dim=-1, keepdim=True).clamp(min=1)
        return mask_rows(x, mask).sum(dim=-2) / count.to(x.dtype)
    if how == "max":
        greatest = torch.where(mask[..., None], x, -torch.inf).amax(dim=-2)
        return mask_rows(greatest, mask.any(dim=-1))
    place = torch.arange(mask.shape[-1], device=x.device)
    last = torch.where(mask, place, 0).amax(dim=-1)
    index = last[..., None, None].expand(*last.shape, 1, x.shape[-1])
    return mask_rows(x.gather(-2, index)[..., 0, :], mask.any(dim=-1))


def _for_each(name: str, value: Any, count: int) -> list[Any]:
    """Return one value for each block."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} must have n_layers {count} entries, got {len(value)}")
    return list(value)
