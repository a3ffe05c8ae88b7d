"""
Doing the runs of a study: one a process, which trains its model, asks it, and writes the run's record last, whole or
not at all. A run whose record is there is skipped, so a study that was killed goes on by the same command.
"""

import contextlib
import dataclasses
import datetime
import itertools
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from torch.utils.data import Subset
from transformers import TrainerCallback
from transformers.utils import logging

from stts_hf.benchmark.measure import describe_machine, describe_versions
from stts_hf.checkpoints.atomic_folder import atomic_file, atomic_folder
from stts_hf.data.collator import STTSDataCollator
from stts_hf.errors import is_disk_full
from stts_hf.evaluation.evaluate import evaluate
from stts_hf.model_parts import SCORER, VISION_TOWER, module_of
from stts_hf.selectors import SELECTORS
from stts_hf.training.build import renew_scorer

from ..benchmarks.moving_clips import correlate
from . import fitting
from .data import (
    EncodedRows,
    StudyError,
    encode_conversations,
    load_masks,
    load_processor,
    read_questions,
    write_json,
)
from .methods import FROZEN, METHODS, load_method
from .motion import share_of_blocks
from .study import (
    FORMAT,
    MAIN,
    MAIN_RATIO,
    RECORDS,
    Evaluation,
    Run,
    Study,
    evaluations,
    is_done,
    is_scored,
    read_records,
)
from .told import tell, together

HELD_OUT = 48  # training clips on which the weights of a scorer of answers are chosen
CHECKPOINTS, SCORERS = "checkpoints", "scorers"
QUESTIONS_AT_ONCE = 32
RIGHT, WRONG, NOT_ASKED = "1", "0", "-"  # a question's mark in a record


def runs_to_do(study: Study, runs: Sequence[Run], only: Sequence[str] = ()) -> list[Run]:
    """The runs that have no record yet, or one that lacks what came later. only: methods to ask, if not all."""
    records = read_records(study.folder, study.settings)
    return [run for run in runs if not is_done(records.get(run.name), run, study.settings, only)]


def do_runs(
    study: Study,
    runs: Sequence[Run],
    say: Callable[[str], None],
    only: Sequence[str] = (),
    *,
    workers: int = 1,
    keep_checkpoints: bool = False,
) -> list[Run]:
    """
    Does runs, each in a process, and returns those that failed: their tracebacks are on stderr, and the others go on.

    only: methods to ask, if not all. workers: processes at a time, which share PyTorch's threads (`OMP_NUM_THREADS`)
    alike. keep_checkpoints: whether the trained models stay in `checkpoints/`. say: takes a line about each run. Raises
    `StudyError` where another process is at this study or one was killed, and `OSError` where the disk is full. What is
    done by then stays done.
    """
    failed = []
    with _lock(study):
        processor, openly = load_processor(study.base), study.settings.without_options
        encode_conversations(study.dataset, processor, study.folder, openly)
        threads = max(1, torch.get_num_threads() // workers)
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin_process, (threads,), max_tasks_per_child=1)
        doing = {pool.submit(do_run, study, run, keep_checkpoints, only): run for run in runs}
        try:
            for future in as_completed(doing):
                try:
                    say(future.result())
                except Exception as error:
                    if is_disk_full(error) or isinstance(error, BrokenProcessPool):
                        raise
                    traceback.print_exception(error)
                    failed.append(doing[future])
        except BrokenProcessPool:
            raise StudyError("a process of the study was killed: give the same command again") from None
        finally:
            pool.shutdown(cancel_futures=True)
    return failed


@contextlib.contextmanager
def _lock(study: Study) -> Iterator[None]:
    try:
        with filelock.FileLock(study.folder / "study.lock", timeout=0):
            yield
    except filelock.Timeout:
        raise StudyError(f"another process is at the study in {study.folder}: wait until it ends") from None


def _begin_process(threads: int) -> None:
    torch.set_num_threads(threads)
    logging.disable_progress_bar()  # those of several processes would write over each other


