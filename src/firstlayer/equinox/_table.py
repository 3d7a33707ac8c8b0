"""Base class of the layers with one table: padding, norms, the tied head, resizing.

``max_norm``: lookups return scaled-down rows and leave the table unchanged, so a tied head
and the lookups share one weight. :meth:`TableModule.projected` scales the stored rows down
after an optimizer step.
"""

import os
from functools import partial
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from .._array import axis_specs, compute_dtype
from .._check import boolean, check_real, not_masked, not_negative, padding_index
from ..embeddings.resize import Resized, resize_table
from ..embeddings.token import check_norm, table_sizes
from ..files.layer_configs import config_of
from ._ids import IdsArgument, ids_argument, is_token
from ._lookup import CheckedIds, LookupOptions, check_ids, limit_norm
from ._module import Module, compiled, native, replace_fields
from ._parameters import INITS, Init, Key, draw_parameter, given_parameter
from ._row_shards import RowShards, check_sharding, draw_table, place_table
from ._sharding import OutSharding, Spec, with_sharding, with_table_sharding
from ._table_rows import Rows, RowSubset

Ids = Integer[Array, "*batch"] | Integer[np.ndarray, "*batch"] | list[Any] | int | Any


class TableModule(Module):
    """Base class of the layers with one table of rows."""

    weight: Float[Array, "num_embeddings embedding_dim"]
    num_embeddings: int = eqx.field(static=True)
    embedding_dim: int = eqx.field(static=True)
    padding_idx: int | None = eqx.field(static=True)
    max_norm: float | None = eqx.field(static=True)
    norm_type: float = eqx.field(static=True)
    scale_grad_by_freq: bool = eqx.field(static=True)
    sharding: NamedSharding | None = eqx.field(static=True)

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int | None,
        *,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        weight: Any,
        init: Init,
        dtype: Any,
        key: Key | None,
        sharding: NamedSharding | None = None,
    ) -> None:
        rows, width = table_sizes(num_embeddings, embedding_dim, weight)
        self.num_embeddings = not_negative("num_embeddings", rows)
        self.embedding_dim = not_negative("embedding_dim", width)
        self.padding_idx = padding_index(padding_idx, self.num_embeddings)
        self.max_norm, self.norm_type = check_norm(max_norm, norm_type)
        self.scale_grad_by_freq = boolean("scale_grad_by_freq", scale_grad_by_freq)
        self.sharding = check_sharding(sharding, self.embedding_dim)
        shape = (self.num_embeddings, self.embedding_dim)
        if weight is not None:
            self.weight = given_parameter(weight, shape, dtype=dtype, sharding=sharding)
            return

        def draw(key: Key | None) -> Float[Array, "num_embeddings embedding_dim"]:
            table = draw_parameter(shape, init=init, key=key, dtype=dtype)
            if self.padding_idx is None:
                return table
            return _set_row(table, self.padding_idx, 0.0)

        if self.sharding is None or key is None:
            self.weight = draw(key)
        else:
            self.weight = draw_table(draw, key, self.sharding)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Float[Any, "num_embeddings embedding_dim"] | str | os.PathLike[str],
        **options: Any,
    ) -> Self:
        """Return a layer with this table.

        Args:
            embeddings: The table, or the path of a file or folder with one: whatever
                :func:`firstlayer.open_vectors` opens, with or without words. A table from a
                file is float32.
            options: Further arguments of the layer.

        Example:
            >>> import firstlayer.equinox as fe
            >>> table = np.arange(8, dtype=np.float32).reshape(4, 2)
            >>> fe.Embedding.from_pretrained(table, padding_idx=0)([3]).tolist()
            [[6.0, 7.0]]
        """
        if isinstance(embeddings, str | os.PathLike):
            from ..vector_files.reading import read_rows

            embeddings = read_rows(embeddings)
        if embeddings is None:
            raise TypeError("embeddings must be an array or a path, got None")
        return cls(weight=embeddings, **options)  # pyright: ignore[reportCallIssue]

    def logits(
        self,
        x: Float[Array, "*batch embedding_dim"] | Float[np.ndarray, "..."],
        *,
        out_sharding: OutSharding = None,
    ) -> Float[Array, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the tied output head.

        Sums are float32 (float64 for float64); the result has the dtype of ``x``. Every
        row gets a gradient, the padding row included.

        Args:
            x: The vectors.
            out_sharding: Sharding of the result on a mesh with explicit axes, as in
                ``jnp.dot``, or for a layer with a ``sharding``. The logits of sharded rows
                are sharded too, unless their number is not a multiple of the shards.

        Example:
            >>> from firstlayer.equinox import Embedding
            >>> layer = Embedding(weight=jnp.array([[1.0, 0.0], [0.0, 2.0]]))
            >>> layer.logits(jnp.array([3.0, 4.0])).tolist()
            [3.0, 8.0]
        """
        check_real(x, name="x", whole=False)
        x = x if isinstance(x, jax.Array) else native(np.asarray(x))
        if isinstance(self.weight, RowSubset):
            raise TypeError(
                "logits needs every row of the table, got those of a batch; for a dense "
                "step of firstlayer.equinox.optim, gather None instead of ids"
            )
        if x.shape[-1:] != (self.embedding_dim,):
            raise ValueError(
                f"x must end in embedding_dim {self.embedding_dim}, got shape {x.shape}"
            )
        return _products(self._options(), x, self.weight, out_sharding)

    def projected(self, ids: Ids | None = None) -> Self:
        """Return a layer whose stored rows are scaled down to ``max_norm``.

        Call it after an optimizer step, so that lookups and a tied head use the same rows.
        Traced ids out of range change nothing.

        Args:
            ids: Rows to scale; None is all. If the buffers are donated to the surrounding
                ``jit``, only these rows are read and written.

        Example:
            >>> from firstlayer.equinox import Embedding
            >>> layer = Embedding(weight=jnp.full((1, 4), 3.0), max_norm=1.0)
            >>> layer.projected().weight.tolist()
            [[0.5, 0.5, 0.5, 0.5]]
        """
        if self.max_norm is None:
            return self
        argument = None if ids is None else self._check_ids(ids)
        weight = _projected(self._options(), self.weight, argument)
        return replace_fields(self, weight=weight)

    def resize(
        self,
        num_embeddings: int,
        *,
        init: Init | Float[np.ndarray, "new embedding_dim"] | Array = "mean",
        key: Key | None = None,
    ) -> tuple[Self, Resized]:
        """Return a layer with another number of rows, and which rows were kept.

        Ids keep their rows. Runs on the host, not under ``jit``.

        Args:
            num_embeddings: New number of rows.
            init: New rows: ``"mean"`` uses the mean of the old rows, ``"gaussian"`` draws
                them with the mean and covariance of the old rows; an array holds them;
                otherwise as for a new table.
            key: Random key.

        Example:
            >>> from firstlayer.equinox import Embedding
            >>> layer, changes = Embedding(weight=jnp.ones((3, 2))).resize(5)
            >>> changes.kept, changes.added, layer.weight.shape
            (range(0, 3), range(3, 5), (5, 2))
        """
        added = not_negative("num_embeddings", num_embeddings) - self.num_embeddings
        rng = None
        if callable(init) or (isinstance(init, str) and init in INITS):
            shape = (max(added, 0), self.embedding_dim)
            init = draw_parameter(shape, init=init, key=key, dtype=self.weight.dtype)
        elif isinstance(init, str) and init == "gaussian":
            if key is None:
                raise ValueError("key must be given to draw parameters, got None")
            rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        table, changes = resize_table(
            np.asarray(self._own_rows()),
            num_embeddings,
            init=np.asarray(init) if isinstance(init, jax.Array) else init,
            rng=rng,
            padding_idx=self.padding_idx,
        )
        weight = _placed(table, self.sharding)
        return replace_fields(self, weight=weight, num_embeddings=len(table)), changes

    def with_sharding(self, sharding: NamedSharding | None) -> Self:
        """Return a layer whose table is placed on a mesh, or on one device.

        Runs on the host, not under ``jit``; the table passes through host memory.

        Args:
            sharding: As in the constructor; None is the default device.

        Example:
            >>> from firstlayer.equinox import Embedding
            >>> rows = NamedSharding(jax.make_mesh((1,), ("rows",)), PartitionSpec("rows"))
            >>> layer = Embedding(weight=jnp.ones((4, 2))).with_sharding(rows)
            >>> layer.sharding == rows, layer([3]).tolist()
            (True, [[1.0, 1.0]])
        """
        sharding = check_sharding(sharding, self.embedding_dim)
        weight = _placed(np.asarray(self._own_rows()), sharding)
        return replace_fields(self, weight=weight, sharding=sharding)

    def set_padding(
        self, value: Float[Any, " embedding_dim"] | list[float] | float
    ) -> Self:
        """Return a layer with a vector or a number written to the padding row.

        Example:
            >>> from firstlayer.equinox import Embedding
            >>> layer = Embedding(weight=jnp.ones((3, 2)), padding_idx=0).set_padding(0.5)
            >>> layer.weight[0].tolist()
            [0.5, 0.5]
        """
        if self.padding_idx is None:
            raise ValueError("set_padding needs a layer with padding_idx, got None")
        row = not_masked(value, name="value")
        row = row if isinstance(row, jax.Array) else native(np.asarray(row))
        check_real(row, name="value")
        return replace_fields(self, weight=_set_row(self.weight, self.padding_idx, row))

    def mask(self, ids: Ids) -> Bool[Array, "*batch"]:
        """Return True where ``ids`` is a token and False where it is padding.

        Example:
            >>> from firstlayer.equinox import Embedding
            >>> layer = Embedding(weight=jnp.ones((3, 2)), padding_idx=0)
            >>> layer.mask(jnp.array([[2, 1, 0]])).tolist()
            [[True, True, False]]
        """
        return is_token(ids, self.padding_idx)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the table and of the output."""
        return self.weight.dtype

    @property
    def _rows(self) -> Rows:
        return self.weight

    def parameters(self) -> dict[str, Float[Array, "num_embeddings embedding_dim"]]:
        return {"weight": self._own_rows()}

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.dtype.name)

    def _replace_parameters(self, parameters: dict[str, Float[Array, "..."]]) -> Self:
        weight = parameters["weight"]
        if self.sharding is not None:
            weight = place_table(weight, self.sharding, weight.dtype)
        return replace_fields(self, weight=weight)

    def _own_rows(self) -> Float[Array, "num_embeddings embedding_dim"]:
        """Return the table without rows of zeros at its end, copied to the host if any."""
        is_sharded = self._options().shards_of(self.weight) is not None
        if not is_sharded or self.weight.shape[0] == self.num_embeddings:
            return self.weight
        # A slice whose rows do not divide would be copied to every device.
        return np.asarray(self.weight)[: self.num_embeddings]  # pyright: ignore

    def _check_ids(
        self, ids: Ids, *, name: str = "ids", bound: str = "num_embeddings"
    ) -> IdsArgument:
        return ids_argument(ids, self.num_embeddings, name=name, bound=bound)

    def _options(self, *, upcast: bool = False) -> LookupOptions:
        return LookupOptions(
            self.num_embeddings,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            upcast,
            RowShards.of(self.sharding),
        )


