"""`stts-hf push FOLDER user/name`: pushes a checkpoint to the Hugging Face Hub."""

import argparse
import os
import sys

from stts_hf.cli.errors import CommandError, refused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="folder of an STTS checkpoint")
    parser.add_argument("repo_id", metavar="USER/NAME", help="model repository, created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to (default: main)")
    parser.add_argument("--message", default="Upload STTS checkpoint", help="commit message (default: %(default)s)")
    parser.add_argument("--token", help="access token (default: HF_TOKEN, then the token of `hf auth login`)")
    parser.add_argument("--overwrite", action="store_true", help="allow a repository that holds another model")
    include = "further files of the folder to push, such as 'data/*'; may be repeated"
    parser.add_argument("--include", action="append", default=[], metavar="PATTERN", help=include)
    parser.add_argument("--dry-run", action="store_true", help="check the folder, print the files to push, and exit")


def execute(arguments: argparse.Namespace) -> None:
    """Runs the command; raises `CommandError` if folder, token, permissions, repository or network do not allow it."""
    if not os.path.isdir(os.path.expanduser(arguments.folder)):
        raise CommandError(f"FOLDER {arguments.folder} is not a folder; name a checkpoint's folder")
    from tqdm import tqdm

    from stts_hf.checkpoints.push import PushRefused, files_to_push, push_checkpoint

    with refused("", PushRefused):
        files, left_out = files_to_push(arguments.folder, arguments.include)
        print(f"Pushing {len(files)} files of {arguments.folder} to {arguments.repo_id}:", file=sys.stderr)
        for name, path in files.items():
            print(f"  {tqdm.format_sizeof(path.stat().st_size, 'B'):>8}  {name}", file=sys.stderr)
        if left_out:
            shown = ", ".join(name.encode("utf-8", "backslashreplace").decode() for name in left_out)
            print(f"Staying here: {shown}", file=sys.stderr, flush=True)
        pushed = push_checkpoint(**{name: value for name, value in vars(arguments).items() if name != "command"})
    print(f"{len(pushed.files)} files: {pushed.url or 'nothing pushed (--dry-run)'}")
