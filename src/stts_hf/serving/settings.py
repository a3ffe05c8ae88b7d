"""What vLLM's own settings must be for STTS: checked, or set where a server's user cannot know them."""

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from stts_hf.modeling.budget_stts import REPLACED

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.stts_hf")  # vLLM shows loggers below its own

SCHEDULER = "stts_hf.serving.scheduler.WholeVisionScheduler"


class ServingSettings(VerifyAndUpdateConfig):
    """Hooks that vLLM calls with its settings before anything is built, for every backbone."""

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        """Raises what the configuration raises for settings, such as `--hf-overrides`, that cannot be."""
        config: Any = model_config.hf_config
        for name in config.vision_settings:  # `--hf-overrides` sets attributes, where `from_pretrained` sorts them
            if name in vars(config):
                setattr(config.vision_config, name, vars(config).pop(name))
        config.vision_config.validate_pruning()
        config.validate()
        for name in REPLACED:
            if (value := getattr(config.vision_config, name)) is not None:
                raise ValueError(
                    f"`{name}` is {value}, but vLLM needs the number of kept tokens before the tower runs, so it "
                    "serves only a fixed ratio. Serve "
                    f'with --hf-overrides \'{{"{name}": null, "pruning_ratio": 0.5}}\', or use `stts-hf predict`.'
                )
        multimodal = model_config.multimodal_config
        if multimodal is not None and multimodal.video_pruning_rate:
            raise ValueError(
                f"--video-pruning-rate {multimodal.video_pruning_rate} is for vLLM's own pruning (EVS), not for STTS. "
                f"Set STTS's ratio with --hf-overrides '{{\"pruning_ratio\": {multimodal.video_pruning_rate}}}'."
            )
        if multimodal is not None:
            from stts_hf.serving.processing import VIDEO_LOADER  # here, since it imports vLLM's processors

            # vLLM's own loaders would choose the frames themselves. It finds ours by the video processor's name only
            # where the checkpoint has a file for that processor alone.
            multimodal.media_io_kwargs.setdefault("video", {}).setdefault("video_backend", VIDEO_LOADER)

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        """Raises `ValueError` for what would silently compute something else."""
        from vllm.platforms import current_platform

        model = vllm_config.model_config
        if not current_platform.is_cpu() and not model.enforce_eager:
            raise ValueError(
                f"STTS on {current_platform.device_name} needs --enforce-eager: CUDA graphs replay tensors at fixed "
                "addresses, but each step makes new positions."
            )
        if vllm_config.speculative_config is not None:
            raise ValueError("STTS is not served with speculative decoding. Leave --speculative-config out.")


class Molmo2Settings(ServingSettings):
    """Those of Molmo2 too, whose vision tokens see each other in both directions."""

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        ServingSettings.verify_and_update_model_config(model_config)
        config: Any = model_config.hf_config
        text = config.text_config
        # As vLLM's text model calls it.
        text.use_qk_norm, text.rope_theta = text.qk_norm_type is not None, text.rope_parameters["rope_theta"]
        if config.pruned_position_ids == "original" and config.vision_config.pruning_ratio > 0:
            # vLLM lets positions differ from places only for models of several axes. All of ours are the first.
            text.rope_parameters["mrope_section"] = [text.head_dim // 2, 0, 0]

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            raise ValueError(
                f"STTS on Molmo2 is served on CPUs only so far, and this is {current_platform.device_name}: the "
                "attention among Molmo2's vision tokens is written for vLLM's CPU backend. On a GPU use the model in "
                "transformers, with `stts-hf predict` for many videos; or serve Qwen3-VL."
            )
        ServingSettings.verify_and_update_config(vllm_config)
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        if cache.cache_dtype not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")):
            raise ValueError(f"STTS on Molmo2 is not served with --kv-cache-dtype {cache.cache_dtype}. Leave it out.")
        if scheduler.scheduler_cls not in (None, SCHEDULER):
            raise ValueError(
                f"--scheduler-cls {scheduler.scheduler_cls} might cut a prompt between its vision tokens, which see "
                "each other in both directions. Leave it out: STTS brings a scheduler that does not."
            )
        scheduler.scheduler_cls, scheduler.async_scheduling = SCHEDULER, False
        longest = vllm_config.model_config.max_model_len
        if scheduler.max_num_batched_tokens < longest:
            # Vision tokens go through the language model in one step. A prompt that does not fit would wait for ever.
            logger.info("STTS raises max_num_batched_tokens to max_model_len, %d.", longest)
            scheduler.max_num_batched_tokens = longest
            scheduler.max_num_encoder_input_tokens = scheduler.encoder_cache_size = longest
