"""`oelm bench`: interleaved benchmarks that anyone can repeat, and the page made from them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from oelm.cli.options import add_json, command_parser
from oelm.cli.output import bytes_text, print_json, print_table


def add_parser(subparsers: Any) -> None:
    bench = command_parser(
        subparsers, "bench", "honest benchmarks", "oelm bench step --arms baseline oelm-freeze plain"
    )
    kinds = bench.add_subparsers(dest="bench", metavar="KIND", required=True)

    step = command_parser(
        kinds,
        "step",
        "whole optimizer steps of several arms, interleaved",
        "oelm bench step --arms baseline plain transformers --rounds 12 -o benchmarks/results/step.json",
    )
    step.add_argument("--arms", nargs="+", metavar="ARM", help="methods, peers; first = reference")
    step.add_argument("--size", default="medium-512", help="a size of our GPT")
    step.add_argument("--vocabulary", type=int, default=50257)
    step.add_argument("--context", type=int, default=512)
    step.add_argument("--batch", type=int, default=4, help="rows of the micro-batch")
    step.add_argument("--position", choices=["learned", "rope"], default="learned")
    step.add_argument("--rounds", type=int, default=12)
    step.add_argument("--warmup", type=int, default=2)
    step.add_argument("--threads", type=int, default=0, help="0 = all cores")
    step.add_argument("--compile", action="store_true", help="our arms through torch.compile")
    step.add_argument("-o", "--output", default="", metavar="FILE", help="also write the result as JSON")
    add_json(step)
    step.set_defaults(bench_run=_step)


def run(args: argparse.Namespace) -> int:
    return args.bench_run(args)


def _step(args: argparse.Namespace) -> int:
    from oelm.bench.results import save
    from oelm.bench.step import DEFAULT_ARMS, StepBench
    from oelm.bench.step import run as measure

    bench = StepBench(
        arms=tuple(args.arms or DEFAULT_ARMS),
        size=args.size,
        vocabulary=args.vocabulary,
        context=args.context,
        batch=args.batch,
        position=args.position,
        rounds=args.rounds,
        warmup=args.warmup,
        threads=args.threads,
        compiled=args.compile,
    )
    result = measure(bench, _progress)
    if args.output:
        save(result, args.output)
    if args.json:
        print_json(result)
        return 0
    first = result["arms"][0]["name"]
    rows = [
        (
            arm["name"],
            f"{arm['median_seconds']:.3f}",
            f"{arm['ratio']['value']:.3f} [{arm['ratio']['low']:.3f}, {arm['ratio']['high']:.3f}]",
            f"{arm['flops_ratio']:.3f}" if arm.get("flops_ratio") else "-",
            f"{arm['tokens_per_second']:,.0f}",
            f"{100 * arm['gemm_peak_share']:.0f} %" if "gemm_peak_share" in arm else "-",
            bytes_text(arm["memory"]["peak_bytes"]),
            f"{arm['memory_ratio']:.2f}",
        )
        for arm in result["arms"]
    ]
    header = (
        "arm",
        "s/step",
        f"time / {first} [95 %]",
        "FLOPs /",
        "tokens/s",
        "GEMM peak",
        "memory",
        "memory /",
    )
    print_table(header, rows)
    rounds, peak = result["settings"]["rounds"], result["gemm_peak_flops"] / 1e9
    print(f"\n{rounds} interleaved rounds of whole optimizer steps; GEMM peak {peak:.0f} GFLOP/s")
    if args.output:
        print(f"written to {args.output}")
    return 0


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
