"""A study's page: tables, a plot, and which of the claims that the study is to test the figures bear out.

It is made from the records alone, however many there are: what is missing is named, and its cells stay empty.
"""

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from stts_hf.checkpoints.atomic_folder import atomic_file
from stts_hf.evaluation.statistics import RESAMPLES, Interval, interval, table
from stts_hf.wording import percent

from .data import StudyError
from .methods import FIXED, FROZEN, METHODS, ON_FROZEN, TOLD_TOO, UNPRUNED, methods_of
from .results import AVERAGE, VIDEO_GROUPS, Answers, Results, mean_tokens
from .study import (
    ALL_RECORDS,
    MAIN_RATIO,
    QUESTIONS,
    SCALING_RATIO,
    SETTINGS,
    command_of,
    plan,
    read_records,
    read_settings,
)

TITLE = "# Study: which video tokens can go"
PAGE, PLOT = "README.md", "accuracy.png"
LEVELS = {"always the commonest answer": "text_only", "chance": "chance"}  # of `dataset.json`


def check_output(output: Path) -> None:
    """Raises `StudyError` where a report in `output` would overwrite a page that is no study's."""
    path = output / PAGE
    if path.exists() and not path.read_bytes().startswith(TITLE.encode()):
        raise StudyError(f"{path} is not a study's page, and would be overwritten: name another folder with --output")


def write_report(folder: Path, output: Path) -> None:
    """
    Writes page and plots of the study in `folder` into `output` and, where that is another folder, all records in one
    file and what else a report is made from. Raises `StudyError` where no run is done, and for what `check_output`
    refuses.
    """
    check_output(output)
    results = Results(folder)
    if not results.records:
        raise StudyError(f"{folder} holds no run that is done, so there is nothing to report")
    if (output / SETTINGS).exists() and output.resolve() != folder.resolve():
        _check_other(output, results)
    with atomic_file(output / PLOT) as new:
        draw_accuracy(results).savefig(new, dpi=110, format="png", bbox_inches="tight")
    with atomic_file(output / PAGE) as new:
        new.write_text(page(results), encoding="utf-8")
    if output.resolve() == folder.resolve():
        return
    for name in (SETTINGS, QUESTIONS):
        with atomic_file(output / name) as new:
            shutil.copy(folder / name, new)
    lines = [json.dumps(record, separators=(",", ":")) + "\n" for _, record in sorted(results.records.items())]
    with atomic_file(output / ALL_RECORDS) as new:
        new.write_text("".join(lines), encoding="utf-8")


def _check_other(output: Path, results: Results) -> None:
    """Raises `StudyError` where `output` has runs that these results lack, and which they would replace."""
    if read_settings(output).fingerprint != results.settings.fingerprint:
        raise StudyError(f"{output} holds the report of another study: name another folder with --output")
    there = read_records(output, results.settings)
    if lost := [name for name in there if name not in results.records]:
        raise StudyError(f"{output} has runs that this study has not ({lost[0]}, ...): name another with --output")


def page(results: Results) -> str:
    """The whole page, as Markdown."""
    parts = [TITLE, *header(results), "## Accuracy", f"![accuracy]({PLOT})"]
    for look in results.settings.looks:
        parts += [f"### {title_of(results, look)}", accuracy_table(results, look)]
    parts += ["## Differences", claims_table(results)]
    for look in results.settings.looks:
        parts += [f"## By type of question at {percent(MAIN_RATIO)}, {look}", types_table(results, look)]
    parts += [
        "## Cost",
        cost_table(results),
        "## Pruning layer",
        layers_table(results),
        "## Test-time scaling",
        scaling_table(results),
        "## Images",
        images_table(results),
        "## Scores against what moves",
        motion_table(results),
        "## How the figures are made",
        notes(),
    ]
    return "\n\n".join(parts) + "\n"


