"""No pickle and no code of a checkpoint in package, remote code and examples; ruff's rules S hold the rest."""

import ast

import yaml  # type: ignore[import-untyped]

from stts_hf.training import config
from tests.conftest import REPOSITORY

FILES = [file for folder in ("src", "modeling", "examples") for file in sorted((REPOSITORY / folder).rglob("*.py"))]
PICKLES = {"pickle", "_pickle", "marshal", "shelve", "joblib", "dill", "cloudpickle"}
MAY_IMPORT_PICKLE = {
    "original_weights.py",  # knows a few plain classes and refuses all others: test_convert_original.py
    "isolated.py",  # between the process and its own children, through a pipe that nobody else has
    "on_ray.py",  # rows from this process to Ray's workers of the same run
}


def forbidden(code: str) -> set[str]:
    """What a module does that none may do."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found |= {f"import {name}" for name in modules if name.split(".")[0] in PICKLES}
        elif isinstance(node, ast.Call):
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            if ast.unparse(node.func).endswith("torch.load") and options.get("weights_only") != "True":
                found.add("torch.load without weights_only=True")
            names = ("allow_pickle", "shell", "trust_remote_code")
            found |= {f"{name}={options[name]}" for name in names if options.get(name, "False") != "False"}
    return found


def test_no_module_opens_a_pickle_or_runs_a_checkpoint_s_code():
    assert "finetune.py" in {file.name for file in FILES}
    for file in FILES:
        allowed = {"import pickle"} if file.name in MAY_IMPORT_PICKLE else set()
        assert forbidden(file.read_text()) == allowed, file


def test_what_is_forbidden_would_be_found():
    for code in ("from marshal import loads", "torch.load(a, weights_only=b)", "load(a, trust_remote_code=True)"):
        assert forbidden(code)


def test_settings_in_yaml_make_no_objects():
    assert issubclass(config._Loader, yaml.SafeLoader)
