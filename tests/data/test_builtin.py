import hashlib
import itertools
import json
from collections import Counter

import pytest

from oelm.data.sources.open import open_corpus
from oelm.data.splits import duplicates
from oelm.data.synthetic.stories import KINDS, generate, sizes
from oelm.errors import UsageError

NAMES = ("stories", "stories-2way", "stories-4way", "stories-pairs")

GOLDEN = {
    "stories": "e2a34bcec3776ff4e6a77a880181773e61c68f10ef6df1c8305ae85d6cacf8bc",
    "stories-2way": "daac94b6906136149c2e0081dc7c75ef9902af44703248360ecde5e0e8b6888e",
    "stories-4way": "270373f19f9782f3a53b359cd5cd9750eafb4e94899e14dfd24e39fc965439aa",
    "stories-pairs": "c4560245397b9460bde46d91558acc532cd5aaef0a81bc2519b9059412a8a574",
}


@pytest.mark.parametrize("kind", NAMES)
def test_the_same_bytes_everywhere(kind: str) -> None:
    rows = json.dumps(list(itertools.islice(generate(kind, "validation"), 300)))
    assert hashlib.sha256(rows.encode()).hexdigest() == GOLDEN[kind]


@pytest.mark.parametrize("kind", NAMES)
def test_splits_have_their_sizes_and_share_no_text(kind: str) -> None:
    corpus = open_corpus(kind)
    assert {split: corpus.count(split) for split in ("validation", "test")}.items() <= sizes(kind).items()
    assert duplicates(corpus.limit(train=2000, validation=500, test=500)).total == 0


@pytest.mark.parametrize("kind", NAMES[1:])
def test_classes_are_balanced(kind: str) -> None:
    labels = Counter(row["label"] for row in generate(kind, "validation"))
    expected = 1000 / len(labels)
    assert all(abs(count - expected) < 0.2 * expected for count in labels.values())
    assert set(labels) == set(range(len(open_corpus(kind).label_names)))


def test_the_end_of_a_story_is_decided_by_its_beginning() -> None:
    """Each late answer about fruit must follow from an early sentence; a shuffled one would not."""
    numbers = [
        "no",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ]
    checked = 0
    for row in itertools.islice(generate("stories", "train"), 200):
        beginning, end = row["text"].split("\n")
        for sentence in beginning.split(". "):
            if " picked " in sentence:
                who, rest = sentence.split(" picked ")
                count, fruit = rest.split()[:2]
                eaten = rest.split(" and ate ")[1].split()[0]
                left = numbers[numbers.index(count) - numbers.index(eaten)].capitalize()
                assert f'How many {fruit} are left?" asked' in end
                assert f'"{left}," said {who}.' in end
                checked += 1
    assert checked > 50


def test_pairs_follow_from_comparing_premise_and_statement() -> None:
    """Whoever compares them is always right; whoever reads the statement alone is not."""
    verbs = ("lives near", "owns", "likes", "keeps a pet")
    right = hinted = total = 0
    for row in itertools.islice(generate("stories-pairs", "train"), 3000):
        premise, said, label = row["premise"], row["hypothesis"], row["label"]
        verb = next((verb for verb in verbs if f" {verb} " in said), "")
        if said in premise:
            answer = 0
        elif "does not" in said:
            answer = 2
        else:
            answer = 2 if verb and f" {verb} " in premise else 1
        right += answer == label
        hinted += label == (2 if "does not" in said else 0 if verb else 1)
        total += 1
    assert right == total
    assert hinted < 0.7 * total


def test_no_pair_stands_in_two_splits() -> None:
    assert duplicates(open_corpus("stories-pairs")).total == 0


def test_a_new_corpus_does_not_change_the_others() -> None:
    """A corpus' number goes into its seed, so it is a number and not a place in a list."""
    assert [kind.number for kind in KINDS.values()] == list(range(len(KINDS)))
    assert KINDS["task-recall"].number == 5


def test_another_seed_gives_other_stories() -> None:
    first, other = (next(generate("stories", "train", seed=seed))["text"] for seed in (1, 2))
    assert first != other


def test_an_unknown_corpus_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="stories-2way"):
        sizes("stories-2ways")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tinystories", "stories"),
        ("imdb", "stories-2way"),
        ("agnews", "stories-4way"),
        ("mnli", "stories-pairs"),
    ],
)
def test_the_built_in_corpus_stands_in_for_any_dataset_of_its_shape(name: str, kind: str) -> None:
    corpus = open_corpus(name, source="builtin")
    assert corpus.name == name
    assert kind in corpus.origin
    assert name in corpus.origin
    assert next(corpus.rows("train")) == next(generate(kind, "train"))
    assert corpus.fingerprint("train") == open_corpus(kind).fingerprint("train")
