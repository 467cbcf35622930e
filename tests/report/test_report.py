"""The report: its tables, both languages, valid HTML, and text from runs that stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from oelm.analysis.costs import StepRatio
from oelm.methods.presets import find_method
from oelm.printable import printable
from oelm.report import report
from oelm.report.digest import write_markdown
from oelm.report.document import Charts, Document, Section, Table, plain
from oelm.report.formats.export import write_csv
from oelm.report.formats.html import to_html
from oelm.report.formats.markdown import to_markdown
from oelm.report.report import build, write_html
from oelm.report.sections.claims import claims_page
from oelm.report.sections.overview import cost_table, trend_table, where_freezing_works
from oelm.report.sections.plan import SECTIONS
from oelm.report.sections.run_list import relative_link
from oelm.report.summary import anchor, cards, headline
from oelm.report.translate import LANGUAGES, Translator
from run_factory import analyze, cls_config, dump, lm_config, write_arm, write_run, write_study

GOLDEN_SECTIONS = ("verdict", "comparisons", "control", "orthogonality", "where", "costs", "reported")
GOLDEN = Path(__file__).parent / "golden"
BENCHMARK = StepRatio(
    "oelm-freeze",
    "mini",
    128,
    "learned",
    0.957,
    (0.95, 0.964),
    0.049,
    Path("step.json"),
    "turns",
    None,
    0.99,
    60,
)
HOSTILE = "$\\frac{$<script>alert(1)</script>\"'&`|*_[x](javascript:alert(2))\x1b[2J\u202e"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A small study with every kind of comparison, and one malformed run folder."""
    root = write_study(tmp_path_factory.mktemp("runs"), attention=True)
    broken = root / "paper" / "GPT-02" / "scale=mini" / "seed=9"
    broken.mkdir()
    (broken / "config.yaml").write_text("not: [a config", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def analysis(study):
    return analyze(study)


@pytest.fixture(scope="module")
def documents(analysis, tmp_path_factory):
    """Language -> the report."""
    folder = tmp_path_factory.mktemp("out")
    return {lang: build(analysis, folder, lang=lang) for lang in LANGUAGES}


# --- tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lang", LANGUAGES)
def test_tables_are_unchanged(analysis, lang):
    """To change the expected tables, run with OELM_GOLDEN=write and read the diff."""
    _ = Translator(lang)
    shown = [plan for plan in SECTIONS if plan.anchor in GOLDEN_SECTIONS]
    made = tuple(Section(_(p.title), p.anchor, tuple(p.blocks(analysis, _))) for p in shown)
    document = Document("Tables", headline(analysis, _), (), made, lang)
    text = to_markdown(document)
    path = GOLDEN / f"tables_{lang}.md"
    if os.environ.get("OELM_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_datasets_are_ordered_by_training_tokens(tmp_path):
    for name, tokens in (("tinystories", 900), ("wikitext2", 100), ("openwebtext", 500)):
        for arm, ppl in (("baseline", 8.0), ("oelm-freeze", 8.6)):
            write_arm(tmp_path, name, arm, (ppl, ppl + 0.1), tokens=tokens)
    table, remarks = trend_table(analyze(tmp_path), Translator())
    assert [row.cells[1] for row in table.rows] == ["X/wikitext2", "X/openwebtext", "X/tinystories"]
    assert "too few" in str(remarks.lines[0])


def test_datasets_of_two_studies_are_not_counted_together_in_a_trend(tmp_path):
    for study in ("A", "B"):
        for name, tokens in (("tinystories", 900), ("wikitext2", 100), ("openwebtext", 500)):
            for arm, ppl in (("baseline", 8.0), ("oelm-freeze", 8.6)):
                write_arm(tmp_path, name, arm, (ppl, ppl + 0.1), tokens=tokens, study=study)
    _table, remarks = trend_table(analyze(tmp_path), Translator())
    assert ["3 datasets are too few" in str(line) for line in remarks.lines] == [True, True]


def test_two_studies_on_one_dataset_are_shown_separately(tmp_path):
    """A pretrained encoder and a GPT from scratch on imdb share no heading, row or remark."""
    for study, pretrained in (("gpt-cls", False), ("finetune", True)):
        for arm, right in (("baseline", 80), ("oelm-freeze", 60)):
            hits = [np.arange(1000) < 10 * right + seed for seed in ((0, 1) if arm == "baseline" else (1, 0))]
            write_arm(tmp_path, "imdb", arm, hits, make=cls_config, study=study, pretrained=pretrained)
    found, w = analyze(tmp_path), Translator()
    titles = [card.title for card in cards(found, w)[0].cards]
    assert len(titles) == len(set(titles)) == 2
    (table,) = where_freezing_works(found, w)
    assert [(r.cells[2], r.cells[5]) for r in table.rows] == [
        ("from scratch", "gpt-cls/imdb (mini)"),
        ("pretrained", "finetune/imdb (mini)"),
    ]
    assert trend_table(found, w) == []


def test_the_best_other_arm_is_chosen_on_validation(tmp_path):
    """The arm with the best test score must not be chosen for it."""
    for arm, test, validation in (
        ("baseline", 8.0, 8.0),
        ("oelm-freeze", 9.0, 9.0),
        ("oelm-conv", 8.1, 8.5),
        ("oelm-lowrank", 8.4, 8.2),
    ):
        for seed in range(2):
            config = lm_config("GPT-01" if arm == "baseline" else f"X-{arm}", arm, seed=seed)
            folder = write_run(tmp_path, config, test + seed / 10)
            results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            ppl = validation + seed / 10
            results["validation"] |= {"ppl": ppl, "loss": math.log(ppl)}
            dump(folder / "results.json", results)
    said = str(cards(analyze(tmp_path), Translator()))
    assert "Best of 2 other frozen arms on validation: oelm-lowrank" in said
    assert "oelm-conv" not in said
    # The arm of another architecture has a better score, but loses more to its own baseline.
    for id, arm, base, ppl in (("X-rope", "baseline", "", 5.0), ("X-r", "oelm-random", "X-rope", 7.5)):
        for seed in range(2):
            config = lm_config(id, arm, seed=seed)
            config = replace(config, compare=replace(config.compare, arm=f"{arm}-rope", baseline=base))
            write_run(tmp_path, config, ppl + seed / 10)
    said = str(cards(analyze(tmp_path), Translator()))
    assert "Best of 3 other frozen arms on validation: oelm-lowrank" in said


def test_a_study_without_a_baseline_is_summed_up_by_its_controls(tmp_path):
    for arm, control, values in (
        ("trained-plus", "", (8.1, 8.2, 8.31)),
        ("oelm-plus", "X-trained-plus", (8.0, 8.1, 8.2)),
    ):
        for seed, value in enumerate(values):
            config = lm_config(f"X-{arm}", arm, seed=seed)
            write_run(
                tmp_path,
                replace(config, compare=replace(config.compare, baseline="", control=control)),
                value,
            )
    found, _ = analyze(tmp_path), Translator()
    assert headline(found, _).startswith(
        "Frozen arms against their controls, 1 comparison: 1 cost at most 5 %"
    )
    (verdicts,) = cards(found, _)
    assert "oelm-plus: perplexity −1.3 % against trained-plus" in str(verdicts)
    baseline = next(section for section in SECTIONS if section.anchor == "comparisons")
    assert baseline.blocks(found, _) == []


def test_probe_tasks_are_not_counted_as_datasets(tmp_path):
    for dataset in ("tinystories", "task-copy"):
        write_arm(tmp_path, dataset, "baseline", (8.0, 8.1))
        write_arm(tmp_path, dataset, "oelm-freeze", (9.0, 9.1))
    found = analyze(tmp_path)
    assert trend_table(found, Translator()) == []
    assert ", 1 comparison: " in headline(found, Translator())
    assert "task-copy" not in str(where_freezing_works(found, Translator()))
    page = claims_page(found, "oelm report")
    assert "X/tinystories" in page
    assert "task-copy" not in page


def test_step_times_come_only_from_benchmarks_in_a_known_order(study, tmp_path):
    w = Translator()
    (_, without) = cost_table(analyze(study), w)  # the wall times of the runs are not used
    assert all("not benchmarked" in row.cells for row in without.rows)
    arms = [
        {"method": "baseline", "ratio": {"value": 1.0, "low": 1.0, "high": 1.0}},
        {
            "method": "oelm-freeze",
            "ratio": {"value": 0.957, "low": 0.95, "high": 0.964},
            "flops_ratio": 0.951,
        },
        {"method": "", "name": "transformers", "ratio": {"value": 1.7, "low": 1.6, "high": 1.8}},
    ]
    step = {"kind": "step", "order": "turns", "model": "mini", "settings": {"context": 128}, "arms": arms}
    dump(tmp_path / "step.json", step)
    dump(tmp_path / "other_context.json", {**step, "settings": {"context": 2048}})
    dump(tmp_path / "other_batch.json", {**step, "settings": {"context": 128, "batch": 3}})
    dump(tmp_path / "other_vocabulary.json", {**step, "settings": {"context": 128, "vocabulary": 50257}})
    dump(tmp_path / "other_first.json", {**step, "arms": arms[1:]})
    # other methods with the same name
    for name, fields in (
        ("gain", {"gain": 2.0}),
        ("field", {"no_longer": 1}),
    ):
        then = {**arms[1], "fields": {**find_method("oelm-freeze").to_dict(), **fields}}
        dump(tmp_path / f"another_{name}.json", {**step, "arms": [arms[0], then]})
    dump(tmp_path / "other_order.json", {**step, "order": "once"})
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    measured = analyze(study, benchmarks=tmp_path)
    (_, table, source) = cost_table(measured, w)
    assert "step.json" in str(source.text)
    assert "other" not in str(source.text)  # nor "another"
    shown = [row.cells[9] for row in table.rows if "oelm-freeze" in str(row.cells[1])]
    assert shown == ["0.957 (0.950–0.964)"] * 2
    warnings = [str(x) for x in measured.warnings]
    assert any("broken.json" in text for text in warnings)
    assert any("other_order.json" in text and "measure it again" in text for text in warnings)


# --- HTML ------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The tags, attributes and text of a page; asserts that every element is closed."""

    VOID = ("meta", "link", "br", "img", "path", "use", "rect")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_html_is_well_formed_and_loads_nothing(documents, lang):
    text = to_html(documents[lang])
    page = Page(text)
    assert page.open == []
    names = [tag for tag, _ in page.tags]
    scripts = [a for tag, a in page.tags if tag == "script" and a.get("type") != "application/json"]
    assert scripts == [{}]  # one script, without attributes; the policy allows it by its hash
    code = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert names.count("svg") >= 6
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "data"):
            target = attributes.get(name)
            assert target is None or target.startswith(("#", "./", "../", "data:,")), (tag, target)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.findall(r"url\((?!#)", text)
    assert "@import" not in text


def test_links_within_the_page_have_targets_and_ids_are_unique(documents):
    page = Page(to_html(documents["en"]))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        for name in ("href", "xlink:href"):
            target = attributes.get(name) or ""
            assert not target.startswith("#") or target[1:] in ids, target


def test_every_run_folder_is_linked_with_its_command(analysis, tmp_path):
    path = write_html(analysis, tmp_path / "out" / "report.html")
    page = Page(path.read_text(encoding="utf-8"))
    linked = {a["href"] for tag, a in page.tags if tag == "a" and not a["href"].startswith("#")}
    assert len(linked) == len(analysis.loaded.runs)
    for href in linked:
        assert (path.parent / href).is_dir()
    assert "oelm train GPT-02 --scale mini --seed 1" in "".join(page.text)


def hostile_run(root: Path) -> None:
    evil = replace(
        lm_config("GPT-02", "oelm-freeze"),
        method=replace(find_method("oelm-freeze"), name=HOSTILE, purpose=HOSTILE),
    )
    evil = replace(
        evil,
        compare=replace(evil.compare, arm=HOSTILE, group=HOSTILE),
        data=replace(evil.data, dataset=HOSTILE),
    )
    base = replace(lm_config(), data=evil.data, compare=replace(lm_config().compare, group=HOSTILE))
    for seed in range(2):
        write_run(root, replace(base, seed=seed), 8 + seed / 10)
        folder = write_run(root, replace(evil, seed=seed), 9 + seed / 10, attention=True)
        dump(folder / "manifest.json", {"command": HOSTILE, "data": {"origin": HOSTILE, "dataset": HOSTILE}})
    write_run(root, replace(evil, seed=5), state="diverged")
    status = root / "paper" / "GPT-02" / "scale=mini" / "seed=5" / "status.json"
    dump(status, {"state": HOSTILE, "reason": HOSTILE, "step": 1, "total_steps": 2})


def test_text_from_a_run_folder_never_becomes_markup(tmp_path):
    hostile_run(tmp_path / "runs")
    document = build(analyze(tmp_path / "runs"), tmp_path, command=HOSTILE)
    text, markdown = to_html(document), to_markdown(document)
    page = Page(text)
    assert page.open == []
    kinds = [a.get("type") for tag, a in page.tags if tag == "script"]
    assert kinds.count(None) == 1  # our own
    assert text.count("<script") == len(kinds)
    assert "javascript:" not in " ".join(a.get("href") or "" for _, a in page.tags)
    assert printable(HOSTILE) in "".join(page.text)  # shown as text
    assert not {"\x1b", "\u202e"} & set(text + markdown)
    [chart] = [c for s in document.sections for b in s.blocks if isinstance(b, Charts) for c in b.charts[:1]]
    assert printable(HOSTILE) in [line["name"] for line in chart.data["lines"]]
    assert "<script" not in markdown
    assert "](javascript:" not in markdown.replace("\\](", "")


def test_a_link_to_a_folder_is_never_an_absolute_url(tmp_path):
    assert relative_link(tmp_path / "javascript:alert(1)", tmp_path).startswith("./javascript%3A")
    assert relative_link(tmp_path.parent / "a b", tmp_path) == "../a%20b"


def test_the_markdown_report_is_short_and_has_its_figures(analysis, tmp_path):
    stale = tmp_path / "report_figures" / "curves-99.svg"
    stale.parent.mkdir()
    stale.write_text("of an earlier report", encoding="utf-8")
    measured = replace(analysis, benchmarks=[BENCHMARK])
    path = write_markdown(measured, tmp_path / "report.md", lang="zh")
    assert not stale.exists()
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"\]\((report_figures/[^)]+)\)", text)
    names = ["language-modelling", "extras", "classification", "step-time"]
    assert named == [f"report_figures/{name}.svg" for name in names]
    for name in named:
        assert ET.parse(tmp_path / name).getroot().tag.endswith("svg")
    assert "](#" not in text  # the short report has no list of runs to link to
    assert "| oelm-freeze | baseline | 超出 5 % | +8.0 % | +7.0 % 至 +9.0 % | 3 |" in text
    assert "| oelm-freeze | mini | 更快 | −4.3 % | −5.0 % 至 −3.6 % | 60 | −1.0 % | −4.9 % |" in text


