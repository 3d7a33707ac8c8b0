"""Tables of NumPy layers that are trained on disk."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from ..optim.rule import Rule
from ..optim.stored_state import resumed_state
from ..optim.table_state import TableState
from ..stores.training import TrainingStore

Layer = TypeVar("Layer")

#: Suffix of a table's name in a state dict for the reference to its store.
REFERENCE = ".store"


def layer_on_disk(
    layer_class: Callable[..., Layer], store: TrainingStore, **options: Any
) -> Layer:
    """Return a layer whose table is that of a training store.

    Args:
        layer_class: Class of the layer.
        store: The store.
        options: Further arguments of the layer.
    """
    layer: Any = layer_class(weight=store.array, **options)
    layer.store = store
    # The state must not keep the layer alive.
    owner = weakref.proxy(layer)

    def state(rule: Rule, **arguments: Any) -> TableState:
        return TableState(rule, lambda: owner.stored_weight, **arguments)

    # Rows may be stale from an earlier run, and no optimizer may follow.
    layer.table_state = resumed_state(store, state)
    return layer


def stores_of(layer: Any) -> dict[str, TrainingStore]:
    """Return the stores of a layer's tables, by the name of the table."""
    tables = layer.embeddings().items()
    return {name: table.store for name, table in tables if table.store is not None}


def references_of(layer: Any) -> dict[str, np.ndarray]:
    """Commit every store of a layer, and return the entries of a state dict for them."""
    stores = stores_of(layer).items()
    return {name + REFERENCE: store.reference() for name, store in stores}


def checked_references(
    layer: Any, state: Mapping[str, np.ndarray]
) -> dict[str, tuple[TrainingStore, str]]:
    """Return store and tag of each reference in a state dict, or raise; change nothing."""
    return {
        name: (store, store.check_reference(state[name + REFERENCE], name=name + REFERENCE))
        for name, store in stores_of(layer).items()
        if name + REFERENCE in state
    }


def refuse_copy(store: TrainingStore | None) -> None:
    """Raise TypeError if a table is on disk: it cannot be copied with its layer."""
    if store is not None:
        raise TypeError(
            f"a layer on the store at {store.path} cannot be copied, pickled or resized; "
            "use state_dict(), or copy the rows to a new layer"
        )
