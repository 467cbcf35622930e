"""Discover numerically which rows of an attention module compute queries and keys, whatever their names.

A copy of the module with random weights is called (see `trial.py`). A row of a projection belongs to Q or K
if it affects the output only through the attention scores: to Q if it affects score (i, j) through token i,
to K if through token j. The scores that a row affects show its head. This also works for gated queries,
fused matrices in any regular row order, latent attention, learned query tokens, and projections made of
several matrices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from oelm.methods.reading.calls import Call
from oelm.methods.reading.families import (
    FUSED_WORDS,
    KEY_WORDS,
    QK_WORDS,
    QUERY_WORDS,
    AttentionSpec,
    FusedPart,
    words,
)
from oelm.methods.reading.projection import ParameterSlice, RowLayout, is_projection, is_transposed
from oelm.methods.reading.trial import Trial, gradients, parallel, tensors_in

_MAX_HEADS = 256  # limits the cost: each head needs one backward pass


def discover_spec(
    model: nn.Module, attention: nn.Module, calls: Sequence[Call] = (), *, eager: bool
) -> tuple[AttentionSpec, Call] | None:
    """Return where a module stores its Q and K, and the call that showed it; None if no call shows it.

    calls: (args, kwargs) with which the model calls the module; guessed from the signature if empty.
    """
    try:
        trial = Trial(model, attention, eager=eager)
    except Exception:  # copying a user's module can raise any exception
        return None
    selecting = _watch_selection(trial.module)
    for args, kwargs in calls or trial.guess_calls():
        try:
            scores, output = trial.run(args, kwargs)
            if scores:
                for path in selecting:
                    trial.module.get_submodule(path).requires_grad_(False)
                spec = _read_rows(trial, scores, output)
                return None if spec is None else (spec, (args, kwargs))
        except Exception:  # the module does not accept these arguments
            continue
    return None


def mixes_without_scores(model: nn.Module, attention: nn.Module, calls: Sequence[Call] = ()) -> bool:
    """Return whether a module is linear attention: distant tokens affect each other without a softmax.

    The result is False if queries or keys enter an exponential or a similar function, because the module may
    then compute its softmax with that function.
    """
    try:
        trial = Trial(model, attention)
    except Exception:  # copying a user's module can fail in any way
        return False
    parts = projections_inside(trial.module)
    weights = [p.parameter for path, p in parts.items() if words(path.lower()) & (QK_WORDS | FUSED_WORDS)]
    for args, kwargs in calls or trial.guess_calls():
        try:
            with _NonlinearRecorder() as recorder:
                _, before = trial.run(args, kwargs)
            tokens = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() == 3)
            if trial.computed_softmax or tokens.shape[:2] != before.shape[:2] or not weights:
                return False
            if any(gradient.any() for gradient in gradients(recorder.inputs, weights)):
                return False
            tokens[:, 0] += 1.0
            _, after = trial.run(args, kwargs)
            return not torch.allclose(before[:, -1], after[:, -1])
        except Exception:  # the module does not accept these arguments
            continue
    return False


class _NonlinearRecorder(TorchFunctionMode):
    """Record the inputs of functions, such as exp, that may turn scores into attention weights."""

    FUNCTIONS = frozenset(
        getattr(owner, name)
        for name in ("exp", "exp2", "sigmoid", "relu", "tanh", "softplus", "log_softmax")
        for owner in (torch, Tensor, F, torch.special)
        if hasattr(owner, name)
    )

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.FUNCTIONS and args and isinstance(args[0], Tensor):
            self.inputs.append(args[0])
        return func(*args, **(kwargs or {}))


def _watch_selection(module: nn.Module) -> set[str]:
    """Return a set to which each forward pass adds the paths of inner modules without differentiable output.

    Such a module selects tokens (the indexer of sparse attention), so its weights get no gradient.
    """
    selecting: set[str] = set()
    for path, inner in module.named_modules():
        if path and any(True for _ in inner.parameters()):

            def hook(_module: nn.Module, _args: Any, output: Any, path: str = path) -> None:
                if not any(t.requires_grad for t in tensors_in(output)):
                    selecting.add(path)

            inner.register_forward_hook(hook)
    return selecting


def projections_inside(module: nn.Module) -> dict[str, ParameterSlice]:
    """Return the weights of all projections inside a module, by path; MultiheadAttention is left out."""
    found: dict[str, ParameterSlice] = {}
    closed: list[str] = []
    for path, inner in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in closed):
            continue
        if isinstance(inner, nn.MultiheadAttention):
            closed.append(path)
        elif is_projection(inner):
            closed.append(path)
            found[path] = ParameterSlice(inner, "weight", is_transposed(inner))
        else:
            prefix = f"{path}." if path else ""
            for name, parameter in inner._parameters.items():
                # A parameter of three dimensions without such a word in its name is a learned token.
                if parameter is not None and parameter.dim() == 3 and words(name.lower()) & QK_WORDS:
                    found[prefix + name] = ParameterSlice(inner, name, transposed=True)
    return found


def _read_rows(trial: Trial, scores: list[Tensor], output: Tensor) -> AttentionSpec | None:
    """Return the spec that follows from the gradients of `scores` and `output`; None if none follows."""
    parts = {p: s for p, s in projections_inside(trial.module).items() if s.parameter.requires_grad}
    weights = [part.parameter for part in parts.values()]
    through, past = gradients(scores, weights), gradients([output], weights)
    only_scores = {
        path: _rows(part, a) & ~_rows(part, b)
        for (path, part), a, b in zip(parts.items(), through, past, strict=True)
    }
    for path, a, b in zip(parts, through, past, strict=True):
        if not a.any() and not b.any() and words(path.lower()) & QK_WORDS:
            return None  # this call does not use the projection, but another call may
    parts = {path: part for path, part in parts.items() if only_scores[path].any()}
    weights = [part.parameter for part in parts.values()]
    if not parts:
        return None
    by_head = _rows_by_head(parts, weights, scores)
    roles = _roles(parts, weights, scores)
    separate: dict[str, list[str]] = {"q": [], "k": []}
    head_dims: dict[str, int] = {}
    fused: list[FusedPart] = []
    for path in parts:
        own = only_scores[path].tolist()
        labels = [role if acts else "" for role, acts in zip(roles[path], own, strict=True)]
        layout = _row_layout(labels)
        if layout is None:
            return None
        sizes = {r: _head_dim(labels, r, by_head[path]) for r in layout.roles if r in ("q", "k")}
        if 0 in sizes.values():
            return None
        if len(layout.roles) == 1:
            separate[layout.roles[0]].append(path)
            head_dims[path] = sizes[layout.roles[0]]
        else:
            fused.append(FusedPart(path, layout, sizes))
    bias = trial.module._parameters.get("q_bias")
    return AttentionSpec(
        q=tuple(separate["q"]),
        k=tuple(separate["k"]),
        parts=tuple(fused),
        head_dims=head_dims,
        q_bias="q_bias" if bias is not None and fused and "q" in fused[0].layout.roles else "",
    )


def _rows(part: ParameterSlice, gradient: Tensor) -> Tensor:
    """Return which rows of a projection have a nonzero gradient."""
    return part.cut(gradient)[0].flatten(1).any(-1)


def _rows_by_head(
    parts: dict[str, ParameterSlice], weights: list[nn.Parameter], scores: list[Tensor]
) -> dict[str, Tensor]:
    """Return a bool tensor (rows, heads) per projection: whether a row affects the scores of a head."""
    heads = [part for s in scores for axis in range(s.dim() - 2) for part in s.unbind(axis)]
    if len(heads) > _MAX_HEADS:
        raise ValueError(f"{len(heads)} heads are more than the limit of {_MAX_HEADS}")
    columns: dict[str, list[Tensor]] = {path: [] for path in parts}
    for head in heads:
        for (path, part), gradient in zip(parts.items(), gradients([head], weights), strict=True):
            columns[path].append(_rows(part, gradient))
    return {path: torch.stack(found, -1) for path, found in columns.items()}


def _roles(
    parts: dict[str, ParameterSlice], weights: list[nn.Parameter], scores: list[Tensor]
) -> dict[str, list[str]]:
    """Return "q" or "k" for each row, found from the scores; if they do not show it, from the matrix name."""
    roles = {
        path: ["q" if words(path.lower()) & QUERY_WORDS and not words(path.lower()) & KEY_WORDS else "k"]
        * part.rows
        for path, part in parts.items()
    }
    for s in scores:
        if s.shape[-1] < 2 or s.shape[-2] < 2:
            continue
        for axis in range(s.dim() - 2):  # the axis of heads, or of windows of tokens
            tokens = s.movedim(axis, -3).flatten(0, -4)[0] if s.dim() > 3 else s  # (heads, queries, keys)
            base, other_key, other_query = (
                gradients([tokens[:, i, j]], weights) for i, j in ((-1, 0), (-1, 1), (-2, 0))
            )
            for (path, part), *found in zip(parts.items(), base, other_key, other_query, strict=True):
                a, b, c = (part.cut(g)[0].flatten(1) for g in found)
                as_query, as_key = parallel(a, b), parallel(a, c)
                for row in torch.nonzero((as_query > 0.999) & (as_key < 0.99)).flatten().tolist():
                    roles[path][row] = "q"
                for row in torch.nonzero((as_key > 0.999) & (as_query < 0.99)).flatten().tolist():
                    roles[path][row] = "k"
    return roles


def _row_layout(labels: list[str]) -> RowLayout | None:
    """Return the layout of rows labelled "q", "k" or "" (others); None if they have no regular order.

    >>> _row_layout(["q", "q", "k", "", "q", "q", "k", ""])
    RowLayout(roles=('q', 'k', 'v'), sizes=(4, 2, 2), groups=2)
    """
    rows = len(labels)
    period = next(n for n in range(1, rows + 1) if rows % n == 0 and labels == labels[:n] * (rows // n))
    runs = [(label, len(list(group))) for label, group in itertools.groupby(labels[:period])]
    named = [label for label, _ in runs if label]
    if len(named) != len(set(named)):
        return None
    others = itertools.chain(["v"] if "k" in named else [], (f"rest{n}" for n in itertools.count()))
    roles = tuple(label or next(others) for label, _ in runs)
    groups = rows // period
    return RowLayout(roles, tuple(size * groups for _, size in runs), groups if len(runs) > 1 else 1)


def _head_dim(labels: list[str], role: str, by_head: Tensor) -> int:
    """Return the head size of a role: how many consecutive rows affect the same scores; 0 if this varies."""
    rows: list[Any] = [acts for acts, label in zip(by_head.tolist(), labels, strict=True) if label == role]
    sizes = {len(list(group)) for _, group in itertools.groupby(rows)}
    return sizes.pop() if len(sizes) == 1 else 0
