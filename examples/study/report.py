"""A study's page: the paper's tables in the numbers found, two plots, and which of the paper's claims they bear out.

It is made from the records alone, however many there are: what is missing is named, and its cells stay empty.
"""

import json
import operator
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from stts_hf.checkpoints.atomic_folder import atomic_file
from stts_hf.evaluation.statistics import RESAMPLES, Interval, interval, number, table
from stts_hf.wording import percent

from .data import StudyError
from .methods import METHODS, UNPRUNED, methods_of
from .results import AVERAGE, VIDEO_GROUPS, Answers, Results, mean_tokens
from .study import ALL_RECORDS, MAIN_RATIO, QUESTIONS, SETTINGS, command_of, plan, read_records, read_settings

TITLE = "# Study: which video tokens can go"
PAGE, DEGRADATION_PLOT, LAYERS_PLOT = "README.md", "degradation.png", "layers.png"
COLUMNS = (*VIDEO_GROUPS, AVERAGE)
TEXT_ONLY = "text-only"
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
    for name, draw in ((DEGRADATION_PLOT, draw_degradation), (LAYERS_PLOT, draw_layers)):
        with atomic_file(output / name) as new:
            draw(results).savefig(new, dpi=110, format="png", bbox_inches="tight")
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
    parts = [
        TITLE,
        *header(results),
        f"## Methods at {percent(MAIN_RATIO)}",
        methods_table(results),
        "## What the paper claims",
        claims_table(results),
        f"## By type of question, at {percent(MAIN_RATIO)}",
        types_table(results),
        "## More and more dropped",
        *(f"{column.capitalize()}:\n\n{degradation_table(results, column)}" for column in reversed(COLUMNS)),
        f"![degradation]({DEGRADATION_PLOT})",
        "## Pruning layer",
        layers_table(results),
        f"![layers]({LAYERS_PLOT})",
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
    splits = ", ".join(f"{name} {size['clips']}" for name, size in about["splits"].items())
    look = about.get("look")
    look = f"; {look['style']} style, distraction {look['strength']:g}: {', '.join(look['kinds'])}" if look else ""
    yield (
        f"{len(done)} runs, seeds {', '.join(map(str, settings.seeds))}. Each starts from the base checkpoint "
        f"{settings.base} and trains {settings.steps} steps of {settings.batch_size} clips with their conversations "
        f"({settings.warmup_steps} steps of warm-up, cosine schedule, rates: {rates}), a new scorer before that "
        f"{settings.scorer_steps} steps by the temporal loss alone, unless it has none. Data set {settings.dataset} "
        f"(clips and pictures: {splits}{look}): {len(results.types)} test questions about {len(set(results.clips))} of "
        f"them{', all asked without options' if settings.without_options else ''}."
    )
    machines = (record["machine"] for record in done)
    places = sorted({f"{it['cpu']}, {it['threads']} threads a run, {it['device']}" for it in machines})
    versions = {", ".join(f"{name} {text}" for name, text in record["versions"].items()) for record in done}
    hours = sum(record["seconds"] for record in done) / 3600
    yield f"{hours:.1f} hours of runs. {'; '.join(places)}. {'; '.join(sorted(versions))}."


def methods_table(results: Results) -> str:
    unpruned, random = results.find(UNPRUNED), results.find("random")
    rows = []
    for name, method in METHODS.items():
        answers = results.find(name)
        rows.append(
            [
                method.label,
                *(interval(results.accuracy(answers, column)) for column in COLUMNS),
                over(results, answers, unpruned),
                over(results, answers, random),
                "" if method.paper is None else f"{method.paper:+.1f}",
                number(mean_tokens(answers), 0),
                number(results.step_seconds(name) if method.trained else None, 2),
                str(len(answers)),
            ]
        )
    for label, name in LEVELS.items():
        rows.append([label, *(number(results.level(name, column)) for column in COLUMNS), *[""] * 6])
    heads = ["over no pruning", "over random", "in the paper, over no pruning", "LLM tokens", "s a step", "seeds"]
    return table(["", *COLUMNS, *heads], rows)


def claims_table(results: Results) -> str:
    """What the paper claims, in the numbers of the study's issue."""
    find = results.find
    stts, random, unpruned, highest = find("stts"), find("random"), find(UNPRUNED), max(results.settings.ratios)
    beside = results.difference
    losing = [(1, find("stts", highest)), (-1, stts), (-1, find("random", highest)), (1, random)]
    scaled = find("stts", scaling=MAIN_RATIO)
    claims = [
        ("STTS - no pruning: -0.7 or more", beside(stts, unpruned, AVERAGE), "or more", -0.7),
        ("STTS - random: above 0", beside(stts, random, AVERAGE), "above", 0.0),
        ("STTS - heuristic, long: 0 or more", beside(stts, find("cosine"), "long"), "or more", 0.0),
        ("STTS - STTS without temporal loss: above 0", beside(stts, find("stts-no-temporal"), AVERAGE), "above", 0.0),
        ("STTS - ToMe: above 0", beside(stts, find("tome"), AVERAGE), "above", 0.0),
        ("STTS with test-time scaling - no pruning, long: above 0", beside(scaled, unpruned, "long"), "above", 0.0),
        ("STTS with test-time scaling - without, long: above 0", beside(scaled, stts, "long"), "above", 0.0),
    ]
    if highest > MAIN_RATIO:
        text = f"from {percent(MAIN_RATIO)} to {percent(highest)}, STTS - random: above 0"
        claims.append((text, results.combine(losing, AVERAGE), "above", 0.0))
    rows = [
        [text, interval(found, signed=True), verdict(found, relation, least)] for text, found, relation, least in claims
    ]
    rule = '"Yes" asks that all of the interval is as claimed, "no" that none of it is; all else is undecided.'
    return f"{table(['points', 'found', 'holds'], rows)}\n\n{rule}"


def verdict(found: Interval | None, relation: str, least: float) -> str:
    """Whether an interval is "above" `least`, or that "or more"."""
    if found is None:
        return ""
    holds = {"above": operator.gt, "or more": operator.ge}[relation]
    return "yes" if holds(found.low, least) else "undecided" if holds(found.high, least) else "**no**"


def types_table(results: Results) -> str:
    types = list(dict.fromkeys(results.types.tolist()))
    rows = [
        [method.label, *(number(results.accuracy_of_type(results.find(name), kind)) for kind in types)]
        for name, method in METHODS.items()
    ]
    for label, name in LEVELS.items():
        shares = results.about.get(name) or {}
        rows.append([label, *(number(100 * shares[kind] if kind in shares else None) for kind in types)])
    return table(["", *types], rows)


def degradation_table(results: Results, column: str) -> str:
    ratios = sorted(results.settings.ratios)
    untrained = (name for name, method in METHODS.items() if not method.trained)
    rows = []
    degrading = (method.name for method in methods_of("ratios"))
    for name in (UNPRUNED, *degrading, *untrained, TEXT_ONLY):
        accuracies = (results.accuracy(results.find(name, ratio), column) for ratio in ratios)
        rows.append([METHODS[name].label, *map(interval, accuracies)])
    return table(["", *map(percent, ratios)], rows)


def layers_table(results: Results) -> str:
    settings, rows = results.settings, []
    for ratio in settings.layer_ratios:
        for layer in settings.layers:
            answers = results.find("stts", ratio, layer)
            accuracies = (interval(results.accuracy(answers, column)) for column in COLUMNS)
            seconds = number(results.step_seconds("stts", ratio, layer), 2)
            compared = over(results, answers, results.find("stts", ratio))
            rows.append([f"STTS at {percent(ratio)}, l = {layer}", *accuracies, compared, seconds])
    return table(["", *COLUMNS, f"over l = {settings.base_layer}", "s a step"], rows)


def scaling_table(results: Results) -> str:
    unpruned, rows = results.find(UNPRUNED), []
    for name in (method.name for method in methods_of("scaling")):
        for scaling in (0.0, MAIN_RATIO):
            answers = results.find(name, scaling=scaling)
            scaled = ", as many frames" if name == UNPRUNED else " with test-time scaling"
            label = METHODS[name].label + (scaled if scaling else "")
            compared = over(results, answers, unpruned, "long")
            tokens = (number(mean_tokens(answers, "long", kind), 0) for kind in ("video_tokens", "llm_tokens"))
            rows.append([label, interval(results.accuracy(answers, "long")), compared, *tokens])
    return table(["", "long", "over no pruning", "video tokens", "LLM tokens"], rows)


def images_table(results: Results) -> str:
    unpruned, rows = results.find(UNPRUNED), []
    for name in (method.name for method in methods_of("images")):
        answers = results.find(name)
        accuracy = interval(results.accuracy(answers, "image"))
        rows.append([METHODS[name].label, accuracy, over(results, answers, unpruned, "image")])
    return table(["trained with", "image", "over no pruning"], rows)


def motion_table(results: Results) -> str:
    rows = [[method.label, interval(results.motion(method.name), digits=3)] for method in methods_of("motion")]
    return table(["", "Spearman's correlation"], rows)


def notes() -> str:
    return f"""\
- **Accuracy** is the share of right answers in percent, the mean over the seeds that were run. The average weighs the
  groups {", ".join(VIDEO_GROUPS)} alike.
- **Intervals** hold the middle 95 % of {RESAMPLES} resamples. Each draws clips with replacement, all questions of a
  clip together, and, crossed with that, seeds with replacement. A difference is taken question by question and seed by
  seed before it is resampled, so what both methods share cancels. With few seeds the spread among them comes out too
  small: where seeds differ more than clips do, the interval of 3 goes from the lowest to the highest, and so holds the
  truth in only 3 of 4 studies. Many intervals stand here; each is for itself, none is corrected for that.
- **A seed** decides over the order of the training rows, a new scorer, and blocks drawn at random. The base checkpoint
  is shared by all runs, as in the paper, so its luck is in no interval.
- **Inference only** methods prune the model that was trained without pruning.
- **LLM tokens** are those of a prompt about a video that reach the language model, the mean over the questions; with
  more frames there are more timestamps among them. **Video tokens** are those of them that show frames.
- **In the paper**: the mean of its averages over short and over long benchmarks, less that of its model without
  pruning. Long ones weigh a half there, and a third here.
- **Seconds a step** are the median over a run's steps, and over the seeds, on a machine that may do other work.
- **Scores against what moves**: for each clip Spearman's correlation of its blocks' scores with the share of their
  patches that truly move, over all frames but the first, and 0 where all scores are equal; the mean over clips and
  seeds, with clips and seeds resampled.
"""


def over(results: Results, answers: Answers, others: Answers, column: str = AVERAGE) -> str:
    """By how many points `answers` are above `others`; empty beside themselves."""
    return "" if answers is others else interval(results.difference(answers, others, column), signed=True)


def draw_degradation(results: Results) -> Figure:
    """Average accuracy against the share dropped, a line with its interval for each method."""
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for name, style in ((UNPRUNED, "--"), (TEXT_ONLY, ":")):
        level = results.accuracy(results.find(name), AVERAGE)
        if level is not None:
            axes.axhline(level.mean, color="black", linewidth=1, linestyle=style, label=METHODS[name].label)
    for method in methods_of("ratios"):
        ratios = sorted(results.settings.ratios)
        found = {100 * ratio: results.accuracy(results.find(method.name, ratio), AVERAGE) for ratio in ratios}
        _draw_line(axes, found, method.label)
    axes.set(xlabel="video tokens dropped, %", ylabel="average accuracy, %")
    return figure


def draw_layers(results: Results) -> Figure:
    """Average accuracy of STTS against the pruning layer."""
    figure = Figure(figsize=(5, 3.5))
    axes = figure.subplots()
    for ratio in results.settings.layer_ratios:
        layers = sorted(results.settings.layers)
        found = {float(layer): results.accuracy(results.find("stts", ratio, layer), AVERAGE) for layer in layers}
        _draw_line(axes, found, f"STTS at {percent(ratio)}")
    axes.set(xlabel="pruning layer l", ylabel="average accuracy, %")
    axes.set_xticks(sorted(results.settings.layers))
    return figure


def _draw_line(axes: Any, points: dict[float, Interval | None], label: str) -> None:
    there = {place: found for place, found in points.items() if found is not None}
    if there:
        means = [found.mean for found in there.values()]
        below = [max(found.mean - found.low, 0) for found in there.values()]
        above = [max(found.high - found.mean, 0) for found in there.values()]
        axes.errorbar(list(there), means, yerr=[below, above], marker="o", capsize=3, label=label)
        axes.legend(fontsize=8)
