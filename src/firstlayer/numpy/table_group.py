"""Groups of tables on NumPy: many features looked up in many tables by one call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import check_table, float_dtype
from ..embeddings.bag import pool_ragged, table_gradient, weights_gradient
from ..embeddings.init import Init, Seed, initial_table
from ..embeddings.row_gradient import RowGradient
from ..embeddings.table_group import (
    FeatureBags,
    FeatureIds,
    GroupLayout,
    JoinedLookup,
    Table,
    TableView,
    joined_lookups,
)
from ..files.layer_configs import config_of
from ._module import Module, checked_gradient
from .bag import EmbeddingBag

Features = Mapping[str, Any]


class TableGroup(Module):
    """Looks many features up in many tables, with one kernel call for tables of one width.

    Features may share a table. Tables of one width are joined into one array, which a row
    optimizer trains as one table; :meth:`state_dict` and files have an entry for each table
    (``tables.user.weight``). Bags and their gradients are those of
    :class:`firstlayer.numpy.EmbeddingBag`.

    Args:
        tables: :class:`Table` of each name.
        init: Initial values of each table; see
            :func:`firstlayer.embeddings.init.initial_table`.
        dtype: Dtype of all tables: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - features: for each feature ``(batch, length)`` ids, one bag each; ``(batch,)`` for
          bags of one id; ``(ids, offsets)`` with ``(n,)`` ids and ``(batch + 1,)`` offsets,
          0 first and n last; or a list of lists. Any shape for a table with mode None.
        - per_sample_weights: as the ids
        - output: for each feature ``(batch, embedding_dim)``; for a table with mode None a
          vector for each id

    Example:
        >>> tables = {
        ...     "user": Table(100, 8),
        ...     "item": Table(50, 8, features=["clicked", "bought"], mode="mean"),
        ... }
        >>> group = TableGroup(tables, rng=0)
        >>> vectors = group({"user": [3, 99], "clicked": [[4, 2, 4], []]})
        >>> vectors["user"].shape, vectors["clicked"].shape
        ((2, 8), (2, 8))
        >>> group({"bought": [[3, 70]]})
        Traceback (most recent call last):
        ...
        IndexError: bought[1] is 70, but num_embeddings of table 'item' is 50
    """

    def __init__(
        self,
        tables: Mapping[str, Table | Mapping[str, Any]],
        *,
        init: Init = "normal",
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.layout, rng = GroupLayout.of(tables), np.random.default_rng(rng)
        #: Layer with the joined tables of each width.
        self.joined: dict[str, EmbeddingBag] = {}
        arrays = {
            key: np.empty((rows, int(key)), float_dtype(dtype))
            for key, rows in self.layout.num_rows.items()
        }
        for place in self.layout.places.values():
            weight, table = arrays[place.key][place.rows], place.table
            weight[...] = initial_table(weight.shape, init=init, rng=rng, dtype=dtype)
            if table.padding_idx is not None:
                weight[table.padding_idx] = 0
        for key, array in arrays.items():
            self.joined[key] = EmbeddingBag(weight=array, mode="sum")

    @property
    def tables(self) -> dict[str, TableView]:
        """Each table with its ``weight``. Reading it catches up every stale row."""
        return self.layout.views({key: bag.weight for key, bag in self.joined.items()})

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tables and of the output."""
        return next(iter(self.joined.values())).dtype

    def __call__(
        self, features: Features, per_sample_weights: Features | None = None
    ) -> dict[str, Float[np.ndarray, "..."]]:
        """Return the vectors of each feature.

        Args:
            features: Ids of each feature.
            per_sample_weights: Factor for the row of each id, for some features.
        """
        vectors: dict[str, np.ndarray] = {}
        for lookup in self._lookups(features, per_sample_weights or {}):
            call = _Call.of(self.joined[lookup.key], lookup, copy=False)
            vectors |= call.vectors
        return {name: vectors[name] for name in features}

    def vjp(
        self, features: Features, per_sample_weights: Features | None = None
    ) -> tuple[dict[str, np.ndarray], Callable[[Features], dict[str, Any]]]:
        """Return the vectors and their pullback.

        The pullback takes the gradients of the features' vectors; one that is left out is
        zero. It returns the row gradients of the joined tables
        (``"joined.{width}.weight"``), and those of ``"per_sample_weights"`` by feature if
        they were given.

        Example:
            >>> group = TableGroup({"user": Table(10, 2), "item": Table(5, 2)}, rng=0)
            >>> vectors, pull = group.vjp({"user": [3], "item": [4]})
            >>> gradient = pull({"item": np.ones((1, 2))})["joined.2.weight"]
            >>> gradient.ids.tolist(), gradient.values[:, 0].tolist()
            ([3, 14], [0.0, 1.0])
        """
        weights = per_sample_weights or {}
        calls = []
        for lookup in self._lookups(features, weights):
            bag = self.joined[lookup.key]
            calls.append(_Call.of(bag, lookup, copy=lookup.bags.weights is not None))
        vectors = {name: value for call in calls for name, value in call.vectors.items()}
        vectors = {name: vectors[name] for name in features}

        def pull(dy: Features) -> dict[str, Any]:
            unknown = [name for name in dy if name not in vectors]
            if unknown:
                raise ValueError(f"dy must be of {sorted(vectors)}, got {unknown}")
            names, gradients, dweights = self.layout.joined_names(), {}, {}
            for call in calls:
                gradient, flat = call.gradients(dy)
                name = names[call.lookup.key]
                known = gradients.get(name)
                gradients[name] = gradient if known is None else known + gradient
                for part in call.lookup.parts:
                    if flat is not None and part.feature in weights:
                        own = flat[part.ids]
                        is_dense = np.size(weights[part.feature]) == own.size
                        shape = np.shape(weights[part.feature]) if is_dense else own.shape
                        dweights[part.feature] = own.reshape(shape)
            return gradients | ({"per_sample_weights": dweights} if weights else {})

        return vectors, pull

    def _lookups(self, features: Features, weights: Features) -> list[JoinedLookup]:
        if not isinstance(features, Mapping):
            raise TypeError(f"features must be a dict, got {type(features).__name__}")
        ids = {name: FeatureIds.of(value, name) for name, value in features.items()}
        weights = {
            name: ids[name].flat_weights(value) if name in ids else value
            for name, value in weights.items()
        }
        return joined_lookups(self.layout, ids, weights, dtype=self.dtype)

    def parameters(self) -> dict[str, np.ndarray]:
        names = self.layout.joined_names()
        return {names[key]: bag.weight for key, bag in self.joined.items()}

    def state_arrays(self) -> dict[str, np.ndarray]:
        return self.layout.split({key: bag.weight for key, bag in self.joined.items()})

    def embeddings(self) -> dict[str, Any]:
        names = self.layout.joined_names()
        return {names[key]: bag for key, bag in self.joined.items()}

    def config(self) -> dict[str, Any]:
        return config_of(self, tables=self.layout.config(), dtype=self.dtype.name)


