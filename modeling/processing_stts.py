"""Text, images and videos to model inputs: Molmo2's processor, with timestamps that are those of the frames shown."""

from .settings_stts import check_frame_settings
from .video_processing_stts import STTSVideoProcessor, as_paths  # isort: split

import os
from typing import TYPE_CHECKING, Any

from transformers.models.molmo2.processing_molmo2 import Molmo2Processor
from transformers.models.molmo2.video_processing_molmo2 import Molmo2VideoProcessor

if TYPE_CHECKING:
    # Never imported. transformers saves every module named here, so a saved processor carries the model's code,
    # which `Trainer` counts on when it pushes a checkpoint in the middle of training.
    from .modeling_stts import STTSForConditionalGeneration  # noqa: F401


class STTSProcessor(Molmo2Processor):
    """Molmo2's processor around an `STTSVideoProcessor`.

    The prompt gives each frame's real time in seconds since the first frame, whatever the file's frame rate and start
    time. The video processor's settings (`num_frames`, `max_fps`, `fps`, `test_time_scaling`, ...) work per call too.
    A text holds at most one video and any number of images; a batch may mix texts with and without them.

    Args:
        image_processor, video_processor, tokenizer, chat_template: as in every transformers processor. A Molmo2 video
            processor, as a Molmo2 checkpoint has, becomes an `STTSVideoProcessor` of the same settings.
        image_use_col_tokens: whether each row of an image's high-resolution view ends with `<im_col>`.
        use_single_crop_col_tokens: the same for its low-resolution view, `None` follows `image_use_col_tokens`.
        use_single_crop_start_token: whether the low-resolution view starts with `<low_res_im_start>`.
        video_use_col_tokens: whether each row of a video frame ends with `<im_col>`.
        use_frame_special_tokens: whether frames are wrapped in `<frame_start>`, `<frame_end>` or in an image's tokens.

    Raises:
        ValueError: the tokenizer lacks tokens that stand for images and videos, or has neither a bos nor an eos token.
    """

    max_videos = 1  # in a text
    adds_bos = True  # before every text: the bos token, or else the eos token

    def __init__(  # every argument by name: only those are saved
        self,
        image_processor: Any = None,
        video_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        image_use_col_tokens: bool | None = True,
        use_single_crop_col_tokens: bool | None = None,
        use_single_crop_start_token: bool | None = True,
        video_use_col_tokens: bool | None = False,
        use_frame_special_tokens: bool | None = True,
        **kwargs: Any,
    ) -> None:
        if type(video_processor) is Molmo2VideoProcessor:
            settings = video_processor.to_dict()
            kept = settings.keys() - {"video_processor_type", "processor_class", "auto_map"}
            video_processor = STTSVideoProcessor(**{name: settings[name] for name in kept})
        super().__init__(
            image_processor,
            video_processor,
            tokenizer,
            chat_template=chat_template,
            image_use_col_tokens=image_use_col_tokens,
            use_single_crop_col_tokens=use_single_crop_col_tokens,
            use_single_crop_start_token=use_single_crop_start_token,
            video_use_col_tokens=video_use_col_tokens,
            use_frame_special_tokens=use_frame_special_tokens,
            **kwargs,
        )
        of_vision = {*self.image_token_ids, self.image_token_id, self.video_token_id}
        if of_vision & {None, tokenizer.unk_token_id}:
            raise ValueError("tokenizer lacks image or video tokens, such as <frame_start>. Use Molmo2's tokenizer.")
        if tokenizer.bos_token is None and tokenizer.eos_token is None:
            raise ValueError("tokenizer has neither bos_token nor eos_token. Set one: every prompt starts with it.")

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> list[str]:
        """As in transformers; options of loading the tokenizer are not saved."""
        for option in ("is_local", "local_files_only"):
            self.tokenizer.init_kwargs.pop(option, None)
        return super().save_pretrained(save_directory, *args, **kwargs)

    def prepare_inputs_layout(
        self, images: Any = None, text: Any = None, videos: Any = None, audio: Any = None, **kwargs: Any
    ) -> Any:
        """Native layout of the inputs; takes path objects, and empty lists for no videos. Checks videos' settings."""
        check_frame_settings(self.video_processor, kwargs)
        videos = None if videos is None else as_paths(videos)
        videos = None if isinstance(videos, list) and not videos else videos
        return super().prepare_inputs_layout(images=images, text=text, videos=videos, audio=audio, **kwargs)

    def replace_video_token(self, video_inputs: dict, video_idx: int, **kwargs: Any) -> str:
        """The text that stands for a video: per frame its time in seconds and one `<im_patch>` per block of patches."""
        frame_times = getattr(video_inputs["video_metadata"][video_idx], "frame_times", None)
        if frame_times is None:
            return super().replace_video_token(video_inputs, video_idx, **kwargs)
        return self.get_video_string(video_inputs["video_grids"][video_idx], frame_times)


STTSProcessor.register_for_auto_class("AutoProcessor")
