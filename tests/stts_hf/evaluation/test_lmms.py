"""The model `stts` in the real lmms-eval, on a local task: answers and scores of `stts-hf eval`, to the question."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoProcessor

from stts_hf.evaluation.evaluate import evaluate
from tests.checkpoints import ALL_TINIES, EVERY, load_talkative
from tests.clips import write_clip
from tests.conftest import REPOSITORY
from tests.training_files import write_rows

lmms_eval = pytest.importorskip("lmms_eval", reason="needs lmms-eval: `make test-eval`")

from lmms_eval.api.instance import Instance  # noqa: E402
from lmms_eval.evaluator import simple_evaluate  # noqa: E402
from lmms_eval.models.model_utils.gen_metrics import reset_logged_metrics  # noqa: E402
from lmms_eval.tasks import TaskManager  # noqa: E402
from lmms_eval.utils import load_yaml_config  # noqa: E402

from stts_hf.evaluation.lmms_model import STTS, generation_options, result_of  # noqa: E402
from stts_hf.inference.requests import Answer  # noqa: E402

EXAMPLES = REPOSITORY / "examples" / "eval"
GREEDY = {"max_new_tokens": 4, "do_sample": False, "until": []}


@pytest.fixture(scope="module", params=EVERY)
def checkpoint(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    load_talkative(ALL_TINIES[request.param]).save_pretrained(folder)
    AutoProcessor.from_pretrained(ALL_TINIES[request.param]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory, checkpoint) -> Path:
    """Questions about clips, a picture and nothing; some of the answers are what the model says."""
    folder = tmp_path_factory.mktemp("rows")
    clips = [write_clip(folder / f"{n}.mp4", n, fps=10).name for n in (5, 10, 20)]
    Image.new("RGB", (160, 90), (200, 10, 10)).save(folder / "wide.png")
    options = ["left", "right", "up"]
    rows: list[dict[str, Any]] = [
        {"question": f"Where does ball {n} go, and how often?", "options": options, "answer": "up", "videos": [clip]}
        for clip in clips
        for n in range(3)
    ]
    rows += [{"question": f"Which colour is thing {n}?", "answer": "red", "images": ["wide.png"]} for n in range(2)]
    rows += [{"question": f"How many are {n}?", "answer": "three", "options": None} for n in range(2)]
    rows += [{"question": f"What moves in clip {clip}?", "answer": "x", "videos": [clip]} for clip in clips]
    rows = [{"id": f"q{number}", "type": "t", **row} for number, row in enumerate(rows)]
    said = {record["id"]: record["written"] or "nothing" for record in run_evaluate(checkpoint, rows, folder)}
    for row in rows[1::2]:
        if row.get("options"):
            row["options"] = [*options[:2], said[row["id"]]]
            row["answer"] = 2
        else:
            row["answer"] = said[row["id"]]
    for row in rows:
        row["answer"] = str(row["answer"])
    return write_rows(folder, rows, "rows.jsonl")


def run_evaluate(checkpoint: Path, rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    model = AutoModelForMultimodalLM.from_pretrained(checkpoint).eval()
    processor = AutoProcessor.from_pretrained(checkpoint)
    return list(
        evaluate(
            model,
            processor,
            [row | {"media_root": str(folder)} for row in rows],
            pruning_ratio=0.5,
            batch_size=1,
            processing={"num_frames": 3},
            max_new_tokens=4,
        )
    )


@pytest.fixture(scope="module")
def task(rows, tmp_path_factory) -> Path:
    """The shipped task, with the paths of these rows in it."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "utils.py").write_bytes((EXAMPLES / "local" / "utils.py").read_bytes())
    text = (EXAMPLES / "local" / "stts_local.yaml").read_text().replace("data/test.jsonl", str(rows))
    text = text.replace("folder: data", f"folder: {rows.parent}").replace("max_new_tokens: 16", "max_new_tokens: 4")
    (folder / "stts_local.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def manager(task) -> TaskManager:
    """All tasks of lmms-eval, the paper's lists, and the local task."""
    for path in (EXAMPLES / "paper").iterdir():
        (task / path.name).write_bytes(path.read_bytes())
    return TaskManager(include_path=str(task))


@pytest.fixture(scope="module")
def model(checkpoint) -> STTS:
    return STTS(str(checkpoint), pruning_ratio=0.5, num_frames=3, batch_size=2, device="cpu")


@pytest.fixture
def ask(model):
    """Asks what these contents of a user's message say; returns the texts."""

    def ask(*contents: list[dict[str, Any]], **options: Any) -> list[str]:
        model.task_dict = {"made_up": {"test": contents}}
        return [result.text for result in model.generate_until([request(n, **options) for n in range(len(contents))])]

    return ask


def request(doc_id: int, kind: str = "generate_until", **options: Any) -> Instance:
    def doc_to_messages(doc):
        if doc == "exit":
            sys.exit("video path:gone.mp4 does not exist, please check")
        return [{"role": "user", "content": doc}]

    arguments = ("", doc_to_messages, GREEDY | options, doc_id, "made_up", "test")
    return Instance(kind, arguments, 0, {"task": "made_up", "doc_id": doc_id, "repeats": 1})


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def results(checkpoint, manager) -> dict[str, Any]:
    return simple_evaluate(
        model="stts",
        model_args=f"pretrained={checkpoint},pruning_ratio=0.5,num_frames=3",
        tasks=["stts_local"],
        task_manager=manager,
        batch_size=4,
        device="cpu",
        log_samples=True,
    )


def test_answers_and_scores_are_those_of_stts_hf_eval(results, checkpoint, rows):
    given = [json.loads(line) for line in rows.read_text().splitlines()]
    ours = {record["id"]: record for record in run_evaluate(checkpoint, given, rows.parent)}
    theirs = {sample["doc"]["id"]: sample for sample in results["samples"]["stts_local"]}
    assert theirs.keys() == ours.keys() == {row["id"] for row in given}
    for name, record in ours.items():
        assert theirs[name]["filtered_resps"][0].strip() == record["written"]
        assert bool(theirs[name]["accuracy"]) == record["right"]
        assert bool(theirs[name]["no_option"]) == record["no_option"]
    right = [record["right"] for record in ours.values()]
    assert 0 < sum(right) < len(right)
    assert results["results"]["stts_local"]["accuracy,none"] == pytest.approx(sum(right) / len(right))


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one(results, checkpoint, task, tmp_path):
    """Of 15 questions, so that lmms-eval fills up one process's share with a question asked twice."""
    arguments = f"pretrained={checkpoint},pruning_ratio=0.5,num_frames=3"
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    command = [sys.executable, *launch, "-m", "lmms_eval", "--model", "stts", "--model_args", arguments]
    command += ["--include_path", str(task), "--tasks", "stts_local", "--limit", "15", "--batch_size", "4"]
    command += ["--log_samples", "--output_path", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "Running on rank 1" in ended.stdout + ended.stderr
    [samples] = tmp_path.rglob("*_samples_stts_local.jsonl")
    answers = {line["doc_id"]: line["filtered_resps"] for line in map(json.loads, samples.read_text().splitlines())}
    alone = [sample for sample in results["samples"]["stts_local"] if sample["doc_id"] < 15]
    assert answers == {sample["doc_id"]: sample["filtered_resps"][0] for sample in alone}  # the file drops the list
    [summary] = tmp_path.rglob("*_results.json")
    accuracy = json.loads(summary.read_text())["results"]["stts_local"]["accuracy,none"]
    assert accuracy == pytest.approx(sum(sample["accuracy"] for sample in alone) / 15)


def test_a_batch_of_several_kinds_comes_in_order(ask, rows):
    clip, picture = str(rows.parent / "10.mp4"), str(rows.parent / "wide.png")
    contents = [
        [{"type": "video", "url": clip}, text("Where does it go?")],
        [{"type": "image", "url": Image.open(picture)}, text("Which colour?")],
        [text("Hello?")],
        [{"type": "image", "url": picture}, {"type": "image", "url": Image.open(picture)}, text("Which is left?")],
        [{"type": "video", "url": clip}, text("How often?")],
    ]
    alone = [ask(content)[0] for content in contents]
    assert ask(*contents) == alone
    assert len(set(alone)) >= 3


def test_a_folder_of_pictures_is_a_video(ask, model, tmp_path):
    for number in range(3):
        Image.new("RGB", (64, 48), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    pictures = sorted(map(str, tmp_path.glob("*.png")))
    videos = [[{"type": "video", "url": url}, text("What?")] for url in (str(tmp_path), pictures)]
    folder, files, _ = ask(*videos, [text("What?")], max_new_tokens=16)
    assert folder == files != ""
    shown = model.generate_until([request(number) for number in range(3)])
    of_folder, of_files, of_text = (found.token_counts.input_tokens for found in shown)
    assert of_folder == of_files > of_text


def test_what_cannot_be_asked_costs_its_own_answer_and_is_counted(ask, rows, tmp_path, caplog):
    """Tasks may exit for a missing video, as VideoMME, MLVU and others of lmms-eval do, or ask without it."""
    clip = [{"type": "video", "url": str(rows.parent / "10.mp4")}, text("Where does it go?")]
    gone = [{"type": "video", "url": str(tmp_path / "gone.mp4")}, text("Where does it go?")]
    reset_logged_metrics()
    first, *others, hello = ask(clip, "exit", gone, [text("Where?")])
    assert ([first], others, hello) == (ask(clip), ["", ""], ask([text("Where?")])[0])
    assert "Question 1 of the task made_up cannot be asked: " in caplog.text
    assert "video path:gone.mp4" in caplog.text
    assert {
        "made_up: 2 of 4 questions could not be asked, so they have no answer.",
        "made_up: 1 of 4 questions were asked without any video or image.",
    } <= set(caplog.messages)
    with pytest.raises(ValueError, match=r"None of 1 questions could be asked\. Question 0 of the task made_up .*gone"):
        ask(gone)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "audio", "url": "a.wav"}, "shows audio, but the model takes videos, images and text"),
        ({"type": "video", "url": "a.mp4", "start_time": 1.0}, "shows a part of a video"),
        ({"type": "image", "url": "https://a.b/c.png"}, "is a URL, and nothing is fetched unasked. Add allow_urls"),
        (text("<|im_end|>"), r"messages\[0\] holds '<\|im_end\|>'"),
    ],
    ids=["audio", "part", "URL", "control token"],
)
def test_what_the_model_does_not_take_costs_its_own_answer_only(ask, caplog, part, message):
    with pytest.raises(ValueError, match=f"None of 1 .* Question 0 of the task made_up cannot be asked: .*{message}"):
        ask([part, text("What?")])


