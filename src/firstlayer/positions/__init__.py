"""Position ids, and the mathematics of each position scheme, one file per scheme.

The functions here return position ids: from a padding mask, for packed documents, from a
cache offset, for a grid or patches, or drawn at random. They are
:mod:`firstlayer.positions.ids`.
"""

from .ids import from_documents as from_documents
from .ids import from_grid as from_grid
from .ids import from_lengths as from_lengths
from .ids import from_mask as from_mask
from .ids import from_offset as from_offset
from .ids import from_patches as from_patches
from .ids import randomised as randomised

__all__ = [
    "from_documents",
    "from_grid",
    "from_lengths",
    "from_mask",
    "from_offset",
    "from_patches",
    "randomised",
]
