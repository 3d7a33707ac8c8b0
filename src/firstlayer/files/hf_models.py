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
    "edgetam_video",
    "ernie4_5",
    "ernie4_5_moe",
    "ernie4_5_vl_moe_text",
    "glm",
    "glm4",
    "glm4v_text",
    "glm_ocr_text",
    "gptj",
    "helium",
    "llama4_text",
    "llama4_vision_model",
    "moonshine",
    "moonshine_streaming",
    "openai_privacy_filter",
    "pe_audio_encoder",
    "pe_audio_video_encoder",
    "pe_video_encoder",
    "sam2_video",
    "sam3_tracker_video",
    "sam3_vit_model",
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
    "youtu",
})

#: M-RoPE with contiguous sections: the sections if the config has none.
SECTIONS = {
    "ernie4_5_vl_moe_text": (22, 22, 20),
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

#: Configs that no layer can be built from, with what to do instead.
UNSUPPORTED = {
    "efficientloftr": "keep the model's own module, which rotates whole hidden vectors",
    "gemma4_vision": "use replace_rotary, or rotate each half of a head with a layer",
    "hunyuan_vl_text": "use replace_rotary, which needs no layout",
    "mistral_large4_text": "give frequencies times exp(alpha), from the checkpoint's alpha",
    "musicflamingo": "keep the model's own module, which rotates by timestamps",
}

#: Models whose ``dynamic`` parameters may have a constant factor ``alpha``.
CONSTANT_NTK = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"})
#: Keys of these parameters. Only ``alpha`` has an effect.
CONSTANT_NTK_KEYS = {"alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}

#: Rotates by the negative angle.
NEGATIVE = frozenset({"nanochat"})

#: Models in which transformers ignores ``partial_rotary_factor`` for the default rule.
WHOLE_HEADS = frozenset(
    """
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid beam bitnet blt
    blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher chameleon
    cohere cohere2 cohere2_moe cosmos3_edge_text csm csm_depth_decoder_model cwm dbrx
    deepseek_ocr2_encoder deepseek_ocr2_text deepseek_v2 deepseek_v3 deepseek_v32
    dia_decoder dia_encoder diffllama doge dots1 embedding_gemma2_text emu3_text_model
    ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text esm esmc eurobert evolla exaone4
    exaone_moe falcon falcon_h1 flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
    gemma4_text gemma4_unified_text glm_moe_dsa gpt_oss gradium_phonon_tts granite
    granite4_vision_text granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared gte helium higgs_audio_v2 hrm_text hunyuan_v1_dense hunyuan_v1_moe
    hunyuan_vl_text hy_v3 hy_v4 hyperclovax idefics jais2 jetmoe jina_embeddings_v3
    kolibri1 kyutai_speech_to_text lasr_encoder lfm2 lfm2_moe llama llama4_text
    longcat_flash mimi mimi_decoder mimi_encoder minicpm3 minimax ministral ministral3
    mistral mistral4 mistral_large4_text mixtral mllama_text_model modernbert
    modernbert-decoder molmo2_text moshi muse_glimmer_assistant muse_glimmer_text
    muse_spark_text nanochat neucodec nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe
    openai_privacy_filter paddleocr_vl_text pe_audio_encoder pe_audio_video_encoder
    pe_video_encoder phimoe pocket_tts pocket_tts_audio_tokenizer
    pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen2
    qwen2_5_omni_dit qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_moe
    qwen2_vl_text qwen3 qwen3_moe qwen3_omni_moe_talker_code_predictor
    qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text
    seed_oss smollm3 starcoder2 t5_gemma_module t5gemma2_decoder t5gemma2_text
    timesfm2_5 ultrabert unlimited_ocr_text vaultgemma voxtral_realtime_encoder
    voxtral_realtime_text xcodec2 youtu zamba2
    """.split()
)

#: Models whose ``rotary_dim`` transformers does not read.
WITHOUT_ROTARY_DIM = frozenset({"minimax_m3_vl_text"})

#: Base of models that are older than the key for it.
DEFAULT_BASES = {"codegen": 10_000.0, "gptj": 10_000.0, "llama": 10_000.0}

#: Sizes that transformers does not derive from other keys, if the config has none.
DEFAULT_SIZES = {
    "codegen": {"rotary_dim": 64},
    "gptj": {"rotary_dim": 64},
    "jetmoe": {"kv_channels": 128},
    **{
        name: {"qk_rope_head_dim": size}
        for size, names in {
            32: "axk2 minicpm3",
            64: """
                axk1 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
                glm4_moe_lite glm_moe_dsa hy_v4 longcat_flash mistral4 youtu
            """,
        }.items()
        for name in names.split()
    },
    **{
        name: {"head_dim": size}
        for size, names in {
            64: """
                gpt_oss muse_spark_text neomme neucodec openai_privacy_filter
                qwen2_5_omni_dit voxtral_realtime_encoder xcodec2
            """,
            80: "timesfm2_5",
            128: """
                afmoe beam cohere2_moe cosmos3_edge_text cwm dia_decoder dia_encoder
                ernie4_5 flint glm glm4 helium higgs_audio_v2 hrm_text hy_v3 kolibri1
                laguna llama4_text mellum minimax_m2 minimax_m3_vl_text ministral3
                molmo2_text muse_glimmer_assistant muse_glimmer_text paddleocr_vl_text
                pe_audio_encoder pe_audio_video_encoder pe_video_encoder
                qwen2_5_omni_talker qwen3 qwen3_omni_moe_talker_code_predictor
                qwen3_vl_text seed_oss solar_open step3p5 zaya
            """,
            192: "mimo_v2_flash",
            256: """
                gemma gemma2 gemma3_text gemma3n_text qwen3_5_moe_text qwen3_5_text
                qwen3_next qwen4_exp_text t5_gemma_module t5gemma2_decoder t5gemma2_text
                vaultgemma
            """,
        }.items()
        for name in names.split()
    },
    **{
        name: {"head_dim": 256, "global_head_dim": 512}
        for name in (
            *("diffusion_gemma_text", "embedding_gemma2_text"),
            *("gemma4_text", "gemma4_unified_text"),
        )
    },
}

#: Share of a head that is rotated, if the config has none; for all other types it is 1.
DEFAULT_PARTIAL_FACTORS = {
    "bamba": 0.5,
    "glm": 0.5,
    "glm4": 0.5,
    "glm4_moe": 0.5,
    "glm4v_moe_text": 0.5,
    "glmasr_encoder": 0.5,
    "gpt_neox": 0.25,
    "moonshine": 0.9,
    "nemotron": 0.5,
    "persimmon": 0.5,
    "phi": 0.5,
    "qwen3_5_moe_text": 0.25,
    "qwen3_5_text": 0.25,
    "qwen3_next": 0.25,
    "recurrent_gemma": 0.5,
    "stablelm": 0.25,
}
