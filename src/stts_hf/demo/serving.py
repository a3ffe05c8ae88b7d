"""Builds the page for a model, and serves it."""

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import gradio as gr

from stts_hf.inference.assistant import VideoAssistant
from stts_hf.model_parts import usable_selectors, with_selector
from stts_hf.visualize.sample_clip import write_sample_clip

from .app import OF_SAMPLE, Answer, Page
from .held_clips import Answerer, Limits

HERE = Path(__file__).parent
WAITING = 32  # maximum number of queued questions


def build(
    assistant: VideoAssistant,
    *,
    limits: Limits | None = None,
    processing: Mapping[str, Any] | None = None,
    about: str = "",
    on_gpu: Callable[[Answer], Answer] | None = None,
    link: str = "",
) -> Page:
    """
    The page for a model, to be served by `serve`.

    Args:
        assistant: of `stts_hf.load`. Its selector is the first choice.
        limits: of visitors; `Limits()` by default.
        processing: which frames, such as `{"num_frames": 32}`.
        about, link: a sentence about the checkpoint, and its address.
        on_gpu: wraps `Answerer.answer`, such as `spaces.GPU()` where a GPU is lent for one call at a time. Clips cannot
            be held between such calls: pass `Limits(clips=0)`.
    """
    folder = own_folder()
    sample = folder / "sample_clip.mp4"
    write_sample_clip(sample)
    if on_gpu is None:  # warm-up, so that no visitor measures it
        assistant.answer(str(sample), OF_SAMPLE[0], processing=processing, max_new_tokens=1)
    models = {name: with_selector(assistant.model, name) for name in usable_selectors(assistant.model)}
    assistants = {name: VideoAssistant(model, assistant.processor) for name, model in models.items()}
    answerer = Answerer(assistants, limits or Limits(), processing)
    return Page(answerer, sample, about, on_gpu, link)


def serve(page: Page, **options: Any) -> Any:
    """Serves the page until it is interrupted; returns what Gradio's `launch` does, which takes the options."""
    page.blocks.queue(max_size=WAITING)
    return page.blocks.launch(
        share=False,
        max_file_size=page.limits.upload_mb * 2**20,
        enable_monitoring=False,
        run_history=False,  # keeps questions and answers in the browser
        footer_links=[],
        ssr_mode=False,
        pwa=False,
        theme=theme(),
        _frontend=False,  # its check of the page times out after three seconds on a busy machine
        css_paths=HERE / "page.css",
        js=(HERE / "page.js").read_text(encoding="utf-8"),
        **options,
    )


def theme() -> gr.Theme:
    """System fonts: Gradio's themes would download theirs."""
    system = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif"]
    return gr.themes.Base(
        primary_hue=gr.themes.colors.violet,
        neutral_hue=gr.themes.colors.zinc,
        radius_size=gr.themes.sizes.radius_lg,
        font=system,
        font_mono=["ui-monospace", "monospace"],
    ).set(
        body_text_color_subdued="*neutral_500",  # paler is hard to read
        body_text_color_subdued_dark="*neutral_400",
        input_background_fill="*background_fill_primary",
        checkbox_label_background_fill="*background_fill_primary",
        button_secondary_background_fill="*background_fill_primary",
        button_secondary_border_color="*border_color_primary",
    )


@functools.cache
def own_folder() -> Path:
    """A temporary folder of this process, also for Gradio's files, which apps of a user would share otherwise."""
    folder = Path(tempfile.mkdtemp(prefix="stts-demo-")).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "cache")
    return folder


def end_process() -> NoReturn:
    """
    Ends the process, and deletes its files. At Python's own end, before 3.14, a thread that comes back from an operator
    of PyTorch is unwound where it asks for the GIL, in a C++ destructor: that aborts the process ("terminate called
    without an active exception").
    """
    shutil.rmtree(own_folder(), ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
