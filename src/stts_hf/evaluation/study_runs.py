"""Doing the runs of a study: one trained and asked, by as many processes as wanted, each run by one of them.

A process takes a run by locking a file of its name, a lock that goes with the process however that ends. Weights are
saved before they are asked anything and a record is written last, each whole or not at all: a killed study goes on
where it was, and a run that was being trained starts again.
"""

import dataclasses
import datetime
import itertools
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging

from stts_hf import register_auto_classes
from stts_hf.benchmark.measure import describe_machine, describe_versions
from stts_hf.checkpoints.atomic_folder import atomic_file, atomic_folder
from stts_hf.data.collator import STTSDataCollator
from stts_hf.evaluation.evaluate import evaluate
from stts_hf.evaluation.fitting import start_scorer
from stts_hf.evaluation.methods import METHODS, load_method
from stts_hf.evaluation.motion import correlate, share_of_blocks
from stts_hf.evaluation.study import FORMAT, UNPRUNED, Evaluation, Run, Study, evaluations, is_scored
from stts_hf.evaluation.study_data import (
    EncodedRows,
    StudyError,
    encode_conversations,
    load_motion,
    load_processor,
    read_object,
    read_questions,
    write_json,
)
from stts_hf.parts import SCORER, VISION_TOWER, module_of
from stts_hf.shortages import is_disk_full
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.build import renew_scorer
from stts_hf.training.trainer import STTSTrainer

CHECKPOINTS, FAILURES, LOCKS, SCORERS = "checkpoints", "failures", "locks", "scorers"
TRAINING = "training.json"
QUESTIONS_AT_ONCE = 32
RIGHT, WRONG, NOT_ASKED = "1", "0", "-"  # a question's mark in a record
_SECONDS_BETWEEN_LOOKS = 1.0  # at runs that other processes are at
Say = Callable[[str], None]


def run_study(
    study: Study, runs: Sequence[Run], say: Say, *, workers: int = 1, keep_checkpoints: bool = False
) -> list[Run]:
    """
    Does those of `runs` that are not done; those that failed before are tried again. Returns those that failed.

    workers: processes, with an equal share of the cores each. keep_checkpoints: whether the trained models stay, in
    `checkpoints/`. say: takes a line about each run. Raises `StudyError` where processes were killed and left runs
    undone; `OSError` where the disk is full. What is done by then stays done.
    """
    for run in runs:
        if study.has_failed(run):
            _clear_failure(study, run)
    if all(map(study.is_over, runs)):
        return []
    register_auto_classes()
    encode_conversations(study.dataset, load_processor(study.base), study.folder)
    if workers == 1:
        work(study, runs, say, keep_checkpoints)
    else:
        _start_workers(study, runs, say, keep_checkpoints, workers)
    if undone := [run.name for run in runs if not study.is_over(run)]:
        raise StudyError(
            f"{len(undone)} runs are not done, because their processes ended ({undone[0]}, ...): start again"
        )
    return list(filter(study.has_failed, runs))


def _clear_failure(study: Study, run: Run) -> None:
    """Makes a run that failed one that is not over; what its weights were asked before stays."""
    path, record = study.record_of(run), study.read_record(run) or {}
    if record.get("evaluations"):
        write_json(path, {name: value for name, value in record.items() if name not in ("failed", "traceback")})
    else:
        path.unlink(missing_ok=True)


