"""
Every block of README, examples and docs, run as a reader would: in the order of the page, in a fresh folder.

README, the tutorials and the notebook start from a bare checkout. The other pages start where README ends: with
`clip.mp4`, `videos` and `my-stts`. A block of bash is a process of its own. So is a block of Python, unless it uses
names of the blocks before it; then it goes on in their process. JSON and YAML are read by what reads them.

What a page says is printed, in a `text` block or after `# prints`, is compared with what is printed. Commands that are
left out are printed with their reasons: `pytest -m slow -s tests/test_blocks.py`.
"""

import ast
import builtins
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from examples.make_smoke_data import make_smoke_data
from stts_hf.cli.main import main
from stts_hf.training.config import read_settings
from stts_hf.visualize.sample_clip import write_sample_clip
from tests.conftest import REPOSITORY
from tests.hub_server import LoopbackHub
from tests.preloaded import preloaded

NOTEBOOK = REPOSITORY / "examples" / "stts.ipynb"
FIRST = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("tutorial_*.md"), NOTEBOOK]
PAGES = [
    page
    for place in ("*.md", "docs/*.md", "docs/*/README.md", "examples/*/README.md", "hub_configs/*/README.md")
    for page in sorted(REPOSITORY.glob(place))
    if re.search(r"^ *```", page.read_text(), re.M) and page.name != "CHANGELOG.md"
] + [NOTEBOOK]
# Reasons, and what a command or a block of Python holds that gives it. The first that fits is given.
LEFT_OUT = {
    "needs an environment of its own": r"\.venv-|^\$EVAL|^EVAL=|^FRAMES=|HF_HOME=",
    "installs packages": r"\bpip install\b|^make |install\.sh",
    "needs the Hub": r"allenai/|Qwen/|^hf |user/questions|/step6250|hub_configs/stts-\S+-[\d.]+[bm]",
    "needs a GPU": r"paper\.yaml|lora\.yaml|--preset (paper|qwen) |accelerate launch|scorer_(start|only)\.yaml",
    "needs several machines": r"--address|two_machines|#SBATCH",
    "serves until it is stopped, or asks such a server": r"stts-hf demo|vllm serve|tensorboard --|localhost:8000",
    "is a sketch: `...` is the reader's own": r"(?<!\.)\.\.\.(?!\.)",
    "takes more than a minute": r"\bpytest\b|stts-hf bench --(preset (?!tiny)|render)|examples\.benchmarks|"
    r"--engine ray|docs/benchmarks|study (run|report)|study\.(results|explaining)|kill_conversions|"
    r"corpus\.report|bytes_harness|outputs/pilot",
}
# What would take longer, at a smaller size: what a command holds, and what is added to it. Only README's commands start
# processes that decode.
SMALLER = {
    "make-dataset": " --train 1 --validation 1 --test 1 --photographs 0",
    "stts-hf bench --preset": " --repeats 1",
    "predict .*my-stts|stts-hf (eval|calibrate)": " --workers 0",
}
TIME_LIMIT = 300  # seconds; a minute on a machine that does nothing else
# Reads programs as JSON, one a line, and runs them in one namespace.
SESSION = """
import json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    exec(compile(json.loads(line), "block", "exec"), names)
    print("\\0", flush=True)
"""


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """The text before each block, its language and its own text."""
    if page.suffix == ".ipynb":
        cells = [
            "".join(cell["source"]) for cell in json.loads(page.read_text())["cells"] if cell["cell_type"] == "code"
        ]
        return [("", "python", cell) for cell in cells]
    found = re.findall(r"(.*?)^( *)```(\w*)\n(.*?)^ *```$", page.read_text(), re.M | re.S)
    return [(before, language, re.sub(f"^{indent}", "", code, flags=re.M)) for before, indent, language, code in found]


def reason(code: str) -> str | None:
    code = re.sub(r"(^|\s)#(?!SBATCH).*", "", code)
    return next((why for why, pattern in LEFT_OUT.items() if re.search(pattern, code)), None)


def commands(block: str) -> Iterator[str]:
    """The commands of a block of bash, without comments."""
    for line in block.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s+)#(?!SBATCH).*", "", line).strip()
        if command:
            yield command


def given_names(code: str) -> set[str]:
    """Names that a block gives, wherever in it."""
    nodes = list(ast.walk(ast.parse(code)))
    given = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    given |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    given |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return given | {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}


def free_names(code: str) -> set[str]:
    """Names that a block uses and does not give."""
    nodes = ast.walk(ast.parse(code))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return used - given_names(code) - set(dir(builtins))


