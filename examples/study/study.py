"""A study: its settings, its runs, the questions that each run's weights are asked, and the records of what is done."""

import dataclasses
import hashlib
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.checkpoints.files import fingerprint
from stts_hf.model_parts import PARTS as MODEL_PARTS
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.training.arguments import PAPER_LEARNING_RATES

from .data import StudyError, check_dataset, describe_questions, fingerprint_dataset, read_object, write_json
from .methods import FROZEN, METHODS, TOLD_TOO, UNPRUNED, Method, methods_of

FORMAT = 4  # of a study's folder and records; 4: one training serves all ratios
SETTINGS, QUESTIONS, RECORDS, ALL_RECORDS = "study.json", "questions.json", "records", "records.jsonl"
MAIN = "main"  # name of the test clips of `--dataset`
MAIN_RATIO = 0.8  # of every table that is not about ratios
SCALING_RATIO = 0.5  # whose saved tokens pay for more frames: the base has seen twice as many, and not more
FIRST = (UNPRUNED, *TOLD_TOO, "cosine", FROZEN, "random", "stts")  # of several runs: half a study tells the more
# Fields of the model's configuration that runs may share; a method's own settings come before them.
MODEL_SETTINGS = ("temporal_loss_weight", "detach_temporal_target", "score_rescaling", "pruned_position_ids", "packing")
GROWING = ("seeds", "ratios", "layers")  # settings that may get more values later
TUPLES = (*GROWING, "ratio_range", "mask_ratios")
SPLITS = ("test", "validation")
ASSUMED_SECONDS = 1800  # of a run, before one is done


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    Settings of a study, fixed for as long as its folder, but for `GROWING`.

    dataset, base: fingerprints of the data set and of the base checkpoint. base_layer: pruning layer `l` of the base
    and of all runs that are not about layers. backbone: its model type. tests: fingerprints of further data sets whose
    test clips are asked about too, by name. split: whose clips are asked about, "validation" while settings are chosen.
    steps, batch_size: of training; a row is a clip with its conversation. ratio_range: between which each video draws
    its pruning ratio in training. learning_rates: peak of each part, under a cosine schedule with `warmup_steps`.
    scorer_rate: peak while a new scorer learns alone, before all else: `scorer_steps` by the temporal loss, or
    `answers_steps` by `num_masks` keep masks of a clip in each of `mask_rounds`, which drop shares between
    `mask_ratios`; answer_loss: what a mask costs. without_options: ask multiple-choice questions without showing the
    options. model_settings: fields of the model's configuration, such as `temporal_loss_weight`. layers: further ones.
    """

    dataset: str
    base: str
    base_layer: int
    backbone: str = STTSConfig.model_type
    tests: dict[str, str] = dataclasses.field(default_factory=dict)
    split: str = SPLITS[0]
    steps: int = 200
    batch_size: int = 16
    warmup_steps: int = 10
    ratio_range: tuple[float, ...] = (0.1, 0.95)
    scorer_rate: float = 2e-3
    scorer_steps: int = 0
    answers_steps: int = 2000
    mask_ratios: tuple[float, ...] = (0.5, 0.9)
    num_masks: int = 12
    mask_rounds: int = 2
    answer_loss: str = "divergence"
    without_options: bool = False
    learning_rates: dict[str, float] = dataclasses.field(default_factory=lambda: dict(PAPER_LEARNING_RATES))
    model_settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    ratios: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9)
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.warmup_steps >= self.steps:
            raise StudyError(f"--warmup-steps is {self.warmup_steps}, but must be less than --steps {self.steps}")
        for name, known in (("learning_rates", MODEL_PARTS), ("model_settings", MODEL_SETTINGS)):
            if unknown := sorted(getattr(self, name).keys() - set(known)):
                raise StudyError(f"{_option(name)} names {unknown[0]!r}, but may name {', '.join(known)}")
        if MAIN_RATIO not in self.ratios:
            raise StudyError(f"--ratios must hold {MAIN_RATIO}, at which the methods are compared")
        if MAIN in self.tests:
            raise StudyError(f"--tests names {MAIN!r}, which is the test clips of --dataset: take another name")

    @property
    def looks(self) -> tuple[str, ...]:
        """Names of the sets of clips that are asked about."""
        return MAIN, *self.tests

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the fixed settings. Records of other settings belong to another study."""
        fixed = {name: value for name, value in dataclasses.asdict(self).items() if name not in GROWING}
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: a method (a key of `METHODS`), the pruning layer `l`, a seed."""

    method: str
    pruning_layer: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-layer{self.pruning_layer}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How a run's weights are asked: method, ratio, and the ratio whose saved tokens pay for more frames."""

    method: str
    pruning_ratio: float
    scaling: float = 0.0

    @property
    def name(self) -> str:
        scaled = f"-frames-for-{100 * self.scaling:g}" if self.scaling else ""
        return f"{self.method}-{100 * self.pruning_ratio:g}{scaled}"


