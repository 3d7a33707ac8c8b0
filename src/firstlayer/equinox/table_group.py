"""Groups of tables for Equinox: many features looked up in many tables by one call.

One gather reads the rows of all features of one width, and one scatter sums their
gradients. Pooling is compiled for each feature.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Integer, Real

from .._array import axis_specs
from ..embeddings.bag import Mode
from ..embeddings.table_group import (
    FeatureIds,
    GroupLayout,
    Table,
    TablePlace,
    TableView,
    check_weighted,
    feature_bounds,
)
from ..embeddings.token import mask_out_of_range
from ..files.layer_configs import config_of
from ._bags import MatrixBags, RaggedBags, bag_bounds, checked_weights, traced_offsets
from ._ids import IdsArgument, as_int32, call_values, ids_argument
from ._lookup import LookupOptions, check_ids, gather_rows, nan_if_invalid
from ._module import Module, compiled, replace_fields
from ._parameters import Init, Key, draw_parameter
from ._sharding import Spec, with_specs
from ._table_rows import Rows, array_in
from .bag import EmbeddingBag

Features = Mapping[str, Any]


class TableGroup(Module):
    """Looks many features up in many tables, with one gather for tables of one width.

    Features may share a table. Tables of one width are joined into one array
    (``joined["64"].weight``), which an optimizer trains as one table; :meth:`parameters`
    and files have an entry for each table (``tables.user.weight``). Bags and their
    gradients are those of :class:`firstlayer.equinox.EmbeddingBag`.

    Args:
        tables: :class:`Table` of each name.
        init: Initial values of each table, as for :class:`firstlayer.equinox.Embedding`.
        dtype: Dtype of all tables: float64, float32, float16 or bfloat16; None is JAX's
            default.
        key: Random key for the tables.

    Shape:
        - features: for each feature ``(batch, length)`` ids, one bag each; ``(batch,)`` for
          bags of one id; ``(ids, offsets)`` with ``(n,)`` ids and ``(batch + 1,)`` offsets,
          0 first and n last; or a list of lists. Any shape for a table with mode None.
        - per_sample_weights: as the ids
        - output: for each feature ``(batch, embedding_dim)``; for a table with mode None a
          vector for each id

    A bag with a traced id out of range is NaN and passes no gradient. Traced offsets that
    are invalid make every bag of their feature NaN.

    Example:
        >>> tables = {
        ...     "user": Table(100, 8),
        ...     "item": Table(50, 8, features=["clicked", "bought"], mode="mean"),
        ... }
        >>> group = TableGroup(tables, key=jax.random.key(0))
        >>> vectors = group({"user": [3, 99], "clicked": [[4, 2, 4], []]})
        >>> vectors["user"].shape, vectors["clicked"].shape
        ((2, 8), (2, 8))
        >>> group({"bought": [[3, 70]]})
        Traceback (most recent call last):
        ...
        IndexError: bought[1] is 70, but num_embeddings of table 'item' is 50
    """

    joined: dict[str, EmbeddingBag]
    layout: GroupLayout = eqx.field(static=True)

    def __init__(
        self,
        tables: Mapping[str, Table | Mapping[str, Any]],
        *,
        init: Init = "normal",
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        self.layout = GroupLayout.of(tables)
        for width, rows in self.layout.num_rows.items():
            if rows > 2**31 - 1:
                raise ValueError(
                    f"tables of width {width} must have fewer than 2**31 rows, got {rows}"
                )
        keys = [None] * len(self.layout.tables)
        if key is not None:
            keys = list(jax.random.split(key, len(keys)))
        drawn = {}
        for (name, table), own in zip(self.layout.tables, keys, strict=True):
            shape = table.num_embeddings, table.embedding_dim
            weight = draw_parameter(shape, init=init, key=own, dtype=dtype)
            if table.padding_idx is not None:
                weight = weight.at[table.padding_idx].set(0)
            drawn[name] = weight
        self.joined = {
            width: EmbeddingBag(weight=weight, mode="sum")
            for width, weight in _joined(self.layout, drawn).items()
        }

    @property
    def tables(self) -> dict[str, TableView]:
        """Each table with its ``weight``, a copy of rows of the joined array."""
        return self.layout.views({width: bag.weight for width, bag in self.joined.items()})

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tables and of the output."""
        return next(iter(self.joined.values())).weight.dtype

    def __call__(
        self,
        features: Features,
        per_sample_weights: Features | None = None,
        *,
        key: Key | None = None,
    ) -> dict[str, Float[Array, "..."]]:
        """Return the vectors of each feature.

        Args:
            features: Ids of each feature.
            per_sample_weights: Factor for the row of each id, for some features.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        calls = self._calls(features, per_sample_weights or {})
        vectors: dict[str, Array] = {}
        for width, call in calls.items():
            if call:
                bag, names = self.joined[width], list(call)
                parts = tuple(call[name].part for name in names)
                arguments = tuple(call[name].argument for name in names)
                options = bag._options(upcast=True)
                found = _look_up(parts, options, bag.weight, arguments)
                vectors |= dict(zip(names, found, strict=True))
        return {name: vectors[name] for name in features}

    def joined_ids(self, features: Features) -> dict[str, Int32[Array, " n"]]:
        """Return the rows of the joined tables that a call reads, for row optimizers.

        They are the ids of ``optimizer.gather`` for an optimizer of
        :mod:`firstlayer.equinox.optim` with ``tables=lambda group: group.joined``. Traced
        ids out of range are -1.

        Example:
            >>> tables = {"user": Table(10, 2), "item": Table(5, 2)}
            >>> group = TableGroup(tables, key=jax.random.key(0))
            >>> group.joined_ids({"user": [[3, 1]], "item": [4]})["2"].tolist()
            [3, 1, 14]
        """
        return {
            width: with_specs(
                partial(_joined_rows, tuple(one.part for one in call.values())),
                [one.argument.ids for one in call.values()],
                specs=PartitionSpec(None),
            )
            for width, call in self._calls(features, {}).items()
        }

    def parameters(self) -> dict[str, Float[Array, "rows width"]]:
        return self.layout.split({width: bag.weight for width, bag in self.joined.items()})

    def config(self) -> dict[str, Any]:
        return config_of(self, tables=self.layout.config(), dtype=self.dtype.name)

    def _replace_parameters(self, parameters: dict[str, Any]) -> Self:
        tables = {
            name: parameters[f"tables.{name}.weight"] for name, _ in self.layout.tables
        }
        joined = {
            width: replace_fields(self.joined[width], weight=weight)
            for width, weight in _joined(self.layout, tables).items()
        }
        return replace_fields(self, joined=joined)

    def _calls(
        self, features: Features, weights: Features
    ) -> dict[str, dict[str, "_Call"]]:
        """Return the checked arguments of each feature, for each joined table."""
        if not isinstance(features, Mapping):
            raise TypeError(f"features must be a dict, got {type(features).__name__}")
        self.layout.check_features(features)
        self.layout.check_features(weights, what="per_sample_weights")
        absent = [name for name in weights if name not in features]
        if absent:
            raise ValueError(
                f"per_sample_weights must be of features with ids, got {absent}"
            )
        calls: dict[str, dict[str, _Call]] = {width: {} for width in self.joined}
        for name, value in features.items():
            place = self.layout.features[name]
            one = FeatureIds.of(value, name)
            calls[place.key][name] = _call(name, place, one, weights.get(name))
        return calls


def _joined(layout: GroupLayout, tables: Mapping[str, Array]) -> dict[str, Array]:
    """Return the joined array of each width."""
    return {
        width: jnp.concatenate([
            tables[name] for name, place in layout.places.items() if place.key == width
        ])
        for width in layout.num_rows
    }


@dataclass(frozen=True)
class _Part:
    """Static properties of a feature in a call.

    Args:
        first: Number of rows before its table in the joined table.
        num_embeddings: Number of rows of its table.
        mode: Mode of its table.
        padding_idx: Padding id of its table.
        shape: Shape of its ids.
    """

    first: int
    num_embeddings: int
    mode: Mode | None
    padding_idx: int | None
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ids."""
        return int(np.prod(self.shape))


