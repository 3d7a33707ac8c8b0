"""Tables of rows that need not fit in memory, and the formats of their rows."""

from .file import FileStore as FileStore
from .memory import MemoryStore as MemoryStore
from .opening import open_store as open_store
from .row_store import RowStore as RowStore
from .shared import SharedStore as SharedStore

__all__ = ["FileStore", "MemoryStore", "RowStore", "SharedStore", "open_store"]
