"""Tables of rows that need not fit in memory, and the formats of their rows."""

from .file import FileStore as FileStore
from .memory import MemoryStore as MemoryStore
from .opening import open_store as open_store
from .row_store import RowStore as RowStore
from .shared import SharedStore as SharedStore
from .training import TrainingStore as TrainingStore
from .training import create_training_store as create_training_store
from .training import open_training_store as open_training_store

__all__ = [
    "FileStore",
    "MemoryStore",
    "RowStore",
    "SharedStore",
    "TrainingStore",
    "create_training_store",
    "open_store",
    "open_training_store",
]