@dataclass(frozen=True, eq=False)
class _Call:
    """One pooled lookup of a call.

    Args:
        lookup: The lookup.
        rows: Array that was read, the joined table or a copy of its rows.
        ids: Rows of ``rows`` that were pooled.
        pooled: Vector of each bag.
        winners: Indices of the maxima, for mode ``"max"``.
    """

    lookup: JoinedLookup
    rows: np.ndarray
    ids: np.ndarray
    pooled: np.ndarray
    winners: np.ndarray | None

    @staticmethod
    def of(bag: EmbeddingBag, lookup: JoinedLookup, *, copy: bool) -> "_Call":
        """Look the bags up.

        Args:
            bag: Layer with the joined tables.
            lookup: The bags.
            copy: Whether to copy the rows, so that they may change before the pullback.
        """
        read = lookup.bags.ids
        fills = [part for part in lookup.parts if part.padding is not None]
        padding = np.array([part.padding_row for part in fills], np.int64)
        bag.catch_up(np.concatenate([read, padding]) if fills else read)
        table = check_table(bag.stored_weight)
        rows, ids = table, read
        if copy:
            unique, ids = np.unique(read, return_inverse=True)
            rows = table[unique]
        bags = replace(lookup.bags, ids=ids)
        pooled, winners = pool_ragged(rows, bags, mode=lookup.mode)
        for part in fills:
            pooled[part.bags][part.padding] = table[part.padding_row]
        return _Call(lookup, rows, ids, pooled, winners)

    @property
    def vectors(self) -> dict[str, np.ndarray]:
        """Vectors of each feature."""
        return {
            part.feature: self.pooled[part.bags].reshape(part.shape)
            for part in self.lookup.parts
        }

    def gradients(self, dy: Features) -> tuple[RowGradient, np.ndarray | None]:
        """Return the gradient of the table, and of the weight of each flat id if any."""
        d = np.zeros(self.pooled.shape, compute_dtype(self.pooled.dtype))
        for part in self.lookup.parts:
            if part.feature in dy:
                own = _checked_gradient(dy[part.feature], part)
                d[part.bags] = own.reshape(-1, self.rows.shape[1])
        bags, mode, winners = self.lookup.bags, self.lookup.mode, self.winners
        gradient = table_gradient(bags, d, mode=mode, winners=winners)
        if bags.weights is None:
            return gradient, None
        read = replace(bags, ids=self.ids)
        counted = weights_gradient(self.rows, read, dy=d, mode=mode, winners=winners)
        flat = np.zeros(self.lookup.parts[-1].ids.stop, counted.dtype)
        flat[slice(None) if bags.kept is None else bags.kept] = counted
        return gradient, flat


def _checked_gradient(dy: Any, part: FeatureBags) -> np.ndarray:
    return checked_gradient(dy, part.shape, name=f"dy[{part.feature!r}]")
