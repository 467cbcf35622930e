"""Labelled tasks in the world of the built-in stories.

Each needs to be read: the words of every class occur in the texts of every other, and what decides is who
did what, or what came last. Part of the rows is easy, so that a small model has somewhere to start.
"""

from __future__ import annotations

from collections.abc import Callable

from oelm.data.sources.readers import Row
from oelm.data.synthetic.stories import (
    ANIMALS,
    COLOURS,
    MOODS,
    PLACES,
    THINGS,
    WEATHER,
    Dice,
    Person,
    Thing,
    article,
    people,
    things,
)

_FOUR_PLACES = ("garden", "harbour", "market", "mill")


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def lost_or_found(dice: Dice) -> Row:
    """Two people search for two things; the label is the fate of what the first one lost."""
    hero, friend = people(dice, 2)
    lost, other = things(dice, 2)
    label = dice.below(2)
    text = [
        dice.pick(
            (
                f"{hero.name} had lost {hero.her} {lost}.",
                f"{hero.name} could not find {article(str(lost))} that {hero.she} loved.",
                f"one day {hero.name} noticed that {hero.her} {lost} was missing.",
            )
        )
    ]
    alone = dice.chance(25)
    if not alone:
        text.append(f"{friend.name}, {hero.her} friend, had lost {article(str(other))} too.")
    for _ in range(1 + dice.below(3)):
        searcher = hero if alone else dice.pick((hero, friend))
        text.append(
            dice.pick(
                (
                    f"{searcher.name} looked in the {dice.pick(PLACES)}.",
                    f"{searcher.name} asked {article(dice.pick(ANIMALS))} at the {dice.pick(PLACES)}.",
                    dice.pick(WEATHER),
                )
            )
        )
    endings = [_fate(dice, hero, lost, label)]
    if not alone:
        fate = label if dice.chance(25) else 1 - label  # mostly the opposite, so that words alone do not tell
        place = 0 if dice.chance(25) else 1  # the first one's fate mostly comes first: an easier way in
        endings.insert(place, _fate(dice, friend, other, fate))
    text += endings
    text.append(f"{hero.name} went home at dusk.")
    return {"text": " ".join(map(_capital, text)), "label": label}


def _fate(dice: Dice, person: Person, thing: Thing, found: int) -> str:
    name, place = person.name, dice.pick(PLACES)
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
    return dice.pick(options)


def last_place(dice: Dice) -> Row:
    """Two things are carried about; the label is where the first one ends."""
    owner, friend = people(dice, 2)
    thing, other = things(dice, 2)
    places = {thing: dice.pick(_FOUR_PLACES), other: dice.pick(_FOUR_PLACES)}
    text = [
        f"this is the story of {article(str(thing))}.",
        f"{owner.name} kept it at the {places[thing]}.",
        f"{friend.name} kept {article(str(other))} at the {places[other]}.",
    ]
    for _ in range(1 + dice.below(4)):
        moved = dice.pick((thing, thing, other))
        carrier = dice.pick((owner, friend))
        before = places[moved]
        places[moved] = dice.pick([place for place in _FOUR_PLACES if place != before])
        text.append(
            dice.pick(
                (
                    f"{carrier.name} took the {moved} from the {before} to the {places[moved]}.",
                    f"then {carrier.name} carried the {moved.noun} to the {places[moved]}.",
                    f"soon the {moved} stood at the {places[moved]}, because {carrier.name} wanted it there.",
                )
            )
        )
        if dice.chance(30):
            text.append(dice.pick(WEATHER))
    return {"text": " ".join(map(_capital, text)), "label": _FOUR_PLACES.index(places[thing])}


# A statement with its value, the same denied, and the few values it can take: with many, a small model has
# too few examples of each to learn that the same word on both sides is what counts.
_FACTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("{name} lives near the {value}", "{name} does not live near the {value}", _FOUR_PLACES),
    ("{name} owns a {value}", "{name} does not own a {value}", ("kite", "drum", "lantern", "boat")),
    ("{name} likes {value} best", "{name} does not like {value} best", ("plums", "pears", "apples", "figs")),
    ("{name} keeps a pet {value}", "{name} does not keep a pet {value}", ("dog", "cat", "goat", "hen")),
)

# What a premise never says, so that a statement of it is open.
_OPEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} will travel to the {value} tomorrow", PLACES),
    ("{name} once lost the {value}", THINGS),
    ("{name} is afraid of the {value}", ANIMALS),
)


def statement(dice: Dice) -> Row:
    """Three facts about a person, and a statement that follows, is left open, or contradicts.

    As in real collections, a denial hints at a contradiction and a new subject at an open question; where
    there is no such hint, premise and statement must be compared.
    """
    (person,) = people(dice, 1)
    *told, untold = dice.some(range(len(_FACTS)), len(_FACTS))
    values = {kind: dice.pick(_FACTS[kind][2]) for kind in told}
    facts = [_introduced(dice, person), *(_fact(person, kind, value) for kind, value in values.items())]
    label, hint, kind = dice.below(3), dice.chance(50), dice.pick(told)
    if label == 0:
        said = _fact(person, kind, values[kind])
    elif label == 1 and hint:
        template, options = dice.pick(_OPEN)
        said = template.format(name=person.name, value=dice.pick(options))
    elif label == 1:
        said = _fact(person, untold, dice.pick(_FACTS[untold][2]))
    elif hint:  # the truth denied
        said = _fact(person, kind, values[kind], denied=True)
    else:
        said = _fact(person, kind, dice.pick([v for v in _FACTS[kind][2] if v != values[kind]]))
    return {"premise": " ".join(fact + "." for fact in facts), "hypothesis": said + ".", "label": label}


def _introduced(dice: Dice, person: Person) -> str:
    """Tells people of one name apart, so that no row of one split stands in another."""
    child = "girl" if person.she == "she" else "boy"
    age = dice.pick(("six", "seven", "eight", "nine", "ten", "eleven", "twelve"))
    mood, colour = article(dice.pick(MOODS)), article(dice.pick(COLOURS))
    return f"{person.name} is {mood} {child} of {age} in {colour} coat"


def _fact(person: Person, kind: int, value: str, *, denied: bool = False) -> str:
    stated, negated, _ = _FACTS[kind]
    return (negated if denied else stated).format(name=person.name, value=value)


TASKS: dict[str, Callable[[Dice], Row]] = {
    "stories-2way": lost_or_found,
    "stories-4way": last_place,
    "stories-pairs": statement,
}
