"""`oelm bench table`: docs/performance.md and its figure, made from benchmarks/results and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oelm.bench.goals import judge
from oelm.errors import OelmError
from oelm.files.atomic import write_text

Result = dict[str, Any]
FIGURE = "growth.svg"


def make(results: Path | str, document: Path | str) -> Path:
    """Write the document, and beside it the figure when growth was measured."""
    found = read(Path(results))
    document = Path(document)
    document.parent.mkdir(parents=True, exist_ok=True)
    for _, result in found:
        if result["kind"] == "growth":
            draw_growth(result, document.parent / FIGURE)
    write_text(document, "\n".join(_lines(found)) + "\n")
    return document


def read(folder: Path) -> list[tuple[str, Result]]:
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise OelmError(f"no results in {folder}: `oelm bench step -o {folder}/step.json` writes one")
    return [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _lines(found: Sequence[tuple[str, Result]]) -> list[str]:
    lines = [
        "# Performance",
        "",
        "Made from `benchmarks/results/*.json` by `oelm bench table`; no figure here is written by hand.",
        "Arms take turns, so that a busy minute hits them all, those of steps and classification in",
        "processes of their own; tokenisation counts CPU time. Ratios are of medians over rounds (samples",
        "per second: of means) with 95 % intervals: a bootstrap of the rounds, below 10 rounds Student's t.",
        "",
        "## Goals",
        "",
    ]
    judged = judge(result for _, result in found)
    lines += _table(
        ("goal", "wanted", "measured [95 %]", "verdict"),
        [(j.goal, j.wanted, j.figure, j.verdict) for j in judged],
    )
    for name, result in found:
        section = _SECTIONS.get(result["kind"])
        if section is None:
            raise OelmError(f"{name}: no table is known for the kind '{result['kind']}'")
        lines += ["", f"## {_title(result)}", "", *section(result), "", *_source(name, result)]
    return lines


def _title(result: Result) -> str:
    names = {
        "step": "A training step",
        "classification": "Classification",
        "tokenisation": "Tokenisation",
        "growth": "How cost grows",
        "folders": "Many run folders",
    }
    settings = result.get("settings", {})
    if result["kind"] == "step":
        return f"{names['step']}: {settings['size']}, {settings['batch']} x {settings['context']} tokens"
    return names[result["kind"]]


def _source(name: str, result: Result) -> list[str]:
    m, v = result["machine"], result["versions"]
    threads = result.get("settings", {}).get("threads", m["threads"])
    load = result.get("load")
    busy = f"; load {load['before'][0]} before, {load['after'][0]} after" if load and load["before"] else ""
    return [
        f"`{result['command']}` ({name}, {result['date']})",
        "",
        f"{m['cpu']}, {m['cores']} cores, {threads} threads, {m['memory_bytes'] / 2**30:.0f} GiB; "
        f"torch {v['torch']}, transformers {v.get('transformers', '-')}{busy}",
    ]


def _realised(saving: dict[str, float]) -> str:
    low, high = (100 * saving[key] / saving["predicted"] for key in ("low", "high"))
    return f"{100 * saving['realised']:.0f} % [{low:.0f}, {high:.0f}]"


def _step(result: Result) -> list[str]:
    first = result["arms"][0]["name"]
    rows = []
    for arm in result["arms"]:
        saving, held = arm.get("saving"), arm["memory"]
        rows.append(
            (
                arm["name"],
                f"{arm['median_seconds']:.3f}",
                _interval(arm["ratio"], digits=3),
                f"{arm['flops_ratio']:.3f}" if arm.get("flops_ratio") else "-",
                _realised(saving) if saving else "-",
                f"{arm['tokens_per_second']:,.0f}",
                f"{arm['gemm_peak_share']:.2f}" if "gemm_peak_share" in arm else "-",
                f"{held['peak_bytes'] / 2**20:,.0f}",
                _megabytes(held.get("gradient_bytes")),
                _megabytes(held.get("optimizer_bytes")),
            )
        )
    header = (
        "arm",
        "s/step",
        f"time / {first} [95 %]",
        "FLOPs /",
        "saving realised [95 %]",
        "tokens/s",
        "of GEMM peak",
        "peak MiB",
        "gradients MiB",
        "optimizer MiB",
    )
    peak = result["gemm_peak_flops"]
    rounds = result["settings"]["rounds"]
    note = f"{rounds} rounds; GEMM peak in the same rounds {peak / 1e9:.0f} GFLOP/s."
    return [*_table(header, rows), "", note + _bound(result, peak)]


def _bound(result: Result, peak: float) -> str:
    """How far ahead of each peer a step could be that were nothing but matrix products at the peak."""
    peers = [arm for arm in result["arms"] if "flops_per_step" not in arm]
    if not peers:
        return ""
    floor = result["arms"][0]["flops_per_step"] / peak
    ahead = ", ".join(f"{arm['median_seconds'] / floor:.2f}x {arm['name']}" for arm in peers)
    return f" The products alone would take {floor:.2f} s at that peak: the most that can be had is {ahead}."


def _classification(result: Result) -> list[str]:
    rows = [
        (
            comparison["dataset"],
            arm["name"],
            f"{arm['samples_per_second']:.2f}",
            _interval(arm["speedup_of_ours"]),
            _interval(arm["speedup_of_ours_cpu"]),
            f"{arm['samples']:,}",
            f"{arm['tokens_per_sample']:.0f}",
            f"{100 * arm['padding_share']:.1f} %",
            f"{arm['memory']['peak_bytes'] / 2**20:,.0f}",
        )
        for comparison in result["comparisons"]
        for arm in comparison["arms"]
    ]
    header = (
        "dataset",
        "arm",
        "samples/s",
        "ours is [95 %]",
        "in CPU time [95 %]",
        "samples",
        "tokens/sample",
        "padding",
        "peak MiB",
    )
    s = result["settings"]
    facts = f"{s['model']}, {s['rows']} rows per step, dropout {s['dropout']:g}, at most 512 tokens, "
    facts += f"{s['rounds']} rounds of {s['steps']} steps (1 where padded)."
    return [*_table(header, rows), "", facts]


def _tokenisation(result: Result) -> list[str]:
    rows = [
        (
            comparison["dataset"],
            comparison["tokenizer"],
            name,
            f"{speed:.2f}",
            _interval(comparison["ratio_to_ours"][name], "median")
            if name in comparison["ratio_to_ours"]
            else "-",
        )
        for comparison in result["comparisons"]
        for name, speed in comparison["megabytes_per_cpu_second"].items()
    ]
    return _table(("dataset", "tokenizer", "arm", "MB/s per core", "ours is [95 %]"), rows)


def _growth(result: Result) -> list[str]:
    rows = []
    for axis, found in result["axes"].items():
        e = found["exponents"]
        ends = f"{found['values'][0]:,} to {found['values'][-1]:,}"
        times = f"{found['median_seconds'][0]:.3f} to {found['median_seconds'][-1]:.3f}"
        exponents = (f"{e[key]:.2f}" for key in ("seconds", "flops", "memory"))
        rows.append((axis, ends, times, *exponents))
    header = ("axis", "from, to", "s/step", "exponent of time", "of FLOPs", "of memory")
    return [*_table(header, rows), "", f"![Step time and memory against size]({FIGURE})"]


def _folders(result: Result) -> list[str]:
    header = ("command", *(f"{count:,} folder{'s' * (count > 1)}" for count in result["counts"]), "exponent")
    rows = [
        (
            f"`oelm {command}`",
            *(f"{seconds:.2f} s" for seconds in found["best_seconds"]),
            f"{found['exponent']:.2f}" if "exponent" in found else "-",
        )
        for command, found in result["commands"].items()
    ]
    note = (
        f"Best of {result['settings']['rounds']} whole commands; the exponent is of what comes on top of 1."
    )
    return [*_table(header, rows), "", note]


_SECTIONS: dict[str, Callable[[Result], list[str]]] = {
    "step": _step,
    "classification": _classification,
    "tokenisation": _tokenisation,
    "growth": _growth,
    "folders": _folders,
}


def draw_growth(result: Result, path: Path) -> None:
    """Seconds and memory against each axis, both logarithmic; told apart by colour, marker and dash."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "oelm", "font.size": 9})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.9), layout="constrained")
    panels = figure.subplots(1, len(result["axes"]), squeeze=False)[0]
    for panel, (axis, found) in zip(panels, result["axes"].items(), strict=True):
        right = panel.twinx()
        e = found["exponents"]
        panel.loglog(
            found["values"],
            found["median_seconds"],
            "o-",
            color="#0072B2",
            label=f"seconds, power {e['seconds']:.2f}",
        )
        right.loglog(
            found["values"],
            [value / 2**20 for value in found["memory_bytes"]],
            "s--",
            color="#D55E00",
            label=f"MiB, power {e['memory']:.2f}",
        )
        panel.set(xlabel=axis, ylabel="s/step")
        right.set_ylabel("MiB")
        panel.set_xticks(found["values"], [f"{value:,}" for value in found["values"]], rotation=30)
        panel.minorticks_off()
        lines = [*panel.lines, *right.lines]
        panel.legend(lines, [line.get_label() for line in lines], fontsize=7, loc="upper left", frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def _interval(r: dict[str, float], key: str = "value", digits: int = 2) -> str:
    return f"{r[key]:.{digits}f} [{r['low']:.{digits}f}, {r['high']:.{digits}f}], n = {r['rounds']}"


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f}"
