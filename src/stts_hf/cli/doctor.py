"""`stts-hf doctor FOLDER`: reports the problems of a checkpoint folder, with remedies."""

import argparse
import os

from stts_hf.cli.errors import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="checkpoint folder; its code is not executed")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 on warnings too")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the result of every check. Returns 1 if there is a problem, else 0."""
    if not os.path.isdir(os.path.expanduser(arguments.folder)):
        raise CommandError(f"FOLDER {arguments.folder} is not a folder; name a checkpoint's folder")
    from stts_hf.checkpoints.doctor import examine

    findings = examine(arguments.folder)
    for name, found in findings.items():
        if not found:
            print(f"ok       {name}")
        for finding in found:
            print(f"{'WRONG' if finding.fatal else 'warning':<9}{name}: {finding.what}\n         -> {finding.remedy}")
    everything = [finding for found in findings.values() for finding in found]
    wrong = sum(finding.fatal for finding in everything)
    warnings = len(everything) - wrong
    print(f"\n{arguments.folder}: {wrong} wrong, {warnings} warning{'' if warnings == 1 else 's'}")
    return int(wrong > 0 or (arguments.strict and warnings > 0))
