"""Bags of a sharded table. If rows are sharded, the ranks that own the rows pool them.

Sums and means: each rank sends the ids of its bags to their owners, and gets the sum of
each bag's rows from each owner. Maxima, and gradients that are divided by the number of
times an id occurs, need the rows themselves, which are sent once for each distinct id.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Integer, Real
from torch import Tensor

from ...embeddings.bag import Mode, divide_or_zero
from ...embeddings.ragged import bag_indices, flatten_bags
from .._table.lookup import checked_padding_idx
from .._tensors.dtypes import HALF, compute_dtype, dtype_name
from .._tensors.errors import check_tensor, torch_errors
from .._tensors.memory import array_of
from .._tensors.row_parameter import without_catch_up
from ..bag import EmbeddingBag
from ..functional import embedding_bag, flat_bags
from ..optim.table_state import catch_up, reads_out_of_place
from .collectives import sum_gradient_over_ranks, sum_over_ranks
from .exchange import ARGUMENT_ERRORS, Route
from .gradient import with_averaged_gradient
from .module import ShardedTableModule
from .rows import ShardedRowsModule

NO_WEIGHTS, CONSTANT_WEIGHTS, TRAINED_WEIGHTS = range(3)


class TorchBags(NamedTuple):
    """Concatenated bags on the device of the table, without padding.

    Args:
        ids: Ids that count.
        bags: Bag of each.
        bounds: Start of each bag, and the end of the last.
        weights: Factor of each id in the compute dtype, or None for 1.
    """

    ids: Integer[Tensor, " n"]
    bags: Integer[Tensor, " n"]
    bounds: Integer[Tensor, " ends"]
    weights: Float[Tensor, " n"] | None

    @property
    def num_bags(self) -> int:
        """Number of bags."""
        return len(self.bounds) - 1

    def subset(self, places: Integer[Tensor, " m"]) -> "TorchBags":
        """Return the bags with some of their ids, in the order of ``places``."""
        weights = None if self.weights is None else self.weights[places]
        return TorchBags(self.ids[places], self.bags[places], self.bounds, weights)


class ShardedBags(ShardedTableModule, EmbeddingBag):
    """Base class of layers that pool rows of a table, of which each rank has a part."""

    @torch.compiler.disable
    def forward(
        self,
        input: Integer[Tensor, "*batch"],
        offsets: Integer[Tensor, " bags"] | None = None,
        per_sample_weights: Real[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "bags embedding_dim"]:
        """Return the pooled rows of each bag. All ranks must call it.

        Args:
            input: Ids: one row for each bag, or 1-D with ``offsets``.
            offsets: Start of each bag in 1-D ids.
            per_sample_weights: Factor for the row of each id; None is 1.
        """
        self.check_wrappers()
        given = [self._to_host(x) for x in (input, offsets, per_sample_weights)]
        error, bags = None, self._no_bags()
        try:
            bags = self._flatten(*given)
        except ARGUMENT_ERRORS as caught:
            error = caught
        if self.has_replicated_ids:
            self.raise_together(error)
        pooled = self._pool(bags, error)
        return self._to_output_device(pooled.to(self.weight.dtype))

    def _pool(self, bags: TorchBags, error: Exception | None) -> Tensor:
        """Return the pooled rows of each bag; raise the error of any rank.

        Args:
            bags: Bags of this rank.
            error: Error in the arguments of this rank, or None.
        """
        raise NotImplementedError

    def _flatten(self, ids: Any, offsets: Any, weights: Any) -> TorchBags:
        """Return the checked bags of a call."""
        include_last_offset = self.include_last_offset
        check_tensor(ids, name="ids")
        if ids.is_nested:
            ids, offsets, weights = flat_bags(ids, weights)
            include_last_offset = True
        dtype = compute_dtype(self.weight.dtype)
        with torch_errors():
            bags = flatten_bags(
                array_of(ids.cpu()),
                None if offsets is None else array_of(offsets.cpu()),
                num_embeddings=self.num_embeddings,
                weights=None if weights is None else array_of(weights.detach().cpu()),
                padding_idx=checked_padding_idx(self.padding_idx, self.num_embeddings),
                include_last_offset=include_last_offset,
                dtype=dtype_name(dtype),
            )
        device = self.weight.device
        flat, bounds = (torch.tensor(x, device=device) for x in (bags.ids, bags.bounds))
        if weights is not None:
            # Not the weights of flatten_bags, which have no gradient.
            weights = weights.reshape(-1).to(dtype)
            if bags.kept is not None:
                weights = weights[torch.tensor(bags.kept, device=device)]
        steps = torch.arange(len(flat), device=device)
        return TorchBags(flat, bag_indices(bounds, steps), bounds, weights)

    def _no_bags(self) -> TorchBags:
        """Return the bags of a rank whose arguments are wrong."""
        none = torch.zeros(0, dtype=torch.int64, device=self.weight.device)
        return TorchBags(none, none, none.new_zeros(1), None)

    def _pool_part(
        self,
        ids: Tensor,
        counts: Tensor,
        weights: Tensor | None,
        *,
        mode: Mode,
        read: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "bags width"]:
        """Pool rows of this rank's part of the table, in the compute dtype.

        Args:
            ids: Rows, counted from the first row of this rank.
            counts: Number of rows of each bag.
            weights: Factor of each row, or None for 1.
            mode: ``"sum"``, ``"mean"`` or ``"max"``.
            read: Returns rows of this part in the compute dtype.
        """
        offsets, weight = segment_bounds(counts), self.weight
        in_place = not reads_out_of_place(weight, ids, training=self.training)
        options: dict[str, Any] = {
            "mode": mode,
            "per_sample_weights": weights,
            "include_last_offset": True,
        }
        if not in_place or weight.dtype in HALF:
            places = torch.arange(len(ids), device=ids.device)
            return embedding_bag(places, read(ids), offsets, **options)
        catch_up(weight, ids)
        self._install_grad_hook(weight)
        with without_catch_up():
            return embedding_bag(
                ids,
                with_averaged_gradient(weight, self.average),
                offsets,
                self.max_norm,
                self.norm_type,
                sparse=self.sparse,
                **options,
            )


class ShardedEmbeddingBag(ShardedRowsModule, ShardedBags):
    """Looks up rows and pools them; each rank has some of the rows.

    Made by :func:`firstlayer.torch.sharding.shard_rows`.
    """

    @property
    def num_counts(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Numbers that a lookup exchanges with each rank before it starts."""
        return 1 if self.fetches_rows else 3

    @property
    def fetches_rows(self) -> bool:
        """Whether rows are sent and not pooled vectors."""
        return self.mode == "max" or self.scale_grad_by_freq

    def _pool(self, bags: TorchBags, error: Exception | None) -> Tensor:
        if self.fetches_rows:
            return self._pool_rows(bags, error)
        if self.has_replicated_ids:
            return self._pool_own(bags)
        return self._pool_at_owners(bags, error)

    def _pool_rows(self, bags: TorchBags, error: Exception | None) -> Tensor:
        """Pool rows that have been fetched; raise the error of any rank."""
        unique, index = self.unique_rows(bags.ids, error)
        return embedding_bag(
            index,
            unique,
            bags.bounds,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=bags.weights,
            include_last_offset=True,
        )

    def _pool_own(self, bags: TorchBags) -> Tensor:
        """Pool the rows of this rank, and sum over ranks."""
        start, stop = self.shard.bounds
        is_own = (bags.ids >= start) & (bags.ids < stop)
        shared = bags
        if bags.weights is not None:
            weights = sum_gradient_over_ranks(bags.weights, self.exchange)
            shared = bags._replace(weights=weights)
        own = shared.subset(is_own.nonzero()[:, 0])
        counts = torch.bincount(own.bags, minlength=own.num_bags)
        sums = self._sum_owned(own.ids - start, counts, own.weights)
        return _divided(sum_over_ranks(sums, self.exchange), bags, self.mode)

    def _pool_at_owners(self, bags: TorchBags, error: Exception | None) -> Tensor:
        """Have the owners of the rows pool them, and sum what each returns."""
        exchange, layout = self.exchange, self.shard.layout
        owners = bags.ids // layout.chunk
        order = owners.argsort(stable=True)
        ordered, owners = bags.subset(order), owners[order]
        # Ids of one bag with one owner are a segment. Its sum is sent back.
        segments, lengths = torch.unique_consecutive(
            owners * max(1, bags.num_bags) + ordered.bags, return_counts=True
        )
        num_ids = torch.bincount(owners, minlength=layout.ranks).tolist()
        owners = segments // max(1, bags.num_bags)
        num_segments = torch.bincount(owners, minlength=layout.ranks).tolist()
        kind = kind_of_weights(bags.weights)
        pairs = zip(num_ids, num_segments, strict=True)
        received = self.exchange_counts([[*pair, kind] for pair in pairs], error)
        ids_route = Route(exchange, num_ids, [each[0] for each in received])
        route = Route(exchange, num_segments, [each[1] for each in received])
        weights, kind = ordered.weights, max(each[2] for each in received)
        weights = weights_of_kind(weights, kind, like=order, dtype=self.weight.dtype)
        if weights is not None:
            weights = ids_route.send_values(weights, kind="ids")
        ids = ids_route.send(ordered.ids, kind="ids") - self.shard.bounds[0]
        counts = route.send(lengths.to(torch.int32), kind="ids")
        sums = self._sum_owned(ids, counts.long(), weights)
        sums = route.reverse.send_values(sums)
        return _divided(_sum_segments(sums, segments, bags), bags, self.mode)

    def _sum_owned(
        self, ids: Tensor, counts: Tensor, weights: Tensor | None
    ) -> Float[Tensor, "segments embedding_dim"]:
        return self._pool_part(ids, counts, weights, mode="sum", read=self.owned_rows)


