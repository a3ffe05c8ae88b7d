"""
What the study's base learns from: scenes drawn as they are needed, frame by frame or as clips one talks about, and what
is in each block of every frame.
"""

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from stts_hf.data.collator import STTSDataCollator
from stts_hf.data.encoding import Encoded, encode
from stts_hf.data.prompts import choice_messages
from stts_hf.data.rows import Sample

from .distraction import Look
from .make_dataset import SIZE
from .questions import LONG_FPS, LONG_SECONDS, Question, compose_image, compose_long, compose_short, with_options
from .scenes import COLOURS, LETTERS, SHAPES, Scene
from .tiny_model import MAX_FPS, NUM_FRAMES

FIRST_SEED = 1 << 40  # scenes of data sets made with the usual seeds have lower ones
LOOK = Look(0.35, ("pan", "flicker"))  # of what the base learns from
KINDS = (*SHAPES, "diamond", "bar", *LETTERS)
FRAMES_AT_ONCE, FRAMES_PER_SCENE = 24, 4
QUESTIONS_AT_ONCE = 12
# Of the questions at the last level. In the first stage, which is to tie things to places, options keep that from being
# learned: its loss came to 0.65 with them, and to 0.19 without, in 2,000 steps.
WITH_OPTIONS = 0.35
LONG_FRAMES = (16, 24, 32)  # more than the processor's, so that test-time scaling shows nothing new
LEVELS = {0: "pictures", 2: "clips in which little happens", 3: "all kinds of clips"}


def block_targets(scene: Scene, time: float, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """
    What is in each of `blocks x blocks` blocks of the frame at `time`: (n, kinds + colours) of 0 and 1 for the block
    that a thing's centre lies in, and (n,) bool, False for blocks that only its border touches: they may say either.
    """
    targets = np.zeros((blocks, blocks, len(KINDS) + len(COLOURS)), np.float32)
    known = np.ones((blocks, blocks), bool)
    centres = np.stack(np.meshgrid(np.arange(blocks), np.arange(blocks)), axis=-1) / blocks + 0.5 / blocks
    shown = [thing for thing in scene.things if thing.is_shown(time)]
    places = [thing.place_at(time) - scene.camera(time) for thing in shown]
    for thing, place in zip(shown, places, strict=True):
        known &= (np.abs(centres - place) >= 0.5 / blocks + thing.radius).any(-1)
    for thing, place in zip(shown, places, strict=True):
        col, row = (place * blocks).astype(int).clip(0, blocks - 1)
        known[row, col] = True
        targets[row, col, KINDS.index(thing.shape)] = 1
        targets[row, col, len(KINDS) + list(COLOURS).index(thing.colour_at(time))] = 1
    return targets.reshape(blocks**2, -1), known.reshape(-1)


@dataclass
class SceneFrames(Dataset):
    """Batches of single frames, uint8 (F, 3, height, width), with `block_targets` of each."""

    batches: int
    blocks: int

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        random = np.random.default_rng((FIRST_SEED, batch))
        frames, targets = [], []
        for _ in range(FRAMES_AT_ONCE // FRAMES_PER_SCENE):
            compose = (compose_short, compose_short, compose_long, compose_image)[random.integers(4)]
            scene, _ = compose(FIRST_SEED + int(random.integers(FIRST_SEED)), look=LOOK)
            # Mostly while something is seen that is not always there.
            shown = [interval for thing in scene.things for interval in thing.shown]
            times = [
                float(
                    random.uniform(*shown[random.integers(len(shown))] if shown and random.random() < 0.8 else bounds)
                )
                for bounds in [(0, scene.duration)] * FRAMES_PER_SCENE
            ]
            frames.append(scene.draw(times, SIZE))
            targets += [block_targets(scene, time, self.blocks) for time in times]
        pixels = torch.from_numpy(np.concatenate(frames)).permute(0, 3, 1, 2)
        inside, known = (torch.from_numpy(np.stack(part)) for part in zip(*targets, strict=True))
        return pixels, inside, known


@dataclass
class SceneConversations(Dataset):
    """
    Batches of conversations about scenes of one length, as `STTSDataCollator` makes them, with `block_targets` of all
    frames of their videos. level: one of `LEVELS`. drawn: whether the frames are, or stay black. first_seed: of the
    scenes. look: of the scenes.
    """

    processor: Any
    batches: int
    batch_size: int
    level: int
    blocks: int
    drawn: bool
    first_seed: int
    look: Look = LOOK

    def __post_init__(self) -> None:
        self.processor = copy.deepcopy(self.processor)  # its frames change from sample to sample
        self.collator = STTSDataCollator(self.processor)

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, batch: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        first = self.first_seed + batch * self.batch_size
        random = np.random.default_rng((first, 6))
        kind, frames_of_long = random.random(), int(random.choice(LONG_FRAMES))
        samples, targets = zip(
            *(self.sample(first + number, kind, frames_of_long) for number in range(self.batch_size)), strict=True
        )
        frames = list(itertools.chain.from_iterable(targets))
        if not frames:  # pictures alone
            return self.collator(samples), torch.empty(0), torch.empty(0)
        inside, known = (torch.from_numpy(np.stack(part)) for part in zip(*frames, strict=True))
        return self.collator(samples), inside, known

    def sample(
        self, seed: int, kind: float, frames_of_long: int
    ) -> tuple[Encoded, list[tuple[np.ndarray, np.ndarray]]]:
        """
        A conversation about the scene of a seed, and `block_targets` of its video's frames. kind: below 1, which of the
        last level's kinds of scenes it is.
        """
        random = np.random.default_rng((seed, 5))
        if self.level == 0:
            scene, questions = compose_image(seed, look=self.look)
            times = np.arange(2) / MAX_FPS
        elif self.level == 2:
            scene, questions = compose_short(seed, level=2, shown_for=0.6, look=self.look)
            questions = [question for question in questions if question.kind != "count"]  # not every blink is seen
            times = np.arange(8) * 2 / MAX_FPS
        elif kind < 0.7:
            scene, questions = compose_short(seed, look=self.look)
            times = np.arange(NUM_FRAMES) / MAX_FPS
        elif kind < 0.85 or not self.drawn:
            scene, questions = compose_long(seed, look=self.look)
            times = np.linspace(0, LONG_SECONDS - 1 / LONG_FPS, frames_of_long)
        else:
            scene, questions = compose_image(seed, look=self.look)
            times = np.zeros(1)
        messages = self._conversation(questions, seed, random)
        frames = np.zeros((len(times), SIZE, SIZE, 3), np.uint8)
        if self.drawn:
            frames = scene.draw(times.tolist(), SIZE)
        if len(times) == 1:
            messages[0]["content"].insert(0, {"type": "image"})
            return encode(self.processor, Sample(str(seed), messages, [], [Image.fromarray(frames[0])])), []
        messages[0]["content"].insert(0, {"type": "video"})
        settings = self.processor.video_processor
        settings.num_frames, settings.max_fps = len(times), 1 / (times[1] - times[0])
        targets = [block_targets(scene, float(time), self.blocks) for time in times]
        return encode(self.processor, Sample(str(seed), messages, [frames], [])), targets

    def _conversation(self, questions: list[Question], seed: int, random: np.random.Generator) -> list[dict[str, Any]]:
        messages = []
        for index in random.permutation(len(questions))[:QUESTIONS_AT_ONCE].tolist():
            question = questions[index]
            offered = self.level == max(LEVELS) and random.random() < WITH_OPTIONS
            options = with_options(question, seed + index) if offered else None
            messages += choice_messages(question.text, options, question.answer)
        return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