def test_limitations_and_unreadable_folders_are_listed(documents):
    text = to_markdown(documents["en"])
    for words in (
        "perplexity intervals cover the seeds, not the choice of test text",
        "no correction",
        "mini scale",
        "tinystories (local files)",
    ):
        assert words in text
    assert "seed=9" in text  # the malformed folder


def test_arms_with_chinese_names_have_links_of_their_own(tmp_path):
    for arm, name in (("baseline", "基线"), ("oelm-freeze", "冻结"), ("oelm-random", "随机")):
        compared = replace(lm_config().compare, group="研究", arm=name)
        write_run(tmp_path, replace(lm_config(f"研究-{name}", arm), study="研究", compare=compared))
    assert len({anchor(arm) for arm in analyze(tmp_path).arms}) == 3


def test_all_sources_of_a_dataset_are_named(tmp_path):
    for study, source in (("a", "local"), ("b", "builtin")):
        config = lm_config()
        write_run(tmp_path, replace(config, study=study, data=replace(config.data, source=source)))
    text = to_html(build(analyze(tmp_path), tmp_path))
    assert "tinystories (local files)" in text
    assert "tinystories (generated text)" in text


def test_a_refused_comparison_is_not_called_undecided(tmp_path):
    for seed in range(3):
        write_run(tmp_path, lm_config(seed=seed))
        other = {"eval_set": "other"}
        write_run(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=seed), fairness=other)
    text = plain(headline(analyze(tmp_path), Translator()))
    assert "undecided" not in text
    assert "1 without a verdict" in text