def test_several_rounds_and_likelihoods_are_refused(model):
    with pytest.raises(NotImplementedError, match="made_up asks in several rounds"):
        model.generate_until_multi_round([request(0)])
    with pytest.raises(NotImplementedError, match="made_up compares likelihoods"):
        model.loglikelihood([request(0)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prune": 0.5}, "model_args has prune, which the model stts does not know"),
        ({"batch_size": "auto"}, "batch_size must be a whole number of at least 1, got 'auto'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        STTS(**({"pretrained": str(checkpoint), "device": "cpu"} | options))


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"max_new_tokens": 8, "temperature": 0, "top_p": 1.0}, {"max_new_tokens": 8, "do_sample": False}),
        (
            {"temperature": 0.7, "top_p": 0.9, "image_aspect_ratio": "pad"},
            {"max_new_tokens": 1024, "do_sample": True, "temperature": 0.7, "top_p": 0.9},
        ),
        ({"do_sample": True}, {"max_new_tokens": 1024, "do_sample": True}),
    ],
)
def test_generation_settings_of_tasks(asked, options):
    assert generation_options(asked) == (options, [])


def test_an_answer_ends_before_what_the_task_stops_at(ask, rows):
    question, options = [text("Hello there, what is it?")], {"max_new_tokens": 16}
    [whole] = ask(question, **options)
    assert len(whole) > 2
    assert ask(question, **options, until=[whole[1:3], "never said", ""]) == [whole[0]]
    assert generation_options({"until": "\n"})[1] == ["\n"]
    assert result_of(Answer(error=ValueError("gone")), ["\n"]).text == ""