def plan(settings: Settings, only: Sequence[str] = ()) -> list[Run]:
    """All runs, or those that ask the methods in `only`: of the first seed first, and of each seed `FIRST` first."""
    wanted = {name if METHODS[name].has_runs else FROZEN for name in only or METHODS}
    methods = [method for method in METHODS.values() if method.name in wanted and _fits(method, settings)]
    methods.sort(key=lambda method: FIRST.index(method.name) if method.name in FIRST else len(FIRST))
    runs = []
    for seed in settings.seeds:
        runs += [Run(method.name, settings.base_layer, seed) for method in methods]
        varied = [method for method in methods if method in methods_of("layers")]
        runs += [Run(method.name, layer, seed) for layer, method in itertools.product(settings.layers, varied)]
    return list(dict.fromkeys(runs))


def evaluations(run: Run, settings: Settings, only: Sequence[str] = ()) -> list[Evaluation]:
    """How the run's weights are asked, by its own method first. only: methods to ask, if not all."""
    method = METHODS[run.method]
    asked = [Evaluation(method.name, method.ratio(ratio)) for ratio in settings.ratios]
    if run.method == FROZEN:
        others = [other for other in METHODS.values() if not other.has_runs]
        others = [other for other in others if run.seed == settings.seeds[0] or not other.ignores_seeds]
        asked += [Evaluation(other.name, other.ratio(ratio)) for other in others for ratio in settings.ratios]
    if run.method in TOLD_TOO and run.pruning_layer == settings.base_layer:
        asked += [Evaluation(other.name, MAIN_RATIO) for other in METHODS.values() if other.told]
    if _takes_part(run, settings, "scaling"):
        asked.append(Evaluation(method.name, method.ratio(SCALING_RATIO), scaling=SCALING_RATIO))
    asked = [one for one in asked if _fits(METHODS[one.method], settings)]
    return list(dict.fromkeys(one for one in asked if not only or one.method in only))


def _fits(method: Method, settings: Settings) -> bool:
    """Whether the backbone has a method: ToMe is Molmo2's, and the data set's masks are of the frames that it sees."""
    return settings.backbone == STTSConfig.model_type or not (method.told or method.merges)


def is_scored(run: Run, settings: Settings) -> bool:
    """Whether the run's scores are compared with what moves."""
    return _takes_part(run, settings, "motion")


def _takes_part(run: Run, settings: Settings, part: str) -> bool:
    here = settings.backbone == STTSConfig.model_type and run.pruning_layer == settings.base_layer
    return here and part in METHODS[run.method].parts


def is_done(record: Mapping[str, Any] | None, run: Run, settings: Settings, only: Sequence[str] = ()) -> bool:
    """Whether a run's record holds all that is asked of it: with ratios or methods that came later, it does not."""
    asked = {one.name for one in evaluations(run, settings, only)}
    return not asked or (record is not None and record["evaluations"].keys() >= asked)


def expected_hours(records: Mapping[str, Mapping[str, Any]], left: Sequence[Run], workers: int) -> tuple[float, str]:
    """Hours that the runs in `left` take, `workers` at a time, and from what that is reckoned."""
    seconds: dict[str, list[float]] = {}
    for record in records.values():
        seconds.setdefault(record["run"]["method"], []).append(record["seconds"])
    every = [one for some in seconds.values() for one in some]
    source = f"the seconds of {len(every)} runs that are done" if every else f"{ASSUMED_SECONDS} s a run, not measured"
    total = sum(statistics.median(seconds.get(run.method) or every or [ASSUMED_SECONDS]) for run in left)
    return total / workers / 3600, source


@dataclasses.dataclass(frozen=True)
class Study:
    """A study's folder with the data set and the base checkpoint that it was begun with, and further test clips."""

    folder: Path
    settings: Settings
    dataset: Path
    base: Path
    tests: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    @property
    def looks(self) -> dict[str, Path]:
        """Data sets whose clips are asked about, by name."""
        return {MAIN: self.dataset, **self.tests}

    @property
    def questions_file(self) -> str:
        return f"{self.settings.split}.jsonl"


