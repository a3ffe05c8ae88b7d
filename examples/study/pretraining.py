"""
Makes the study's base checkpoint from nothing, a small Molmo2 that sees every block and knows what may be asked, and of
it `hub_configs/stts-tiny`, which prunes.

    python -m examples.study.pretraining outputs/base --tiny hub_configs/stts-tiny

The language model learns from frames it is told: the features of each block are the words for what is in it. So it
learns in minutes to tie colours to places and places to times, which it did not in an hour from pixels. The tower
learns to say those words of each block of a frame, and last both learn together from pixels. No scene is seen twice,
nothing is pruned, and the scorer stays as it is made. The tiny checkpoint then learns to do with fewer blocks.
"""

import argparse
import functools
import itertools
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from stts_hf import STTSConfig, STTSForConditionalGeneration
from stts_hf.checkpoints.atomic_folder import atomic_file, atomic_folder
from stts_hf.model_parts import CONNECTOR, LANGUAGE_MODEL, SCORER, VISION_TOWER, parts_of
from stts_hf.modeling.plan_stts import PruningPlan, VideoFeatures
from stts_hf.training.build import renew_scorer

from .data import load_processor
from .fitting import fit, start_scorer
from .make_dataset import FULL
from .pretraining_data import FIRST_SEED, KINDS, LEVELS, SceneConversations, SceneFrames
from .scenes import COLOURS
from .tiny_model import build_model, build_processor, save_into

TEXT_RATE, TOWER_RATE, BOTH_RATE = 1e-3, 2e-3, 5e-4
NOISE = 0.05  # of the features that the language model is told, beside embeddings of 0.5
PRUNED_RATE, SCORER_RATE = 3e-4, 1e-3
RATIOS = (0.5, 0.7, 0.5, 0.9)  # of the tiny checkpoint's steps, in turn
CALLED = {"diamond": "mark", "bar": "light"}  # what questions call them
HALVES = {"text": ("text_0", "text_2", "text_3"), "tower": ("tower",)}  # what each learns, in order
PARTS_OF = {"text": (LANGUAGE_MODEL,), "tower": (VISION_TOWER, CONNECTOR)}
EDGES = ("top", None, None, "bottom"), ("left", None, None, "right")


