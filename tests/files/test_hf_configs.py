"""Every default config of transformers 5.22.2 with rotary, against the module it builds."""

import copy
import functools
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from firstlayer.files.hf import rope_layer_types, rotary_from_hf
from firstlayer.numpy.rotary import RotaryPositions
from firstlayer.torch.hf import HFRotary, RotaryModule, replace_rotary
from tests.support.hf_configs import rotary_class, rotary_configs

#: Default configs that are refused, and the message that names the way out.
REFUSED = {
    "BltConfig": "'head_dim' or 'hidden_size', got none: give one of 'decoder_config', ",
    "EfficientLoFTRConfig": "'efficientloftr': keep the model's own module",
    "Gemma4VisionConfig": "'gemma4_vision': use replace_rotary, or rotate each half",
    "Glm4MoeConfig": "must be even, got 21: give the head_dim of the checkpoint",
    "Glm4vMoeTextConfig": "must be even, got 21: give the head_dim of the checkpoint",
    "Glm4vTextConfig": r"add up to 64 pairs, got \[8, 12, 12\]: give mrope_section, or",
    "GlmImageTextConfig": r"add up to 64 pairs, got \[8, 12, 12\]: give mrope_section, or",
    "HunYuanVLTextConfig": "'hunyuan_vl_text': use replace_rotary",
    "MistralLarge4TextConfig": r"give frequencies times exp\(alpha\)",
    "MusicFlamingoConfig": "'musicflamingo': keep the model's own module",
    "Qwen3OmniMoeTextConfig": "must be even, got 73: give the head_dim of the checkpoint",
    "SeamlessM4TConfig": "position_embeddings_type must be 'rotary', got 'relative'",
    "Wav2Vec2BertConfig": "position_embeddings_type must be 'rotary', got 'relative_key'",
    "Wav2Vec2ConformerConfig": "position_embeddings_type must be 'rotary', got 'relative'",
}
#: Default configs whose module cannot be replaced. Those of HunYuan-VL and of three GLM
#: models cannot be called with the default config either.
LEFT = REFUSED.keys() - {"Gemma4VisionConfig"}
# Models without a rotary module: the rotation is part of attention.
INSIDE_ATTENTION = {"CodeGenConfig", "GPTJConfig"}


@functools.cache
def configs() -> list[Any]:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return list(rotary_configs())
    finally:
        logging.disable(level)


@functools.cache
def modules() -> list[tuple[Any, Any]]:
    """Return the accepted configs with their modules."""
    return [
        (config, rotary_class(config)(config))  # pyright: ignore[reportOptionalCall]
        for config in configs()
        if type(config).__name__ not in LEFT | INSIDE_ATTENTION
    ]


def frequencies_of(module: Any, layer_type: str | None) -> np.ndarray:
    """Return the frequencies of a module, sorted, each once."""
    if "freqs_ci" in module._buffers:
        # The patch in the second row and second column.
        side = module.config.image_size // module.config.patch_size
        values = module.freqs_ci[side + 1, 0].angle().double().numpy() / 2
        return np.unique(values.round(7))
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    values = module.get_buffer(name).double().numpy()
    if hasattr(module.config, "pos_embed_rescale"):
        values = values * 2.0 * np.pi
    return np.unique(values)


def test_every_config_gives_the_frequencies_of_its_module():
    assert len(configs()) == 236
    refused = []
    for config in configs():
        name = type(config).__name__
        if name in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[name]):
                RotaryPositions.from_hf(config, rope_layer_types(config)[0])
            refused.append(name)
    assert sorted(refused) == sorted(REFUSED)
    for config, module in modules():
        if type(config).__name__ in REFUSED:
            continue
        for layer_type in rope_layer_types(config):
            layer = RotaryPositions.from_hf(config, layer_type)
            want = frequencies_of(module, layer_type)
            ours = np.abs(np.atleast_2d(layer.frequencies))
            ours = np.unique(ours.max(axis=0))
            assert len(ours) == len(want), (type(config).__name__, layer_type)
            np.testing.assert_allclose(
                ours, want, rtol=1e-6, atol=2e-7, err_msg=type(config).__name__
            )


