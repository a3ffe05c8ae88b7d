"""Brings the tests of the installed transformers: `make test-transformers` runs them over this project's classes.

They are taken from its source distribution, as a package `transformers_tests`, because `tests` is the name of ours. The
distribution holds the common tests, but not all that they import: for what is missing, stand-ins are written that test
nothing. A checkout of the same version has everything, the tests of `generate` and of export among it:

    python -m tests.suites.fetch [CHECKOUT]
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

FOLDER = Path(__file__).resolve().parents[2] / "build" / f"transformers-{transformers.__version__}"
PACKAGE = "transformers_tests"

HELPER = "utils/fetch_hub_objects_for_ci.py"
# What the common tests import of files that the distribution lacks.
STAND_INS = {
    f"{PACKAGE}/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    f"{PACKAGE}/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    f"{PACKAGE}/utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
    HELPER: "def url_to_local_path(url):\n    return url\n",
}


def distribution(folder: Path) -> Path:
    """Unpacks the source distribution of the installed transformers; returns its folder of tests."""
    wanted = f"transformers=={transformers.__version__}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # PyTorch needs setuptools, so it is there; an environment of the build's own would only take time.
    options = ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    subprocess.run([*pip, *options, wanted], check=True)
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "tests"


def checkout(folder: Path) -> Path:
    """Tests of a checkout; raises `SystemExit` where it is none, or one of another version."""
    setup = folder / "setup.py"
    if not (folder / "tests").is_dir() or not setup.is_file():
        raise SystemExit(f"{folder} is no checkout of transformers: it has no `tests` or no `setup.py`.")
    if f'version="{transformers.__version__}"' not in setup.read_text():
        raise SystemExit(
            f"{folder} is not of transformers {transformers.__version__}, which is installed: "
            f"`git checkout v{transformers.__version__}` there."
        )
    return folder / "tests"


def install(tests: Path) -> None:
    """Makes `tests` the package, with stand-ins for what it lacks; a folder appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        new = Path(scratch) / FOLDER.name
        shutil.copytree(tests, new / PACKAGE)
        (new / HELPER).parent.mkdir()
        if (tests.parent / HELPER).is_file():
            shutil.copy(tests.parent / HELPER, new / HELPER)
        (new / PACKAGE / "__init__.py").touch()
        for name, text in STAND_INS.items():
            file = new / name
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                (file.parent / "__init__.py").touch()
                file.write_text(text)
        shutil.rmtree(FOLDER, ignore_errors=True)
        new.rename(FOLDER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, help="folder of transformers' repository")
    given = parser.parse_args().checkout
    if given is None and FOLDER.exists():
        return
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        install(distribution(Path(folder)) if given is None else checkout(given))


if __name__ == "__main__":
    main()
