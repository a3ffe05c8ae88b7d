"""
STTS (Spatio-Temporal Token Scoring) for Hugging Face.

The public names, which `__init__.pyi` lists, are imported on first use, so that `import stts_hf` takes milliseconds.
The first use of a configuration, model or processor also registers transformers' Auto classes for `model_type` "stts"
and the like of every backbone: from then on checkpoints load without `trust_remote_code`, and by this package's code
even with it. `import stts_hf` alone registers nothing.
"""

import ast as _ast
import importlib as _importlib
import pkgutil as _pkgutil
import typing as _typing

from stts_hf.versions import __version__ as __version__

# The module of each public name; the stub lists them once, for type checkers too.
_MODULES = {
    alias.name: node.module
    for node in _ast.parse(_pkgutil.get_data(__name__, "__init__.pyi")).body
    if isinstance(node, _ast.ImportFrom)
    for alias in node.names
    if not alias.name.startswith("_")
}

_EXTRAS = {"datasets": "train", "peft": "train", "pyarrow": "train", "trl": "trl"}

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name == "VideoAnswer":
        import warnings

        warnings.warn("stts_hf.VideoAnswer is now stts_hf.Answer.", DeprecationWarning, stacklevel=2)
        name = "Answer"
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _importlib.import_module(f"{__name__}.versions").check_versions()
    if _MODULES[name].startswith("modeling."):
        _importlib.import_module(f"{__name__}.auto_classes").register_auto_classes()
    try:
        return getattr(_importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        missing: _typing.Any = error
        while missing.name is None and isinstance(missing.__cause__, ModuleNotFoundError):  # within transformers
            missing = missing.__cause__
        package = (missing.name or __name__).partition(".")[0]
        if package == __name__:
            raise
        needed = f"'stts-hf[{_EXTRAS[package]}]'" if package in _EXTRAS else package
        raise ImportError(f"stts_hf.{name} needs {package}, which is not installed: pip install {needed}.") from error


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
