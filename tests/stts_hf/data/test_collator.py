"""Batches: the processor's own where it could make them, skipped rows, fixed lengths, and work in other processes."""

import math
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import SmolVLMProcessor
from transformers.image_utils import load_image

from stts_hf import RowError, STTSDataCollator
from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.data.encoding import count_dropped, encode
from stts_hf.data.rows import read_row
from stts_hf.video.processors import block_grids, process
from tests.checkpoints import BLOCKS, TINIES
from tests.stts_hf.training.samples import image_row, text_row, video_row


@pytest.fixture(scope="module")
def rows(media):
    return {
        "two": video_row("two", media / "two.mp4"),
        "five": video_row("five", media / "five.mkv", answer="A ball and then a box."),
        "bytes": video_row("bytes", (media / "three.mp4").read_bytes()),
        "damaged": video_row("damaged", media / "damaged.mp4"),
        "image": image_row("image", media / "wide.png"),
        "images": image_row("images", media / "turned.jpg", media / "wide.png"),
        "text": text_row("text"),
    }


def assert_same(batch, expected):
    assert batch.keys() == expected.keys()
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
        else:  # a processor makes a tensor of the floats that a batch has in a list
            wanted = expected[name]
            assert value == (wanted.tolist() if isinstance(wanted, torch.Tensor) else wanted)


def test_seconds_per_tubelet_are_no_tensor(rows):
    """FSDP2 and DeepSpeed cast all tensors of a batch to bfloat16, in which 2/3 is 0.668; the model takes a list."""
    folder = TINIES["qwen2_5_vl"]
    family = family_of_checkpoint(folder)
    batch = STTSDataCollator(family.processor.from_pretrained(folder))([rows["two"], rows["five"]])
    assert [type(seconds) for seconds in batch["second_per_grid_ts"]] == [float, float]
    model, seconds = family.model.from_pretrained(folder).eval(), [2 / 3, 0.1]
    with torch.no_grad():
        found = model(**batch | {"second_per_grid_ts": seconds}).logits
        expected = model(**batch | {"second_per_grid_ts": torch.tensor(seconds)}).logits
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("names", "side"),
    [
        (["image", "images"], "right"),
        (["image", "two", "text", "images", "five"], "left"),
    ],
)
def test_batches_equal_the_processors_own(any_processor, rows, names, side):
    if isinstance(any_processor, SmolVLMProcessor):
        pytest.skip("it takes images by row and pads their tiles; test_smolvlm_processing.py compares answers")
    batch = STTSDataCollator(any_processor, padding_side=side)([rows[name] for name in names])
    labels = batch.pop("labels")
    samples = [read_row(rows[name]) for name in names]
    turns = [any_processor.apply_chat_template(sample.messages, tokenize=False) for sample in samples]
    expected = process(
        any_processor,
        text=[turn if turn.endswith("<|im_end|>\n") else turn + "<|im_end|>" for turn in turns],
        videos=[video for sample in samples for video in sample.videos] or None,
        images=[load_image(image) for sample in samples for image in sample.images] or None,
        padding=True,
        padding_side=side,
        return_tensors="pt",
    )
    assert_same(batch, dict(expected))
    for row, sample in zip(labels, samples, strict=True):
        answer = "".join(part["text"] for part in sample.messages[-1]["content"])
        assert any_processor.tokenizer.decode(row[row >= 0]) == answer + "<|im_end|>"


def test_an_answers_first_token_is_learned_with_the_space_that_a_template_puts_before_it(any_processor):
    messages = [{"role": "user", "content": "What moves?"}, {"role": "assistant", "content": "A red ball."}]
    labels = encode(any_processor, read_row({"id": "one", "messages": messages})).labels
    learned = any_processor.tokenizer.decode(labels[labels >= 0])
    assert learned.strip() == f"A red ball.{any_processor.tokenizer.eos_token}"


def test_packed_rows_lie_behind_one_another(any_processor, rows):
    groups = [["two", "text"], ["image"], ["bytes", "images", "text"]]
    batch = STTSDataCollator(any_processor, padding_side="right")([[rows[name] for name in group] for group in groups])
    alone = {name: encode(any_processor, read_row(rows[name])) for name in rows if name != "damaged"}
    for row, group in enumerate(groups):
        ends = [sum(len(alone[name]) for name in group[: place + 1]) for place in range(len(group))]
        for name, end in zip(group, ends, strict=True):
            part = slice(end - len(alone[name]), end)
            for key in ("input_ids", "labels", "mm_token_type_ids"):
                assert torch.equal(batch[key][row, part], getattr(alone[name], key))
            assert torch.equal(batch["position_ids"][row, part], torch.arange(len(alone[name])))
            assert batch["labels"][row, end - len(alone[name])] == -100
        assert batch["attention_mask"][row].sum() == ends[-1]
        assert (batch["labels"][row, ends[-1] :] == -100).all()
    flat = STTSDataCollator(any_processor)([rows[name] for group in groups for name in group])
    for key in (*any_processor.video_processor.model_input_names, *any_processor.image_processor.model_input_names):
        assert torch.equal(batch[key], flat[key])


def test_a_damaged_video_is_skipped_and_counted(processor, rows, caplog):
    collator = STTSDataCollator(processor, on_error="skip", return_ids=True)
    expected = collator([rows["text"], rows["two"]]) | {"skipped_ids": ["damaged"]}
    assert_same(collator([rows["text"], rows["damaged"], rows["two"]]), expected)
    assert "Skipped: Row 'damaged': Cannot read" in caplog.text
    packed = collator([[rows["damaged"], rows["text"]], [rows["damaged"]], [rows["two"]]])
    assert packed["input_ids"].shape[0] == 2
    assert packed["skipped_ids"] == ["damaged", "damaged"]


