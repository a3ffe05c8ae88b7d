"""The command that serves the demo: what it serves, and how it says no before a model is loaded."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from stts_hf.cli.main import main
from tests.checkpoints import TINY
from tests.clips import write_clip
from tests.stts_hf.demo.conftest import WITHOUT_GRADIO


def test_it_serves_on_this_machine_only_with_the_limits_that_were_given(monkeypatch):
    pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
    from stts_hf.demo import serving

    served: dict[str, Any] = {}
    monkeypatch.setattr(signal, "signal", lambda *handler: served.update(handler=handler))
    monkeypatch.setattr(serving, "serve", lambda page, **options: served.update(page=page, **options))
    monkeypatch.setattr(serving, "end_process", lambda: None)
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


def test_a_budget_that_no_slider_shows_is_refused(capsys):
    pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
    assert main(["demo", "--checkpoint", str(TINY), "--port", "0", "--video-token-budget", "64"]) == 2
    assert "--video-token-budget has no slider on the page: pass --score-threshold" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(capsys, monkeypatch):
    pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["demo", "--checkpoint", str(TINY), "--port", str(port)]) == 2
    assert f"--host 127.0.0.1 and --port {port} cannot be listened on" in capsys.readouterr().err


# `stts-hf demo`, whose page is served by a thread that computes and ends at once: Gradio's threads are daemons too.
COMPUTING = """
import sys, threading, time, torch
from stts_hf.cli.main import main
from stts_hf.demo import serving

def compute():
    a = torch.rand(1500, 1500)
    while True:
        torch.mm(a, a)

def serve(page, **options):
    threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.5)

serving.serve = serve
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_threads_that_compute_do_not_abort_the_process_when_it_ends(tmp_path):
    pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
    ended = subprocess.run(
        [sys.executable, "-c", COMPUTING, "demo", "--checkpoint", str(TINY), "--port", "0"],
        capture_output=True, text=True, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr  # before: -SIGABRT, "terminate called without an active exception"
    assert not list(tmp_path.glob("stts-demo-*"))


@pytest.mark.slow
def test_sigterm_amid_an_answer_ends_it(tmp_path):
    gradio_client = pytest.importorskip("gradio_client", reason=WITHOUT_GRADIO)
    video = write_clip(tmp_path / "long.mp4", 300, fps=10)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "stts_hf.cli.main", "demo", "--checkpoint", str(TINY), "--port", str(port), "--num-frames", "300"]
    with subprocess.Popen(
        [sys.executable, *command], stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as served:
        assert served.stderr is not None
        assert any("The page is at" in line for line in served.stderr)
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        for client in [gradio_client.Client(f"http://127.0.0.1:{port}", verbose=False) for _ in range(2)]:
            client.submit("What happens?", gradio_client.handle_file(video), 0, "scorer", api_name="/ask")
        time.sleep(0.8)  # the video is being read
        served.terminate()
        said = served.stderr.read()
        assert served.wait(60) == 0, said
    assert "terminate called" not in said
    assert not list(tmp_path.glob("stts-demo-*"))
