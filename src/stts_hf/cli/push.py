"""`stts-hf push FOLDER user/name`: puts a checkpoint on the Hugging Face Hub."""

import argparse
import sys

from stts_hf.cli.errors import CommandError

HELP = "push a checkpoint folder to the Hugging Face Hub, in one commit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("folder", metavar="FOLDER", help="folder of an STTS checkpoint")
    parser.add_argument("repo_id", metavar="USER/NAME", help="model repository, created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create it as private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to (default: main)")
    parser.add_argument("--message", default="Upload STTS checkpoint", help="message of the commit")
    parser.add_argument("--token", help="access token; default: HF_TOKEN, or the one of `hf auth login`")
    parser.add_argument("--overwrite", action="store_true", help="also into a repository that holds another model")


def execute(arguments: argparse.Namespace) -> None:
    """Runs the command; raises `CommandError` when folder, token, rights, repository or network do not allow it."""
    from stts_hf.checkpoints.push import PushRefused, push_checkpoint

    print(f"Pushing {arguments.folder} to {arguments.repo_id}", file=sys.stderr, flush=True)
    try:
        pushed = push_checkpoint(**{name: value for name, value in vars(arguments).items() if name != "command"})
    except PushRefused as refused:
        raise CommandError(str(refused)) from refused
    if pushed.left_out:
        print(f"Left out: {', '.join(pushed.left_out)}", file=sys.stderr)
    print(f"{len(pushed.files)} files: {pushed.url}")
