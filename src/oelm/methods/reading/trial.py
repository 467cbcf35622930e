"""Test numerically whether certain projections are the Q and K of an attention module.

A `Trial` runs a copy of the attention module with random float32 weights on random tokens. `ScoreRecorder`
records the attention scores and detaches them from the output, so that gradients separate two paths from a
parameter to the output: through the scores, and past them. A claimed projection is one that oelm has read as
Q or K by its name. Four properties are tested:

1. Every row of a claimed projection affects the scores and nothing else, so it does not belong to a value,
   gate or output projection.
2. No other projection affects only the scores; otherwise, oelm would have overlooked a part of Q or K.
3. A query row affects score (i, j) through token i, a key row through token j.
4. The rows of one claimed head affect the scores of one head, and different heads affect different scores.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oelm.methods.reading.build import find_number
from oelm.methods.reading.calls import Call, guess_calls
from oelm.methods.reading.families import HEAD_DIM, NUM_HEADS
from oelm.methods.reading.projection import (
    ParameterSlice,
    Projection,
    is_depthwise,
    is_matrix,
    is_projection,
    is_transposed,
)
from oelm.methods.reading.scores import ScoreRecorder
from oelm.methods.reading.wrappers import base_layer, is_adapter

ROLE_NAMES = {"q": "queries", "k": "keys"}


class Trial:
    """A copy of an attention module with random float32 weights, and the projections claimed as Q and K."""

    def __init__(
        self,
        model: nn.Module,
        attention: nn.Module,
        projections: Sequence[Projection] = (),
        *,
        eager: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.computed_softmax = False  # in the last `run()`, even if the softmax gets no gradient
        self.module = copy.deepcopy(attention).eval()
        for module in self.module.modules():
            self._randomize(module)
        copies = {id(old): new for old, new in zip(attention.modules(), self.module.modules(), strict=True)}

        def in_copy(part: Any) -> Any:
            return part and dataclasses.replace(part, owner=copies[id(part.owner)])

        self.claims = [
            dataclasses.replace(p, weight=in_copy(p.weight), bias=in_copy(p.bias)) for p in projections
        ]
        self.config = getattr(attention, "config", None) or getattr(model, "config", None)
        if eager:
            self.module.config._attn_implementation = "eager"  # type: ignore[union-attr]

    def _randomize(self, module: nn.Module) -> None:
        """Replace the parameters of a module by random ones, and move its buffers to the CPU in float32.

        Hooks of the module are removed.
        """
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                noise = torch.randn(parameter.shape, generator=self.generator)
                fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 0
                mean = 0.0 if "bias" in name else 1.0  # a vector that is not a bias is the scale of a norm
                module._parameters[name] = nn.Parameter(
                    noise * fan_in**-0.5 if fan_in else mean + 0.3 * noise
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                plain = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.cpu()
                module._buffers[name] = plain.float() if plain.is_floating_point() else plain

    def guess_calls(self) -> Iterator[Call]:
        """Yield (args, kwargs) that the attention module may accept.

        In the first calls, the key input has the input width of the key projection; in later ones, that of
        the query projection.
        """
        heads = [c.heads().shape for c in self.claims]  # (heads, head_dim, d_in)
        widths = [*(h[-1] for h in heads[:1]), *(h[-1] for h in heads[::-1])]
        for matrix in () if heads else self.module.modules():
            if is_projection(matrix):
                weight = base_layer(matrix).weight
                assert isinstance(weight, Tensor)
                widths.append(weight.shape[0] if is_transposed(matrix) else weight.shape[1])
        widths = list(dict.fromkeys(widths))[:3]
        head_dim = heads[0][1] if heads else self._usual_head_dim(widths[0]) if widths else 1
        pairs = [(a, b) for a in (widths[:1] if heads else widths) for b in (*widths[::-1], a)]
        for width, key_width in dict.fromkeys(pairs):
            yield from guess_calls(self.module, self.config, width, key_width, head_dim, self.generator)

    def _usual_head_dim(self, width: int) -> int:
        size = find_number(self.module, self.module, None, HEAD_DIM)
        return size or width // (find_number(self.module, self.module, None, NUM_HEADS) or 1)

    def run(self, args: Any, kwargs: Any) -> tuple[list[Tensor], Tensor]:
        """Call the copied attention module; return the scores that depend on parameters, and the output."""
        with torch.enable_grad(), ScoreRecorder() as recorder:
            output = self.module(*args, **kwargs)
        self.computed_softmax = bool(recorder.scores)
        return [s for s in recorder.scores if s.requires_grad], next(tensors_in(output))

    def contradiction(self, args: Any, kwargs: Any, scores: list[Tensor], output: Tensor) -> str:
        """Return why the claimed projections cannot be Q and K, or "" if all four properties hold.

        The properties are listed in the module docstring. `scores` and `output` are what `run()` returned for
        `args` and `kwargs`.
        """
        names, parameters = zip(*self.module.named_parameters(), strict=True)
        through_scores = dict(zip(names, gradients(scores, parameters), strict=True))
        past_scores = dict(zip(names, gradients([output], parameters), strict=True))
        unused: list[Projection] = []
        for claim in self.claims:
            problem, is_unused = self._wrong_paths(claim, through_scores, past_scores)
            if problem:
                return problem
            if is_unused:
                unused.append(claim)
        if problem := self._forgotten_projection(args, kwargs, through_scores, past_scores):
            return problem
        used = [claim for claim in self.claims if claim not in unused]
        if unused_role := {c.role for c in unused} - {c.role for c in used}:
            return (
                f"no projection that is read as {ROLE_NAMES[min(unused_role)]} affects the attention scores"
            )
        # Test roles before heads: testing heads reverses rows in place, which invalidates the autograd graph.
        roles = (self._wrong_role(claim, scores) for claim in used)
        heads = (self._wrong_heads(claim, args, kwargs, scores) for claim in used)
        return next(filter(None, itertools.chain(roles, heads)), "")

    def _name(self, part: ParameterSlice) -> str:
        return next(n for n, p in self.module.named_parameters() if p is part.parameter)

    def _wrong_paths(
        self, claim: Projection, through_scores: dict[str, Tensor], past_scores: dict[str, Tensor]
    ) -> tuple[str, bool]:
        """Test property 1 of the module docstring for one claimed projection.

        Return (problem or "", whether the forward pass did not use the projection at all).
        """
        for part in claim.slices:
            name = self._name(part)
            if part.cut(past_scores[name]).any():
                return (
                    f"rows of {name} that are read as {ROLE_NAMES[claim.role]} affect the output not only "
                    f"through the attention scores, so they belong to values or a gate"
                ), False
        name = self._name(claim.weight)
        idle = ~claim.weight.cut(through_scores[name]).flatten(2).any(-1)
        if idle.all() and _is_named_like_its_role(claim):
            return "", True  # for example Longformer's global attention if no token is global
        if idle.any():
            return (
                f"{int(idle.sum())} rows of {name} that are read as {ROLE_NAMES[claim.role]} do "
                f"not affect the attention scores"
            ), False
        return "", False

    def _forgotten_projection(
        self, args: Any, kwargs: Any, through_scores: dict[str, Tensor], past_scores: dict[str, Tensor]
    ) -> str:
        """Test property 2 of the module docstring; return the problem, or "" if there is none."""
        claimed = {n: torch.zeros(p.shape, dtype=torch.bool) for n, p in self.module.named_parameters()}
        for claim in self.claims:
            for part in claim.slices:
                part.cut(claimed[self._name(part)]).fill_(True)
        for name, parameter in self.module.named_parameters():
            only_scores = (through_scores[name] != 0) & (past_scores[name] == 0) & ~claimed[name]
            if not only_scores.any() or not self._is_projection(name, parameter):
                continue
            if not self._is_position_bias(args, kwargs, parameter, through_scores[name]):
                return f"{name} affects only the attention scores, but is not read as Q or K"
        return ""

    def _is_projection(self, name: str, parameter: Tensor) -> bool:
        """Return whether a parameter is a matrix that projects tokens or positions, or a bias of Q or K."""
        owner, own = self.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if isinstance(owner, nn.Embedding | nn.MultiheadAttention) or self._is_in_adapter(name):
            return False  # a nested MultiheadAttention counts as an attention module of its own
        if is_depthwise(owner):
            return False  # it mixes positions, not features
        if parameter.dim() < 2:
            rows = {c.num_heads * c.head_dim for c in self.claims}
            return own in ("q_bias", "k_bias") and parameter.numel() in rows
        if getattr(owner, "weight", None) is parameter:
            return True
        if is_matrix(owner) and any(claim.weight.owner is owner for claim in self.claims):
            return True  # such as a low-rank adapter in a subclass of nn.Linear
        width = self.claims[0].heads().shape[-1]
        return width in parameter.shape and parameter.numel() >= width * self.claims[0].head_dim

    def _is_in_adapter(self, name: str) -> bool:
        """Return whether PEFT added this parameter; `oelm.methods.checks` handles PEFT adapters."""
        steps = name.split(".")
        around = (self.module.get_submodule(".".join(steps[:n])) for n in range(len(steps)))
        return any(is_adapter(module) for module in around) and "base_layer" not in steps

    def _is_position_bias(self, args: Any, kwargs: Any, parameter: Tensor, before: Tensor) -> bool:
        """Return whether a parameter's effect on the scores is independent of the tokens.

        The gradient is computed again with all inputs multiplied by 0.5. `before` is the gradient without
        this change; for a position bias, both are equal.
        """
        scores, _ = self.run(_halved(args), _halved(kwargs))
        (after,) = gradients(scores, [parameter])
        return torch.allclose(before, after, rtol=1e-3, atol=1e-6)

    def _wrong_role(self, claim: Projection, scores: list[Tensor]) -> str:
        """Test property 3 of the module docstring; return the problem, or "" if there is none.

        The gradient of score (i, j) with respect to a query row has the same direction for all j; for a key
        row, it has the same direction for all i.
        """
        for s in scores:
            if s.shape[-1] < 2 or s.shape[-2] < 2:
                continue
            for matrix in {0: s.flatten(0, -3)[0], 1: s.flatten(0, -3)[-1]}.values():
                base, other_key, other_query = (
                    _rows_of_gradient(matrix[i, j], claim) for i, j in ((-1, 0), (-1, 1), (-2, 0))
                )
                as_query, as_key = parallel(base, other_key), parallel(base, other_query)
                own, other = (as_query, as_key) if claim.role == "q" else (as_key, as_query)
                wrong = (other > 0.999) & (own < 0.99)
                if wrong.any():
                    actual = ROLE_NAMES["k" if claim.role == "q" else "q"]
                    return (
                        f"{int(wrong.sum())} rows of {claim.name} are read as {ROLE_NAMES[claim.role]}, but "
                        f"act as {actual}"
                    )
        return ""

    @torch.no_grad()
    def _wrong_heads(self, claim: Projection, args: Any, kwargs: Any, scores: list[Tensor]) -> str:
        """Test property 4 of the module docstring; return the problem, or "" if there is none.

        The order of rows is reversed, because no normalisation can cancel this change. Reversing the first
        quarter of a head's rows must change the same scores as reversing all of them, and different heads
        must change different scores.
        """
        if claim.head_dim < 2:
            return ""
        taken: Tensor | None = None
        for head in sorted({0, 1 % claim.num_heads, claim.num_heads // 2, claim.num_heads - 1}):
            first = head * claim.head_dim
            rows = torch.arange(first, first + claim.head_dim)
            all_rows = self._scores_after_reversing(claim, rows, args, kwargs, scores)
            quarter = rows[: max(2, claim.head_dim // 4)]
            some_rows = self._scores_after_reversing(claim, quarter, args, kwargs, scores)
            if some_rows.sum() < 0.75 * all_rows.sum():
                return (
                    f"the rows of one head of {claim.name} affect the scores of several heads, so it does "
                    f"not have {claim.num_heads} heads of {claim.head_dim} rows, or its rows are in another "
                    f"order"
                )
            if taken is not None and (taken & all_rows).sum() > 0.1 * all_rows.sum():
                return (
                    f"two heads of {claim.name} affect the same scores, so it does not have "
                    f"{claim.num_heads} heads of {claim.head_dim} rows, or its rows are in another order"
                )
            taken = all_rows if taken is None else taken | all_rows
        return ""

    def _scores_after_reversing(
        self, claim: Projection, rows: Tensor, args: Any, kwargs: Any, before: list[Tensor]
    ) -> Tensor:
        """Return a bool tensor: which scores change if the order of `rows` is reversed.

        `before` are the scores without the change. The rows are restored afterwards.
        """
        kept = []
        for part in claim.slices:
            view = part.view()
            group, row = rows // view.shape[1], rows % view.shape[1]
            values = view[group, row].clone()
            kept.append((view, group, row, values))
            view[group, row] = values.flip(0)
        with torch.enable_grad(), ScoreRecorder() as recorder:
            self.module(*args, **kwargs)
        after = [s.detach() for s in recorder.scores if s.requires_grad]
        for view, group, row, values in kept:
            view[group, row] = values
        return torch.cat([_changed(old.detach(), new) for old, new in zip(before, after, strict=True)])


def gradients(targets: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each parameter, the gradient of a random linear combination of all entries of `targets`.

    A parameter that affects none of the targets gets zeros.
    """
    generator = torch.Generator().manual_seed(1)
    parts = [
        (torch.where(t.isfinite(), t, 0.0) * torch.randn(t.shape, generator=generator)).sum()
        for t in targets
        if t.requires_grad
    ]
    if not parts:
        return [torch.zeros_like(p) for p in parameters]
    total = torch.stack(parts).sum()
    found = torch.autograd.grad(total, list(parameters), allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def _is_named_like_its_role(claim: Projection) -> bool:
    """Return whether a projection is named after its role; such a projection may be unused in one call."""
    words = {"q": {"q", "query"}, "k": {"k", "key"}}[claim.role]
    return bool(words & set(claim.name.rpartition(".")[2].split("_")))


def _rows_of_gradient(score: Tensor, claim: Projection) -> Tensor:
    (grad,) = torch.autograd.grad(score, [claim.weight.parameter], retain_graph=True, allow_unused=True)
    grad = torch.zeros_like(claim.weight.parameter) if grad is None else grad
    return claim.weight.cut(grad).flatten(2).flatten(0, 1)  # (rows, d_in)


def parallel(a: Tensor, b: Tensor) -> Tensor:
    """Return |cosine| between each row of a and the same row of b; 1 if one of them is zero."""
    norms = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(norms > 1e-12, (a * b).sum(-1).abs() / norms.clamp_min(1e-12), 1.0)


def _changed(before: Tensor, after: Tensor) -> Tensor:
    scale = before[before.isfinite()].abs().median()  # masked scores of -1e4 would distort a mean
    return (((after - before).abs() > 1e-5 * scale) & before.isfinite()).flatten()


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, list | tuple):
        for item in output:
            yield from tensors_in(item)


def _halved(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value * 0.5
    if isinstance(value, dict):
        return {k: _halved(v) for k, v in value.items()}
    return type(value)(_halved(v) for v in value) if isinstance(value, list | tuple) else value
