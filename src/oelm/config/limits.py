"""Check a run config for impossible values before a run folder is created or a job is queued.

This module does not import torch, so that a mistake is reported at once.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path

from oelm.config.run_config import OptimConfig, RunConfig
from oelm.data.catalogue import dataset
from oelm.data.tokenize.tokenizer_files import check_tokenizer_name
from oelm.errors import UsageError, unknown_name
from oelm.models.sizes import TINY, gpt_config, gpt_shape

MIN_DENOISING_WINDOW = 8  # minimum number of tokens in a row: in a shorter row, too few tokens can be masked

#: (section, field, minimum, maximum). Many values outside these ranges would not raise an error but train
#: a different model: with a negative final learning rate, for example, training would maximise the loss.
_RANGES: tuple[tuple[str, str, float, float], ...] = (
    ("budget", "batch_size", 1, math.inf),
    ("budget", "accumulation", 1, math.inf),
    ("budget", "log_every", 1, math.inf),
    ("data", "max_length", 1, math.inf),
    *(
        ("budget", name, 0, math.inf)
        for name in ("steps", "epochs", "eval_every", "checkpoint_every", "patience")
    ),
    ("data", "train_rows", 0, math.inf),
    ("data", "eval_rows", 0, math.inf),
    ("optim", "warmup_steps", 0, math.inf),
    ("optim", "warmup_share", 0, 1),
    ("optim", "final_lr_share", 0, 1),
    ("optim", "beta1", 0, 1 - 1e-9),
    ("optim", "beta2", 0, 1 - 1e-9),
    ("optim", "eps", 1e-30, 1),
    ("optim", "clip", 0, math.inf),
    ("optim", "weight_decay", 0, math.inf),
    ("optim", "layer_decay", 1e-9, 1),
    ("optim", "qk_lr", 0, math.inf),
    ("model", "dropout", 0, 1 - 1e-9),
)


def check_config(config: RunConfig, data_dir: str = "") -> None:
    """Raise UsageError if a value is impossible, a name is unknown, or a field that is set has no effect."""
    for section, name, least, most in _RANGES:
        value = getattr(getattr(config, section), name)
        if not least <= value <= most or value == math.inf:
            allowed = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
            allowed = "a finite number" if value == math.inf else allowed
            field = f"{section}.{name}"
            raise UsageError(f"{field} must be {allowed}, not {value}", field=field)
    if not 0 < config.optim.lr < math.inf:
        raise UsageError(f"optim.lr must be positive and finite, not {config.optim.lr}", field="optim.lr")
    if not 0 <= config.seed < 2**63:
        raise UsageError(f"seed must be a whole number from 0 to 2^63 - 1, not {config.seed}")
    if not config.budget.steps and not config.budget.epochs:
        raise UsageError(
            "budget.steps and budget.epochs are both 0, so nothing would be trained: set one of them",
            field="budget",
        )
    _check_schedule(config.optim)
    if config.data.pad_to_max and config.task != "classification":
        raise UsageError(
            f"data.pad_to_max has no effect on the task {config.task}, whose rows all have the same length: "
            "leave it out"
        )
    if config.task == "denoising" and config.data.max_length < MIN_DENOISING_WINDOW + 2:
        raise UsageError(
            f"the task denoising needs a data.max_length of at least {MIN_DENOISING_WINDOW + 2}, "
            f"not {config.data.max_length}"
        )
    kind = dataset(config.data.dataset).task
    if kind != ("classification" if config.task == "classification" else "lm"):
        raise UsageError(
            f"dataset '{config.data.dataset}' is for {kind}, but the task of this run is {config.task}: "
            "choose another dataset (`oelm data list`)"
        )
    check_model(config)
    _check_depth(config)
    check_tokenizer_name(config.data.tokenizer, data_dir or None)
    if config.data.tokenizer == "model" and (config.model.family == "gpt" or config.model.name in TINY):
        raise UsageError(
            f"data.tokenizer = model means the tokenizer of the pretrained model, but model "
            f"'{config.model.name}' has no tokenizer: set data.tokenizer to gpt2 or bpe-<vocabulary size>"
        )


def _check_schedule(optim: OptimConfig) -> None:
    if optim.warmup_steps and optim.warmup_share:
        raise UsageError(
            f"optim.warmup_steps = {optim.warmup_steps} and optim.warmup_share = {optim.warmup_share:g} are "
            "both set, but the warm-up has only one length: set one of them to 0",
            field="optim.warmup_share",
        )
    if optim.schedule == "constant" and optim.final_lr_share:
        raise UsageError(
            "optim.final_lr_share has no effect on the schedule constant, whose learning rate does not fall: "
            "leave it out, or choose the schedule cosine or linear",
            field="optim.final_lr_share",
        )


def check_model(config: RunConfig) -> None:
    """Raise UsageError if the model is unknown, or if it cannot be trained on the task of the run."""
    model = config.model
    if model.family == "gpt":
        gpt_config(model.name, position=model.position)  # raises UsageError for an invalid size
        if model.pretrained:
            raise UsageError(
                "model.pretrained is set, but the built-in GPT has no pretrained weights: leave it out, or "
                "choose a transformers model (model.family = hf)"
            )
        if config.task == "lm" and not model.causal:
            raise UsageError("a language model must be causal: leave out model.causal")
        if config.task == "denoising":
            raise UsageError(
                "task denoising needs an encoder-decoder, but the built-in GPT is decoder-only: set "
                "model.family = hf and model.name to an encoder-decoder"
            )
        return
    if config.task == "lm":
        raise UsageError(
            "task lm cannot train a transformers model (model.family = hf), only the built-in GPT: set "
            "model.family = gpt, or choose the task classification or denoising"
        )
    for field, value in (("position", "learned"), ("causal", True)):
        if getattr(model, field) != value:
            raise UsageError(
                f"model.{field} is set, but has no effect on a transformers model: leave it out, or choose "
                "the built-in GPT (model.family = gpt)"
            )
    if model.name in TINY and model.pretrained:
        raise UsageError(f"model '{model.name}' has no pretrained weights: set model.pretrained = false")
    _check_transformers_name(model.name)


def _check_depth(config: RunConfig) -> None:
    """Raise UsageError if a built-in model has too few layers for the method.

    The number of layers of other models is only known later, so `oelm.apply()` checks them.
    """
    name = config.model.name
    depth = gpt_shape(name)["layers"] if config.model.family == "gpt" else _tiny_depth(name)
    if depth:
        config.method.check_depth(depth)


def _tiny_depth(name: str) -> int:
    """Return the number of layers of the built-in tiny transformers model `name`; 0 for any other name."""
    fields = TINY[name][1] if name in TINY else {}
    return next(
        (fields[key] for key in ("num_hidden_layers", "num_layers", "encoder_layers") if key in fields), 0
    )


def _check_transformers_name(name: str) -> None:
    """Raise UsageError for a missing model folder or a misspelt built-in name.

    Any other name is accepted: it may be a model of the Hugging Face hub.
    """
    built_in = ("minilm", *TINY)
    if name in built_in or Path(name).is_dir():
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError(f"model.name: the folder '{name}' does not exist")
    near = difflib.get_close_matches(name.lower(), built_in, n=1, cutoff=0.75)
    if name.startswith("tiny-") or ("/" not in name and near):
        raise unknown_name("built-in model", name, built_in)
