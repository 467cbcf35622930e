"""`oelm.audit`: check that the tensors a method freezes are frozen and unchanged, and the rest trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from oelm.errors import OelmError, UsageError
from oelm.methods.checks import names_by_parameter
from oelm.methods.method import ORTHONORMAL_INITS
from oelm.methods.orthogonal import orthonormality_error
from oelm.methods.reading.find import find_projections
from oelm.methods.reading.wrappers import plain_name, plain_parameters, trainable_adapters, unwrap, uses_peft
from oelm.methods.record import Record, TensorRecord, find_parameter, require_record, sha256

_MAX_PRINTED = 20  # a printed report lists at most this many tensors with faults

# A printed report says how to build the optimizer if it lists one of these faults.
_IN_OPTIMIZER = "the optimizer contains it"
_IN_OPTIMIZER_WITH_DECAY = "the optimizer contains it, with weight decay"
_NOT_IN_OPTIMIZER = "the optimizer does not contain it, so it will not train"
_NOT_IN_OPTIMIZER_LATER = "the optimizer does not contain it, so it will not train when it is unfrozen"
_NOT_IN_MODEL = (
    "the model does not have it: the model changed after the optimizer was built, or the parameter "
    "belongs to another model"
)
_WRONG_PARAMETERS = frozenset(
    {_IN_OPTIMIZER, _IN_OPTIMIZER_WITH_DECAY, _NOT_IN_OPTIMIZER, _NOT_IN_OPTIMIZER_LATER, _NOT_IN_MODEL}
)


@dataclass(frozen=True)
class AuditRow:
    """The audit of one tensor: what the method expects of it, and each fault that was found."""

    tensor: str
    expected: str
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit. `ok` is True if no tensor has a fault; printing the report lists the faults."""

    method: str
    seed: int
    progress: float
    frozen: int
    trainable: int
    rows: tuple[AuditRow, ...]
    verified: bool = True  # whether oelm.apply verified numerically that the projections are Q and K

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        bad = [row for row in self.rows if not row.ok]
        head = (
            f"audit of {self.method} (seed {self.seed}, {100 * self.progress:.0f} % of the run): "
            f"{'ok' if self.ok else 'NOT ok'}; {len(self.rows)} tensors checked, "
            f"{self.frozen:,} parameters frozen, {self.trainable:,} trainable"
        )
        lines = [f"  {r.tensor}: {r.expected}, but {'; '.join(r.faults)}" for r in bad]
        if len(lines) > _MAX_PRINTED:
            lines[_MAX_PRINTED:] = [f"  ... and {len(lines) - _MAX_PRINTED} more (.rows has them all)"]
        if any(fault in _WRONG_PARAMETERS for row in bad for fault in row.faults):
            lines.append(
                "  Build the optimizer after oelm.apply, from oelm.param_groups(model, lr=..., "
                "weight_decay=...), not from model.parameters()"
            )
        if not self.verified:
            head += "\n  not verified: apply(..., verify=False) skipped the numeric check of Q and K"
        return "\n".join([head, *lines])


def audit(
    model: nn.Module, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None
) -> AuditReport:
    """Return a report on whether the tensors that the method freezes are frozen and unchanged.

    The audit also checks that these tensors are orthonormal if the method's init makes them so, that nothing
    else is frozen, and that the optimizer contains exactly the parameters that train.

    Args:
        model: The model or a wrapper around it (DistributedDataParallel, torch.compile, AveragedModel, PEFT).
        optimizer: The optimizer, or several (such as Muon for matrices and AdamW for the rest). A trainable
            parameter that is in no optimizer is a fault, and so is a parameter of an optimizer that is not in
            the model. To freeze a parameter on purpose, call its requires_grad_(False) before `oelm.apply()`.

    Examples:
        >>> import torch, oelm
        >>> encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> applied = oelm.apply(encoder, "oelm-freeze")
        >>> optimizer = torch.optim.AdamW(oelm.param_groups(encoder, lr=1e-3))
        >>> audit(encoder, optimizer).ok
        True
    """
    record = require_record(model, "audit")
    parameters = plain_parameters(model)
    if meta := next((name for name, p in parameters.items() if p.is_meta), None):
        raise OelmError(
            f"audit: {meta} is on the meta device and has no values; call oelm.audit before .to('meta')"
        )
    held = _Optimizers(optimizer)
    trainable = sum(p.numel() for p in parameters.values() if p.requires_grad)
    # PEFT freezes the base model, which stays frozen after the adapter is merged: then nothing trains.
    others_may_be_frozen = uses_peft(model) or (not trainable and not held.given)
    context = _Context(record, held, _tied_names(model), trainable_adapters(model), others_may_be_frozen)
    rows = []
    for tensor in record.tensors.values():
        parameter = find_parameter(model, tensor.name)
        if parameter is None:
            rows.append(AuditRow(tensor.name, "in the model", ("another module replaced it",)))
        else:
            rows.append(_check(tensor, parameter, context))
    for name in record.extras:
        found = find_parameter(model, name)
        faults = ["it is not in the model any more"] if found is None else _training_faults(found, held)
        if faults and uses_peft(model):
            faults.append("PEFT froze it: call get_peft_model before oelm.apply")
        if trainable or held.given or found is None:
            rows.append(AuditRow(name, "trains (an extra of the method)", tuple(faults)))
    rows += _added_after_apply(model, record)
    if not others_may_be_frozen:
        rows += _frozen_by_accident(record, parameters)
    if held.given:
        rows += _not_in_optimizer(parameters, held, {row.tensor for row in rows})
        rows += held.not_in_model(parameters)
    total = sum(p.numel() for p in parameters.values())
    return AuditReport(
        record.method.name,
        record.seed,
        record.progress,
        total - trainable,
        trainable,
        tuple(rows),
        record.verified,
    )