def title_of(results: Results, look: str) -> str:
    """A set of clips by its name and what it looks like."""
    found = results.about[look].get("look") or {}
    return look + "".join(f", {name} {found[name]}" for name in ("style", "strength", "photographs") if name in found)


def header(results: Results) -> Iterator[str]:
    """What was run, on what and where, and what is missing."""
    settings, about, done = results.settings, results.about, list(results.records.values())
    yield (
        f"Made by `{command_of(settings)}`; the page alone, from the records in this folder, by `python -m "
        "examples.study report FOLDER`."
    )
    runs = plan(settings)
    if missing := [run.name for run in runs if run.name not in results.records]:
        names = f"{', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}"
        text = f"**Unfinished**: {len(missing)} of {len(runs)} runs are missing ({names})."
        yield f"{text} Their cells are empty, or of fewer seeds."
    rates = ", ".join(f"{part} {rate:g}" for part, rate in settings.learning_rates.items())
    if settings.model_settings:
        changes = ", ".join(f"`{name}` {value}" for name, value in settings.model_settings.items())
        yield f"The model's settings but for the method's own: {changes}."
    sizes = {name: len(about[name]["questions"]) for name in settings.looks}
    asked = ", ".join(f"{number} {settings.split} questions of {look}" for look, number in sizes.items())
    yield (
        f"{len(done)} runs, seeds {', '.join(map(str, settings.seeds))}. Each starts from the base checkpoint "
        f"{settings.base} and trains {settings.steps} steps of {settings.batch_size} clips with their conversations "
        f"({settings.warmup_steps} steps of warm-up, cosine schedule, rates: {rates}). Each clip draws its share to "
        f"drop, from {percent(settings.ratio_range[0])} to {percent(settings.ratio_range[1])}. A new scorer first "
        f"learns alone, at a rate of {settings.scorer_rate:g}: {settings.scorer_steps} steps by the temporal loss, or "
        f"{settings.answers_steps} by answers ({settings.mask_rounds} x {settings.num_masks} keep masks a clip, loss: "
        f"{settings.answer_loss}). Asked: {asked}{', without options' if settings.without_options else ''}. Training "
        f"data {settings.dataset}."
    )
    machines = (record["machine"] for record in done)
    places = sorted({f"{it['cpu']}, {it['threads']} threads a run, {it['device']}" for it in machines})
    versions = {", ".join(f"{name} {text}" for name, text in record["versions"].items()) for record in done}
    hours = sum(record["seconds"] for record in done) / 3600
    yield f"{hours:.1f} hours of runs. {'; '.join(places)}. {'; '.join(sorted(versions))}."


def rows_of_methods(results: Results) -> Iterator[tuple[str, str, str | None]]:
    """Label, method, and whose weights, of each row of the tables that all methods are in which were asked."""
    rows: list[tuple[str, str, str | None]] = [(method.label, name, None) for name, method in METHODS.items()]
    for weights, (name, one) in itertools.product(TOLD_TOO, METHODS.items()):
        if one.told:
            rows.append((one.label.replace(ON_FROZEN, f"({METHODS[weights].label})"), name, weights))
    for label, name, whose in rows:
        if any(results.find(name, ratio, weights=whose) for ratio in results.settings.ratios):
            yield label, name, whose


def accuracy_table(results: Results, look: str) -> str:
    ratios, rows = sorted(results.settings.ratios), []
    for label, name, weights in rows_of_methods(results):
        found = [results.find(name, ratio, weights=weights) for ratio in ratios]
        cells = [cell(results.accuracy(answers, AVERAGE, look)) for answers in found]
        rows.append([label, *cells, str(max(map(len, found)))])
    for label, name in LEVELS.items():
        rows.append([label, *[number(results.level(name, AVERAGE, look))] * len(ratios), ""])
    return table([f"average of {', '.join(VIDEO_GROUPS)}", *map(percent, ratios), "seeds"], rows)


