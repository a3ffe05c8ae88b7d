"""The page, as a Gradio app: what is on it, and what happens when a clip is chosen, asked about or left."""

import contextlib
import dataclasses
import html
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from stts_hf.checkpoints.atomic_folder import is_disk_full
from stts_hf.visualize.overlay import write_overlays

from . import page
from .answering import Answerer, Progress, check_video
from .visits import Visits

HOUR = 3600
OF_SAMPLE = ("Which way does the red ring move?", "Which letter flashes up?", "What is moving in this video?")
CHOOSE = "Choose a video, then ask about it."
SAW = "What the model saw"
OF_ANY = ("What happens in this video?",)
ASK: dict[str, Any] = {"submit_btn": "Ask", "stop_btn": False}
Answer = Callable[[str, str, str, float, str], Generator[Progress, None, None]]
Changes = dict[Any, Any]  # components, and what they show now


class Page:
    """
    The components, and what happens to them. All that lasts is in states of the tab and in `visits`.

    Args:
        answerer: what answers.
        sample: a clip to try.
        about: what to say of the checkpoint, under the title.
        on_gpu: wraps what answers, such as `spaces.GPU()` where a GPU is lent for one call at a time.

    Attributes:
        blocks: the app.
    """

    def __init__(
        self,
        answerer: Answerer,
        sample: Path,
        about: str = "",
        on_gpu: Callable[[Answer], Answer] | None = None,
    ):
        self.answerer, self.limits, self.sample = answerer, answerer.limits, sample
        self.answer: Answer = on_gpu(answerer.answer) if on_gpu else answerer.answer
        # Should a tab not say that it was closed, its files go an hour after they came.
        with gr.Blocks(title="Ask a video", analytics_enabled=False, delete_cache=(HOUR // 4, HOUR)) as self.blocks:
            self.visits = Visits(answerer.clips, Path(self.blocks.GRADIO_CACHE))
            self.asked, self.measured, self.seen = gr.State([]), gr.State([]), gr.State(None)
            # No method: Gradio copies what a method belongs to with every page that it sends, weights and all.
            self.owner = gr.State(None, time_to_live=HOUR, delete_callback=lambda owner: self._forget(owner))
            gr.HTML(f"<h1>Ask a video</h1><p>{html.escape(about)}</p>", elem_id="head")
            with gr.Row(elem_id="body"):
                with gr.Column(min_width=320):
                    self._build_video(answerer)
                with gr.Column(min_width=320):
                    self._build_chat()
            self._connect()

    def _build_video(self, answerer: Answerer) -> None:
        with gr.Tabs(selected="video", elem_id="views") as self.views:
            with gr.Tab("Video", id="video"):
                self.video = gr.Video(elem_id="clip", show_label=False, sources=["upload"], buttons=[])
            with gr.Tab(SAW, id="overlay", interactive=False, render_children=True) as self.second:
                self.overlay = gr.Video(elem_id="seen", show_label=False, interactive=False, buttons=[])
        self.try_sample = gr.Button("Use the sample clip", size="sm", elem_id="sample")
        self.timeline = gr.HTML(elem_id="tokens", apply_default_css=False)
        first, *others = answerer.assistants
        ratio = answerer.assistants[first].pruning_ratio
        self.percent = gr.Slider(
            0, 100, round(100 * ratio), step=5, label="Video tokens to drop, in %", buttons=[], elem_id="drop"
        )
        choices = [(page.ABOUT[name], name) for name in (first, *others)]
        self.selector = gr.Radio(choices, value=first, label="Which ones", visible=bool(others))

    def _build_chat(self) -> None:
        self.chat = gr.Chatbot(
            elem_id="chat",
            show_label=False,
            buttons=[],
            height=380,
            latex_delimiters=[],
            allow_tags=False,
            layout="panel",
            placeholder=CHOOSE,
        )
        self.box = gr.Textbox(
            elem_id="box",
            label="Question",
            show_label=False,
            container=False,
            submit_btn="Ask",
            max_length=self.limits.question,
            placeholder="Ask about the video",
        )
        self.numbers = gr.HTML(elem_id="numbers", apply_default_css=False)
        self.compare = gr.Button("Ask again with nothing dropped", size="sm", visible=False, elem_id="compare")

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        turn: dict[str, Any] = {"concurrency_id": "answers", "concurrency_limit": self.limits.answers}
        shown = [self.box, self.chat, self.asked, self.measured, self.seen, self.timeline, self.numbers, self.compare]
        views = [self.overlay, self.second, self.views]
        state = [self.video, self.percent, self.selector, self.asked, self.measured]
        outputs = [*shown, self.owner]
        first = self.box.submit(self.ask, [self.box, *state], outputs, api_name="ask", show_progress="hidden", **turn)
        example = self.chat.example_select(self.ask_example, state, outputs, **quiet, **turn)
        again = self.compare.click(self.ask_unpruned, state, outputs, **quiet, **turn)
        answers: list[Any] = [first, example, again]
        drawings = [event.success(self.draw, self.seen, views, concurrency_id="drawing", **quiet) for event in answers]
        self.box.stop(self.stop, [self.asked, self.measured], outputs, cancels=answers, **quiet)
        self.chat.clear(list, None, self.asked, **quiet)
        self.try_sample.click(lambda: str(self.sample), None, self.video, **quiet)
        outputs = [self.video, self.try_sample, *outputs, *views]
        self.video.change(self.choose, self.video, outputs, cancels=[*answers, *drawings], **quiet)
        self.blocks.unload(self.leave)

    def choose(self, video: str | None, request: gr.Request) -> Iterator[Changes]:
        """Another video, or none: what was known of the one before is forgotten."""
        owner = str(request.session_hash)
        self.visits.leave(owner)
        questions = () if video is None else OF_SAMPLE if Path(video).name == self.sample.name else OF_ANY
        examples: list[Any] = [{"text": question} for question in questions]
        yield {
            self.chat: gr.Chatbot([], examples=examples, placeholder="" if examples else CHOOSE),
            self.try_sample: gr.Button(visible=video is None),
            self.views: gr.Tabs(selected="video"),
            self.second: gr.Tab(SAW, interactive=False),
            self.compare: gr.Button(visible=False),
            self.box: gr.Textbox(**ASK),
            **{self.asked: [], self.measured: [], self.seen: None, self.owner: owner},
            **{self.timeline: "", self.numbers: "", self.overlay: None},
        }
        if video is None:
            return
        self.visits.brings(owner, video)
        try:
            check_video(video, self.limits)
        except Exception as error:
            yield {self.video: None}
            raise complaint(error, video) from error

    def ask(
        self, question: str, video: str | None, percent: float, selector: str, asked: list[page.Turn],
        measured: list[Progress], request: gr.Request,
    ) -> Iterator[Changes]:  # fmt: skip
        """Streams the answer to a question, and shows what the model saw as soon as it has watched."""
        yield from self._ask(question, video, percent / 100, selector, asked, measured, request)

    def ask_example(
        self, video: str | None, percent: float, selector: str, asked: list[page.Turn], measured: list[Progress],
        request: gr.Request, chosen: gr.SelectData,
    ) -> Iterator[Changes]:  # fmt: skip
        yield from self._ask(chosen.value["text"], video, percent / 100, selector, asked, measured, request)

    def ask_unpruned(
        self, video: str | None, percent: float, selector: str, asked: list[page.Turn], measured: list[Progress],
        request: gr.Request,
    ) -> Iterator[Changes]:  # fmt: skip
        """Asks the last question again; the timeline and the overlay stay those of the pruned clip."""
        for changes in self._ask(asked[-1].question, video, 0.0, selector, asked, measured, request):
            yield {part: change for part, change in changes.items() if part not in (self.timeline, self.seen)}

    def _ask(
        self, question: str, video: str | None, ratio: float, selector: str, asked: list[page.Turn],
        measured: list[Progress], request: gr.Request,
    ) -> Iterator[Changes]:  # fmt: skip
        owner = str(request.session_hash)
        if video is None:
            raise complaint(ValueError("There is no video yet. Choose one, or use the sample clip."), "")
        self.visits.brings(owner, video)
        turn = page.Turn(question)
        writing: dict[str, Any] = {"value": "", "submit_btn": False, "stop_btn": "Stop"}
        waiting = {self.box: gr.Textbox(**writing), self.compare: gr.Button(visible=False), self.owner: owner}
        yield {**waiting, **self._conversation([*asked, turn])}
        progress, saw = None, Changes()
        try:
            asked_for = (owner, video, question, ratio, selector)
            self.answerer.check(*asked_for)
            with contextlib.closing(self.answer(*asked_for)) as answer:
                for progress in answer:
                    new = {}
                    if not turn.progress:
                        saw = new = {self.timeline: page.timeline(progress.seen), self.seen: (video, progress)}
                    turn = dataclasses.replace(turn, progress=progress)
                    yield {**new, **self._conversation([*asked, turn])}
        except Exception as error:
            yield {**self._conversation(asked), **self._ready(measured), self.box: gr.Textbox(question, **ASK)}
            raise complaint(error, video) from error
        turn = dataclasses.replace(turn, finished=True)
        measured = [*measured, *([progress] if progress else [])]
        yield {  # all of it, for programs, which get what came last
            **saw,
            **self._conversation([*asked, turn]),
            self.measured: measured,
            self.numbers: page.table(measured),
            **self._ready(measured),
        }

    def _conversation(self, asked: list[page.Turn]) -> Changes:
        return {self.asked: asked, self.chat: page.messages(asked)}

    def _ready(self, measured: list[Progress]) -> Changes:
        """For the next question."""
        unpruned = any(run.pruning_ratio == 0 for run in measured)
        return {self.box: gr.Textbox(**ASK), self.compare: gr.Button(visible=bool(measured) and not unpruned)}

    def stop(self, asked: list[page.Turn], measured: list[Progress]) -> Changes:
        """After the answer was ended: what was written of it stays."""
        asked = [dataclasses.replace(turn, finished=True) for turn in asked]
        return {**self._conversation(asked), **self._ready(measured)}

    def draw(self, seen: tuple[str, Progress] | None, request: gr.Request) -> Iterator[Changes]:
        """Writes the video with its dropped blocks dimmed, once for each way of watching it, and shows it."""
        if seen is None:
            return
        video, progress = seen
        path = self.visits.overlay(str(request.session_hash), (video, progress.selector, progress.pruning_ratio))
        if not path.exists():
            yield {self.second: gr.Tab("Drawing what it saw …", interactive=False)}
            unfinished = path.with_suffix(".part.mp4")
            facts = progress.seen
            masks: dict[Any, Any] = {unfinished: facts.keep_mask}
            try:
                write_overlays(video, masks, facts.grid, facts.timestamps, facts.tubelet)
                unfinished.replace(path)
            except Exception as error:
                unfinished.unlink(missing_ok=True)
                yield {self.second: gr.Tab(SAW, interactive=False)}
                raise complaint(error, video, f"{SAW} is not drawn: ") from error
        yield {
            self.overlay: str(path),
            self.second: gr.Tab(SAW, interactive=True),
            self.views: gr.Tabs(selected="overlay"),
        }

    def leave(self, request: gr.Request) -> None:
        """The tab was closed or loaded again."""
        self.visits.leave(str(request.session_hash))

    def _forget(self, owner: str | None) -> None:
        if owner is not None:
            self.visits.leave(owner)


def complaint(error: Exception, video: str, what: str = "") -> gr.Error:
    """What to tell about an error: a mistake in what was given says so itself, and all others are in the log."""
    if isinstance(error, gr.Error):  # of ZeroGPU, about what is left of someone's share
        return error
    known = isinstance(error, ValueError | TypeError)
    if is_disk_full(error):
        words = "The disk of this server is full. Try again later."
    elif known:
        words = " ".join(str(error).replace(video or "\0", Path(video).name).split())
    elif not Path(video).exists():
        words, known = "The video is not kept here any more. Choose it again.", True
    else:
        words = "Something went wrong here, and its log says what. Try again."
    said = html.escape(what or words[:1].upper()) + html.escape(words if what else words[1:])
    return gr.Error(said, duration=None, print_exception=not known)
