from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.config.diff import config_diff
from oelm.config.overrides import changes_from_words, field_names, override
from oelm.errors import UsageError
from oelm.experiments.catalogue import experiment

CONFIG = experiment("GPT-02").at("smoke")


def test_any_field_by_its_dotted_name() -> None:
    words = ["optim.lr=1e-2", "budget.steps=7", "compile=yes", "model.position=rope"]
    changed = override(CONFIG, changes_from_words(words))
    assert (changed.optim.lr, changed.budget.steps, changed.compile) == (0.01, 7, True)
    assert changed.model.position == "rope"
    assert set(config_diff(CONFIG, changed)) == {w.partition("=")[0] for w in words}


def test_a_method_by_name_takes_the_arm_along_and_its_fields_follow() -> None:
    changed = override(CONFIG, changes_from_words(["method.conv=6", "method=oelm_conv"]))
    assert (changed.method.name, changed.method.conv, changed.compare.arm) == ("oelm-conv", 6, "oelm-conv")
    both = override(CONFIG, changes_from_words(["method.freeze=all-but-last", "method.layers=1"]))
    assert (both.method.freeze, both.method.layers) == ("all-but-last", 1)  # neither is valid alone


def test_a_new_method_renames_the_arm_and_drops_a_control_of_another_method() -> None:
    rope = experiment("GAP-TS-oelm-bias-rope").at("mini")
    assert (rope.compare.arm, rope.compare.control) == ("oelm-bias-rope", "GAP-TS-trained-bias-rope")
    changed = override(rope, {"method": "oelm-plus"})
    assert (changed.compare.arm, changed.compare.control) == ("oelm-plus-rope", "")
    assert override(rope, {"method": "oelm-bias"}) == rope


def test_two_values_for_one_field_are_an_error() -> None:
    with pytest.raises(
        UsageError, match=r"--set gives 'optim\.lr' two values, 0\.001 and 0\.002; leave one out"
    ):
        changes_from_words(["optim.lr=1e-3", "budget.steps=5", "optim.lr=2e-3"])
    assert changes_from_words(["optim.lr=1e-3", "optim.lr=0.001"]) == {"optim.lr": 1e-3}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.lrr=1", "optim.lr"),
        ("lr=1", "did you mean 'optim.lr'"),
        ("optim.lr=fast", "optim.lr"),
        ("budget.steps=1.5", "budget.steps"),
        ("budget.steps=--5", "expected a whole number"),
        ("budget.steps=5²", "expected a whole number"),
        ("model.position=ropey", "rope"),
        ("method=oelm-freze", "oelm-freeze"),
        ("method.layers=1", "layers"),  # means nothing with freeze "all"
        ("seed=1", "cannot change 'seed'"),
        ("tune.grid=1e-3,2e-3", "--grid"),
        ("tune.seeds=7", "--trial-seeds"),
        ("compare.max_seeds=7", "--max-seeds"),
        ("optim.lr", "field=value"),
        ("optim=1", "optim"),
    ],
)
def test_wrong_words_are_answered_with_what_was_meant(word: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        override(CONFIG, changes_from_words([word]))


@given(st.floats(1e-8, 1.0), st.integers(1, 10**6), st.sampled_from(["cosine", "linear", "constant"]))
def test_what_is_set_is_what_is_there(rate: float, steps: int, schedule: str) -> None:
    words = [f"optim.lr={rate!r}", f"budget.steps={steps}", f"optim.schedule={schedule}"]
    changed = override(CONFIG, changes_from_words(words))
    assert (changed.optim.lr, changed.budget.steps, changed.optim.schedule) == (rate, steps, schedule)
    assert override(changed, {}) == changed


def test_every_field_can_be_set_to_its_own_value() -> None:
    for name in field_names():
        section, _, leaf = name.rpartition(".")
        value = getattr(getattr(CONFIG, section) if section else CONFIG, leaf)
        assert override(CONFIG, {name: value}) == CONFIG, name
