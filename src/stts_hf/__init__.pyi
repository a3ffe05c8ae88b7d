"""The public names: type checkers and editors read them here, and so does `__init__.py`."""

from .auto_classes import register_auto_classes as register_auto_classes
from .checkpoints.convert import convert_checkpoint as convert_checkpoint
from .checkpoints.push import push_checkpoint as push_checkpoint
from .data.collator import STTSDataCollator as STTSDataCollator
from .data.encoding import align_labels as align_labels
from .data.loading import load_rows as load_rows
from .data.prefetch import prefetch as prefetch
from .data.preparing import prepare_rows as prepare_rows
from .data.rows import RowError as RowError
from .data.sample_packing import PackedDataset as PackedDataset
from .inference.assistant import VideoAssistant as VideoAssistant
from .inference.assistant import load as load
from .inference.clip import Clip as Clip
from .inference.clip import Dialogue as Dialogue
from .inference.engine import answer_videos as answer_videos
from .inference.requests import Answer as Answer
from .modeling.configuration_stts import STTSConfig as STTSConfig
from .modeling.configuration_stts import STTSVisionConfig as STTSVisionConfig
from .modeling.configuration_stts_qwen2_5_vl import STTSQwen2_5_VLConfig as STTSQwen2_5_VLConfig
from .modeling.configuration_stts_qwen2_5_vl import STTSQwen2_5_VLVisionConfig as STTSQwen2_5_VLVisionConfig
from .modeling.configuration_stts_qwen3_5 import STTSQwen3_5Config as STTSQwen3_5Config
from .modeling.configuration_stts_qwen3_5 import STTSQwen3_5VisionConfig as STTSQwen3_5VisionConfig
from .modeling.configuration_stts_qwen3_5_moe import STTSQwen3_5MoeConfig as STTSQwen3_5MoeConfig
from .modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig as STTSQwen3VLConfig
from .modeling.configuration_stts_qwen3_vl import STTSQwen3VLVisionConfig as STTSQwen3VLVisionConfig
from .modeling.configuration_stts_qwen3_vl_moe import STTSQwen3VLMoeConfig as STTSQwen3VLMoeConfig
from .modeling.configuration_stts_smolvlm import STTSSmolVLMConfig as STTSSmolVLMConfig
from .modeling.configuration_stts_smolvlm import STTSSmolVLMVisionConfig as STTSSmolVLMVisionConfig
from .modeling.modeling_stts import STTSForConditionalGeneration as STTSForConditionalGeneration
from .modeling.modeling_stts import STTSModel as STTSModel
from .modeling.modeling_stts_qwen2_5_vl import (
    STTSQwen2_5_VLForConditionalGeneration as STTSQwen2_5_VLForConditionalGeneration,
)
from .modeling.modeling_stts_qwen2_5_vl import STTSQwen2_5_VLModel as STTSQwen2_5_VLModel
from .modeling.modeling_stts_qwen3_5 import (
    STTSQwen3_5ForConditionalGeneration as STTSQwen3_5ForConditionalGeneration,
)
from .modeling.modeling_stts_qwen3_5 import STTSQwen3_5Model as STTSQwen3_5Model
from .modeling.modeling_stts_qwen3_5_moe import (
    STTSQwen3_5MoeForConditionalGeneration as STTSQwen3_5MoeForConditionalGeneration,
)
from .modeling.modeling_stts_qwen3_5_moe import STTSQwen3_5MoeModel as STTSQwen3_5MoeModel
from .modeling.modeling_stts_qwen3_vl import (
    STTSQwen3VLForConditionalGeneration as STTSQwen3VLForConditionalGeneration,
)
from .modeling.modeling_stts_qwen3_vl import STTSQwen3VLModel as STTSQwen3VLModel
from .modeling.modeling_stts_qwen3_vl_moe import (
    STTSQwen3VLMoeForConditionalGeneration as STTSQwen3VLMoeForConditionalGeneration,
)
from .modeling.modeling_stts_qwen3_vl_moe import STTSQwen3VLMoeModel as STTSQwen3VLMoeModel
from .modeling.modeling_stts_smolvlm import (
    STTSSmolVLMForConditionalGeneration as STTSSmolVLMForConditionalGeneration,
)
from .modeling.modeling_stts_smolvlm import STTSSmolVLMModel as STTSSmolVLMModel
from .modeling.processing_stts import STTSProcessor as STTSProcessor
from .modeling.processing_stts_smolvlm import STTSSmolVLMProcessor as STTSSmolVLMProcessor
from .modeling.video_processing_stts import STTSVideoProcessor as STTSVideoProcessor
from .modeling.video_processing_stts_smolvlm import STTSSmolVLMVideoProcessor as STTSSmolVLMVideoProcessor
from .modeling.vision_stts import STTSVisionModel as STTSVisionModel
from .modeling.vision_stts_qwen2_5_vl import STTSQwen2_5_VLVisionModel as STTSQwen2_5_VLVisionModel
from .modeling.vision_stts_qwen3_vl import STTSQwen3VLVisionModel as STTSQwen3VLVisionModel
from .modeling.vision_stts_smolvlm import STTSSmolVLMVisionModel as STTSSmolVLMVisionModel
from .training.arguments import STTSTrainingArguments as STTSTrainingArguments
from .training.sft import STTSSFTTrainer as STTSSFTTrainer
from .training.trainer import STTSTrainer as STTSTrainer
from .versions import __version__ as __version__
from .visualize.contact_sheet import contact_sheet as contact_sheet

__all__: list[str]
