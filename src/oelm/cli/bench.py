"""`oelm bench KIND`: honest benchmarks, and the document made from them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from oelm.cli.options import add_json, command_parser
from oelm.cli.output import print, print_json, print_table
from oelm.units import bytes_text

RESULTS = "benchmarks/results"


def add_parser(subparsers: Any) -> None:
    bench = command_parser(
        subparsers, "bench", "honest benchmarks", "oelm bench step --arms baseline oelm-freeze plain"
    )
    kinds = bench.add_subparsers(dest="bench", metavar="KIND", required=True)
    _add_step(kinds)
    _add_classification(kinds)
    _add_growth(kinds)
    _add_folders(kinds)
    _add_tokenisation(kinds)
    _add_table(kinds)


def run(args: argparse.Namespace) -> int:
    return args.bench_run(args)


def _kind(kinds: Any, name: str, text: str, example: str, action: Callable[..., int]) -> Any:
    parser = command_parser(kinds, name, text, f"oelm bench {name}{example}")
    parser.set_defaults(bench_run=action)
    return parser


def _add_rounds(parser: Any, rounds: int, warmup: int) -> None:
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--warmup", type=int, default=warmup, help="rounds that are not counted")
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores")


def _add_output(parser: Any) -> None:
    parser.add_argument("-o", "--output", default="", metavar="FILE", help="also write the result as JSON")
    add_json(parser)


def _add_step(kinds: Any) -> None:
    step = _kind(
        kinds,
        "step",
        "whole optimizer steps of several arms, interleaved",
        f" --arms baseline plain transformers --rounds 12 -o {RESULTS}/step.json",
        _step,
    )
    step.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="methods, as they are or through torch.compile (baseline-compiled), and the peers plain, "
        "transformers, transformers-matched, trainer; the others are measured by the first",
    )
    step.add_argument("--size", default="medium-512", help="a size of our GPT, or minilm, tiny-bert")
    step.add_argument("--vocabulary", type=int, default=50257)
    step.add_argument("--context", type=int, default=512)
    step.add_argument("--batch", type=int, default=4, help="rows of the micro-batch")
    step.add_argument("--position", choices=["learned", "rope"], default="learned")
    _add_rounds(step, 12, 2)
    _add_output(step)


def _step(args: argparse.Namespace) -> int:
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
    )
    return _finish(args, measure(bench, _progress), _show_step)


def _show_step(result: dict[str, Any]) -> None:
    first = result["arms"][0]["name"]
    rows = [
        (
            arm["name"],
            f"{arm['median_seconds']:.3f}",
            _interval(arm["ratio"]),
            f"{arm['flops_ratio']:.3f}" if arm.get("flops_ratio") else "-",
            f"{arm['tokens_per_second']:,.0f}",
            f"{100 * arm['gemm_peak_share']:.0f} %" if "gemm_peak_share" in arm else "-",
            bytes_text(arm["memory"]["peak_bytes"]),
            f"{arm['memory_ratio']:.2f}",
        )
        for arm in result["arms"]
    ]
    times = (f"time / {first} [95 %]", "FLOPs /", "tokens/s", "GEMM peak")
    print_table(("arm", "s/step", *times, "memory", "memory /"), rows)
    rounds, peak = result["settings"]["rounds"], result["gemm_peak_flops"] / 1e9
    print(f"\n{rounds} interleaved rounds of whole optimizer steps; GEMM peak {peak:.0f} GFLOP/s")


def _add_classification(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "classification",
        "samples per second: ours, padded to 512, the Hugging Face Trainer",
        f" --data-dir data -o {RESULTS}/classification.json",
        _classification,
    )
    parser.add_argument("--datasets", nargs="+", default=["agnews", "mnli", "imdb"], metavar="NAME")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="oelm, padded-to-512, trainer")
    parser.add_argument("--model", default="", help="minilm (default where installed) or tiny-bert")
    parser.add_argument("--rows", type=int, default=32, help="rows per optimizer step")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps per round")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--train-rows", type=int, default=0, help="use only so many rows; 0 = all")
    parser.add_argument(
        "--data-dir",
        default=os.environ.get("OELM_DATA_DIR", ""),
        metavar="DIR",
        help="local datasets (or OELM_DATA_DIR); built-in stand-ins without",
    )
    parser.add_argument("--cache-dir", default="", metavar="DIR", help="tokens (or OELM_CACHE_DIR)")
    _add_rounds(parser, 8, 1)
    _add_output(parser)


def _classification(args: argparse.Namespace) -> int:
    from oelm.bench.classification import ClassificationBench
    from oelm.bench.classification import run as measure
    from oelm.bench.classification_arms import ARMS

    bench = ClassificationBench(
        datasets=tuple(args.datasets),
        arms=tuple(args.arms or ARMS),
        model=args.model,
        rows=args.rows,
        steps=args.steps,
        rounds=args.rounds,
        warmup=args.warmup,
        dropout=args.dropout,
        train_rows=args.train_rows,
        threads=args.threads,
        data_dir=args.data_dir,
        cache_dir=args.cache_dir,
    )
    return _finish(args, measure(bench, _progress), _show_classification)


def _show_classification(result: dict[str, Any]) -> None:
    rows = [
        (
            comparison["dataset"],
            arm["name"],
            f"{arm['samples_per_second']:.2f}",
            _interval(arm["speedup_of_ours"]),
            f"{arm['speedup_of_ours_cpu']['value']:.3f}",
            f"{100 * arm['padding_share']:.1f} %",
            bytes_text(arm["memory"]["peak_bytes"]),
        )
        for comparison in result["comparisons"]
        for arm in comparison["arms"]
    ]
    ours = ("ours is [95 %]", "in CPU time")
    print_table(("dataset", "arm", "samples/s", *ours, "padding", "memory"), rows)


def _add_growth(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "growth",
        "step time and memory against context, width, depth and vocabulary",
        f" -o {RESULTS}/growth.json",
        _growth,
    )
    parser.add_argument("--method", default="baseline")
    parser.add_argument("--axes", nargs="+", metavar="AXIS", help="context, width, depth, vocabulary")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--shrink", type=int, default=1, help="divide every size by this, for a quick try")
    _add_rounds(parser, 5, 1)
    _add_output(parser)


def _growth(args: argparse.Namespace) -> int:
    from oelm.bench.growth import AXES, GrowthBench
    from oelm.bench.growth import run as measure

    bench = GrowthBench(
        method=args.method,
        axes=tuple(args.axes or AXES),
        batch=args.batch,
        shrink=args.shrink,
        rounds=args.rounds,
        warmup=args.warmup,
        threads=args.threads,
    )
    return _finish(args, measure(bench, _progress), _show_growth)


def _show_growth(result: dict[str, Any]) -> None:
    rows = [
        (axis, f"{value:,}", f"{seconds:.4f}", bytes_text(memory))
        for axis, found in result["axes"].items()
        for value, seconds, memory in zip(
            found["values"], found["median_seconds"], found["memory_bytes"], strict=True
        )
    ]
    print_table(("axis", "value", "s/step", "memory"), rows)
    for axis, found in result["axes"].items():
        e = found["exponents"]
        print(f"{axis}: time {e['seconds']:.2f}, FLOPs {e['flops']:.2f}, memory {e['memory']:.2f}")


def _add_folders(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "folders",
        "`oelm status` and `oelm analyze` against the number of finished runs",
        f" --counts 1 100 1000 -o {RESULTS}/folders.json",
        _folders,
    )
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 100, 1000], metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    _add_output(parser)


def _folders(args: argparse.Namespace) -> int:
    from oelm.bench.folders import FoldersBench
    from oelm.bench.folders import run as measure

    bench = FoldersBench(counts=tuple(args.counts), rounds=args.rounds)
    return _finish(args, measure(bench, _progress), _show_folders)


def _show_folders(result: dict[str, Any]) -> None:
    rows = [
        (f"oelm {command}", *(f"{seconds:.2f}" for seconds in found["best_seconds"]))
        for command, found in result["commands"].items()
    ]
    print_table(("seconds of", *(f"{count:,} folders" for count in result["counts"])), rows)


def _add_tokenisation(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "tokenisation",
        "MB/s per core against datasets.map and plain tokenizers loops",
        f" --data-dir data -o {RESULTS}/tokenisation.json",
        _tokenisation,
    )
    parser.add_argument("--datasets", nargs="+", metavar="NAME")
    parser.add_argument("--tokenizers", nargs="+", metavar="NAME")
    parser.add_argument("--megabytes", type=float, default=8.0, help="text per arm and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data-dir", default="", metavar="DIR", help="local datasets (or OELM_DATA_DIR)")
    _add_output(parser)


def _tokenisation(args: argparse.Namespace) -> int:
    from oelm.bench.tokenisation import TokenisationBench
    from oelm.bench.tokenisation import run as measure

    bench = TokenisationBench(
        datasets=tuple(args.datasets or TokenisationBench.datasets),
        tokenizers=tuple(args.tokenizers or TokenisationBench.tokenizers),
        megabytes=args.megabytes,
        rounds=args.rounds,
        data_dir=args.data_dir,
    )
    return _finish(args, measure(bench, _progress), lambda result: None)


def _add_table(kinds: Any) -> None:
    parser = _kind(kinds, "table", "docs/performance.md from the results", "", _table)
    parser.add_argument("--results", default=RESULTS, metavar="DIR")
    parser.add_argument("-o", "--output", default="docs/performance.md", metavar="FILE")


def _table(args: argparse.Namespace) -> int:
    from oelm.bench.table import make

    print(f"written to {make(args.results, args.output)}")
    return 0


def _finish(args: argparse.Namespace, result: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> int:
    if args.output:
        from oelm.bench.results import save

        save(result, args.output)
    if args.json:
        print_json(result)
        return 0
    show(result)
    if args.output:
        print(f"written to {args.output}")
    return 0


def _interval(r: dict[str, float]) -> str:
    return f"{r['value']:.3f} [{r['low']:.3f}, {r['high']:.3f}]"


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
