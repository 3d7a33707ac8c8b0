"""Tiny transformers models with rotary positions of each kind, and their inputs."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "depth": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
}


def _sharpened(model: Any) -> Any:
    # Large weights make attention uneven, so that a wrong angle changes the output.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.eval()


def _ids(length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 97, (2, length), generator=generator)


def _image_text(image_token: int, patches: int, features: int) -> dict[str, Any]:
    """Return two texts with an image of 4 x 6 patches each, in Qwen's form."""
    ids = _ids(20)
    ids[:, 3 : 3 + patches] = image_token
    return {
        "input_ids": ids,
        "pixel_values": torch.linspace(-1, 1, 48 * features).reshape(48, features),
        "image_grid_thw": torch.tensor([[1, 4, 6], [1, 4, 6]]),
        "mm_token_type_ids": (ids == image_token).long(),
    }


def qwen2_vl() -> tuple[Any, dict[str, Any]]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {**VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config={**SIZES, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
    )
    return transformers.Qwen2VLForConditionalGeneration(config), _image_text(5, 6, 96)


def qwen3_vl() -> tuple[Any, dict[str, Any]]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    config = transformers.Qwen3VLConfig(
        text_config={**SIZES, "head_dim": 16, "rope_parameters": rope},
        vision_config={
            **VISION,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
    )
    return transformers.Qwen3VLForConditionalGeneration(config), _image_text(5, 6, 96)


def mistral3() -> tuple[Any, dict[str, Any]]:
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **SIZES, "head_dim": 16},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "patch_size": 4,
            "image_size": 32,
            "head_dim": 16,
        },
        image_token_index=5,
        spatial_merge_size=2,
    )
    ids = _ids(20)
    ids[:, 3:9] = 5
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 24).reshape(2, 3, 16, 24)
    sizes = torch.tensor([[16, 24], [16, 24]])
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_sizes": sizes}
    return transformers.Mistral3ForConditionalGeneration(config), inputs


def llama4() -> tuple[Any, dict[str, Any]]:
    config = transformers.Llama4Config(
        text_config={
            **SIZES,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "attention_chunk_size": 64,
        },
        vision_config={
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "image_size": 16,
            "patch_size": 4,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
        image_token_index=5,
    )
    ids = _ids(20)
    ids[:, 3:7] = 5
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    inputs = {"input_ids": ids, "pixel_values": pixels}
    return transformers.Llama4ForConditionalGeneration(config), inputs


def deepseek_v2() -> tuple[Any, dict[str, Any]]:
    config = transformers.DeepseekV2Config(
        **{**SIZES, "num_key_value_heads": 4},
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
        },
    )
    return transformers.DeepseekV2ForCausalLM(config), {"input_ids": _ids(40)}


def dinov3() -> tuple[Any, dict[str, Any]]:
    config = transformers.DINOv3ViTConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
    )
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 24).reshape(2, 3, 16, 24)
    return transformers.DINOv3ViTModel(config), {"pixel_values": pixels}


def olmo() -> tuple[Any, dict[str, Any]]:
    model = transformers.OlmoForCausalLM(transformers.OlmoConfig(**SIZES))
    return model, {"input_ids": _ids(40)}


def granite_swa() -> tuple[Any, dict[str, Any]]:
    config = transformers.GraniteSWAConfig(**SIZES)
    return transformers.GraniteSWAForCausalLM(config), {"input_ids": _ids(40)}


def esm() -> tuple[Any, dict[str, Any]]:
    sizes = {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}
    config = transformers.EsmConfig(
        **sizes, position_embedding_type="rotary", mask_token_id=3
    )
    return transformers.EsmForMaskedLM(config), {"input_ids": _ids(40)}


#: Number of rotary modules and a function that returns a model and its inputs.
MODELS: dict[str, tuple[int, Callable[[], tuple[Any, dict[str, Any]]]]] = {
    "deepseek_v2": (1, deepseek_v2),
    "dinov3": (1, dinov3),
    "esm": (1, esm),
    "granite_swa": (2, granite_swa),
    "llama4": (2, llama4),
    "mistral3": (2, mistral3),
    "olmo": (1, olmo),
    "qwen2_vl": (2, qwen2_vl),
    "qwen3_vl": (2, qwen3_vl),
}


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a tiny model with seeded weights and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[name][1]()
    return _sharpened(model), inputs
