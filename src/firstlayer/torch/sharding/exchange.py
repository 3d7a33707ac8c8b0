"""Collectives of a process group, with gradients and a count of the bytes sent.

Every function here must be called on all ranks of the group, in the same order.
"""

from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from .._tensors.dtypes import HALF

#: Errors of one rank's arguments that all ranks raise.
ARGUMENT_ERRORS = (IndexError, TypeError, ValueError, RuntimeError)


@dataclass
class Traffic:
    """Bytes that this rank has sent to other ranks.

    Args:
        ids: Ids that were looked up, and the lengths of bags.
        rows: Rows and pooled vectors.
        gradients: Gradients of these, and of replicas.
        counts: Sizes and error flags.
    """

    ids: int = 0
    rows: int = 0
    gradients: int = 0
    counts: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(asdict(self).values())

    def __add__(self, other: "Traffic") -> "Traffic":
        mine, others = asdict(self), asdict(other)
        return Traffic(**{name: mine[name] + others[name] for name in mine})

    def __sub__(self, other: "Traffic") -> "Traffic":
        mine, others = asdict(self), asdict(other)
        return Traffic(**{name: mine[name] - others[name] for name in mine})


class Exchange:
    """Collectives of one process group.

    Args:
        group: Process group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent = Traffic()

    def counts(
        self,
        counts: list[list[int]],
        *,
        error: Exception | None,
        device: torch.device,
        others: "Exchange | None" = None,
    ) -> list[list[int]]:
        """Return the numbers that each rank has for this one, or raise an error together.

        Args:
            counts: Numbers for each rank.
            error: Error in the arguments of this rank, which all ranks raise.
            device: Device of the group's tensors.
            others: Collectives of the other groups, one rank of each, which raise it too.
        """
        rows = [[int(error is not None), *numbers] for numbers in counts]
        sent = torch.tensor(rows, dtype=torch.int64, device=device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        self._count("counts", sent[0].nbytes * (self.size - 1))
        numbers = received.tolist()
        failed = any(flag for flag, *_ in numbers)
        if others is not None:
            flags = torch.tensor(int(failed), device=device)
            failed = bool(others.all_reduce(flags, kind="counts"))
        if failed:
            self._raise_together(error, others)
        return [own for _, *own in numbers]

    def _raise_together(
        self, error: Exception | None, others: "Exchange | None"
    ) -> NoReturn:
        first: Any = None
        if error is not None:
            first = type(error), str(error), dist.get_rank()
        for exchange in (self, others):
            if exchange is not None:
                errors: list[Any] = [None] * exchange.size
                dist.all_gather_object(errors, first, group=exchange.group)
                first = next((each for each in errors if each is not None), None)
        cls, message, rank = first
        raise cls(f"{message}, on rank {rank}") from error

    def all_to_all(
        self, x: Tensor, *, sent: list[int], received: list[int], kind: str
    ) -> Tensor:
        """Send the first rows of ``x`` to rank 0, the next to rank 1, and so on.

        Args:
            x: Rows for all ranks.
            sent: Number of rows for each rank.
            received: Number of rows from each rank.
            kind: Field of :class:`Traffic` that counts them.
        """
        wire = x.contiguous()
        if wire.dtype in HALF:
            # Gloo sends bytes, but neither of these dtypes. The bytes have an axis of their
            # own, so that the size of the first is still the number of rows.
            wire = wire.unsqueeze(-1).view(torch.uint8)
        out = wire.new_empty((sum(received), *wire.shape[1:]))
        dist.all_to_all_single(out, wire, received, sent, group=self.group)
        row_bytes = wire[:1].numel() * wire.itemsize if len(wire) else 0
        self._count(kind, (len(wire) - sent[self.rank]) * row_bytes)
        return out.view(x.dtype).view(sum(received), *x.shape[1:])

    def all_gather(self, x: Tensor, counts: list[int], *, kind: str) -> list[Tensor]:
        """Return the rows of every rank.

        Args:
            x: Rows of this rank.
            counts: Number of rows of each rank.
            kind: Field of :class:`Traffic` that counts them.
        """
        # Collectives of torch gather tensors of one size.
        padded = x.new_zeros((max(counts), *x.shape[1:]))
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.group)
        self._count(kind, padded.nbytes * (self.size - 1))
        return [part[:count] for part, count in zip(parts, counts, strict=True)]

    def all_reduce(self, x: Tensor, *, kind: str) -> Tensor:
        """Return the sum over ranks."""
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.group)
        self._count(kind, 2 * out.nbytes * (self.size - 1) // self.size)
        return out

    def _count(self, kind: str, num_bytes: int) -> None:
        setattr(self.sent, kind, getattr(self.sent, kind) + num_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Exchange":
        # Process groups cannot be copied.
        return self


@dataclass(frozen=True)
class Route:
    """Number of rows that each rank sends to each rank.

    Args:
        exchange: Collectives of the ranks.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
    """

    exchange: Exchange
    sent: list[int]
    received: list[int]

    @property
    def reverse(self) -> "Route":
        """Route with senders and receivers exchanged."""
        return Route(self.exchange, self.received, self.sent)

    def send(self, x: Shaped[Tensor, "sent *width"], *, kind: str) -> Tensor:
        """Return the rows that other ranks send to this one; without a gradient."""
        return self.exchange.all_to_all(
            x, sent=self.sent, received=self.received, kind=kind
        )

    def send_values(
        self,
        x: Float[Tensor, "sent *width"],
        *,
        kind: str = "rows",
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "received *width"]:
        """Return the values that other ranks send to this one, with a gradient.

        Args:
            x: Values for all ranks.
            kind: Field of :class:`Traffic` that counts them.
            dtype: Dtype in which they are sent; None is that of ``x``. Gradients are sent
                in the dtype of ``x``.
        """
        return _SendValues.apply(x, self, kind, dtype)  # pyright: ignore


class _SendValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, kind: str, dtype: Any) -> Tensor:
        ctx.route = route
        return route.send(x if dtype is None else x.to(dtype), kind=kind).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.route.reverse.send(grads[0], kind="gradients"), None, None, None
