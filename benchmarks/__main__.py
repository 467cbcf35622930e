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

from benchmarks.peers import PEERS
from oelm.bench.harness import Plan
from oelm.bench.methods import DEFAULT_METHODS, MethodsBench, Workload
from oelm.errors import OelmError, UsageError
from oelm.training.logs.manifest import git_commit, machine_facts, versions

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
    step.add_argument("--methods", nargs="+", default=list(DEFAULT_METHODS), help="our arms")
    step.add_argument(
        "--peers",
        nargs="*",
        choices=PEERS,
        default=list(PEERS),
        help="other tools; none: only our arms, in turns",
    )
    step.add_argument("--size", default="medium-512", help="our model: mini, medium-512, ...")
    step.add_argument("--vocabulary", type=int, default=50257, help="number of tokens that the model knows")
    step.add_argument("--context", type=int, default=512, help="tokens per row")
    step.add_argument("--batch", type=int, default=4, help="rows per step")
    step.add_argument(
        "--position", choices=["learned", "rope"], default="learned", help="position embeddings"
    )
    add_plan(step, Plan(processes=8, rounds=1, warmup=1))
    step.set_defaults(run=run_step)

    classify = kinds.add_parser(
        "classification", help="compare samples per second with padding to 512 and the Trainer"
    )
    add_datasets(classify, ["agnews", "mnli", "imdb"])
    classify.add_argument("--model", default="minilm", help="pretrained encoder")
    classify.add_argument("--rows", type=int, default=16, help="rows per step")
    add_data_dir(classify)
    classify.add_argument("--train-rows", type=int, default=0, help="rows of the training set; 0 = all")
    add_plan(classify, Plan(steps=4, warmup=1))
    classify.set_defaults(run=run_classification)

    kernels = kinds.add_parser("kernels", help="compare training steps with and without our C++ code")
    kernels.add_argument("--rounds", type=int, default=20, help="turns of each arm")
    kernels.add_argument("--steps", type=int, default=8, help="counted steps per turn")
    add_output(kernels)
    kernels.set_defaults(run=run_kernels)

    tokens = kinds.add_parser(
        "tokenisation", help="compare MB/s per core with datasets.map and plain tokenizers loops"
    )
    add_datasets(tokens, ["openwebtext", "wikitext2", "tinystories"])
    tokens.add_argument(
        "--tokenizers", nargs="+", default=["gpt2", "bert-base-uncased"], help="folders in OELM_TOKENIZERS"
    )
    tokens.add_argument("--megabytes", type=float, default=8.0, help="text of each dataset")
    tokens.add_argument("--rounds", type=int, default=7, help="turns of each arm")
    add_data_dir(tokens)
    add_output(tokens)
    tokens.set_defaults(run=run_tokenisation)

    corpus = kinds.add_parser("corpus", help="time and memory of `oelm data prepare` on large files")
    corpus.add_argument("--dataset", default="openwebtext", help="text that is repeated")
    corpus.add_argument("--megabytes", nargs="+", type=int, default=[200, 2000], help="sizes of the text")
    corpus.add_argument("--tokenizer", default="gpt2", help="folder in OELM_TOKENIZERS")
    corpus.add_argument("--workers", type=int, default=0, help="0 = one per core")
    add_data_dir(corpus)
    add_output(corpus)
    corpus.set_defaults(run=run_corpus)

    folders = kinds.add_parser("folders", help="time oelm status, analyze and report over many runs")
    folders.add_argument("--counts", nargs="+", type=int, default=[1, 100, 1000], help="numbers of runs")
    folders.add_argument("--rounds", type=int, default=3, help="calls of each command")
    add_output(folders)
    folders.set_defaults(run=run_folders)

    startup = kinds.add_parser("startup", help="CPU seconds that `oelm run` needs to start each run")
    startup.add_argument("--ids", nargs="+", default=["GPT-02", "SST-2-02"], help="experiments")
    startup.add_argument("--scales", nargs="+", default=["smoke", "mini"], help="sizes of the runs")
    startup.add_argument("--further", type=int, default=3, help="runs after the first one")
    add_data_dir(startup)
    add_output(startup)
    startup.set_defaults(run=run_startup)

    regime = kinds.add_parser("regime", help="compare the noise and CPU time of regimes at scale mini")
    regime.add_argument("regimes", nargs="+", help="such as budget.steps=1200,budget.batch_size=4")
    regime.add_argument(
        "--ids", nargs="+", default=["GAP-TS-baseline-rope", "GAP-TS-oelm-freeze-rope"], help="experiments"
    )
    regime.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4], help="seeds of each run")
    add_data_dir(regime)
    regime.add_argument("--record", default="", help="JSON-lines file; its runs are not repeated")
    add_output(regime)
    regime.set_defaults(run=run_regime)

    decide = kinds.add_parser("decide", help="hours of `oelm decide` against a fixed number of seeds")
    decide.add_argument("--runs", default="results", help="folder of stored runs")
    decide.add_argument("--study", nargs="+", default=[], help="only these studies")
    decide.add_argument(
        "--rules", nargs="+", default=["target", "scenario", "goal", "sign"], help="kinds of questions"
    )
    decide.add_argument("--fixed", type=int, default=12, help="seeds of the fixed design")
    decide.add_argument("--max-seeds", type=int, default=20, help="as in `oelm decide`")
    decide.add_argument("--draws", type=int, default=20, help="simulated studies")
    decide.set_defaults(run=run_decide)

    page = kinds.add_parser("page", help="write docs/performance.md from the results")
    page.add_argument("-o", "--output", default="docs/performance.md", help="Markdown file")
    page.set_defaults(run=run_page)
    return parser


