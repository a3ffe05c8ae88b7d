"""Why an answer is what it is: settings answer as calls do, named blocks turn the answer, and what it costs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from examples.study.explaining import lost_answers, names_the_thing
from examples.study.make_dataset import make_dataset
from stts_hf import VideoAssistant, load, register_auto_classes
from stts_hf.inference.explain import Search
from stts_hf.inference.requests import ask_about, prepare
from stts_hf.model_parts import VISION_TOWER, module_of
from tests.checkpoints import ALL_TINIES, EVERY, TINY, load_talkative

QUESTION = "What moves?"
NEW: dict[str, Any] = {"max_new_tokens": 16}  # before, dropping changes nothing of what states say


@pytest.fixture(scope="module", params=EVERY)
def explained(request, media) -> Any:
    """The assistant, what it explains of a clip with 80 % dropped, and how often its first layer ran."""
    register_auto_classes()
    folder = ALL_TINIES[request.param]
    assistant = VideoAssistant(load_talkative(folder), AutoProcessor.from_pretrained(folder))
    layers = [module for module in module_of(assistant.model, VISION_TOWER).modules() if hasattr(module, "project")]
    runs: list[int] = []
    hook = layers[0].register_forward_hook(lambda *_: runs.append(1))
    found = assistant.explain(str(media / "five.mkv"), QUESTION, pruning_ratio=0.8, **NEW)
    hook.remove()
    return assistant, found, str(media / "five.mkv"), len(runs)


def test_settings_answer_as_calls_do_and_the_first_layers_run_once(explained):
    assistant, found, clip, runs = explained
    for finding in (found.asked, found.whole):
        answer = assistant.answer(clip, QUESTION, pruning_ratio=finding.rule.ratio, **NEW)
        assert finding.answer.answer == answer.answer
        assert finding.answer.keep_mask.equal(answer.keep_mask)
        assert 0 < finding.probability <= 1
    assert [*found.by_selector] == ["cosine", "random"]
    assert {one.answer.video_tokens_kept for one in found.by_selector.values()} == {
        found.asked.answer.video_tokens_kept
    }
    assert runs == 1
    assert found.cost <= 10


def test_the_blocks_that_are_named_turn_the_answer(explained):
    """By a call of `generate` with the whole prompt."""
    assistant, found, clip, _ = explained
    processor, mask = assistant.processor, found.asked.answer.keep_mask.clone()
    assert found.blocks
    for block in found.blocks:
        assert mask[block] != found.puts_back
        mask[block] = found.puts_back
    inputs = prepare(processor, None, ask_about(processor, clip, QUESTION)).inputs
    ratio = 1 - int(mask.sum()) / mask.numel()
    options = {"block_scores": mask.flatten().float(), "pruning_ratio": ratio, "do_sample": False}
    sequences = assistant.model.generate(**inputs, **options, **NEW)
    text = processor.decode(sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert (text == found.expected) == found.puts_back


@pytest.mark.parametrize(("puts_back", "cause"), [(False, "seen"), (True, "dropped")])
def test_where_only_the_first_frame_is_left_or_lost_no_block_is_named(puts_back, cause):
    """Although the answer turns without the bias of the scores: there is none to take away, or to put back."""
    keep_mask = torch.tensor([[True, True], [puts_back, puts_back]])
    answer: Any = SimpleNamespace(keep_mask=keep_mask, grid=(1, 2))
    reading: Any = SimpleNamespace(holds=lambda **_: (puts_back, 0.5), spent=0.0)
    assert Search(reading, answer, puts_back).run(set(), 0.5) == (cause, [])


@pytest.fixture(scope="module")
def tiny() -> VideoAssistant:
    return load(TINY, pruning_ratio=0.8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pruning_ratio": 0.0}, "0% dropped"),
        ({"processing": {"num_frames": 1}}, "80% dropped"),  # the first frame stays
        ({"at": 99.0}, "at is 99 s"),
        ({"video": None}, "video is None"),
        ({"max_new_tokens": "3"}, "max_new_tokens must be a whole number"),
        ({"processing": {"return_tensors": "np"}}, "processing has 'return_tensors'"),
    ],
    ids=["ratio 0", "one frame", "behind the end", "text alone", "length", "type of tensors"],
)
def test_what_cannot_be_explained_is_refused(tiny, media, given, words):
    with pytest.raises(ValueError, match=words):
        tiny.explain(**({"video": str(media / "two.mp4"), "question": QUESTION} | given))


def test_several_videos_and_an_answer_that_is_no_text_are_refused(tiny, media):
    with pytest.raises(TypeError, match="a list of 2 videos"):
        tiny.explain([str(media / "two.mp4"), str(media / "three.mp4")], QUESTION)
    with pytest.raises(TypeError, match="expected must be a text, got 5"):
        tiny.explain(str(media / "two.mp4"), QUESTION, expected=5)


@pytest.mark.parametrize("keep", [{}, {"video_token_budget": 30}], ids=["ratio", "budget"])
def test_an_answer_that_no_setting_gives_is_not_looked_for_among_blocks(tiny, media, keep):
    found = tiny.explain(str(media / "five.mkv"), QUESTION, expected="a purple elephant", **NEW, **keep)
    assert (found.cause, found.blocks, found.remedies) == ("unknown", (), ())
    assert found.cost <= 10
    for finding in (found.asked, found.whole):  # what is looked for is not what they answer
        assert finding.expected < finding.probability


def test_a_moment_between_frames_was_never_sampled(tiny, tmp_path):
    from examples.clips.sample_clip import draw_sample_clip

    draw_sample_clip(tmp_path / "clip.mp4", size=(96, 96))
    options: dict[str, Any] = {"processing": {"num_frames": 3}, **NEW}
    found = tiny.explain(str(tmp_path / "clip.mp4"), "Which letter flashes up?", expected="H", at=1.0, **options)
    assert (found.cause, found.moment) == ("not sampled", (1.0,))
    again = tiny.answer(str(tmp_path / "clip.mp4"), QUESTION, processing=found.remedies[0])
    assert min(abs(time - 1.0) for time in again.timestamps) <= 0.25


@pytest.mark.slow
def test_it_names_the_moment_and_a_block_of_what_the_question_is_about(tiny, tmp_path, monkeypatch):
    """A few clips, ranked by change; docs/explain.md has the command for forty, and what it gave."""
    monkeypatch.setattr(tiny.model.config.vision_config, "selector", "cosine")
    list(make_dataset(tmp_path / "data", {"train": 1, "validation": 1, "test": 14}, seed=33))
    named = []
    for row in lost_answers(tiny, tmp_path / "data", 0.8):
        found = tiny.explain(row["video"], row["question"], expected=row["answer"], max_new_tokens=8)
        assert found.cost <= 10
        named.append(names_the_thing(found, row["shown"])[0])
    assert len(named) >= 2
    assert sum(named) >= 0.75 * len(named)