@partial(compiled, static_argnums=0, inline=True)
def _projected(
    options: LookupOptions, weight: Array, argument: IdsArgument | None
) -> Array:
    if argument is None:
        return limit_norm(weight, options).astype(weight.dtype)
    shards = options.shards

    def run(weight: Array, argument: IdsArgument) -> Array:
        checked = check_ids(argument, weight, options)
        if shards is None:
            return project(weight, checked.index)
        return project_shards(shards, weight, checked)

    def project_shards(shards: RowShards, weight: Array, checked: CheckedIds) -> Array:
        def project_own(weight: Array, checked: CheckedIds) -> Array:
            own, is_own = checked.of_shard(shards, len(weight))
            return project(weight, jnp.where(is_own, own.index, len(weight)))

        in_specs = shards.spec, PartitionSpec()
        projected = shards.map(project_own, in_specs=in_specs, out_specs=shards.spec)
        return projected(weight, checked)

    def project(weight: Array, index: Integer[Array, "*batch"]) -> Array:
        rows = weight.at[index].get(mode="clip", wrap_negative_indices=False)
        rows = limit_norm(rows, options).astype(weight.dtype)
        return weight.at[index].set(rows, mode="drop", wrap_negative_indices=False)

    return with_sharding(
        run, weight, argument, out_sharding=None, default=lambda: axis_specs(weight)
    )


