"""Study files: what they become, errors in them, and one that is trained to its verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.config.limits import check_config
from oelm.data import catalogue as data_catalogue
from oelm.errors import UsageError
from oelm.experiments import catalogue
from oelm.experiments.decide.look import Design, look_at
from oelm.experiments.experiment import Experiment
from oelm.experiments.study_file.load import load_study
from oelm.experiments.study_file.schema import study_schema

FOLDER = Path(catalogue.__file__).parent / "study_file"
FILE = """\
study: mine
data: {dataset: stories, tokenizer: bpe-257, max_length: 64}
model: {width: 32, layers: 2, heads: 4}
arms:
  plain: baseline
  frozen: oelm-freeze
  warm:
    method: {base: oelm-freeze, gain: 2.0}
    control: plain
budget: {tokens: 100000, batch_size: 8}
seeds: [3, 4]
questions:
  - {arm: frozen, margin: 0.1}
  - {arm: warm, reference: frozen, rule: superior}
"""

SMALL = """\
study: mine
data: {dataset: stories, tokenizer: bpe-257, max_length: 16, train_rows: 200, eval_rows: 10}
model: {width: 32, layers: 2, heads: 4}
arms: {plain: baseline, frozen: oelm-freeze}
budget: {steps: 4, eval_every: 2}
seeds: [3, 4, 5]
questions:
  - {arm: frozen, margin: 0.9}
"""


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a study file registers is forgotten after each test."""
    catalogue.experiments()
    monkeypatch.setattr(catalogue, "_registered", dict(catalogue._registered))
    monkeypatch.setattr(catalogue, "_loaded", list(catalogue._loaded))
    monkeypatch.setattr(data_catalogue, "_REGISTRY", dict(data_catalogue._REGISTRY))


def study(folder: Path, text: str = FILE) -> dict[str, Experiment]:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return {e.arm: e for e in load_study(path).experiments}


def test_arms_become_experiments_that_differ_only_in_their_method(tmp_path: Path) -> None:
    arms = study(tmp_path)
    assert [e.id for e in arms.values()] == ["mine-plain", "mine-frozen", "mine-warm"]
    assert [e.baseline for e in arms.values()] == ["", "mine-plain", "mine-plain"]
    assert arms["warm"].control == "mine-plain"
    config = arms["warm"].at()
    assert (config.method.name, config.method.gain, config.method.freeze) == ("warm", 2.0, "all")
    assert config.budget.steps == 196  # 100,000 tokens in steps of 8 x 64, rounded up
    assert config.seed == 42
    assert arms["frozen"].seeds == (3, 4)
    (asked,) = arms["warm"].questions
    assert (asked.reference, asked.rule, asked.margin) == ("mine-frozen", "superior", 0.0)
    for scale in ("full", "mini", "smoke"):
        check_config(arms["frozen"].at(scale))


@pytest.mark.parametrize(
    ("model", "steps", "expected"),  # expected: model, learning rate, steps and warm-up at scale mini
    [
        ("size: tiny", 250, ("tiny", 1e-3, 250, 25)),
        ("size: tiny", 50_000, ("tiny", 1e-3, 600, 120)),
        ("size: medium-512", 500, ("mini", 4e-3, 300, 30)),
        ("size: medium-512", 100_000, ("mini", 4e-3, 1200, 120)),
    ],
)
def test_scale_mini_keeps_a_small_model_and_300_steps(model, steps, expected, tmp_path: Path) -> None:
    text = f"""
study: mine
data: {{dataset: tinystories}}
model: {{{model}}}
arms: {{plain: baseline, frozen: oelm-freeze}}
optim: {{lr: 1.0e-3}}
budget: {{steps: {steps}}}
"""
    c = study(tmp_path, text)["frozen"].planned("mini")
    assert (c.model.name, c.optim.lr, c.budget.steps, c.optim.warmup_steps) == expected


