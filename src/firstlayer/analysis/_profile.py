"""How a trained scheme sees distance: one number for each, or one for each head.

Imported by :mod:`firstlayer.analysis.positions` when a study begins: it needs PyTorch.

A bias is its own picture: what it adds to the score of a key that far back. Rotary turns a
query; what is left of its product with itself, were all pairs of features equally strong,
is the mean cosine of the pairs' angles. Vectors that are added are alike as far as their
cosine says, averaged over all pairs that far apart.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..torch import LearnedPositions
from ._transformer import Transformer
from .positions import Profile, Setting


@torch.inference_mode()
def profile(model: Transformer, *, setting: Setting) -> Profile | None:
    """Return how the model's scheme sees distances below the longest length."""
    longest, position = max(setting.lengths), model.embedding.position
    if model.bias is not None:
        back = torch.arange(longest - 1, -1, -1)
        return _profile("bias", model.bias([longest - 1], back)[:, 0])
    if model.rotary is not None:
        cos, _ = model.rotary.phases(torch.arange(longest))
        return _profile("cosine", cos.mean(-1)[None])
    if position is None:
        return None
    reach = longest
    if isinstance(position, LearnedPositions):
        reach = position.max_positions
    rows = normalize(position.encode(torch.arange(reach)), dim=-1)
    return _profile("cosine", _by_distance(rows @ rows.T)[None])


def _by_distance(alike: Tensor) -> Tensor:
    """Return the mean of each diagonal, from the middle one outwards."""
    return torch.stack([alike.diagonal(apart).mean() for apart in range(len(alike))])


def _profile(what: str, values: Tensor) -> Profile:
    lines = tuple(tuple(line) for line in values.tolist())
    return Profile(what, tuple(range(values.shape[-1])), lines)  # pyright: ignore
