"""N-gram memory: which rows of a hashed table the last few ids read.

A scheme is a value that is called with ids and returns rows of one joined table per layer.
Front ends share it: NumPy, torch and JAX arrays give the same rows. Without a history, a
call starts a sequence; with the ids before it, chunks and single steps give the rows of one
pass.
"""

from .byte_groups import ByteGroups as ByteGroups
from .canonical import canonical_ids as canonical_ids
from .engram import Engram as Engram
from .hashing import Layout as Layout
from .hf import from_hf as from_hf
from .longcat import LongCatNgram as LongCatNgram
from .qwen import QwenNgram as QwenNgram
from .salted import SaltedNgram as SaltedNgram

__all__ = [
    "ByteGroups",
    "Engram",
    "Layout",
    "LongCatNgram",
    "QwenNgram",
    "SaltedNgram",
    "canonical_ids",
    "from_hf",
]
