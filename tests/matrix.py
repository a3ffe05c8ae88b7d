"""Runs the suite with other versions of what it stands on, one environment after another: `make test-matrix`.

Each environment is built, used and removed before the next (6 GB each). Prints a row of counts for each.
"""

import argparse
import itertools
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent
SHOWN = ("torch", "torchvision", "transformers", "accelerate", "peft", "trl")
OUTCOMES = ("passed", "failed", "error", "skipped")


def known_good() -> dict[str, str]:
    """The versions of constraints.txt by name."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if "==" in line]
    return {canonicalize_name(name): version for name, version in pins}


def lowest() -> dict[str, str]:
    """The floors that pyproject.toml states, by name."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    parts = [(canonicalize_name(line.name), part) for line in map(Requirement, lines) for part in line.specifier]
    return {name: part.version for name, part in parts if part.operator == ">="}


# What pip is held to; of everything else it takes the newest.
ENVIRONMENTS = {
    "known-good": known_good(),
    "transformers-5.22": known_good() | {"transformers": "5.22.*"},
    "transformers-5.21": known_good() | {"transformers": "5.21.*"},
    "lowest": lowest(),
    "newest": {},
}


def build(folder: Path, pins: dict[str, str]) -> Path:
    """Makes an environment; returns its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    (folder / "constraints.txt").write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run([*pip, "-c", str(folder / "constraints.txt"), "-e", f"{REPOSITORY}[dev]"], check=True)
    return python


def run_suite(python: Path, arguments: list[str]) -> dict[str, int]:
    """Number of tests of each outcome."""
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for last in process.stdout:
        sys.stderr.write(last)
    process.wait()
    counts = {outcome: int(number) for number, outcome in re.findall(rf"(\d+) ({'|'.join(OUTCOMES)})", last)}
    return dict.fromkeys(OUTCOMES, 0) | counts


def installed(python: Path) -> list[str]:
    code = f"from importlib.metadata import version\nfor name in {SHOWN}: print(version(name))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def main() -> int:
    """Runs what was asked for; returns 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *ENVIRONMENTS], metavar="NAME", help="which (default: all)")
    parser.add_argument("--pytest", default="-n 2", metavar="ARGUMENTS", help="of pytest (default: %(default)s)")
    arguments = parser.parse_args()
    print(f"| environment | {' | '.join(SHOWN)} | {' | '.join(OUTCOMES)} |")
    green = True
    for name in arguments.names or ENVIRONMENTS:
        with tempfile.TemporaryDirectory(prefix="stts-matrix-") as folder:
            python = build(Path(folder), ENVIRONMENTS[name])
            counts = run_suite(python, shlex.split(arguments.pytest))
            row = [name, *installed(python), *(counts[outcome] for outcome in OUTCOMES)]
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        green = green and counts["passed"] > 0 and counts["failed"] == counts["error"] == 0
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
