"""What a study is: its settings, its runs in the order in which they tell most, and what each run's weights are asked.

A run trains one method at one pruning ratio, layer and seed from the base checkpoint, and then answers all questions
that any table needs of its weights. So runs need nothing of each other and may be done in any order, by any process.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stts_hf import STTSConfig
from stts_hf.checkpoints.files import fingerprint
from stts_hf.evaluation.methods import METHODS
from stts_hf.evaluation.study_data import (
    StudyError,
    check_dataset,
    describe_questions,
    fingerprint_dataset,
    read_object,
    write_json,
)
from stts_hf.training.arguments import PAPER_LEARNING_RATES
from stts_hf.training.arguments import PARTS as MODEL_PARTS

FORMAT = 3  # of a study's folder and records; 3: data sets of format 2, and no marks for what could not be asked
SETTINGS, QUESTIONS, RECORDS, ALL_RECORDS = "study.json", "questions.json", "records", "records.jsonl"
MAIN_RATIO = 0.5  # the paper's, of every table that is not about ratios

UNPRUNED = "none"
FIRST = ("none", "stts", "random", "cosine")  # of several methods, so that half a study tells the more
DEGRADING = ("random", "cosine", "stts", "stts-no-temporal", "tome")
SCALED = (UNPRUNED, "stts", "random")
IMAGES = (UNPRUNED, "stts")
# Those of the configuration that no run decides over.
MODEL_SETTINGS = ("temporal_loss_weight", "detach_temporal_target", "score_rescaling", "pruned_position_ids", "packing")
SCORED = ("stts", "stts-no-temporal", "cosine", "random")
PARTS = ("methods", "ratios", "layers", "scaling", "images", "motion")


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    What a study is done with. `GROWING` may get more values later; the rest stays for as long as its folder.

    dataset, base: fingerprints of the data set and of the base checkpoint. base_layer: the pruning layer `l` of the
    base, which every run has that is not about layers. steps, batch_size: of training; a row is a clip with its
    conversation. scorer_steps: of a new scorer by the temporal loss alone, before all learn together; none where the
    method has no such loss. learning_rates: peak of each part, under a cosine schedule with `warmup_steps`.
    without_options: whether questions with options are asked without them. model_settings: of the model's
    configuration, such as `temporal_loss_weight`; a method's own come before them.
    """

    dataset: str
    base: str
    base_layer: int
    steps: int = 200
    batch_size: int = 16
    warmup_steps: int = 10
    scorer_steps: int = 0
    without_options: bool = False
    learning_rates: dict[str, float] = dataclasses.field(default_factory=lambda: dict(PAPER_LEARNING_RATES))
    model_settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    ratios: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9)
    layers: tuple[int, ...] = (0, 1, 2, 3)
    layer_ratios: tuple[float, ...] = (MAIN_RATIO,)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise StudyError(f"{_option(name)} is {getattr(self, name)}, but must be at least 1")
        if self.scorer_steps < 0:
            raise StudyError(f"--scorer-steps is {self.scorer_steps}, but must be at least 0")
        if self.warmup_steps >= self.steps:
            raise StudyError(
                f"--warmup-steps is {self.warmup_steps}, but must be less than the {self.steps} steps of a run"
            )
        if unknown := sorted(self.learning_rates.keys() - set(MODEL_PARTS)):
            raise StudyError(f"--learning-rates names {unknown[0]!r}; the parts are {', '.join(MODEL_PARTS)}")
        for part, rate in self.learning_rates.items():
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < float("inf"):
                raise StudyError(
                    f"--learning-rates gives {part!r} the rate {rate!r}; it must be a number of at least 0"
                )
        if unknown := sorted(self.model_settings.keys() - set(MODEL_SETTINGS)):
            raise StudyError(f"--model-settings names {unknown[0]!r}; it may name {', '.join(MODEL_SETTINGS)}")
        if MAIN_RATIO not in self.ratios:
            raise StudyError(f"--ratios must hold {MAIN_RATIO}, at which the methods are compared")
        for name in ("ratios", "layer_ratios"):
            for ratio in getattr(self, name):
                if not 0 < ratio < 1:
                    raise StudyError(f"{_option(name)} holds {ratio}, but a ratio must be above 0 and below 1")
        if negative := [seed for seed in self.seeds if seed < 0]:
            raise StudyError(f"--seeds holds {negative[0]}, but a seed must be at least 0")

    @property
    def fingerprint(self) -> str:
        """Of all that stays: records of other settings are not this study's."""
        fixed = {name: value for name, value in dataclasses.asdict(self).items() if name not in GROWING}
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


GROWING = ("seeds", "ratios", "layers", "layer_ratios")


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: a method (a key of `METHODS`), the share `k` it drops after layer `l`, and the seed."""

    method: str
    pruning_ratio: float
    pruning_layer: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{100 * self.pruning_ratio:g}-layer{self.pruning_layer}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a run's weights are asked: as which method, at which ratio, and with frames for which share dropped."""

    method: str
    pruning_ratio: float
    scaling: float = 0.0

    @property
    def name(self) -> str:
        scaled = f"-frames-for-{100 * self.scaling:g}" if self.scaling else ""
        return f"{self.method}-{100 * self.pruning_ratio:g}{scaled}"


