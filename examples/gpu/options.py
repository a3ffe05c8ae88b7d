"""What all parts are told: `--device cuda --size full FOLDER`."""

import argparse
from pathlib import Path

import torch

SIZES = ("full", "tiny")


def parse(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(about or "").strip().splitlines()[0])
    parser.add_argument("folder", type=Path, help="where result.json goes")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="only rows with this word; may be repeated"
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="after which the part starts nothing new")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    return arguments
