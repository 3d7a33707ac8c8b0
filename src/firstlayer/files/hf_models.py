"""Facts about rotary models that their transformers configs leave out, by ``model_type``.

Which features form a pair, and how multimodal models divide pairs among axes, is defined in
the code of each model, here as of transformers 5.22.2 (Kimi K2 ships DeepSeek-V3's code). A
model type that is not listed uses the half layout and one coordinate, as nearly all do.
"""

#: Pairs feature ``2i`` with ``2i + 1``.
INTERLEAVED = frozenset({
    "blt",
    "blt_global_transformer",
    "blt_local_decoder",
    "blt_local_encoder",
    "blt_patcher",
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v4",
    "ernie4_5",
    "ernie4_5_moe",
    "glm",
    "glm4",
    "glm4v_text",
    "glm_ocr_text",
    "gptj",
    "helium",
    "llama4_text",
    "moonshine",
    "moonshine_streaming",
    "openai_privacy_filter",
    "pe_audio_encoder",
    "pe_audio_video_encoder",
    "pe_video_encoder",
})

#: Reads interleaved pairs and writes the half layout, unless ``rope_interleave`` is False.
INTERLEAVED_TO_HALF = frozenset({
    "axk1",
    "axk2",
    "bailing_hybrid",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "longcat_flash",
    "mistral4",
    "mistral_large4_text",
    "youtu",
})

#: M-RoPE with contiguous sections: the sections if the config has none.
SECTIONS = {
    "glm4v_moe_text": (8, 12, 12),
    "glm4v_text": (8, 12, 12),
    "glm_image_text": (8, 12, 12),
    "glm_ocr_text": (8, 12, 12),
    "paddleocr_vl_text": (16, 24, 24),
    "qwen2_5_omni_talker": (16, 24, 24),
    "qwen2_5_omni_text": (16, 24, 24),
    "qwen2_5_vl": (16, 24, 24),
    "qwen2_5_vl_text": (16, 24, 24),
    "qwen2_vl": (16, 24, 24),
    "qwen2_vl_text": (16, 24, 24),
}

#: M-RoPE with interleaved sections: the sections if the config has none.
INTERLEAVED_SECTIONS = {
    "cohere_compass_text": (24, 20, 20),
    "cosmos3_edge_text": (24, 20, 20),
    "qwen3_5_moe_text": (11, 11, 10),
    "qwen3_5_text": (11, 11, 10),
    "qwen3_omni_moe_talker_text": (24, 20, 20),
    "qwen3_omni_moe_text": (24, 20, 20),
    "qwen3_vl_moe_text": (24, 20, 20),
    "qwen3_vl_text": (24, 20, 20),
    "qwen4_exp_text": (11, 11, 10),
}

#: Rotation that no layout and no sections describe.
UNSUPPORTED = frozenset({
    "dinov3_vit",
    "efficientloftr",
    "eomt_dinov3",
    "ernie4_5_vl_moe_text",
    "hunyuan_vl_text",
    "llama4_vision_model",
    "musicflamingo",
    "nanochat",
    "neomme",
    "sapiens2",
})

#: Base of models that are older than the key for it.
DEFAULT_BASES = {"codegen": 10_000.0, "gptj": 10_000.0, "llama": 10_000.0}