def plan(settings: Settings, parts: Sequence[str] = PARTS) -> list[Run]:
    """All runs of these parts: of the first seed first, and of each seed the parts in the order of `PARTS`."""
    chosen = [part for part in PARTS if part in parts]
    runs = (run for seed in settings.seeds for part in chosen for run in _runs(settings, part, seed))
    return list(dict.fromkeys(runs))


def _runs(settings: Settings, part: str, seed: int) -> Iterator[Run]:
    def run(method: str, ratio: float = MAIN_RATIO, layer: int = settings.base_layer) -> Run:
        return Run(method, METHODS[method].settings.get("pruning_ratio", ratio), layer, seed)

    if part == "ratios":
        yield from (run(method, ratio) for ratio in sorted(settings.ratios) for method in DEGRADING)
    elif part == "layers":
        yield from (run("stts", ratio, layer) for ratio in settings.layer_ratios for layer in settings.layers)
    else:
        trained = [name for name, method in METHODS.items() if method.trained]
        of_part = {"methods": trained, "scaling": SCALED, "images": IMAGES, "motion": SCORED}[part]
        yield from map(run, sorted(of_part, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)))


def evaluations(run: Run, settings: Settings) -> list[Evaluation]:
    """All that the run's weights are asked, its own method first."""
    asked = [Evaluation(run.method, run.pruning_ratio)]
    if run.method == UNPRUNED:
        untrained = [name for name, method in METHODS.items() if not method.trained]
        asked += [Evaluation(name, ratio) for name in untrained for ratio in settings.ratios]
    if run.method in SCALED and run.pruning_ratio in (0.0, MAIN_RATIO) and run.pruning_layer == settings.base_layer:
        asked.append(Evaluation(run.method, run.pruning_ratio, scaling=MAIN_RATIO))
    return asked


def is_scored(run: Run, settings: Settings) -> bool:
    """Whether the run's scores are compared with what moves."""
    return run.method in SCORED and run.pruning_ratio == MAIN_RATIO and run.pruning_layer == settings.base_layer


@dataclasses.dataclass(frozen=True)
class Study:
    """A study's folder with the data set and the base checkpoint that it was begun with."""

    folder: Path
    settings: Settings
    dataset: Path
    base: Path

    def record_of(self, run: Run) -> Path:
        """Where the run's record is, once it is done or has failed."""
        return self.folder / RECORDS / f"{run.name}.json"

    def read_record(self, run: Run) -> dict[str, Any] | None:
        """The run's record; None where there is none, or another process deletes it to try the run again."""
        path = self.record_of(run)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return self._copied.get(run.name)
        return parse_record(str(path), text, self.settings)

    @functools.cached_property
    def _copied(self) -> dict[str, dict[str, Any]]:
        """Of a report that is gone on with as a study: the runs that were done in it."""
        return {name: it for name, it in _read_copied(self.folder, self.settings).items() if "failed" not in it}

    def has_failed(self, run: Run) -> bool:
        return "failed" in (self.read_record(run) or {})

    def is_over(self, run: Run) -> bool:
        """Whether the run failed, or was asked all there is; with ratios that came later, there is more."""
        record = self.read_record(run)
        if record is None:
            return False
        asked = record["evaluations"].keys() >= {it.name for it in evaluations(run, self.settings)}
        scored = "motion" in record or not is_scored(run, self.settings)
        return "failed" in record or (asked and scored)


def open_study(folder: Path, dataset: Path, base: Path, given: Mapping[str, Any], *, write: bool = True) -> Study:
    """
    The study in `folder`, begun there if need be. given: fields of `Settings`; the others are as before, or defaults.
    write: False leaves the folder as it is, without values that are new.

    Raises `StudyError` for a data set or checkpoint that cannot be used, and where either, or a setting, is not what
    the study was begun with. Values of `GROWING` are added to those there are. A report's folder is a
    study, too, whose runs of `records.jsonl` are done.
    """
    description = check_dataset(dataset)
    given = dict(given) | {"dataset": fingerprint_dataset(dataset), "base": fingerprint_base(base)}
    config = _read_config(base)
    given["base_layer"] = config.vision_config.pruning_layer
    if (folder / SETTINGS).exists():
        before = read_settings(folder)
        for name in GROWING:
            given[name] = tuple(dict.fromkeys((*getattr(before, name), *given.get(name, ()))))
        for name, value in given.items():
            if name not in GROWING and value != getattr(before, name):
                raise StudyError(_changed(folder, name, getattr(before, name), value))
        settings = dataclasses.replace(before, **given)
    else:
        settings = Settings(**given)
    _check_layers(settings.layers, config)
    questions = describe_questions(dataset, description, settings.without_options)
    read_records(folder, settings)  # what cannot be read is refused before anything is written
    if write:
        write_json(folder / QUESTIONS, questions)
        write_json(folder / SETTINGS, {"format": FORMAT, **dataclasses.asdict(settings)})
    return Study(folder, settings, dataset, base)