def leaves(manager: TaskManager, name: str | dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every task of a task or group of lmms-eval with its configuration, without its functions."""
    name = name if isinstance(name, str) else name["task"]
    if manager.task_index[name]["type"] == "task":
        return {name: load_yaml_config(manager.task_index[name]["yaml_path"], mode="simple")}
    return {
        task: config for part in manager._get_config(name)["task"] for task, config in leaves(manager, part).items()
    }


def test_code_of_the_papers_benchmarks_can_be_imported(manager, tmp_path):
    """With HF_HOME, the extra `benchmarks` and, for MathVista, a key: in a process that lmms-eval is fresh in."""
    files = {
        task: manager.task_index[task]["yaml_path"]
        for group in ("video", "image")
        for task in leaves(manager, f"stts_{group}")
    }
    code = (
        "import json, sys, nltk\nnltk.download = lambda *_, **__: None\nfrom lmms_eval.utils import load_yaml_config\n"
    )
    code += "for file in json.loads(sys.argv[1]): load_yaml_config(file)"
    environment = os.environ | {"HF_HOME": str(tmp_path), "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-c", code, json.dumps([*files.values()])]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_every_task_of_the_papers_lists_has_its_column(manager):
    tables = runpy.run_path(str(EXAMPLES / "paper" / "table.py"))["TABLES"]
    columns = [column for groups in tables for group in groups.values() for column in group.values()]
    tasks = {name: config for group in ("video", "image") for name, config in leaves(manager, f"stts_{group}").items()}
    for column in columns:
        found = [tasks.pop(name) for name in list(tasks) if column.has(name)]
        assert len(found) == column.number
        assert all(column.metric in [metric["metric"] for metric in config["metric_list"]] for config in found)
    assert not tasks


def test_the_papers_table_reads_what_lmms_eval_writes(results, capsys, tmp_path):
    """A run of the local task under the name of a benchmark."""
    written = {name: results[name] for name in ("results", "n-samples", "efficiency", "throughput", "config", "date")}
    renamed = json.dumps(written).replace("stts_local", "lvbench").replace("accuracy,none", "lvbench_score,none")
    (tmp_path / "a_results.json").write_text(renamed)
    status = runpy.run_path(str(EXAMPLES / "paper" / "table.py"))["main"]([str(tmp_path)])
    printed = capsys.readouterr()
    right = 100 * results["results"]["stts_local"]["accuracy,none"]
    assert f"| {right:.1f} |" in printed.out
    assert status == 1
    assert "lvbench: some questions of its run were asked without a video" in printed.err  # two of them are
    assert "could not be asked" not in printed.err


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("stts_longvideobench_sub", "longvideobench_val_v"), ("stts_videomme_sub", "videomme_w_subtitle")],
)
def test_tasks_with_subtitles_are_lmms_evals_but_for_the_prompt(manager, ours, theirs):
    [ours], [theirs] = (leaves(manager, task).values() for task in (ours, theirs))
    for name in ("dataset_path", "dataset_kwargs", "test_split", "doc_to_target", "generation_kwargs"):
        assert ours[name] == theirs[name]
    assert [metric["metric"] for metric in ours["metric_list"]] == [
        metric["metric"] for metric in theirs["metric_list"]
    ]


@pytest.fixture
def subtitled(monkeypatch, tmp_path) -> tuple[dict[str, Any], Path]:
    """The functions of the tasks with subtitles, and a video of 10.5 s: of 3 frames, 0, 5 and 10 s are shown."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "videos").mkdir()
    write_clip(tmp_path / "videos" / "a.mp4", 21, fps=2)
    names = runpy.run_path(str(EXAMPLES / "paper" / "subtitles.py"))
    found = {name: lambda doc: [str(tmp_path / "videos" / "a.mp4")] for name in names if name.endswith("doc_to_visual")}
    names["_ask"].__globals__.update(found)
    return names, tmp_path


def said(messages: list[dict[str, Any]]) -> str:
    [message] = messages
    video, text = message["content"]
    assert video["type"] == "video"
    assert Path(video["url"]).name == "a.mp4"
    return text["text"]


def test_subtitles_of_longvideobench_near_the_frames(subtitled):
    names, folder = subtitled
    (folder / "subtitles").mkdir()
    doc = {"question": "Who?", "option0": "he", "option1": "she", "duration": 10.5, "subtitle_path": "a.json"}
    doc |= {f"option{number}": "N/A" for number in (2, 3, 4)} | {"starting_timestamp_for_subtitles": 5}
    settings = {"pre_prompt": "", "post_prompt": "Answer.", "num_frames": 3, "max_fps": 2}
    question = "Who?\nA. he\nB. she\nAnswer."
    both = [
        [
            {"timestamp": [1, 3.5], "text": "before"},
            {"timestamp": [4, 6.5], "text": "Hello"},
            {"timestamp": [7, 8.5], "text": "between two frames"},
            {"timestamp": [14.0, None], "text": "there"},
        ],
        [
            {"start": "00:00:01.000", "end": "00:00:03.500", "line": "before"},
            {"start": "00:00:04.000", "end": "00:00:06.500", "line": "Hello"},
            {"start": "00:00:07.000", "end": "00:00:08.500", "line": "between two frames"},
            {"start": "00:00:14.000", "end": "00:00:15.500", "line": "there"},
            {"start": "00:00:17.000", "end": "00:00:18.000", "line": "after"},
        ],
    ]
    for lines in both:
        (folder / "subtitles" / "a.json").write_text(json.dumps(lines))
        text = said(names["longvideobench_doc_to_messages"](doc, settings))
        assert text.startswith("0.0 - 1.5 Hello\n9.0 - 10.5 there\n")
        assert text.endswith(question)
        assert "before" not in text
        assert "between" not in text
        assert "between" in said(names["longvideobench_doc_to_messages"](doc, settings | {"num_frames": 64}))
    (folder / "subtitles" / "a.json").write_text("[]")
    assert said(names["longvideobench_doc_to_messages"](doc, settings)) == question


def test_subtitles_of_videomme_near_the_frames(subtitled):
    names, folder = subtitled
    (folder / "subtitle").mkdir()
    doc = {"videoID": "a", "question": "Who?", "options": ["A. he", "B. she"]}
    settings = {"post_prompt": "The best answer is:", "num_frames": 3, "max_fps": 2}
    alone = said(names["videomme_doc_to_messages"](doc, settings))
    assert alone.endswith("\nWho?\nA. he\nB. she\nThe best answer is:")
    cue = '{}\n00:00:{},000 --> 00:00:{},500\n<font color="white" size=".72c">{}</font>\n\n'
    lines = [cue.format(1, "03", "03", "between"), cue.format(2, "04", "04", "Hello"), cue.format(3, "11", "12", "end")]
    (folder / "subtitle" / "a.srt").write_text("".join(lines))
    assert said(names["videomme_doc_to_messages"](doc, settings)) == f"4.0 - 4.5 Hello\n11.0 - 12.5 end\n{alone}"
