"""Tables on disk: the store of a parameter."""

from typing import Any

from ...stores.training import TrainingStore


def store_of(weight: Any) -> TrainingStore | None:
    """Return the store of a table, or None if it is in memory."""
    return getattr(weight, "row_store", None)
