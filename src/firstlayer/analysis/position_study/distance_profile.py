"""The effect of distance in a trained model, as one value per distance and head.

- A bias: its value for a key at that distance.
- Rotary: the mean cosine of the angles of all pairs, which is the product of a query with
  itself at that distance if all pairs have the same norm. With xPos, cosines are multiplied
  by the scales of their pairs.
- Added vectors: the mean cosine between vectors at that distance.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...torch import LearnedPositions, XPosRotary
from .results import Profile, Setting
from .transformer import Transformer


@torch.inference_mode()
def distance_profile(model: Transformer, *, setting: Setting) -> Profile | None:
    """Return the effect of all distances below the longest length."""
    longest, position = max(setting.lengths), model.embedding.position
    if model.bias is not None:
        keys = torch.arange(longest - 1, -1, -1)
        return _profile("bias", model.bias([longest - 1], keys)[:, 0])
    if isinstance(model.rotary, XPosRotary):
        first_of_pairs = torch.arange(model.rotary.head_dim) < model.rotary.head_dim // 2
        rotated = model.rotary(first_of_pairs.float().expand(longest, -1))
        return _profile("cosine", rotated[:, first_of_pairs].mean(-1)[None])
    if model.rotary is not None:
        cos, _ = model.rotary.phases(torch.arange(longest))
        return _profile("cosine", cos.mean(-1)[None])
    if position is None:
        return None
    length = longest
    if isinstance(position, LearnedPositions):
        length = position.max_positions
    rows = normalize(position.encode(torch.arange(length)), dim=-1)
    cosines = rows @ rows.T
    means = [cosines.diagonal(distance).mean() for distance in range(length)]
    return _profile("cosine", torch.stack(means)[None])


def _profile(what: str, values: Tensor) -> Profile:
    by_head = tuple(tuple(head) for head in values.tolist())
    return Profile(what, tuple(range(values.shape[-1])), by_head)  # pyright: ignore