class Desk:
    """What a run needs of its study: rows, questions, processor and device."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.rows = EncodedRows(study.folder)
        self.questions = [
            row | {"id": f"{look}:{row['id']}", "clip": f"{look}:{row['clip']}", "look": look, "media_root": str(path)}
            for look, path in study.looks.items()
            for row in read_questions(path, study.settings.without_options, study.questions_file)
        ]
        self.processor = load_processor(study.base)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def masks(self, kind: str) -> dict[str, np.ndarray]:
        """`load_masks` of all clips that are asked about."""
        found = {look: load_masks(path, kind, self.study.questions_file) for look, path in self.study.looks.items()}
        return {f"{look}:{clip}": mask for look, masks in found.items() for clip, mask in masks.items()}


def do_run(study: Study, run: Run, keep_checkpoint: bool = False, only: Sequence[str] = ()) -> str:
    """
    Trains and asks, and writes the run's record; returns a line about it. only: methods to ask, if not all. The frozen
    base, and a trained model that was kept, are not asked again what their record holds, which is written after each
    method and ratio.
    """
    desk, started, path = Desk(study), time.perf_counter(), study.folder / RECORDS / f"{run.name}.json"
    earlier = read_records(study.folder, study.settings).get(run.name, {"evaluations": {}, "seconds": 0.0})
    record: dict[str, Any] = {"format": FORMAT, "study": study.settings.fingerprint, "run": dataclasses.asdict(run)}
    record |= {"started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}", "seconds": earlier["seconds"]}
    record |= {"machine": describe_machine(desk.device), "versions": describe_versions()}
    with tempfile.TemporaryDirectory() as folder:
        kept = study.folder / CHECKPOINTS / run.name
        is_kept = kept.is_dir() and "training" in earlier
        checkpoint = kept if keep_checkpoint or is_kept else Path(folder) / "checkpoint"
        record["training"] = earlier["training"] if is_kept else train(run, desk, checkpoint)
        if is_scored(run, study.settings):
            record["motion"] = earlier.get("motion") or correlate_with_motion(run, desk, checkpoint)
        goes_on, there = is_kept or run.method == FROZEN, earlier["evaluations"]
        record["evaluations"] = found = dict(there) if goes_on else {}
        asked = evaluations(run, study.settings)
        asked = [one for one in asked if not only or one.method in only or one.name in there]
        for one in asked:
            if one.name not in found:
                found[one.name] = ask(run, one, desk, checkpoint)
                record["seconds"] = round(time.perf_counter() - started + earlier["seconds"] * goes_on, 1)
                if goes_on or one == asked[-1]:
                    write_json(path, record)
    marks = found[asked[0].name]["marks"]
    return f"{run.name}: {marks.count(RIGHT) / len(marks):.1%} right, {record['seconds']:.0f} s"


class _StepClock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def train(run: Run, desk: Desk, checkpoint: Path) -> dict[str, Any]:
    """
    Trains the run's model, saves it into `checkpoint`, and returns seconds a step, the losses, and the seconds in which
    its scorer learned alone. The seed sets the order of the rows, the drawn ratios, a new scorer, and blocks
    that are drawn. Of the frozen base only the scorer is trained.
    """
    settings, method = desk.study.settings, METHODS[run.method]
    options = {name: value for name, value in settings.model_settings.items() if name not in method.settings}
    ratio = method.ratio(max(settings.ratios))
    model: Any = load_method(run.method, desk.study.base, ratio, run.pruning_layer, seed=run.seed, **options)
    collator = STTSDataCollator(desk.processor, model_config=model.config, return_ids=True)
    clock, losses, scorer_seconds = _StepClock(), [], None
    if SELECTORS[model.config.vision_config.selector].is_learned:
        renew_scorer(model, run.seed)
        model.config.worth_unit = None
        if model.config.scorer_target == "answers" or (settings.scorer_steps and model.config.temporal_loss_weight):
            scorer_seconds = load_started_scorer(model.to(desk.device), run, desk, collator)
    if run.method != FROZEN:
        draws: dict[str, Any] = {"pruning_ratio_range": list(settings.ratio_range)}
        trainer = fitting.train(
            model,
            desk.rows,
            collator,
            [clock],
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rates=dict(settings.learning_rates),
            warmup_steps=settings.warmup_steps,
            num_masks=settings.num_masks,
            answer_loss=settings.answer_loss,
            freeze=[SCORER] if method.keeps_scorer else [],
            seed=run.seed,
            **({} if "pruning_ratio" in method.settings else draws),
        )
        names = ("step", "task_loss", "temporal_loss", "worth_loss")
        logs = [entry for entry in trainer.state.log_history if "task_loss" in entry]
        losses = [{name: round(entry[name], 5) for name in names if name in entry} for entry in logs]
    with atomic_folder(checkpoint, overwrite=True) as new:
        model.save_pretrained(new)
        desk.processor.save_pretrained(new)
    steps = np.diff(clock.ends).tolist()
    return {
        "seconds_per_step": statistics.median(steps) if steps else None,
        "losses": losses,
        "scorer_seconds": scorer_seconds,
    }


def load_started_scorer(model: Any, run: Run, desk: Desk, collator: STTSDataCollator) -> float:
    """
    Loads the scorer that runs of this layer, seed and target begin with; trains it where it is missing. Returns the
    seconds that this took. What was measured is kept beside it, so that a run that was killed does not measure again.
    """
    settings, scorer, target = desk.study.settings, module_of(model, SCORER), model.config.scorer_target
    videos = [index for index, row in enumerate(desk.rows.rows) if row["grids"]]
    number = max(1, min(HELD_OUT, len(videos) // 8))
    held_out, shown = videos[:number], videos[number:]
    path = desk.study.folder / SCORERS / f"{target}-layer{run.pruning_layer}-seed{run.seed}.pt"
    path.parent.mkdir(exist_ok=True)
    with filelock.FileLock(f"{path}.lock"):  # another process may be at it
        if not path.exists():
            started, steps = time.perf_counter(), settings.scorer_steps
            options: dict[str, Any] = {"state_cache_gb": 2.0}
            if target == "answers":
                steps, folder = settings.answers_steps, path.with_suffix("")
                options |= {"num_masks": settings.num_masks, "mask_rounds": settings.mask_rounds, "folder": folder}
                options |= {"pruning_ratio_range": list(settings.mask_ratios), "choose_on": Subset(desk.rows, held_out)}
                options |= {"answer_loss": settings.answer_loss}
            size, rate = settings.batch_size, settings.scorer_rate
            fitting.start_scorer(model, Subset(desk.rows, shown), collator, steps, size, run.seed, rate, **options)
            found = {"state": scorer.state_dict(), "worth_unit": model.config.worth_unit}
            with atomic_file(path) as new:
                torch.save(found | {"seconds": round(time.perf_counter() - started, 1)}, new)
        found = torch.load(path, weights_only=True, map_location=desk.device)
    scorer.load_state_dict(found["state"])
    model.config.worth_unit = found["worth_unit"]
    return float(found["seconds"])


def load(run: Run, asked: Evaluation, desk: Desk, checkpoint: Path) -> Any:
    """
    The trained model as the method that is asked. A selector that draws its blocks draws others for every batch, the
    same ones in every call: with one seed for all batches, all clips would share one draw.
    """
    model: Any = load_method(asked.method, checkpoint, asked.pruning_ratio, run.pruning_layer, seed=run.seed)
    tower = module_of(model, VISION_TOWER)
    if tower.config.selector == "random":
        seeds = itertools.count(run.seed << 32)
        tower.register_forward_pre_hook(lambda *_: setattr(tower.config, "selector_seed", next(seeds)))
    return model.to(desk.device).eval()


def ask(run: Run, asked: Evaluation, desk: Desk, checkpoint: Path) -> dict[str, Any]:
    """
    Asks the run's weights all questions; with more frames, those about long clips. Returns `marks`, a character for
    each question in their order, seconds, and of each group the mean tokens and video tokens that reach the language
    model. Raises `StudyError` where a question could not be asked, as of a clip that cannot be read.
    """
    model = load(run, asked, desk, checkpoint)
    questions, processing = desk.questions, None
    if asked.scaling:
        questions = [row for row in questions if row["group"] == "long" and row["look"] == MAIN]
        processing = {"test_time_scaling": True, "pruning_ratio": asked.scaling}
    started = time.perf_counter()
    found: dict[Any, dict[str, Any]] = {}
    for some in _told(model, asked, questions, desk):
        answers = evaluate(model, desk.processor, some, batch_size=QUESTIONS_AT_ONCE, processing=processing)
        found |= {answer["id"]: answer for answer in answers}
    if errors := [answer["error"] for answer in found.values() if answer["error"]]:
        raise StudyError(f"{len(errors)} questions could not be asked: {errors[0]}")
    marks = {name: RIGHT if answer["right"] else WRONG for name, answer in found.items()}
    result = dataclasses.asdict(asked) | {
        "marks": "".join(marks.get(row["id"], NOT_ASKED) for row in desk.questions),
        "seconds": round(time.perf_counter() - started, 2),
        "llm_tokens": {},
        "video_tokens": {},
    }
    main = [row for row in questions if row["look"] == MAIN]
    for group in dict.fromkeys(row["group"] for row in main):
        of_group = [found[row["id"]] for row in main if row["group"] == group]
        kept = statistics.mean(one["video_tokens_kept"] for one in of_group)
        left_out = statistics.mean(one["video_tokens"] for one in of_group) - kept
        result["llm_tokens"][group] = round(statistics.mean(one["prompt_tokens"] for one in of_group) - left_out, 2)
        result["video_tokens"][group] = round(kept, 2)
    return result


def _told(model: Any, asked: Evaluation, questions: list[dict[str, Any]], desk: Desk) -> Iterator[list[dict[str, Any]]]:
    """All questions at once; for a method that is told what matters, those that share it, after it was told."""
    told = METHODS[asked.method].told
    pictures = [row for row in questions if not told or not row.get("videos")]
    if pictures:
        yield pictures
    covers = desk.masks("things") if told else {}
    for things, some in together([row for row in questions if told and row.get("videos")], told == "clip"):
        masks = covers[some[0]["clip"]]
        grid = (masks.shape[1], *model.config.vision_config.block_grid)
        tell(module_of(model, VISION_TOWER), masks, things, grid)
        yield some


@torch.no_grad()
def correlate_with_motion(run: Run, desk: Desk, checkpoint: Path) -> dict[str, float]:
    """
    Of each clip whose motion is known, Spearman's correlation of its blocks' scores with how many of their patches
    move, over the frames `t >= 1`; 0 where all scores are the same. Left out are clips in which all blocks move alike,
    and those whose motion is of other frames than the model sees: the same clips for every method.
    """
    model = load(run, Evaluation(run.method, MAIN_RATIO), desk, checkpoint)
    motion = desk.masks("motion")
    videos = {row["clip"]: row for row in desk.questions if row["look"] == MAIN and row.get("videos")}
    correlations = {}
    for clip in sorted(videos.keys() & motion.keys()):
        path = Path(videos[clip]["media_root"], videos[clip]["videos"][0])
        inputs = desk.processor.video_processor([str(path)], return_tensors="pt")
        scores = model.model.get_video_features(**inputs.to(desk.device)).token_scores[0].cpu()  # (T, n)
        moving = share_of_blocks(motion[clip], tuple(inputs["video_grids"][0].tolist()))
        if moving is not None and np.ptp(moving[1:]):
            correlations[clip] = round(np.nan_to_num(correlate(scores, moving)), 3)
    return correlations
