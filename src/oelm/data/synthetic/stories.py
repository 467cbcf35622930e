"""Generate stories that end with questions about facts from their beginning.

People own things, give them away, hide them, count fruit and tell secret words. A model that uses only the
last few words cannot predict the answers, so the stories reward attention over long distances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oelm.data.sources.readers import Row
from oelm.data.synthetic.rng import Rng


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
    her: str  # possessive: her or his
    whom: str  # object: her or him


@dataclass(frozen=True)
class Thing:
    colour: str
    noun: str

    def __str__(self) -> str:
        return f"{self.colour} {self.noun}"


def article(words: str) -> str:
    """Return `words` after the article "a" or "an".

    >>> article("orange kite"), article("red kite")
    ('an orange kite', 'a red kite')
    """
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def people(rng: Rng, count: int) -> list[Person]:
    chosen = rng.sample(GIRLS + BOYS, count)
    return [
        Person(name, "she", "her", "her") if name in GIRLS else Person(name, "he", "his", "him")
        for name in chosen
    ]


def things(rng: Rng, count: int) -> list[Thing]:
    """Return `count` things; the colour alone identifies each of them, and so does the noun alone."""
    pairs = zip(rng.sample(COLOURS, count), rng.sample(THINGS, count), strict=True)
    return [Thing(colour, noun) for colour, noun in pairs]


class _Story:
    """The state of a story: where people are, who holds what, and the sentences so far."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.cast = people(rng, 2 + rng.below(2))
        self.things = things(rng, 2 + rng.below(2))
        self.places = rng.sample(PLACES, 4)
        self.at = {person: rng.pick(self.places) for person in self.cast}
        self.holder: dict[Thing, Person | None] = {}
        self.left: dict[Thing, str] = {}  # the place of each thing that nobody holds
        self.text: list[str] = []
        self.asks: list[Callable[[], None]] = []  # questions for the end of the story
        self._used: set[str] = set()

    def say(self, sentence: str) -> None:
        self.text.append(sentence[0].upper() + sentence[1:])

    def two(self) -> list[Person]:
        return self.rng.sample(self.cast, 2)

    def fresh(self, options: Sequence[str]) -> str:
        """Return an option that the story has not used yet, so that a question about it has one answer."""
        chosen = self.rng.pick([option for option in options if option not in self._used])
        self._used.add(chosen)
        return chosen


def _open_story(world: _Story) -> None:
    rng, hero = world.rng, world.cast[0]
    start = rng.pick(("Once there was", "Long ago there was", "In a small town there was"))
    kind = "girl" if hero.she == "she" else "boy"
    world.say(f"{start} a {rng.pick(MOODS)} {kind} named {hero.name} who lived near the {world.at[hero]}.")
    for friend in world.cast[1:]:
        word = rng.pick(("friend", "neighbour", "cousin"))
        world.say(
            f"{hero.name} had a {word} named {friend.name}, and {friend.she} lived by the {world.at[friend]}."
        )
    for thing in world.things:
        owner = rng.pick(world.cast)
        world.holder[thing] = owner
        verb = rng.pick(("had", "owned", "always carried"))
        world.say(f"{owner.name} {verb} {article(str(thing))}.")


def _held(world: _Story) -> tuple[Thing, Person] | None:
    """Return a random thing and the person who holds it.

    If nobody holds the thing, add a sentence in which a person fetches it, and return None.
    """
    thing = world.rng.pick(world.things)
    holder = world.holder[thing]
    if holder is None:
        _fetch(world, thing)
        return None
    return thing, holder


def _give(world: _Story) -> None:
    held = _held(world)
    if held is None:
        return
    thing, giver = held
    taker = world.rng.pick([person for person in world.cast if person != giver])
    world.holder[thing] = taker
    how = world.rng.pick(("gave", "lent", "handed"))
    world.say(f"{giver.name} {how} the {thing} to {taker.name}, and {taker.name} thanked {giver.whom}.")


def _put(world: _Story) -> None:
    held = _held(world)
    if held is None:
        return
    thing, holder = held
    place = world.rng.pick(world.places)
    world.holder[thing], world.left[thing], world.at[holder] = None, place, place
    box = world.rng.pick(BOXES)
    world.say(f"{holder.name} went to the {place} and hid the {thing} there in {article(box)}.")


def _fetch(world: _Story, thing: Thing) -> None:
    finder = world.rng.pick(world.cast)
    place = world.left.pop(thing)
    world.holder[thing], world.at[finder] = finder, place
    world.say(f"later {finder.name} came to the {place}, saw the {thing} and took it along.")


def _walk(world: _Story) -> None:
    person, place = world.rng.pick(world.cast), world.rng.pick(world.places)
    world.at[person] = place
    verb = world.rng.pick(("walked", "ran", "rode", "hurried"))
    world.say(f"{person.name} {verb} to the {place}, for {person.she} was {world.rng.pick(MOODS)}.")


def _weather(world: _Story) -> None:
    world.say(world.rng.pick(WEATHER))


def _pet(world: _Story) -> None:
    owner, rng = world.rng.pick(world.cast), world.rng
    name, animal = world.fresh(PETS), rng.pick(ANIMALS)
    world.say(
        f"{owner.name} had {article(animal)} called {name}, and {name} followed {owner.whom} everywhere."
    )
    world.asks.append(lambda: world.say(f"{name} the {animal} fell asleep at {owner.name}'s feet."))


def _fruit(world: _Story) -> None:
    rng, (eater, friend) = world.rng, world.two()
    fruit, count = world.fresh(FRUITS), 3 + rng.below(7)
    eaten = 1 + rng.below(count - 2)
    world.say(f"{eater.name} picked {_NUMBERS[count]} {fruit} and ate {_NUMBERS[eaten]} of them.")

    left = _NUMBERS[count - eaten].capitalize()
    question = f'"How many {fruit} are left?" asked {friend.name}.'
    world.asks.append(lambda: world.say(f'{question} "{left}," said {eater.name}.'))


def _secret(world: _Story) -> None:
    rng, (teller, listener) = world.rng, world.two()
    word, place = world.fresh(SECRETS), rng.pick(world.places)
    world.say(f'{teller.name} told {listener.name} the word for the door of the {place}: "{word}".')
    world.asks.append(
        lambda: world.say(f'At the {place} {listener.name} whispered "{word}", and the door opened.')
    )


_EVENTS: tuple[Callable[[_Story], None], ...] = (
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


def _close_story(world: _Story) -> None:
    """End the story: ask where each thing is, ask the questions in `world.asks`, say where one person is."""
    rng = world.rng
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
    person = rng.pick(world.cast)
    world.say(
        f"When night fell, {person.name} was still at the {world.at[person]}, {rng.pick(MOODS)} and content."
    )


def story(rng: Rng) -> Row:
    """Return a story of about a dozen sentences in two paragraphs."""
    world = _Story(rng)
    _open_story(world)
    for _ in range(5 + rng.below(5)):
        rng.pick(_EVENTS)(world)
    middle = len(world.text)
    _close_story(world)
    return {"text": " ".join(world.text[:middle]) + "\n" + " ".join(world.text[middle:])}