def take_data(language: str, code: str, before: str) -> None:
    """Writes rows into the file that the text before names, with media of theirs. Reads settings of a training."""
    if language == "json":
        rows = list(map(json.loads, code.splitlines()))
        if "error" not in rows[0]:  # questions, not results
            Path(re.findall(r"`(\w+\.jsonl)`", before)[-1]).write_text(code)
            for name in re.findall(r'"([\w/-]+\.(?:mp4|png|srt))"', code):
                Path(name).parent.mkdir(exist_ok=True)
                if name.endswith(".png"):
                    Image.new("RGB", (64, 48), "red").save(name)
                elif name.endswith(".srt"):
                    Path(name).write_text("1\n00:00:00,000 --> 00:00:01,000\nHello.\n")
                else:
                    shutil.copy("clip.mp4", name)
    else:
        needed = "model_name_or_path: hub_configs/stts-tiny\ntrain_data: rows.jsonl\noutput_dir: run\n"
        (config := Path("settings.yaml")).write_text(needed + code)
        read_settings(config)


class Session:
    """A process that runs blocks of Python, one after another."""

    def __init__(self, environment: dict[str, str]):
        self.process = subprocess.Popen(
            ["python", "-c", SESSION],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(log := Path("stderr.txt")).open("w"),
            text=True, env=environment,
        )  # fmt: skip
        self.log, self.names = log, set[str]()

    def run(self, code: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.names |= given_names(code)
        print(json.dumps(code), file=self.process.stdin, flush=True)
        printed = ""
        for line in self.process.stdout:
            if line.endswith("\0\n"):
                return printed + line[:-2]
            printed += line
        raise AssertionError(f"{code}\n{self.log.read_text()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A checkout, as the working directory: what is written goes beside links to what is there."""
    monkeypatch.chdir(tmp_path)
    for name in ("hub_configs", "examples", "src", "docs", "tests", "modeling", "constraints.txt"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


@pytest.fixture(scope="module")
def after_readme(tmp_path_factory) -> Path:
    """What README leaves behind."""
    place = tmp_path_factory.mktemp("after_readme")
    write_sample_clip(place / "clip.mp4")
    make_smoke_data(place / "videos", clips=3)
    make_smoke_data(place / "outputs" / "smoke_data")
    with contextlib.chdir(REPOSITORY):
        assert main(["convert", "hub_configs/stts-tiny", str(place / "my-stts")]) == 0
    return place


@pytest.fixture(scope="module")
def hub_and_environment(tmp_path_factory) -> Iterator[tuple[LoopbackHub, dict[str, str]]]:
    """Of all pages one after the other: the client reads its address when it is imported."""
    with LoopbackHub() as hub:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
        with preloaded(hub.environment(tmp_path_factory.mktemp("hf") / "home") | own) as environment:
            yield hub, environment


@pytest.fixture
def environment(hub_and_environment) -> dict[str, str]:
    """With an empty Hub, and nothing of it in the cache."""
    hub, environment = hub_and_environment
    hub.repositories.clear()
    shutil.rmtree(environment["HF_HOME"], ignore_errors=True)
    return environment


def run(page: Path, environment: dict[str, str]) -> list[tuple[str, str]]:
    """Runs the blocks of a page. Returns what is left out, and why."""
    left_out, printed = [], ""
    sessions: list[Session] = []
    for before, language, code in blocks(page):
        if language == "bash":
            chosen = []
            for command in commands(code):
                why = reason(command)
                if why is not None:
                    left_out.append((command, why))
                    continue
                chosen.append(command + next((add for words, add in SMALLER.items() if re.search(words, command)), ""))
            script = "\n".join(chosen)
            ran = subprocess.run(
                ["bash", "-euc", script], env=environment, capture_output=True, text=True, timeout=TIME_LIMIT
            )
            assert ran.returncode == 0, f"{script}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
            printed = ran.stdout
            for first, last in re.findall(r"falls ([\d.]+) -> ([\d.]+)", code):
                logs = printed.partition("train_runtime")[0]  # of the first training of the block
                losses = [float(loss) for loss in re.findall(r"'temporal_loss': '?([\d.e-]+)", logs)]
                digits = len(first.partition(".")[2])
                assert [f"{loss:.{digits}f}" for loss in (losses[0], losses[-1])] == [first, last]
        elif language == "python":
            why = reason(code)
            if why is not None:
                left_out.append((code, why))
                continue
            free = free_names(code)
            going_on = [session for session in sessions if free and free <= session.names]
            session = going_on[-1] if going_on else Session(environment)
            sessions += [] if going_on else [session]
            printed = session.run(code)
            said = re.findall(r"# prints (.*)", code)
            assert printed.splitlines()[len(printed.splitlines()) - len(said) :] == said
        elif language == "text":
            # `Trainer` prints its logs before.
            assert printed.splitlines()[-code.count("\n") :] == code.splitlines()
        elif language in ("json", "yaml"):
            take_data(language, code, before)
        else:
            left_out.append((code, "is a quotation"))
    for session in sessions:
        session.close()
    return left_out


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_blocks_run_in_their_order_and_print_what_they_say(page, folder, after_readme, environment, capsys):
    if page not in FIRST:
        shutil.copytree(after_readme, folder, dirs_exist_ok=True)
    left_out = run(page, environment)
    with capsys.disabled():
        for code, why in left_out:
            print(f"\n{page.relative_to(REPOSITORY)}: {why}: {code.splitlines()[0]}", end="")


def test_there_are_at_most_ten_reasons():
    assert len({*LEFT_OUT, "is a quotation"}) <= 10
