"""Complete embedding layer for Equinox: ids in, position-aware vectors out."""

import os
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float

from .._array import compute_dtype
from .._check import boolean, not_negative_number, positive, probability
from ..embeddings.layer import add_embeddings, mask_rows
from ..files.hf_embeddings import Arrays, layer_from_hf
from ..files.layer_configs import config_of
from ._ids import IdsArgument, as_int32, mask_and
from ._layer import LayerArguments, check_arguments, layer_norm, position_layer
from ._lookup import look_up, nan_if_invalid, valid_ids
from ._module import Module, filter_compiled, replace_fields
from ._parameters import Init, Key, small_normal, table_dtype
from ._positions import Offset, Positions, PositionsArgument
from ._row_shards import replicate_others
from ._sharding import OutSharding, sharding_like
from ._stored import StoredEmbedding, quantize_embedding
from ._table import Ids
from .learned import LearnedPositions
from .sinusoidal import SinusoidalPositions
from .token import Embedding


class EmbeddingLayer(Module):
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
        dropout: Probability of dropping an entry. Calls need a ``key``, or
            ``inference=True``, or :func:`equinox.nn.inference_mode`.
        padding_idx: Id of padding; negative counts from the end. Its row starts at zero and
            gets no gradient from lookups.
        zero_padding: Set the output at padding to zero, after dropout. Padding then has no
            effect on the gradient of any parameter.
        init: Distribution of new token and segment rows; None is normal with standard
            deviation 0.02, or 1/√embedding_dim with ``scale``.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for the tables.
        sharding: Where to place the token table on a mesh, as for :class:`Embedding`. Every
            device of the mesh has the other parameters.

    Shape:
        - ids: ``(..., length)`` integers
        - positions: ``(length,)`` or one for each id; None is ``0, 1, …`` plus ``offset``
        - output: ``(..., length, embedding_dim)``

    The layer computes in float32 (float64 for float64) and rounds to its dtype once. Where
    an id or segment is out of range and traced, or on an accelerator, the output is NaN and
    passes no gradient to any parameter.

    Example:
        >>> layer = EmbeddingLayer(
        ...     100, 8, max_positions=32, layer_norm=True, key=jax.random.key(0)
        ... )
        >>> layer([[1, 2, 3]], offset=5).shape
        (1, 3, 8)
        >>> sorted(layer.parameters())
        ['norm.bias', 'norm.weight', 'position.weight', 'token.weight']
    """

    token: Embedding | StoredEmbedding
    position: Any
    segment: Embedding | None
    norm: eqx.nn.LayerNorm | None
    dropout: eqx.nn.Dropout | None
    embedding_dim: int = eqx.field(static=True)
    scale: bool = eqx.field(static=True)
    zero_padding: bool = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)

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
        init: Init | None = None,
        dtype: Any = None,
        key: Key | None = None,
        sharding: NamedSharding | None = None,
    ) -> None:
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        p = probability("dropout", dropout)
        if zero_padding and padding_idx is None:
            raise ValueError("zero_padding needs padding_idx, got None")
        self.norm_eps = not_negative_number("norm_eps", norm_eps)
        self.scale = boolean("scale", scale)
        self.zero_padding = boolean("zero_padding", zero_padding)
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        dtype = table_dtype(dtype)
        if init is None:
            # Scaled rows have standard deviation 1.
            scaled = jax.nn.initializers.normal(embedding_dim**-0.5)
            init = scaled if scale else small_normal
        tables = {"init": init, "dtype": dtype}
        self.token = Embedding(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            key=keys[0],
            sharding=sharding,
            **tables,
        )
        self.position = position_layer(
            position,
            max_positions=max_positions,
            embedding_dim=embedding_dim,
            dtype=dtype,
            key=keys[1],
        )
        self.segment = None
        if segments is not None:
            positive("segments", segments)
            self.segment = Embedding(segments, embedding_dim, key=keys[2], **tables)
        self.norm = None
        if boolean("layer_norm", layer_norm):
            self.norm = eqx.nn.LayerNorm(self.embedding_dim, self.norm_eps, dtype=dtype)
        self.dropout = eqx.nn.Dropout(p) if p else None
        if sharding is not None:
            self.position, self.segment, self.norm = replicate_others(
                (self.position, self.segment, self.norm), sharding
            )

    @classmethod
    def from_hf(cls, checkpoint_dir: str | os.PathLike[str], *, dtype: Any = None) -> Self:
        """Return the embedding layer of a transformers checkpoint.

        Supports models whose first block gets the rows of a token table (Llama, Qwen,
        Mistral, Gemma, T5 and about 150 other types, including models with images or
        audio), and BERT, RoBERTa, GPT-2, OPT, BLOOM and their relatives. Only the layer's
        own tensors are read.

        RoBERTa, MPNet and OPT count positions from the padding mask; pass
        ``positions=firstlayer.positions.from_mask(mask, at_padding=-1)`` if there is
        padding. In half precision, Gemma rounds its scale to the dtype of the table; this
        layer rounds its output only.

        Args:
            checkpoint_dir: Folder with ``config.json`` and the safetensors files. A folder
                that does not describe a supported model is a ValueError with the reason.
            dtype: Dtype of the layer; None is that of the token table. Float64 needs
                ``jax_enable_x64``.

        Example:
            >>> import json, pathlib, tempfile
            >>> from firstlayer.files.safetensors import write
            >>> config = {"model_type": "llama", "vocab_size": 5, "hidden_size": 2}
            >>> tensors = {"model.embed_tokens.weight": np.arange(10.0).reshape(5, 2)}
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     write(f"{folder}/model.safetensors", tensors, {})
            ...     _ = pathlib.Path(folder, "config.json").write_text(json.dumps(config))
            ...     layer = EmbeddingLayer.from_hf(folder, dtype="float32")
            >>> layer(jnp.array([[3, 1]])).tolist()
            [[[6.0, 7.0], [2.0, 3.0]]]
        """
        from .files import FRONT_END

        def cast(arrays: Arrays) -> Arrays:
            wanted = table_dtype(dtype or arrays["token.weight"].dtype)
            return {
                name: array.astype(wanted, copy=False) for name, array in arrays.items()
            }

        return layer_from_hf(cls, checkpoint_dir, FRONT_END, cast=cast)

    def __call__(
        self,
        ids: Ids | None = None,
        *,
        positions: Positions | None = None,
        offset: Offset = 0,
        segments: Ids | None = None,
        inputs_embeds: Float[Any, "*batch length embedding_dim"] | None = None,
        mask: Bool[Any, "*batch length"] | list[Any] | None = None,
        key: Key | None = None,
        inference: bool | None = None,
        out_sharding: OutSharding = None,
    ) -> Float[Array, "*batch length embedding_dim"]:
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
            key: Random key for dropout.
            inference: Whether dropout is off; None uses the layer's own setting.
            out_sharding: Sharding of the token rows, and so of the result, on a mesh with
                explicit axes or for a layer with a ``sharding``; by default that of the ids
                and of the columns of the table.
        """
        arguments = check_arguments(
            self, ids, segments=segments, inputs_embeds=inputs_embeds, mask=mask
        )
        given, position = Call(arguments, key, inference, out_sharding), self.position
        if position is None or type(position) in (LearnedPositions, SinusoidalPositions):
            at = None
            if position is not None:
                at = position._argument(arguments.lead, positions, offset)
            return _forward(self, given, at)
        # Any other module checks its own positions, outside of the compiled functions.
        total = _token_rows(self, given)
        total = position(total, positions, offset=offset)
        return _finish(self, total, given)

    @property
    def num_embeddings(self) -> int:
        """Number of ids."""
        return self.token.num_embeddings

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the token table and of the output."""
        return self.token.dtype

    @property
    def padding_idx(self) -> int | None:
        """Id of padding, counted from the front, or None."""
        return self.token.padding_idx

    def mask(self, ids: Ids) -> Bool[Array, "*batch length"]:
        """Return True where ``ids`` is a token and False where it is padding.

        Example:
            >>> key = jax.random.key(0)
            >>> layer = EmbeddingLayer(10, 4, max_positions=8, padding_idx=0, key=key)
            >>> layer.mask(jnp.array([[5, 0]])).tolist()
            [[True, False]]
        """
        return self.token.mask(ids)

    def logits(
        self, x: Float[Any, "*batch embedding_dim"], *, out_sharding: OutSharding = None
    ) -> Float[Array, "*batch num_embeddings"]:
        """Return the product of ``x`` with every token row: the tied output head.

        Example:
            >>> layer = EmbeddingLayer(10, 4, max_positions=8, key=jax.random.key(0))
            >>> layer.logits(layer(jnp.array([[1, 2, 3]]))).shape
            (1, 3, 10)
        """
        return self.token.logits(x, out_sharding=out_sharding)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        parameters = {}
        for part in ("token", "position", "segment"):
            layer = getattr(self, part)
            if isinstance(layer, Module):
                for name, value in layer.parameters().items():
                    parameters[f"{part}.{name}"] = value
        for name in ("weight", "bias"):
            value = getattr(self.norm, name, None)
            if value is not None:
                parameters[f"norm.{name}"] = value
        return parameters

    def quantized(self, format: str = "int8") -> Self:
        """Return a layer whose token table has 8 or 4 bits for each number.

        Everything else is the same. The rows of the token table are an array of bytes,
        decoded when they are looked up, and not trained. The dtype of the output stays.
        ``token.quantization`` has the size and the error. Runs on the host.

        Args:
            format: ``"int8"``, a scale and a bias for each row; or ``"int4"``, for each 32
                numbers of a row.

        Example:
            >>> layer = EmbeddingLayer(1000, 64, position=None, key=jax.random.key(0))
            >>> small = layer.quantized("int4")
            >>> small.token.rows.encoded.nbytes, layer.token.weight.nbytes
            (40000, 256000)
        """
        return replace_fields(self, token=quantize_embedding(self.token, format))

    def config(self) -> dict[str, Any]:
        position = self.position
        if position is not None:
            position = {"class": type(position).__name__, **position.config()}
        config = config_of(
            self,
            position=position,
            max_positions=None,
            segments=None if self.segment is None else self.segment.num_embeddings,
            layer_norm=self.norm is not None,
            dropout=0.0 if self.dropout is None else self.dropout.p,
            dtype=self.dtype.name,
        )
        del config["max_positions"]  # contained in position
        return config

    def _replace_parameters(self, parameters: dict[str, Float[Array, "..."]]) -> Self:
        parts: dict[str, Any] = {}
        for part in ("token", "position", "segment", "norm"):
            own = {
                name.removeprefix(f"{part}."): value
                for name, value in parameters.items()
                if name.startswith(f"{part}.")
            }
            layer = getattr(self, part)
            if own and isinstance(layer, Module):
                parts[part] = layer.with_parameters(own)
            elif own:
                parts[part] = replace_fields(layer, **own)
        return replace_fields(self, **parts)

    def _token_rows(self, call: "Call") -> Float[Array, "*batch length embedding_dim"]:
        """Return the token rows in the compute dtype, scaled if ``scale``."""
        rows: Any = call.arguments.embeds
        ids, token = call.arguments.ids, self.token
        if ids is not None and rows is None:
            options = token._options(upcast=True)
            rows = look_up(options, token._rows, ids, call.out_sharding)
        return add_embeddings(rows.astype(compute_dtype(self.dtype)), scale=self.scale)

    def _add_segments(
        self, total: Float[Array, "*batch embedding_dim"], segments: IdsArgument | None
    ) -> Float[Array, "*batch embedding_dim"]:
        if self.segment is None or segments is None:
            return total
        rows = look_up(
            self.segment._options(upcast=True),
            self.segment.weight,
            segments,
            sharding_like(total, (*segments.ids.shape, self.embedding_dim)),
        )
        return total + rows.astype(total.dtype)

    def _valid(self, arguments: LayerArguments) -> Bool[Array, "*batch length"] | None:
        """Return the mask of places whose ids are all in range; None if all are."""
        valid = None
        tables = ((self.token, arguments.ids), (self.segment, arguments.segments))
        for table, ids in tables:
            if table is not None and ids is not None:
                valid = mask_and(valid, valid_ids(table._options(), table._rows, ids))
        return None if valid is None else jnp.broadcast_to(valid, arguments.lead)

    def _mask(self, arguments: LayerArguments) -> Bool[Array, "*batch length"] | None:
        """Return False where the output is zero; None if it is nowhere."""
        if arguments.mask is not None or not self.zero_padding or arguments.ids is None:
            return arguments.mask
        return as_int32(arguments.ids.ids) != self.padding_idx

    def _finish(
        self, total: Float[Array, "*batch embedding_dim"], call: "Call"
    ) -> Float[Array, "*batch embedding_dim"]:
        """Return the output, given the sum of token rows and positions."""
        total = self._add_segments(total, call.arguments.segments)
        valid, mask = self._valid(call.arguments), self._mask(call.arguments)
        out = layer_norm(total, self.norm, mask=mask_and(mask, valid))
        out = self._drop(out, key=call.key, inference=call.inference)
        out = nan_if_invalid(out.astype(self.dtype), valid)
        return out if mask is None else mask_rows(out, mask)

    def _drop(
        self,
        x: Float[Array, "*batch embedding_dim"],
        *,
        key: Key | None,
        inference: bool | None,
    ) -> Float[Array, "*batch embedding_dim"]:
        if self.dropout is None:
            return x
        if self.dropout.p == 1.0 and key is not None:
            # eqx.nn.Dropout would divide by zero.
            off = self.dropout.inference if inference is None else inference
            return x if off else jnp.zeros_like(x)
        return self.dropout(x, key=key, inference=inference)


class Call(eqx.Module):
    """Arguments of one call of the layer, other than positions.

    Args:
        arguments: Ids, segments and mask.
        key: Random key for dropout, or None.
        inference: Whether dropout is off; None uses the layer's own setting.
        out_sharding: Sharding of the token rows, or None.
    """

    arguments: LayerArguments
    key: Key | None
    inference: bool | None
    out_sharding: OutSharding = eqx.field(static=True)


@filter_compiled
def _forward(
    layer: EmbeddingLayer, call: Call, positions: PositionsArgument | None
) -> Float[Array, "*batch embedding_dim"]:
    total = layer._token_rows(call)
    if positions is not None:
        total = layer.position._add(total, positions)
    return layer._finish(total, call)


@filter_compiled
def _token_rows(layer: EmbeddingLayer, call: Call) -> Float[Array, "*batch embedding_dim"]:
    return layer._token_rows(call)


@filter_compiled
def _finish(
    layer: EmbeddingLayer, total: Float[Array, "*batch embedding_dim"], call: Call
) -> Float[Array, "*batch embedding_dim"]:
    return layer._finish(total.astype(compute_dtype(layer.dtype)), call)