@compiled
def _set_row(weight: Array, index: int, row: Any) -> Array:
    def run(weight: Array, row: Any) -> Array:
        row = jnp.broadcast_to(jnp.asarray(row, weight.dtype), weight.shape[1:])
        # Every shard of a table writes where it has the row, without communication.
        return jnp.where((jnp.arange(len(weight)) == index)[:, None], row, weight)

    return with_sharding(
        run, weight, row, out_sharding=None, default=lambda: axis_specs(weight)
    )


def _placed(table: np.ndarray, sharding: NamedSharding | None) -> Array:
    if sharding is None:
        return jnp.asarray(table)
    return place_table(table, sharding, table.dtype)


@partial(compiled, static_argnums=(0, 3))
def _products(
    options: LookupOptions,
    x: Float[Array, "*batch width"],
    weight: Float[Array, "rows width"],
    out_sharding: OutSharding,
) -> Float[Array, "*batch rows"]:
    """Return the product of ``x`` with every row, summed in the compute dtype of ``x``."""
    weight = jnp.asarray(weight)  # raises if the weight is in the state of an optimizer
    shards, end = options.shards, options.num_embeddings
    if shards is None:
        return _product(x, weight, out_sharding)

    def run(spec: Spec | None, weight: Array, x: Array) -> Array:
        product = shards.map(
            _product,
            in_specs=(PartitionSpec(), shards.spec),
            out_specs=PartitionSpec(*[None] * (x.ndim - 1), shards.axes),
        )
        return product(shards.summable(x), weight).astype(x.dtype)[..., :end]

    def default() -> Spec:
        is_even = weight.shape[0] == end
        return (*axis_specs(x)[:-1], axis_specs(weight)[0] if is_even else None)

    return with_table_sharding(
        run,
        weight,
        x,
        sharding=shards.sharding,
        out_sharding=out_sharding,
        default=default,
    )


def _product(
    x: Float[Array, "*batch width"],
    weight: Float[Array, "rows width"],
    out_sharding: OutSharding = None,
) -> Float[Array, "*batch rows"]:
    dtype, accumulator = x.dtype, jnp.dtype(compute_dtype(x.dtype))
    if weight.dtype != dtype:
        x, weight = x.astype(accumulator), weight.astype(accumulator)
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    out = jax.lax.dot_general(
        x, weight, axes, preferred_element_type=accumulator, out_sharding=out_sharding
    )
    return out.astype(dtype)
