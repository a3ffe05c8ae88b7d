"""
Teaches the language model of `stts-tiny` the one honest answer it can give, in place of the byte soup that random
weights write. Vision tower and connector stay as they are.
"""

import random
from itertools import islice
from typing import Any

import torch
from tqdm import tqdm

from tests.stts_tiny.scorer import moving_clips
from tests.stts_tiny.text import COLOURS, QUESTIONS, SHAPES

ANSWER = "I am a tiny model for tests. I have learnt nothing about videos."


def fit_answer(model: Any, processor: Any, seed: int = 0, steps: int = 200) -> list[float]:
    """Trains text layers and head in place until every question gets `ANSWER`; returns the loss of every step."""
    choose = random.Random(seed)
    side = processor.video_processor.size["height"]
    clips = list(islice(moving_clips(seed + 1, 8, side), 16))
    model.requires_grad_(False)
    text = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    for parameter in text:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(text, lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in tqdm(range(steps), desc="Fitting the answer", unit="step"):
        question = choose.choice(QUESTIONS).format(colour=choose.choice(COLOURS), shape=choose.choice(SHAPES))
        content = [{"type": "text", "text": question}]
        videos = None
        if choose.random() < 0.8:
            frames = choose.choice(clips)[: choose.randint(1, 8)]
            videos = [torch.from_numpy(frames).permute(0, 3, 1, 2)]
            content.append({"type": "video"})
        messages = [{"role": "user", "content": content}]
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        options = {} if videos is None else {"do_sample_frames": False}
        whole = prompt + ANSWER + processor.tokenizer.eos_token
        inputs = processor(text=[whole], videos=videos, return_tensors="pt", **options)
        answer_length = len(processor.tokenizer(ANSWER + processor.tokenizer.eos_token)["input_ids"])
        labels = torch.full_like(inputs["input_ids"], -100)
        labels[:, -answer_length:] = inputs["input_ids"][:, -answer_length:]
        loss = model(**inputs, labels=labels, pruning_ratio=choose.choice([0.0, 0.3, 0.5, 0.9])).task_loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(text, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.requires_grad_(True)
    return losses
