"""Clips without answers, which the unpruned model writes itself: `stts-hf train` with `scorer_only`."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stts_hf import STTSProcessor, answer_videos, load_rows, prepare_rows
from stts_hf.data.collator import STTSDataCollator
from stts_hf.data.encoding import prompt_of
from stts_hf.data.rows import RowError, read_row
from stts_hf.inference import engine
from stts_hf.inference.requests import Answer
from stts_hf.training.own_answers import answer_rows, mark_unanswered
from tests.checkpoints import TINY, load_talkative, load_tiny, weights_of
from tests.training_files import row, train, write_config, write_data, write_rows

MORE = """\
scorer_only: true
scorer_target: answers
num_masks: 4
freeze: [language_model, vision_tower, connector]
max_answer_tokens: 6
report_to: none
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Three clips: the first without words, the second with a question, the third with an answer."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    rows: list[dict[str, Any]] = [
        {"videos": ["clip_0.mp4"]},
        {"question": "What moves?", "videos": ["clip_1.mp4"]},
        row(2),
    ]
    return write_rows(folder, rows)


@pytest.fixture(scope="module")
def processor() -> Any:
    processor = STTSProcessor.from_pretrained(TINY)
    processor.video_processor.num_frames = 2
    return processor


def marked(data: Path) -> Any:
    return mark_unanswered(load_rows(data), "Describe this video.", 6)


def test_answers_are_those_of_the_unpruned_model(data, processor, tmp_path):
    model = load_talkative()
    rows = prepare_rows(marked(data), processor, progress=False)
    rows = prepare_rows(answer_rows(rows, model, processor, folder=tmp_path), processor, progress=False)
    batch = STTSDataCollator(processor)([rows[index] for index in range(3)])
    learned = [processor.decode(labels[labels != -100], skip_special_tokens=True) for labels in batch["labels"]]
    clips = [data.parent / f"clip_{number}.mp4" for number in range(2)]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pruning_ratio": 0.0}
    answers = answer_videos(model, processor, clips, ["Describe this video.", "What moves?"], **options)
    assert learned == [*(answer.answer for answer in answers), "Number 2."]
    assert all(learned)
    texts = [processor.decode(ids) for ids in batch["input_ids"]]
    assert "Describe this video." in texts[0]
    assert "What moves?" in texts[1]


def test_lengths_leave_room_for_answers(data, processor, tmp_path):
    model = load_tiny()
    before = prepare_rows(marked(data), processor, pruning_ratio=0.5, progress=False)
    answered = answer_rows(before, model, processor, folder=tmp_path)
    after = prepare_rows(answered, processor, pruning_ratio=0.5, progress=False)
    assert all(now <= bound for now, bound in zip(after["length"], before["length"], strict=True))
    assert after["length"][2] == before["length"][2]
    with pytest.raises(RowError, match="tokens after pruning, but max_length is"):
        prepare_rows(marked(data), processor, pruning_ratio=0.5, max_length=before["length"][0] - 1, progress=False)


def test_answers_are_kept_and_taken_up(data, processor, tmp_path, monkeypatch):
    rows = prepare_rows(marked(data), processor, progress=False)
    first = answer_rows(rows, load_tiny(), processor, folder=tmp_path, identity="a")
    with (tmp_path / "_answers_0.jsonl").open("a") as file:
        file.write('{"key": "cut off')
    written: list[Any] = []
    prepare = engine.prepare

    def note(*given: Any) -> Any:
        written.append(given)
        return prepare(*given)

    monkeypatch.setattr(engine, "prepare", note)
    again = answer_rows(rows, load_tiny(), processor, folder=tmp_path, identity="a")
    assert (list(again["stts_answer"]), written) == (list(first["stts_answer"]), [])
    answer_rows(rows, load_tiny(), processor, folder=tmp_path, identity="b")
    assert len(written) == 2


