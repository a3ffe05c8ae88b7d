"""The page, as a Gradio app: its components and event handlers."""

import contextlib
import dataclasses
import html
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from stts_hf.errors import is_disk_full
from stts_hf.modeling.budget_stts import KeepRule
from stts_hf.selectors import SELECTORS
from stts_hf.video.sources import is_url
from stts_hf.visualize.overlay import write_overlays
from stts_hf.wording import shown_name

from . import page
from .held_clips import Answerer, Progress, check_video
from .visits import Visit, Visits

HOUR = 3600
BROKEN_OFF = 600  # seconds without a byte
OF_SAMPLE = ("Which way does the red ring move?", "Which letter flashes up?", "What is moving in this video?")
CHOOSE = "Choose a video or take the sample clip, then ask about it."
SAW = "What the model saw"
OF_ANY = ("What happens in this video?",)
ASK: dict[str, Any] = {"submit_btn": "Ask", "stop_btn": False}
# Runs in the browser, because the server's update may arrive after the answer's end.
STOPPING = "() => ({__type__: 'update', stop_btn: 'Stopping …'})"
Answer = Callable[[str, str, str, KeepRule, str], Generator[Progress, None, None]]
Changes = dict[Any, Any]  # new values by component


class Page:
    """
    Components and event handlers; state lives in `visits`. blocks: the Gradio app. sample: a video to try. about,
    link, on_gpu: as in `serving.build`.
    """

    def __init__(
        self,
        answerer: Answerer,
        sample: Path,
        about: str = "",
        on_gpu: Callable[[Answer], Answer] | None = None,
        link: str = "",
    ):
        self.answerer, self.limits, self.sample = answerer, answerer.limits, sample
        self.answer: Answer = on_gpu(answerer.answer) if on_gpu else answerer.answer
        # Gradio deletes uploads and overlays after an hour.
        with gr.Blocks(title="Ask a video", analytics_enabled=False, delete_cache=(HOUR // 4, HOUR)) as self.blocks:
            # A lambda, since Gradio copies a bound method's object, weights included, with every page that it sends.
            self.owner = gr.State(None, time_to_live=HOUR, delete_callback=lambda owner: self.visits.leave(owner))
            gr.HTML(page.introduction(about, link), elem_id="head")
            with gr.Row(elem_id="body"):
                with gr.Column(min_width=320):
                    self._build_video()
                with gr.Column(min_width=320):
                    self._build_chat()
            self.visits = Visits(answerer.clips)
            self._connect()

    def _build_video(self) -> None:
        with gr.Tabs(selected="video", elem_id="views") as self.views:
            with gr.Tab("Video", id="video"):
                self.video = gr.Video(elem_id="clip", show_label=False, sources=["upload"], buttons=[])
                take_no_addresses(self.video)
            with gr.Tab(SAW, id="overlay", interactive=False, render_children=True) as self.second:
                self.overlay = gr.Video(elem_id="seen", show_label=False, interactive=False, buttons=[])
        self.try_sample = gr.Button("Use the sample clip", size="sm", elem_id="sample")
        self.timeline = gr.HTML(elem_id="tokens", apply_default_css=False)
        first, *others = assistants = self.answerer.assistants
        config = assistants[first].model.config
        percent, threshold = 100 * config.vision_config.pruning_ratio, config.keep_rule().threshold
        words = "Video tokens to drop, in %"
        self.percent = gr.Slider(0, 100, round(percent), step=5, label=words, buttons=[], elem_id="drop")
        words = "Or keep blocks that score at least (0: by the share above)"
        self.threshold = gr.Slider(0, 1, threshold or 0, step=0.005, label=words, buttons=[], elem_id="threshold")
        choices = [(SELECTORS[name].label, name) for name in (first, *others)]
        self.selector = gr.Radio(choices, value=first, label="Selection method", visible=bool(others))

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
        label = "The last question in Python"
        self.code = gr.Code(language="python", label=label, interactive=False, visible=False, elem_id="code")

    def _connect(self) -> None:
        # No event cancels another: Gradio's page sends cancellations last, which would also drop later questions.
        # Answers end themselves with a last update.
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        at_once: dict[str, Any] = {**quiet, "concurrency_limit": None}
        turn: dict[str, Any] = {"concurrency_id": "answers", "concurrency_limit": self.limits.answers}
        asked_with = [self.video, self.percent, self.selector, self.threshold]
        outputs = [self.box, self.chat, self.timeline, self.numbers, self.compare, self.owner, self.code]
        views = [self.overlay, self.second, self.views]
        # Enter during an answer sends the question after it; Gradio's default keeps it in the box and sends nothing.
        later: dict[str, Any] = {"trigger_mode": "always_last", "show_progress": "hidden", **turn}
        first = self.box.submit(self.ask, [self.box, *asked_with], outputs, api_name="ask", **later)
        example = self.chat.example_select(self.ask_example, asked_with, outputs, **quiet, **turn)
        again = self.compare.click(self.ask_unpruned, [self.video, self.selector], outputs, **quiet, **turn)
        for answer in first, example, again:
            answer.success(self.draw, None, views, concurrency_id="drawing", **quiet)
        self.box.stop(None, None, self.box, js=STOPPING, **quiet)
        self.box.stop(self.stop, None, [self.chat, self.box], **at_once)
        self.chat.clear(self.clear, None, self.compare, **at_once)
        self.try_sample.click(lambda: str(self.sample), None, self.video, **quiet)
        chosen = self.video.change(self.choose, self.video, [self.try_sample, *outputs, *views], **at_once)
        chosen.failure(lambda: None, None, self.video, **quiet)
        self.blocks.unload(self.leave)

    def choose(self, video: str | None, request: gr.Request) -> Iterator[Changes]:
        """A video was chosen or removed: forgets the one before."""
        owner = str(request.session_hash)
        cleared = {**self._untold(), **self._undrawn()} if self.visits.choose(owner, video) else {}
        told: dict[str, Any] = {"value": []} if cleared else {}
        yield {
            **cleared,
            self.chat: gr.Chatbot(**told, examples=[], placeholder="" if video else CHOOSE),
            self.try_sample: gr.Button(visible=video is None),
            self.owner: owner,
        }
        if video is None:
            return
        try:
            check_video(video, self.limits)
        except Exception as error:
            raise complaint(error, video) from error
        questions = OF_SAMPLE if Path(video).name == self.sample.name else OF_ANY
        yield {self.chat: gr.Chatbot(examples=[{"text": question} for question in questions])}

    def ask_example(
        self, video: str | None, percent: float, selector: str, level: float, request: gr.Request, chosen: gr.SelectData
    ) -> Iterator[Changes]:
        yield from self.ask(chosen.value["text"], video, percent, selector, request, level)

    def ask_unpruned(self, video: str | None, selector: str, request: gr.Request) -> Iterator[Changes]:
        """Asks the last question again without pruning; timeline and overlay stay those of the pruned clip."""
        visit = self.visits.find(str(request.session_hash))
        if visit is not None and visit.turns:
            yield from self.ask(visit.turns[-1].question, video, 0, selector, request, shows=False)

    def ask(
        self,
        question: str,
        video: str | None,
        percent: float,
        selector: str,
        request: gr.Request,
        threshold: float = 0,
        shows: bool = True,
    ) -> Iterator[Changes]:
        """Streams the answer to a question. shows: whether timeline and overlay follow, once the video is read."""
        owner = str(request.session_hash)
        if video is None:
            raise complaint(ValueError("There is no video yet. Choose one, or use the sample clip."), "")
        with self.visits.turn(owner, video) as visit:
            if visit is None:
                return
            if visit.chosen and not question.strip():  # Enter in an empty box
                yield {self.owner: owner}  # Gradio empties all outputs of a generator that yields nothing
                return
            turn = visit.answering = page.Turn(question)
            writing: dict[str, Any] = {"value": "", "submit_btn": False, "stop_btn": "Stop"}
            waiting = {self.box: gr.Textbox(**writing), self.compare: gr.Button(visible=False), self.owner: owner}
            yield {**waiting, self.chat: page.messages([*visit.turns, turn])}
            progress, saw = None, Changes()
            try:
                rule = KeepRule(threshold=threshold) if threshold else KeepRule(percent / 100)  # as sliders say
                asked_for = (owner, video, question, rule, selector)
                self.answerer.check(*asked_for)
                with contextlib.closing(self.answer(*asked_for)) as answer:
                    for progress in answer:
                        new = Changes()
                        if shows and not turn.progress:
                            visit.seen = progress
                            saw = new = {self.timeline: page.timeline(progress.seen)}
                        turn = visit.answering = dataclasses.replace(turn, progress=progress)
                        if visit.stopped or visit.left:
                            break
                        yield {**new, self.chat: page.messages([*visit.turns, turn])}
            except Exception as error:
                if not visit.left:
                    yield {**self._told(visit), self.box: gr.Textbox(question, **ASK)}
                if not visit.left:
                    raise complaint(error, video) from error
            if not visit.left:
                visit.turns.append(dataclasses.replace(turn, finished=True, stopped=visit.stopped))
                visit.measured += [progress] if progress else []
                # All outputs, since programs get only the last update.
                yield {**saw, **self._told(visit), self.owner: owner}
            if visit.left:
                yield {**self._untold(), self.box: gr.Textbox(**ASK)}

    def _told(self, visit: Visit) -> Changes:
        """The conversation, its measurements, and the box for the next question."""
        unpruned = any(run.rule.ratio == 0 for run in visit.measured)
        return {
            self.chat: page.messages(visit.turns),
            self.numbers: page.table(visit.measured),
            self.compare: gr.Button(visible=bool(visit.turns and visit.measured) and not unpruned),
            self.box: gr.Textbox(**ASK),
            self.code: gr.Code(python := self._python(visit), visible=bool(python)),
        }

    def _python(self, visit: Visit) -> str:
        """The last question whose video was read: one that was stopped before has no settings to show."""
        for turn in reversed(visit.turns):
            if turn.progress is not None:
                named = shown_name(self.answerer.assistants[turn.progress.selector].model.config.name_or_path)
                settings = (self.answerer.processing or {}, self.limits.new_tokens)
                return page.as_python(named, turn.question, turn.progress, *settings)
        return ""

    def _untold(self) -> Changes:
        told = {self.chat: [], self.timeline: "", self.numbers: "", self.compare: gr.Button(visible=False)}
        return told | {self.code: gr.Code("", visible=False)}

    def _undrawn(self) -> Changes:
        closed = {self.second: gr.Tab(SAW, interactive=False), self.views: gr.Tabs(selected="video")}
        return {self.overlay: None, **closed}

    def stop(self, request: gr.Request) -> Changes:
        """Ends the answer at its next piece, and says so at once: reading a video may take seconds more."""
        visit = self.visits.find(str(request.session_hash))
        if visit is None or (turn := visit.answering) is None:
            return {self.box: gr.Textbox(**ASK)}
        visit.stopped = True
        turn = dataclasses.replace(turn, finished=True, stopped=True)
        return {self.chat: page.messages([*visit.turns, turn]), self.box: gr.Textbox(**ASK)}

    def clear(self, request: gr.Request) -> Any:
        """The conversation was cleared, so its last question can't be asked again."""
        visit = self.visits.find(str(request.session_hash))
        if visit is not None:
            visit.turns.clear()
        return gr.Button(visible=False)

    def draw(self, request: gr.Request) -> Iterator[Changes]:
        visit = self.visits.find(str(request.session_hash))
        if visit is None or visit.video is None or visit.seen is None:
            return
        facts, drawn = visit.seen.seen, (visit.seen.selector, visit.seen.rule)
        shown = {self.second: gr.Tab(SAW, interactive=True), self.views: gr.Tabs(selected="overlay")}
        if visit.drawn == drawn:
            yield shown
            return
        yield {self.second: gr.Tab("Drawing what it saw …", interactive=False)}
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "overlay.mp4")
                masks: dict[Any, Any] = {path: facts.keep_mask}
                write_overlays(visit.video, masks, facts.grid, facts.timestamps, facts.tubelet, beside=True)
                yield {self.overlay: str(path), **shown}  # Gradio copies the file before it asks for more
            visit.drawn = drawn
        except Exception as error:
            yield self._undrawn()
            if visit.left:
                return
            raise complaint(error, visit.video, f"{SAW} is not drawn: ") from error
        if visit.left:
            yield self._undrawn()

    def leave(self, request: gr.Request) -> None:
        """The tab was closed or loaded again. Partial uploads are deleted too: Gradio keeps them."""
        self.visits.leave(str(request.session_hash))
        for path in Path(self.blocks.GRADIO_CACHE).glob("tmp*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and time.time() - path.stat().st_mtime > BROKEN_OFF:
                    path.unlink()


def take_no_addresses(video: gr.Video) -> None:
    """Keeps Gradio from downloading a video that a program passes as a URL instead of an upload."""
    take = video.async_move_resource_to_block_cache

    async def take_upload(url_or_file_path: str | Path | None) -> str | None:
        if is_url(url_or_file_path):
            raise gr.Error("Nothing is fetched from an address here. Upload the video.", print_exception=False)
        return await take(url_or_file_path)

    # Not a subclass: Gradio writes a file beside the code of every new component class.
    video.async_move_resource_to_block_cache = take_upload  # type: ignore[method-assign]


def complaint(error: Exception, video: str, what: str = "") -> gr.Error:
    """An error as the visitor reads it: the message of a wrong input; other errors are only in the log."""
    if isinstance(error, gr.Error):  # of ZeroGPU, about a visitor's quota
        return error
    known = isinstance(error, ValueError | TypeError)
    if is_disk_full(error):
        words = "The disk of this server is full. Try again later."
    elif video and not Path(video).exists():
        words, known = "The video is not kept here any more. Choose it again.", True
    elif known:
        words = " ".join(str(error).replace(video or "\0", Path(video).name).split())
    else:
        words = "Something went wrong here, and its log says what. Try again."
    said = html.escape(what or words[:1].upper()) + html.escape(words if what else words[1:])
    return gr.Error(said, duration=None, print_exception=not known)
