"""Brings the tests of the installed transformers and PEFT, which `make test-transformers` runs over our classes.

They are taken from the source distributions, as packages `transformers_tests` and `peft_tests`, because `tests` is the
name of ours. transformers' holds the common tests, but not all that they import: for what is missing, stand-ins are
written that test nothing. A checkout of the same version has everything, also the tests of `generate` and of export:

    python -m tests.suites.fetch [CHECKOUT]
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build"
HELPER = "utils/fetch_hub_objects_for_ci.py"
# What the tests import of files that the distribution lacks, by the package whose tests they are.
STAND_INS = {
    "transformers": {
        "transformers_tests/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
        "transformers_tests/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
        "transformers_tests/utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
        HELPER: "def url_to_local_path(url):\n    return url\n",
    },
    "peft": {},
}


def folder_of(name: str) -> Path:
    """Where the tests of the installed `name` are."""
    return BUILD / f"{name}-{version(name)}"


def distribution(name: str, folder: Path) -> Path:
    """Unpacks the source distribution of the installed `name`; returns its folder of tests."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # PyTorch needs setuptools, so it is there; an environment of the build's own would only take time.
    options = ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    subprocess.run([*pip, *options, f"{name}=={version(name)}"], check=True)
    (archive,) = folder.glob(f"{name}-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "tests"


def checkout(folder: Path) -> Path:
    """Tests of a checkout of transformers; raises `SystemExit` for another version's."""
    setup, installed = folder / "setup.py", version("transformers")
    if not setup.is_file() or f'version="{installed}"' not in setup.read_text():
        raise SystemExit(f"{folder} is no checkout of transformers {installed}, which is installed.")
    return folder / "tests"


def install(name: str, tests: Path) -> None:
    """Makes `tests` the package, with stand-ins for what it lacks; a folder appears whole or not at all."""
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        new = Path(scratch) / name
        shutil.copytree(tests, new / f"{name}_tests")
        (new / f"{name}_tests" / "__init__.py").touch()
        for file in new.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if "\nfrom tests." in text:
                file.write_text(text.replace("\nfrom tests.", f"\nfrom {name}_tests."), encoding="utf-8")
        if (tests.parent / HELPER).is_file():
            (new / HELPER).parent.mkdir()
            shutil.copy(tests.parent / HELPER, new / HELPER)
        for path, text in STAND_INS[name].items():
            file = new / path
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                (file.parent / "__init__.py").touch()
                file.write_text(text)
        shutil.rmtree(folder_of(name), ignore_errors=True)
        new.rename(folder_of(name))


if __name__ == "__main__":
    for given in sys.argv[1:]:
        install("transformers", checkout(Path(given)))
    for missing in [name for name in STAND_INS if not folder_of(name).exists()]:
        with tempfile.TemporaryDirectory() as scratch:
            install(missing, distribution(missing, Path(scratch)))
