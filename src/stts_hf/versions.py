"""The version of this package, and a check of those that it needs. Imports the standard library alone."""

import functools

__version__ = "0.1.0"


@functools.cache
def check_versions(extra: str = "") -> None:
    """Raises `ImportError` naming the package and version that are needed, by stts-hf or by its `extra`."""
    import re
    from importlib.metadata import PackageNotFoundError, requires

    from transformers.utils.versions import require_version

    try:
        requirements = requires("stts-hf") or []
    except PackageNotFoundError:  # imported from a checkout that is not installed
        return
    for requirement in requirements:
        needed, _, marker = requirement.partition(";")
        if not marker or f'extra == "{extra}"' in marker:
            require_version(re.sub(r"\[.*?\]", "", needed).strip())  # which knows no extras, as of ray[data]
