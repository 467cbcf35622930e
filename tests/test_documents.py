"""What the documents say runs: Python is executed, command lines are parsed, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oelm.cli.main import COMMANDS, make_app
from oelm.data.catalogue import dataset
from oelm.experiments import catalogue
from oelm.experiments.catalogue import STUDIES, experiment, is_study_file, select
from oelm.experiments.study_file.load import load_study

ROOT = Path(__file__).parents[1]
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
HOWTO = ROOT / "docs" / "howto"
OF_THE_DOCUMENTS = ("TS-MINE", "TS-CONTROL", "MY-01", "MY-02")  # registered by the code of docs/howto

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str | None = None) -> list[str]:
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for kind, text in found if language is None or kind == language]


def commands(page: Path) -> Iterator[str]:
    """Every line of a block that begins with `oelm`, and every `oelm ...` in the running text."""
    for block in blocks(page, ""):
        for line in block.splitlines():
            for part in line.partition(" #")[0].split("&&"):
                if part.strip().startswith("oelm "):
                    yield part.strip()
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in re.findall(r"`(oelm [^`]+)`", prose):
        if "…" not in found:
            yield found


def test_the_pages_hold_commands_at_all() -> None:
    assert sum(1 for page in PAGES for _ in commands(page)) > 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_of_a_page_parses_and_names_what_exists(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(line)[1:]
        if words[0] in ("--help", "--version", "--install-completion"):
            continue
        assert words[0] in COMMANDS, line
        if len(words) == 1:  # the name of a command in running text
            continue
        given = make_app().parse_args(words)[1].arguments
        ids = [*given.get("ids", ()), *([given["id"]] if "id" in given else [])]
        for name in ids:
            assert name in OF_THE_DOCUMENTS or is_study_file(name) or experiment(name)
        study = getattr(given.get("selection"), "study", given.get("study", ""))
        assert study in ("", "mine") or study in STUDIES, line
        names = [*given.get("names", ()), *([given["name"]] if "name" in given else [])]
        for name in names if "--catalogue" not in words else ():
            assert "/" in name or dataset(name), line


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers is forgotten again."""
    from oelm.data import catalogue as data_catalogue
    from oelm.methods import presets as registry
    from oelm.methods.reading import families

    catalogue.experiments()
    monkeypatch.setattr(catalogue, "_registered", dict(catalogue._registered))
    monkeypatch.setattr(data_catalogue, "_REGISTRY", dict(data_catalogue._REGISTRY))
    monkeypatch.setattr(families, "_registered", dict(families._registered))
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


def run_blocks(page: Path, space: dict[str, Any] | None = None) -> dict[str, Any]:
    space = {} if space is None else space
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), space)
    return space


@pytest.mark.usefixtures("own_registries")
def test_code_of_the_how_to_pages_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("own-method", "own-model", "own-data"):
        run_blocks(HOWTO / f"{name}.md")
    assert "frozen" in capsys.readouterr().out
    assert experiment("TS-MINE").at("smoke").method.temperature
    assert experiment("TS-MINE").baseline == "TS-BASELINE-TUNED"
    control = experiment("TS-MINE").control
    assert experiment(control).at("smoke").method == replace(
        experiment("TS-MINE").at("smoke").method, name="my-control", freeze="none"
    )
    assert [e.id for e in select(study="mine")] == ["MY-01", "MY-02"]
    assert dataset("tickets").shape == "2-way"


@pytest.mark.usefixtures("own_registries")
def test_study_files_of_the_pages_are_valid(tmp_path: Path) -> None:
    found = [block for page in PAGES for block in blocks(page, "yaml") if block.startswith("study:")]
    assert found
    for text in found:
        (tmp_path / "study.yaml").write_text(text, encoding="utf-8")
        assert load_study(tmp_path / "study.yaml").experiments


def test_code_of_the_quick_start_runs(capsys: pytest.CaptureFixture[str]) -> None:
    model = run_blocks(ROOT / "docs" / "quickstart.md")["model"]
    assert "frozen" in capsys.readouterr().out
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".query." in n)


@pytest.mark.parametrize("page", ["own-loop", "accelerate", "lightning"])
def test_code_of_the_pages_about_training_loops_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page != "own-loop":
        pytest.importorskip(page)
    monkeypatch.chdir(tmp_path)
    run_blocks(HOWTO / f"{page}.md")  # each page ends with an audit
    assert page == "own-loop" or (tmp_path / "trained" / "oelm.json").is_file()


def test_code_of_the_page_about_choosing_modules_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = HOWTO / "choose.md"
    model = run_blocks(page)["model"]
    printed = capsys.readouterr().out
    assert all(text in printed for text in blocks(page, "text"))
    assert all("vision_model" in n for n, p in model.named_parameters() if not p.requires_grad)


def test_code_of_the_peft_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    model = run_blocks(HOWTO / "peft.md")["model"]
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any("value.lora_A" in name for name in trained)
    assert not any(".query." in name for name in trained)


def test_code_of_the_page_about_sharing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space = run_blocks(HOWTO / "share.md")
    assert space["plain"].config.attention_bias
    assert not space["model"].config.attention_bias


@pytest.mark.parametrize("page", [README, HOWTO / "trainer.md"], ids=lambda page: page.name)
def test_code_for_the_trainer_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny BERT in the place of the one that a hub would give, and four rows of data."""
    import torch
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

    def tiny(name: str, num_labels: int) -> BertForSequenceClassification:
        assert name == "bert-base-uncased"
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=num_labels, **shape))

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", tiny)
    monkeypatch.chdir(tmp_path)
    row = {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor(1)}
    space: dict[str, Any] = {"data": [row] * 4}
    run_blocks(page, space)
    assert "2,112" in capsys.readouterr().out  # frozen: Q and K of one layer, weights and biases
    assert not any(p.requires_grad for n, p in space["model"].named_parameters() if ".query." in n)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [README, CHINESE], ids=lambda page: page.name)
def test_the_readmes_tables_are_whole(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    extra = next(line for line in text.splitlines() if line.startswith("| `extra` |"))
    assert str(len(select(phases=["extra"]))) in extra
    listed = set(re.findall(r"`(\w+)", "".join(line for line in text.splitlines() if line.startswith("| `"))))
    assert set(COMMANDS) <= listed
    assert all(f"`{study}`" in text for study in STUDIES if study != "paper")


def test_both_readmes_hold_the_same_code() -> None:
    """The comments in the code are translated."""
    english, chinese = ([re.sub(r" +# .*", "", text) for text in blocks(page)] for page in (README, CHINESE))
    assert english == chinese
