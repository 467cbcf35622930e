"""`oelm bench`: step time, memory and saving of each method on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from oelm.cli.options import add_json, command_parser
from oelm.cli.output import print, print_json, print_table
from oelm.units import bytes_text


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers,
        "bench",
        "step time, memory and saving of each method on this machine",
        "oelm bench --methods baseline oelm-freeze --size medium-512 --batch 4",
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="the first must be baseline")
    parser.add_argument("--size", default="medium-512", help="a size of our GPT, or minilm, tiny-bert")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="rows per step")
    parser.add_argument("--position", choices=["learned", "rope"], default="learned")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:0")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes per method")
    parser.add_argument("--rounds", type=int, default=4, help="turns per process")
    parser.add_argument("--steps", type=int, default=3, help="counted steps per turn")
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("-o", "--output", default="", metavar="FILE", help="also write the result as JSON")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from oelm.bench.harness import Plan
    from oelm.bench.methods import DEFAULT_METHODS, MethodsBench, Workload
    from oelm.bench.methods import run as measure

    bench = MethodsBench(
        tuple(args.methods or DEFAULT_METHODS),
        Workload(args.size, args.vocabulary, args.context, args.batch, args.position, args.device),
        Plan(args.processes, args.rounds, args.steps, threads=args.threads),
    )
    result = measure(bench, lambda text: print(f"  {text}", file=sys.stderr, flush=True))
    if args.output:
        from oelm.files.atomic import write_json

        write_json(args.output, result)
    if args.json:
        print_json(result)
    else:
        _show(result)
    return 0


def _show(result: dict[str, Any]) -> None:
    rows = [
        (
            arm["name"],
            f"{arm['median_seconds']:.3f}",
            "{value:.3f} [{low:.3f}, {high:.3f}]".format(**arm["ratio"]),
            f"{arm['flops_ratio']:.3f}",
            f"{arm['tokens_per_second']:,.0f}",
            f"{100 * arm['gemm_peak_share']:.0f} %",
            bytes_text(arm["memory"]["peak_bytes"]),
            bytes_text(arm["memory"]["gradient_bytes"] + arm["memory"]["optimizer_bytes"]),
        )
        for arm in result["arms"]
    ]
    head = ("method", "s/step", "time / baseline [95 %]", "FLOPs / baseline", "tokens/s", "of GEMM peak")
    print_table((*head, "peak memory", "gradients + optimizer"), rows)
