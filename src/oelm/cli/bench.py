"""`oelm bench`: measure step time, memory and FLOPs of each method on this machine."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from oelm.cli.options import OUTPUT, Json
from oelm.cli.output import output_file, print, print_json, print_table
from oelm.cli.values import Count, Integer, Names, PositiveCount
from oelm.units import bytes_text


def bench(
    *,
    methods: Names = (),
    size: str = "medium-512",
    vocabulary: PositiveCount = 50257,
    context: PositiveCount = 512,
    batch: PositiveCount = 4,
    position: Literal["learned", "rope"] = "learned",
    device: str = "cpu",
    processes: Integer = 3,
    rounds: Integer = 4,
    steps: Integer = 3,
    threads: Count = 0,
    output: Annotated[str, OUTPUT] = "",
    json: Json = False,
) -> None:
    """Measure optimizer steps with each method, and print step time, memory and FLOPs as a table.

    Parameters
    ----------
    methods
        Methods to compare (`oelm methods`); the first must be baseline. A method is also compared with its
        trained control, if that is one of them.
    size
        Model: a size of the built-in GPT, minilm or tiny-bert.
    vocabulary
        Vocabulary size.
    context
        Context length in tokens.
    batch
        Batch size: rows per optimizer step.
    position
        Position embeddings of the built-in GPT.
    device
        Device to measure on: cpu, cuda or cuda:0.
    processes
        How often the comparison is repeated with a new process for each method, at least 3. The confidence
        intervals are computed from the differences between the repetitions.
    rounds
        Rounds per process; in each round, every method is measured once.
    steps
        Measured steps of each method per round.
    threads
        CPU threads; 0 = all cores.
    output
        Also write the result to this JSON file.
    """
    from oelm.bench.harness import Plan
    from oelm.bench.methods import DEFAULT_METHODS, MethodsBench, Workload
    from oelm.bench.methods import run as measure
    from oelm.training.parallel.world import choose_device

    file = output_file(output) if output else None
    if device != "cpu":
        choose_device(device)  # raises UsageError if this machine does not have the device
    plan = MethodsBench(
        methods or DEFAULT_METHODS,
        Workload(size, vocabulary, context, batch, position, device),
        Plan(processes, rounds, steps, threads=threads),
    )
    result = measure(plan, lambda text: print(f"  {text}", file=sys.stderr, flush=True))
    if file:
        from oelm.files.atomic import write_json

        write_json(file, result)
    if json:
        print_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    rows = [
        (
            arm["name"],
            f"{arm['median_seconds']:.3f}",
            _interval(arm["ratio"]),
            _interval(arm["control_ratio"]) if arm["control_ratio"] else "-",
            f"{arm['flops_ratio']:.3f}",
            f"{arm['tokens_per_second']:,.0f}",
            f"{100 * arm['gemm_peak_share']:.0f} %",
            bytes_text(arm["memory"]["peak_bytes"]),
            bytes_text(arm["memory"]["gradient_bytes"] + arm["memory"]["optimizer_bytes"]),
        )
        for arm in result["arms"]
    ]
    head = ("method", "median s/step", "time / baseline [95 %]", "time / control [95 %]", "FLOPs / baseline")
    print_table((*head, "tokens/s", "of GEMM peak", "peak memory", "gradients + optimizer"), rows)


def _interval(ratio: dict[str, float]) -> str:
    return "{value:.3f} [{low:.3f}, {high:.3f}]".format(**ratio)