@pytest.mark.parametrize(
    ("written", "instead", "line", "message"),
    [
        ("model:", "modle:", 3, "line 3: unknown field 'modle'; did you mean 'model'?"),
        ("frozen: oelm-freeze", "frozen: 7", 6, "arms.frozen: expected text or a mapping of fields, got 7"),
        ("frozen: oelm-freeze", "Plain: oelm-freeze", 6, "plain and Plain differ only in case"),
        ("gain: 2.0", "gain: two", 8, "arms.warm.method.gain: expected a number or 'match', got 'two'"),
        ("budget: {tokens: 100000", "budget: {steps: 0", 10, "nothing would be trained"),
        ("reference: frozen, rule: superior", "margin: 0.1}\n  - {arm: warm, margin: 0.1", 15, "asked twice"),
        ("gain: 2.0", "gian: 2.0", 8, "arms.warm.method 'gian'; did you mean 'gain'?"),
        ("gain: 2.0", "gain: -2.0", 8, "arms.warm.method: method 'warm': gain must be"),
        ("base: oelm-freeze", "base: oelm-freze", 8, "did you mean 'oelm-freeze'?"),
        ("frozen: oelm-freeze", "frozen: oelm-freze", 6, "arms.frozen: unknown method 'oelm-freze'"),
        ("gain: 2.0", "gain: 2.0, name: baseline", 8, "arms.warm.method.name: the method has the name"),
        ("gain: 2.0", "gain: 2.0, control: trian", 8, "arms.warm.method.control: unknown method 'trian'"),
        ("  warm:", "  oelm-bias:", 7, "the name 'oelm-bias' is already used by a method with other"),
        ("control: plain", "control: warm", 9, "arms.warm.control: an arm cannot be its own control"),
        ("control: plain", "baseline: warm", 9, "an arm cannot be its own baseline"),
        ("control: plain", "control: plane", 9, "arms.warm.control: unknown arm 'plane'; did you mean"),
        ("dataset: stories", "dataset: storeis", 2, "data.dataset: unknown dataset 'storeis'; did you mean"),
        ("dataset: stories", "folder: nowhere", 2, "nowhere does not exist"),
        ("dataset: stories", "dataset: stories, hub: a/b", 2, "one of dataset, folder and hub"),
        ("layers: 2", "layers: two", 3, "model.layers: expected a whole number, got 'two'"),
        (
            "layers: 2",
            "layers: 1_000",
            3,
            "expected a whole number, got '1_000' (str); write it in decimal",
        ),
        ("layers: 2", "layers: 0:02", 3, "model.layers: expected a whole number, got '0:02'"),
        ("study: mine", "study: 7", 1, "study: expected text, got 7 (int); write it in quotes"),
        ("heads: 4", "heads: 5", 3, "GPT width 32 is not divisible by the number of heads, 5"),
        (
            "width: 32, layers: 2, heads: 4",
            "size: tinny",
            3,
            "'tinny'; did you mean 'tiny'?",
        ),
        (
            "width: 32, layers: 2, heads: 4",
            "hub: bert-base-uncased",
            3,
            "task lm cannot train",
        ),
        ("width: 32, layers: 2, heads: 4", "size: tiny, ff: 64", 3, "ff belongs to a shape"),
        ("tokens: 100000", "steps: -5", 10, "budget.steps must be at least 0, not -5"),
        ("tokens: 100000", "tokens: 100000, epochs: 1", 10, "budget.tokens: tokens is allowed only"),
        ("tokens: 100000", "steps: 20, epochs: 2", 10, "give either steps or epochs, not both"),
        ("seeds: [3, 4]", "seeds: []", 11, "seeds: must have at least one seed"),
        ("seeds: [3, 4]", "seeds: [3, 3, 4]", 11, "seeds: 3 is listed twice; list each value once"),
        ("seeds: [3, 4]", "grid: [1e-3, 0.001]", 11, "grid: 0.001 is listed twice"),
        ("seeds: [3, 4]", "smoke: {budget.step: 2}", 11, "did you mean 'budget.steps'?"),
        ("seeds: [3, 4]", "smoke: {method: oelm-bias}", 11, "'method' cannot differ between scales"),
        ("seeds: [3, 4]", "mini: {tune.grid: [1e-3]}", 11, "'tune.grid' cannot differ between scales"),
        ("seeds: [3, 4]", "grid: [0.001, 0]", 11, "grid: learning rates must be above 0"),
        ("margin: 0.1", "margin: 5", 13, "questions[0].margin: must be at least 0 and below 1"),
        ("rule: superior", "rule: suprior", 14, "did you mean 'superior'?"),
        ("study: mine", "study: a/b", 1, "'a/b' cannot be a study's name"),
        ("study: mine", "study: [mine", 0, "not valid YAML (line "),
    ],
)
def test_an_error_names_the_file_the_line_and_the_key(
    written: str, instead: str, line: int, message: str, tmp_path: Path
) -> None:
    assert written in FILE
    with pytest.raises(UsageError) as found:
        study(tmp_path, FILE.replace(written, instead))
    assert message in str(found.value)
    assert f"mine.yaml, line {line}: " in str(found.value) or not line
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "mine.yaml is empty"),
        (b"# nothing\n", "mine.yaml is empty"),
        (b"- a\n", r"mine.yaml: expected a mapping of fields, got \['a'\]"),
        (b"study: mine\n", "mine.yaml: the field 'data' is missing"),
        (b"\xff\xfe", "mine.yaml: not UTF-8 text"),
        (b"study: a\ndata: {dataset: stories}\narms: [a, b]\n", "line 3: arms: expected a mapping of fields"),
    ],
)
def test_a_file_that_is_no_study_is_a_usage_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as found:
        load_study(path)
    assert "StudyFile" not in str(found.value)
    with pytest.raises(UsageError, match="is a folder, not a study file"):
        load_study(tmp_path)


