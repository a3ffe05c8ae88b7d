"""What may be passed as a video file, and that reading one leads to no other file and, without a URL, to no host."""

import http.server
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from stts_hf.modeling.video_reading_stts import VideoFile
from tests.clips import frame_number, numbered_frame, read_clip, write_audio, write_clip
from tests.corpus.files import LEADING_ELSEWHERE


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clips") / "clip.mp4", 60)


FORMS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda path: path.read_bytes(),
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "BytesIO": lambda path: io.BytesIO(path.read_bytes()),
    "open file": lambda path: path.open("rb"),
    "stream": lambda path: SimpleNamespace(read=io.BytesIO(path.read_bytes()).read),  # that cannot be rewound
    "path": lambda path: path,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_file_shows_what_its_path_shows(clip, form):
    frames, _ = read_clip(FORMS[form](clip), lambda file: [0, file.duration])
    assert [frame_number(frame) for frame in frames] == [0, 59]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no video file <class 'NoneType'>"),
        (3, "no video file <class 'int'>"),
        (b"", "Cannot read the video's bytes"),
        (io.StringIO("text"), "no video file <class '_io.StringIO'>"),
    ],
    ids=["none", "number", "no_bytes", "text_file"],
)
def test_what_is_no_video_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        VideoFile(source)


def test_sound_with_a_cover_is_no_video(tmp_path):
    with pytest.raises(ValueError, match="There is no video in"):
        VideoFile(write_audio(tmp_path / "a.m4a", cover=True))


@pytest.mark.parametrize("name", ["self.m3u8", "bytes"])  # the corpus has self.mp4
@pytest.mark.parametrize("kind", LEADING_ELSEWHERE)
def test_file_that_leads_to_others_is_refused(tmp_path, clip, kind, name):
    (tmp_path / "clip.mp4").write_bytes(clip.read_bytes())
    os.mkfifo(tmp_path / "pipe")
    data = LEADING_ELSEWHERE[kind].encode()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=r"Cannot read .* as a video"):
        VideoFile(data if name == "bytes" else tmp_path / name)


def test_name_with_a_pattern_is_one_file(tmp_path):
    for name, number in (("img%d.png", 5), ("img1.png", 1), ("img2.png", 2)):
        Image.fromarray(numbered_frame(number)).save(tmp_path / name)
    frames, _ = read_clip(tmp_path / "img%d.png")
    assert [frame_number(frame) for frame in frames] == [5]
    with pytest.raises(ValueError, match="There is no video file"):
        VideoFile(tmp_path / "img%03d.png")


@pytest.mark.parametrize(
    "name", ["pipe", "/dev/zero", "concat:clip.mp4|clip.mp4", "file:clip.mp4", "udp://127.0.0.1:9"]
)
def test_what_is_no_file_is_refused(tmp_path, monkeypatch, clip, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(clip.read_bytes())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="There is no video file"):
        VideoFile(name)


def test_relative_name_with_a_colon_is_a_file(tmp_path, monkeypatch, clip):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b.mp4").write_bytes(clip.read_bytes())
    assert len(read_clip("a:b.mp4")[0]) == 60


def test_callers_open_file_stays_open(clip):
    with clip.open("rb") as file:
        read_clip(file)
        assert not file.closed


def test_codec_without_decoder_is_named_as_the_problem(tmp_path, clip):
    (tmp_path / "odd.mp4").write_bytes(clip.read_bytes().replace(b"avc1", b"zzzz"))
    with pytest.raises(ValueError, match=r"no decoder for video file .*odd\.mp4"):
        VideoFile(tmp_path / "odd.mp4")


# --- downloads ---


@contextmanager
def serving(respond: Callable[[Any], None]) -> Iterator[str]:
    """Address of a server that answers every request by `respond(handler)`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        do_GET = respond

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/clip.mp4"
    finally:
        server.shutdown()
        server.server_close()


def send(handler: Any, *chunks: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    for chunk in chunks:
        handler.wfile.write(chunk)


def test_an_address_is_downloaded(clip):
    with serving(lambda handler: send(handler, clip.read_bytes())) as url:
        assert len(read_clip(url)[0]) == 60


def test_error_of_the_server_is_told():
    with serving(lambda handler: handler.send_error(404)) as url, pytest.raises(ValueError, match="404"):
        VideoFile(url)


def test_local_files_open_no_connection_and_write_no_file(clip, monkeypatch):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError(f"called with {arguments}")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert len(read_clip(clip)[0]) == 60
