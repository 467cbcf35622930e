"""Labelled tasks in the world of the built-in stories.

Each needs to be read: the words of every class occur in the texts of every other, and what decides is who
did what, or what came last. Part of the rows is easy, so that a small model has somewhere to start.
"""

from __future__ import annotations

from collections.abc import Callable

from oelm.data.builtin import (
    ANIMALS,
    COLOURS,
    FRUITS,
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
from oelm.data.readers import Row

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


_FACTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # a statement with its value, the same denied, and the values it can take
    ("{name} lives near the {value}", "{name} does not live near the {value}", tuple(PLACES)),
    ("{name} owns a {value}", "{name} does not own a {value}", tuple(THINGS)),
    ("{name}'s favourite colour is {value}", "{name}'s favourite colour is not {value}", tuple(COLOURS)),
    ("{name} likes {value} best", "{name} does not like {value} best", tuple(FRUITS)),
    ("{name} keeps a pet {value}", "{name} does not keep a pet {value}", tuple(ANIMALS)),
    ("{name} felt {value} today", "{name} did not feel {value} today", tuple(MOODS)),
)


_Told = dict[tuple[Person, int], str]  # who, which fact -> its value

# What a premise never says, so that a statement of it is open.
_OPEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} will travel to the {value} tomorrow", tuple(PLACES)),
    ("{name} once lost a {value}", tuple(THINGS)),
    ("{name} is afraid of the {value}", tuple(ANIMALS)),
)


def statement(dice: Dice) -> Row:
    """Facts about two or three people, and a statement that follows, is left open, or contradicts.

    As in real collections, a denial hints at a contradiction and a new subject at an open question; half of
    the rows have no such hint and must be looked up.
    """
    cast = people(dice, 2 + dice.below(2))
    told: _Told = {}
    for person in cast:
        for kind in dice.some(range(len(_FACTS)), 3):
            told[person, kind] = dice.pick(_FACTS[kind][2])
    premise = [_fact(person, kind, value, told=True) for (person, kind), value in told.items()]
    label = dice.below(3)
    hypothesis = (_entailed, _left_open, _contradicted)[label](dice, cast, told)
    facts = " ".join(sentence + "." for sentence in dice.some(premise, len(premise)))
    return {"premise": facts, "hypothesis": hypothesis + ".", "label": label}


def _entailed(dice: Dice, cast: list[Person], told: _Told) -> str:
    subject, kind = dice.pick(list(told))
    if dice.chance(10):  # a falsehood denied
        return _fact(subject, kind, _value(dice, told, kind, told[subject, kind]), told=False)
    return _fact(subject, kind, told[subject, kind], told=True)


def _left_open(dice: Dice, cast: list[Person], told: _Told) -> str:
    subject = dice.pick(cast)
    if dice.chance(50):
        template, values = dice.pick(_OPEN)
        return _filled(template, subject, dice.pick(values))
    kind = dice.pick([kind for kind in range(len(_FACTS)) if (subject, kind) not in told])
    return _fact(subject, kind, _value(dice, told, kind, ""), told=dice.chance(80))


def _contradicted(dice: Dice, cast: list[Person], told: _Told) -> str:
    subject, kind = dice.pick(list(told))
    if dice.chance(50):  # the truth denied
        return _fact(subject, kind, told[subject, kind], told=False)
    return _fact(subject, kind, _value(dice, told, kind, told[subject, kind]), told=True)


def _fact(person: Person, kind: int, value: str, *, told: bool) -> str:
    stated, denied, _ = _FACTS[kind]
    return _filled(stated if told else denied, person, value)


def _filled(template: str, person: Person, value: str) -> str:
    return template.format(name=person.name, value=value).replace("a " + value, article(value))


def _value(dice: Dice, told: _Told, kind: int, wrong: str) -> str:
    """Another value of this kind, often one that the text says about someone else."""
    heard = [value for (_, other), value in told.items() if other == kind and value != wrong]
    if heard and dice.chance(40):
        return dice.pick(heard)
    return dice.pick([value for value in _FACTS[kind][2] if value != wrong])


TASKS: dict[str, Callable[[Dice], Row]] = {
    "stories-2way": lost_or_found,
    "stories-4way": last_place,
    "stories-pairs": statement,
}
