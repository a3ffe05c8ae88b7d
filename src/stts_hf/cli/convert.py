"""`stts-hf convert SOURCE DESTINATION`: makes an STTS checkpoint of a stock or an original training checkpoint."""

import argparse
import sys
from pathlib import Path

from stts_hf.cli.errors import refused
from stts_hf.cli.options import KEEP, add_options, check_writable
from stts_hf.selectors import SELECTORS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = "STTS, Molmo2 or Qwen folder or Hub repository (docs/backbones.md), or an original training checkpoint "
    source += "(model.pt or model_and_optim/, with config.yaml)"
    parser.add_argument("source", metavar="SOURCE", help=source)
    parser.add_argument("destination", metavar="DESTINATION", help="folder to write, completely or not at all")
    base = "stock folder or repository with tokenizer, processor and chat template; "
    base += "required for an original training checkpoint"
    parser.add_argument("--base", metavar="PATH_OR_REPO", help=base)
    parser.add_argument("--revision", help="branch, tag or commit of SOURCE, if it is a repository")
    packing = "layout of kept patches (default: the source's; an original training checkpoint has "
    packing += "first_fit_descending with refill)"
    parser.add_argument("--packing", choices=("varlen", "first_fit_descending"), help=packing)
    add_options(parser, *KEEP)
    parser.add_argument("--selector", choices=SELECTORS, help="selection method")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype (default: the source's)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of a file (default: 5GB)")
    parser.add_argument("--seed", type=int, default=0, help="random seed for a new scorer's weights (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint in DESTINATION")


def execute(arguments: argparse.Namespace) -> None:
    check_writable("DESTINATION", Path(arguments.destination).expanduser().resolve().parent)
    print("Reading the source ...", file=sys.stderr, flush=True)
    from tqdm import tqdm
    from transformers.utils import logging

    from stts_hf.checkpoints.convert import convert_checkpoint
    from stts_hf.keeping import in_words

    logging.disable_progress_bar()  # of files without weights
    with refused("", ValueError, FileExistsError):
        result = convert_checkpoint(**{name: value for name, value in vars(arguments).items() if name != "command"})
    vision = result.config.vision_config
    refill = ", with refill" if vision.refill_single_frame_bins else ""
    print(f"checkpoint: {result.folder} ({tqdm.format_sizeof(result.num_bytes, 'B')}, {result.dtype})")
    print(f"scorer:     {'trained' if result.scorer_trained else 'new, untrained'}")
    print(
        f"pruning:    {in_words(result.config.keep_rule()).removesuffix(' dropped')} after layer "
        f"{vision.pruning_layer}, {vision.selector}{refill}"
    )
    for sentence in result.notes:
        print(f"note: {sentence}", file=sys.stderr)