class BlockCodes:
    """
    The features (text hidden size) that say what is in a block: the sum of the embeddings of the words for its things,
    their colours and its place in the frame. `words` (kinds + colours, ...), `places` (n, ...).
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        embeddings = model.get_input_embeddings().weight.detach().clone()
        letters = [kind for kind in KINDS if len(kind) == 1]
        names = [CALLED.get(kind, kind) for kind in KINDS] + list(COLOURS)
        ids = [tokenizer(name if name in letters else f" {name}")["input_ids"] for name in names]
        self.words = torch.stack([embeddings[one].mean(0) for one in ids])
        generator = torch.Generator().manual_seed(0)
        rows, cols = (
            [
                embeddings[tokenizer(f" {word}")["input_ids"]].mean(0)
                if word
                else torch.randn(embeddings.shape[1], generator=generator) * embeddings.std()
                for word in words
            ]
            for words in EDGES
        )
        self.places = torch.stack([row + col for row in rows for col in cols])
        self.power = self.words.square().sum(-1).mean()
        self.scale = torch.nn.Parameter(torch.tensor(5.0))
        self.bias = torch.nn.Parameter(torch.full((len(names),), -2.0))

    def of(self, inside: torch.Tensor) -> torch.Tensor:
        """The features (F * n, ...) of frames with these `block_targets` (F, n, ...)."""
        return (inside @ self.words + self.places).flatten(0, 1)

    def loss(self, features: torch.Tensor, inside: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """How far features (F * n, ...) are from saying this, as squares and as words that one would read from them."""
        features, known = features.unflatten(0, known.shape), known.float()
        squares = (features.flatten(0, 1) - self.of(inside)).square().sum(-1).view_as(known) / self.power
        weights = known * (1 + 4 * inside.sum(-1))  # most blocks are empty
        read = (features - self.places) @ self.words.T / self.power * self.scale + self.bias
        errors = F.binary_cross_entropy_with_logits(read, inside, reduction="none").sum(-1)
        return (squares * weights).sum() / weights.sum() + (errors * known).sum() / known.sum()


def _load(dataset: Dataset) -> DataLoader:
    return DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=4)


def _parameters(model: Any, *parts: str) -> list[torch.nn.Parameter]:
    """The parameters of these parts."""
    of = parts_of(model)
    return [parameter for name, parameter in model.named_parameters() if of[name] in parts]


def teach_text(model: Any, codes: BlockCodes, processor: Any, batch_size: int, level: int, steps: int) -> list[float]:
    """Trains the language model on conversations about frames that it is told, not shown."""
    told: list[torch.Tensor] = []

    def tell(pixel_values: torch.Tensor, plan: PruningPlan, **kwargs: Any) -> VideoFeatures:
        whole = [torch.ones(frames, rows * cols) for frames, rows, cols in plan.grids]
        return VideoFeatures(
            pooler_output=told[0].split(plan.num_kept),
            token_scores=tuple(whole),
            keep_mask=tuple(one.bool() for one in whole),
        )

    def loss_of(batch: tuple[dict[str, Any], torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, inside, _ = batch
        features = codes.of(inside)
        told[:] = [features + NOISE * torch.randn_like(features)]
        return model(**inputs, pruning_ratio=0.0).task_loss

    rows, _ = model.config.vision_config.block_grid
    batches = _load(SceneConversations(processor, steps, batch_size, level, rows, False, (4 + level) * FIRST_SEED))
    groups = [{"params": _parameters(model, *PARTS_OF["text"]), "lr": TEXT_RATE}]
    model.model.encode_videos = tell
    try:
        return fit(groups, batches, steps, loss_of, f"Language model, {LEVELS[level]}")
    finally:
        del model.model.encode_videos


def teach_tower(model: Any, codes: BlockCodes, video_processor: Any, steps: int) -> list[float]:
    """Trains tower and connector to say what is in each block of a frame."""
    rows, _ = model.config.vision_config.block_grid

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        frames, inside, known = batch
        inputs = video_processor([frames], do_sample_frames=False, return_tensors="pt")
        features = model.model.get_video_features(**inputs, pruning_ratio=0.0).pooler_output
        return codes.loss(torch.cat(features), inside, known)

    groups = [
        {"params": _parameters(model, *PARTS_OF["tower"]), "lr": TOWER_RATE},
        {"params": [codes.scale, codes.bias], "lr": 5 * TOWER_RATE},
    ]
    return fit(groups, _load(SceneFrames(steps, rows)), steps, loss_of, "Vision tower")


def teach_both(model: Any, processor: Any, steps: int, batch_size: int) -> list[float]:
    """Trains the whole model but the scorer on conversations about what it sees, without pruning."""
    rows, _ = model.config.vision_config.block_grid
    batches = _load(SceneConversations(processor, steps, batch_size, 3, rows, True, 8 * FIRST_SEED))
    groups = [{"params": _parameters(model, *PARTS_OF["tower"], *PARTS_OF["text"]), "lr": BOTH_RATE}]
    return fit(groups, batches, steps, lambda batch: model(**batch[0], pruning_ratio=0.0).task_loss, "Both")


def teach_pruned(model: Any, processor: Any, steps: int, batch_size: int) -> list[float]:
    """Trains the whole model, scorer and all, with the loss of the paper, at each of `RATIOS` in turn."""
    rows, _ = model.config.vision_config.block_grid
    ratios = itertools.cycle(RATIOS)
    batches = _load(SceneConversations(processor, steps, batch_size, 3, rows, True, 9 * FIRST_SEED, look=FULL))
    groups = [
        {"params": _parameters(model, SCORER), "lr": SCORER_RATE},
        {"params": _parameters(model, *PARTS_OF["tower"], *PARTS_OF["text"]), "lr": PRUNED_RATE},
    ]
    return fit(groups, batches, steps, lambda batch: model(**batch[0], pruning_ratio=next(ratios)).loss, "With pruning")


def _begin(tiny: Path, seed: int) -> tuple[Any, Any, BlockCodes]:
    """The processor, the model before its first step, and the codes that both of its halves are to speak."""
    processor = build_processor((tiny / TEMPLATE).read_text(encoding="utf-8"))
    model = build_model(STTSConfig.from_pretrained(tiny), processor.tokenizer, seed).train()
    return processor, model, BlockCodes(model, processor.tokenizer)


def _teach_half(half: str, tiny: Path, done: Path, steps: Mapping[str, int], batch_size: int, seed: int) -> Path:
    """
    Trains one of `HALVES`, by itself, and returns where its weights are. Stages that were done before are not done
    again.
    """
    processor, model, codes = _begin(tiny, seed)
    stages: dict[str, Callable[[int], list[float]]] = {
        f"text_{level}": functools.partial(teach_text, model, codes, processor, batch_size, level) for level in LEVELS
    }
    stages["tower"] = functools.partial(teach_tower, model, codes, processor.video_processor)
    name = f"seed{seed}-batch{batch_size}"
    for stage in HALVES[half]:
        name += f"-{stage}{steps[stage]}"
        if (done / name).exists():
            model.load_state_dict(torch.load(done / name, weights_only=True), strict=False)
            continue
        torch.manual_seed(seed)
        stages[stage](steps[stage])
        parts = parts_of(model)
        weights = {name: tensor.data for name, tensor in model.named_parameters() if parts[name] in PARTS_OF[half]}
        with atomic_file(done / name) as new:
            torch.save(weights, new)
    return done / name


def make_base(folder: Path, tiny: Path, steps: Mapping[str, int], *, batch_size: int = 4, seed: int = 0) -> None:
    """
    Makes the base checkpoint and saves it, whole or not at all. tiny: folder with its configuration and chat template.
    steps: of the stages, as in `STEPS`. Language model and tower learn side by side, in two processes. A stage whose
    weights wait in `folder.stages`, of the same steps and seed, is not done again.
    """
    done = folder.with_name(f"{folder.name}.stages")
    done.mkdir(parents=True, exist_ok=True)
    threads = max(1, torch.get_num_threads() // len(HALVES))
    with ProcessPoolExecutor(len(HALVES), get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        halves = [pool.submit(_teach_half, half, tiny, done, steps, batch_size, seed) for half in HALVES]
        weights = [torch.load(half.result(), weights_only=True) for half in halves]
    processor, model, _ = _begin(tiny, seed)
    for half in weights:
        model.load_state_dict(half, strict=False)
    torch.manual_seed(seed)
    teach_both(model, processor, steps["both"], batch_size)
    with atomic_folder(folder) as new:
        model.eval().save_pretrained(new)
        processor.save_pretrained(new)
    shutil.rmtree(done)


def make_tiny(base: Path, folder: Path, *, scorer_steps: int, steps: int, batch_size: int = 4) -> None:
    """
    Trains a scorer for the base checkpoint, then all of it on with pruning, and saves it into `folder`, whose card and
    code links stay.
    """
    processor, model = load_processor(base), STTSForConditionalGeneration.from_pretrained(base)
    rows, _ = model.config.vision_config.block_grid
    scenes = SceneConversations(processor, scorer_steps, batch_size, 3, rows, True, 10 * FIRST_SEED, look=FULL)
    renew_scorer(model, 0)
    model.config.scorer_target = "change"  # the study fits it to answers afterwards
    start_scorer(model, scenes, lambda batches: batches[0][0], scorer_steps, 1, 0, dataloader_num_workers=1)
    teach_pruned(model, processor, steps, batch_size)
    save_into(folder, model.eval(), processor)


TEMPLATE = "chat_template.jinja"
STEPS = {"text_0": 2000, "text_2": 500, "text_3": 4000, "tower": 9000, "both": 1500, "scorer": 2000, "pruned": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the study's base checkpoint, and hub_configs/stts-tiny of it.")
    parser.add_argument("base", type=Path, help="folder of the base checkpoint; made unless it is there")
    parser.add_argument("--tiny", type=Path, required=True, help="hub_configs/stts-tiny, whose configuration is used")
    parser.add_argument("--seed", type=int, default=0)
    for stage, usual in STEPS.items():
        parser.add_argument(f"--{stage.replace('_', '-')}-steps", type=int, default=usual, metavar="N")
    arguments = parser.parse_args()
    if not (arguments.tiny / TEMPLATE).is_file():
        parser.error(f"--tiny {arguments.tiny} has no {TEMPLATE}: name the folder hub_configs/stts-tiny")
    torch.manual_seed(arguments.seed)
    steps = {stage: getattr(arguments, f"{stage}_steps") for stage in STEPS}
    if not arguments.base.exists():
        make_base(arguments.base, arguments.tiny, steps, seed=arguments.seed)
    if steps["pruned"]:
        make_tiny(arguments.base, arguments.tiny, scorer_steps=steps["scorer"], steps=steps["pruned"])


if __name__ == "__main__":
    main()
