"""
STTS (Spatio-Temporal Token Scoring) for Hugging Face.

The public names, which `__init__.pyi` lists, are imported on first use, so that `import stts_hf` takes milliseconds.
The first use of a configuration, model or processor also registers transformers' Auto classes for `model_type` "stts"
and the like of every backbone: from then on checkpoints load without `trust_remote_code`, and by this package's code
even with it. `import stts_hf` alone registers nothing.
"""

import functools as _functools
import importlib as _importlib
import typing as _typing

from stts_hf.versions import __version__ as __version__

_EXTRAS = {"datasets": "train", "peft": "train", "pyarrow": "train", "trl": "trl"}


@_functools.cache
def _modules() -> dict[str, str]:
    """The module of each public name, as the stub lists them, which type checkers read too."""
    import ast
    import pkgutil

    stub: _typing.Any = pkgutil.get_data(__name__, "__init__.pyi")
    return {
        alias.name: str(node.module)
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not alias.name.startswith("_")
    }


def __getattr__(name: str) -> object:
    if name == "__all__":
        return list(_modules())
    if name == "VideoAnswer":
        import warnings

        warnings.warn("stts_hf.VideoAnswer is now stts_hf.Answer.", DeprecationWarning, stacklevel=2)
        name = "Answer"
    module = _modules().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _importlib.import_module(f"{__name__}.versions").check_versions()
    if module.startswith("modeling."):
        _importlib.import_module(f"{__name__}.auto_classes").register_auto_classes()
    try:
        return getattr(_importlib.import_module(f"{__name__}.{module}"), name)
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
    return sorted([*_modules(), "__version__"])