class _Argument(eqx.Module):
    """Arrays of a feature in a call."""

    ids: IdsArgument
    offsets: Integer[Any, " offsets"] | None
    weights: Real[Any, "*ids"] | None


@dataclass(frozen=True, eq=False)
class _Call:
    """Checked arguments of a feature."""

    part: _Part
    argument: _Argument


def _call(feature: str, place: TablePlace, one: FeatureIds, weights: Any) -> _Call:
    """Check the arguments of a feature, as far as the host can read them."""
    table = place.table
    ids = ids_argument(one.ids, table.num_embeddings, name=feature, bound=place.bound)
    shape, is_pooled, offsets = ids.ids.shape, table.mode is not None, one.offsets
    values = None if offsets is None else call_values(offsets)
    if offsets is None or values is not None:
        feature_bounds(feature, shape, values, is_pooled=is_pooled)
        if offsets is not None and not isinstance(offsets, jax.Array):
            offsets = np.asarray(offsets).astype(np.int32)
    else:
        offsets = traced_offsets(offsets, int(np.prod(shape)), name=f"offsets of {feature}")
        if offsets.ndim != 1 or not offsets.size or len(shape) != 1:
            raise ValueError(
                f"{feature} and its offsets must have 1 axis, "
                f"got shapes {shape} and {offsets.shape}"
            )
    if weights is not None:
        check_weighted(feature, place)
        name = f"per_sample_weights of {feature}"
        weights = checked_weights(shape, one.flat_weights(weights), name=name)
    part = _Part(
        place.first, table.num_embeddings, table.mode, table.padding_idx, tuple(shape)
    )
    return _Call(part, _Argument(ids, offsets if is_pooled else None, weights))


