"""`oelm.preview`: return a table of what `oelm.apply` would do, without changing the model."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oelm.methods.apply import check_model
from oelm.methods.install import install
from oelm.methods.method import Method
from oelm.methods.presets import find_method
from oelm.methods.reading.feed_forward import ffn_matrices
from oelm.methods.reading.find import find_projections
from oelm.methods.reading.projection import FeedForward, Projection
from oelm.methods.reading.select import Patterns, Selection
from oelm.methods.reading.wrappers import plain_parameters, unwrap
from oelm.methods.record import Record, TensorRecord


@dataclass(frozen=True)
class PreviewRow:
    """What `oelm.apply()` would do to one projection or FFN matrix."""

    module: str
    part: str  # "q", "k" or "ffn"
    num_heads: int
    head_dim: int
    init: str
    training: str  # "frozen", "trains", or a text such as "frozen until 50 % of the run"
    parameters: int  # number of parameters in weight and bias
    extras: int  # number of trainable parameters that the method adds to the module


@dataclass(frozen=True)
class Preview:
    """The result of `oelm.preview()`: a row per module, and the parameter counts after `oelm.apply()`."""

    model: str
    method: Method
    rows: tuple[PreviewRow, ...]
    total: int
    frozen: int
    added: int

    @property
    def trainable(self) -> int:
        return self.total - self.frozen

    def __str__(self) -> str:
        merged = _merge_layers(self.rows)
        columns = ("module", "part", "heads", "init", "training", "parameters", "extras")
        table = [columns, *(_cells(name, row, count) for name, row, count in merged)]
        widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
        lines = ["  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in table]
        return "\n".join(
            [
                f"{self.model} with {self.method.name}: a preview, nothing is changed",
                *(line.rstrip() for line in lines),
                f"{self.total:,} parameters, of which {self.added:,} are added; "
                f"{self.trainable:,} trainable, {self.frozen:,} frozen",
            ]
        )

    __repr__ = __str__


def preview(
    model: nn.Module,
    method: str | Method,
    *,
    where: Patterns = None,
    exclude: Patterns = None,
    verify: bool = True,
    example_inputs: Any = None,
) -> Preview:
    """Return what `oelm.apply()` would do with these arguments; `model` is not changed.

    Errors and warnings are the same as those of `oelm.apply()`. The parameter counts are exact.

    Examples:
        >>> import torch
        >>> encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> print(preview(encoder, "oelm-freeze"))
        TransformerEncoderLayer with oelm-freeze: a preview, nothing is changed
          module       part  heads  init      training  parameters  extras
          self_attn.q  q     4 x 4  headwise  frozen    272         0
          self_attn.k  k     4 x 4  headwise  frozen    272         0
        2,224 parameters, of which 0 are added; 1,680 trainable, 544 frozen
    """
    model, chosen, selection = unwrap(model), find_method(method), Selection.of(where, exclude)
    check_model(model, chosen, selection, verify=verify, example_inputs=example_inputs)
    trial = _meta_copy(model)
    record = install(trial, chosen, seed=0, init=False, selection=selection)
    parameters = plain_parameters(trial)
    for name, tensor in record.tensors.items():
        if tensor.frozen_at(0.0):
            parameters[name].requires_grad_(False)
    total = sum(p.numel() for p in parameters.values())
    targets: list[Projection | FeedForward] = [*find_projections(trial, selection)]
    if "ffn" in chosen.parts:
        targets += ffn_matrices(trial, selection)
    return Preview(
        model=type(model).__name__,
        method=chosen,
        rows=tuple(_row(target, record, parameters) for target in targets),
        total=total,
        frozen=sum(p.numel() for p in parameters.values() if not p.requires_grad),
        added=total - sum(p.numel() for p in model.parameters()),
    )


def _meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model whose parameters are on the meta device: they have shapes but no values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _row(target: Projection | FeedForward, record: Record, parameters: dict[str, nn.Parameter]) -> PreviewRow:
    names = {id(p): name for name, p in parameters.items()}
    slices = [s for s in (target.weight, target.bias) if s is not None]
    tensor = record.tensors.get(names[id(target.weight.parameter)])
    added = [parameters[name].numel() for name in record.extras if name.startswith(f"{target.name}.")]
    part, heads, head_dim = "ffn", 1, target.weight.rows
    if isinstance(target, Projection):
        part, heads, head_dim = target.role, target.num_heads, target.head_dim
    return PreviewRow(
        module=target.name,
        part=part,
        num_heads=heads,
        head_dim=head_dim,
        init=record.method.init if part in record.method.parts else "keep",
        training=_training(tensor),
        parameters=sum(s.size for s in slices),
        extras=sum(added),
    )


def _training(tensor: TensorRecord | None) -> str:
    if tensor is None or tensor.freezes_at is None:
        return "trains"
    if tensor.freezes_at > 0:
        return f"trains, frozen from {100 * tensor.freezes_at:.0f} % of the run on"
    if tensor.thaws_at is not None:
        return f"frozen until {100 * tensor.thaws_at:.0f} % of the run"
    return "frozen"


def _merge_layers(rows: tuple[PreviewRow, ...]) -> list[tuple[str, PreviewRow, int]]:
    """Return (name, row, number of modules) for each group of rows that differ only in their layer numbers.

    The name of a group has "*" in place of the numbers.
    """
    groups: dict[Any, list[PreviewRow]] = {}
    for row in rows:
        key = (re.sub(r"\d+", "*", row.module), *list(vars(row).values())[1:])
        groups.setdefault(key, []).append(row)
    return [
        (group[0].module if len(group) == 1 else key[0], group[0], len(group))
        for key, group in groups.items()
    ]


def _cells(name: str, row: PreviewRow, count: int) -> tuple[str, ...]:
    times = f"{count} x " if count > 1 else ""
    heads = f"{row.num_heads} x {row.head_dim}"
    counts = f"{times}{row.parameters:,}", f"{times}{row.extras:,}"
    return name, row.part, heads, row.init, row.training, *counts
