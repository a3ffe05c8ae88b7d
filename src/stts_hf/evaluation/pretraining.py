"""
Makes the study's base checkpoint from nothing, a small Molmo2 that sees every block and knows what may be asked, and of
it `hub_configs/stts-tiny`, which prunes.

    python -m stts_hf.evaluation.pretraining outputs/base --tiny hub_configs/stts-tiny

Binding words to what is seen is hard to learn from answers alone, so there are three stages, on scenes of which none is
seen twice: the vision tower learns to say what is in each block of single frames, as a VLM starts from a vision tower
that can see; then the whole model talks about clips in which little happens, and last about those of the data set,
while the tower goes on saying what is in each block. Nothing is pruned, and the scorer stays as it is made. The tiny
checkpoint then learns to do with fewer blocks, at several pruning ratios in turn.
"""

import argparse
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from stts_hf.checkpoints.atomic_folder import atomic_folder
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.processing_stts import STTSProcessor

from .pretraining_data import KINDS, SceneConversations, SceneFrames
from .scenes import COLOURS
from .tiny_model import build_config, build_model, build_processor

TOWER_RATE, RATE, TOWER_SHARE = 3e-3, 2e-3, 0.3
BLOCK_WEIGHT = 0.5  # of what is in each block, beside the task's loss
PRUNED_RATE, SCORER_RATE = 5e-4, 2e-3
RATIOS = (0.5, 0.7, 0.5, 0.9)  # of the tiny checkpoint's steps, in turn


