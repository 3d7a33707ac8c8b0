"""Refusal of row optimizers that ``ZeroRedundancyOptimizer`` shards."""

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._tensors.shard import is_distributed

# Module state: a hook that torch calls before the step of every optimizer. It is installed
# with the first row optimizer of a process that is part of a process group.
_step_hooks: list[Any] = []


def install_step_hook() -> None:
    """Install the hook if this process is part of a process group."""
    if is_distributed() and not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(_check_not_sharded))


def _check_not_sharded(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise if the optimizer is a ZeroRedundancyOptimizer of a row optimizer.

    Each rank trains some of the parameters and broadcasts them after the step. Other ranks
    would read stale rows, and loading a state would bypass the row optimizer.
    """
    # Imported here: the base class of the row optimizers imports this module.
    from .row_optimizer import RowOptimizer

    local = getattr(optimizer, "optim", None)
    if isinstance(local, RowOptimizer):
        raise TypeError(
            f"{type(local).__name__} cannot be sharded by {type(optimizer).__name__}, "
            "whose other ranks would read stale rows; give it to every rank instead"
        )
