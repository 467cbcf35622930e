"""Run one kind of benchmark (`python -m benchmarks KIND [-o FILE]`), or write the page with all results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from oelm.bench.harness import Plan
from oelm.bench.methods import DEFAULT_METHODS, MethodsBench, Workload
from oelm.errors import OelmError
from oelm.training.logs.manifest import machine_facts, versions

RESULTS = Path("benchmarks/results")


def main() -> int:
    args = build_parser().parse_args()
    try:
        return args.run(args)
    except OelmError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)

    step = kinds.add_parser("step", help="compare a training step with nanoGPT, transformers and the Trainer")
    step.add_argument("--methods", nargs="+", default=list(DEFAULT_METHODS))
    step.add_argument("--peers", nargs="*", default=["nanogpt", "transformers", "trainer"])
    step.add_argument("--size", default="medium-512")
    step.add_argument("--vocabulary", type=int, default=50257)
    step.add_argument("--context", type=int, default=512)
    step.add_argument("--batch", type=int, default=4)
    step.add_argument("--position", choices=["learned", "rope"], default="learned")
    step.add_argument("--alone", action="store_true", help="also measure each arm with no other in memory")
    add_plan(step, Plan())
    step.set_defaults(run=run_step)

    classify = kinds.add_parser(
        "classification", help="compare samples per second with padding to 512 and the Trainer"
    )
    classify.add_argument("--datasets", nargs="+", default=["agnews", "mnli", "imdb"])
    classify.add_argument("--model", default="minilm")
    classify.add_argument("--rows", type=int, default=16)
    classify.add_argument("--data-dir", default=os.environ.get("OELM_DATA_DIR", ""))
    classify.add_argument("--train-rows", type=int, default=0)
    add_plan(classify, Plan(steps=4, warmup=1))
    classify.set_defaults(run=run_classification)

    tokens = kinds.add_parser(
        "tokenisation", help="compare MB/s per core with datasets.map and plain tokenizers loops"
    )
    tokens.add_argument("--datasets", nargs="+", default=["openwebtext", "wikitext2", "tinystories"])
    tokens.add_argument("--tokenizers", nargs="+", default=["gpt2", "bert-base-uncased"])
    tokens.add_argument("--megabytes", type=float, default=8.0)
    tokens.add_argument("--rounds", type=int, default=7)
    tokens.add_argument("--data-dir", default=os.environ.get("OELM_DATA_DIR", ""))
    tokens.add_argument("-o", "--output", default="")
    tokens.set_defaults(run=run_tokenisation)

    corpus = kinds.add_parser("corpus", help="time and memory of `oelm data prepare` on large files")
    corpus.add_argument("--dataset", default="openwebtext")
    corpus.add_argument("--megabytes", nargs="+", type=int, default=[200, 2000])
    corpus.add_argument("--tokenizer", default="gpt2")
    corpus.add_argument("--workers", type=int, default=0, help="0 = one per core")
    corpus.add_argument("--data-dir", default=os.environ.get("OELM_DATA_DIR", ""))
    corpus.add_argument("-o", "--output", default="")
    corpus.set_defaults(run=run_corpus)

    folders = kinds.add_parser("folders", help="time oelm status, analyze and report over many runs")
    folders.add_argument("--counts", nargs="+", type=int, default=[1, 100, 1000])
    folders.add_argument("--rounds", type=int, default=3)
    folders.add_argument("-o", "--output", default="")
    folders.set_defaults(run=run_folders)

    startup = kinds.add_parser("startup", help="CPU seconds that `oelm run` needs to start each run")
    startup.add_argument("--ids", nargs="+", default=["GPT-02", "SST-2-02"])
    startup.add_argument("--scales", nargs="+", default=["smoke", "mini"])
    startup.add_argument("--further", type=int, default=3, help="runs after the first one")
    startup.add_argument("--data-dir", default=os.environ.get("OELM_DATA_DIR", ""))
    startup.add_argument("-o", "--output", default="")
    startup.set_defaults(run=run_startup)

    regime = kinds.add_parser("regime", help="compare the noise and CPU time of regimes at scale mini")
    regime.add_argument("regimes", nargs="+", help="such as budget.steps=1200,budget.batch_size=4")
    regime.add_argument("--ids", nargs="+", default=["GAP-TS-baseline-rope", "GAP-TS-oelm-freeze-rope"])
    regime.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    regime.add_argument("--data-dir", default=os.environ.get("OELM_DATA_DIR", ""))
    regime.add_argument("--record", default="", help="JSON-lines file; its runs are not repeated")
    regime.add_argument("-o", "--output", default="")
    regime.set_defaults(run=run_regime)

    decide = kinds.add_parser("decide", help="hours of `oelm decide` against a fixed number of seeds")
    decide.add_argument("--runs", default="results", help="folder of stored runs")
    decide.add_argument("--study", nargs="+", default=[], help="only these studies")
    decide.add_argument("--rules", nargs="+", default=["target", "scenario", "goal", "sign"])
    decide.add_argument("--fixed", type=int, default=12, help="seeds of the fixed design")
    decide.add_argument("--max-seeds", type=int, default=20)
    decide.add_argument("--draws", type=int, default=20)
    decide.set_defaults(run=run_decide)

    page = kinds.add_parser("page", help="write docs/performance.md from the results")
    page.add_argument("-o", "--output", default="docs/performance.md")
    page.set_defaults(run=run_page)
    return parser


def add_plan(parser: argparse.ArgumentParser, plan: Plan) -> None:
    parser.add_argument("--processes", type=int, default=plan.processes, help="new processes per arm")
    parser.add_argument("--rounds", type=int, default=plan.rounds, help="turns of each process")
    parser.add_argument("--steps", type=int, default=plan.steps, help="counted steps per turn")
    parser.add_argument("--warmup", type=int, default=plan.warmup)
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("-o", "--output", default="", help="also write the result as JSON")


def plan_of(args: argparse.Namespace) -> Plan:
    return Plan(args.processes, args.rounds, args.steps, args.warmup, args.threads)


def run_step(args: argparse.Namespace) -> int:
    from benchmarks import page, step

    work = Workload(args.size, args.vocabulary, args.context, args.batch, args.position)
    bench = MethodsBench(tuple(args.methods), work, plan_of(args))
    load = load_average()
    result = step.run(bench, tuple(args.peers), alone=args.alone, progress=say)
    return finish(args, load, result, page.step)


def run_classification(args: argparse.Namespace) -> int:
    from benchmarks import classification, page

    bench = classification.ClassificationBench(
        tuple(args.datasets),
        args.model,
        args.rows,
        train_rows=args.train_rows,
        data_dir=args.data_dir,
        plan=plan_of(args),
    )
    load = load_average()
    return finish(args, load, classification.run(bench, say), page.classification)


def run_tokenisation(args: argparse.Namespace) -> int:
    from benchmarks import page, tokenisation

    bench = tokenisation.TokenisationBench(
        tuple(args.datasets), tuple(args.tokenizers), args.megabytes, args.rounds, args.data_dir
    )
    load = load_average()
    return finish(args, load, tokenisation.run(bench, say), page.tokenisation)


def run_corpus(args: argparse.Namespace) -> int:
    from benchmarks import corpus

    bench = corpus.CorpusBench(
        args.dataset, tuple(args.megabytes), args.tokenizer, args.workers, args.data_dir
    )
    load = load_average()
    return finish(args, load, corpus.run(bench, say), corpus.table)


def run_folders(args: argparse.Namespace) -> int:
    from benchmarks import folders, page

    load = load_average()
    result = folders.run(folders.FoldersBench(counts=tuple(args.counts), rounds=args.rounds), say)
    return finish(args, load, result, page.folders)


def run_startup(args: argparse.Namespace) -> int:
    from benchmarks import startup

    load = load_average()
    bench = startup.StartupBench(tuple(args.ids), tuple(args.scales), args.further, args.data_dir)
    return finish(args, load, startup.run(bench, say), startup.table)


def run_regime(args: argparse.Namespace) -> int:
    from benchmarks import regime

    load = load_average()
    bench = regime.RegimeBench(
        tuple(args.regimes), tuple(args.ids), tuple(args.seeds), args.data_dir, args.record
    )
    return finish(args, load, regime.run(bench, say), regime.table)


def run_decide(args: argparse.Namespace) -> int:
    from benchmarks.decide import replay

    result = replay(Path(args.runs), args.rules, args.fixed, args.max_seeds, args.draws, args.study)
    print(json.dumps(result, indent=2))
    return 0


def run_page(args: argparse.Namespace) -> int:
    from benchmarks import page

    page.make(RESULTS, args.output)
    say(f"written to {args.output}")
    return 0


def finish(args: argparse.Namespace, load_before: float | None, result: dict[str, Any], show: Any) -> int:
    """Print the table of a result. With -o, also write the result with its command, machine and versions."""
    print("\n".join(show(result)))
    if args.output:
        machine = machine_facts()
        machine.pop("host", None)  # the host name does not affect speed
        record = {
            "kind": result["kind"],
            "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine,
            "versions": versions(),
            "load": {"before": load_before, "after": load_average()},
            **result,
        }
        Path(args.output).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        say(f"written to {args.output}")
    return 0


def load_average() -> float | None:
    """Return the load average of the last minute, or None if the system does not report it.

    A value above 0.5 before a benchmark means that other programs are running and slow it down.
    """
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
