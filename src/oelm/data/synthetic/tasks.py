"""Generated tasks: classification of texts about people and things, and language modelling of letters.

Single words do not reveal the class, which depends on who did what, or on what happened last. Some rows are
easy, so that a small model can start to learn. The tasks with letters need attention but no knowledge of
English: the second half of each row can be predicted from the first half.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase, ascii_uppercase

from oelm.data.sources.readers import Row
from oelm.data.synthetic.rng import Rng
from oelm.data.synthetic.stories import (
    ANIMALS,
    COLOURS,
    MOODS,
    PLACES,
    THINGS,
    WEATHER,
    Person,
    Thing,
    article,
    people,
    things,
)

_FOUR_PLACES = ("garden", "harbour", "market", "mill")
PAIRS = 4
ROUNDS = 4  # how often each pair is repeated in a row of `recall`
LETTERS = 8  # number of different letters for keys, and also for values
LENGTH = 16  # number of letters that a row of `copy` repeats


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def lost_or_found(rng: Rng) -> Row:
    """Return a story about a search for lost things; the label says whether the first thing is found."""
    hero, friend = people(rng, 2)
    lost, other = things(rng, 2)
    label = rng.below(2)
    text = [
        rng.pick(
            (
                f"{hero.name} had lost {hero.her} {lost}.",
                f"{hero.name} could not find {article(str(lost))} that {hero.she} loved.",
                f"one day {hero.name} noticed that {hero.her} {lost} was missing.",
            )
        )
    ]
    alone = rng.chance(25)
    if not alone:
        text.append(f"{friend.name}, {hero.her} friend, had lost {article(str(other))} too.")
    for _ in range(1 + rng.below(3)):
        searcher = hero if alone else rng.pick((hero, friend))
        text.append(
            rng.pick(
                (
                    f"{searcher.name} looked in the {rng.pick(PLACES)}.",
                    f"{searcher.name} asked {article(rng.pick(ANIMALS))} at the {rng.pick(PLACES)}.",
                    rng.pick(WEATHER),
                )
            )
        )
    endings = [_fate(rng, hero, lost, label)]
    if not alone:
        # In 75 % of the rows, hero and friend have opposite results, so that the word "found" alone does not
        # reveal the label.
        fate = label if rng.chance(25) else 1 - label
        # In 75 % of the rows, the hero's result, which decides the label, comes first: easier to learn.
        position = 0 if rng.chance(25) else 1
        endings.insert(position, _fate(rng, friend, other, fate))
    text += endings
    text.append(f"{hero.name} went home at dusk.")
    return {"text": " ".join(map(_capital, text)), "label": label}


def _fate(rng: Rng, person: Person, thing: Thing, found: int) -> str:
    name, place = person.name, rng.pick(PLACES)
    if found:
        options = (
            f"{name} found the {thing} at the {place}.",
            f"the {thing} turned up in the {place}.",
            f"a child from the {place} brought the {thing} back to {name}.",
        )
    else:
        options = (
            f"{name} never saw the {thing} again.",
            f"the {thing} stayed lost.",
            f"nobody at the {place} could help {name}, and the {thing} was gone.",
        )
    return rng.pick(options)


def last_place(rng: Rng) -> Row:
    """Return a story about two things that are moved; the label is the last place of the first thing."""
    owner, friend = people(rng, 2)
    thing, other = things(rng, 2)
    places = {thing: rng.pick(_FOUR_PLACES), other: rng.pick(_FOUR_PLACES)}
    text = [
        f"this is the story of {article(str(thing))}.",
        f"{owner.name} kept it at the {places[thing]}.",
        f"{friend.name} kept {article(str(other))} at the {places[other]}.",
    ]
    for _ in range(1 + rng.below(4)):
        moved = rng.pick((thing, thing, other))
        carrier = rng.pick((owner, friend))
        before = places[moved]
        places[moved] = rng.pick([place for place in _FOUR_PLACES if place != before])
        text.append(
            rng.pick(
                (
                    f"{carrier.name} took the {moved} from the {before} to the {places[moved]}.",
                    f"then {carrier.name} carried the {moved.noun} to the {places[moved]}.",
                    f"soon the {moved} stood at the {places[moved]}, because {carrier.name} wanted it there.",
                )
            )
        )
        if rng.chance(30):
            text.append(rng.pick(WEATHER))
    return {"text": " ".join(map(_capital, text)), "label": _FOUR_PLACES.index(places[thing])}


# (statement, negation of the statement, possible values). There are only a few values, because a small model
# needs many examples of each value to learn that it must compare premise and statement.
_FACTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("{name} lives near the {value}", "{name} does not live near the {value}", _FOUR_PLACES),
    ("{name} owns a {value}", "{name} does not own a {value}", ("kite", "drum", "lantern", "boat")),
    ("{name} likes {value} best", "{name} does not like {value} best", ("plums", "pears", "apples", "figs")),
    ("{name} keeps a pet {value}", "{name} does not keep a pet {value}", ("dog", "cat", "goat", "hen")),
)

# Statements about topics that no premise contains, so that their label is neutral.
_OPEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} will travel to the {value} tomorrow", PLACES),
    ("{name} once lost the {value}", THINGS),
    ("{name} is afraid of the {value}", ANIMALS),
)


def statement(rng: Rng) -> Row:
    """Return a premise of three facts and a hypothesis, with the label entailment, neutral or contradiction.

    As in real NLI datasets, a negation often means contradiction, and a new topic often means neutral. In the
    other rows, the model must compare premise and hypothesis.
    """
    (person,) = people(rng, 1)
    *told, untold = rng.sample(range(len(_FACTS)), len(_FACTS))
    values = {kind: rng.pick(_FACTS[kind][2]) for kind in told}
    facts = [_introduction(rng, person), *(_fact(person, kind, value) for kind, value in values.items())]
    label, hint, kind = rng.below(3), rng.chance(50), rng.pick(told)
    if label == 0:
        said = _fact(person, kind, values[kind])
    elif label == 1 and hint:
        template, options = rng.pick(_OPEN)
        said = template.format(name=person.name, value=rng.pick(options))
    elif label == 1:
        said = _fact(person, untold, rng.pick(_FACTS[untold][2]))
    elif hint:
        said = _fact(person, kind, values[kind], denied=True)
    else:
        said = _fact(person, kind, rng.pick([v for v in _FACTS[kind][2] if v != values[kind]]))
    return {"premise": " ".join(fact + "." for fact in facts), "hypothesis": said + ".", "label": label}


def _introduction(rng: Rng, person: Person) -> str:
    """Return a random first sentence of a premise; it makes equal premises in two splits unlikely."""
    child = "girl" if person.she == "she" else "boy"
    age = rng.pick(("six", "seven", "eight", "nine", "ten", "eleven", "twelve"))
    mood, colour = article(rng.pick(MOODS)), article(rng.pick(COLOURS))
    return f"{person.name} is {mood} {child} of {age} in {colour} coat"


def _fact(person: Person, kind: int, value: str, *, denied: bool = False) -> str:
    stated, negated, _ = _FACTS[kind]
    return (negated if denied else stated).format(name=person.name, value=value)


def recall(rng: Rng) -> Row:
    """Return a row of key-value pairs, followed by the same pairs in random orders (an induction task)."""
    keys = rng.sample(ascii_lowercase[:LETTERS], PAIRS)
    pairs = [f"{key} {rng.pick(ascii_uppercase[:LETTERS])}" for key in keys]
    asked = [pair for _ in range(ROUNDS) for pair in rng.sample(pairs, PAIRS)]
    return {"text": f"{' '.join(pairs)} . {' '.join(asked)}"}


def copy(rng: Rng) -> Row:
    """Return a row of random letters, a full stop, and the same letters again."""
    letters = " ".join(rng.pick(ascii_lowercase) for _ in range(LENGTH))
    return {"text": f"{letters} . {letters}"}


RECALL_TASKS: dict[str, Callable[[Rng], Row]] = {"task-recall": recall, "task-copy": copy}
TASKS: dict[str, Callable[[Rng], Row]] = {
    "stories-2way": lost_or_found,
    "stories-4way": last_place,
    "stories-pairs": statement,
    **RECALL_TASKS,
}