def fit(
    groups: list[dict[str, Any]], batches: Iterable[Any], steps: int, loss_of: Callable[[Any], torch.Tensor], name: str
) -> Iterator[float]:
    """Takes a step of AdamW on the loss of each batch, at rates that rise and fall; yields the losses."""
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))
    rates = [group["lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, pct_start=0.1)
    parameters = [parameter for group in groups for parameter in group["params"]]
    for batch in tqdm(batches, desc=name, total=steps, unit="step", disable=None):
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


def _load(dataset: Dataset) -> DataLoader:
    return DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=4)


class BlockReader(torch.nn.Linear):
    """Says of a block's features (..., text hidden size) what is in it, and which of the frame's `n` blocks it is."""

    def __init__(self, hidden_size: int, blocks_per_frame: int) -> None:
        super().__init__(hidden_size, len(KINDS) + len(COLOURS) + blocks_per_frame)

    def loss(self, features: torch.Tensor, inside: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """features: (F * n, text hidden size) of frames with these `block_targets`."""
        said, place = self(features).unflatten(0, known.shape).tensor_split([inside.shape[-1]], dim=-1)
        errors = F.binary_cross_entropy_with_logits(said, inside, reduction="none").sum(-1)
        places = torch.arange(known.shape[1]).expand_as(known)
        return errors[known].mean() + 0.3 * F.cross_entropy(place.flatten(0, 1), places.flatten())


def pretrain_tower(model: Any, reader: BlockReader, video_processor: Any, steps: int) -> list[float]:
    """Trains tower and connector to say what is in each block of a frame, and which block it is."""
    rows, _ = model.config.vision_config.block_grid

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        frames, inside, known = batch
        inputs = video_processor([frames], do_sample_frames=False, return_tensors="pt")
        features = model.model.get_video_features(**inputs, pruning_ratio=0.0).pooler_output
        return reader.loss(torch.cat(features), inside, known)

    parts = (model.model.vision_tower, model.model.multi_modal_projector, reader)
    group = {"params": [p for part in parts for p in part.parameters()], "lr": TOWER_RATE}
    return list(fit([group], _load(SceneFrames(steps, rows)), steps, loss_of, "Vision tower"))


def pretrain_conversations(
    model: Any, reader: BlockReader, processor: Any, steps: int, batch_size: int, level: int
) -> list[float]:
    """Trains the whole model but the scorer on conversations, without pruning."""
    rows, _ = model.config.vision_config.block_grid
    connected: list[torch.Tensor] = []
    hook = model.model.multi_modal_projector.register_forward_hook(
        lambda module, inputs, output: connected.append(output.last_hidden_state)
    )

    def loss_of(batch: tuple[dict[str, Any], torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, inside, known = batch
        connected.clear()
        task = model(**inputs, pruning_ratio=0.0).task_loss
        [features] = [output for output in connected if len(output) == known.numel()]  # the others are images'
        return task + BLOCK_WEIGHT * reader.loss(features, inside, known)

    tower = [p for name, p in model.model.vision_tower.named_parameters() if not name.startswith("scorer")]
    others = [p for name, p in model.named_parameters() if ".vision_tower." not in name]
    groups = [
        {"params": tower, "lr": TOWER_SHARE * RATE},
        {"params": [*others, *reader.parameters()], "lr": RATE},
    ]
    batches = _load(SceneConversations(processor, steps, batch_size, level, rows))
    losses = list(fit(groups, batches, steps, loss_of, f"Conversations, level {level}"))
    hook.remove()
    return losses


def train_pruned(model: Any, processor: Any, steps: int, batch_size: int) -> list[float]:
    """Trains the whole model, scorer and all, with the loss of the paper, at each of `RATIOS` in turn."""
    rows, _ = model.config.vision_config.block_grid
    ratios = itertools.cycle(RATIOS)

    def loss_of(batch: tuple[dict[str, Any], torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return model(**batch[0], pruning_ratio=next(ratios)).loss

    scorer = list(model.model.vision_tower.scorer.parameters())
    ids = {id(parameter) for parameter in scorer}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    groups = [{"params": scorer, "lr": SCORER_RATE}, {"params": others, "lr": PRUNED_RATE}]
    batches = _load(SceneConversations(processor, steps, batch_size, 3, rows))
    return list(fit(groups, batches, steps, loss_of, "With pruning"))


def make_base(
    folder: Path, template: str, *, tower_steps: int, level_steps: tuple[int, int], batch_size: int = 16, seed: int = 0
) -> None:
    """
    Makes the base checkpoint and saves it, whole or not at all. template: the chat template. level_steps: of clips in
    which little happens, and of those as in the data set. Raises `FileExistsError` where the folder is there.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists: name another folder, or delete that one.")
    processor = build_processor(template)
    model = build_model(build_config(processor.tokenizer), processor.tokenizer, seed).train()
    rows, cols = model.config.vision_config.block_grid
    reader = BlockReader(model.config.text_config.hidden_size, rows * cols)
    pretrain_tower(model, reader, processor.video_processor, tower_steps)
    for level, steps in zip((1, 3), level_steps, strict=True):
        pretrain_conversations(model, reader, processor, steps, batch_size, level)
    with atomic_folder(folder) as new:
        model.eval().save_pretrained(new)
        processor.save_pretrained(new)


def make_tiny(base: Path, folder: Path, *, steps: int, batch_size: int = 16) -> None:
    """Trains the base checkpoint on with pruning, and saves it into `folder`, whose card and code links stay."""
    processor, model = STTSProcessor.from_pretrained(base), STTSForConditionalGeneration.from_pretrained(base)
    train_pruned(model.train(), processor, steps, batch_size)
    with tempfile.TemporaryDirectory() as temporary:
        model.eval().save_pretrained(temporary)
        processor.save_pretrained(temporary)
        for file in Path(temporary).iterdir():
            target = folder / file.name
            if not target.is_symlink() and not (file.name == "README.md" and target.is_file()):
                shutil.copyfile(file, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the study's base checkpoint, and hub_configs/stts-tiny of it.")
    parser.add_argument("base", type=Path, help="folder of the base checkpoint; made unless it is there")
    parser.add_argument("--tiny", type=Path, required=True, help="hub_configs/stts-tiny, whose chat template is used")
    parser.add_argument("--tower-steps", type=int, default=2500)
    parser.add_argument("--level-steps", type=int, nargs=2, default=(500, 1000), metavar=("LITTLE", "MUCH"))
    parser.add_argument("--pruned-steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    if not arguments.base.exists():
        make_base(
            arguments.base,
            (arguments.tiny / "chat_template.jinja").read_text(encoding="utf-8"),
            tower_steps=arguments.tower_steps,
            level_steps=tuple(arguments.level_steps),
            seed=arguments.seed,
        )
    if arguments.pruned_steps:
        make_tiny(arguments.base, arguments.tiny, steps=arguments.pruned_steps)


if __name__ == "__main__":
    main()
