"""Fine-tuning: data, trainer and what they need. The public names below are imported on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collator import STTSDataCollator
    from .data import check_rows, load_rows
    from .lengths import measure_lengths
    from .packing import PackedDataset
    from .rows import RowError

_MODULES = {
    "PackedDataset": "packing",
    "RowError": "rows",
    "STTSDataCollator": "collator",
    "check_rows": "data",
    "load_rows": "data",
    "measure_lengths": "lengths",
}
__all__ = ["PackedDataset", "RowError", "STTSDataCollator", "check_rows", "load_rows", "measure_lengths"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