def test_answers_follow_the_content_of_a_video_not_its_path(data, processor, tmp_path, monkeypatch):
    clip, other = (data.parent / f"clip_{number}.mp4" for number in (0, 1))
    shutil.copy(clip, tmp_path / "a.mp4")
    numbers = itertools.count(1)
    monkeypatch.setattr(engine, "_answer_batch", lambda *_, **options: [Answer(answer=f"answer {next(numbers)}")])

    def answer(name: str) -> str:
        table = prepare_rows(marked(write_rows(tmp_path, [{"videos": [name]}])), processor, progress=False)
        [mark] = answer_rows(table, load_tiny(), processor, folder=tmp_path)["stts_answer"]
        return json.loads(mark)["answer"]

    assert answer("a.mp4") == "answer 1"
    (tmp_path / "a.mp4").rename(tmp_path / "moved.mp4")
    assert answer("moved.mp4") == "answer 1"
    shutil.copy(other, tmp_path / "moved.mp4")
    assert answer("moved.mp4") == "answer 2"


def test_a_damaged_file_of_answers_is_named(data, processor, tmp_path):
    (tmp_path / "_answers_0.jsonl").write_text("notes\n")
    rows = prepare_rows(marked(data), processor, progress=False)
    with pytest.raises(ValueError, match=r"_answers_0\.jsonl is damaged .*Delete it"):
        answer_rows(rows, load_tiny(), processor, folder=tmp_path)


def test_an_empty_answer_is_an_error_or_left_out(data, processor, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_answer_batch", lambda *_, **options: [Answer(answer="")])
    rows = prepare_rows(marked(data), processor, progress=False)
    with pytest.raises(RowError, match=r"Row 'train.jsonl:1': the unpruned model answers nothing"):
        answer_rows(rows, load_tiny(), processor, folder=tmp_path)
    left = answer_rows(rows, load_tiny(), processor, folder=tmp_path, on_error="skip")
    assert list(left["id"]) == ["row-2"]


@pytest.mark.slow
def test_from_clips_alone_to_a_checkpoint_and_on(data, undecided, tmp_path, capsys):
    """bfloat16 weights, the scorer in float32; killed after a step, and resumed."""
    more = MORE + "dtype: bfloat16\nbf16: true\nsave_steps: 1\n"
    whole = write_config(tmp_path, data, tmp_path / "whole", model=undecided, more=more)
    assert train(whole, "--dry-run") == 0
    assert "2 of them answered by the unpruned model" in capsys.readouterr().out
    assert not (tmp_path / "whole").exists()
    assert train(whole, "--max_steps=2") == 0
    text = capsys.readouterr().out
    assert "what blocks are worth to the answers" in text
    log = json.loads((tmp_path / "whole" / "trainer_state.json").read_text())["log_history"]
    assert [entry["worth_loss"] > 0 for entry in log if "loss" in entry] == [True, True]
    part = write_config(tmp_path / "again", data, tmp_path / "part", model=undecided, more=more)
    assert train(part) == 0
    assert train(part, "--max_steps=2", "--resume") == 0
    weights, start = weights_of(tmp_path / "part"), weights_of(undecided)
    for name, weight in weights_of(tmp_path / "whole").items():
        assert torch.equal(weights[name], weight), name
        assert weight.dtype == (torch.float32 if ".scorer." in name else torch.bfloat16)
        changed = not torch.equal(weight, start[name].to(weight.dtype))
        assert changed == (".scorer." in name), name


def test_multiple_choice_and_conversations_wait_for_their_last_answer(data, processor, tmp_path):
    asked = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}]
    asked.append({"role": "user", "content": "And two?"})
    rows: list[dict[str, Any]] = [
        {"question": "Where?", "options": ["left", "right"], "videos": ["clip_0.mp4"]},
        {"messages": asked, "videos": ["clip_1.mp4"]},
    ]
    file = write_rows(data.parent, rows, "asked.jsonl")
    ready = prepare_rows(marked(file), processor, progress=False)
    done = prepare_rows(answer_rows(ready, load_tiny(), processor, folder=tmp_path), processor, progress=False)
    rendered = [prompt_of(processor, read_row(row)) for row in done]
    prompts = [prompt for prompt, _ in rendered]
    assert "A. left\nB. right" in prompts[0]
    assert prompts[1].index("One?") < prompts[1].index("Yes.") < prompts[1].index("And two?")
    assert [len(spans) for _, spans in rendered] == [1, 2]
