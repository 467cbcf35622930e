"""`python -m benchmarks page`: write docs/performance.md from the files in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import corpus, startup
from benchmarks.markdown import table
from oelm.units import counted

Result = dict[str, Any]

HEADER = """\
# Performance

Generated from `benchmarks/results/*.json` by `python -m benchmarks page`. No figure is written by hand."""

ALONE = """\
Every arm (a method or tool) runs in a process of its own, while no other arm is in memory. The comparison is
repeated with new processes, in an order that is shuffled every time, and the 95 % confidence interval
(Student's t of log ratios) is computed over processes. The first steps of a process are not counted."""

REFERENCE = """\
The speed of the machine varies over minutes. So ratios and shares compare steps in units of the time that two
products of 2048 x 2048 matrices take in the same process, just before and after the step. These matrices add
32 MiB to the peak memory of every arm."""

OWN_PRODUCTS = """\
These products, and so the GEMM peak, are those of our own code, the faster ones on this CPU. They keep up to
9 MiB of memory per thread, also in the processes of other tools, which do not use them."""

TOGETHER = """\
Every method runs in a process of its own. All of them are in memory and take turns of several steps, in an
order that is shuffled in every round. The comparison is repeated with new processes, and the 95 % confidence
interval (Student's t of log ratios) is computed over processes. The first step of a turn is not counted."""

TURNS = """\
The arms take turns in one process with one thread; the 95 % confidence interval is over rounds. `encode` and
`encode_batch_fast` are loops over `tokenizers` that read the same jsonl file and write an array; ours writes
a token file with its hash. `datasets.map` is measured without reading and writing."""

KERNELS = """\
The time of a training step of the baseline (forward and backward pass, gradient clipping and AdamW) with our
C++ code, divided by that of another arm. The arm `torch` uses none of it. All arms are in one process and
take turns of several steps, in alternating order; the first step of a turn is not counted. The 95 %
confidence interval is over rounds (Student's t of log ratios). It covers the noise of this one process, not
the differences between processes or machines."""


def make(results: Path | str, document: Path | str) -> str:
    """Write the page to `document` and return its text."""
    paths = sorted(Path(results).glob("*.json"))
    lines = [HEADER]
    if not paths:
        lines += [
            "",
            "No results yet. `python -m benchmarks step -o benchmarks/results/step.json` writes the first.",
        ]
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        title, section = SECTIONS[result["kind"]]
        lines += ["", f"## {title(result)}", "", *section(result), "", *source(path.name, result)]
    text = "\n".join(lines) + "\n"
    Path(document).write_text(text, encoding="utf-8")
    return text


def source(name: str, result: Result) -> list[str]:
    """Return the lines with the command, the machine and the library versions of a result."""
    m, v, load = result["machine"], result["versions"], result["load"]
    threads = result.get("settings", {}).get("threads", m["threads"])
    sha = result.get("commit") or ""  # 40 digits, and "-dirty" if there were uncommitted changes
    commit = f", commit {sha[:8]}{sha[40:]}" if sha else ""
    return [
        f"`{result['command']}` ({name}, {result['date']}{commit})",
        "",
        f"{m['cpu']}, {m['cores']} cores, {counted(threads, 'thread')}, {m['memory_bytes'] / 2**30:.0f} GiB; "
        f"torch {v['torch']}, transformers {v.get('transformers', '-')}; "
        f"load average {load['before']} before, {load['after']} after.",
    ]


def cpu(result: Result) -> str:
    """Return the name of the CPU of a result. Names such as "AMD EPYC" do not tell its generation."""
    name = str(result["machine"]["cpu"])
    return f"{name} (Zen 5 or later)" if result["machine"].get("compiled_products") else name


def step_title(result: Result) -> str:
    s = result["settings"]
    positions = ", rotary positions" if s["position"] == "rope" else ""
    model = f"{s['size']}, {s['batch']} x {s['context']} tokens{positions}"
    return f"A training step: {model}, {cpu(result)}"


def step(result: Result) -> list[str]:
    rows = []
    for arm in result["arms"]:
        memory = arm["memory"]
        rows.append(
            (
                arm["name"],
                f"{arm['median_seconds']:.3f}",
                interval(arm["ratio"]),
                f"{arm['flops_ratio']:.3f}" if arm.get("flops_ratio") else "-",
                f"{arm['tokens_per_second']:,.0f}",
                f"{arm['gemm_peak_share']:.2f}" if "gemm_peak_share" in arm else "-",
                f"{memory['peak_bytes'] / 2**20:,.0f}",
                megabytes(memory.get("gradient_bytes")),
                megabytes(memory.get("optimizer_bytes")),
            )
        )
    head = (
        "arm",
        "median s/step",
        "time / baseline [95 %]",
        "FLOPs / baseline",
        "tokens/s",
        "share of GEMM peak",
        "peak MiB",
    )
    lines = table((*head, "gradients MiB", "optimizer MiB"), rows)
    s = result["settings"]
    peak = f"{result['gemm_peak_flops'] / 1e9:.0f} GFLOP/s"
    plan = (
        f"{s['processes']} processes per arm, {counted(s['rounds'], 'round')} "
        f"of {counted(s['steps'], 'counted step')} each"
    )
    lines += [
        "",
        f"{plan}. A ratio above 1 means slower than the baseline.",
        f"GEMM peak, the FLOP/s of products of 2048 x 2048 matrices: {peak}. The share of a step is its",
        "own FLOP/s divided by that.",
        "Tokens per second follow from the median of all counted steps. Ratios compare the arms in each",
        "repetition, so they may differ from the ratio of two medians.",
        "`baseline (again)` is a second copy of our baseline: its ratio would be 1 without noise.",
        "",
        *(ALONE if result["order"] == "processes" else TOGETHER).splitlines(),
        *(REFERENCE.splitlines() if result["arms"][0].get("reference") else ()),
        *(OWN_PRODUCTS.splitlines() if result.get("machine", {}).get("compiled_products") else ()),
    ]
    controls = [
        f"- `{arm['name']}` takes {interval(arm['control_ratio'])} of the time of its control "
        f"`{arm['fields']['control']}`."
        for arm in result["arms"]
        if arm.get("control_ratio")
    ]
    return [*lines, "", *controls] if controls else lines


def classification(result: Result) -> list[str]:
    rows = [
        (
            comparison["dataset"],
            arm["name"],
            f"{arm['samples_per_second']:.2f}",
            interval(arm["speedup_of_ours"]),
            f"{arm['facts']['tokens_per_sample']:.0f}",
            f"{100 * arm['facts']['padding_share']:.1f} %",
            f"{arm['memory']['peak_bytes'] / 2**20:,.0f}",
        )
        for comparison in result["comparisons"]
        for arm in comparison["arms"]
    ]
    head = ("dataset", "arm", "samples/s", "time / ours [95 %]", "tokens/sample", "padding", "peak MiB")
    s = result["settings"]
    note = (
        f"{s['model']}, {s['rows']} rows per step, dropout {s['dropout']:g}, at most 512 tokens; "
        f"{s['processes']} processes per arm."
    )
    return [*table(head, rows), "", note, *ALONE.splitlines(), *REFERENCE.splitlines()]


def tokenisation(result: Result) -> list[str]:
    rows = [
        (
            c["dataset"],
            c["tokenizer"],
            name,
            f"{speed:.2f}",
            interval(c["ratio_to_ours"][name]) if name in c["ratio_to_ours"] else "-",
        )
        for c in result["comparisons"]
        for name, speed in c["megabytes_per_cpu_second"].items()
    ]
    head = ("dataset", "tokenizer", "arm", "MB/s per core", "time / ours [95 %]")
    return [*table(head, rows), "", *TURNS.splitlines()]


def kernels(result: Result) -> list[str]:
    rows = []
    for model in result["models"]:
        work = model["workload"]
        positions = "rotary" if work["position"] == "rope" else work["position"]
        tokens = f"{work['batch']} x {work['context']} tokens"
        name = f"{work['size']}, {positions} positions, {tokens}, vocabulary {work['vocabulary']:,}"
        rows += [
            (
                name,
                str(model["threads"]),
                arm,
                f"{1000 * seconds:.1f}",
                interval(model["ratios"][arm]) if arm in model["ratios"] else "-",
            )
            for arm, seconds in model["median_seconds"].items()
        ]
    head = ("model", "threads", "arm", "median ms/step", "time with C++ / time of the arm [95 %]")
    s = result["settings"]
    plan = f"{counted(s['rounds'], 'round')} of {counted(s['steps'], 'counted step')} per arm."
    lines = [*table(head, rows), "", plan, *KERNELS.splitlines()]
    peaks = result.get("gemm_peaks")
    if peaks is None:
        lines += ["", "Measured when only attention and GELU were C++ code."]
    elif len(peaks) == 2:
        ours, theirs = (f"{speed / 1e9:.0f}" for speed in peaks.values())
        lines += [
            "",
            "The arm `C++ with torch's products` leaves matrix products to torch.",
            f"Products of 1024 x 1024 matrices on one thread: {ours} GFLOP/s, by torch {theirs} GFLOP/s.",
        ]
    return lines


def folders(result: Result) -> list[str]:
    head = ("command", *(f"{count:,} run{'s' * (count > 1)}" for count in result["counts"]))
    rows = [
        (f"`oelm {command}`", *(f"{seconds:.2f} s" for seconds in found["best_seconds"]))
        for command, found in result["commands"].items()
    ]
    return [
        *table(head, rows),
        "",
        f"Fastest of {result['settings']['rounds']} calls of the command, including the start of Python.",
    ]


SECTIONS: dict[str, tuple[Callable[[Result], str], Callable[[Result], list[str]]]] = {
    "step": (step_title, step),
    "classification": (lambda r: "Classification", classification),
    "tokenisation": (lambda r: "Tokenisation", tokenisation),
    "kernels": (lambda r: f"Our C++ code, {cpu(r)}", kernels),
    "corpus": (lambda r: "Preparing a large corpus", corpus.lines),
    "folders": (lambda r: "Many run folders", folders),
    "startup": (lambda r: "Start of a run", startup.lines),
}


def interval(r: dict[str, float]) -> str:
    return f"{r['value']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"


def megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f}"
