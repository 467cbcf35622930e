"""The committed results and the pages made from them are one: nothing in a page is written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from oelm.analysis.analyze import Analysis, analyze
from oelm.analysis.load import FINISHED
from oelm.cli.analyze import BENCHMARKS
from oelm.experiments.catalogue import planned_configs
from oelm.report.digest import build_digest
from oelm.report.formats.markdown import to_markdown
from oelm.report.numbers import effect
from oelm.report.sections.claims import claims_page
from oelm.runs.archives.results_file import SUFFIX, read_results_file

ROOT = Path(__file__).parents[1]
RESULTS = "results"


@pytest.fixture(scope="module")
def committed() -> Analysis:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return analyze(RESULTS, benchmarks=BENCHMARKS, planned=planned_configs())


def test_every_result_can_be_read_and_none_holds_weights_or_a_path_of_a_machine(committed: Analysis) -> None:
    assert committed.states[FINISHED] == len(committed.loaded.runs) > 0
    assert committed.warnings == []
    files = [path for path in (ROOT / RESULTS).rglob("*") if path.is_file()]
    assert all(path.name.endswith(SUFFIX) and path.stat().st_size < 500_000 for path in files)
    for run in (run for path in files for run in read_results_file(path)):
        text = run.files.get("manifest.json", "") + run.files["status.json"]
        assert not re.search(r"""[\s='"]/\w""", text), run
        assert '"host"' not in text, run


def test_the_results_page_is_generated_from_the_results(
    committed: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is compared, not the drawing: another matplotlib may draw other bytes."""
    monkeypatch.chdir(ROOT)
    page = Path("docs/results.md")
    document = build_digest(committed, command=f"oelm report --runs {RESULTS} --markdown {page}")
    text = page.read_text(encoding="utf-8")
    assert to_markdown(document, f"{page.stem}_figures") == text, "run `make documents`"
    assert len(text.splitlines()) <= 200
    drawn = {f"{figure.name}.svg" for figure in document.figures}
    assert {p.name for p in Path("docs/results_figures").iterdir()} == drawn
    measured = any(Path("benchmarks/results").glob("step*.json"))  # step times are the fourth figure
    assert len(drawn) == (4 if measured else 3)


def test_the_claims_page_is_generated_from_the_results(
    committed: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    claims = claims_page(committed, f"oelm report --runs {RESULTS} --claims docs/claims.md")
    assert claims == Path("docs/claims.md").read_text(encoding="utf-8"), "run `make documents`"


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_savings_in_the_readme_are_those_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = re.findall(r"^\|.*\| ([\d.]+) % \| ([\d.]+) % \|$", text, re.MULTILINE)
    arms = [
        ("gap", "GAP-WT2-baseline-rope", "GAP-WT2-oelm-freeze-rope"),
        ("gap", "GAP-WT2-baseline-rope", "GAP-WT2-oelm-plus-rope"),
        ("finetune", "FT-SST2-baseline", "FT-SST2-freeze-pretrained"),
        ("gpt-cls", "CLS-AGNEWS-baseline", "CLS-AGNEWS-oelm-freeze"),
    ]
    assert len(shown) == len(arms)
    for (flops, trainable), (study, baseline, arm) in zip(shown, arms, strict=True):
        runs = {
            run.place.split("/")[0]: run for run in read_results_file(ROOT / RESULTS / f"{study}{SUFFIX}")
        }
        costs = [_cost_of_a_step(runs[name].files) for name in (baseline, arm)]
        saved = [f"{100 * (1 - after / before):.1f}" for before, after in zip(*costs, strict=True)]
        assert saved == [flops, trainable]


_MEANS, _CORPORA = "gap, 3 datasets", ("gap/wikitext2", "gap/tinystories", "gap/openwebtext")
_CHANGES_IN_README = [
    (_MEANS, "oelm-freeze-rope", "baseline-rope"),
    (_MEANS, "oelm-plus-rope", "baseline-rope"),
    ("finetune, 3 datasets", "freeze-pretrained", "baseline"),
    ("gpt-cls/agnews", "oelm-freeze", "baseline"),
    *((corpus, "oelm-plus-rope", "trained-plus-rope") for corpus in _CORPORA),
    *((corpus, "oelm-bias-rope", "trained-bias-rope") for corpus in _CORPORA),
    *((corpus, "oelm-bias-rope", "baseline-rope") for corpus in _CORPORA),
]
_CHANGES_IN_FINDINGS = [
    (_MEANS, "oelm-freeze-rope", "orthogonal-init-rope"),
    (_MEANS, "oelm-plus-rope", "baseline-bias-rope"),
    (_MEANS, "oelm-bias-rope", "baseline-bias-rope"),
    ("longer/4x, wikitext2", "oelm-plus-rope", "trained-plus-rope"),
    ("longer/16x, wikitext2", "oelm-plus-rope", "trained-plus-rope"),
    ("wide/tinystories", "oelm-bias-rope", "trained-bias-rope"),
    ("wide/tinystories", "oelm-bias-rope", "baseline-rope"),
    ("wide/tinystories", "oelm-plus-rope", "trained-plus-rope"),
    ("wide/tinystories", "oelm-plus-rope", "baseline-rope"),
    ("wide/wikitext2", "oelm-bias-rope", "trained-bias-rope"),
    ("wide/wikitext2", "oelm-bias-rope", "baseline-rope"),
    ("wide/wikitext2", "oelm-plus-rope", "trained-plus-rope"),
    ("wide/wikitext2", "oelm-plus-rope", "baseline-rope"),
]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("README.md", _CHANGES_IN_README),
        ("README.zh-CN.md", _CHANGES_IN_README),
        ("docs/findings.md", _CHANGES_IN_FINDINGS),
    ],
)
def test_the_changes_in_a_page_are_those_of_the_results_page(
    page: str, expected: list[tuple[str, str, str]]
) -> None:
    """A number with its interval, such as −1.0 % (−5.4 to +3.5), in the order of the page."""
    number = r"([−+]?\d+(?:\.\d+)?)"
    words = r"(?: %)?\**(?: perplexity| points of accuracy| 个百分点)?"
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.split("```text|## Step time", text)[0]  # without the output of the demo and without step times
    shown = re.findall(rf"{number}{words}\s?[(（]{number} (?:to|至)\s{number}(?:, undecided)?[)）]", text)
    rows = [line.split(" | ") for line in (ROOT / "docs/results.md").read_text(encoding="utf-8").splitlines()]
    measured = {
        (row[0].removeprefix("| ").removesuffix(" (mini)"), row[1], row[2]): " to ".join(row[4:6])
        for row in rows
        if len(row) > 6
    }
    assert len(shown) == len(expected)
    for numbers, which in zip(shown, expected, strict=True):
        change, low, high = (_number(part) for part in measured[which].split(" to "))
        digits = [len(text.partition(".")[2]) for text in numbers]
        rounded = [f"{value:.{n}f}" for value, n in zip((change, low, high), digits, strict=True)]
        assert rounded == [f"{_number(text):.{n}f}" for text, n in zip(numbers, digits, strict=True)], which


def test_the_missed_goal_in_the_findings_is_that_of_the_results(committed: Analysis) -> None:
    (c,) = (
        c
        for c in committed.comparisons.made
        if (c.arm.id, c.reference.id) == ("GAP-OWT-oelm-bias-rope", "GAP-OWT-baseline-bias-rope")
    )
    assert c.ratio is not None
    ratio = c.ratio.exp()
    assert ratio.interval is not None
    change, low, high = (100 * (part - 1) for part in (ratio.value, *ratio.interval))
    sentence = f"+{change:.1f} %, with an interval\n  from +{low:.1f} to +{high:.1f} (n = {ratio.n})"
    assert sentence in (ROOT / "docs/findings.md").read_text(encoding="utf-8")


def test_the_step_times_in_the_findings_are_those_of_the_performance_page() -> None:
    section = (ROOT / "docs/findings.md").read_text(encoding="utf-8").partition("## Step time")[2]
    shown = re.findall(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", section)
    page, readme = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("docs/performance.md", "README.md")
    )
    sections = page.split("\n## ")
    cpus = {}
    for cpu in ("Intel(R) Xeon(R) Processor", "AMD EPYC", "AMD EPYC (Zen 5 or later)"):
        starts = f"A training step: medium-512, 4 x 512 tokens, {cpu}\n"
        text = next(section for section in sections if section.startswith(starts))
        rows = re.findall(r"^\| ([\w-]+) \| [\d.]+ \| ([\d.]+ \[[\d., ]+\]) \|", text, re.MULTILINE)
        controls = re.findall(r"^- `([\w-]+)` takes ([\d.]+ \[[\d., ]+\]) of .* control", text, re.MULTILINE)
        cpus[cpu] = dict(rows) | {f"{name} against its control": ratio for name, ratio in controls}
    expected = [cpus[cpu][tool] for cpu in cpus for tool in ("nanogpt", "transformers", "trainer")]
    values = [float(ratio.split()[0]) for ratio in expected]
    span = f"takes {min(values):.1f} to {max(values):.1f} times as long in nanoGPT"
    assert span in readme
    ours = [float(value) for value in re.findall(r"^\| oelm-\w+ \| [\d.]+ \| ([\d.]+) ", page, re.MULTILINE)]
    assert f"step takes {min(ours):.2f} to {max(ours):.2f} times as long" in readme
    expected += [measured["oelm-plus"] for measured in cpus.values()]
    expected += [measured["oelm-plus against its control"] for measured in list(cpus.values())[1:]]
    assert [f"{value} [{low}, {high}]" for value, low, high in shown] == expected


def _number(text: str) -> float:
    return float(text.replace("−", "-").split()[0])


def test_the_figures_without_rotary_positions_are_those_of_the_results(committed: Analysis) -> None:
    text = (ROOT / "docs/why.md").read_text(encoding="utf-8")
    effects = {
        (c.arm.config.id, kind): c.effect
        for kind in ("control", "baseline")
        for c in committed.comparisons.of(kind)
    }
    expected = [
        ("GAP-TS-oelm-freeze", "control"),
        ("GAP-TS-oelm-bias", "control"),
        ("GAP-TS-oelm-bias", "baseline"),
    ]
    for name, kind in expected:
        for positions, suffix in (("learned", ""), ("rotary", "-rope")):
            found = effects[name + suffix, kind]
            assert found is not None
            assert found.interval is not None
            change, low, high = (
                effect(replace(found, value=value), "ppl") for value in (found.value, *found.interval)
            )
            shown = f"{change} ({low.removesuffix(' %')} to {high.removesuffix(' %')})"
            assert f"| {positions} | {shown} | {found.n} |" in text


def _cost_of_a_step(files: Mapping[str, str]) -> tuple[float, int]:
    """FLOPs of a step, and the number of parameters with a gradient and an optimizer state."""
    timing, results = (json.loads(files[name]) for name in ("timing_stats.json", "results.json"))
    return timing["flops_per_step"], results["parameters"]["trainable"]