def _joined_ids(
    parts: tuple[_Part, ...], ids: list[IdsArgument]
) -> tuple[Int32[Array, " n"], Bool[Array, " n"] | None]:
    """Return the rows of flat ids in the joined table, and which of them are padding.

    Ids out of range are -1, which is no row of any table.
    """
    rows, padding = [jnp.zeros(0, jnp.int32)], [jnp.zeros(0, bool)]
    for part, one in zip(parts, ids, strict=True):
        flat = as_int32(jnp.asarray(one.ids)).reshape(-1)
        row = flat + part.first
        if not one.in_range:
            valid, _ = mask_out_of_range(flat, last=part.num_embeddings - 1)
            row = jnp.where(valid, row, -1)
        rows.append(row)
        is_padding = jnp.zeros(flat.shape, bool)
        if part.padding_idx is not None:
            is_padding = flat == part.padding_idx
        padding.append(is_padding)
    has_padding = any(part.padding_idx is not None for part in parts)
    return jnp.concatenate(rows), jnp.concatenate(padding) if has_padding else None


def _joined_rows(parts: tuple[_Part, ...], ids: list[IdsArgument]) -> Int32[Array, " n"]:
    """Return the rows of flat ids in the joined table; see :func:`_joined_ids`."""
    return _joined_ids(parts, ids)[0]


@partial(compiled, static_argnums=(0, 1))
def _look_up(
    parts: tuple[_Part, ...],
    options: LookupOptions,
    weight: Rows,
    arguments: tuple[_Argument, ...],
) -> tuple[Float[Array, "..."], ...]:
    """Return the vectors of each feature."""
    # Raises if the weight is in the state of an optimizer.
    columns = axis_specs(jnp.asarray(array_in(weight)))[1:]
    specs = tuple(
        PartitionSpec(*_lead_spec(part, argument), *columns)
        for part, argument in zip(parts, arguments, strict=True)
    )
    run = partial(_vectors, parts, options)
    return with_specs(run, weight, arguments, specs=specs)


def _lead_spec(part: _Part, argument: _Argument) -> Spec:
    """Return the mesh axes of a feature's vectors, without that of the columns."""
    ids = axis_specs(argument.ids.ids)
    if part.mode is None:
        return ids
    # Bags with offsets are one fewer than these.
    return (ids[0] if argument.offsets is None else None,)


def _vectors(
    parts: tuple[_Part, ...],
    options: LookupOptions,
    weight: Rows,
    arguments: tuple[_Argument, ...],
) -> tuple[Float[Array, "..."], ...]:
    """Return the vectors of each feature, with automatic axes of a mesh."""
    ids = [argument.ids for argument in arguments]
    joined, is_padding = _joined_ids(parts, ids)
    in_range = all(one.in_range for one in ids)
    checked = check_ids(IdsArgument(joined, in_range), weight, options)
    checked = checked._replace(is_padding=is_padding)
    rows = gather_rows(weight, checked, options)
    counted = checked.has_gradient
    if counted is None:
        counted = jnp.ones(joined.shape, bool)
    vectors, start = [], 0
    for part, argument in zip(parts, arguments, strict=True):
        own = slice(start, start + part.size)
        valid = None if checked.valid is None else checked.valid[own]
        vector, valid = _pool(part, argument, rows[own], counted[own], valid)
        vectors.append(nan_if_invalid(vector.astype(weight.dtype), valid))
        start += part.size
    return tuple(vectors)


def _pool(
    part: _Part,
    argument: _Argument,
    rows: Float[Array, "n width"],
    counted: Bool[Array, " n"],
    valid: Bool[Array, " n"] | None,
) -> tuple[Float[Array, "..."], Bool[Array, "..."] | None]:
    """Return the vectors of a feature, and which of them are valid; None for all."""
    shape, weights, width = part.shape, argument.weights, rows.shape[-1]
    if part.mode is None:
        valid = None if valid is None else valid.reshape(shape)
        return rows.reshape(*shape, width), valid
    if weights is not None:
        weights = jnp.asarray(weights).astype(rows.dtype)
    if argument.offsets is None:
        matrix = shape if len(shape) == 2 else (*shape, 1)
        vectors = MatrixBags(matrix[0]).pool(
            rows.reshape(*matrix, width),
            counted.reshape(matrix),
            weights=None if weights is None else weights.reshape(matrix),
            mode=part.mode,
        )
        return vectors, None if valid is None else valid.reshape(matrix).all(axis=1)
    bounds = bag_bounds(jnp.asarray(argument.offsets), part.size, include_last=True)
    bags = RaggedBags(bounds, part.size)
    vectors = bags.pool(rows, counted, weights=weights, mode=part.mode)
    is_complete = bags.valid & (bounds[-1] == part.size)
    all_valid = jnp.broadcast_to(is_complete, (bags.count,))
    return vectors, all_valid if valid is None else all_valid & ~bags.any(~valid)
