"""Pushes a checkpoint folder to the Hub: everything in one commit, or nothing."""

import fnmatch
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import httpx, validate_repo_id
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from stts_hf.errors import is_disk_full

from .atomic_folder import stale_weights
from .card import checkpoint_card
from .doctor import examine, needed_modules
from .families import OWN, own_family
from .files import check_links, checkpoint_files, every_file, read_json
from .tensors import weight_files


class PushRefused(ValueError):
    """Why nothing was pushed, and what to do about it, on one line."""


@dataclass(frozen=True)
class Pushed:
    """url, oid: of the commit, empty where nothing was pushed. files: in the repository. left_out: what stayed."""

    url: str
    oid: str
    files: list[str]
    left_out: list[str]


def push_checkpoint(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload STTS checkpoint",
    token: str | None = None,
    overwrite: bool = False,
    include: Sequence[str] = (),
    dry_run: bool = False,
    endpoint: str | None = None,
) -> Pushed:
    """
    Pushes the checkpoint in `folder` to the model repository `repo_id` ("user/name"), which is created if need be.

    Files are uploaded, then appear in one commit. An interrupted push changes nothing; repeating it does not upload
    the same files again. The commit also deletes weights that this checkpoint does not have. A missing card is written,
    and missing metadata is filled in.

    Args:
        private: create the repository as private.
        revision: branch, made from `main` if it is new.
        message: of the commit.
        token: in place of the one from `hf auth login` or `HF_TOKEN`.
        overwrite: also into a repository that holds some other model.
        include: patterns of paths in the folder, such as "data/*", that go beside the checkpoint's own files.
        dry_run: check the folder and say what would go; no connection is opened.
        endpoint: in place of `HF_ENDPOINT`.

    Raises:
        PushRefused: folder, token, rights, repository or network do not allow it.
    """
    folder, api = Path(folder), HfApi(endpoint=endpoint, token=token)
    with refusals(api, repo_id):
        validate_repo_id(repo_id)
    files, left_out = files_to_push(folder, include)
    check_folder(folder)
    if dry_run:
        return Pushed("", "", sorted({*files, "README.md"}), left_out)
    with refusals(api, repo_id):
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        info = api.repo_info(repo_id)
        if private and not info.private:
            raise PushRefused(
                f"{repo_id} exists and is public, which --private does not change; make it private in its settings "
                "on the Hub, or choose another name"
            )
        if revision is not None and revision not in {branch.name for branch in api.list_repo_refs(repo_id).branches}:
            api.create_branch(repo_id, branch=revision)
        present = api.list_repo_files(repo_id, revision=revision)
        if not overwrite:
            check_repository(api, repo_id, revision, present)
        card = str(checkpoint_card(folder, repo_id=repo_id)).encode()
        contents: dict[str, Path | bytes] = {**files, "README.md": card}
        operations: list[CommitOperationAdd | CommitOperationDelete]
        operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
        operations += [CommitOperationDelete(name) for name in stale_weights(present, list(files))]
        commit = api.create_commit(repo_id, operations, commit_message=message, revision=revision)
    return Pushed(commit.commit_url, commit.oid, sorted(contents), left_out)


def files_to_push(folder: str | Path, include: Sequence[str] = ()) -> tuple[dict[str, Path], list[str]]:
    """
    Returns the files that go, by their path in the repository, and the names in `folder` of which nothing goes. Those
    are the weights that are read, settings, tokenizer, templates, code that `auto_map` names and what that imports,
    card, licence and pictures; and what `include` matches. Raises `PushRefused` for a pattern without a match, and for
    what cannot be uploaded.
    """
    folder = Path(folder)
    try:
        code = needed_modules(folder, own_family(folder).config.auto_classes)
        weights = {path.name for path in weight_files(folder)}
    except ValueError as error:
        raise PushRefused(str(error)) from error
    weights |= {SAFE_WEIGHTS_INDEX_NAME} if SAFE_WEIGHTS_NAME not in weights else set()

    def goes(path: Path) -> bool:
        of_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        return path.name in weights if of_weights else path.suffix != ".py" or path.stem in code

    everything = every_file(folder)
    files = {name: path for name, path in checkpoint_files(folder).items() if goes(path)}
    for pattern in include:
        matching = fnmatch.filter(everything, pattern)
        if not matching:
            raise PushRefused(f"--include {pattern} matches no file in {folder}; give a path in it, such as 'data/*'")
        files |= {name: everything[name] for name in matching}
    for name in files:
        if name.encode("utf-8", "replace").decode() != name:
            raise PushRefused(f"{name!a} is not UTF-8, which the Hub requires of names; rename it")
    if astray := next(check_links(folder, files), None):
        raise PushRefused(f"{folder} is not pushed: {astray}")
    tops = {name.split("/")[0] for name in files}
    return files, sorted({name.split("/")[0] for name in everything} - tops)


