"""`vllm serve` on the tiny checkpoints, over HTTP: the plugin is found by its entry point."""

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor

from stts_hf.video.processors import process
from tests.checkpoints import TINIES, messages, write_small_clip

pytestmark = pytest.mark.vllm
SECONDS_TO_START = 600


@dataclass
class Server:
    checkpoint: Path
    url: str


def post(server: Server, body: dict) -> dict:
    body = {"model": str(server.checkpoint), **body}
    request = urllib.request.Request(server.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


@pytest.fixture(scope="module", params=["molmo2", "qwen3_vl"])
def server(request, tmp_path_factory):
    checkpoint = TINIES[request.param]
    template = (checkpoint / "chat_template.jinja").read_text()
    if request.param == "molmo2":
        template = "{{ bos_token }}" + template
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--max-logprobs", "20"]
    command += ["--trust-request-mm-kwargs", "--chat-template", template]
    environment = dict(os.environ)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # the engine in its own process, as users run it
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as running:
        try:
            for _ in range(SECONDS_TO_START):
                assert running.poll() is None, log.read_text()[-5000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    time.sleep(1)
            yield Server(checkpoint, f"http://127.0.0.1:{port}/v1/chat/completions")
        finally:
            running.terminate()


def body(data: bytes, **options: Any) -> dict:
    video = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(data).decode()}"}}
    content = [video, {"type": "text", "text": "What moves?"}]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 20,
        **options,
    }


@pytest.mark.parametrize("kind", ["video", "text alone"])
def test_an_answer_over_http(server, tmp_path, kind):
    """The same as `generate`'s, by the 20 likeliest tokens at each step; with BOS where there is no video too."""
    clip = write_small_clip(tmp_path)
    request, conversation = body(clip.read_bytes(), ignore_eos=True), messages(clip)
    if kind == "text alone":
        del request["messages"][0]["content"][0], conversation[0]["content"][0]
    (choice,) = post(server, request)["choices"]
    processor = AutoProcessor.from_pretrained(server.checkpoint)
    text = processor.apply_chat_template(conversation, add_generation_prompt=True)
    inputs: Any = process(
        processor, text=[text], videos=None if kind == "text alone" else [str(clip)], return_tensors="pt"
    )
    model = AutoModelForMultimodalLM.from_pretrained(server.checkpoint).eval()
    with torch.no_grad():
        output = model.generate(
            **inputs, max_new_tokens=4, output_logits=True, return_dict_in_generate=True, eos_token_id=-1
        )
    for step, logits in zip(choice["logprobs"]["content"], output.logits, strict=True):
        expected = logits[0].log_softmax(-1).topk(20).values
        assert torch.tensor([top["logprob"] for top in step["top_logprobs"]]).allclose(expected, rtol=0, atol=1e-4)


def test_a_bad_video_is_a_bad_request_and_the_next_one_is_answered(server, tmp_path):
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, body(b"no video at all"))
    assert error.value.code == 400
    assert "video" in error.value.read().decode()
    assert post(server, body(write_small_clip(tmp_path).read_bytes()))["choices"]


def test_a_setting_of_the_model_is_refused_in_a_request(server, tmp_path):
    clip: Path = write_small_clip(tmp_path)
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, body(clip.read_bytes(), mm_processor_kwargs={"patch_size": 4}))
    assert error.value.code == 400
    assert "patch_size" in error.value.read().decode()
    assert post(server, body(clip.read_bytes(), mm_processor_kwargs={"num_frames": 2}))["choices"]