def test_every_module_is_replaced_by_one_with_the_same_output():
    generator = torch.Generator().manual_seed(0)
    for config, module in modules():
        model = torch.nn.ModuleDict({"rotary": module})
        assert replace_rotary(model) == 1, type(config).__name__
        ours: Any = model["rotary"]
        assert isinstance(ours, RotaryModule)
        if not isinstance(ours, HFRotary):
            continue  # Compared with the module on an image by replace_rotary itself.
        types = [name for name in ours.layers if name != "all"]
        for key, layer in ours.layers.items():
            axes = getattr(layer, "axes", None)
            shape = (2, 5) if axes is None else (axes, 2, 5)
            ids = torch.randint(0, 200, shape, generator=generator)
            if ours._is_grid:
                ids = ids[:, 0].T.contiguous()
                ids = ids[None] if config.model_type == "gemma4_vision" else ids
            call = (torch.zeros(1), ids, *([key] if types else []))
            got, want = ours(*call), module(*call)
            if torch.is_tensor(want):
                got, want = torch.view_as_real(got), torch.view_as_real(want)
            for a, b in zip(got, want, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape, type(config).__name__
                torch.testing.assert_close(
                    a, b, atol=5e-5, rtol=0, msg=lambda m, c=config: f"{type(c)} {m}"
                )


def halved(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rope parameters with half of each head rotated, and default sections."""
    rest = {key: value for key, value in rope.items() if key != "mrope_section"}
    return {**rest, "partial_rotary_factor": 0.5}


def test_partial_rotary_factor_is_read_where_transformers_reads_it():
    # Image towers have no such factor, and with latent attention the rotated part of a
    # head has its own key.
    others = ("", "eomt_dinov3", "llama4_vision_model")
    read: dict[str, bool] = {}
    for config, module in modules():
        rope = getattr(config, "rope_parameters", None) or {}
        name, types = config.model_type, rope_layer_types(config)
        of_type = {key: rope if key is None else rope[key] for key in types}
        of_type = {k: v for k, v in of_type.items() if v.get("rope_type") == "default"}
        if not of_type or name in others or hasattr(config, "qk_rope_head_dim"):
            continue
        new = {k: halved(v) for k, v in of_type.items()}
        new = new[None] if None in new else {**rope, **new}
        given = {**config.to_dict(), "rope_parameters": new, "rotary_dim": None}
        given.pop("partial_rotary_factor", None)
        changed = copy.deepcopy(config)
        changed.rope_parameters = new
        fresh = type(module)(changed)
        for key in of_type:
            buffer = fresh.get_buffer("inv_freq" if key is None else f"{key}_inv_freq")
            try:
                layer = RotaryPositions.from_hf(given, key)
            except ValueError as error:
                # The default sections do not fit half of the pairs, or the head is odd.
                assert re.search("mrope_section must|must be even", str(error)), name
                continue
            assert layer.frequencies.shape[-1] == len(buffer), name
            read[name] = 2 * len(buffer) < layer.head_dim
    assert read["phi"] and read["glm"] and not read["llama"] and len(read) > 120


SIZES = ("head_dim", "kv_channels", "qk_rope_head_dim", "global_head_dim", "rotary_dim")


def short_configs(config: Any) -> list[dict[str, Any]]:
    """Return the dict of a config without sizes, with and without another width.

    The last one has no share of rotated features and, as a file of version 4, the other
    rope parameters beside ``rope_theta``.
    """
    full = copy.deepcopy(config.to_dict())
    left_out = {*SIZES, "per_layer_config", "transformers_version"}
    sizeless = {key: value for key, value in full.items() if key not in left_out}
    wide = {**copy.deepcopy(sizeless), "hidden_size": 2 * full.get("hidden_size", 0)}
    rope = full.get("rope_parameters") or {}
    of_types = [value for value in rope.values() if isinstance(value, dict)]
    if of_types or full["model_type"] in WITH_DEFAULT_PARAMETERS:
        return [sizeless, wide]
    old = {"partial_rotary_factor", "rotary_pct", "rope_parameters", "model_type"}
    scaling = {key: rope[key] for key in rope.keys() - {"rope_theta", *old}}
    version_4 = {
        **{key: value for key, value in full.items() if key not in old},
        "model_type": full["model_type"],
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": None if scaling in ({}, {"rope_type": "default"}) else scaling,
    }
    return [sizeless, wide, version_4]


# Without rope parameters, these have default ones, which contain the share. No file of
# version 4 has these models.
WITH_DEFAULT_PARAMETERS = {
    "moonshine_streaming",
    "nemotron3_5_transcribe_asr_audio",
    "nemotron3_5_transcribe_word_timestamp",
}
# The width of its heads is derived in a way of its own.
DERIVED = {"zamba2"}


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
def test_a_short_dict_has_the_defaults_of_its_config():
    counts = {"compared": 0, "refused": 0}
    for config in configs():
        if config.model_type in DERIVED or not config.model_type:
            continue
        for short in short_configs(config):
            given = {k: v for k, v in copy.deepcopy(short).items() if k != "model_type"}
            try:
                completed = type(config)(**given)
                types = rope_layer_types(completed)
                want = {key: rotary_from_hf(completed, key) for key in types}
            except (ValueError, StrictDataclassError):  # Sizes that do not fit.
                continue
            for key, options in want.items():
                try:
                    ours = rotary_from_hf(short, key)
                except ValueError as error:
                    assert "must have" in str(error), (config.model_type, key)
                    counts["refused"] += 1
                    continue
                counts["compared"] += 1
                assert ours.keys() == options.keys()
                for name, value in options.items():
                    equal = np.array_equal(ours[name], value)
                    assert equal, (config.model_type, key, name, ours[name], value)
    assert counts["compared"] > 500, counts
