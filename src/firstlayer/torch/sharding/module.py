"""Base class of sharded layers: their parameter, initial values and state dict."""

import weakref
from typing import Any, NoReturn

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch import distributed as dist
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from .._table.grad_hook import coalesce_gradient, install_grad_hook
from .._table.host import HostTableModule
from .._table.lookup import as_index, checked_padding_idx
from .._table.module import tied_logits, write_padding_row
from .._tensors.errors import WrongValue, check_ids, check_tensor
from .._tensors.row_parameter import without_catch_up
from .._tensors.shard import TableShard, shard_of
from .._tensors.shard_tensor import mark_gradient, mark_shard
from ..optim.table_state import catch_up
from ..token import Embedding
from .exchange import ARGUMENT_ERRORS, Exchange
from .gradient import GradientAverage, with_averaged_gradient

# Rows that are drawn from one seed, so that initial values do not depend on the ranks.
BLOCK = 1024


class ShardedWeight(nn.Module):
    """Base class of modules whose ``weight`` is a part of a table.

    State dicts have the whole table as a DTensor, and whole tables can be loaded.
    """

    shard: TableShard

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key = f"{prefix}weight"
        destination[key] = self.shard.to_dtensor(destination[key].detach())

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        key, errors = f"{prefix}weight", args[-1]
        given = state_dict.get(key)
        if given is not None:
            if tuple(given.shape) != self.shard.shape:
                errors.append(
                    f"size mismatch for {key}: the shape in the checkpoint is "
                    f"{tuple(given.shape)}, that of the table {self.shard.shape}"
                )
                return
            state_dict = {**state_dict, key: self.shard.to_local(given, name=key)}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class ShardedTableModule(ShardedWeight, HostTableModule):
    """Base class of layers of which each rank has a part of the table.

    ``weight`` is an ordinary parameter with this rank's part. ``num_embeddings``,
    ``embedding_dim`` and ``padding_idx`` are those of the whole table.
    """

    #: Whether every rank looks up the same ids.
    has_replicated_ids: bool
    #: Numbers that a lookup exchanges with each rank before it starts.
    num_counts: int = 1
    exchange: Exchange
    average: GradientAverage

    def distribute(self, shard: TableShard, *, has_replicated_ids: bool) -> None:
        """Keep this rank's part of the table.

        Args:
            shard: The part.
            has_replicated_ids: Whether every rank looks up the same ids.
        """
        self.shard, self.has_replicated_ids = shard, has_replicated_ids
        self.exchange = Exchange(shard.group)
        replica_group = shard.replica_group
        replicas = None if replica_group is None else Exchange(replica_group)
        batches = shard.num_replicas if has_replicated_ids else shard.mesh.size()
        self.average = GradientAverage(batches, replicas)
        weight = self.weight
        weight.grad = None
        # In place, so that optimizers and tied layers keep their parameter.
        weight.data = shard.part(weight.detach()).clone(
            memory_format=torch.contiguous_format
        )
        self._bind()

    def reset_parameters(self) -> None:
        """Draw the table as torch does; the padding row becomes zero.

        The values do not depend on the number of ranks. All ranks must call it.
        """
        self.draw_rows(1.0)
        self._fill_padding_idx_with_zero()

    @torch.no_grad()
    def draw_rows(self, std: float) -> None:
        """Draw the table from a normal distribution, as :meth:`reset_parameters` does.

        Args:
            std: Standard deviation.
        """
        weight, (first, stop) = self.weight, self.shard.row_bounds
        seed = torch.randint(2**62, (1,), device="cpu").to(weight.device)
        if weight.is_meta:
            return
        for axis in range(self.shard.mesh.ndim):
            dist.broadcast(seed, group=self.shard.mesh.get_group(axis), group_src=0)
        generator = torch.Generator(weight.device)
        for start in range(first - first % BLOCK, stop, BLOCK):
            entropy = np.random.SeedSequence([int(seed), start])
            generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> 1))
            block = torch.empty(
                (BLOCK, self.embedding_dim), dtype=weight.dtype, device=weight.device
            )
            block.normal_(0.0, std, generator=generator)
            lo, hi = max(start, first), min(start + BLOCK, stop)
            rows = block[lo - start : hi - start]
            with without_catch_up():
                weight[lo - first : hi - first] = self._own_columns(rows)

    def check_wrappers(self) -> None:
        """Raise if a wrapper of torch treats this rank's part as a whole parameter.

        Such a wrapper has written rows of another rank to it, or divided it once more.
        """
        weight = self._parameters.get("weight")
        if shard_of(weight) is None:
            raise RuntimeError(
                "the weight of a sharded table was replaced; call "
                "fully_shard(model, ignored_params=sharded_parameters(model))"
            )
        wrapper: Any = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None and any(p is weight for p in wrapper._module_parameters):
            raise RuntimeError(
                "DistributedDataParallel has written rank 0's part of a sharded table to "
                "all ranks; name the table in _set_params_and_buffers_to_ignore_for_model"
            )

    def prepare_lookup(self, ids: Integer[Tensor, "*batch"]) -> None:
        """Do nothing: the owners of the rows catch them up."""

    def reads_out_of_place(self, ids: Any) -> bool:
        """Return False: the owners of the rows decide."""
        return False

    def prefetch(self, ids: Integer[Tensor, "*batch"]) -> None:
        """Do nothing: other ranks have most of the rows."""

    def set_padding(self, value: Float[Tensor, " embedding_dim"] | float) -> None:
        """Write a vector or a number to the padding row, on the ranks that have it."""
        padding_idx = checked_padding_idx(self.padding_idx, self.num_embeddings)
        if padding_idx is None:
            raise WrongValue("set_padding needs a layer with padding_idx, got None")
        row = torch.as_tensor(value, device=self.weight.device)
        if row.shape not in ((), (self.embedding_dim,)):
            raise WrongValue(
                f"value must be a number or have shape {(self.embedding_dim,)}, "
                f"got {tuple(row.shape)}"
            )
        if self._own_padding is not None:
            write_padding_row(
                self.weight, self._own_padding, self._own_columns(row) if row.dim() else row
            )

    def resize(self, num_embeddings: int, **options: Any) -> NoReturn:
        """Raise TypeError: resize a table before it is sharded."""
        raise TypeError("a sharded table cannot be resized; resize it before shard_rows")

    def _checked_ids(self, ids: Any) -> Integer[Tensor, " n"]:
        """Return flat int64 ids in range, or raise."""
        check_tensor(ids, name="ids")
        check_ids(ids, self.num_embeddings)
        index = as_index(ids)
        if not index.is_cpu:
            # The values on a device are read only here.
            check_ids(index.cpu(), self.num_embeddings)
        return index.reshape(-1).to(torch.int64)

    def ids_or_error(self, ids: Any) -> tuple[Integer[Tensor, " n"], Exception | None]:
        """Return flat ids in range; or none, and the error that all ranks raise.

        Args:
            ids: Ids of any shape.
        """
        try:
            return self._checked_ids(ids), None
        except ARGUMENT_ERRORS as error:
            return torch.zeros(0, dtype=torch.int64, device=self.weight.device), error

    def announce(self, error: Exception) -> None:
        """Raise an error of this rank on all ranks, which look up rows in this call.

        Args:
            error: Error in the arguments of a layer with this table.
        """
        if self.has_replicated_ids:
            self.raise_together(error)
        else:
            self.exchange_counts([[0] * self.num_counts] * self.exchange.size, error)

    def exchange_counts(
        self, counts: list[list[int]], error: Exception | None
    ) -> list[list[int]]:
        """Return the numbers that each rank has for this one, or raise an error on all.

        Args:
            counts: Numbers for each rank.
            error: Error in the arguments of this rank, or None.
        """
        return self.exchange.counts(
            counts, error=error, device=self.weight.device, others=self.average.replicas
        )

    def raise_together(self, error: Exception | None) -> None:
        """Raise an error in replicated arguments, also on the ranks of other replicas.

        Args:
            error: Error, which all ranks of this replica have, or None.
        """
        replicas = self.average.replicas
        if replicas is not None:
            numbers: list[list[int]] = [[]] * replicas.size
            replicas.counts(numbers, error=error, device=self.weight.device)
        elif error is not None:
            raise error

    def replicated_ids(self, ids: Any) -> Integer[Tensor, " n"]:
        """Return flat ids that all ranks have alike, or raise an error on all."""
        flat, error = self.ids_or_error(ids)
        self.raise_together(error)
        return flat

    def own_logits(self, x: Float[Tensor, "*batch columns"]) -> Tensor:
        """Return the product of ``x`` with this rank's part of the table."""
        self.check_wrappers()
        weight = self.weight
        catch_up(weight)
        self._install_grad_hook(weight)
        with without_catch_up():
            return tied_logits(x, with_averaged_gradient(weight, self.average))

    def exchange_batch_sizes(self, x: Any) -> list[int]:
        """Return how many vectors each rank has, or raise the error of one on all.

        Args:
            x: Argument of :meth:`logits`.
        """
        num, error = self._count_vectors(x)
        if self.has_replicated_ids:
            self.raise_together(error)
            return [num] * self.exchange.size
        received = self.exchange_counts([[num]] * self.exchange.size, error)
        return [n for (n,) in received]

    def _count_vectors(self, x: Any) -> tuple[int, Exception | None]:
        """Return the number of vectors in the argument of :meth:`logits`, or its error."""
        try:
            # Logits of a table without rows, for their checks.
            empty = self.weight.new_empty((0, self.embedding_dim))
            return tied_logits(x, empty).shape[:-1].numel(), None
        except ARGUMENT_ERRORS as error:
            return 0, error

    @property
    def exchanges(self) -> list[Exchange]:
        """Collectives that this layer uses."""
        replicas = self.average.replicas
        return [self.exchange] if replicas is None else [self.exchange, replicas]

    def _own_columns(self, rows: Tensor) -> Tensor:
        """Return this rank's columns of rows."""
        start, stop = self.shard.column_bounds
        return rows[..., start:stop]

    @property
    def _own_padding(self) -> int | None:
        """This rank's number of the padding row, or None if it does not have it."""
        padding_idx = checked_padding_idx(self.padding_idx, self.num_embeddings)
        start, stop = self.shard.row_bounds
        if padding_idx is None or not start <= padding_idx < stop:
            return None
        return padding_idx - start

    def _bind(self) -> None:
        super()._bind()
        weight = self._parameters.get("weight")
        if weight is not None and "shard" in vars(self):
            mark_shard(weight, self.shard)
            vars(weight)["table_layer"] = weakref.ref(self)

    def _install_grad_hook(self, weight: Tensor, *, reattach: bool = False) -> None:
        # Dense gradients are marked as those of a part too.
        if not is_compiling():
            install_grad_hook(self, weight, reattach=reattach)

    def _on_grad_accumulated(self, weight: Tensor) -> None:
        if self._parameters.get("weight") is not weight:
            return
        coalesce_gradient(weight)
        grad = weight.grad
        if grad is not None:
            mark_gradient(grad, self.shard)
        if self.max_norm is not None and grad is not None:
            # This rank has the gradient of its rows from every rank.
            is_sparse = grad.is_sparse
            rows = grad._indices()[0] if is_sparse else (grad != 0).any(dim=1)
            self._renormalize(rows)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.shard.describe()}"

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError("a sharded table cannot be compiled by TorchScript")


class ShardedTokens(ShardedTableModule, Embedding):
    """Base class of layers that look up a row for each id."""

    @torch.compiler.disable
    def forward(
        self, input: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*output embedding_dim"]:
        """Return the rows of the ids, or this rank's part. All ranks must call it.

        Args:
            input: Ids of any shape and any integer dtype.
        """
        self.check_wrappers()
        rows = self._rows_of(self._to_host(input))
        return self._to_output_device(rows.to(self.weight.dtype))

    def _rows_of(self, ids: Tensor) -> Tensor:
        """Return the rows of ids of any shape; raise the error of any rank."""
        raise NotImplementedError
