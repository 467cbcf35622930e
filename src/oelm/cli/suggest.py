"""Suggest a valid option if the user gives an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# Option that a user of other tools may try -> the config field to set instead (--set), with an example value.
_FIELDS = {
    "lr": "optim.lr=1e-3",
    "learning-rate": "optim.lr=1e-3",
    "steps": "budget.steps=600",
    "max-steps": "budget.steps=600",
    "epochs": "budget.epochs=1",
    "num-epochs": "budget.epochs=1",
    "batch": "budget.batch_size=16",
    "batch-size": "budget.batch_size=16",
    "accumulation": "budget.accumulation=2",
    "gradient-accumulation-steps": "budget.accumulation=2",
    "eval-every": "budget.eval_every=100",
    "warmup": "optim.warmup_steps=100",
    "warmup-steps": "optim.warmup_steps=100",
    "weight-decay": "optim.weight_decay=0.01",
    "clip": "optim.clip=1.0",
    "schedule": "optim.schedule=cosine",
    "dropout": "model.dropout=0.1",
    "model": "model.name=mini",
    "size": "model.name=mini",
    "layers": "model.name=mini",
    "method": "method=oelm-plus",
    "dataset": "data.dataset=wikitext2",
    "source": "data.source=builtin",
    "tokenizer": "data.tokenizer=gpt2",
    "context": "data.max_length=128",
    "max-length": "data.max_length=128",
    "train-rows": "data.train_rows=1000",
    "precision": "precision=bf16",
    "bf16": "precision=bf16",
    "fp16": "precision=fp16",
    "amp": "precision=auto",
    "compile": "compile=true",
}

# Option that a user may try -> options of `oelm`; the first one that the command accepts is suggested.
_FLAGS = {
    "seed": ("--seeds",),
    "seeds": ("--seed",),
    "gpu": ("--gpus", "--device"),
    "gpus": ("--device",),
    "num-gpus": ("--gpus", "--device"),
    "cuda": ("--gpus", "--device"),
    "cpu": ("--device",),
    "device": ("--gpus",),
    "jobs": ("--slots",),
    "parallel": ("--slots",),
    "num-workers": ("--workers", "--threads"),
    "workers": ("--threads",),
    "out": ("--output", "--runs"),
    "output": ("--runs",),
    "output-dir": ("--runs", "--output"),
    "out-dir": ("--runs", "--output"),
    "run-dir": ("--runs",),
    "data": ("--data-dir",),
    "data-path": ("--data-dir",),
    "cache": ("--cache-dir",),
    "name": ("--study", "--as"),
    "experiment": ("--study",),
    "phases": ("--phase",),
    "language": ("--lang",),
    "tune-grid": ("--grid",),
    "partition": ("--on",),
    "wandb": ("--track",),
    "tensorboard": ("--track",),
}

# Option that a user may try, but that `oelm` does not need -> the reason.
_NOT_NEEDED = {
    "resume": "the same command resumes a run that was interrupted",
    "continue": "the same command resumes a run that was interrupted",
    "scales": "--scale takes several scales, such as --scale mini smoke",
}
_STUDY_COMMANDS = ("oelm analyze", "oelm report")  # their arguments are names of studies
MIN_SIMILARITY = 0.65


def suggest(word: str, options: Collection[str], command: str = "oelm") -> str:
    """Return a hint for the unknown option `word` of `command`, which has `options`; "" if none is similar.

    >>> suggest("--lr", ["--all", "--set"]), suggest("--sed", ["--seed", "--set"])
    ("did you mean '--set optim.lr=1e-3'?", "did you mean '--seed'?")
    """
    flag, _, value = word.partition("=")
    name = flag.lstrip("-").lower().replace("_", "-")
    meant = next((option for option in _FLAGS.get(name, ()) if option in options), "")
    if f"--{name}" in options:
        meant = f"--{name}"
    elif not meant and name in _FIELDS and "--set" in options:
        meant = _set_option(name, value)
    elif not meant and name in _NOT_NEEDED:
        return _NOT_NEEDED[name]
    elif not meant and name == "study" and command in _STUDY_COMMANDS:
        return f"write the names of studies without an option, such as {command} gap"
    if not meant:
        names = {option.lstrip("-"): option for option in options}
        if "--set" in options:
            names = {**{field: _set_option(field, value) for field in _FIELDS}, **names}
        near = difflib.get_close_matches(name, names, n=1, cutoff=MIN_SIMILARITY)
        meant = names[near[0]] if near else ""
    return f"did you mean '{meant}'?" if meant else ""


def _set_option(name: str, value: str) -> str:
    field, _, example = _FIELDS[name].partition("=")
    return f"--set {field}={value or example}"
