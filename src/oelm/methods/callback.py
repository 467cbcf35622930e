"""`oelm.OELMCallback`: follow a method's schedule in the Hugging Face Trainer, audit, and write oelm.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from oelm.errors import OelmError
from oelm.low_precision import LowPrecision, require_cpu_matmul
from oelm.methods.apply import Applied
from oelm.methods.audit import AuditReport, audit
from oelm.methods.reading.wrappers import unwrap, uses_peft
from oelm.methods.record import Record, require_record, thawing
from oelm.methods.saving.load import restore_record
from oelm.methods.saving.metadata import METADATA, Metadata
from oelm.methods.saving.pretrained import SavePretrained
from oelm.methods.saving.save import save_metadata

_RESUME_HINT = (
    "the checkpoint to resume from does not match this model. Compare the method and the seed in the "
    "checkpoint's oelm.json with those passed to oelm.apply.\n"
)


class OELMCallback(TrainerCallback):
    """Trainer callback that follows a method's schedule and audits the model. Use it after `oelm.apply()`:

        oelm.apply(model, "oelm-gradual", seed=42)
        trainer = Trainer(model, args, train_dataset=..., callbacks=[oelm.OELMCallback()])
        trainer.train()                              # or trainer.train(resume_from_checkpoint=True)

    The callback freezes and unfreezes tensors according to the fraction of the run that is completed, also
    after a resume. It writes oelm.json into every checkpoint and into the folder of `trainer.save_model()`,
    so that `oelm.load()` can read them. It audits the model at the start and at the end of training and
    stores the last result in `report`; a fault raises an error unless `strict` is False. The audit at the
    start detects an optimizer that was built before `oelm.apply()`, and a checkpoint that was written with a
    different seed.

    The Trainer builds its optimizer from the parameters that are trainable at that moment. The optimizer also
    needs the tensors that the schedule unfreezes later. So the callback makes them trainable when the Trainer
    is constructed, and freezes them again when training starts.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self.report: AuditReport | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: nn.Module = kwargs["model"]
        require_record(model, "OELMCallback")
        _check_cpu_precision(args, model)
        if Applied(model).unfreeze_until_step() and args.ddp_find_unused_parameters is None:
            # Otherwise DDP would wait for the gradients of tensors that are still frozen.
            args.ddp_find_unused_parameters = True
        _let_trainer_save(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        record = require_record(model, "OELMCallback")
        _check_cpu_precision(args, model)
        # on_init_end was not called for this model if model_init built it, or after trainer.add_callback().
        _let_trainer_save(model)
        groups = [] if optimizer is None else optimizer.param_groups
        held = {id(p) for group in groups for p in group["params"]}
        if optimizer is not None and any(id(p) not in held for p in thawing(model, record)):
            raise OelmError(
                f"the optimizer does not contain the parameters that '{record.method.name}' unfreezes later. "
                f"Pass oelm.OELMCallback() to Trainer(callbacks=[...]), or build the optimizer from "
                f"oelm.param_groups after oelm.apply. If model_init builds the model, call "
                f"oelm.apply(...).unfreeze_until_step() in it"
            )
        if state.global_step:
            _check_peft_checkpoint(model, record, "resume from")
        self._follow_schedule(state, model, optimizer)
        self._audit(model, optimizer, _RESUME_HINT if state.global_step else "")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._follow_schedule(state, kwargs["model"], kwargs["optimizer"])

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        # This updates the completed fraction of the run, which save_metadata writes into oelm.json.
        self._follow_schedule(state, kwargs["model"], kwargs["optimizer"])
        if state.is_world_process_zero and folder.is_dir():
            save_metadata(kwargs["model"], folder)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model, best = kwargs["model"], state.best_model_checkpoint
        self._follow_schedule(state, model, kwargs["optimizer"])
        if args.load_best_model_at_end and best and (Path(best) / METADATA).is_file():
            _check_peft_checkpoint(model, require_record(model, "OELMCallback"), "load the best model from")
            restore_record(model, Metadata.read(best), best)  # the Trainer has loaded the best weights
            for parameter in thawing(model, require_record(model, "OELMCallback")):
                if not parameter.requires_grad:  # it was still frozen then, and trained afterwards
                    kwargs["optimizer"].state.pop(parameter, None)
        self._audit(model, kwargs["optimizer"])

    def _audit(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, hint: str = "") -> None:
        self.report = audit(model, optimizer)
        if self.strict and not self.report.ok:
            raise OelmError(f"{hint}{self.report}")

    @staticmethod
    def _follow_schedule(
        state: TrainerState, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        total = max(state.max_steps, 1)
        Applied(model).step(min(state.global_step, total), total, optimizer)


def _check_cpu_precision(args: TrainingArguments, model: nn.Module) -> None:
    """Raise an error if the Trainer would run bf16 or fp16 matmuls on a CPU that does not support them."""
    if args.device.type != "cpu":
        return
    in_model = {p.dtype for p in model.parameters()}
    names: list[tuple[LowPrecision, torch.dtype]] = [("bf16", torch.bfloat16), ("fp16", torch.float16)]
    for name, dtype in names:
        flags = [flag for flag in (name, f"{name}_full_eval") if getattr(args, flag)]
        if flags:
            require_cpu_matmul(name, f"TrainingArguments({flags[0]}=True)", f"Leave {flags[0]} out")
        if dtype in in_model:
            require_cpu_matmul(name, f"training a model in {name}", "Call model.float() before oelm.apply")


def _check_peft_checkpoint(model: nn.Module, record: Record, purpose: str) -> None:
    """Raise OelmError if a checkpoint of the Trainer lacks tensors of the method that have trained.

    The Trainer stores and loads only the adapter of a PEFT model.
    """
    unfrozen = any(t.ever_frozen and t.ever_trained for t in record.tensors.values())
    if uses_peft(model) and (record.extras or unfrozen):
        raise OelmError(
            f"cannot {purpose} a checkpoint of a PEFT model: it holds only the adapter, but "
            f"'{record.method.name}' trains tensors of the base model as well. Train without interruption "
            f"and without load_best_model_at_end, or use a method that only freezes, such as "
            f"freeze-pretrained"
        )


def _let_trainer_save(model: nn.Module) -> None:
    """Make `model.save_pretrained()` write folders that the Trainer can resume and `oelm.load()` can read."""
    for module in unwrap(model).modules():
        if isinstance(saving := module.__dict__.get("save_pretrained"), SavePretrained):
            saving.in_trainer = True