def test_numbers_and_words_are_read_as_they_look(tmp_path: Path) -> None:
    text = FILE.replace("tokens: 100000", "steps: 0300").replace("layers: 2", "layers: 02, causal: yes")
    text = text.replace("study: mine", "study: no").replace("seeds: [3, 4]", "mini: {budget.steps: 0100}")
    e = study(tmp_path, text)["frozen"]
    assert (e.id, e.at().budget.steps, e.at("mini").budget.steps) == ("no-frozen", 300, 100)
    assert "layers=2" in e.model.name
    assert e.model.causal is True


def test_a_file_with_deep_nesting_or_aliases_is_refused(tmp_path: Path) -> None:
    for text, message in (("study: " + "[" * 1000, "deeper"), ("study: &a x\ntitle: *a", "aliases")):
        with pytest.raises(UsageError, match=message):
            study(tmp_path, text)


def test_data_and_model_folders_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for split in ("train", "validation", "test"):
        rows = [{"text": f"row {n}", "label": n % 2} for n in range(20)]
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / "texts" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    text = FILE.replace("dataset: stories", "folder: texts").replace("tokens: 100000", "epochs: 1")
    e = study(tmp_path, text)["frozen"]
    assert (e.task, e.data.dataset) == ("classification", str(tmp_path / "texts"))
    check_config(e.at("smoke"))  # the folder is used at every scale
    (tmp_path / "bert").mkdir()
    model = "model: {folder: bert, dropout: 0.0}"
    e = study(tmp_path, text.replace("model: {width: 32, layers: 2, heads: 4}", model))["frozen"]
    assert (e.model.family, e.model.name, e.model.pretrained) == ("hf", str(tmp_path / "bert"), True)
    at_bart = replace(e, model=replace(e.model, name="/home/bart/t5/bert"))
    assert [at_bart.planned(scale).model.name for scale in ("mini", "smoke")] == ["minilm", "tiny-bert"]
    hub = replace(e, model=replace(e.model, name="facebook/bart-base"))
    assert hub.planned("mini").model.name == "tiny-bart"


def test_a_dataset_of_the_hub_is_registered_here_and_in_worker_processes(tmp_path: Path) -> None:
    hub = "hub: lab/tickets, columns: {text: body, label: urgency}, classes: [low, high]"
    path = tmp_path / "mine.yaml"
    text = FILE.replace("dataset: stories", hub).replace("tokens: 100000", "epochs: 1")
    path.write_text(text, encoding="utf-8")
    (first, *_rest) = catalogue.select([str(path)])
    entry = data_catalogue.dataset(first.data.dataset)
    assert (entry.hub, entry.shape, entry.aliases["text"]) == ("lab/tickets", "2-way", ("body",))
    assert first.task == "classification"
    assert str(path) in catalogue.loaded_catalogue_files()


def test_the_schema_is_up_to_date_and_fits_the_files(tmp_path: Path) -> None:
    published = json.loads((FOLDER / "study.schema.json").read_text(encoding="utf-8"))
    assert published == study_schema(), "run `make schema`"
    assert published["properties"]["data"]["properties"]["folder"]["description"].startswith("folder with")
    jsonschema = pytest.importorskip("jsonschema")
    import yaml

    template = (FOLDER / "template.yaml").read_text(encoding="utf-8").replace("4e-3", "0.004")
    for text in (template, FILE):
        jsonschema.validate(yaml.safe_load(text), published)
    for wrong in (FILE.replace("gain", "gian"), FILE.replace("layers: 2", "layers: two"), "study: x"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(wrong), published)


