"""All configs of transformers that describe rotary positions, and their modules."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import transformers
from torch import nn

#: A default config with one of these keys has rotary positions, or may have them.
KEYS = (
    *("rope_parameters", "rope_scaling", "rope_theta"),
    *("rotary_dim", "rotary_pct", "rotary_emb_base", "rotary_embedding_base"),
)
# Modules whose annotation names the config of another model, or no config.
_SHARED = {
    "DeepseekOcr2VisionEncoderConfig": "DeepseekOcr2VisionRotaryEmbedding",
    "Ernie4_5_VL_MoeTextConfig": "Ernie4_5_VLMoeTextRotaryEmbedding",
    "Ernie4_5_VL_MoeVisionConfig": "Ernie4_5_VLMoeVisionRotaryEmbedding",
    "MiniMaxM3VLTextConfig": "MiniMaxM3VLRotaryEmbedding",
    "MuseGlimmerTextConfig": "MuseGlimmerTextRotaryEmbedding",
    "MuseSparkTextConfig": "MuseSparkTextRotaryEmbedding",
    "PaddleOCRTextConfig": "PaddleOCRRotaryEmbedding",
    "Qwen2VLTextConfig": "Qwen2VLRotaryEmbedding",
    "Qwen2_5OmniTalkerConfig": "Qwen2_5OmniRotaryEmbedding",
    "Qwen2_5OmniTextConfig": "Qwen2_5OmniRotaryEmbedding",
    "Qwen2_5_VLTextConfig": "Qwen2_5_VLRotaryEmbedding",
    "Qwen3OmniMoeCode2WavConfig": "Qwen3OmniMoeRotaryEmbedding",
    "Qwen3OmniMoeTalkerCodePredictorConfig": "Qwen3OmniMoeRotaryEmbedding",
    "Qwen3OmniMoeTalkerTextConfig": "Qwen3OmniMoeTalkerRotaryEmbedding",
    "Step3p7TextConfig": "Step3p7RotaryEmbedding",
}


def rotary_configs() -> Iterator[Any]:
    """Yield each default config of transformers that has one of the keys of rotary."""
    for folder in pkgutil.iter_modules(transformers.models.__path__):
        package = importlib.import_module(f"transformers.models.{folder.name}")
        for file in pkgutil.iter_modules(package.__path__):
            if not file.name.startswith("configuration_"):
                continue
            module = importlib.import_module(f"{package.__name__}.{file.name}")
            for value in vars(module).values():
                if not inspect.isclass(value) or value.__module__ != module.__name__:
                    continue
                if not issubclass(value, transformers.PreTrainedConfig):
                    continue
                config = _default(value)
                if config is not None and any(map(config.to_dict().get, KEYS)):
                    yield config


def _default(config_class: type) -> Any:
    # Two have no default: their constructors require the config of a part.
    if config_class.__name__ in ("Gemma4AssistantConfig", "NougatConfig"):
        return None
    return config_class()


def rotary_class(config: Any) -> type[nn.Module] | None:
    """Return the rotary module class of a config; None if its model has no such module."""
    name = type(config).__name__
    code = importlib.import_module(
        type(config).__module__.replace("configuration_", "modeling_")
    )
    classes = {
        key: value
        for key, value in vars(code).items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and re.search("Rotary|Rope", key)
        and "Attention" not in key
    }
    if name in _SHARED:
        return classes[_SHARED[name]]
    for value in classes.values():
        annotations = inspect.signature(value).parameters.values()
        if any(name in str(parameter.annotation) for parameter in annotations):
            return value
    return next(iter(classes.values())) if len(classes) == 1 else None