def add_plan(parser: argparse.ArgumentParser, plan: Plan) -> None:
    parser.add_argument("--processes", type=int, default=plan.processes, help="new processes per arm")
    parser.add_argument("--rounds", type=int, default=plan.rounds, help="turns of each process")
    parser.add_argument("--steps", type=int, default=plan.steps, help="counted steps per turn")
    parser.add_argument("--warmup", type=int, default=plan.warmup, help="steps before the first turn")
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores")
    add_output(parser)


def add_datasets(parser: argparse.ArgumentParser, names: list[str]) -> None:
    parser.add_argument("--datasets", nargs="+", default=names, help="names of datasets (oelm data list)")


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    folder = os.environ.get("OELM_DATA_DIR", "")
    parser.add_argument("--data-dir", default=folder, help="folder of the datasets (or OELM_DATA_DIR)")


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", default="", help="also write the result to this JSON file")


def plan_of(args: argparse.Namespace) -> Plan:
    return Plan(args.processes, args.rounds, args.steps, args.warmup, args.threads)


def run_step(args: argparse.Namespace) -> int:
    from benchmarks import page, step

    if args.peers and args.position == "rope":
        raise UsageError(
            "the other tools have learned positions only: compare our methods alone (--peers without names), "
            "or use --position learned"
        )
    work = Workload(args.size, args.vocabulary, args.context, args.batch, args.position)
    bench = MethodsBench(tuple(args.methods), work, plan_of(args))
    load = load_average()
    result = step.run(bench, tuple(args.peers), progress=say)
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


def run_kernels(args: argparse.Namespace) -> int:
    from benchmarks import kernels, page

    load = load_average()
    bench = kernels.KernelsBench(rounds=args.rounds, steps=args.steps)
    return finish(args, load, kernels.run(bench, say), page.kernels)


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
    return finish(args, load, corpus.run(bench, say), corpus.lines)


def run_folders(args: argparse.Namespace) -> int:
    from benchmarks import folders, page

    load = load_average()
    result = folders.run(folders.FoldersBench(counts=tuple(args.counts), rounds=args.rounds), say)
    return finish(args, load, result, page.folders)


def run_startup(args: argparse.Namespace) -> int:
    from benchmarks import startup

    load = load_average()
    bench = startup.StartupBench(tuple(args.ids), tuple(args.scales), args.further, args.data_dir)
    return finish(args, load, startup.run(bench, say), startup.lines)


def run_regime(args: argparse.Namespace) -> int:
    from benchmarks import regime

    load = load_average()
    bench = regime.RegimeBench(
        tuple(args.regimes), tuple(args.ids), tuple(args.seeds), args.data_dir, args.record
    )
    return finish(args, load, regime.run(bench, say), regime.lines)


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
            "commit": git_commit(),
            "machine": machine,
            "versions": versions(),
            "load": {"before": load_before, "after": load_average()},
            **result,
        }
        Path(args.output).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        say(f"written to {args.output}")
    return 0


def load_average() -> float | None:
    """Return the load average of the last minute, or None if the system does not report it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