def open_study(
    folder: Path,
    dataset: Path,
    base: Path,
    given: Mapping[str, Any],
    *,
    tests: Mapping[str, Path] | None = None,
    write: bool = True,
) -> Study:
    """
    The study in `folder`, begun there if need be. given: fields of `Settings`; the others are as before, or defaults.
    tests: further data sets whose test clips are asked about, by name. write: False leaves the folder as it is. Values
    of `GROWING` are added to those there are.

    Raises `StudyError` for a data set or checkpoint that cannot be used, for one that is not the study's, and for a
    setting that differs from the study's.
    """
    tests = dict(tests or {})
    before = read_settings(folder) if (folder / SETTINGS).exists() else None
    split = given.get("split", before.split if before else SPLITS[0])
    for path in (dataset, *tests.values()):
        check_dataset(path, f"{split}.jsonl")
    given = dict(given) | {"dataset": fingerprint_dataset(dataset), "base": fingerprint_base(base)}
    given["tests"] = {name: fingerprint_dataset(path) for name, path in tests.items()}
    config = family_of_checkpoint(base).config.from_pretrained(base)
    given |= {"base_layer": config.vision_config.pruning_layer, "backbone": config.model_type}
    if before:
        for name in GROWING:
            given[name] = tuple(dict.fromkeys((*getattr(before, name), *given.get(name, ()))))
        for name, value in given.items():
            if name not in GROWING and value != getattr(before, name):
                raise StudyError(
                    f"{_option(name.removesuffix('_layer'))} is {value}, but {folder} was begun with "
                    f"{getattr(before, name)}: pass that, or begin another study in another folder"
                )
        settings = dataclasses.replace(before, **given)
    else:
        settings = Settings(**given)
    # The layer after `l` takes the score bias, so the connector must read that one or a later one.
    count = config.vision_config.num_hidden_layers
    read = getattr(getattr(config, "adapter_config", None), "vision_feature_layer", None) or [-1]
    last = max(layer % count for layer in read) - 1
    if wrong := [layer for layer in settings.layers if not 0 <= layer <= last]:
        raise StudyError(f"--layers holds {wrong[0]}, but the base can prune after layers 0 to {last}")
    study = Study(folder, settings, dataset, base, tests)
    looks = {
        name: describe_questions(path, settings.without_options, study.questions_file)
        for name, path in study.looks.items()
    }
    read_records(folder, settings)  # what cannot be read is refused before anything is written
    if write:
        write_json(folder / QUESTIONS, looks)
        write_json(folder / SETTINGS, {"format": FORMAT, **dataclasses.asdict(settings)})
    return study


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_settings(folder: Path) -> Settings:
    """The settings of the study in `folder`. Raises `StudyError` if there is none, or one of another version."""
    content = read_object(folder / SETTINGS)
    if (number := content.pop("format", None)) != FORMAT:
        raise StudyError(f"{folder / SETTINGS} is of format {number}, not {FORMAT}: begin a study in another folder")
    if odd := sorted(content.keys() ^ {field.name for field in dataclasses.fields(Settings)}):
        raise StudyError(f"{folder / SETTINGS} lacks settings or has unknown ones ({', '.join(odd)}): restore the file")
    return Settings(**content | {name: tuple(content[name]) for name in TUPLES})


def command_of(settings: Settings) -> str:
    """The command that does all of the study; defaults are left out."""
    defaults = Settings(settings.dataset, settings.base, settings.base_layer, settings.backbone)
    words = ["python -m examples.study run FOLDER --dataset DATA --base CHECKPOINT"]
    for field in dataclasses.fields(Settings):
        value = getattr(settings, field.name)
        if value == getattr(defaults, field.name):
            continue
        if isinstance(value, dict):
            value = [f"{name}={one}" for name, one in value.items()]
        values = [] if value is True else value if isinstance(value, list | tuple) else [value]
        words.append(" ".join([_option(field.name), *map(str, values)]))
    return " ".join(words)


def read_records(folder: Path, settings: Settings) -> dict[str, dict[str, Any]]:
    """
    All records of a study by their run's name: of `records.jsonl`, which a report puts them into, and of `records/`.
    Raises `StudyError` for one that cannot be read, or that is of other settings.
    """
    records, texts = {}, {}
    if (copied := folder / ALL_RECORDS).exists():
        texts = {f"{copied}:{number}": line for number, line in enumerate(copied.read_bytes().splitlines(), 1)}
    texts |= {str(path): path.read_bytes() for path in sorted((folder / RECORDS).glob("*.json"))}
    for place, text in texts.items():
        record = _parse_record(place, text, settings)
        records[Run(**record["run"]).name] = record
    return records


def _parse_record(place: str, text: bytes, settings: Settings) -> dict[str, Any]:
    try:
        record = json.loads(text)
        number, of_study = record["format"], record["study"]
        Run(**record["run"])
    except (ValueError, TypeError, KeyError) as error:
        raise StudyError(f"{place} is no record of a study ({error}): delete it, and its run is done again") from None
    if number != FORMAT:
        raise StudyError(f"{place} is of format {number}, not {FORMAT}: begin a study in another folder")
    if of_study != settings.fingerprint:
        raise StudyError(f"{place} is of a study with other settings: move it elsewhere")
    return record


def fingerprint_base(base: Path) -> str:
    """Fingerprint of weights, configuration, tokenizer and processor. Raises `StudyError` without a checkpoint."""
    if not (base / "config.json").is_file() or not any(base.glob("*.safetensors")):
        raise StudyError(f"--base {base} is no checkpoint: it must be a folder with config.json and *.safetensors")
    return fingerprint(base)
