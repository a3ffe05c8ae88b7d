"""What a study reads: a data set that is whole, its questions, and a base whose code never runs."""

import shutil
from pathlib import Path

import pytest

from examples.study.data import StudyError, check_dataset, describe_questions, open_messages, read_questions
from examples.study.make_dataset import read_about
from examples.study.pretraining import make_tiny
from examples.study.runs import do_runs
from examples.study.study import open_study, plan
from stts_hf.data.prompts import choice_messages
from tests.study.small_study import add_code, write_base, write_dataset


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("whole") / "data")


def test_a_conversation_without_options_has_the_right_options_as_answers():
    told = choice_messages("Which?", ["pink", "B. blue", "red"], 2) + choice_messages("Where?", None, "left")
    openly = choice_messages("Which?", None, "red") + choice_messages("Where?", None, "left")
    assert open_messages(told) == openly == open_messages(openly)


def drop_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("videos/test-00001.mp4", Path.unlink, r"1 files are missing, such as videos/test-00001\.mp4"),
        ("test.jsonl", drop_last_line, r"test\.jsonl has \d+ rows, not \d+"),
        ("train_conversations.jsonl", lambda path: path.write_text(path.read_text()[:-9]), "Expecting|Unterminated"),
        ("motion/test.npz", lambda path: path.write_bytes(path.read_bytes()[:-30]), "not a zip file"),
        ("things/test.npz", Path.unlink, "No such file"),
    ],
)
def test_a_data_set_that_is_not_whole_is_refused(whole, tmp_path, name, damage, message):
    dataset = shutil.copytree(whole, tmp_path / "data")
    assert check_dataset(dataset)["splits"]["train"]["clips"] == 4
    damage(dataset / name)
    with pytest.raises(StudyError, match=rf"--dataset .*{message}.*make it again with make-dataset"):
        check_dataset(dataset)


def test_questions_can_be_asked_without_their_options(whole):
    asked, openly = (read_questions(whole, without_options) for without_options in (False, True))
    assert any("options" in row for row in asked)
    assert openly == [{name: value for name, value in row.items() if name != "options"} for row in asked]
    assert describe_questions(whole, False)["chance"] == read_about(whole)["chance"]
    found = describe_questions(whole, True)
    expected = {"direction": 0.25, "end": 0.1111, "order": 0.5, "long-order": 0.5, "long-mark": 0.1667, "count": 0.25}
    asked_kinds = expected.keys() & found["chance"].keys()
    assert len(asked_kinds) >= 3
    assert all(found["chance"][kind] == expected[kind] for kind in asked_kinds)
    assert found["text_only"].keys() == found["chance"].keys()


def start_study(base: Path, dataset: Path, folder: Path) -> None:
    study = open_study(folder / "study", dataset, base, {})
    do_runs(study, plan(study.settings), print)


def start_tiny(base: Path, dataset: Path, folder: Path) -> None:
    make_tiny(base, folder, scorer_steps=1, steps=1)


@pytest.mark.parametrize("start", [start_study, start_tiny])
def test_code_of_a_base_does_not_run_even_where_the_user_would_say_yes(whole, tmp_path, monkeypatch, start):
    base, ran = write_base(tmp_path / "base"), tmp_path / "ran"
    add_code(base, ran)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="trust_remote_code"):
        start(base, whole, tmp_path)
    assert not ran.exists()
