"""A study: its settings, its runs, the questions that each run's weights are asked, and the records of what is done."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stts_hf.checkpoints.files import fingerprint
from stts_hf.model_parts import PARTS as MODEL_PARTS
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.training.arguments import PAPER_LEARNING_RATES

from .data import StudyError, check_dataset, describe_questions, fingerprint_dataset, read_object, write_json
from .methods import METHODS, PARTS, UNPRUNED, methods_of

FORMAT = 3  # of a study's folder and records; 3: data sets of format 2, and no marks for what could not be asked
SETTINGS, QUESTIONS, RECORDS, ALL_RECORDS = "study.json", "questions.json", "records", "records.jsonl"
MAIN_RATIO = 0.5  # the paper's, of every table that is not about ratios
FIRST = (UNPRUNED, "stts", "random", "cosine")  # of several methods, so that half a study tells the more
# Fields of the model's configuration that runs may share; a method's own settings come before them.
MODEL_SETTINGS = ("temporal_loss_weight", "detach_temporal_target", "score_rescaling", "pruned_position_ids", "packing")
GROWING = ("seeds", "ratios", "layers", "layer_ratios")  # settings that may get more values later


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    Settings of a study, fixed for as long as its folder, but for `GROWING`.

    dataset, base: fingerprints of the data set and of the base checkpoint. base_layer: pruning layer `l` of the base
    and of all runs that are not about layers. steps, batch_size: of training; a row is a clip with its conversation.
    scorer_steps: steps in which a new scorer learns the temporal loss alone, before all parameters train; skipped by
    methods without that loss. learning_rates: peak of each part, under a cosine schedule with `warmup_steps`.
    without_options: ask multiple-choice questions without showing the options. model_settings: fields of the model's
    configuration, such as `temporal_loss_weight`.
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
        if self.warmup_steps >= self.steps:
            raise StudyError(f"--warmup-steps is {self.warmup_steps}, but must be less than --steps {self.steps}")
        for name, known in (("learning_rates", MODEL_PARTS), ("model_settings", MODEL_SETTINGS)):
            if unknown := sorted(getattr(self, name).keys() - set(known)):
                raise StudyError(f"{_option(name)} names {unknown[0]!r}, but may name {', '.join(known)}")
        if MAIN_RATIO not in self.ratios:
            raise StudyError(f"--ratios must hold {MAIN_RATIO}, at which the methods are compared")

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the fixed settings. Records of other settings belong to another study."""
        fixed = {name: value for name, value in dataclasses.asdict(self).items() if name not in GROWING}
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: a method (a key of `METHODS`), the ratio `k` of dropped blocks, the pruning layer `l`, a seed."""

    method: str
    pruning_ratio: float
    pruning_layer: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{100 * self.pruning_ratio:g}-layer{self.pruning_layer}-seed{self.seed}"


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


def plan(settings: Settings, parts: Sequence[str] = PARTS) -> list[Run]:
    """All runs of these parts: of the first seed first, and of each seed the parts in the order of `PARTS`."""
    chosen = [part for part in PARTS if part in parts]
    runs = (run for seed in settings.seeds for part in chosen for run in _runs(settings, part, seed))
    return list(dict.fromkeys(runs))


def _runs(settings: Settings, part: str, seed: int) -> Iterator[Run]:
    methods = [method for method in methods_of(part) if method.trained]
    methods.sort(key=lambda method: FIRST.index(method.name) if method.name in FIRST else len(FIRST))
    ratios = {"ratios": sorted(settings.ratios), "layers": settings.layer_ratios}.get(part, [MAIN_RATIO])
    layers = settings.layers if part == "layers" else [settings.base_layer]
    for ratio, layer, method in itertools.product(ratios, layers, methods):
        yield Run(method.name, method.ratio(ratio), layer, seed)


def evaluations(run: Run, settings: Settings) -> list[Evaluation]:
    """How the run's weights are asked, by its own method first."""
    asked = [Evaluation(run.method, run.pruning_ratio)]
    if run.method == UNPRUNED:
        untrained = [name for name, method in METHODS.items() if not method.trained]
        asked += [Evaluation(name, ratio) for name in untrained for ratio in settings.ratios]
    if _is_main(run, settings, "scaling"):
        asked.append(Evaluation(run.method, run.pruning_ratio, scaling=MAIN_RATIO))
    return asked


def is_scored(run: Run, settings: Settings) -> bool:
    """Whether the run's scores are compared with what moves."""
    return _is_main(run, settings, "motion")


def _is_main(run: Run, settings: Settings, part: str) -> bool:
    method = METHODS[run.method]
    main = (method.ratio(MAIN_RATIO), settings.base_layer)
    return part in method.parts and (run.pruning_ratio, run.pruning_layer) == main


def is_done(record: Mapping[str, Any] | None, run: Run, settings: Settings) -> bool:
    """Whether a run's record holds all that is asked of it: with ratios that came later, it does not."""
    if record is None:
        return False
    asked = record["evaluations"].keys() >= {one.name for one in evaluations(run, settings)}
    return asked and ("motion" in record or not is_scored(run, settings))


@dataclasses.dataclass(frozen=True)
class Study:
    """A study's folder with the data set and the base checkpoint that it was begun with."""

    folder: Path
    settings: Settings
    dataset: Path
    base: Path


def open_study(folder: Path, dataset: Path, base: Path, given: Mapping[str, Any], *, write: bool = True) -> Study:
    """
    The study in `folder`, begun there if need be. given: fields of `Settings`; the others are as before, or defaults.
    write: False leaves the folder as it is. Values of `GROWING` are added to those there are.

    Raises `StudyError` for a data set or checkpoint that cannot be used, for one that is not the study's, and for a
    setting that differs from the study's.
    """
    description = check_dataset(dataset)
    given = dict(given) | {"dataset": fingerprint_dataset(dataset), "base": fingerprint_base(base)}
    config = STTSConfig.from_pretrained(base)
    given["base_layer"] = config.vision_config.pruning_layer
    if (folder / SETTINGS).exists():
        before = read_settings(folder)
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
    last = max(layer % count for layer in config.adapter_config.vision_feature_layer or [-1]) - 1
    if wrong := [layer for layer in settings.layers if not 0 <= layer <= last]:
        raise StudyError(f"--layers holds {wrong[0]}, but the base can prune after layers 0 to {last}")
    questions = describe_questions(dataset, description, settings.without_options)
    read_records(folder, settings)  # what cannot be read is refused before anything is written
    if write:
        write_json(folder / QUESTIONS, questions)
        write_json(folder / SETTINGS, {"format": FORMAT, **dataclasses.asdict(settings)})
    return Study(folder, settings, dataset, base)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_settings(folder: Path) -> Settings:
    """The settings of the study in `folder`. Raises `StudyError` where there is none, or one of another version."""
    content = read_object(folder / SETTINGS)
    if (number := content.pop("format", None)) != FORMAT:
        raise StudyError(f"{folder / SETTINGS} is of format {number}, not {FORMAT}: begin a study in another folder")
    if odd := sorted(content.keys() ^ {field.name for field in dataclasses.fields(Settings)}):
        raise StudyError(f"{folder / SETTINGS} lacks settings or has unknown ones ({', '.join(odd)}): restore the file")
    return Settings(**content | {name: tuple(content[name]) for name in GROWING})


def command_of(settings: Settings) -> str:
    """The command that does all of the study; defaults are left out."""
    defaults = Settings(settings.dataset, settings.base, settings.base_layer)
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