@dataclass(frozen=True)
class _Context:
    """The facts about a model and its optimizers that `_check()` needs for every tensor."""

    record: Record
    optimizers: _Optimizers
    tied: dict[int, list[str]]  # id of a parameter -> its names; a tied parameter has several
    adapters: dict[int, list[str]]  # id of a parameter -> parameter names of its PEFT adapters
    others_may_be_frozen: bool  # frozen parameters that the method did not freeze are no fault


def _tied_names(model: nn.Module) -> dict[int, list[str]]:
    return {
        key: [plain_name(name) for name in names] for key, names in names_by_parameter(unwrap(model)).items()
    }


class _Optimizers:
    """The parameters in the optimizers passed to `audit()`: which have weight decay, and which have state."""

    def __init__(self, given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None) -> None:
        optimizers: list[Any] = []
        if given is not None:
            optimizers = [given] if hasattr(given, "param_groups") else list(given)
        for optimizer in optimizers:
            if not hasattr(optimizer, "param_groups"):
                raise UsageError(
                    f"audit: {type(optimizer).__name__} is not an optimizer (it has no param_groups); pass "
                    f"one optimizer or a list of optimizers"
                )
        self.given = given is not None
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._decay = {
            id(p): group.get("weight_decay", 0.0) for group in self._groups for p in group["params"]
        }
        self._state = {
            id(p)
            for optimizer in optimizers
            for p, values in getattr(optimizer, "state", {}).items()
            # `state` is a defaultdict: an empty entry only means that something has read it, so ignore it.
            if not (isinstance(values, dict) and not values)
        }

    def not_in_model(self, parameters: dict[str, nn.Parameter]) -> list[AuditRow]:
        """Return a row for each parameter that is in an optimizer but not among the model's `parameters`.

        An example is a fused Q/K/V parameter that `oelm.apply()` has replaced.
        """
        known = {id(p) for p in parameters.values()}
        return [
            AuditRow(
                f"optimizer group {g}, parameter {i} of shape {tuple(p.shape)}",
                "in the model",
                (_NOT_IN_MODEL,),
            )
            for g, group in enumerate(self._groups)
            for i, p in enumerate(group["params"])
            if id(p) not in known
        ]

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._decay

    def decays(self, parameter: nn.Parameter) -> bool:
        return bool(self._decay.get(id(parameter)))

    def has_state(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._state


def _check(tensor: TensorRecord, parameter: nn.Parameter, context: _Context) -> AuditRow:
    record, optimizer = context.record, context.optimizers
    frozen = tensor.frozen_at(record.progress)
    expected = "frozen" if frozen else "trains"
    if frozen and tensor.thaws_at is not None:
        expected += f" until {100 * tensor.thaws_at:.0f} % of the run"
    orthonormal = frozen and _should_be_orthonormal(tensor, record, parameter)
    expected += ", orthonormal per head" if orthonormal else ""
    if not frozen and not tensor.ever_frozen and not parameter.requires_grad:
        if tensor.name in record.frozen_before:
            return AuditRow(tensor.name, "frozen by the user before oelm.apply", ())
        if context.others_may_be_frozen:
            return AuditRow(tensor.name, "may train, but is frozen with the rest of the model", ())
    if not frozen:
        return AuditRow(tensor.name, expected, tuple(_training_faults(parameter, optimizer)))
    faults = _frozen_faults(tensor, parameter, optimizer)
    if orthonormal:
        tolerance = max(1e-5, 4 * torch.finfo(parameter.dtype).eps)
        error = orthonormality_error(tensor.heads(parameter))
        if not error <= tolerance:  # unlike error > tolerance, also true for NaN
            faults.append(f"its heads are not orthonormal (off by {error:.1e})")
    tied = [name for name in context.tied[id(parameter)] if name != tensor.name]
    if tied:
        faults.append(
            f"it is the same tensor as {', '.join(tied)} (tied weights), which is now frozen by accident"
        )
    if tensor.kind == "weight" and (adapters := context.adapters.get(id(parameter))):
        faults.append(
            f"a PEFT adapter changes it ({', '.join(adapters)}): leave this layer out of target_modules"
        )
    return AuditRow(tensor.name, expected, tuple(faults))


def _frozen_faults(tensor: TensorRecord, parameter: nn.Parameter, optimizer: _Optimizers) -> list[str]:
    faults = []
    if parameter.requires_grad:
        faults.append("something unfroze it (requires_grad is True)")
    if parameter.grad is not None:
        faults.append("it has a gradient")
    if sha256(parameter) != tensor.sha256:
        why = " (the optimizer applies weight decay to it)" if optimizer.decays(parameter) else ""
        if parameter.dtype != torch.float32:
            why += f" (it is {str(parameter.dtype).removeprefix('torch.')}: cast the model before oelm.apply)"
        faults.append(f"its bytes changed since it was frozen{why}")
    if optimizer.holds(parameter) and not tensor.ever_trained:
        faults.append(_IN_OPTIMIZER_WITH_DECAY if optimizer.decays(parameter) else _IN_OPTIMIZER)
    if optimizer.given and tensor.thaws_at is not None and not optimizer.holds(parameter):
        faults.append(_NOT_IN_OPTIMIZER_LATER)
    if optimizer.has_state(parameter):
        faults.append("the optimizer keeps state for it (applied.step(..., optimizer) deletes that state)")
    return faults


def _training_faults(parameter: nn.Parameter, optimizer: _Optimizers) -> list[str]:
    faults = []
    if not parameter.requires_grad:
        faults.append("it is frozen (requires_grad is False)")
    if optimizer.given and not optimizer.holds(parameter):
        faults.append(_NOT_IN_OPTIMIZER)
    return faults


def _should_be_orthonormal(tensor: TensorRecord, record: Record, parameter: nn.Parameter) -> bool:
    method = record.method
    if tensor.kind != "weight" or tensor.part not in method.parts or method.init not in ORTHONORMAL_INITS:
        return False
    if tensor.freezes_at != 0.0:  # it trained before it was frozen, so it is no longer orthonormal
        return False
    # For a matrix with more rows than columns, init "global" makes the columns of the whole matrix
    # orthonormal, so the rows of a single head are not.
    _, head_dim, d_in = tensor.heads(parameter).shape
    return method.init != "global" or tensor.num_heads == 1 or tensor.num_heads * head_dim <= d_in


def _not_in_optimizer(
    parameters: dict[str, nn.Parameter], optimizers: _Optimizers, reported: set[str]
) -> list[AuditRow]:
    """Return a row for each trainable parameter that is in no optimizer and not yet `reported`."""
    return [
        AuditRow(name, "trains", tuple(_training_faults(parameter, optimizers)))
        for name, parameter in parameters.items()
        if parameter.requires_grad and not optimizers.holds(parameter) and name not in reported
    ]


def _added_after_apply(model: nn.Module, record: Record) -> list[AuditRow]:
    """Return a row for each query or key weight that the model got after `oelm.apply()`."""
    if record.method.trains_qk:
        return []
    known = {id(find_parameter(model, name)) for name in record.tensors}
    try:
        projections = find_projections(model, record.selection)
    except OelmError:  # an attention module was replaced; the rows of its tensors say so
        return []
    return [
        AuditRow(
            f"{projection.name}.weight",
            "frozen",
            (
                "the model got it after oelm.apply, so the method does not act on it: build the whole model "
                "first, then call oelm.apply",
            ),
        )
        for projection in projections
        if projection.role in record.method.parts and id(projection.weight.parameter) not in known
    ]


def _frozen_by_accident(record: Record, parameters: dict[str, nn.Parameter]) -> list[AuditRow]:
    """Return a row for each parameter that is frozen by mistake.

    The parameters that the method freezes, or that the user froze before `oelm.apply()`, are not returned.
    """
    known = {id(parameters[name]) for name in (*record.tensors, *record.extras) if name in parameters}
    return [
        AuditRow(name, "trains", ("it is frozen, although the method does not freeze it",))
        for name, parameter in parameters.items()
        if not parameter.requires_grad and id(parameter) not in known and name not in record.frozen_before
    ]
