"""`results.png` of a training run: its losses, what they mean, and what the model keeps of two clips."""

import contextlib
import io
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image
from transformers.utils import logging

from stts_hf.checkpoints.atomic_folder import atomic_file
from stts_hf.checkpoints.card import RESULTS
from stts_hf.data.rows import read_row
from stts_hf.inference.clip import Clip
from stts_hf.inference.requests import Answer
from stts_hf.training.trainer import STTSTrainer

from .figures import comparison
from .frames import read_frames

logger = logging.get_logger(__name__)

SIDE, DPI = 320, 110
# Of logs and of evaluations.
PANELS = (("task_loss",), ("temporal_loss", "worth_loss"), ("kept_share", "mean_score"), ("rank_correlation",))
RANGES = {"kept_share": (0, 1), "rank_correlation": (-1, 1)}


@contextlib.contextmanager
def harmless(what: str) -> Iterator[None]:
    """Logs an error with its reason: a training is worth more than its picture."""
    try:
        yield
    except Exception as error:
        logger.warning(f"{what} not drawn: {type(error).__name__}: {' '.join(str(error).split())}")


class Results:
    """
    What a run changes. It is made before the first step, and looks at two clips of the evaluation rows, else of the
    training rows; `draw` comes after the last step. Both only log what fails.
    """

    def __init__(self, trainer: STTSTrainer) -> None:
        self.trainer, self.before = trainer, dict[str, Answer]()
        with harmless(f"{RESULTS}: clips before and after are"):
            if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
                raise ValueError("The model is sharded, and one process alone would look at them.")
            rows: Any = trainer.eval_dataset or trainer.train_dataset
            samples = map(read_row, itertools.islice(getattr(rows, "rows", rows), 64))
            videos = dict.fromkeys(video for sample in samples for video in sample.videos if isinstance(video, str))
            for video in [*filter(os.path.isfile, videos)][:2]:
                self.before[video] = self.look_at(video)

    def look_at(self, video: str) -> Answer:
        """What the model keeps of a video as it stands. Each training step puts it back into training mode."""
        model: Any = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return Clip(model.eval(), self.trainer.processing_class, video).seen  # type: ignore[arg-type]

    def draw(self, folder: Path) -> None:
        with harmless(f"{(path := folder / RESULTS)} is"):
            vocabulary = self.trainer.model.config.get_text_config().vocab_size
            figures = [curves(self.trainer.state.log_history, vocabulary)]
            with harmless(f"{path}: clips before and after are"):
                for video, before in self.before.items():
                    after = self.look_at(video)
                    masks: Any = {"before": before.keep_mask, "after": after.keep_mask}
                    where: Any = (after.grid, after.timestamps, after.tubelet)
                    figures.append(comparison(read_frames(video, after.timestamps, SIDE), masks, *where))
                    figures[-1].suptitle(f"{Path(video).name}, before and after training", fontsize=9)
            with atomic_file(path) as new:
                stack(figures).save(new, "png")


def stack(figures: Sequence[Figure]) -> Image.Image:
    """One below the other."""
    pictures = []
    for figure in figures:
        figure.savefig(file := io.BytesIO(), dpi=DPI, format="png")
        pictures.append(Image.open(file))
    widths, heights = zip(*(picture.size for picture in pictures), strict=True)
    whole = Image.new("RGB", (max(widths), sum(heights)), "white")
    for place, picture in enumerate(pictures):
        whole.paste(picture, (0, sum(heights[:place])))
    return whole


def curves(history: Sequence[Mapping[str, Any]], vocabulary: int) -> Figure:
    """Logged values by step, a panel for each kind that was logged, and what they mean. history: of `TrainerState`."""
    logged = {name for log in history for name in log}
    panels = [[kind + name for name in panel for kind in ("", "eval_") if kind + name in logged] for panel in PANELS]
    panels = [panel for panel in panels if panel] or [[]]
    figure, values = Figure(figsize=(12, 3.4), layout="constrained"), dict[str, Sequence[float]]()
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name in panel:
            steps, values[name] = zip(*((log["step"], log[name]) for log in history if name in log), strict=True)
            axes.plot(steps, values[name], marker=".", label=name.replace("_", " "))
        if "task_loss" in panel:
            axes.axhline(math.log(vocabulary), color="#999999", linestyle=":", label="uniform guess")
        axes.set(xlabel="step", ylim=next((RANGES[name] for name in panel if name in RANGES), None))
        axes.legend(fontsize=8)
    figure.supxlabel("\n".join(meanings(values, vocabulary)), fontsize=8, x=0.01, ha="left")
    return figure


def meanings(values: Mapping[str, Sequence[float]], vocabulary: int) -> list[str]:
    """What a run's losses say, in sentences. values: by name of the log, in the order of steps."""
    told, guess = [], f"a uniform guess has ln {vocabulary:,} = {math.log(vocabulary):.1f}"
    if task := values.get("task_loss"):
        meaning = f"a label token has a probability of {math.exp(-task[-1]):.2g} (geometric mean); {guess}."
        if task[-1] > math.log(vocabulary):
            meaning = f"worse than chance; {guess}. The model is sure of other tokens: check chat template and labels."
        told.append(f"Task loss {task[0]:.3g} to {task[-1]:.3g} nats per token: {meaning}")
    if temporal := values.get("temporal_loss"):
        miss = f"scores miss 1 - similarity by {math.sqrt(temporal[-1]):.2g} (root mean square)."
        told.append(f"Temporal loss {temporal[0]:.3g} to {temporal[-1]:.3g}: {miss}")
    if ranked := values.get("rank_correlation"):
        meaning = "of scores with 1 - cosine similarity to the previous frame (Spearman, mean over videos)."
        told.append(f"Rank correlation {ranked[0]:.2f} to {ranked[-1]:.2f} {meaning}")
        if "worth_loss" in values:
            told[-1] += " A scorer that learns from answers is not meant to follow this heuristic."
    return told
