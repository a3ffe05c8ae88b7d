"""A file of answers: what survives a kill, a full disk and a second run, and what is refused."""

import itertools
import json
import os
import random
import signal
import stat
import time

import pytest

from stts_hf.inference.answers_file import AnswersError, open_answers, summary_path
from tests.small_disk import small_disk

SETTINGS = {"pruning_ratio": 0.5, "rows": {"file": "rows.jsonl"}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.jsonl"


def record(name, error=None):
    return {"id": name, "written": "B", "error": error}


def write(path, *records, settings=SETTINGS):
    with open_answers(path, settings) as file:
        for one in records:
            file.write(one)
        return dict(file.answered)


def ids(path):
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def visible(folder):
    """Its files, but for the lock."""
    return sorted(file.name for file in folder.iterdir() if file.name != ".answers.jsonl.lock")


def test_a_second_run_has_the_answers_of_the_first(path):
    write(path, record("a"), record("b"))
    assert write(path, record("c")).keys() == {"a", "b", "c"}
    assert ids(path) == ["a", "b", "c"]


def test_an_id_is_never_a_path(path):
    names = ["../../escaped", "/tmp/stts-escaped", "a\0b", "a\nb", "CON", "..", "", "x" * 5000]
    write(path, *map(record, names))
    assert write(path).keys() == set(names)
    assert ids(path) == names
    assert visible(path.parent) == [path.name, summary_path(path).name]


@pytest.mark.parametrize("cut", [1, -1])
def test_a_line_that_a_kill_tore_is_dropped(path, cut):
    write(path, record("a"), record("b"))
    last = path.read_bytes().splitlines(keepends=True)[-1]
    path.write_bytes(path.read_bytes()[: -len(last)] + last[:cut])
    write(path, record("b"), record("c"))
    assert ids(path) == ["a", "b", "c"]


def test_questions_with_an_error_are_asked_again_and_ids_that_are_no_text_answer_none(path):
    write(path, record("a", error="gone"), record("b"))
    path.write_text(path.read_text() + json.dumps(record(["c"])) + "\n")
    assert write(path).keys() == {"b"}
    assert ids(path) == ["b"]


def test_sums_are_there_when_all_answers_are(path):
    write(path, record("a"))
    assert json.loads(summary_path(path).read_text()) == {"format": 1, "settings": SETTINGS, "finished": False}
    with open_answers(path, SETTINGS) as file:
        file.finish({"all": {"questions": 1}})
    finished = json.loads(summary_path(path).read_text())
    assert (finished["finished"], finished["all"]) == (True, {"questions": 1})


def test_a_later_run_that_is_killed_has_not_finished(path):
    with open_answers(path, SETTINGS) as file:
        file.write(record("b"))
        file.finish({"all": {"questions": 1}})
    write(path)
    assert json.loads(summary_path(path).read_text())["finished"]  # nothing was added
    write(path, record("a", error="gone"))
    assert not json.loads(summary_path(path).read_text())["finished"]
    with open_answers(path, SETTINGS) as file:
        file.write(record("a", error="gone"))
        file.finish({"all": {"questions": 2}})
    write(path)  # drops the error
    assert not json.loads(summary_path(path).read_text())["finished"]


def test_a_link_mode_and_owner_stay_where_the_file_is_written_again(path):
    (path.parent / "elsewhere").mkdir()
    target = path.parent / "elsewhere" / "target.jsonl"
    path.symlink_to(target)
    write(path, record("a", error="gone"), record("b"))
    target.chmod(0o640)
    owner = target.stat().st_uid
    if os.geteuid() == 0:
        owner = 12345
        os.chown(target, owner, owner)
    write(path, record("a"))
    assert path.is_symlink()
    assert ids(target) == ["b", "a"]
    assert (stat.S_IMODE(target.stat().st_mode), target.stat().st_uid) == (0o640, owner)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "b", "tokens": 3}', "has no 'error'"),
        ('{"id": "b", "tokens": null, "error": null}', "tokens cannot be null"),
        ('{"id": "b", "tokens": "many", "error": "gone"}', 'tokens cannot be "many"'),
    ],
)
def test_a_line_without_what_every_answer_has_is_named(path, line, said):
    write(path)
    path.write_text('{"id": "a", "tokens": null, "error": "gone"}\n' + line + "\n")
    columns = {"tokens": int, "error": str | None}
    with (
        pytest.raises(AnswersError, match=rf"answers\.jsonl:2:? {said}"),
        open_answers(path, SETTINGS, columns=columns),
    ):
        pass


def test_other_settings_are_refused_by_name_and_nothing_is_lost(path):
    write(path, record("a"))
    with pytest.raises(AnswersError, match=r"other settings: pruning_ratio was 0\.5, and is 0\.3 now\. Name another"):
        write(path, record("b"), settings=SETTINGS | {"pruning_ratio": 0.3})
    assert ids(path) == ["a"]


@pytest.mark.parametrize("content", ["notes\n", '{"id": "a"}\n'])
def test_a_file_of_something_else_is_refused(path, content):
    path.write_text(content)
    with pytest.raises(AnswersError, match=r"answers\.jsonl"):
        write(path)
    assert path.read_text() == content


def test_a_damaged_line_in_the_middle_is_refused_by_number(path):
    write(path, record("a"), record("b"))
    path.write_text("x\n" + path.read_text())
    with pytest.raises(AnswersError, match=r"answers\.jsonl:1 is not JSON"):
        write(path)


def test_two_processes_do_not_write_to_one_file(path):
    with open_answers(path, SETTINGS) as file:
        with pytest.raises(AnswersError, match="Another process writes to"):
            write(path, settings=SETTINGS | {"pruning_ratio": 0.3})
        file.write(record("a", error="gone"))
    with open_answers(path, SETTINGS), pytest.raises(AnswersError, match="Another process writes to"):
        write(path)


def test_a_full_disk_keeps_whole_lines_and_the_next_run_goes_on(path):
    with small_disk(150), pytest.raises(AnswersError, match=r"answers\.jsonl cannot be written: .*No space left"):
        write(path, *map(record, "abcdefgh"))
    there = ids(path)
    assert 0 < len(there) < 8
    write(path, *(record(name) for name in "abcdefgh" if name not in there))
    assert sorted(ids(path)) == list("abcdefgh")


def test_runs_killed_at_any_moment_leave_each_answer_once(path):
    moments = random.Random(0)
    for _ in range(12):
        child = os.fork()
        if child == 0:
            try:
                with open_answers(path, SETTINGS) as file:
                    for name in map(str, itertools.count()):
                        if name not in file.answered:
                            # Some cannot be read at first, so the next run writes the file again.
                            file.write(record(name, "gone" if moments.random() < 0.05 else None))
            finally:
                os._exit(0)
        time.sleep(moments.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    there = write(path)
    names = there.keys() | set(map(str, range(2000)))
    assert write(path, *(record(name) for name in names if name not in there)).keys() == names
    assert sorted(ids(path)) == sorted(names)
