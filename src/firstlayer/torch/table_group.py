"""Groups of tables on torch: many features looked up in many tables by one call.

Eager calls on the CPU pool all features of one width by one kernel call, and their
gradients are one row gradient. Everywhere else, features are looked up one after the other
by operators.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..embeddings.row_gradient import GradientMemory
from ..embeddings.table_group import (
    FeatureIds,
    GroupLayout,
    JoinedLookup,
    Table,
    TablePlace,
    TableView,
    check_weighted,
    joined_lookups,
)
from ..files.layer_configs import config_of
from ._bags.pooling import pool_checked
from ._table.features import Features, array_ids, nested_like, read_features
from ._table.lookup import as_index
from ._table.torchrec_configs import configs_of, dtype_of, table_of
from ._tensors.dtypes import compute_dtype, dtype_name
from ._tensors.errors import check_ids, torch_errors
from ._tensors.memory import array_of, is_plain_cpu, kernel_eligible, tensor_of
from ._tensors.row_parameter import without_catch_up
from .bag import EmbeddingBag
from .functional import embedding, embedding_bag
from .optim.table_state import caught_up_rows


class TableGroup(nn.Module):
    """Looks many features up in many tables, with one kernel call for tables of one width.

    Features may share a table. Tables of one width are joined into one parameter
    (``joined["64"].weight``), which an optimizer trains as one table; the state dict and
    files have an entry for each table (``tables.user.weight``). Bags and their gradients
    are those of :class:`firstlayer.torch.EmbeddingBag`.

    Args:
        tables: :class:`Table` of each name.
        sparse: Make the gradients of the tables coalesced sparse tensors.
        device: Device of the tables.
        dtype: Dtype of all tables.

    Shape:
        - features: for each feature ``(batch, length)`` ids, one bag each; ``(batch,)`` for
          bags of one id; ``(ids, offsets)`` with ``(n,)`` ids and ``(batch + 1,)`` offsets,
          0 first and n last; a jagged nested tensor; a list of lists; or a TorchRec
          ``JaggedTensor``. Instead of a dictionary of features, a ``KeyedJaggedTensor``;
          its weights are ``per_sample_weights``, and keys that are not features of the
          group are left out. Any shape for a table with mode None.
        - per_sample_weights: as the ids
        - output: for each feature ``(batch, embedding_dim)``; for a table with mode None a
          vector for each id

    Example:
        >>> tables = {
        ...     "user": Table(100, 8),
        ...     "item": Table(50, 8, features=["clicked", "bought"], mode="mean"),
        ... }
        >>> group = TableGroup(tables, sparse=True)
        >>> vectors = group({"user": torch.tensor([3, 99]), "clicked": [[4, 2, 4], []]})
        >>> vectors["user"].shape, vectors["clicked"].shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
        >>> group({"bought": [[3, 70]]})
        Traceback (most recent call last):
        ...
        firstlayer...OutOfRange: bought[1] is 70, but num_embeddings of table 'item' is 50
    """

    def __init__(
        self,
        tables: Mapping[str, Table | Mapping[str, Any]],
        *,
        sparse: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        with torch_errors():
            self.layout = GroupLayout.of(tables)
        self.sparse = sparse
        #: Layer with the joined tables of each width.
        self.joined = nn.ModuleDict({
            key: JoinedTables(
                rows, int(key), mode="sum", sparse=sparse, device=device, dtype=dtype
            )
            for key, rows in self.layout.num_rows.items()
        })
        self._zero_padding()

    @classmethod
    def from_torchrec(
        cls, tables: Any, *, sparse: bool = False, device: Any = None
    ) -> Self:
        """Return a group like a collection of TorchRec.

        Args:
            tables: ``EmbeddingBagCollection`` or ``EmbeddingCollection``, whose tables are
                copied; or a list of their configs, whose ``init_fn`` draws the tables.
            sparse: Make the gradients of the tables coalesced sparse tensors.
            device: Device of the tables; None is the collection's.

        Example:
            >>> from types import SimpleNamespace
            >>> config = SimpleNamespace(  # in place of torchrec's EmbeddingConfig
            ...     name="item", num_embeddings=9, embedding_dim=2, feature_names=["buy"],
            ...     init_fn=nn.init.ones_, data_type=SimpleNamespace(value="FP32"),
            ... )
            >>> group = TableGroup.from_torchrec([config])
            >>> group({"buy": torch.tensor([3])})["buy"].tolist()
            [[1.0, 1.0]]
        """
        configs, weights = configs_of(tables)
        if weights and device is None:
            device = next(iter(weights.values())).device
        group = cls(
            {config.name: table_of(config) for config in configs},
            sparse=sparse,
            device=device,
            dtype=dtype_of(configs),
        )
        with torch.no_grad():
            for config in configs:
                own = group.tables[config.name].weight
                if weights is not None:
                    own.copy_(weights[config.name])
                elif not own.is_meta:
                    config.init_fn(own)
        return group

    @property
    def tables(self) -> dict[str, TableView]:
        """Each table with its ``weight``, a view of the joined parameter.

        Reading it catches up every stale row.
        """
        return self.layout.views({key: bag.weight for key, bag in self._bags.items()})

    def reset_parameters(self) -> None:
        """Draw the tables as torch does; padding rows become zero."""
        for bag in self._bags.values():
            bag.reset_parameters()
        self._zero_padding()

    def forward(
        self, features: Features, per_sample_weights: Features | None = None
    ) -> dict[str, Float[Tensor, "..."]]:
        """Return the vectors of each feature.

        Args:
            features: Ids of each feature.
            per_sample_weights: Factor for the row of each id, for some features.
        """
        device = next(iter(self._bags.values())).weight.device
        given = per_sample_weights or {}
        ids, weights = read_features(features, given, self.layout, device=device)
        vectors: dict[str, Tensor] = {}
        for key, bag in self._bags.items():
            own = {
                name: value
                for name, value in ids.items()
                if self.layout.features[name].key == key
            }
            if own:
                own_weights = {name: weights[name] for name in own if name in weights}
                vectors |= self._look_up(bag, own, own_weights)
        if not isinstance(features, Mapping):
            return {name: vectors[name] for name in ids}
        modes = {name: self.layout.features[name].table.mode for name in ids}
        return {
            name: nested_like(features[name], vectors[name], modes[name]) for name in ids
        }

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> config = TableGroup({"user": Table(100, 8)}).config()
            >>> config["tables"]["user"]["features"], config["dtype"]
            (['user'], 'float32')
        """
        dtype = dtype_name(next(iter(self._bags.values())).weight.dtype)
        return config_of(self, tables=self.layout.config(), dtype=dtype)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}=({table.num_embeddings}, {table.embedding_dim}, mode={table.mode!r})"
            for name, table in self.layout.tables
        )

    @property
    def _bags(self) -> dict[str, Any]:
        return dict(self.joined.items())

    def _look_up(
        self, bag: Any, ids: dict[str, FeatureIds], weights: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the vectors of the features of one joined table."""
        weight = bag.weight
        tensors = [x for one in ids.values() for x in (one.ids, one.offsets)]
        if (
            is_plain_cpu(*tensors, *weights.values())
            and kernel_eligible(weight)
            and weight.is_contiguous()
        ):
            with torch_errors():
                arrays = {name: array_ids(one) for name, one in ids.items()}
                numbers = {name: array_of(value) for name, value in weights.items()}
                dtype = dtype_name(compute_dtype(weight.dtype))
                lookups = joined_lookups(self.layout, arrays, numbers, dtype=dtype)
            vectors = {}
            for lookup in lookups:
                vectors |= _pool(bag, lookup, weights)
            return vectors
        bag._install_grad_hook(weight)
        return {
            name: _look_up_by_operators(
                bag, self.layout.features[name], name, one, weights.get(name)
            )
            for name, one in ids.items()
        }

    @torch.no_grad()
    def _zero_padding(self) -> None:
        for place in self.layout.places.values():
            weight = self._bags[place.key].weight
            if place.table.padding_idx is not None and not weight.is_meta:
                weight[place.first + place.table.padding_idx] = 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        joined = {key: bag.weight for key, bag in self._bags.items()}
        for name, weight in self.layout.split(joined).items():
            destination[prefix + name] = weight if keep_vars else weight.detach()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        joined = {key: bag.weight for key, bag in self._bags.items()}
        own = {prefix + name: view for name, view in self.layout.split(joined).items()}
        others = {name: value for name, value in state_dict.items() if name not in own}
        lists = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(others, prefix, local_metadata, strict, *lists)
        missing_keys.extend(name for name in own if strict and name not in state_dict)
        known = {name: state_dict[name] for name in own if name in state_dict}
        errors = [
            f"size mismatch for {name}: the file has {tuple(value.shape)}, "
            f"the table {tuple(own[name].shape)}."
            for name, value in known.items()
            if value.shape != own[name].shape
        ]
        error_msgs.extend(errors)
        if errors:
            return
        if local_metadata.get("assign_to_params_buffers", False):
            self._assign({**own, **known}, prefix)
            return
        with torch.no_grad():
            for name, value in known.items():
                own[name].copy_(value)

    def _assign(self, tables: dict[str, Tensor], prefix: str) -> None:
        """Replace the joined parameters by new ones with these tables."""
        for key, bag in self._bags.items():
            parts = [
                tables[f"{prefix}tables.{name}.weight"].detach()
                for name, place in self.layout.places.items()
                if place.key == key
            ]
            bag.weight = nn.Parameter(torch.cat(parts), bag.weight.requires_grad)
            bag._bind()


class JoinedTables(EmbeddingBag):
    """Tables of one width, one after the other. The group saves and loads its tables."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gradient_memory = GradientMemory()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        pass


def _pool(bag: Any, lookup: JoinedLookup, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the vectors of each feature of a lookup, pooled by the kernels."""
    bags, table = lookup.bags, bag.weight
    ids, padding = tensor_of(bags.ids), _padding_rows(lookup)
    factors = _joined_weights(lookup, weights, dtype=compute_dtype(table.dtype))
    if not bag.training and bag.reads_out_of_place(ids):
        rows = caught_up_rows(table, padding)
        table = caught_up_rows(table, ids)
        bags = replace(bags, ids=np.arange(bags.ids.size))
    else:
        bag.prepare_lookup(torch.cat([ids, padding]) if len(padding) else ids)
        with torch.no_grad(), without_catch_up():
            rows = table[padding]
    pooled = pool_checked(
        bags,
        table,
        weights=factors,
        mode=lookup.mode,
        sparse=bag.sparse,
        memory=bag.gradient_memory,
    )
    vectors, rows = {}, iter(rows)
    # One split, whose backward concatenates; slices would add up arrays of every bag.
    sizes = [part.bags.stop - part.bags.start for part in lookup.parts]
    for part, own in zip(lookup.parts, pooled.split(sizes), strict=True):
        if part.padding is not None:
            index = tensor_of(part.padding)
            own = own.index_copy(0, index, next(rows).expand(len(index), -1))
        vectors[part.feature] = own.reshape(part.shape)
    return vectors


def _padding_rows(lookup: JoinedLookup) -> Tensor:
    """Return the padding row of each part that shows it."""
    rows = [part.padding_row for part in lookup.parts if part.padding is not None]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _joined_weights(
    lookup: JoinedLookup, weights: dict[str, Tensor], *, dtype: torch.dtype
) -> Tensor | None:
    """Return the factor of each flat id of a lookup, or None if there are none."""
    if lookup.bags.weights is None:
        return None
    return torch.cat([
        weights[part.feature].reshape(-1).to(dtype)
        if part.feature in weights
        else torch.ones(part.ids.stop - part.ids.start, dtype=dtype, device="cpu")
        for part in lookup.parts
    ])


def _look_up_by_operators(
    bag: Any, place: TablePlace, feature: str, one: FeatureIds, weights: Tensor | None
) -> Tensor:
    """Return the vectors of one feature."""
    table, padding_idx = place.table, None
    ids = as_index(one.ids, name=feature).long()
    check_ids(ids, table.num_embeddings, name=feature, bound=place.bound)
    # An id out of range would be a row of another table. The new id is out of range.
    is_row = (ids >= 0) & (ids < table.num_embeddings)
    rows = torch.where(is_row, ids + place.first, bag.num_embeddings)
    if table.padding_idx is not None:
        padding_idx = place.first + table.padding_idx
    if table.mode is None:
        if weights is not None:
            with torch_errors():
                check_weighted(feature, place)
        return embedding(rows, bag.weight, padding_idx, sparse=bag.sparse)
    if one.offsets is None and rows.dim() == 1:
        rows = rows[:, None]
        weights = None if weights is None else weights[:, None]
    return embedding_bag(
        rows,
        bag.weight,
        one.offsets,
        mode=table.mode,
        sparse=bag.sparse,
        per_sample_weights=weights,
        include_last_offset=one.offsets is not None,
        padding_idx=padding_idx,
    )
