"""What lmms-eval finds by the entry point `lmms_eval.models`, without importing a model."""

from lmms_eval.models.registry_v2 import ModelManifest

MANIFEST = ModelManifest("stts", chat_class_path="stts_hf.evaluation.lmms_model.STTS")
