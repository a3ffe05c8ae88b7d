"""The command that serves the demo: what it serves, and how it says no before a model is loaded."""

import importlib.util
import signal
import socket
from typing import Any

import pytest

from stts_hf.cli.main import main
from tests.checkpoints import TINY
from tests.stts_hf.demo.conftest import WITHOUT_GRADIO


def test_it_serves_on_this_machine_only_with_the_limits_that_were_given(monkeypatch):
    pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
    from stts_hf.demo import serving

    served: dict[str, Any] = {}
    monkeypatch.setattr(signal, "signal", lambda *handler: served.update(handler=handler))
    monkeypatch.setattr(serving, "serve", lambda page, **options: served.update(page=page, **options))
    options = "--port 0 --selector random --pruning-ratio 0.25 --max-clips 3 --max-upload-mb 7 --max-seconds 9"
    assert not main(["demo", "--checkpoint", str(TINY), "--device", "cpu", "--num-frames", "4", *options.split()])
    page = served["page"]
    assert served["handler"] == (signal.SIGTERM, signal.default_int_handler)
    assert (served["server_name"], served["server_port"]) == ("127.0.0.1", 0)
    assert (page.limits.clips, page.limits.upload_mb, page.limits.seconds) == (3, 7, 9)
    assert page.answerer.processing == {"num_frames": 4}
    assert (page.selector.value, page.percent.value) == ("random", 25)


def test_without_gradio_it_says_what_to_install(monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: real(name, *rest) if name != "gradio" else None
    )
    assert main(["demo", "--checkpoint", str(TINY)]) == 2
    assert "pip install 'stts-hf[demo]'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(capsys, monkeypatch):
    pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["demo", "--checkpoint", str(TINY), "--port", str(port)]) == 2
    assert f"--host 127.0.0.1 and --port {port} cannot be listened on" in capsys.readouterr().err