def check_folder(folder: Path) -> None:
    """Raises `PushRefused` where the checkpoint would not load from the Hub: files are missing, damaged or at odds."""
    wrong = [finding for found in examine(folder).values() for finding in found if finding.fatal]
    if wrong:
        more = f" (and {len(wrong) - 1} more, which `stts-hf doctor` lists)" if len(wrong) > 1 else ""
        raise PushRefused(f"{folder} would not load: {' '.join(wrong[0].what.split())}; {wrong[0].remedy}{more}")


def check_repository(api: HfApi, repo_id: str, revision: str | None, present: list[str]) -> None:
    """Raises `PushRefused` for a repository that holds something other than an STTS checkpoint."""
    if set(present) <= {".gitattributes", "README.md", ".gitignore", "LICENSE"}:
        return
    model_type = None
    if "config.json" in present:
        with suppress(ValueError):
            config = api.hf_hub_download(repo_id, "config.json", revision=revision)
            model_type = read_json(Path(config)).get("model_type")
    if model_type not in OWN and not fnmatch.filter(present, "modeling_stts*.py"):
        holds = f"a {model_type!r} model" if model_type else "other files"
        raise PushRefused(f"{repo_id} exists and holds {holds}; choose another name, or replace it with --overwrite")


@contextmanager
def refusals(api: HfApi, repo_id: str) -> Iterator[None]:
    """Turns what the client raises into `PushRefused` with one line; everything else passes."""
    try:
        yield
    except (HfHubHTTPError, httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, PushRefused):
            raise
        reason = explain(error, api, repo_id)
        if reason is None:
            raise
        raise PushRefused(reason) from error


def explain(error: BaseException, api: HfApi, repo_id: str) -> str | None:
    """Returns why the Hub or the way to it refused, on one line; None for an error that is neither's."""
    endpoint = api.endpoint
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # an upload's thread wraps what went wrong
        return explain(error.__cause__, api, repo_id)
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status, said = error.response.status_code, error.response.headers.get("X-Error-Message")
        said = said or getattr(error, "server_message", None) or error.response.reason_phrase
        token = "the token" if api.token or get_token() else "a push without a token"
        known = {
            401: f"{endpoint} does not accept {token}; run `hf auth login`, set HF_TOKEN, or pass --token",
            403: f"the token has no right to write to {repo_id}; use one with write access, or another user/name",
            404: f"{repo_id} was not found, or the token may not see it",
            409: f"{repo_id} is being changed by someone else; try again",
            413: f"{endpoint} says a file is too large; save again with a smaller max_shard_size",
        }
        return f"{known.get(status, f'{endpoint} refused')} ({status}: {' '.join(str(said).split())})"
    if isinstance(error, OfflineModeIsEnabled):
        return "the Hub is switched off by HF_HUB_OFFLINE; unset it to push"
    if isinstance(error, httpx.HTTPError | ConnectionError | TimeoutError):
        cause = " ".join(str(error).split()) or type(error).__name__
        return f"{endpoint} cannot be reached ({cause}); nothing was committed, push again when it can"
    if isinstance(error, HFValidationError) or "metadata in README.md" in str(error):
        return f"the Hub does not accept this: {' '.join(str(error).split())}"
    if isinstance(error, OSError) and not is_disk_full(error):
        return f"{os.fspath(error.filename) if error.filename else 'a file'} cannot be read: {error.strerror or error}"
    return None