def kind_of_weights(weights: Tensor | None) -> int:
    """Return which weights a rank has, so that all send the same."""
    if weights is None:
        return NO_WEIGHTS
    is_trained = weights.requires_grad and torch.is_grad_enabled()
    return TRAINED_WEIGHTS if is_trained else CONSTANT_WEIGHTS


def weights_of_kind(
    weights: Tensor | None, kind: int, *, like: Tensor, dtype: torch.dtype
) -> Float[Tensor, " n"] | None:
    """Return the weights of a rank as all ranks send them; None if none has any.

    Args:
        weights: Weights of this rank, or None for ones.
        kind: The largest :func:`kind_of_weights` of all ranks.
        like: Tensor with an entry for each weight.
        dtype: Dtype of the table.
    """
    if kind == NO_WEIGHTS:
        return None
    if weights is None:
        weights = torch.ones_like(like, dtype=compute_dtype(dtype))
    if kind == TRAINED_WEIGHTS and not weights.requires_grad:
        # All ranks must send gradients back.
        weights = weights.detach().requires_grad_()
    return weights


def segment_bounds(counts: Integer[Tensor, " n"]) -> Integer[Tensor, " ends"]:
    """Return the start of each segment, and the end of the last."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _sum_segments(
    sums: Float[Tensor, "segments width"],
    segments: Integer[Tensor, " segments"],
    bags: TorchBags,
) -> Float[Tensor, "bags width"]:
    """Return the sum of each bag's segments, in the order of the ranks."""
    bag = segments % max(1, bags.num_bags)
    counts = torch.bincount(bag, minlength=bags.num_bags)
    order = bag.argsort(stable=True)
    return embedding_bag(
        order, sums, segment_bounds(counts), mode="sum", include_last_offset=True
    )


def _divided(
    sums: Float[Tensor, "bags width"], bags: TorchBags, mode: str
) -> Float[Tensor, "bags width"]:
    """Return sums or means of bags."""
    if mode == "sum":
        return sums
    factors = bags.weights
    if factors is None:
        factors = torch.ones(len(bags.ids), dtype=sums.dtype, device=sums.device)
    totals = sums.new_zeros(bags.num_bags).index_add(0, bags.bags, factors)
    return divide_or_zero(sums, totals[:, None])