def test_a_batch_of_skipped_rows_is_an_error_without_replacements(processor, rows):
    with pytest.raises(RowError, match=r"all of its rows were skipped: 'damaged'.*replacements"):
        STTSDataCollator(processor, on_error="skip")([rows["damaged"]])


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_replacements_fill_rows_that_were_left_empty(processor, rows, packed):
    others = [rows["damaged"], rows["text"], rows["damaged"], rows["image"]]
    if packed:
        others = [[row] for row in others]
    collator = STTSDataCollator(processor, on_error="skip", replacements=others, return_ids=True)
    batch = collator([[rows["damaged"]], [rows["two"]]] if packed else [rows["damaged"], rows["two"]])
    assert batch["input_ids"].shape[0] == 2
    assert batch["sample_ids"][0] in ("text", "image")
    assert batch["skipped_ids"] == ["damaged"]
    assert_same(collator([rows["damaged"]]), collator([rows["damaged"]]))
    with pytest.raises(RowError, match="'damaged' was skipped and 16 rows in its place too"):
        STTSDataCollator(processor, on_error="skip", replacements=[rows["damaged"]])([rows["damaged"]])


def test_a_sample_longer_than_allowed_after_pruning_is_named(processor, rows):
    encoded = encode(processor, read_row(rows["five"]))
    length = len(encoded) - count_dropped(encoded.grids, 0.5)
    assert length == len(encoded) - 5 * BLOCKS // 2
    collator = STTSDataCollator(processor, pruning_ratio=0.5, max_length=length)
    collator([rows["five"]])
    with pytest.raises(
        RowError, match=rf"Row 'five' has {length} tokens after pruning, but max_length is {length - 1}"
    ):
        STTSDataCollator(processor, pruning_ratio=0.5, max_length=length - 1)([rows["five"]])
    with pytest.raises(RowError, match=rf"Row 'text' .* and the samples before it in its row {length}, but"):
        collator([[rows["five"], rows["text"]]])
    skipping = STTSDataCollator(processor, pruning_ratio=0.5, max_length=length, on_error="skip", return_ids=True)
    batch = skipping([[rows["five"], rows["text"]]])
    assert (batch["sample_ids"], batch["skipped_ids"]) == (["five"], ["text"])


@pytest.mark.parametrize(("names", "side"), [(["two", "five"], "left"), (["text", "image"], "right")])
def test_padding_to_a_fixed_length_after_pruning(any_processor, rows, names, side):
    batch = STTSDataCollator(any_processor, pruning_ratio=0.3, pad_to=1200, padding_side=side)([rows[n] for n in names])
    assert batch["pruned_length"] == 1200
    encoded = [encode(any_processor, read_row(rows[name])) for name in names]
    dropped = [int(0.3 * math.prod(one.grids[0])) if one.grids else 0 for one in encoded]
    assert batch["input_ids"].shape[1] == 1200 + max(dropped)
    plain = STTSDataCollator(any_processor, padding_side=side)([rows[name] for name in names])
    width = plain["input_ids"].shape[1]
    for key in ("input_ids", "labels", "attention_mask"):
        assert torch.equal(batch[key][:, -width:] if side == "left" else batch[key][:, :width], plain[key])


def test_always_video_adds_a_black_frame_where_there_is_no_video(any_processor, rows):
    collator = STTSDataCollator(any_processor, always_video=True, return_ids=True)
    assert_same(collator([rows["two"]]), STTSDataCollator(any_processor, return_ids=True)([rows["two"]]))
    batch = collator([rows["text"], rows["image"]])
    assert [grid[0] for grid in block_grids(any_processor, batch)] == [1]
    assert batch["input_ids"].shape[0] == 3
    assert (batch["labels"][2] == -100).all()
    assert batch["sample_ids"] == ["text", "image"]
    packed = collator([[rows["image"]], [rows["text"], rows["text"]]])
    assert packed["input_ids"].shape[0] == 2
    assert (packed["position_ids"][1] == 0).sum() - (packed["attention_mask"][1] == 0).sum() == 3
    full = int(packed["attention_mask"][0].sum())
    tight = STTSDataCollator(any_processor, always_video=True, pruning_ratio=0.5, max_length=full)
    assert tight([[rows["image"]]])["input_ids"].shape[0] == 2


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_make_the_same_batches(processor, rows, start):
    """With spawn, all of it goes through pickle; errors come out of a worker with the row's id."""
    collator = STTSDataCollator(processor, on_error="skip", return_ids=True)
    data: Any = [rows[name] for name in ("two", "damaged", "text", "bytes")]
    loader: Any = DataLoader(
        data, batch_size=2, num_workers=1, collate_fn=collator, multiprocessing_context=start, timeout=120
    )
    batches = list(loader)
    for batch, expected in zip(batches, [collator(data[:2]), collator(data[2:])], strict=True):
        assert_same(batch, expected)
    assert [batch["skipped_ids"] for batch in batches] == [["damaged"], []]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'skip', got 'ignore'"),
        ({"pad_to": 10.5, "pruning_ratio": 0.5}, "pad_to must be"),
        ({"pad_to": 10}, "pass model_config or pruning_ratio"),
        ({"pad_to": 10, "max_length": 20, "pruning_ratio": 0.5}, "max_length=20 is more than pad_to=10"),
        ({"pruning_ratio": 1.5}, "`pruning_ratio` is 1.5, but must be a number in"),
        ({"padding_side": "both"}, "padding_side must be"),
    ],
)
def test_bad_options_are_refused(processor, options, said):
    with pytest.raises(ValueError, match=said):
        STTSDataCollator(processor, **options)
