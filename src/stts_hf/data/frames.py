"""Moved to `stts_hf.video.processors`; this name stays for one release."""

import warnings
from typing import Any

from stts_hf.video import processors


def __getattr__(name: str) -> Any:
    found = getattr(processors, name)
    warnings.warn("stts_hf.data.frames is now stts_hf.video.processors.", DeprecationWarning, stacklevel=2)
    return found