@dataclass(frozen=True)
class Claim:
    """That a sum of accuracies (factors and what was answered) is at least `mean`, with intervals above `low`."""

    text: str
    terms: list[tuple[int, Answers]]
    mean: float
    low: float = -math.inf

    def verdict(self, seeds: Interval, clips: Interval) -> str:
        """Whether all of the claim holds, or part of it does not; "" with one seed, which has no interval."""
        if math.isnan(seeds.low):
            return ""
        if seeds.mean < self.mean or min(seeds.high, clips.high) <= self.low:
            return "**no**"
        return "yes" if min(seeds.low, clips.low) > self.low else "undecided"

    @property
    def about(self) -> str:
        named = [("at least", self.mean), ("interval above", self.low)]
        return ", ".join(f"{text} {number:g}" for text, number in named if math.isfinite(number))


def claims(results: Results, look: str) -> Iterator[Claim]:
    """What the study is to test on a set of clips: with distraction, more than on calm clips or in the other style."""
    find, found, nothing = results.find, results.about[look].get("look") or {}, -math.inf
    hard = found.get("strength", 0) > 0 and found.get("style") == "plain"
    frozen = {0.5: nothing, 0.7: nothing, 0.8: 10 if hard else nothing, 0.9: 18 if hard else 8}
    trained = {0.5: -0.7, 0.7: nothing, 0.8: 8 if hard else nothing, 0.9: 15 if hard else 8}
    pairs = (
        ("scorer by answers - heuristic, frozen base", FROZEN, "cosine-inference", frozen),
        *((f"{METHODS[name].label} - heuristic", name, "cosine", trained) for name in TOLD_TOO),
        ("STTS - heuristic", "stts", "cosine", dict.fromkeys(trained, nothing)),
    )
    for text, first, second, least in pairs:
        for ratio, mean in least.items():
            low = 0.0 if mean > 0 else -2.0
            yield Claim(f"{text}, at {percent(ratio)}", [(1, find(first, ratio)), (-1, find(second, ratio))], mean, low)
    nothing_dropped = [(FROZEN, "none-inference"), *((name, UNPRUNED) for name in TOLD_TOO), (FIXED, "none-inference")]
    for name, other in nothing_dropped:
        text = f"{METHODS[name].label}, at 90% - {METHODS[other].label}"
        yield Claim(text, [(1, find(name, 0.9)), (-1, find(other))], -4.0)
    for name in TOLD_TOO:
        text = f"{METHODS[name].label} - told, at {percent(MAIN_RATIO)}"
        yield Claim(text, [(1, find(name)), (-1, find("told", weights=name))], -2.0)


def claims_table(results: Results) -> str:
    """What the study is to show, on each set of clips."""
    rows = []
    for look in results.settings.looks:
        for claim in claims(results, look):
            seeds, clips = (of(claim.terms, AVERAGE, look) for of in (results.combine, results.over_clips))
            if seeds is not None and clips is not None:
                cells = (cell(found, signed=True) for found in (seeds, clips))
                rows.append([claim.text, look, *cells, claim.about, claim.verdict(seeds, clips)])
    return table(["points of the average", "clips", "over seeds", "over clips", "to be", "holds"], rows)


def types_table(results: Results, look: str) -> str:
    types = list(dict.fromkeys(results.types[results.looks == look].tolist()))
    rows = []
    for label, name, weights in rows_of_methods(results):
        answers = results.find(name, weights=weights)
        rows.append([label, *(number(results.accuracy_of_type(answers, kind, look)) for kind in types)])
    for label, name in LEVELS.items():
        shares = results.about[look].get(name) or {}
        rows.append([label, *(number(100 * shares[kind] if kind in shares else None) for kind in types)])
    return table(["", *types], rows)


def cost_table(results: Results) -> str:
    rows = []
    for name, method in METHODS.items():
        if method.has_runs and results.find(name):
            seconds = (results.seconds(kind, name) for kind in ("seconds_per_step", "scorer_seconds"))
            tokens = mean_tokens(results.find(name))
            rows.append([method.label, *(number(one, 2) for one in seconds), number(tokens, 0)])
    return table(["", "s a step", "s for the scorer alone", f"LLM tokens at {percent(MAIN_RATIO)}"], rows)


