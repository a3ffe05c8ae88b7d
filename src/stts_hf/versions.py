"""The version of this package, and a check of those that it needs. Imports the standard library alone."""

import functools

__version__ = "0.1.0"


@functools.cache
def check_versions(extra: str = "") -> None:
    """Raises `ImportError` naming the package and version that are needed, by stts-hf or by its `extra`."""
    import re
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        requirements = metadata.requires("stts-hf") or []
    except metadata.PackageNotFoundError:  # imported from a checkout that is not installed
        return
    for text in requirements:
        needed, _, marker = text.partition(";")
        if marker and f'extra == "{extra}"' not in marker:
            continue
        requirement, wanted = Requirement(needed), re.sub(r"\[.*?\]|\s", "", needed)
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found = ""
        if not found or not requirement.specifier.contains(found, prereleases=True):
            but = f"found {requirement.name}=={found}" if found else "is not installed"
            command = "" if extra else f": pip install '{wanted}'"
            raise ImportError(f"{wanted} is required by stts-hf{f'[{extra}]' if extra else ''}, but {but}{command}.")
