"""The complete layer on NumPy: ids in, position-aware vectors out."""

import copy
import math
import os
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from .._array import compute_dtype
from .._check import boolean, float_dtype, not_negative_number, positive, probability
from ..embeddings.init import Init, Seed, normal
from ..embeddings.layer import empty_statistics, mask_rows
from ..files.hf_embeddings import Arrays, layer_from_hf
from ..files.layer_configs import config_of
from ..positions.learned import small_normal
from ._layer.arguments import LayerArguments, check_arguments
from ._layer.plan import CallPlan, plan_of
from ._layer.position import position_layer
from ._layer.tables import LayerTables
from ._module import Module
from ._positions import gradient_of
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
        dropout: Probability of dropping an entry while training.
        padding_idx: Id of padding; negative counts from the end. Its row starts at zero and
            gets no gradient from lookups.
        zero_padding: Set the output at padding to zero, after dropout. Padding then has no
            effect on the gradient of any parameter.
        init: Initial values of token and segment rows; None is normal with standard
            deviation 0.02, or 1/√embedding_dim with ``scale``.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator, for initial values and dropout.

    Shape:
        - ids: ``(..., length)`` integers
        - positions: ``(length,)`` or one for each id; None is ``offset, offset + 1, …``
        - output: ``(..., length, embedding_dim)``

    Example:
        >>> layer = EmbeddingLayer(100, 8, max_positions=32, layer_norm=True, rng=0)
        >>> layer([[1, 2, 3]], offset=5).shape
        (1, 3, 8)
        >>> sorted(layer.parameters())
        ['norm.bias', 'norm.weight', 'position.weight', 'token.weight']
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
        init: Init | None = None,
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        self.dropout = probability("dropout", dropout)
        if zero_padding and padding_idx is None:
            raise ValueError("zero_padding needs padding_idx, got None")
        self.scale = boolean("scale", scale)
        self.zero_padding = boolean("zero_padding", zero_padding)
        self.norm_eps = not_negative_number("norm_eps", norm_eps)
        self.training = False
        self.rng = np.random.default_rng(rng)
        init = init or (_unit_when_scaled if scale else small_normal)
        options = {"init": init, "dtype": dtype, "rng": self.rng}
        self.token: Embedding = Embedding(
            num_embeddings, embedding_dim, padding_idx=padding_idx, **options
        )
        self.position = position_layer(
            position,
            max_positions=max_positions,
            embedding_dim=embedding_dim,
            dtype=dtype,
            rng=self.rng,
        )
        self.segment = None
        if segments is not None:
            self.segment = Embedding(
                positive("segments", segments), embedding_dim, **options
            )
        #: Weight and bias of the LayerNorm, or None.
        self.norm: tuple[np.ndarray, np.ndarray] | None = None
        if boolean("layer_norm", layer_norm):
            dtype = float_dtype(dtype)
            self.norm = np.ones(embedding_dim, dtype), np.zeros(embedding_dim, dtype)

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
            dtype: Dtype of the layer; None is that of the token table.

        Example:
            >>> import json, pathlib, tempfile
            >>> from firstlayer.files.safetensors import write
            >>> config = {"model_type": "llama", "vocab_size": 5, "hidden_size": 2}
            >>> tensors = {"model.embed_tokens.weight": np.arange(10.0).reshape(5, 2)}
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     write(f"{folder}/model.safetensors", tensors, {})
            ...     _ = pathlib.Path(folder, "config.json").write_text(json.dumps(config))
            ...     EmbeddingLayer.from_hf(folder)([[3, 1]]).tolist()
            [[[6.0, 7.0], [2.0, 3.0]]]
        """
        from .files import FRONT_END

        def cast(arrays: Arrays) -> Arrays:
            wanted = float_dtype(dtype or arrays["token.weight"].dtype)
            return {
                name: array.astype(wanted, copy=False) for name, array in arrays.items()
            }

        return layer_from_hf(cls, checkpoint_dir, FRONT_END, cast=cast)

    def __call__(
        self,
        ids: Int[Any, "*batch length"] | list[Any] | None = None,
        *,
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        offset: Any = 0,
        segments: Int[Any, "*own"] | list[Any] | None = None,
        inputs_embeds: Float[Any, "*batch length embedding_dim"] | None = None,
        mask: Bool[Any, "*batch length"] | list[Any] | None = None,
    ) -> Float[np.ndarray, "*batch length embedding_dim"]:
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
        plan: CallPlan | None = self.__dict__.get("_plan")
        if plan is not None and positions is segments is inputs_embeds is mask is None:
            out = plan.run(self, ids, offset)
            if out is not None:
                return out
        arguments = check_arguments(
            self,
            ids,
            positions=positions,
            offset=offset,
            segments=segments,
            inputs_embeds=inputs_embeds,
            mask=mask,
        )
        out = self._output(arguments, arguments.read_tables())[0]
        if plan is None or plan.current_arrays(self) is None:
            self.__dict__["_plan"] = plan_of(self, out.size // self.embedding_dim)
        return out

    def vjp(
        self,
        ids: Int[Any, "*batch length"] | list[Any] | None = None,
        *,
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        offset: Any = 0,
        segments: Int[Any, "*own"] | list[Any] | None = None,
        inputs_embeds: Float[Any, "*batch length embedding_dim"] | None = None,
        mask: Bool[Any, "*batch length"] | list[Any] | None = None,
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, Any]]]:
        """Return the output and its pullback, which returns all gradients by name.

        Example:
            >>> layer = EmbeddingLayer(9, 4, max_positions=5, layer_norm=True, rng=0)
            >>> y, pull = layer.vjp([[7, 2]])
            >>> sorted(pull(np.ones_like(y)))
            ['norm.bias', 'norm.weight', 'position.weight', 'token.weight']
        """
        arguments = check_arguments(
            self,
            ids,
            positions=positions,
            offset=offset,
            segments=segments,
            inputs_embeds=inputs_embeds,
            mask=mask,
        )
        tables = arguments.read_tables()
        saved, norm, statistics = arguments.saved_for_backward(tables), None, None
        if self.norm is not None:
            num_tokens = math.prod(arguments.shape[:-1])
            statistics = empty_statistics(num_tokens, compute_dtype(self.dtype))
            norm = self.norm[0].copy(), statistics
        y, dropout_factors = self._output(arguments, tables, statistics)

        def pull(dy: Any) -> dict[str, Any]:
            dy = gradient_of(y, dy).astype(compute_dtype(y.dtype), copy=False)
            if dropout_factors is not None:
                dy = _drop(dy, dropout_factors)
            gradients = arguments.gradients(saved, dy, norm=norm)
            if inputs_embeds is None:
                gradients.pop("inputs_embeds", None)  # rows of a store are constants
            return gradients

        return y, pull

    @property
    def num_embeddings(self) -> int:
        """Number of ids."""
        return self.token.num_embeddings

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tables and of the output."""
        return self.token.dtype

    @property
    def padding_idx(self) -> int | None:
        """Id of padding, counted from the front, or None."""
        return self.token.padding_idx

    def mask(self, ids: Int[Any, "*batch length"] | list[Any]) -> np.ndarray:
        """Return True where ``ids`` is a token and False where it is padding.

        Example:
            >>> layer = EmbeddingLayer(10, 4, max_positions=8, padding_idx=0, rng=0)
            >>> layer.mask([[5, 0]]).tolist()
            [[True, False]]
        """
        return self.token.mask(ids)

    def train(self, mode: bool = True) -> "EmbeddingLayer":
        """Switch dropout on if ``mode``, off otherwise, and return the layer.

        Example:
            >>> layer = EmbeddingLayer(10, 4, max_positions=8, dropout=0.5, rng=0).eval()
            >>> bool((layer([[1, 2]]) == layer([[1, 2]])).all())
            True
            >>> layer = layer.train()
            >>> bool((layer([[1, 2]]) == layer([[1, 2]])).all())
            False
        """
        self.training = mode
        return self

    def eval(self) -> "EmbeddingLayer":
        """Switch dropout off and return the layer."""
        return self.train(False)

    def logits(self, x: Float[Any, "*batch embedding_dim"]) -> np.ndarray:
        """Return the product of ``x`` with every token row: the tied output head.

        Example:
            >>> layer = EmbeddingLayer(10, 4, max_positions=8, rng=0)
            >>> layer.logits(layer([[1, 2, 3]])).shape
            (1, 3, 10)
        """
        return self.token.logits(x)

    def parameters(self) -> dict[str, np.ndarray]:
        parameters = {
            f"token.{name}": value for name, value in self.token.parameters().items()
        }
        if isinstance(self.position, Module):
            for name, value in self.position.parameters().items():
                parameters[f"position.{name}"] = value
        if self.segment is not None:
            parameters["segment.weight"] = self.segment.parameters()["weight"]
        if self.norm is not None:
            parameters["norm.weight"], parameters["norm.bias"] = self.norm
        return parameters

    def buffers(self) -> dict[str, np.ndarray]:
        return {f"token.{name}": value for name, value in self.token.buffers().items()}

    def quantized(self, format: str = "int8") -> Self:
        """Return a layer whose token table has 8 or 4 bits for each number.

        Everything else is shared with this layer: positions, segments and the norm. The
        rows of the token table are decoded when they are looked up, and not trained. The
        dtype of the output stays. ``token.quantization`` has the size and the error.

        Args:
            format: ``"int8"``, a scale and a bias for each row; or ``"int4"``, for each 32
                numbers of a row.

        Example:
            >>> layer = EmbeddingLayer(1000, 64, position=None, rng=0)
            >>> small = layer.quantized("int4")
            >>> small.buffers()["token.encoded"].nbytes, layer.token.weight.nbytes
            (40000, 256000)
        """
        from ._stored import quantize_embedding

        layer = copy.copy(self)
        layer.token = quantize_embedding(self.token, format)
        return layer

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
            dtype=self.dtype.name,
        )
        del config["max_positions"]  # part of the position layer's config
        return config

    def __getstate__(self) -> dict[str, Any]:
        # A plan has addresses of this process.
        return {name: value for name, value in vars(self).items() if name != "_plan"}

    def _output(
        self,
        arguments: LayerArguments,
        tables: LayerTables,
        statistics: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the output and the factors of dropout, or None without dropout."""
        drops = self.training and self.dropout
        dtype = compute_dtype(self.dtype) if drops else self.dtype
        out, factors = np.empty(arguments.shape, dtype), None
        tables.forward(out, norm=self.norm, eps=self.norm_eps, statistics=statistics)
        if drops:
            factors = _dropout_factors(out, self.dropout, self.rng)
            out = _drop(out, factors).astype(self.dtype, copy=False)
        if arguments.mask is not None:
            out = mask_rows(out, arguments.mask)
        return out, factors


def _unit_when_scaled(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return normal(shape, rng, std=shape[-1] ** -0.5)


def _dropout_factors(
    x: np.ndarray, probability: float, rng: np.random.Generator
) -> np.ndarray:
    """Return 0 with this probability and ``1 / (1 - probability)`` otherwise, as ``x``."""
    if probability == 1.0:
        return np.zeros_like(x)
    kept = rng.random(x.shape, dtype=np.float32) >= probability
    return kept * x.dtype.type(1 / (1 - probability))


def _drop(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    # Not a plain product: 0 · NaN is NaN.
    return (np.where(factors == 0, 0, x) * factors).astype(x.dtype, copy=False)
