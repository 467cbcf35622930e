"""The Method dataclass and the named methods."""

import dataclasses
import json
import subprocess
import sys

import pytest
import yaml

import oelm
from oelm.errors import OelmError, UsageError
from oelm.methods import presets
from oelm.methods.method import Method
from oelm.methods.presets import ALIASES, find_method

DOCUMENTED = [
    "baseline",
    "oelm-freeze",
    "oelm-random",
    "oelm-random-matched",
    "oelm-global",
    "oelm-pretrained",
    "freeze-pretrained",
    "orthogonal-init",
    "oelm-partial",
    "oelm-gradual",
    "oelm-early",
    "oelm-qk-ffn",
    "oelm-ffn",
    "oelm-conv",
    "oelm-lowrank",
    "oelm-bias",
    "baseline-bias",
    "oelm-plus",
    "oelm-core",
    "oelm-temperature",
    "oelm-relative",
]


def test_every_documented_method_exists():
    assert set(DOCUMENTED) <= set(oelm.methods())


@pytest.mark.parametrize("preset", oelm.methods().values(), ids=lambda m: m.name)
def test_a_method_is_described_and_survives_yaml_and_json(preset):
    assert preset.purpose
    assert preset.controls
    assert preset.reference
    assert Method.from_dict(yaml.safe_load(yaml.safe_dump(preset.to_dict()))) == preset
    assert Method.from_dict(json.loads(json.dumps(preset.to_dict()))) == preset


@pytest.mark.parametrize("preset", [m for m in oelm.methods().values() if m.control], ids=lambda m: m.name)
def test_a_control_has_the_same_architecture_and_trains_its_q_and_k(preset):
    control = find_method(preset.control)
    assert control.trains_qk
    for extra in ("bias", "bias_scale", "conv", "conv_value", "core", "temperature", "relative_bias"):
        assert getattr(control, extra) == getattr(preset, extra)
    assert not control.lowrank  # with a trained W, a low-rank adapter changes nothing
    if preset.has_extras:
        assert (control.init, control.gain) == (preset.init, preset.gain)


@pytest.mark.parametrize(("typed", "meant"), [*ALIASES.items(), ("OELM_Freeze", "oelm-freeze")])
def test_aliases_and_other_spellings_find_the_method(typed, meant):
    assert find_method(typed).name == meant


def test_the_error_about_a_typo_names_the_nearest_method():
    with pytest.raises(UsageError, match="did you mean 'oelm-freeze'"):
        find_method("oelm-freze")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"init": "headwize"}, "headwise"),
        ({"freeze": "most"}, "freeze"),
        ({"parts": ("q", "v")}, "part"),
        ({"parts": ("q", "q")}, "twice"),
        ({"parts": None}, "list of names"),
        ({"parts": "qk"}, "list of names"),
        ({"gain": 0.0, "init": "headwise"}, "gain"),
        ({"gain": True, "init": "headwise"}, "gain"),
        ({"gain": 2.0}, "keep"),
        ({"conv": 1}, "taps"),
        ({"bias": 1}, "bias must be true or false"),
        ({"bias": True, "bias_scale": 0}, "bias_scale must be a positive number"),
        ({"bias": True, "bias_scale": float("inf")}, "bias_scale must be a positive number"),
        ({"bias_scale": 24}, "no effect without bias"),
        ({"lowrank": -1}, "lowrank"),
        ({"lowrank": ()}, "lowrank must be an integer, 0 or more, or a list"),
        ({"lowrank": (8, -1)}, "lowrank must be an integer, 0 or more, or a list"),
        ({"lowrank": (8, 2.0)}, "lowrank must be an integer, 0 or more, or a list"),
        ({"lowrank": "8,2"}, "lowrank must be an integer, 0 or more, or a list"),
        ({"lowrank": (0, 0), "lowrank_scale": 2}, "lowrank_scale has no effect without"),
        ({"lowrank": 4, "lowrank_scale": 0}, "lowrank_scale"),
        ({"lowrank": 4, "lowrank_scale": "big"}, "lowrank_scale"),
        ({"lowrank_scale": 2.0}, "lowrank_scale has no effect without"),
        ({"core": 1}, "core"),
        ({"conv_value": 1}, "conv_value.*at least 2 taps"),
        ({"conv_value": True}, "conv_value.*integer"),
        ({"freeze": "first"}, "layers"),
        ({"layers": 2, "freeze": "all"}, "layers"),
        ({"schedule": "gradual"}, "no effect"),
        ({"schedule": "gradual", "freeze": "all"}, "thaw_to"),
        ({"schedule": "gradual", "freeze": "all", "thaw_from": 0.9, "thaw_to": 0.1}, "greater than thaw_to"),
        ({"schedule": "early", "freeze": "all"}, "freeze_at"),
        ({"freeze": "all", "freeze_at": 0.5}, "freeze_at"),
        ({"freeze": "all", "thaw_to": 0.5}, "gradual"),
        ({"freeze": "all", "parts": ()}, "empty"),
        ({"controls": ("init",)}, "controls must be a text"),
        ({"control": None}, "control must be a text"),
    ],
)
def test_an_invalid_or_ineffective_field_is_refused(fields, word):
    with pytest.raises(UsageError, match=word):
        Method("mine", **fields)


def test_a_method_cannot_be_its_own_control():
    with pytest.raises(UsageError, match="cannot be its own control"):
        oelm.register_method(Method("narcissus", init="headwise", freeze="all", control="narcissus"))
    assert "narcissus" not in oelm.methods()


def test_the_error_about_an_unknown_field_names_the_nearest_one():
    with pytest.raises(UsageError, match="did you mean 'lowrank'"):
        Method.from_dict({"name": "mine", "low_rank": 4})
    for wrong in (None, {}, ["name"], "oelm-freeze"):
        with pytest.raises(UsageError, match="mapping of fields with at least a name"):
            Method.from_dict(wrong)


def test_registering_a_method(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(presets, "_METHODS", presets.methods())  # forgotten after the test
    mine = oelm.register_method(
        dataclasses.replace(find_method("oelm-freeze"), name="test-registry-mine", gain=2)
    )
    assert oelm.methods()["test-registry-mine"] is mine
    assert mine.gain == 2.0
    with pytest.raises(OelmError, match="already used by a method"):
        oelm.register_method(dataclasses.replace(mine, gain=3.0))
    for name in ("OELM-Freeze", "oelm_plus", "oelm-v2"):  # `find_method` would return another method for them
        with pytest.raises(OelmError, match="already used by a method"):
            oelm.register_method(dataclasses.replace(mine, name=name))
    assert oelm.register_method(find_method("oelm-freeze")) == find_method("oelm-freeze")


def test_methods_are_listed_without_torch():
    code = "import sys, oelm; assert len(oelm.methods()) > 20; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "False"
