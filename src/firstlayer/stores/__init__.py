"""Tables of rows that need not fit in memory, and the formats of their rows."""

from .file import FileStore as FileStore
from .memory import MemoryStore as MemoryStore
from .opening import open_store as open_store
from .row_store import RowStore as RowStore
from .shared import SharedStore as SharedStore
from .training import TrainingStore as TrainingStore
from .training_folder import create_store as create_store

__all__ = [
    "FileStore",
    "MemoryStore",
    "RowStore",
    "SharedStore",
    "TrainingStore",
    "create_store",
    "open_store",
]
