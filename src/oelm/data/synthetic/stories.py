"""The corpus that needs no network and no disk: stories generated from a seed, the same bytes everywhere.

People own things, carry them, give them away, count fruit and keep secret words; what was said early is
asked for late. So a model that only looks at the last few words stays far from one that attends to the
whole story. `builtin_tasks` makes labelled tasks of the same world, `builtin_probes` tasks without a world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oelm.data.batches.permutation import mix
from oelm.data.sources.readers import Row
from oelm.errors import unknown_name

SEED = 2026

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """One built-in corpus. `number` goes into its seed and stays; raise `version` with any change of a word:
    it is part of the corpus' fingerprint."""

    number: int
    version: int
    train: int
    held_out: int  # rows of validation, and of test

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": self.train, "validation": self.held_out, "test": self.held_out}


KINDS = {
    "stories": Kind(0, 2, 12_000, 600),
    "stories-2way": Kind(1, 2, 8_000, 1_000),
    "stories-4way": Kind(2, 2, 8_000, 1_000),
    "stories-pairs": Kind(3, 3, 12_000, 1_000),
    "task-copy": Kind(4, 2, 20_000, 500),
    "task-recall": Kind(5, 4, 20_000, 500),
}


class Dice:
    """A tiny random generator of our own (splitmix64), so that no library's change can change the text."""

    def __init__(self, *key: int) -> None:
        self._key = mix(*key)
        self._count = 0

    def below(self, limit: int) -> int:
        self._count += 1
        return mix(self._key, self._count) % limit

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different ones, in random order."""
        rest = list(options)
        return [rest.pop(self.below(len(rest))) for _ in range(count)]

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIRLS = _words("Mira Lena Asha Ines Tamsin Odile Runa Petra Zofia Hana Marit Dalia Noor Selma Ivy Berit")
BOYS = _words("Oren Tobin Kasper Emil Rafi Anselm Bruno Ilya Matteo Nils Idris Jonas Pavel Ravi Stellan Hugo")
COLOURS = _words("red blue green yellow white black brown grey golden silver purple orange")
THINGS = _words(
    "kite drum lantern boat basket whistle mirror blanket flute kettle hammer ladder marble clock compass "
    "bell puppet ribbon shell spoon map brush candle coat hat key rope book pencil wheel"
)
PLACES = _words(
    "garden harbour market mill bridge orchard well barn tower school forest bakery stable library square "
    "lighthouse chapel quarry meadow ferry"
)
BOXES = _words("chest drawer sack barrel cupboard crate jar bucket")
FRUITS = _words("plums pears apples figs cherries nuts peaches lemons")
ANIMALS = _words("dog cat goat hen donkey goose pony owl rabbit fox")
PETS = _words("Pip Bramble Moss Juno Tuck Clover Fern Dot Rusty Olive")
SECRETS = _words("lantern thunder pebble harvest sparrow winter copper saffron anchor velvet")
MOODS = _words("happy proud tired curious worried calm eager shy")
WEATHER = (
    "The wind blew hard that day.",
    "It had rained all night.",
    "The sun was warm on the roofs.",
    "A thin fog lay over the fields.",
    "Snow was falling, soft and slow.",
    "Far away, a storm was rising.",
)
_NUMBERS = _words("no one two three four five six seven eight nine ten eleven twelve")


@dataclass(frozen=True)
class Person:
    name: str
    she: str
    her: str  # possessive
    whom: str  # object


@dataclass(frozen=True)
class Thing:
    colour: str
    noun: str

    def __str__(self) -> str:
        return f"{self.colour} {self.noun}"


def article(words: str) -> str:
    """
    >>> article("orange kite"), article("red kite")
    ('an orange kite', 'a red kite')
    """
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def people(dice: Dice, count: int) -> list[Person]:
    chosen = dice.some(GIRLS + BOYS, count)
    return [
        Person(name, "she", "her", "her") if name in GIRLS else Person(name, "he", "his", "him")
        for name in chosen
    ]


def things(dice: Dice, count: int) -> list[Thing]:
    """Things that differ in both colour and kind, so that either names one."""
    pairs = zip(dice.some(COLOURS, count), dice.some(THINGS, count), strict=True)
    return [Thing(colour, noun) for colour, noun in pairs]


class _World:
    """One story in the making: who is where, who has what, and the sentences so far."""

    def __init__(self, dice: Dice) -> None:
        self.dice = dice
        self.cast = people(dice, 2 + dice.below(2))
        self.things = things(dice, 2 + dice.below(2))
        self.places = dice.some(PLACES, 4)
        self.at = {person: dice.pick(self.places) for person in self.cast}
        self.holder: dict[Thing, Person | None] = {}
        self.left: dict[Thing, str] = {}  # where a thing was put down
        self.text: list[str] = []
        self.asks: list[Callable[[], None]] = []  # what the end of the story must recall
        self._had: set[str] = set()

    def say(self, sentence: str) -> None:
        self.text.append(sentence[0].upper() + sentence[1:])

    def two(self) -> list[Person]:
        return self.dice.some(self.cast, 2)

    def fresh(self, options: Sequence[str]) -> str:
        """One that this story has not had yet, so that the end can ask for it without doubt."""
        chosen = self.dice.pick([option for option in options if option not in self._had])
        self._had.add(chosen)
        return chosen


def _open_story(world: _World) -> None:
    dice, hero = world.dice, world.cast[0]
    start = dice.pick(("Once there was", "Long ago there was", "In a small town there was"))
    kind = "girl" if hero.she == "she" else "boy"
    world.say(f"{start} a {dice.pick(MOODS)} {kind} named {hero.name} who lived near the {world.at[hero]}.")
    for friend in world.cast[1:]:
        word = dice.pick(("friend", "neighbour", "cousin"))
        world.say(
            f"{hero.name} had a {word} named {friend.name}, and {friend.she} lived by the {world.at[friend]}."
        )
    for thing in world.things:
        owner = dice.pick(world.cast)
        world.holder[thing] = owner
        verb = dice.pick(("had", "owned", "always carried"))
        world.say(f"{owner.name} {verb} {article(str(thing))}.")


def _held(world: _World) -> tuple[Thing, Person] | None:
    """A thing and who has it; where nobody has it, someone fetches it instead."""
    thing = world.dice.pick(world.things)
    holder = world.holder[thing]
    if holder is None:
        _fetch(world, thing)
        return None
    return thing, holder


def _give(world: _World) -> None:
    held = _held(world)
    if held is None:
        return
    thing, giver = held
    taker = world.dice.pick([person for person in world.cast if person != giver])
    world.holder[thing] = taker
    how = world.dice.pick(("gave", "lent", "handed"))
    world.say(f"{giver.name} {how} the {thing} to {taker.name}, and {taker.name} thanked {giver.whom}.")


def _put(world: _World) -> None:
    held = _held(world)
    if held is None:
        return
    thing, holder = held
    place = world.dice.pick(world.places)
    world.holder[thing], world.left[thing], world.at[holder] = None, place, place
    box = world.dice.pick(BOXES)
    world.say(f"{holder.name} went to the {place} and hid the {thing} there in {article(box)}.")


def _fetch(world: _World, thing: Thing) -> None:
    finder = world.dice.pick(world.cast)
    place = world.left.pop(thing)
    world.holder[thing], world.at[finder] = finder, place
    world.say(f"later {finder.name} came to the {place}, saw the {thing} and took it along.")


def _walk(world: _World) -> None:
    person, place = world.dice.pick(world.cast), world.dice.pick(world.places)
    world.at[person] = place
    verb = world.dice.pick(("walked", "ran", "rode", "hurried"))
    world.say(f"{person.name} {verb} to the {place}, for {person.she} was {world.dice.pick(MOODS)}.")


def _weather(world: _World) -> None:
    world.say(world.dice.pick(WEATHER))


def _pet(world: _World) -> None:
    owner, dice = world.dice.pick(world.cast), world.dice
    name, animal = world.fresh(PETS), dice.pick(ANIMALS)
    world.say(
        f"{owner.name} had {article(animal)} called {name}, and {name} followed {owner.whom} everywhere."
    )
    world.asks.append(
        lambda: world.say(f"{name} the {animal} fell asleep at {owner.name}'s feet.")  # whose, and what kind
    )


def _fruit(world: _World) -> None:
    dice, (eater, friend) = world.dice, world.two()
    fruit, count = world.fresh(FRUITS), 3 + dice.below(7)
    eaten = 1 + dice.below(count - 2)
    world.say(f"{eater.name} picked {_NUMBERS[count]} {fruit} and ate {_NUMBERS[eaten]} of them.")

    def ask() -> None:
        world.say(
            f'"How many {fruit} are left?" asked {friend.name}. "{_NUMBERS[count - eaten].capitalize()}," '
        )
        world.text[-1] += f"said {eater.name}."

    world.asks.append(ask)


def _secret(world: _World) -> None:
    dice, (teller, listener) = world.dice, world.two()
    word, place = world.fresh(SECRETS), dice.pick(world.places)
    world.say(f'{teller.name} told {listener.name} the word for the door of the {place}: "{word}".')
    world.asks.append(
        lambda: world.say(f'At the {place} {listener.name} whispered "{word}", and the door opened.')
    )


_EVENTS: tuple[Callable[[_World], None], ...] = (
    _give,
    _give,
    _put,
    _put,
    _walk,
    _weather,
    _pet,
    _fruit,
    _secret,
)


def _close_story(world: _World) -> None:
    """Ask for what was said: who has a thing, where it lies, where a person is."""
    dice = world.dice
    for thing in world.things:
        asker, teller = world.two()
        holder = world.holder[thing]
        if holder is None:
            answer = f"It is at the {world.left[thing]}"
            world.say(f'"Where is the {thing}?" asked {asker.name}. "{answer}," said {teller.name}.')
        else:
            subject = "I have it" if holder == teller else f"{holder.name} has it"
            subject = "You have it yourself" if holder == asker else subject
            world.say(f'"Who has the {thing.noun}?" asked {asker.name}. "{subject}," said {teller.name}.')
    for ask in world.asks:
        ask()
    person = dice.pick(world.cast)
    world.say(
        f"When night fell, {person.name} was still at the {world.at[person]}, {dice.pick(MOODS)} and content."
    )


def story(dice: Dice) -> str:
    """One story of about a dozen sentences in two paragraphs."""
    world = _World(dice)
    _open_story(world)
    for _ in range(5 + dice.below(5)):
        dice.pick(_EVENTS)(world)
    middle = len(world.text)
    _close_story(world)
    return " ".join(world.text[:middle]) + "\n" + " ".join(world.text[middle:])


def sizes(kind: str) -> dict[str, int]:
    """Rows per split."""
    if kind not in KINDS:
        raise unknown_name("built-in corpus", kind, KINDS)
    return KINDS[kind].sizes


def generator_id(kind: str) -> str:
    """What the text depends on, in words."""
    return f"{kind} seed {SEED} version {KINDS[kind].version} sizes {KINDS[kind].sizes}"


def generate(kind: str, split: str, *, seed: int = SEED) -> Iterator[Row]:
    """The rows of a split. Row i depends on nothing but (kind, split, seed, i).

    >>> row = next(generate("stories-2way", "train"))
    >>> sorted(row), row["label"] in (0, 1)
    (['label', 'text'], True)
    """
    from oelm.data.synthetic.recall import RECALL_TASKS
    from oelm.data.synthetic.tasks import TASKS

    make = {**TASKS, **RECALL_TASKS}
    count = sizes(kind)[split]
    where = (seed, KINDS[kind].number, ("train", "validation", "test").index(split))
    for index in range(count):
        dice = Dice(*where, index)
        yield {"text": story(dice)} if kind == "stories" else make[kind](dice)
