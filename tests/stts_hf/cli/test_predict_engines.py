"""`stts-hf predict --engine ray`: what is refused before Ray starts."""

import pytest

from stts_hf.cli.main import main


@pytest.fixture
def run(tmp_path, checkpoint, monkeypatch, capsys):
    """Runs the command about a video that is not looked at; returns exit status and the last line of stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"?")
    monkeypatch.setattr("stts_hf.inference.predicting.load_model", None)

    def run(*arguments: str):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("RAY_ADDRESS", raising=False)
            status = main(["predict", "clip.mp4", "--prompt", "?", "--checkpoint", str(checkpoint), *arguments])
        return status, capsys.readouterr().err.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    "option", [["--address", "head:6379"], ["--models", "2"], ["--cpus", "2"], ["--gpus", "0"], ["--retries", "0"]]
)
def test_options_of_ray_without_ray(run, option):
    assert run(*option) == (
        2, f"stts-hf predict: error: {option[0]} is of Ray; add --engine ray, or leave it out"
    )  # fmt: skip


@pytest.mark.parametrize("option", ["--models", "--cpus"])
def test_none_of_what_there_must_be_some_of(run, option, capsys):
    with pytest.raises(SystemExit):
        run("--engine", "ray", option, "0")
    assert f"argument {option}: is 0, but must be a" in capsys.readouterr().err


def test_without_ray_the_command_that_installs_it_is_named(run, monkeypatch):
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "ray" else real(name, *rest))
    status, said = run("--engine", "ray")
    assert status == 2
    assert said.endswith("--engine ray needs more packages: pip install 'stts-hf[ray]'")


def test_an_address_nobody_listens_at(run):
    pytest.importorskip("ray")
    status, said = run("--engine", "ray", "--address", "127.0.0.1:1")
    assert status == 2
    assert said.startswith("stts-hf predict: error: --address 127.0.0.1:1 cannot be reached: ")
