"""Which versions are supported is said once, in pyproject.toml, and a version below it is refused by name."""

import ast
import contextlib
import importlib.metadata
import itertools
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import stts_hf
from stts_hf.cli.errors import CommandError, need_extras
from stts_hf.versions import check_versions
from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
REQUIREMENTS = {requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])}
ENTRY_FILES = [
    *(path.name for path in sorted((REPOSITORY / "modeling").glob("configuration_*.py"))),
    "processing_stts.py",
    "video_processing_stts.py",
]
CHECKING_FILE = "settings_stts.py"
OF_ANOTHER_NAME = {"yaml": "pyyaml", "PIL": "pillow", "flash_attn": "flash-attn"}


def plain(name: str) -> str:
    return name.lower().replace("-", "_")


PINNED = re.findall(r"^(\S+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
PINS = {plain(name): version for name, version in PINNED}


def pretend(monkeypatch, package: str, version: str) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else real(name))


@pytest.fixture
def declared(monkeypatch):
    """The requirements of this checkout, whatever was installed, in a package that has not looked at them yet."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: PROJECT["dependencies"])
    check_versions.cache_clear()
    yield
    check_versions.cache_clear()


def first_import(file: str) -> str | None:
    """The file of a checkpoint that another one imports before anything else."""
    tree = ast.parse((REPOSITORY / "modeling" / file).read_text())
    first = next(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    return f"{first.module}.py" if isinstance(first, ast.ImportFrom) and first.level else None


@pytest.mark.parametrize("file", ENTRY_FILES)
def test_remote_code_checks_versions_before_any_other_import(file):
    while (following := first_import(file)) is not None:
        file = following
    assert file == CHECKING_FILE


@pytest.mark.parametrize(
    ("package", "version", "least"), [("transformers", "5.19.0", "5.20"), ("torch", "2.8.0", "2.9")]
)
def test_remote_code_names_the_version_it_needs(monkeypatch, package, version, least):
    pretend(monkeypatch, package, version)
    with pytest.raises(ImportError, match=rf"^{package}>={least} is required .* found {package}=={version}"):
        runpy.run_path(str(REPOSITORY / "modeling" / CHECKING_FILE))


def test_remote_code_asks_for_what_the_project_does():
    """A ceiling is for installers only: a checkpoint on the Hub must not refuse every new release."""
    text = (REPOSITORY / "modeling" / CHECKING_FILE).read_text()
    asked = re.findall(r'^require_version\("([^"]+)"', text, re.MULTILINE)
    assert asked
    for requirement in map(Requirement, asked):
        floor = [f"{part.operator}{part.version}" for part in REQUIREMENTS[requirement.name].specifier]
        assert str(requirement.specifier) in floor


@pytest.mark.parametrize(("package", "version"), [("transformers", "5.19.0"), ("torch", "2.8.0"), ("av", "13.0")])
def test_the_package_names_the_version_it_needs(monkeypatch, declared, package, version):
    pretend(monkeypatch, package, version)
    with pytest.raises(ImportError, match=rf"^{package}>=.* is required .* found {package}=={version}"):
        _ = stts_hf.STTSConfig


@pytest.mark.parametrize(("least", "fails"), [("1", False), ("999", True)])
def test_a_need_with_extras_is_looked_for_by_its_name(monkeypatch, declared, least, fails):
    """As `ray[data]>=2.60` of the extra `ray`."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [f'pytest[dev]>={least}; extra == "some"'])
    with pytest.raises(ImportError, match=r"^pytest>=999 is required") if fails else contextlib.nullcontext():
        check_versions("some")


@pytest.mark.parametrize(("package", "command"), [("accelerate", "accelerate"), ("trl", "'stts-hf[trl]'")])
def test_a_class_that_lacks_a_package_says_what_to_install(monkeypatch, package, command):
    """In a checkout that is not installed, where nothing says which versions are needed."""
    monkeypatch.setattr("stts_hf.versions.check_versions", lambda extra="": None)
    for name in [name for name in sys.modules if name.startswith(("stts_hf.training", package))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(stts_hf, "training", raising=False)  # put back as `sys.modules` are
    monkeypatch.setitem(sys.modules, package, None)
    name = {"accelerate": "STTSTrainer", "trl": "STTSSFTTrainer"}[package]
    with pytest.raises(ImportError, match=rf"^stts_hf.{name} needs {package}, .*: pip install {re.escape(command)}.$"):
        getattr(stts_hf, name)


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch, declared):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(
        ImportError, match=r"^transformers\S+ is required by stts-hf, but is not installed: pip install '"
    ):
        check_versions()
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ['datasets>=5.0; extra == "train"'])
    with pytest.raises(CommandError, match=r"^datasets>=5.0 is required by stts-hf\[train\], but is not installed. "):
        need_extras("Reading rows needs more packages", "train")


def test_a_checkout_that_is_not_installed_imports(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    check_versions.cache_clear()
    assert stts_hf.STTSConfig.model_type == "stts"


def test_the_known_good_set_is_within_what_the_project_supports():
    for line in [*PROJECT["dependencies"], *itertools.chain.from_iterable(OPTIONAL.values())]:
        requirement = Requirement(line)
        if requirement.name not in ("stts-hf", "flash-attn", "lmms-eval", "Levenshtein", "vllm"):
            assert requirement.specifier.contains(PINS[plain(requirement.name)]), requirement


def imports(path: Path) -> set[str]:
    """Packages that a file imports, by the names they are installed under."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    tops = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"stts_hf"}
    return {plain(OF_ANOTHER_NAME.get(name, name)) for name in tops}


@pytest.mark.parametrize(
    ("room", "extras"),
    [
        ("modeling", ["flash"]),
        ("src/stts_hf", ["train", "trl", "eval", "visualize", "demo", "vllm", "ray"]),
        ("src/stts_hf/checkpoints", ["train"]),
        ("src/stts_hf/demo", ["demo"]),
        ("src/stts_hf/inference", ["train", "ray"]),
        ("src/stts_hf/serving", ["vllm"]),
        ("src/stts_hf/visualize", ["visualize"]),
    ],
)
def test_what_is_imported_is_declared(room, extras):
    """Whatever a room imports comes with the package itself, or with an extra of the room's own."""
    declared = [*REQUIREMENTS, *(Requirement(line).name for name in extras for line in OPTIONAL[name])]
    for path in sorted((REPOSITORY / room).rglob("*.py")):
        assert imports(path) <= set(map(plain, declared)), path.name
