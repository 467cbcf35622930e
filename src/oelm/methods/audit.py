"""`oelm.audit`: per tensor, what the method promised and what holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from oelm.methods.checks import owners
from oelm.methods.method import ORTHONORMAL
from oelm.methods.orthogonal import orthonormality_error
from oelm.methods.readers import unwrap
from oelm.methods.record import Record, TensorRecord, required_record, sha256


@dataclass(frozen=True)
class AuditRow:
    """One tensor: the promise, and every way in which it does not hold."""

    tensor: str
    promised: str
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


@dataclass(frozen=True)
class AuditReport:
    """`ok` if every promise holds; printing it shows the counts and every fault."""

    method: str
    seed: int
    progress: float
    frozen: int
    trainable: int
    rows: tuple[AuditRow, ...]

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
        return "\n".join([head, *(f"  {r.tensor}: {r.promised}, but {'; '.join(r.faults)}" for r in bad)])


def audit(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> AuditReport:
    """Check that what a method froze is frozen, unchanged since, orthonormal where promised, and no
    business of the optimizer; and that it froze nothing else.

    >>> import torch, oelm
    >>> encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> applied = oelm.apply(encoder, "oelm-freeze")
    >>> optimizer = torch.optim.AdamW(oelm.param_groups(encoder, lr=1e-3))
    >>> audit(encoder, optimizer).ok
    True
    """
    record = required_record(model, "audit")
    model = unwrap(model)
    parameters, names, held = dict(model.named_parameters()), owners(model), _Optimizer(optimizer)
    rows = []
    for tensor in record.tensors.values():
        if tensor.name in parameters:
            parameter = parameters[tensor.name]
            rows.append(_check(tensor, record, parameter, names[id(parameter)], held))
        else:
            rows.append(AuditRow(tensor.name, "in the model", ("it is gone, or another name comes first",)))
    for name in record.extras:
        found = parameters.get(name)
        faults = ["it is gone"] if found is None else _training_faults(found, held)
        rows.append(AuditRow(name, "trains (an extra of the method)", tuple(faults)))
    rows += _frozen_by_accident(record, parameters)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    return AuditReport(record.method.name, record.seed, record.progress, frozen, total - frozen, tuple(rows))


class _Optimizer:
    """What an optimizer holds of a parameter; nothing is known without one."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.given = optimizer is not None
        groups = optimizer.param_groups if optimizer is not None else []
        self._decay = {id(p): group.get("weight_decay", 0.0) for group in groups for p in group["params"]}
        state = optimizer.state if optimizer is not None else {}
        self._state = {id(p) for p, values in state.items() if values}

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._decay

    def decays(self, parameter: nn.Parameter) -> bool:
        return bool(self._decay.get(id(parameter)))

    def has_state(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._state


def _check(
    tensor: TensorRecord, record: Record, parameter: nn.Parameter, names: list[str], optimizer: _Optimizer
) -> AuditRow:
    frozen = tensor.frozen_at(record.progress)
    promised = "frozen" if frozen else "trains"
    if frozen and tensor.thaws_at is not None:
        promised += f" until {100 * tensor.thaws_at:.0f} % of the run"
    orthonormal = frozen and _promises_orthonormal(tensor, record, parameter)
    promised += ", orthonormal per head" if orthonormal else ""
    if not frozen and tensor.name in record.frozen_before and not tensor.ever_frozen:
        return AuditRow(tensor.name, "as it was before: frozen by the user", ())
    if not frozen:
        return AuditRow(tensor.name, promised, tuple(_training_faults(parameter, optimizer)))
    faults = _frozen_faults(tensor, parameter, optimizer)
    if orthonormal:
        tolerance = max(1e-5, 4 * torch.finfo(parameter.dtype).eps)
        error = orthonormality_error(tensor.heads(parameter))
        if not error <= tolerance:  # NaN fails too
            faults.append(f"its heads are not orthonormal (off by {error:.1e})")
    tied = [name for name in names if name != tensor.name]
    if tied:
        faults.append(f"it is tied to {', '.join(tied)}, which is frozen by accident")
    return AuditRow(tensor.name, promised, tuple(faults))


def _frozen_faults(tensor: TensorRecord, parameter: nn.Parameter, optimizer: _Optimizer) -> list[str]:
    faults = []
    if parameter.requires_grad:
        faults.append("it was thawed (requires_grad is True)")
    if parameter.grad is not None:
        faults.append("it has a gradient")
    if sha256(parameter) != tensor.sha256:
        why = " (the optimizer decays it)" if optimizer.decays(parameter) else ""
        faults.append(f"its bytes changed since it was frozen{why}")
    if optimizer.holds(parameter) and not tensor.ever_trained:
        decay = ", with weight decay" if optimizer.decays(parameter) else ""
        faults.append(f"the optimizer holds it{decay}")
    if optimizer.has_state(parameter):
        faults.append("the optimizer keeps state for it (applied.step(..., optimizer) drops it)")
    return faults


def _training_faults(parameter: nn.Parameter, optimizer: _Optimizer) -> list[str]:
    faults = []
    if not parameter.requires_grad:
        faults.append("it is frozen (requires_grad is False)")
    if optimizer.given and not optimizer.holds(parameter):
        faults.append("the optimizer does not hold it, so it will not train")
    return faults


def _promises_orthonormal(tensor: TensorRecord, record: Record, parameter: nn.Parameter) -> bool:
    method = record.method
    if tensor.kind != "weight" or tensor.part not in method.parts or method.init not in ORTHONORMAL:
        return False
    if tensor.freezes_at != 0.0:  # what trained before it froze promises its bytes only
        return False
    # A tall matrix drawn as a whole has orthonormal columns, which says nothing of each of several heads.
    _, head_dim, d_in = tensor.heads(parameter).shape
    return method.init != "global" or tensor.num_heads == 1 or tensor.num_heads * head_dim <= d_in


def _frozen_by_accident(record: Record, parameters: dict[str, nn.Parameter]) -> list[AuditRow]:
    """Frozen parameters that neither the method nor the user (before apply) froze."""
    known = {id(parameters[name]) for name in record.tensors if name in parameters}
    return [
        AuditRow(name, "trains", ("it is frozen, but not by the method",))
        for name, parameter in parameters.items()
        if not parameter.requires_grad and id(parameter) not in known and name not in record.frozen_before
    ]
