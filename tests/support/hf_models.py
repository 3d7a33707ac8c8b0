"""Small random models of every text type of transformers, and what their blocks get."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Sizes of the small models, by the key of the config.
SIZES: dict[str, int] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "embedding_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 2),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "d_ff", "n_inner"], 64),
    **dict.fromkeys(["ffn_hidden_size", "expert_ffn_hidden_size"], 64),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 64),
    **dict.fromkeys(["vocab_size", "max_position_embeddings", "n_positions"], 64),
    **dict.fromkeys(["head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim"], 8),
    **dict.fromkeys(["v_head_dim", "hidden_size_per_layer_input"], 8),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "moe_intermediate_size"], 16),
    **dict.fromkeys(["shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts"], 4),
    **dict.fromkeys(["moe_num_experts", "mamba_n_heads"], 4),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace"], 1),
    **{"num_experts_per_tok": 2, "num_key_value_heads": 2, "word_embed_proj_dim": 32},
    **{"vocab_size_per_layer_input": 64, "pad_token_id": 5, "mamba_d_head": 16},
}
WIDE = {"head_dim": 64, "hidden_size": 256}
WIDER = {"head_dim": 128, "hidden_size": 512}
# Models that need other sizes; a list of keys keeps the values of the default config.
SPECIAL: dict[str, Any] = {
    **dict.fromkeys(["glm4v_text", "glm_image_text", "glm_ocr_text"], WIDE),
    **dict.fromkeys(["glm4v_moe_text", "cosmos3_edge_text", "paddleocr_vl"], WIDER),
    **dict.fromkeys(["qwen2_5_vl_text", "qwen2_vl_text"], WIDER),
    **dict.fromkeys(["jamba", "cosmos3_edge"], ["num_hidden_layers", "head_dim"]),
    "falcon_h1": ["mamba_n_heads", "mamba_d_head"],
    **dict.fromkeys(["hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"], {"head_dim": 8}),
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16},
}


def small_config(model_type: str) -> Any:
    """Return a config of a small model of that type."""
    default = CONFIG_MAPPING[model_type]()
    special = SPECIAL.get(model_type, {})
    kept = special if isinstance(special, list) else []
    sizes = SIZES if isinstance(special, list) else {**SIZES, **special}
    values = _small(default.to_dict(), sizes, kept)
    values.pop("model_type", None)
    if isinstance(special, dict):
        values |= special
    return type(default)(**values)


def small_model(model_type: str) -> Any:
    """Return a random model of that type without a head, in evaluation mode."""
    config = small_config(model_type)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 3:
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return model


def first_block_input(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the vectors that the first block of a model's text stack gets."""
    seen: list[torch.Tensor] = []

    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        x = kwargs.get("hidden_states", args[0] if args else None)
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            seen.append(x.detach().clone())
            raise _Seen

    blocks = [
        module[0]
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    ]
    handles = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in blocks]
    try:
        with torch.no_grad():
            model(input_ids=ids)
    except _Seen:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return seen[0]


class _Seen(Exception):
    """Raised to leave a forward once the input of the first block is known."""


def _small(
    values: dict[str, Any], sizes: dict[str, int], kept: list[str]
) -> dict[str, Any]:
    layers = next(
        (values[key] for key in ("num_hidden_layers", "num_layers") if values.get(key)), 0
    )
    layers = 0 if "num_hidden_layers" in kept else layers
    return {
        key: value if key in kept else _small_value(key, value, layers, sizes, kept)
        for key, value in values.items()
    }


def _small_value(key: str, value: Any, layers: int, sizes: Any, kept: list[str]) -> Any:
    if key == "per_layer_config" and value:
        return {layer: options for layer, options in value.items() if int(layer) < 2}
    if isinstance(value, dict) and key.endswith("config"):
        return _small(value, sizes, kept)
    if key == "pad_token_id" or (
        key in sizes and value is not None and not isinstance(value, list | dict | bool)
    ):
        return sizes[key]
    if "token" in key and key.endswith(("_id", "_index")):
        return 7 if isinstance(value, int) and value >= 64 else value
    if isinstance(value, list) and layers and len(value) == layers:
        # Two layers, of different types if there are several.
        kinds = list(dict.fromkeys(map(str, value)))
        if key.endswith("types") and len(kinds) > 1:
            return kinds[:2]
        return value[:2]
    return value
