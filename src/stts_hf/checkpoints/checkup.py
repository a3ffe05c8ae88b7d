"""A checkpoint folder under examination: what its checks share, and what they yield."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stts_hf.modeling.configuration_stts import STTSConfig

from .json_files import read_json
from .sources import HuggingFaceSource

_TABLES = ("auto_map", "video_processor", "image_processor", "vision_config", "text_config", "adapter_config")
SAVE_AGAIN = "load it with the stts_hf package and save it again, or run stts-hf convert on it"


@dataclass(frozen=True)
class Finding:
    """Something wrong: what, how to mend it, and whether the checkpoint cannot be used until then."""

    what: str
    remedy: str
    fatal: bool = True


class Checkup:
    """One folder and what its checks share. Every check yields `Finding`s, none where all is well."""

    def __init__(self, folder: Path):
        self.folder = folder

    def json(self, name: str) -> dict[str, Any]:
        """The contents of a JSON file, empty where it is missing; raises `ValueError` where it is damaged."""
        settings = read_json(self.folder / name)
        parts: dict[str, Any] = {
            "": settings,
            **{f"{key}.": settings.get(key) for key in ("video_processor", "image_processor")},
        }
        for prefix, part in parts.items():
            for key in _TABLES if isinstance(part, dict) else ():
                if part.get(key) is not None and not isinstance(part[key], dict):
                    raise ValueError(f"`{prefix}{key}` in {name} must be a JSON object, but is {part[key]!r}")
        return settings

    @cached_property
    def config(self) -> STTSConfig | None:
        """The configuration, None where it cannot be read (`check_config` says why)."""
        try:
            raw = self.json("config.json")
            return STTSConfig.from_dict(raw) if raw.get("model_type") == STTSConfig.model_type else None
        except Exception:
            return None

    @cached_property
    def weights(self) -> HuggingFaceSource | None:
        """Names, shapes and dtypes of the weights, None where they cannot be read (`check_weights` says why)."""
        try:
            return HuggingFaceSource(self.folder)
        except (ValueError, OSError):
            return None

    @cached_property
    def is_quantised(self) -> bool:
        """Whether `quantization_config` says that the weights are a quantiser's, of which only that knows the names."""
        return isinstance(self.json("config.json").get("quantization_config"), dict)