def test_a_frozen_arm_without_its_baseline_is_not_called_a_baseline(tmp_path):
    write_run(tmp_path, lm_config("GPT-02", "oelm-freeze"))
    analysis = analyze(tmp_path)
    (_, table, *_) = cost_table(analysis, Translator())
    assert table.rows[0].cells[2] == "waiting for the baseline"
    header = write_csv(analysis, tmp_path / "x.csv").read_text(encoding="utf-8")
    assert header.startswith("study,scale,group,")


def test_an_empty_folder_still_gives_a_report(tmp_path):
    text = to_html(build(analyze(tmp_path), tmp_path))
    assert "no finished comparison" in text
    assert Page(text).open == []


def test_the_style_sheet_has_balanced_quotes_and_braces():
    """A line break inside quotes makes a browser ignore the rule."""
    css = (Path(report.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
    for line in css.splitlines():
        assert line.count('"') % 2 == 0, line
    assert css.count("{") == css.count("}")


def test_the_colour_of_a_verdict_is_in_the_verdict_column(documents):
    tables = [b for section in documents["en"].sections for b in section.blocks if isinstance(b, Table)]
    coloured = [table for table in tables if table.verdict >= 0]
    assert len(coloured) >= 4
    for table in coloured:
        assert table.head[table.verdict] in ("Verdict", "Goal")


def test_a_long_command_is_printed_once_and_numbered(study, tmp_path):
    copy = tmp_path / "runs"
    shutil.copytree(study, copy)
    words = "oelm run " + " ".join(f"GPT-{i:02d}" for i in range(30))
    for manifest in copy.rglob("manifest.json"):
        dump(manifest, {**json.loads(manifest.read_text(encoding="utf-8")), "command": words})
    text = to_markdown(build(analyze(copy), tmp_path))
    assert text.count(words) == len({run.config.study for run in analyze(copy).loaded.runs})
    assert "| command 1 |" in text
