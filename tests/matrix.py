"""Runs the suite with other versions of what it stands on, one environment after another: `make test-matrix`.

Each torch has an environment of its own, built, used and removed before the next (6 GB each). The others are thin: a
few packages laid over the environment that runs this script. Prints a row of docs/versions.md for each.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parent.parent
SHOWN = ("torch", "torchvision", "transformers", "accelerate", "peft", "trl")


def lowest(*names: str) -> list[str]:
    """`name==version` of the floors that pyproject.toml states."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    parts = [(line.name, part) for line in map(Requirement, lines) for part in line.specifier]
    floors = {name: part.version for name, part in parts if part.operator == ">="}
    return [f"{name}=={floors[name]}" for name in names]


@dataclass(frozen=True)
class Environment:
    """
    packages: what pip is asked for. torch: they bring libraries that must not mix with those underneath, so they are
    installed before anything is. alone: nothing is underneath.
    """

    packages: list[str]
    torch: bool = False
    alone: bool = False


ENVIRONMENTS = {
    "known-good": Environment([]),
    "torch-lowest": Environment(lowest("torch", "torchvision"), torch=True),
    "torch-newest": Environment(["torch", "torchvision"], torch=True),
    "transformers-5.20": Environment(["transformers==5.20.*"]),
    "transformers-5.21": Environment(["transformers==5.21.*"]),
    "transformers-5.22": Environment(["transformers==5.22.*"]),
    "lowest-accelerate-peft": Environment(lowest("accelerate", "peft")),
    "all-newest": Environment(["-e", f"{REPOSITORY}[dev]"], alone=True),
}


def build(folder: Path, wanted: Environment) -> Path:
    """Makes an environment; returns its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    underneath = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    if not (wanted.torch or wanted.alone):
        (site / "underneath.pth").write_text(underneath)
    if wanted.packages:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        subprocess.run([*pip, *wanted.packages], check=True)
    if wanted.torch:
        (site / "underneath.pth").write_text(underneath)
    return python


def run_suite(python: Path, arguments: list[str]) -> dict[str, int]:
    """Number of tests of each outcome."""
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    process = subprocess.Popen(
        [python, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    last = ""
    for last in process.stdout:
        sys.stderr.write(last)
    process.wait()
    return {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}


def versions(python: Path) -> list[str]:
    code = f"from importlib.metadata import version\nfor name in {SHOWN}: print(version(name))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def main() -> int:
    """Runs what was asked for; returns 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *ENVIRONMENTS], metavar="NAME", help="which (default: all)")
    parser.add_argument("--pytest", default="-n 2", metavar="ARGUMENTS", help="of pytest (default: %(default)s)")
    arguments = parser.parse_args()
    print(f"| environment | {' | '.join(SHOWN)} | passed | failed | skipped |")
    green = True
    for name in arguments.names or ENVIRONMENTS:
        with tempfile.TemporaryDirectory(prefix="stts-matrix-") as folder:
            python = build(Path(folder), ENVIRONMENTS[name])
            counts = run_suite(python, shlex.split(arguments.pytest))
            failed = counts.get("failed", 0) + counts.get("error", 0)
            row = [name, *versions(python), counts.get("passed", 0), failed, counts.get("skipped", 0)]
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        green = green and not failed and "passed" in counts
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
