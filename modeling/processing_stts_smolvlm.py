"""Text, images and videos to model inputs: SmolVLM2's processor, whose videos do not lie among the images."""

from .settings_stts import check_frame_settings
from .video_processing_stts_smolvlm import STTSSmolVLMVideoProcessor  # isort: split

from typing import TYPE_CHECKING, Any

import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

if TYPE_CHECKING:
    # Never imported: transformers saves every module named here, so a saved processor carries the model's code.
    from .modeling_stts_smolvlm import STTSSmolVLMForConditionalGeneration  # noqa: F401


class STTSSmolVLMProcessor(SmolVLMProcessor):
    """SmolVLM2's processor around an `STTSSmolVLMVideoProcessor`; needs the package `num2words`, as the native one.

    Prompts are native. Beside native inputs of texts and images it returns `pixel_values_videos` and `video_grids` of
    all videos, and `mm_token_type_ids` (B, L): 1 for placeholders of images, 2 for those of videos.

    Args:
        image_processor, video_processor, tokenizer, chat_template: as in every transformers processor. A native video
            processor becomes an `STTSSmolVLMVideoProcessor` of the same settings.
        image_seq_len: tokens of an image, of a tile or of a frame.
    """

    def __init__(  # every argument by name: only those are saved
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        video_processor: Any = None,
        image_seq_len: int = 169,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        if type(video_processor) is SmolVLMVideoProcessor:
            settings = video_processor.to_dict()
            kept = settings.keys() - {"video_processor_type", "processor_class", "auto_map"}
            video_processor = STTSSmolVLMVideoProcessor(**{name: settings[name] for name in kept})
        if video_processor is not None:  # else native code names what is missing
            video_processor.image_seq_len = image_seq_len
        super().__init__(image_processor, tokenizer, video_processor, image_seq_len, chat_template, **kwargs)

    def __call__(self, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any) -> BatchFeature:
        """
        As in the native processor, with the inputs of videos that the class names. Raises `ValueError` for settings of
        videos that the processor does not have or that no call may change.
        """
        check_frame_settings(self.video_processor, kwargs)
        kwargs.pop("return_mm_token_type_ids", None)
        wants_offsets = kwargs.pop("return_text_replacement_offsets", False)
        outputs = super().__call__(images, text, videos, return_text_replacement_offsets=True, **kwargs)
        if text is None:
            return outputs
        replaced = outputs["text_replacement_offsets"] if wants_offsets else outputs.pop("text_replacement_offsets")
        types = []
        for ids, of_row in zip(outputs["input_ids"], replaced or [[]] * len(outputs["input_ids"]), strict=True):
            counts = [(part["replacement"].count(self.image_token), part["type"] == "video") for part in of_row]
            kinds = iter([1 + is_video for count, is_video in counts for _ in range(count)])
            types.append([next(kinds, 0) if token == self.image_token_id else 0 for token in ids])
        outputs["mm_token_type_ids"] = types
        return outputs.convert_to_tensors(kwargs.get("return_tensors"))

    def _get_num_multimodal_tokens(self, image_sizes: Any, **kwargs: Any) -> dict[str, list[int]]:
        """Tokens that stand for each image of such a (height, width), in tiles where it is split."""
        counts = []
        for height, width in image_sizes:
            _, rows, cols = self.image_processor.get_number_of_image_patches(height, width, {})
            text = self.replace_image_token({"rows": [[rows]], "cols": [[cols]]}, 0)
            counts.append(len(self.tokenizer(text)["input_ids"]))
        return {"num_image_tokens": counts}

    def replace_video_token(self, video_inputs: dict, video_idx: int, **kwargs: Any) -> str:
        """The native text that stands for a video: its frames' number and times, and their placeholders."""
        num_frames = int(video_inputs["video_grids"][video_idx][0])
        as_native = {
            "pixel_values": torch.empty(1, num_frames),
            "video_metadata": {0: video_inputs["video_metadata"][video_idx]},
        }
        return super().replace_video_token(as_native, 0, **kwargs)


STTSSmolVLMProcessor.register_for_auto_class("AutoProcessor")
