"""Data loaders fork their workers from a process that may have decoded videos itself."""

import gc
import multiprocessing

import pytest

from stts_hf.modeling import video_reading_stts
from tests.clips import read_clip, write_clip


class Stop(Exception):
    pass


def test_a_process_forked_over_leftovers_of_decoding_can_collect_them(tmp_path, monkeypatch):
    """An exception that is caught keeps the frame it passed through until garbage is collected, perhaps by a child."""
    clip = write_clip(tmp_path / "clip.mp4", 3, size=(360, 640))
    leftovers: list = []

    def stop(picture, *_):
        raise Stop

    monkeypatch.setattr(video_reading_stts, "resize", stop)
    gc.disable()
    try:
        with pytest.raises(Stop) as caught:
            read_clip(clip, size=(42, 42))
        leftovers += [leftovers, caught.value]
        del leftovers, caught
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        child.start()
        child.join(20)
        hangs = child.is_alive()
        child.kill()
        child.join()
        assert not hangs
        assert child.exitcode == 0
    finally:
        gc.enable()
