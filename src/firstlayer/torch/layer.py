"""The complete layer on torch: ids in, position-aware vectors out."""

import os
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.func import functional_call
from torch.nn.functional import layer_norm as torch_layer_norm

from .._check import boolean, not_negative, not_negative_number, positive, probability
from ..embeddings.layer import add_embeddings, check_position, mask_rows, position_config
from ..files.hf_embeddings import layer_from_hf
from ..files.layer_configs import config_of
from ._layer.arguments import LayerArguments, check_arguments
from ._layer.eligibility import has_hooks, is_idle, kernel_inputs
from ._layer.fused import fused_layer
from ._layer.jagged import flat_arguments, jagged_tokens
from ._layer.plan import plan_for
from ._positions.arguments import Offset, Positions, check_width
from ._table.module import TableModule
from ._tensors.dtypes import as_torch_dtype, compute_dtype, dtype_name, upcast
from ._tensors.memory import request_large_pages
from ._tensors.row_parameter import without_catch_up
from .learned import LearnedPositions
from .sinusoidal import SinusoidalPositions
from .token import Embedding


class EmbeddingLayer(nn.Module):
    """Token rows, positions, segments, LayerNorm and dropout, in this order.

    Token rows → × √embedding_dim if ``scale`` → + positions (+ segments) → LayerNorm if
    ``layer_norm`` → dropout → zero at padding if ``zero_padding``.

    Args:
        num_embeddings: Number of ids.
        embedding_dim: Width of each vector.
        position: ``"learned"`` (needs ``max_positions``), ``"sinusoidal"``, None, or a
            layer that adds positions. Rotary, ALiBi and T5 act on attention instead.
        max_positions: Number of learned positions; only for ``"learned"``.
        scale: Multiply token rows by √embedding_dim, as in the original Transformer.
        segments: Number of segments (BERT's token types); None for no segments.
        layer_norm: Normalize the sum.
        norm_eps: Epsilon of the LayerNorm; BERT's is 1e-12.
        dropout: Probability of dropping an entry in training.
        padding_idx: Id of padding; negative counts from the end. Its row starts at zero and
            gets no gradient from lookups.
        zero_padding: Set the output at padding to zero, after dropout. Padding then has no
            effect on the gradient of any parameter.
        sparse: Make the gradient of the token table a coalesced sparse tensor.
        device: Device of the parameters.
        dtype: Dtype of the parameters and of the output.

    Shape:
        - ids: ``(..., length)`` integers
        - positions: ``(length,)`` or one for each id; None is ``0, 1, …`` plus ``offset``
        - output: ``(..., length, embedding_dim)``

    A jagged nested tensor of ids, ``(batch, ragged)``, gives a jagged output; its positions
    start again in each sequence. Other arguments are then jagged too.

    Tables are drawn with standard deviation 0.02; tokens and segments with 1/√embedding_dim
    if ``scale``. The layer computes in float32 (float64 for float64) and rounds to its
    dtype once. Autocast changes only the product of :meth:`logits`. In eager mode on the
    CPU, the layer is one pass over memory.

    Example:
        >>> layer = EmbeddingLayer(100, 8, max_positions=32, layer_norm=True)
        >>> layer(torch.tensor([[1, 2, 3]]), offset=5).shape
        torch.Size([1, 3, 8])
        >>> list(layer.state_dict())
        ['token.weight', 'position.weight', 'norm.weight', 'norm.bias']
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        position: Any = "learned",
        max_positions: int | None = None,
        scale: bool = False,
        segments: int | None = None,
        layer_norm: bool = False,
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
        padding_idx: int | None = None,
        zero_padding: bool = False,
        sparse: bool = False,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        if zero_padding and padding_idx is None:
            raise ValueError("zero_padding needs padding_idx, got None")
        self.norm_eps = not_negative_number("norm_eps", norm_eps)
        probability("dropout", dropout)
        not_negative("num_embeddings", num_embeddings)
        self.scale = boolean("scale", scale)
        self.zero_padding = boolean("zero_padding", zero_padding)
        factory = {"device": device, "dtype": as_torch_dtype(dtype)}
        empty = torch.empty(num_embeddings, embedding_dim, **factory)
        request_large_pages(empty)
        self.token = Embedding(
            num_embeddings, embedding_dim, padding_idx, sparse=sparse, _weight=empty
        )
        self.position = _position_layer(
            position, max_positions=max_positions, embedding_dim=embedding_dim, **factory
        )
        self.segment = None
        if segments is not None:
            empty = torch.empty(positive("segments", segments), embedding_dim, **factory)
            self.segment = Embedding(segments, embedding_dim, _weight=empty)
        self.norm = None
        if boolean("layer_norm", layer_norm):
            self.norm = nn.LayerNorm(embedding_dim, self.norm_eps, **factory)
        self.dropout = nn.Dropout(dropout)
        self._draw()

    @classmethod
    def from_hf(
        cls,
        checkpoint_dir: str | os.PathLike[str],
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the embedding layer of a transformers checkpoint.

        Supports models whose first block gets the rows of a token table (Llama, Qwen,
        Mistral, Gemma, T5 and about 150 other types, including models with images or
        audio), and BERT, RoBERTa, GPT-2, OPT, BLOOM and their relatives. Only the layer's
        own tensors are read. They are memory-mapped: writing to them does not change the
        file.

        RoBERTa, MPNet and OPT count positions from the padding mask; pass
        ``positions=firstlayer.positions.from_mask(mask, at_padding=-1)`` if there is
        padding. In half precision, Gemma rounds its scale to the dtype of the table; this
        layer rounds its output only.

        Args:
            checkpoint_dir: Folder with ``config.json`` and the safetensors files. A folder
                that does not describe a supported model is a ValueError with the reason.
            device: Device of the layer.
            dtype: Dtype of the layer; None is that of the files.

        Example:
            >>> import json, pathlib, tempfile
            >>> import numpy as np
            >>> from firstlayer.files.safetensors import write
            >>> config = {"model_type": "llama", "vocab_size": 5, "hidden_size": 2}
            >>> tensors = {"model.embed_tokens.weight": np.arange(10.0).reshape(5, 2)}
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     write(f"{folder}/model.safetensors", tensors, {})
            ...     _ = pathlib.Path(folder, "config.json").write_text(json.dumps(config))
            ...     EmbeddingLayer.from_hf(folder)(torch.tensor([[3, 1]])).tolist()
            [[[6.0, 7.0], [2.0, 3.0]]]
        """
        from .files import FRONT_END

        layer = layer_from_hf(cls, checkpoint_dir, FRONT_END)
        return layer.to(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw every table, with the padding row at zero, and reset the norm."""
        self._draw()
        for module in (self.position, self.norm):
            if module is not None and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # pyright: ignore

    def forward(
        self,
        ids: Integer[Tensor, "*batch length"] | list[Any] | None = None,
        *,
        positions: Positions | None = None,
        offset: Offset = 0,
        segments: Integer[Tensor, "*seq"] | list[Any] | None = None,
        inputs_embeds: Float[Tensor, "*batch length embedding_dim"] | None = None,
        mask: Bool[Tensor, "*batch length"] | list[Any] | None = None,
    ) -> Float[Tensor, "*batch length embedding_dim"]:
        """Return the vectors of ``ids``.

        Args:
            ids: Token ids; may be None if ``inputs_embeds`` is given.
            positions: Position of each token. Ignored, like ``offset``, if the layer has no
                positions.
            offset: Number of preceding positions: one number, or one for each sequence.
            segments: Segment of each token; None is 0.
            inputs_embeds: Token vectors that replace the lookup; ``ids`` then only mark
                padding.
            mask: False at padding, for ``zero_padding``; None derives it from the ids.
        """
        plan = None if is_compiling() else self.__dict__.get("_plan")
        if plan is not None and positions is segments is inputs_embeds is mask is None:
            out = plan.run(self, ids, offset)
            if out is not None:
                return out
        tokens = jagged_tokens(ids, inputs_embeds)
        if tokens is not None:
            flat = flat_arguments(
                self,
                tokens,
                positions=positions,
                offset=offset,
                ids=ids,
                segments=segments,
                inputs_embeds=inputs_embeds,
                mask=mask,
            )
            # Not self(...), which would call hooks twice.
            out = EmbeddingLayer.forward(self, **flat)
            return torch.nested.nested_tensor_from_jagged(out, tokens.offsets())
        try:
            arguments = check_arguments(
                self,
                ids,
                positions=positions,
                offset=offset,
                segments=segments,
                inputs_embeds=inputs_embeds,
                mask=mask,
            )
        except Exception as error:
            if inputs_embeds is None and isinstance(self.token, TableModule):
                self.token.announce(error)
            raise
        arguments = self._prepare_lookups(arguments)
        dropout: Any = self._modules["dropout"]  # faster than the attribute
        dropping = not is_idle(dropout) or has_hooks(dropout)
        # Stale rows of this call have been caught up.
        with without_catch_up():
            inputs = kernel_inputs(self, arguments, upcast_output=dropping)
            out = None
            if inputs is not None:
                # Rows that were read for this call, and not given by the caller.
                is_own = arguments.embeds is not inputs_embeds
                lead = arguments.lead
                out = fused_layer(inputs, lead=lead, may_overwrite=is_own)
            if inputs is not None and not dropping:
                self.__dict__["_plan"] = plan_for(plan, self, arguments, inputs)
        if out is None:
            out = self._by_modules(arguments)
        if inputs is None or dropping:
            out = (dropout(out) if dropping else out).to(self._dtype)
        return out if arguments.mask is None else mask_rows(out, arguments.mask)

    @property
    def padding_idx(self) -> int | None:
        """Id of padding, counted from the front, or None."""
        return self.token.padding_idx

    def mask(self, ids: Integer[Tensor, "*batch length"]) -> Bool[Tensor, "*batch length"]:
        """Return True where ``ids`` is a token and False where it is padding.

        Example:
            >>> layer = EmbeddingLayer(10, 4, max_positions=8, padding_idx=0)
            >>> layer.mask(torch.tensor([[5, 0]])).tolist()
            [[True, False]]
        """
        return self.token.mask(ids)

    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every token row: the tied output head.

        Example:
            >>> layer = EmbeddingLayer(10, 4, max_positions=8)
            >>> layer.logits(layer(torch.tensor([[1, 2, 3]]))).shape
            torch.Size([1, 3, 10])
        """
        return self.token.logits(x)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> config = EmbeddingLayer(100, 8, max_positions=32, layer_norm=True).config()
            >>> config["num_embeddings"], config["position"]["class"], config["layer_norm"]
            (100, 'LearnedPositions', True)
        """
        position, norm = self.position, self.norm
        if position is not None:
            position = {"class": type(position).__name__, **position.config()}
        config = config_of(
            self,
            num_embeddings=self.token.num_embeddings,
            position=position,
            max_positions=None,
            segments=None if self.segment is None else self.segment.num_embeddings,
            layer_norm=norm is not None,
            norm_eps=self.norm_eps if norm is None else norm.eps,
            dropout=getattr(self.dropout, "p", 0.0),
            sparse=self.token.sparse,
            dtype=dtype_name(self._dtype),
        )
        del config["max_positions"]  # in the config of the position layer
        return config

    def quantized(self, format: str = "int8") -> Self:
        """Return a layer whose token table has 8 or 4 bits for each number.

        Everything else is shared with this layer: positions, segments and the norm. The
        rows of the token table are a buffer of bytes, ``token.encoded``. They are decoded
        when they are looked up, and not trained. The dtype of the output stays.
        ``token.quantization`` has the size and the error.

        Args:
            format: ``"int8"``, a scale and a bias for each row; or ``"int4"``, for each 32
                numbers of a row.

        Example:
            >>> layer = EmbeddingLayer(1000, 64, position=None)
            >>> small = layer.quantized("int4")
            >>> small.token.encoded.nbytes, layer.token.weight.nbytes
            (40000, 256000)
        """
        from ._table.stored import quantize_embedding

        layer = type(self).__new__(type(self))
        # Dicts are copied, so that hooks and modules of one layer are not the other's.
        state = self.__getstate__().items()
        state = {k: v.copy() if isinstance(v, dict) else v for k, v in state}
        layer.__dict__.update(state)
        layer._modules["token"] = quantize_embedding(self.token, format)
        return layer

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of the output."""
        token: Any = self.token
        return token.output_dtype if _is_stored(token) else token.weight.dtype

    def __getstate__(self) -> dict[str, Any]:
        # A plan has addresses of this process.
        return {name: value for name, value in vars(self).items() if name != "_plan"}

    def extra_repr(self) -> str:
        return f"scale={self.scale}, zero_padding={self.zero_padding}"

    def _prepare_lookups(self, arguments: LayerArguments) -> LayerArguments:
        """Catch up the rows that this call reads, and install gradient hooks.

        If the token table is in a store or is read out of place, the arguments returned
        have its rows. In compiled code the modules do this in their forward.
        """
        if is_compiling():
            return arguments
        ids, segments = arguments.ids, arguments.segments
        if ids is not None and arguments.embeds is None:
            # Faster than the attribute.
            token: Any = self._modules.get("token")
            if _is_stored(token):
                if not has_hooks(token):
                    arguments = arguments._replace(embeds=token.upcast_rows(ids))
            elif isinstance(token, TableModule):
                if token.training or not token.reads_out_of_place(ids):
                    token.prepare_lookup(ids)
                elif type(token) is Embedding and not has_hooks(token):
                    arguments = arguments._replace(embeds=token.caught_up_rows(ids))
        if segments is not None and isinstance(self.segment, TableModule):
            self.segment.prepare_lookup(segments)
        return arguments

    def _by_modules(self, arguments: LayerArguments) -> Tensor:
        """Return the normalized sum in the compute dtype, by calling the submodules."""
        embeds = arguments.embeds
        token: Any = self.token
        if embeds is not None:
            rows = embeds
        elif _is_stored(token) and not has_hooks(token):
            rows = token.upcast_rows(arguments.ids)
        else:
            rows = token(arguments.ids)
        check_width(rows, self.embedding_dim, name="token.weight")
        dtype = compute_dtype(self._dtype)
        total = add_embeddings(rows.to(dtype), scale=self.scale)
        if self.position is not None:
            total = self.position(total, arguments.positions, offset=arguments.offset)
        if self.segment is not None:
            segments = self.segment(arguments.segments)
            check_width(segments, self.embedding_dim, name="segment.weight")
            total = total + segments.to(dtype)
        if arguments.mask is not None and self.norm is not None:
            # Replace masked rows by a row that any norm accepts. For NaN, or for zeros with
            # an epsilon of 0, its backward gives NaN even if the gradient is zero.
            steps = torch.arange(self.embedding_dim, dtype=dtype, device=total.device)
            total = torch.where(arguments.mask[..., None], total, steps)
        return _normalize(total, self.norm)

    def _draw(self) -> None:
        std = self.embedding_dim**-0.5 if self.scale else 0.02
        for table in (self.token, self.segment):
            if isinstance(table, TableModule):
                table.draw_rows(std)
            elif table is not None:
                nn.init.normal_(table.weight, std=std)
        if self.padding_idx is not None:
            self.token.set_padding(0.0)


def _is_stored(token: Any) -> bool:
    """Return whether a token layer reads a store and has no weight."""
    return getattr(token, "is_stored", False)


def _position_layer(
    position: Any,
    *,
    max_positions: int | None,
    embedding_dim: int,
    device: Any,
    dtype: torch.dtype | None,
) -> Any:
    """Return the position module, built if ``position`` is a name or a config."""
    description = position_config(
        position, max_positions=max_positions, embedding_dim=embedding_dim
    )
    if description is not None:
        name, options = description
        if name == "LearnedPositions":
            position = LearnedPositions(**{"device": device, "dtype": dtype, **options})
        else:
            position = SinusoidalPositions(**options)
            position = position if device is None else position.to(device)
    if position is not None:
        check_position(position, embedding_dim)
    return position


def _normalize(x: Tensor, norm: nn.Module | None) -> Tensor:
    if norm is None:
        return x
    if type(norm) is not nn.LayerNorm or norm.weight is None:
        return norm(x).to(x.dtype)
    if norm.weight.dtype == x.dtype:
        return norm(x)
    # Torch normalizes half precision with a float32 weight, but not float32 with a
    # half-precision weight.
    bias = None if norm.bias is None else upcast(norm.bias).to(x.dtype)
    weight = upcast(norm.weight).to(x.dtype)
    if has_hooks(norm):
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return functional_call(norm, given, x)
    return torch_layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
