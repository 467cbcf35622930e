import hashlib
import itertools
import json
from collections import Counter

import pytest

from oelm.data.sources.open import open_corpus
from oelm.data.splits import find_duplicates
from oelm.data.synthetic.generate import CORPORA, generate_rows, split_sizes
from oelm.errors import UsageError

NAMES = ("stories", "stories-2way", "stories-4way", "stories-pairs")

GOLDEN = {
    "stories": "e2a34bcec3776ff4e6a77a880181773e61c68f10ef6df1c8305ae85d6cacf8bc",
    "stories-2way": "daac94b6906136149c2e0081dc7c75ef9902af44703248360ecde5e0e8b6888e",
    "stories-4way": "270373f19f9782f3a53b359cd5cd9750eafb4e94899e14dfd24e39fc965439aa",
    "stories-pairs": "c4560245397b9460bde46d91558acc532cd5aaef0a81bc2519b9059412a8a574",
}


@pytest.mark.parametrize("kind", NAMES)
def test_the_generated_text_never_changes(kind: str) -> None:
    rows = json.dumps(list(itertools.islice(generate_rows(kind, "validation"), 300)))
    assert hashlib.sha256(rows.encode()).hexdigest() == GOLDEN[kind]


@pytest.mark.parametrize("kind", NAMES)
def test_splits_have_their_sizes_and_share_no_text(kind: str) -> None:
    corpus = open_corpus(kind)
    for split in ("validation", "test"):
        assert len(list(corpus.rows(split))) == split_sizes(kind)[split]
    assert find_duplicates(corpus.limit(train=2000, validation=500, test=500)).counts.total() == 0


@pytest.mark.parametrize("kind", NAMES[1:])
def test_classes_are_balanced(kind: str) -> None:
    labels = Counter(row["label"] for row in generate_rows(kind, "validation"))
    expected = 1000 / len(labels)
    assert all(abs(count - expected) < 0.2 * expected for count in labels.values())
    assert set(labels) == set(range(len(open_corpus(kind).label_names)))


def test_answers_at_the_end_of_a_story_follow_from_its_beginning() -> None:
    """Each answer about fruit at the end must follow from a sentence at the beginning."""
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
    for row in itertools.islice(generate_rows("stories", "train"), 200):
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


def test_the_label_of_a_pair_follows_from_comparing_premise_and_statement() -> None:
    """Comparing premise and statement always gives the label; the statement alone does not."""
    verbs = ("lives near", "owns", "likes", "keeps a pet")
    right = hinted = total = 0
    for row in itertools.islice(generate_rows("stories-pairs", "train"), 3000):
        premise, statement, label = row["premise"], row["hypothesis"], row["label"]
        verb = next((verb for verb in verbs if f" {verb} " in statement), "")
        if statement in premise:
            answer = 0
        elif "does not" in statement:
            answer = 2
        else:
            answer = 2 if verb and f" {verb} " in premise else 1
        right += answer == label
        hinted += label == (2 if "does not" in statement else 0 if verb else 1)
        total += 1
    assert right == total
    assert hinted < 0.7 * total


def test_no_pair_appears_in_two_splits() -> None:
    assert find_duplicates(open_corpus("stories-pairs")).counts.total() == 0


def test_corpus_numbers_are_fixed_because_they_are_part_of_the_seed() -> None:
    assert [kind.number for kind in CORPORA.values()] == list(range(len(CORPORA)))
    assert CORPORA["task-recall"].number == 5


def test_an_unknown_corpus_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="stories-2way"):
        split_sizes("stories-2ways")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tinystories", "stories"),
        ("imdb", "stories-2way"),
        ("agnews", "stories-4way"),
        ("mnli", "stories-pairs"),
    ],
)
def test_source_builtin_replaces_a_dataset_by_generated_text_of_the_same_shape(name: str, kind: str) -> None:
    corpus = open_corpus(name, source="builtin")
    assert corpus.name == name
    assert kind in corpus.origin
    assert name in corpus.origin
    assert next(corpus.rows("train")) == next(generate_rows(kind, "train"))
    assert corpus.fingerprint("train") == open_corpus(kind).fingerprint("train")
