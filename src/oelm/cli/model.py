"""`oelm generate` and `oelm export`: what to do with a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from oelm.cli.options import add_json, add_runs, command_parser
from oelm.cli.output import print, print_json
from oelm.errors import OelmError, UsageError, unknown_name
from oelm.runs.folder import RunFolder
from oelm.runs.scan import find_run

FORMATS = ("hf",)


def add_parser(subparsers: Any) -> None:
    sample = command_parser(
        subparsers,
        "generate",
        "sample text from a trained language model",
        'oelm generate GPT-02 --scale mini --prompt "Once upon a time" --tokens 100 --top-p 0.9',
    )
    _add_run(sample)
    sample.add_argument("--prompt", required=True, metavar="TEXT")
    sample.add_argument("--tokens", type=int, default=100, metavar="N", help="at most so many new tokens")
    sample.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    sample.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K likeliest only (0 = all)")
    sample.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest P only")
    sample.add_argument(
        "--sample-seed", type=int, default=0, metavar="N", help="the same seed, the same text"
    )
    export = command_parser(
        subparsers,
        "export",
        "a trained model as a folder that transformers loads",
        "oelm export GPT-02 --scale mini --to hf -o exported/gpt-02",
    )
    _add_run(export)
    export.add_argument("--to", default="hf", metavar="|".join(FORMATS), help="the format (default: hf)")
    export.add_argument("-o", "--output", default="", metavar="DIR", help="default: exports/<ID>")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or an experiment's ID")
    parser.add_argument("--scale", default="", help="which of the ID's runs")
    parser.add_argument("--seed", type=int, default=None, help="which of the ID's runs")
    add_runs(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    folder = RunFolder(find_run(args.runs, args.run, scale=args.scale, seed=args.seed))
    if not folder.best.is_dir():
        raise OelmError(f"{folder.path} has no best model yet (it appears with the first validation)")
    return _generate(args, folder) if args.command == "generate" else _export(args, folder)


def _generate(args: argparse.Namespace, folder: RunFolder) -> int:
    if folder.config().task != "lm":
        raise OelmError(f"{folder.path} holds no language model (its task is {folder.config().task})")
    import torch

    from oelm.data.tokenize.tokenizers import Tokenizer
    from oelm.methods.saving.load import load
    from oelm.models.generate import generate
    from oelm.models.gpt import GPT

    model, tokenizer = load(folder.best), Tokenizer.load(folder.best)
    assert isinstance(model, GPT)
    prompt = tokenizer.encode(args.prompt)
    if not prompt:
        raise UsageError("the prompt is empty: give at least one word")
    ids = generate(
        model,
        torch.tensor(prompt),
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        generator=torch.Generator().manual_seed(args.sample_seed),
        stop_id=tokenizer.eos_id,
    )
    new = ids[len(prompt) :].tolist()
    text = tokenizer.decode([token for token in new if token != tokenizer.eos_id])
    if args.json:
        print_json({"run": str(folder.path), "prompt": args.prompt, "text": text, "tokens": len(new)})
    else:
        print(args.prompt + text)
    return 0


def _export(args: argparse.Namespace, folder: RunFolder) -> int:
    if args.to not in FORMATS:
        raise unknown_name("export format", args.to, FORMATS)
    target = Path(args.output or Path("exports") / folder.config().id)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already; name a new or empty folder with -o")
    from oelm.data.tokenize.tokenizers import Tokenizer
    from oelm.methods.saving.fold import folded_state
    from oelm.methods.saving.load import load
    from oelm.models.gpt import GPT
    from oelm.models.huggingface import export_hf

    model, tokenizer = load(folder.best), Tokenizer.load(folder.best)
    if isinstance(model, GPT):
        export_hf(model, target, eos_id=tokenizer.eos_id)
    else:
        model.save_pretrained(target, state_dict=folded_state(model))  # type: ignore[operator]
    tokenizer.save(target)
    if args.json:
        print_json({"run": str(folder.path), "folder": str(target)})
    else:
        print(f"{target}: load it with transformers' from_pretrained")
    return 0
