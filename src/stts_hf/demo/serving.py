"""From a checkpoint to a page that is served."""

import atexit
import copy
import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from stts_hf.inference.assistant import VideoAssistant
from stts_hf.model_parts import is_scorer_trained
from stts_hf.selectors import SELECTORS, UNTRAINED
from stts_hf.visualize.sample_clip import write_sample_clip

from .app import OF_SAMPLE, Answer, Page
from .held_clips import Answerer, Limits

HERE = Path(__file__).parent
WAITING = 32  # questions in the queue; whoever comes then is told that it is full


def build(
    assistant: VideoAssistant,
    *,
    limits: Limits | None = None,
    processing: Mapping[str, Any] | None = None,
    about: str = "",
    on_gpu: Callable[[Answer], Answer] | None = None,
) -> Page:
    """
    The page for a model, to be served by `serve`.

    Args:
        assistant: what `stts_hf.load` returns. Its selector is the first choice.
        limits: what visitors may use; `Limits()` by default.
        processing: which frames are looked at, such as `{"num_frames": 32}`.
        about: what to say of the checkpoint.
        on_gpu: wraps what answers, such as `spaces.GPU()` where a GPU is lent for one call at a time. Nothing can be
            held between calls then: pass `Limits(clips=0)`.
    """
    folder = own_folder()
    sample = folder / "sample_clip.mp4"
    write_sample_clip(sample)
    if on_gpu is None:  # a first call takes longer, and would be somebody's measurement
        assistant.answer(str(sample), OF_SAMPLE[0], processing=processing, max_new_tokens=1)
    answerer = Answerer(
        {name: with_selector(assistant, name) for name in selectors(assistant)}, limits or Limits(), processing
    )
    return Page(answerer, sample, about, on_gpu)


def serve(page: Page, **options: Any) -> Any:
    """Serves the page until it is interrupted. options: of Gradio's `launch`, which says what it returns."""
    page.blocks.queue(max_size=WAITING)
    return page.blocks.launch(
        share=False,
        max_file_size=page.limits.upload_mb * 2**20,
        enable_monitoring=False,
        run_history=False,  # it would keep questions and answers in the browser
        footer_links=[],
        ssr_mode=False,
        pwa=False,
        theme=theme(),
        _frontend=False,  # or it looks at its own page, and gives up where a busy machine takes three seconds for that
        css_paths=HERE / "page.css",
        js=(HERE / "page.js").read_text(encoding="utf-8"),
        **options,
    )


def theme() -> gr.Theme:
    """Fonts that are there already: Gradio's themes would fetch theirs from elsewhere."""
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
    """
    A folder of this process, gone with it, in which Gradio keeps its files too: by default all Gradio apps of a user
    share one, and each serves what is in there.
    """
    folder = Path(tempfile.mkdtemp(prefix="stts-demo-")).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "cache")
    return folder


def selectors(assistant: VideoAssistant) -> list[str]:
    """Those that can be chosen, the model's own first: a scorer that was never trained is not offered."""
    own = assistant.model.config.vision_config.selector
    return list(dict.fromkeys([own, *(SELECTORS if is_scorer_trained(assistant.model) else UNTRAINED)]))


def with_selector(assistant: VideoAssistant, selector: str) -> VideoAssistant:
    """An assistant that shares the weights and has a configuration of its own, so that both can answer at once."""
    shared = {id(tensor): tensor for tensor in itertools.chain(assistant.model.parameters(), assistant.model.buffers())}
    model = copy.deepcopy(assistant.model, shared)
    model.config.vision_config.selector = selector
    return VideoAssistant(model, assistant.processor)
