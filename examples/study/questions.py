"""
What is asked about a scene: scenes are composed from ingredients, and each ingredient has questions of known answers.

A clip holds one or two things that move, and some of: small marks that flash up, a light that blinks, a letter, a thing
that stands still, one that changes its colour. Answers are drawn uniformly, so a question's text says nothing about
its answer. The place of everything is drawn too, so that no place is worth more than another.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from .backgrounds import PHOTOGRAPHS
from .distraction import Look, draw_distraction
from .scenes import COLOURS, DIRECTIONS, LETTERS, PLACES, SHAPES, SHOWN_FOR, Scene, Thing

FPS, LONG_FPS = 8, 4  # frames a second of the files
LETTER_RADIUS = 0.11
SHORT_SECONDS, LONG_SECONDS = 3.875, 24.0  # 16 frames, four a second, of the one; 1.6 seconds apart in the other
LONG_SHOWN_FOR = 1.1  # with 16 frames some are missed, with 32 none
MAX_BLINKS = 4
NUM_OPTIONS = 4
PLAIN = Look()
GROUPS = {
    "motion": ("direction", "start", "end", "mover", "order", "change"),
    "detail": ("mover-colour", "mover-shape", "still", "mark", "where", "letter"),
    "long": ("long-mark", "long-letter", "long-order"),
    "image": ("image-colour", "image-shape", "image-where", "image-letter"),
    "chance": ("count", "long-half"),  # a guess for the base, whatever it sees: they belong to no average
}
GROUP_OF = {kind: group for group, kinds in GROUPS.items() for kind in kinds}
_NUMBERS = tuple(str(number) for number in range(1, MAX_BLINKS + 1))
# What may be answered; "order" asks for one of two colours that the question names.
ANSWERS = {
    "direction": tuple(DIRECTIONS),
    "start": tuple(PLACES),
    "end": tuple(PLACES),
    "mover": tuple(f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES),
    "count": _NUMBERS,
    "change": tuple(COLOURS),
    "mover-colour": tuple(COLOURS),
    "mover-shape": SHAPES,
    "still": tuple(COLOURS),
    "mark": tuple(COLOURS),
    "where": tuple(PLACES),
    "letter": LETTERS,
    "long-mark": tuple(COLOURS),
    "long-letter": LETTERS,
    "long-half": ("the first half", "the second half"),
    "image-colour": tuple(COLOURS),
    "image-shape": SHAPES,
    "image-where": tuple(PLACES),
    "image-letter": LETTERS,
}


# Kinds that call a thing by what it is, and kinds that name two of them; all others ask what or where a thing is.
NAMING, COMPARING = ("direction", "start", "end", "long-half"), ("order", "long-order")


@dataclass(frozen=True)
class Question:
    """
    kind: one of `GROUP_OF`. answer: one of `answers`, all that the question allows. about: the thing in question; of
    two questions about it one may tell the answer of the other. things: which of the scene's must be seen.
    """

    kind: str
    text: str
    answer: str
    answers: tuple[str, ...]
    about: str
    things: tuple[int, ...]


class _Composer:
    """Draws the things of one scene; places, colours and shapes are given out once each."""

    def __init__(self, seed: int, duration: float, shown_for: float, look: Look):
        self.random = np.random.default_rng((seed, 1))
        self.seed, self.duration, self.shown_for, self.look = seed, duration, shown_for, look
        self.places = self.shuffled(PLACES)
        self.shapes = self.shuffled(SHAPES)
        self.things: list[Thing] = []
        self.questions: list[Question] = []

    def shuffled(self, values: Iterable[str]) -> list[str]:
        values = list(values)
        return [values[index] for index in self.random.permutation(len(values))]

    def ask(
        self,
        kind: str,
        texts: tuple[str, ...],
        answer: str,
        about: str = "",
        answers: tuple[str, ...] | None = None,
        things: tuple[int, ...] | None = None,
    ) -> None:
        """things: by default the one that was added last."""
        text, things = texts[self.random.integers(len(texts))], things or (len(self.things) - 1,)
        self.questions.append(Question(kind, text, answer, answers or ANSWERS[kind], about or kind, things))

    def moment(self, length: float) -> tuple[float, float]:
        """An interval in which something is seen; never in the first frame."""
        start = self.random.uniform(0.05, self.duration - length - 0.1)
        return (start, start + length)

    def place(self) -> tuple[str, tuple[float, float]]:
        name = self.places.pop()
        x, y = PLACES[name]
        jitter_x, jitter_y = self.random.uniform(-0.035, 0.035, 2)
        return name, (x + jitter_x, y + jitter_y)

    def movers(self, number: int) -> None:
        ways: list[list[str]] = []
        for colour in self.shuffled(COLOURS)[:number]:
            shape, radius = self.shapes.pop(), self.random.uniform(0.085, 0.12)
            direction = self.shuffled(DIRECTIONS)[0]
            dx, dy = DIRECTIONS[direction]
            # From one of three places in a row to a later one: which is asked, and it must not lie between two.
            first, last = sorted(self.random.permutation(3)[:2].tolist())
            steps = (first, last) if dx + dy > 0 else (last, first)
            line = int(self.random.integers(3))
            names = self.way(line, steps, bool(dx))
            if names in ways:  # it would hide the other all the time
                names = self.way((line + 1) % 3, steps, bool(dx))
            ways.append(names)
            across, *along = self.random.uniform(-0.06, 0.06, 3)
            start, end = (
                (PLACES[name][0] + (shift if dx else across), PLACES[name][1] + (across if dx else shift))
                for name, shift in zip(names, along, strict=True)
            )
            velocity = ((end[0] - start[0]) / self.duration, (end[1] - start[1]) / self.duration)
            self.things.append(Thing(shape, colour, radius, start, velocity))
            self.ask(
                "direction",
                (f"Which way does the {colour} {shape} move?", f"In which direction does the {shape} move?"),
                direction,
                shape,
            )
            self.ask("start", (f"Where is the {colour} {shape} at first?",), names[0], shape)
            self.ask("end", (f"Where is the {colour} {shape} at last?",), names[1], shape)
            self.ask("mover-colour", (f"What colour is the {shape} that moves?",), colour, shape)
            self.ask("mover-shape", (f"What shape is the {colour} thing that moves?",), shape, shape)
            if number == 1:
                self.ask("mover", ("What is moving in this video?", "What moves?"), f"a {colour} {shape}", shape)

    def way(self, line: int, steps: tuple[int, int], along: bool) -> list[str]:
        """Places where something starts and ends that moves along a row, or down a column, of places."""
        return [list(PLACES)[3 * line + step if along else 3 * step + line] for step in steps]

    def still(self, changes: bool) -> None:
        name, start = self.place()
        colour, later = self.shuffled(COLOURS)[:2]
        shape, radius = self.shapes.pop(), self.random.uniform(0.08, 0.1)
        when = self.random.uniform(0.25, 0.75) * self.duration if changes else None
        self.things.append(Thing(shape, colour, radius, start, changes_at=when, later=later))
        if changes:
            self.ask(
                "change", (f"What colour does the {shape} turn into?", f"The {shape} changes. Into what colour?"), later
            )
        else:
            self.ask(
                "still",
                (f"What colour is the {shape} that stands still?", f"What colour is the {shape} at the {name}?"),
                colour,
            )

    def light(self) -> None:
        _, start = self.place()
        number = int(self.random.integers(1, MAX_BLINKS + 1))
        # Of frames a quarter of a second apart, each blink is seen in one and dark before the next.
        slots = 1 + 2 * self.random.permutation(int((self.duration - 0.4) / 0.5))[:number]
        shown = tuple((0.25 * slot - 0.1, 0.25 * slot + 0.1) for slot in sorted(slots.tolist()))
        self.things.append(Thing("bar", "white", 0.06, start, shown=shown))
        self.ask("count", ("How many times does the light blink?", "How often does the light blink?"), str(number))

    def letter(self, kind: str) -> None:
        _, start = self.place()
        letter, colour = self.shuffled(LETTERS)[0], self.shuffled(COLOURS)[0]
        self.things.append(Thing(letter, colour, LETTER_RADIUS, start, shown=(self.moment(self.shown_for),)))
        self.ask(kind, ("Which letter is shown?", "Which letter flashes up?"), letter)

    def marks(self, number: int, prefix: str = "") -> None:
        colours = self.shuffled(COLOURS)[:number]
        # Apart in time, so that one comes before the other also in the frames that are looked at.
        gap = (self.duration - 0.2) / number
        starts = [0.05 + index * gap + self.random.uniform(0, gap - self.shown_for) for index in range(number)]
        marks = []
        for colour, start in zip(colours, starts, strict=True):
            name, place = self.place()
            marks.append(name)
            self.things.append(Thing("diamond", colour, 0.06, place, shown=((start, start + self.shown_for),)))
            if prefix:
                self.ask("long-mark", (f"What colour is the mark at the {name}?",), colour, name)
                half = "the first half" if start + self.shown_for / 2 < self.duration / 2 else "the second half"
                self.ask("long-half", (f"In which half does the {colour} mark flash up?",), half, name)
            else:
                self.ask(
                    "mark",
                    (f"What colour is the mark at the {name}?", f"A mark flashes up at the {name}. What colour is it?"),
                    colour,
                    name,
                )
                texts = (f"Where does the {colour} mark flash up?", f"Where is the {colour} mark?")
                self.ask("where", texts, name, name)
        if number > 1:
            first, second = sorted(self.random.permutation(number)[:2].tolist())
            pair = self.shuffled((colours[first], colours[second]))
            self.ask(
                f"{prefix}order",
                (f"Which mark comes first, the {pair[0]} one or the {pair[1]} one?",),
                colours[first],
                answers=tuple(pair),
                things=tuple(len(self.things) - number + index for index in (first, second)),
            )

    def scene(self) -> Scene:
        """What was composed, as the style has it."""
        random, look, things = np.random.default_rng((self.seed, 9)), self.look, tuple(self.things)
        if look.style == "other":
            things = tuple(self.restyled(thing, random) for thing in things)
        photograph = int(random.integers(len(PHOTOGRAPHS[look.style]))) if random.random() < look.photographs else None
        distraction = draw_distraction(self.seed, look) if self.duration > 1 else {}
        film = np.random.default_rng((self.seed, 12)).random() < look.films
        return Scene(self.seed, self.duration, things, look.style, photograph, film, **distraction)

    def restyled(self, thing: Thing, random: np.random.Generator) -> Thing:
        """Smaller or larger than training has it, with a shadow; what moves stands first, then goes faster."""
        scale = random.uniform(*random.permutation([(0.8, 0.88), (1.15, 1.3)])[0])
        changed = replace(thing, radius=thing.radius * scale, casts=True)
        if not any(thing.velocity):
            return changed
        length = random.uniform(0.4, 0.7) * self.duration
        start = random.uniform(0, self.duration - length)
        velocity = (thing.velocity[0] * self.duration / length, thing.velocity[1] * self.duration / length)
        return replace(changed, velocity=velocity, moving=(start, start + length))


def compose_short(
    seed: int, level: int = 3, shown_for: float = SHOWN_FOR, look: Look = PLAIN
) -> tuple[Scene, list[Question]]:
    """
    A clip of some seconds in which much happens, and everything that can be asked about it. `level` 1 to 3: how much,
    for models that learn from little to much. The look changes nothing of what happens and is asked.
    """
    composer = _Composer(seed, SHORT_SECONDS, shown_for, look)
    random = composer.random
    composer.movers(1 if level == 1 or random.random() < 0.5 else 2)
    composer.marks(int(random.integers(1, 1 + level)) if level < 3 else int(random.integers(2, 5)))
    if level > 1 and random.random() < 0.6:
        composer.light()
    if random.random() < 0.6:
        composer.letter("letter")
    if random.random() < 0.6:
        composer.still(random.random() < 0.6)
    return composer.scene(), composer.questions


def compose_long(seed: int, look: Look = PLAIN) -> tuple[Scene, list[Question]]:
    """A clip of half a minute in which little happens, and everything that can be asked about it."""
    composer = _Composer(seed, LONG_SECONDS, LONG_SHOWN_FOR, look)
    if composer.random.random() < 0.5:
        composer.still(False)
        composer.questions.clear()
    composer.marks(int(composer.random.integers(1, 4)), "long-")
    if composer.random.random() < 0.6:
        composer.letter("long-letter")
    return composer.scene(), composer.questions


def compose_image(seed: int, look: Look = PLAIN) -> tuple[Scene, list[Question]]:
    """A still picture with some things and a letter, and everything that can be asked about it."""
    composer = _Composer(seed, 1.0, 1.0, look)
    for colour in composer.shuffled(COLOURS)[:3]:
        name, start = composer.place()
        shape = composer.shapes.pop()
        composer.things.append(Thing(shape, colour, composer.random.uniform(0.07, 0.1), start))
        texts = (f"What colour is the {shape}?", f"What colour is the thing at the {name}?")
        composer.ask("image-colour", texts, colour, shape)
        composer.ask("image-shape", (f"What shape is the {colour} thing?",), shape, shape)
        composer.ask("image-where", (f"Where is the {shape}?", f"Where is the {colour} thing?"), name, shape)
    _, start = composer.place()
    letter = composer.shuffled(LETTERS)[0]
    composer.things.append(Thing(letter, composer.shuffled(COLOURS)[0], LETTER_RADIUS, start))
    composer.ask("image-letter", ("Which letter is shown?",), letter)
    return composer.scene(), composer.questions


def conversation(questions: list[Question], random: np.random.Generator) -> list[Question]:
    """
    Those that can be asked one after the other, in an order that is drawn, without that one tells the answer of a later
    one: of each thing what or where it is, then something that calls it by name, and at the end which was first.
    """
    asked: dict[tuple[int, str], Question] = {}
    for index in random.permutation(len(questions)).tolist():
        question = questions[index]
        turn = 2 if question.kind in COMPARING else 1 if question.kind in NAMING else 0
        asked.setdefault((turn, question.about), question)
    return [asked[place] for place in sorted(asked, key=lambda place: place[0])]


def with_options(question: Question, seed: int) -> list[str] | None:
    """
    The answer among up to `NUM_OPTIONS` options, in an order drawn from the seed. None where answers are letters or
    numbers, which would be taken for an option's own.
    """
    if len(question.answer) == 1:
        return None
    random = np.random.default_rng((seed, 2))
    others = [answer for answer in question.answers if answer != question.answer]
    chosen = [others[index] for index in random.permutation(len(others))[: NUM_OPTIONS - 1]]
    options = [*chosen, question.answer]
    return [options[index] for index in random.permutation(len(options))]
