"""Groups of tables: many features looked up in many tables by one call.

Tables of one width are joined into one array, one after the other. A feature reads the
rows of its table, so its ids are increased by the number of rows before the table. All
features of one width are then bags of one table: one kernel call pools those that are
summed, averaged or not pooled, and one call those with a maximum. A vector that is not
pooled is the sum of one row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import numpy as np
from jaxtyping import Int64, Real

from .._array import compute_dtype
from .._check import ids_in_range, integers, not_negative, one_of, padding_index
from .bag import MODES, Mode
from .ragged import Bags, bag_bounds, counted_bags, weights_like


@dataclass(frozen=True)
class Table:
    """Sizes and features of one table of a group.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Width of each row.
        features: Names of the features that are looked up in the table; by default the name
            of the table.
        mode: ``"sum"``, ``"mean"`` or ``"max"``, defined in
            :mod:`firstlayer.embeddings.bag`; None returns a vector for each id.
        padding_idx: Padding id; negative counts from the end. Bags leave it out. Without
            bags, it reads its row and passes no gradient to it.

    Example:
        >>> Table(1000, 64, features=["clicked", "bought"], mode="mean").features
        ('clicked', 'bought')
    """

    num_embeddings: int
    embedding_dim: int
    _: KW_ONLY
    features: Sequence[str] = ()
    mode: Mode | None = "sum"
    padding_idx: int | None = None

    def __post_init__(self) -> None:
        rows = not_negative("num_embeddings", self.num_embeddings)
        not_negative("embedding_dim", self.embedding_dim)
        one_of("mode", self.mode, (*MODES, None))
        if isinstance(self.features, str):
            raise TypeError(f"features must be a list of names, got {self.features!r}")
        object.__setattr__(self, "features", tuple(self.features))
        object.__setattr__(self, "padding_idx", padding_index(self.padding_idx, rows))

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as plain values.

        Example:
            >>> Table(5000, 16, features=["clicked"]).to_dict()["features"]
            ['clicked']
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "features": list(self.features)}


@dataclass(frozen=True, eq=False)
class TableView:
    """One table of a group, for reading.

    Args:
        table: Sizes and features of the table.
        weight: Its rows, a view of the joined array. After an optimizer step, take it from
            the group again.
    """

    table: Table
    weight: Any


@dataclass(frozen=True)
class TablePlace:
    """Place of a table in a joined array.

    Args:
        name: Name of the table.
        table: Its sizes and features.
        key: Name of the joined array, the width of its rows.
        first: Number of rows before the table.
    """

    name: str
    table: Table
    key: str
    first: int

    @property
    def rows(self) -> slice:
        """Rows of the table in the joined array."""
        return slice(self.first, self.first + self.table.num_embeddings)

    @property
    def bound(self) -> str:
        """Name of the number of rows, for error messages."""
        return f"num_embeddings of table {self.name!r}"


@dataclass(frozen=True)
class GroupLayout:
    """Places of the tables of a group.

    Args:
        tables: Name and table, in order.

    Example:
        >>> tables = {"user": Table(10, 4), "item": Table(5, 4), "shop": Table(3, 2)}
        >>> layout = GroupLayout.of(tables)
        >>> layout.num_rows, layout.places["item"].first
        ({'4': 15, '2': 3}, 10)
    """

    tables: tuple[tuple[str, Table], ...]
    #: Place of each table, by name.
    places: dict[str, TablePlace] = field(init=False, repr=False, compare=False)
    #: Number of rows of each joined array, by its name.
    num_rows: dict[str, int] = field(init=False, repr=False, compare=False)
    #: Table of each feature, by the feature's name.
    features: dict[str, TablePlace] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places, features, num_rows = {}, {}, {}
        for name, table in self.tables:
            key = str(table.embedding_dim)
            place = TablePlace(name, table, key, num_rows.get(key, 0))
            num_rows[key] = place.rows.stop
            places[name] = place
            for feature in table.features:
                if feature in features:
                    raise ValueError(
                        f"a feature must be of one table, got {feature!r} in "
                        f"{features[feature].name!r} and {name!r}"
                    )
                features[feature] = place
        for attribute, value in (
            ("places", places),
            ("features", features),
            ("num_rows", num_rows),
        ):
            object.__setattr__(self, attribute, value)

    @staticmethod
    def of(tables: Mapping[str, Table | Mapping[str, Any]]) -> "GroupLayout":
        """Return the layout of tables, which may be dictionaries of their arguments."""
        if not isinstance(tables, Mapping):
            raise TypeError(f"tables must be a dict, got {type(tables).__name__}")
        named = []
        for name, table in tables.items():
            if not isinstance(name, str) or "." in name or not name:
                raise ValueError(f"a table needs a name without dots, got {name!r}")
            if isinstance(table, Mapping):
                table = Table(**table)
            if not isinstance(table, Table):
                raise TypeError(
                    f"tables[{name!r}] must be a Table, got {type(table).__name__}"
                )
            if not table.features:
                table = Table(**{**table.to_dict(), "features": (name,)})
            named.append((name, table))
        if not named:
            raise ValueError("tables must have a table, got none")
        return GroupLayout(tuple(named))

    def check_features(self, names: Iterable[str], *, what: str = "features") -> None:
        """Raise a ValueError if a name is not that of a feature."""
        unknown = [name for name in names if name not in self.features]
        if unknown:
            raise ValueError(f"{what} must be of {sorted(self.features)}, got {unknown}")

    def joined_names(self) -> dict[str, str]:
        """Return the name of each joined array's parameter, by its key."""
        return {key: f"joined.{key}.weight" for key in self.num_rows}

    def views(self, joined: Mapping[str, Any]) -> dict[str, TableView]:
        """Return each table with its rows of the joined arrays.

        Args:
            joined: Joined arrays by key.
        """
        return {
            name: TableView(place.table, joined[place.key][place.rows])
            for name, place in self.places.items()
        }

    def config(self) -> dict[str, Any]:
        """Return the tables as plain values, from which :meth:`of` builds the layout."""
        return {name: table.to_dict() for name, table in self.tables}

    def split(self, joined: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rows of each table as ``tables.{name}.weight``, not copied.

        Args:
            joined: Joined arrays by key.
        """
        return {
            f"tables.{name}.weight": joined[place.key][place.rows]
            for name, place in self.places.items()
        }


@dataclass(frozen=True, eq=False)
class FeatureIds:
    """Ids of one feature in a call.

    Args:
        ids: Ids; flat if there are offsets.
        offsets: Start of each bag and the end of the last, or None.
    """

    ids: Any
    offsets: Any | None = None

    @staticmethod
    def of(value: Any, feature: str) -> "FeatureIds":
        """Return the ids of ``(ids, offsets)``, of lists of ids, or of an array."""
        if isinstance(value, tuple):
            if len(value) != 2:
                raise ValueError(
                    f"{feature} must be ids or (ids, offsets), got {len(value)} values"
                )
            return FeatureIds(*value)
        if isinstance(value, list) and value and not np.isscalar(value[0]):
            parts = [integers(part, name=f"{feature}[{i}]") for i, part in enumerate(value)]
            for i, part in enumerate(parts):
                if part.ndim != 1:
                    raise ValueError(
                        f"{feature}[{i}] must have 1 axis, got shape {part.shape}"
                    )
            lengths = np.array([part.size for part in parts], np.int64)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            return FeatureIds(np.concatenate(parts), offsets)
        return FeatureIds(value)

    def flat_weights(self, weights: Any) -> Any:
        """Return the weights of the ids, with lists of lists joined like those of ids."""
        is_nested = isinstance(weights, list) and weights and not np.isscalar(weights[0])
        if self.offsets is None or not is_nested:
            return weights
        return np.concatenate([np.asarray(part) for part in weights])


def feature_bounds(
    feature: str, shape: tuple[int, ...], offsets: Any | None, *, is_pooled: bool
) -> Int64[np.ndarray, " ends"]:
    """Return the start of each bag in the flat ids of a feature, and the end of the last.

    Args:
        feature: Name of the feature, for error messages.
        shape: Shape of its ids.
        offsets: Start of each bag, and the end of the last; None for dense ids.
        is_pooled: Whether bags are pooled. Otherwise every id is a bag of its own.

    Example:
        >>> feature_bounds("clicked", (2, 3), None, is_pooled=True).tolist()
        [0, 3, 6]
    """
    if offsets is not None:
        name = f"offsets of {feature}"
        if len(shape) != 1:
            raise ValueError(f"{feature} with offsets must have 1 axis, got shape {shape}")
        bounds = bag_bounds(shape, offsets, include_last_offset=True, name=name)
        if bounds[-1] != shape[0]:
            raise ValueError(
                f"{name} must end with {shape[0]}, the number of ids, got {bounds[-1]}"
            )
        if is_pooled:
            return bounds
    elif is_pooled and len(shape) == 2:
        return bag_bounds(shape, None)
    elif is_pooled and len(shape) != 1:
        raise ValueError(f"{feature} must have 1 or 2 axes, got shape {shape}")
    return np.arange(int(np.prod(shape)) + 1)


def output_shape(
    place: TablePlace, shape: tuple[int, ...], offsets: Any | None
) -> tuple[int, ...]:
    """Return the shape of the vectors of a feature, from that of its ids and offsets."""
    width = place.table.embedding_dim
    if place.table.mode is None:
        return (*shape, width)
    bags = shape[0] if offsets is None else max(0, int(np.shape(offsets)[0]) - 1)
    return (bags, width)


@dataclass(frozen=True, eq=False)
class FeatureBags:
    """Bags of one feature among those of a :class:`JoinedLookup`.

    Args:
        feature: Name of the feature.
        bags: Its bags among those of the lookup.
        ids: Its flat ids among those of the lookup.
        shape: Shape of its vectors.
        padding: Indices of its vectors that are the padding row; None for bags.
        padding_row: Row of padding in the joined array.
    """

    feature: str
    bags: slice
    ids: slice
    shape: tuple[int, ...]
    padding: Int64[np.ndarray, " padding"] | None
    padding_row: int


@dataclass(frozen=True, eq=False)
class JoinedLookup:
    """Bags of a joined array that one kernel call pools.

    Args:
        key: Name of the joined array.
        mode: ``"sum"``, ``"mean"`` (of the bags marked so) or ``"max"``.
        bags: All bags.
        parts: Bags of each feature, in order.
    """

    key: str
    mode: Mode
    bags: Bags
    parts: tuple[FeatureBags, ...]


def joined_lookups(
    layout: GroupLayout,
    features: Mapping[str, FeatureIds],
    weights: Mapping[str, Real[Any, "*batch"]],
    *,
    dtype: Any,
) -> list[JoinedLookup]:
    """Check the arguments of a call and return its lookups.

    Args:
        layout: Layout of the group.
        features: Ids of each feature, as arrays of the host.
        weights: ``per_sample_weights`` of some features.
        dtype: Dtype of the tables; weights are cast to its compute dtype.

    Example:
        >>> layout = GroupLayout.of({"user": Table(10, 4), "item": Table(5, 4)})
        >>> features = {name: FeatureIds([[3, 1]]) for name in ("user", "item")}
        >>> (lookup,) = joined_lookups(layout, features, {}, dtype="float32")
        >>> lookup.bags.ids.tolist(), lookup.bags.bounds.tolist()
        ([3, 1, 13, 11], [0, 2, 4])
    """
    layout.check_features(features)
    layout.check_features(weights, what="per_sample_weights")
    absent = [name for name in weights if name not in features]
    if absent:
        raise ValueError(f"per_sample_weights must be of features with ids, got {absent}")
    checked: dict[tuple[str, bool], list[_CheckedFeature]] = {}
    for feature, value in features.items():
        place = layout.features[feature]
        one = _check_feature(feature, place, value, weights.get(feature), dtype=dtype)
        checked.setdefault((place.key, place.table.mode == "max"), []).append(one)
    return [_joined(key, parts, dtype=dtype) for (key, _), parts in checked.items()]


@dataclass(frozen=True, eq=False)
class _CheckedFeature:
    """Bags of a feature, with ids into its own table, and the number of all its ids."""

    feature: str
    place: TablePlace
    bags: Bags
    size: int
    shape: tuple[int, ...]


def _check_feature(
    feature: str, place: TablePlace, value: FeatureIds, weights: Any, *, dtype: Any
) -> _CheckedFeature:
    # A copy: another thread may change the ids after the check.
    ids = integers(value.ids, name=feature).copy()
    table = place.table
    ids = ids_in_range(ids, table.num_embeddings, name=feature, bound=place.bound)
    is_pooled = table.mode is not None
    bounds = feature_bounds(feature, ids.shape, value.offsets, is_pooled=is_pooled)
    flat = None
    if weights is not None:
        check_weighted(feature, place)
        weights = weights_like(ids, weights, name=f"per_sample_weights of {feature}")
        flat = weights.astype(compute_dtype(dtype)).reshape(-1)
    bags = counted_bags(ids.reshape(-1), bounds, flat, padding_idx=table.padding_idx)
    shape = output_shape(place, ids.shape, value.offsets)
    return _CheckedFeature(feature, place, bags, ids.size, shape)


def check_weighted(feature: str, place: TablePlace) -> None:
    """Raise a ValueError if a feature has weights but no bags."""
    if place.table.mode is None:
        raise ValueError(
            f"per_sample_weights must be of pooled features, got {feature!r}, "
            f"but table {place.name!r} has mode None"
        )


def _joined(key: str, features: list[_CheckedFeature], *, dtype: Any) -> JoinedLookup:
    ids = np.empty(sum(one.bags.ids.size for one in features), np.int64)
    bounds, weights, kept = [np.zeros(1, np.int64)], [], []
    parts, num_bags, num_counted, num_ids = [], 0, 0, 0
    is_weighted = any(one.bags.weights is not None for one in features)
    drops_padding = any(one.bags.kept is not None for one in features)
    for one in features:
        bags, place = one.bags, one.place
        own_ids = ids[num_counted : num_counted + bags.ids.size]
        np.add(bags.ids, place.first, out=own_ids)
        bounds.append(bags.bounds[1:] + num_counted)
        if is_weighted:
            ones = np.ones(bags.ids.size, compute_dtype(dtype))
            weights.append(ones if bags.weights is None else bags.weights)
        if drops_padding:
            own = np.arange(one.size) if bags.kept is None else bags.kept
            kept.append(own + num_ids)
        count = bags.bounds.size - 1
        padding = None
        if place.table.mode is None and place.table.padding_idx is not None:
            padding = np.flatnonzero(np.diff(bags.bounds) == 0)
        parts.append(
            FeatureBags(
                one.feature,
                slice(num_bags, num_bags + count),
                slice(num_ids, num_ids + one.size),
                one.shape,
                padding,
                place.first + (place.table.padding_idx or 0),
            )
        )
        num_bags += count
        num_counted += bags.ids.size
        num_ids += one.size
    modes = [one.place.table.mode for one in features]
    is_mean = None
    if "mean" in modes and set(modes) != {"mean"}:
        sizes = [part.bags.stop - part.bags.start for part in parts]
        is_mean = np.repeat([mode == "mean" for mode in modes], sizes)
    mode: Mode = "max" if "max" in modes else "mean" if "mean" in modes else "sum"
    joined = Bags(
        ids,
        np.concatenate(bounds),
        np.concatenate(weights) if is_weighted else None,
        np.concatenate(kept) if drops_padding else None,
        is_mean,
    )
    return JoinedLookup(key, mode, joined, tuple(parts))
