"""Random mutations of rope configs, for tests of their errors."""

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_LENGTH = {"original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "factor": 4.0, **_LENGTH}
#: Rope parameters of every type, with every key that the type has.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {
        **_YARN,
        **{"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        **{"mscale": 0.7, "mscale_all_dim": 0.5},
    },
    "yarn, explicit": {**_YARN, "attention_factor": 1.25},
    "longrope": {
        **{"rope_type": "longrope", **_LENGTH, "factor": 4.0, "attention_factor": 1.5},
        **{"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    },
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, **_LENGTH},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "mrope": {"type": "mrope", "mrope_section": [2, 3, 3], "mrope_interleaved": False},
    "axial": {"rope_type": "axial"},
    "alpha": {"rope_type": "dynamic", "factor": 1.0, "alpha": 100.0},
}
_MODELS = {
    "mrope": ("qwen2_vl_text", "qwen3_vl_text", "hunyuan_vl_text", "ernie4_5_vl_moe_text"),
    "axial": ("qwen2_vl_vision", "pixtral", "kimi_k25_vision", "minimax_m3_vl_vision"),
    "alpha": ("hunyuan_v1_dense", "hunyuan_vl_text"),
    "default": ("llama", "nanochat", "neomme", "dinov3_vit", "llama4_vision_model"),
}
_OTHERS = ("llama", "phi", "gptj", "deepseek_v3", "gemma3_text", "mystery")
#: Keys of the config itself that are read.
_KEYS = (
    *("model_type", "hidden_size", "num_attention_heads", "max_position_embeddings"),
    *("head_dim", "rotary_dim", "partial_rotary_factor", "rotary_pct", "rope_theta"),
    *("layer_types", "per_layer_config", "global_head_dim", "qk_rope_head_dim"),
    *("original_max_position_embeddings", "rope_interleave", "rope_parameters"),
    *("rope_scaling", "text_config", "rope_local_base_freq", "embed_dim", "n_head"),
    *("memory_attention_hidden_size", "memory_attention_num_attention_heads"),
    *("position_embeddings_type", "rotary_embedding_base"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 7, 16, -1, 10**30, 10**400),
    *(0.0, -0.0, -0.5, 0.3, 1.5, 1e-300, 5e-324, 1e-9, 1e300, 1.8e308),
    *(math.nan, math.inf, -math.inf, 1j, np.float32(2.0), np.int64(4), np.nan),
    *("", "4.0", "yarn", "nan", b"x", "full_attention"),
    *([], [1.0], [1.0] * 8, [math.nan] * 8, [0.0] * 8, ["1"] * 8, [[1.0] * 8], [2, 3, 3]),
    *([1e300] * 8, [1e-300] * 8, [8], [-1, 4, 5], [None] * 8, (2, 3, 3)),
    *({}, {"a": 1}, {"rope_type": "yarn"}, {"full_attention": {}}, {0: {"head_dim": 8}}),
    *({"0": {"head_dim": 8}}, {"x": 3}, {"full_attention": None}, frozenset(), object()),
)


def mutated_configs(
    count: int, *, seed: int = 0
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield configs with one to three mutated keys, each with a layer type.

    Args:
        count: Number of configs.
        seed: Seed of the mutations.
    """
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.choice(list(ROPES))
        model = draw.choice(_MODELS.get(kind, _OTHERS))
        rope, layer_type = copy.deepcopy(ROPES[kind]), None
        config: dict[str, Any] = {"model_type": model, **_SIZES}
        base = draw.choice(({"rope_theta": 1e4}, {}))
        place = draw.choice(("rope_parameters", "rope_scaling", "nested"))
        if place == "nested":
            layer_type = draw.choice(("full_attention",) * 9 + (None, "other", 3))
            rope["rope_theta"] = 1e4
            config |= {"layer_types": ["full_attention", "sliding_attention"]}
            config["rope_parameters"] = {"full_attention": rope}
        else:
            config |= {"rope_theta": 1e4} if base else {}
            rope |= {} if base else {"rope_theta": 1e4}
            config[place] = rope
        for _ in range(draw.randint(1, 3)):
            target = draw.choice((rope, config))
            keys = list(rope) + ["rope_type", "type"] if target is rope else _KEYS
            key = draw.choice(list(keys))
            if draw.random() < 0.15:
                target.pop(key, None)
            else:
                target[key] = copy.deepcopy(draw.choice(VALUES))
        yield config, layer_type  # pyright: ignore