def _read_config(base: Path) -> STTSConfig:
    try:
        return STTSConfig.from_pretrained(base)
    except (ValueError, OSError) as error:
        raise StudyError(f"--base {base} has a config.json that cannot be used: {error}") from error


def _check_layers(layers: Sequence[int], config: STTSConfig) -> None:
    """The layer after `l` takes the score bias, so the connector must read that one or a later one."""
    count = config.vision_config.num_hidden_layers
    last = max(layer % count for layer in config.adapter_config.vision_feature_layer or [-1]) - 1
    for layer in layers:
        if not 0 <= layer <= last:
            raise StudyError(
                f"--layers holds {layer}, but the base's ViT has {count} layers, of which the last that is used is "
                f"{last + 1}, counted from 0: name layers from 0 to {last}"
            )


def _changed(folder: Path, name: str, before: Any, now: Any) -> str:
    if name in ("dataset", "base", "base_layer"):
        what = "data set" if name == "dataset" else "base checkpoint"
        return (
            f"{_option(name.removesuffix('_layer'))} is another {what} than {folder} was begun with ({before}, now "
            f"{now}): pass the one it was begun with, or begin another study in another folder"
        )
    return (
        f"{_option(name)} is {now}, but {folder} was begun with {before}: leave the option out to go on with that, or "
        "begin another study in another folder"
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_settings(folder: Path) -> Settings:
    """The settings of the study in `folder`. Raises `StudyError` where there is none, or one of another version."""
    content = read_object(folder / SETTINGS)
    if (number := content.pop("format", None)) != FORMAT:
        raise StudyError(_of_another_format(folder / SETTINGS, number))
    names = {field.name for field in dataclasses.fields(Settings)}
    if content.keys() != names:
        odd = sorted(content.keys() ^ names)
        raise StudyError(f"{folder / SETTINGS} lacks settings or has unknown ones ({', '.join(odd)}): restore the file")
    content |= {name: tuple(content[name]) for name in GROWING}
    return Settings(**content)


def command_of(settings: Settings) -> str:
    """The command that does all of the study; what is as by default is left out."""
    defaults = Settings(settings.dataset, settings.base, settings.base_layer)
    words = ["stts-hf study FOLDER --dataset DATA --base CHECKPOINT"]
    for field in dataclasses.fields(Settings):
        value = getattr(settings, field.name)
        if value != getattr(defaults, field.name):
            if value is True:
                words.append(_option(field.name))
                continue
            pairs = [f"{name}={one}" for name, one in value.items()] if isinstance(value, dict) else value
            values = pairs if isinstance(pairs, list | tuple) else [pairs]
            words.append(" ".join([_option(field.name), *map(str, values)]))
    return " ".join(words)


def read_records(folder: Path, settings: Settings) -> dict[str, dict[str, Any]]:
    """
    All records of a study by their run's name, of `records/` and of `records.jsonl`, which a report puts them into.
    Raises `StudyError` for one that cannot be read, or that is of other settings.
    """
    records = _read_copied(folder, settings)
    for path in sorted((folder / RECORDS).glob("*.json")):
        record = parse_record(str(path), path.read_bytes(), settings)
        name = Run(**record["run"]).name
        if "failed" not in record or "failed" in records.get(name, record):  # a run that is done is not shadowed
            records[name] = record
    return records


def _read_copied(folder: Path, settings: Settings) -> dict[str, dict[str, Any]]:
    path, records = folder / ALL_RECORDS, {}
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    for number, line in enumerate(lines, 1):
        record = parse_record(f"{path}:{number}", line, settings, "that line")
        records[Run(**record["run"]).name] = record
    return records


def parse_record(place: str, text: bytes, settings: Settings, what: str = "it") -> dict[str, Any]:
    """The record in `text`. Raises `StudyError` where that is none, or of another format or other settings."""
    try:
        record = json.loads(text)
        number, of_study = record["format"], record["study"]
        if number == FORMAT:
            Run(**record["run"])
    except (ValueError, TypeError, KeyError) as error:
        raise StudyError(
            f"{place} is no record of a study ({error}): restore the file, or delete {what}, and its run is done again"
        ) from None
    if number != FORMAT:
        raise StudyError(_of_another_format(place, number))
    if of_study != settings.fingerprint:
        raise StudyError(f"{place} is of a study with other settings: move it elsewhere")
    return record


def _of_another_format(path: object, number: Any) -> str:
    return (
        f"{path} is of format {number}, and this version of stts-hf reads and writes {FORMAT}, whose figures do not "
        "compare with others: begin a study in another folder"
    )


def fingerprint_base(base: Path) -> str:
    """Of weights, configuration, tokenizer and processor. Raises `StudyError` where there is no checkpoint."""
    if not (base / "config.json").is_file() or not any(base.glob("*.safetensors")):
        raise StudyError(f"--base {base} is no checkpoint: it must be a folder with config.json and *.safetensors")
    return fingerprint(base)