def test_init_writes_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "new.yaml"]) == 0
    schema = (
        (tmp_path / "new.yaml").read_text(encoding="utf-8").splitlines()[0].partition("$schema=file://")[2]
    )
    assert json.loads(Path(schema).read_text(encoding="utf-8"))["title"] == "oelm study file"
    assert main(["init", "new.yaml"]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err
    assert main(["show", "new.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "my-study-frozen" in shown
    assert "is my-study-frozen non-inferior to my-study-trained? margin 1 %" in shown
    for ignored in (["--scale", "smoke"], ["--set", "optim.lr=1"], ["--seed", "3"], ["--gpu", "A100"]):
        assert main(["show", "new.yaml", *ignored]) == 2  # these options have no effect without an arm
        assert "`oelm show new.yaml frozen --scale smoke`" in capsys.readouterr().err
    assert main(["init", "study.txt"]) == 2
    assert main(["init", "my study.yaml"]) == 0
    assert "  oelm run 'my study.yaml'  " in capsys.readouterr().out  # can be pasted into a shell
    assert main(["train", "new.yaml"]) == 2
    assert "add its name: baseline, trained, frozen" in capsys.readouterr().err
    assert main(["run", "other.yaml"]) == 2
    assert "`oelm init other.yaml` writes one" in capsys.readouterr().err


def test_a_study_file_is_trained_analyzed_and_reported(
    in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the file to answered questions; the analysis has only the run folders."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(SMALL, encoding="utf-8")
    assert main(["run", "mine.yaml", "--gpus", "none"]) == 0
    assert "6 runs: 6 finished" in capsys.readouterr().out
    assert main(["train", "mine.yaml", "frozen"]) == 0  # seed 3, which has already finished
    (tmp_path / "mine.yaml").unlink()
    catalogue._registered.clear()
    catalogue._load_catalogue.cache_clear()
    capsys.readouterr()
    assert main(["analyze", "mine", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["questions"]
    assert (answer["id"], answer["reference"], answer["margin"]) == ("mine-frozen", "mine-plain", 0.9)
    assert answer["verdict"]["outcome"] == "met"  # after 4 steps the arms hardly differ
    assert main(["analyze", "mine"]) == 0
    assert "at most 90 % worse?" in capsys.readouterr().out
    assert main(["report", "mine", "--latex", "tables", "--lang", "zh"]) == 0
    assert "最多差" in (tmp_path / "tables" / "questions-1.tex").read_text(encoding="utf-8")


def test_the_references_of_questions_are_selected_with_their_arms(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE, encoding="utf-8")
    arms = {e.arm: e for e in catalogue.study_arms(str(path))}
    assert {e.arm for e in catalogue.with_references([arms["warm"]])} == {"warm", "plain", "frozen"}
    alone = Design((arms["warm"].at("smoke"), arms["plain"].at("smoke")))
    with pytest.raises(UsageError, match="mine-warm has a question about mine-frozen"):
        look_at(alone, tmp_path)


def test_the_rules_of_questions_are_those_of_their_names() -> None:
    import math

    from oelm.analysis.answers import question_rule
    from oelm.analysis.verdict import _region
    from oelm.config.run_config import QuestionConfig, QuestionRule

    def outcome(rule: QuestionRule, change: float, perplexity: bool) -> str:
        found = question_rule(QuestionConfig("x", rule, 0.05), perplexity=perplexity)
        return found.regions[_region(found, math.log1p(change))]

    for rule, changes_met, changes_missed in (
        ("non-inferior", (-0.5, 0.0, 0.04), (0.06, 0.5)),
        ("superior", (-0.5, -0.06), (-0.04, 0.0, 0.5)),
        ("equivalent", (-0.04, 0.0, 0.04), (-0.5, -0.06, 0.06, 0.5)),
    ):
        for perplexity in (True, False):
            sign = 1 if perplexity else -1  # a higher accuracy is better
            assert {outcome(rule, sign * c, perplexity) for c in changes_met} == {"met"}  # type: ignore[arg-type]
            assert {outcome(rule, sign * c, perplexity) for c in changes_missed} == {"missed"}  # type: ignore[arg-type]


def test_a_study_cannot_take_the_name_of_a_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "gap.yaml").write_text(FILE.replace("study: mine", "study: gap"), encoding="utf-8")
    with pytest.raises(UsageError, match="the name of a built-in study"):
        catalogue.select([str(tmp_path / "gap.yaml")])