def _start_workers(study: Study, runs: Sequence[Run], say: Say, keep_checkpoints: bool, workers: int) -> None:
    threads = max(1, (os.cpu_count() or 1) // workers)
    context = multiprocessing.get_context("spawn")
    arguments = (study, runs, say, keep_checkpoints, threads)
    processes = [context.Process(target=_be_worker, args=arguments, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.terminate()


def _be_worker(study: Study, runs: Sequence[Run], say: Say, keep_checkpoints: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    logging.disable_progress_bar()  # those of several processes would write over each other
    try:
        work(study, runs, say, keep_checkpoints)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not is_disk_full(error):
            raise
        say(f"a worker ends: {error}")
        sys.exit(1)


def work(study: Study, runs: Sequence[Run], say: Say, keep_checkpoints: bool) -> None:
    """Does runs that nobody else is at, until all are over."""
    desk = Desk(study)
    (study.folder / LOCKS).mkdir(exist_ok=True)
    while undone := [run for run in runs if not study.is_over(run)]:
        took = False
        for run in undone:
            parent = multiprocessing.parent_process()
            if parent is not None and not parent.is_alive():
                return
            try:
                with filelock.FileLock(study.folder / LOCKS / f"{run.name}.lock", timeout=0):
                    if not study.is_over(run):
                        took = True
                        say(carry_out(run, desk, keep_checkpoints))
            except filelock.Timeout:
                continue
        if not took:
            time.sleep(_SECONDS_BETWEEN_LOOKS)


class Desk:
    """What all runs of a process share: the study, its rows, its questions and its processor."""

    def __init__(self, study: Study) -> None:
        register_auto_classes()  # a process of its own begins without
        self.study = study
        self.rows = EncodedRows(study.folder)
        questions = read_questions(study.dataset, study.settings.without_options)
        self.questions = [{**row, "media_root": str(study.dataset)} for row in questions]
        self.motion = load_motion(study.dataset)
        self.processor = load_processor(study.base)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def carry_out(run: Run, desk: Desk, keep_checkpoints: bool = False) -> str:
    """Trains and asks, and writes the run's record, also where it fails; returns a line about it. `OSError` where the
    disk is full: then nothing is recorded. What the same weights were asked before, with fewer ratios, stays, also
    where it fails."""
    study, started = desk.study, time.perf_counter()
    record: dict[str, Any] = {"format": FORMAT, "study": study.settings.fingerprint, "run": dataclasses.asdict(run)}
    record |= {"started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}"}
    record |= {"machine": describe_machine(desk.device), "versions": describe_versions()}
    checkpoint = study.folder / CHECKPOINTS / run.name
    before = (study.read_record(run) if checkpoint.exists() else None) or {"evaluations": {}, "seconds": 0}
    record |= {name: before[name] for name in ("training", "evaluations", "motion") if name in before}
    try:
        if not checkpoint.exists():
            train(run, desk, checkpoint)
        record["training"] = read_object(checkpoint / TRAINING)
        for asked in evaluations(run, study.settings):
            if asked.name not in record["evaluations"]:
                record["evaluations"][asked.name] = ask(run, asked, desk, checkpoint)
        if is_scored(run, study.settings) and "motion" not in record:
            record["motion"] = correlate_with_motion(run, desk, checkpoint)
    except Exception as error:
        if is_disk_full(error):
            raise
        path = study.folder / FAILURES / f"{run.name}.txt"
        with atomic_file(path) as new:
            new.write_text(traceback.format_exc(), encoding="utf-8")
        record["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        record["traceback"] = str(path.relative_to(study.folder))
    record["seconds"] = round(before["seconds"] + time.perf_counter() - started, 1)
    write_json(study.record_of(run), record)
    if "failed" in record:
        return f"{run.name}: failed, {record['failed']} (traceback in {study.folder / record['traceback']})"
    if not keep_checkpoints and run.method != UNPRUNED:  # which more ratios would ask more
        shutil.rmtree(checkpoint)
    marks = next(iter(record["evaluations"].values()))["marks"]
    return f"{run.name}: {marks.count(RIGHT) / len(marks):.1%} right, {record['seconds']:.0f} s"


class _StepClock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def median(self) -> float | None:
        """Seconds from the end of a step to the end of the next; None for a run of one step."""
        return statistics.median(np.diff(self.ends).tolist()) if len(self.ends) > 1 else None


def train(run: Run, desk: Desk, checkpoint: Path) -> None:
    """
    Trains the run's model into the folder `checkpoint`, with `training.json` beside it. Its seed decides over the order
    of the rows, a new scorer, and blocks that are drawn.
    """
    settings = desk.study.settings
    options = {k: v for k, v in settings.model_settings.items() if k not in METHODS[run.method].settings}
    model: Any = load_method(
        run.method, desk.study.base, run.pruning_ratio, run.pruning_layer, seed=run.seed, **options
    )
    collator = STTSDataCollator(desk.processor, model_config=model.config, return_ids=True)
    if model.config.vision_config.selector == "scorer":
        renew_scorer(model, run.seed)
        if settings.scorer_steps and model.config.temporal_loss_weight:
            load_started_scorer(model.to(desk.device), run, desk, collator)
    clock = _StepClock()
    with tempfile.TemporaryDirectory() as output:
        arguments = STTSTrainingArguments(
            output_dir=output,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rates=dict(settings.learning_rates),
            lr_scheduler_type="cosine",
            warmup_steps=settings.warmup_steps,
            seed=run.seed,
            logging_steps=max(1, settings.steps // 10),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = STTSTrainer(model, arguments, train_dataset=desk.rows, data_collator=collator, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "task_loss" in entry]
    training = {
        "seconds_per_step": clock.median(),
        "losses": [[entry["step"], round(entry["task_loss"], 4), round(entry["temporal_loss"], 5)] for entry in logs],
    }
    with atomic_folder(checkpoint) as new:
        model.save_pretrained(new)
        desk.processor.save_pretrained(new)
        write_json(new / TRAINING, training)


def load_started_scorer(model: Any, run: Run, desk: Desk, collator: STTSDataCollator) -> None:
    """Gives the model the scorer that runs of this layer and seed begin with, at whatever ratio; made where need be."""
    path = desk.study.folder / SCORERS / f"layer{run.pruning_layer}-seed{run.seed}.pt"
    settings, scorer = desk.study.settings, module_of(model, SCORER)
    if not path.exists():
        start_scorer(model, desk.rows, collator, settings.scorer_steps, settings.batch_size, run.seed)
        with atomic_file(path) as new:
            torch.save(scorer.state_dict(), new)
    scorer.load_state_dict(torch.load(path, weights_only=True, map_location=desk.device))


def load(run: Run, asked: Evaluation, desk: Desk, checkpoint: Path) -> Any:
    """
    The trained model as the method that is asked. One that draws its blocks draws others for every batch, the same
    every time: with one seed for all, it would be one draw that all clips share.
    """
    model: Any = load_method(asked.method, checkpoint, asked.pruning_ratio, run.pruning_layer, seed=run.seed)
    tower = module_of(model, VISION_TOWER)
    if tower.config.selector == "random":
        seeds = itertools.count(run.seed << 32)
        tower.register_forward_pre_hook(lambda *_: setattr(tower.config, "selector_seed", next(seeds)))
    return model.to(desk.device).eval()


def ask(run: Run, asked: Evaluation, desk: Desk, checkpoint: Path) -> dict[str, Any]:
    """
    The run's weights asked all questions, with more frames those about long clips: `marks`, a character for each
    question in their order, seconds, and of each group the mean tokens and video tokens that the language model gets.
    Raises `StudyError` where a question could not be asked, as of a clip that cannot be read.
    """
    model = load(run, asked, desk, checkpoint)
    questions, processing = desk.questions, None
    if asked.scaling:
        questions = [row for row in questions if row["group"] == "long"]
        processing = {"test_time_scaling": True, "pruning_ratio": asked.scaling}
    started = time.perf_counter()
    answers = evaluate(model, desk.processor, questions, batch_size=QUESTIONS_AT_ONCE, processing=processing)
    found = {answer["id"]: answer for answer in answers}
    if errors := [answer["error"] for answer in found.values() if answer["error"]]:
        raise StudyError(f"{len(errors)} questions could not be asked: {errors[0]}")
    result = dataclasses.asdict(asked) | {
        "marks": "".join(_mark(found.get(row["id"])) for row in desk.questions),
        "seconds": round(time.perf_counter() - started, 2),
        "llm_tokens": {},
        "video_tokens": {},
    }
    for group in dict.fromkeys(row["group"] for row in questions):
        of_group = [one for one in found.values() if one["group"] == group]
        kept = statistics.mean(one["video_tokens_kept"] for one in of_group)
        left_out = statistics.mean(one["video_tokens"] for one in of_group) - kept
        result["llm_tokens"][group] = round(statistics.mean(one["prompt_tokens"] for one in of_group) - left_out, 2)
        result["video_tokens"][group] = round(kept, 2)
    return result


def _mark(answer: Mapping[str, Any] | None) -> str:
    if answer is None:
        return NOT_ASKED
    return RIGHT if answer["right"] else WRONG


@torch.no_grad()
def correlate_with_motion(run: Run, desk: Desk, checkpoint: Path) -> dict[str, float]:
    """
    Of each clip whose motion is known, Spearman's correlation of its blocks' scores with how many of their patches
    move, over the frames `t >= 1`; 0 where all scores are the same. Left out are clips in which all blocks move alike,
    and those whose motion is of other frames than the model sees: the same clips for every method.
    """
    model = load(run, Evaluation(run.method, run.pruning_ratio), desk, checkpoint)
    videos = {row["clip"]: row["videos"][0] for row in desk.questions if row.get("videos")}
    correlations = {}
    for clip in sorted(videos.keys() & desk.motion.keys()):
        inputs = desk.processor.video_processor([str(desk.study.dataset / videos[clip])], return_tensors="pt")
        scores = model.model.get_video_features(**inputs.to(desk.device)).token_scores[0].cpu()  # (T, n)
        moving = share_of_blocks(desk.motion[clip], tuple(inputs["video_grids"][0].tolist()))
        if moving is not None and np.ptp(moving[1:]):
            correlations[clip] = round(np.nan_to_num(correlate(scores, moving)), 3)
    return correlations