def layers_table(results: Results) -> str:
    rows = []
    for method in methods_of("layers"):
        for layer in (results.settings.base_layer, *results.settings.layers):
            answers = (results.find(method.name, ratio, layer) for ratio in results.settings.ratios)
            found = (cell(results.accuracy(one)) for one in answers)
            rows.append([f"{method.label}, l = {layer}", *found])
    return table(["", *map(percent, results.settings.ratios)], rows)


def scaling_table(results: Results) -> str:
    rows = []
    for name in (method.name for method in methods_of("scaling")):
        for scaling in (0.0, SCALING_RATIO):
            answers = results.find(name, SCALING_RATIO, scaling=scaling)
            scaled = ", as many frames" if name == UNPRUNED else " with test-time scaling"
            label = METHODS[name].label + (scaled if scaling else "")
            tokens = (number(mean_tokens(answers, "long", kind), 0) for kind in ("video_tokens", "llm_tokens"))
            rows.append([label, cell(results.accuracy(answers, "long")), *tokens])
    return table([f"at {percent(SCALING_RATIO)}", "long", "video tokens", "LLM tokens"], rows)


def images_table(results: Results) -> str:
    unpruned, rows = results.find(UNPRUNED), []
    for name in (method.name for method in methods_of("images")):
        answers = results.find(name)
        over = "" if name == UNPRUNED else cell(results.difference(answers, unpruned, "image"), signed=True)
        rows.append([METHODS[name].label, cell(results.accuracy(answers, "image")), over])
    return table(["trained with", "image", "over no pruning"], rows)


def motion_table(results: Results) -> str:
    rows = [[method.label, cell(results.motion(method.name), digits=3)] for method in methods_of("motion")]
    return table(["", "Spearman's correlation"], rows)


def cell(found: Interval | None, signed: bool = False, digits: int = 1) -> str:
    """A mean with its interval; alone where it has none, as with one seed, or where no seed makes a difference."""
    if found is not None and not found.high > found.low:
        return f"{found.mean:{'+' if signed else ''}.{digits}f}"
    return interval(found, signed=signed, digits=digits)


def notes() -> str:
    return f"""\
- **Accuracy** is the mean over seeds; the average weighs {", ".join(VIDEO_GROUPS)} alike.
- **Intervals** (95 %): over seeds by Student's t, over clips by {RESAMPLES} resamples of clips. "Yes": the mean and
  both intervals are as claimed; "no": the mean or one interval is not; all else is undecided.
- **LLM tokens** are of a prompt about a video, the mean over questions. **Seconds** are the median over seeds.
- docs/study/README.md has methods, seeds, and what else the figures mean.
"""


def draw_accuracy(results: Results) -> Figure:
    """Average accuracy against the share dropped: a plot for each set of clips, a line for each method."""
    looks, ratios = results.settings.looks, sorted(results.settings.ratios)
    figure = Figure(figsize=(6 * len(looks), 4.5))
    for axes, look in zip(figure.subplots(1, len(looks), squeeze=False)[0], looks, strict=True):
        for name, method in METHODS.items():
            found = {100 * ratio: results.accuracy(results.find(name, ratio), AVERAGE, look) for ratio in ratios}
            points = {place: one for place, one in found.items() if one is not None}
            halves = [0.0 if math.isnan(one.low) else one.mean - one.low for one in points.values()]
            if points:
                style = "o-" if method.trained else "s--"
                means = [one.mean for one in points.values()]
                axes.errorbar(list(points), means, yerr=halves, fmt=style, capsize=3, label=method.label)
        axes.set(xlabel="video tokens dropped, %", ylabel="average accuracy, %", title=look)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(0.92, 0.5), fontsize=7)
    return figure


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"
