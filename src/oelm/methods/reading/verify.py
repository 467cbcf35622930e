"""Numeric proof that what was read as queries and keys is exactly that.

An attention module is copied, given random weights in float32 and run on random tokens. While it runs, the
input of every softmax (the attention scores) is recorded and its output is detached, so that gradients tell
two paths apart: through the scores, and past them. Four properties are checked:

1. every claimed row changes the scores, and changes nothing else (it is not a value, a gate or an output);
2. no other projection of the module acts only through the scores (it would be left training: a half-freeze);
3. a claimed query row acts on score (i, j) through token i, a key row through token j;
4. the rows of one claimed head change the scores of one head, and different heads change different ones.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from oelm.errors import OelmError
from oelm.methods.reading.calls import Call, example_inputs_of, guessed_calls, observed_calls
from oelm.methods.reading.projection import Projection
from oelm.methods.reading.wrappers import is_adapter

#: logsumexp as well: attention sinks rescale the output by it (Granite).
_SOFTMAX = {
    *(F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax),
    *(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp),
}
_WORD = {"q": "queries", "k": "keys"}


@dataclass(frozen=True)
class Verification:
    """What the numeric check of one attention module found.

    problem: What contradicts the reading. reason: Why the check could not run. Both "" if it is verified.
    """

    problem: str = ""
    reason: str = ""

    @property
    def verified(self) -> bool:
        return not self.problem and not self.reason


_verifications: dict[
    Any, Verification
] = {}  # by class, shapes and claims: each kind of attention is checked once


def check_reading(model: nn.Module, projections: Sequence[Projection], example_inputs: Any = None) -> None:
    """Raise unless the numeric check verifies every attention module; torch's own needs no check.

    example_inputs: A batch the model accepts (a dict, a tuple or a tensor), to see how its attention modules
        are called. Without one, calls are guessed from their signatures.
    """
    groups: dict[str, list[Projection]] = {}
    for p in projections:
        if type(p.attention).forward is not nn.MultiheadAttention.forward:
            groups.setdefault(p.attention_name, []).append(p)
    calls: dict[str, Call] | None = None
    for name, group in groups.items():
        key = _kind_of(group)
        if key not in _verifications:
            verification = (
                verify(model, group) if example_inputs is None else Verification(reason="not tried")
            )
            if not verification.verified:  # a guessed call may be wrong; one that the model makes is not
                calls = _observe(model, groups, example_inputs) if calls is None else calls
                verification = verify(model, group, [calls[name]]) if name in calls else verification
            if verification.reason:
                raise _not_checked(name, group, verification.reason)
            _verifications[key] = verification
        if _verifications[key].problem:
            raise _contradicted(name, group, _verifications[key].problem)


def _kind_of(group: Sequence[Projection]) -> Any:
    attention = group[0].attention
    claims = [
        (p.role, p.name[len(p.attention_name) :], p.num_heads, p.head_dim, p.weight.layout) for p in group
    ]
    shapes = [(name, p.shape) for name, p in attention.named_parameters()]
    return type(attention), tuple(claims), tuple(shapes)


def _observe(model: nn.Module, groups: dict[str, list[Projection]], inputs: Any) -> dict[str, Call]:
    """How the attention modules are called on the given inputs, or on ones made from the model's config.

    On those only if the model computes in float32 or on an accelerator: half precision on a CPU is slow and
    on some machines crashes the process.
    """
    attentions = {name: group[0].attention for name, group in groups.items()}
    if inputs is not None:
        return observed_calls(model, attentions, inputs)
    for p in model.parameters():
        if p.is_meta or (p.device.type == "cpu" and p.dtype not in (torch.float32, torch.float64)):
            return {}
    for candidate in example_inputs_of(model):
        try:
            return observed_calls(model, attentions, candidate)
        except Exception:  # inputs that this model does not take
            continue
    return {}


def _not_checked(name: str, group: Sequence[Projection], reason: str) -> OelmError:
    return OelmError(
        f"{_title(name, group)}: read as {_listed(group)}, but this could not be checked numerically "
        f"({reason}), so nothing was changed. Pass a small batch that the model accepts:\n"
        f"    oelm.apply(model, method, example_inputs=batch)  # a dict, a tuple or a tensor\n"
        f"or oelm.apply(model, method, verify=False) if you are certain; oelm.audit then says so"
    )


def _contradicted(name: str, group: Sequence[Projection], problem: str) -> OelmError:
    kind = type(group[0].attention)
    heads = next(p.num_heads for p in group if p.role == "q")
    return OelmError(
        f"{_title(name, group)}: read as {_listed(group)}, but {problem}. So nothing was changed. Expected: "
        f"query rows change only the queries, key rows only the keys, head by head. Say it:\n"
        f'    oelm.register_attention("{kind.__module__}.{kind.__qualname__}", q=..., k=..., '
        f"num_heads={heads})  # every matrix that makes queries or keys\n"
        f'or fused=..., layout="block", "per-head" or "grouped"; a class without Q and K: ignore=True'
    )


def _title(name: str, group: Sequence[Projection]) -> str:
    return f"{name or 'the model'} ({type(group[0].attention).__name__})"


def _listed(group: Sequence[Projection]) -> str:
    return ", ".join(
        f"{p.name[len(p.attention_name) :].lstrip('.')} ({_WORD[p.role]}, {p.num_heads} heads x {p.head_dim})"
        for p in group
    )


def verify(model: nn.Module, projections: Sequence[Projection], calls: Sequence[Call] = ()) -> Verification:
    """Check one attention module, given all its projections.

    calls: (args, kwargs) with which its forward was seen to be called; guessed from its signature if empty.
    """
    verification = _verify(model, projections, calls, eager=False)
    if not verification.verified and _implementation(projections[0].attention) not in (None, "eager"):
        # Some kernels hide the scores. transformers' plain implementation computes the same.
        plain = _verify(model, projections, calls, eager=True)
        verification = plain if plain.verified or verification.reason else verification
    return verification


def _implementation(attention: nn.Module) -> str | None:
    """Which attention kernel a module of transformers uses, such as "sdpa"; None for other modules."""
    return getattr(getattr(attention, "config", None), "_attn_implementation", None)


def _verify(
    model: nn.Module, projections: Sequence[Projection], calls: Sequence[Call], *, eager: bool
) -> Verification:
    try:
        trial = _Trial(model, projections)
        if eager:
            trial.module.config._attn_implementation = "eager"  # type: ignore[union-attr]
    except Exception as error:  # copying a module of someone else's can fail in any way
        return Verification(reason=f"it cannot be copied in float32 ({_short(error)})")
    error_seen = ""
    for args, kwargs in calls or trial.guesses():
        try:
            scores, output = trial.run(args, kwargs)
        except Exception as error:  # a guess that does not fit the signature
            error_seen = error_seen or _short(error)
            continue
        if scores:  # the first call that works decides: later guesses could prove nonsense
            try:
                return Verification(problem=trial.contradiction(args, kwargs, scores, output))
            except Exception as error:  # a module that cannot be called twice with the same arguments
                return Verification(reason=f"a second call with the same arguments failed, {_short(error)}")
    return Verification(reason=error_seen or "it computes no softmax over scores")


class _Recorder(TorchFunctionMode):
    """Records attention scores and cuts the gradient behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SOFTMAX:
            scores, *rest = args if args else (kwargs.pop("input"),)
            if scores.dim() >= 3:
                dim = rest[0] if rest else kwargs.get("dim", -1)
                self.scores.append(scores if dim is None else scores.movedim(dim, -1))
                return func(scores.detach(), *rest, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            return self._multi_head(**given.arguments), None
        return func(*args, **kwargs)

    def _multi_head(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """torch's function, (T, B, d) to (T, B, d), without padding masks and learned extra keys."""
        if any(given[name] is not None for name in ("bias_k", "bias_v")) or given["add_zero_attn"]:
            raise NotImplementedError("extra keys of multi_head_attention_forward")
        packed = given["in_proj_weight"], given["in_proj_bias"]
        weights, biases = ((None,) * 3 if t is None else t.chunk(3) for t in packed)
        if given["use_separate_proj_weight"]:
            weights = [given[f"{part}_proj_weight"] for part in "qkv"]
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (given["num_heads"], -1)).movedim(0, 2)  # (B, H, T, head_dim)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        mask = given["attn_mask"]
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (-1, given["num_heads"]))
        mask = ~mask if mask is not None and mask.dtype == torch.bool else mask
        output = self._attend(q, k, v, attn_mask=mask).movedim(2, 0).flatten(2)
        return F.linear(output, given["out_proj_weight"], given["out_proj_bias"])

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        self.scores.append(scores)
        return torch.softmax(scores.detach(), -1).nan_to_num() @ value


class _Trial:
    """A float32 copy of an attention module with random weights, and the claims about it."""

    def __init__(self, model: nn.Module, projections: Sequence[Projection]) -> None:
        self.generator = torch.Generator().manual_seed(0)
        attention = projections[0].attention
        self.module = copy.deepcopy(attention).eval()
        for module in self.module.modules():
            self._randomize(module)
        copies = {id(old): new for old, new in zip(attention.modules(), self.module.modules(), strict=True)}

        def moved(window: Any) -> Any:
            return window and dataclasses.replace(window, owner=copies[id(window.owner)])

        self.claims = [
            dataclasses.replace(p, weight=moved(p.weight), bias=moved(p.bias)) for p in projections
        ]
        self.config = getattr(attention, "config", None) or getattr(model, "config", None)

    def _randomize(self, module: nn.Module) -> None:
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = torch.randn(parameter.shape, generator=self.generator)
                fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 0
                centre = 0.0 if "bias" in name else 1.0  # scales of norms are around one
                module._parameters[name] = nn.Parameter(
                    fresh * fan_in**-0.5 if fan_in else centre + 0.3 * fresh
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                plain = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.cpu()
                module._buffers[name] = plain.float() if plain.is_floating_point() else plain

    def guesses(self) -> Iterator[Call]:
        first, last = self.claims[0], next(c for c in reversed(self.claims) if c.role == "k")
        width, key_width = first.heads().shape[-1], last.heads().shape[-1]
        key_widths = {key_width: None, width: None}
        for size in key_widths:
            yield from guessed_calls(self.module, self.config, width, size, first.head_dim, self.generator)

    def run(self, args: Any, kwargs: Any) -> tuple[list[Tensor], Tensor]:
        """The scores that depend on the module's parameters, and the output."""
        with torch.enable_grad(), _Recorder() as recorder:
            output = self.module(*args, **kwargs)
        return [s for s in recorder.scores if s.requires_grad], next(_tensors(output))

    def contradiction(self, args: Any, kwargs: Any, scores: list[Tensor], output: Tensor) -> str:
        """What is wrong with the claims; "" if all four properties hold."""
        names, parameters = zip(*self.module.named_parameters(), strict=True)
        through = _gradients(scores, parameters)
        past = _gradients([output], parameters)
        index_of = {id(p): index for index, p in enumerate(parameters)}
        claimed = [torch.zeros(p.shape, dtype=torch.bool) for p in parameters]
        unused: list[Projection] = []  # in this call
        for claim in self.claims:
            for window in (claim.weight, claim.bias):
                if window is None:
                    continue
                index = index_of[id(window.parameter)]
                window.cut(claimed[index]).fill_(True)
                if window.cut(past[index]).any():
                    return (
                        f"rows of {names[index]} that are read as {_WORD[claim.role]} act on the output "
                        f"without passing the attention scores: they hold values, or a gate"
                    )
                idle = ~window.cut(through[index]).flatten(2 if window is claim.weight else 1).any(-1)
                if window is claim.weight and idle.all() and _named_so(claim):
                    unused.append(claim)  # as without global tokens (Longformer) or entities (LUKE)
                    continue
                if window is claim.weight and idle.any():
                    return (
                        f"{int(idle.sum())} rows of {names[index]} that are read as {_WORD[claim.role]} do "
                        f"not act on the attention scores"
                    )
        for name, parameter, mask, score, value in zip(
            names, parameters, claimed, through, past, strict=True
        ):
            left = (score != 0) & (value == 0) & ~mask
            if left.any() and self._projects(name, parameter):
                if self._only_added(args, kwargs, parameter, score):
                    continue
                return f"{name} acts only through the attention scores, but is not read as Q or K"
        # Roles before heads: swapping rows in place ends the use of the recorded graph.
        used = [claim for claim in self.claims if claim not in unused]
        if idle_role := {c.role for c in unused} - {c.role for c in used}:
            return f"nothing that is read as {_WORD[min(idle_role)]} acts on the attention scores"
        roles = (self._wrong_role(claim, scores) for claim in used)
        heads = (self._wrong_heads(claim, args, kwargs, scores) for claim in used)
        return next(filter(None, itertools.chain(roles, heads)), "")

    def _projects(self, name: str, parameter: Tensor) -> bool:
        """Whether it is a matrix applied to tokens or positions, or their q bias; not a table or a norm."""
        owner, own = self.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if isinstance(owner, nn.Embedding | nn.MultiheadAttention) or self._is_in_adapter(name):
            return False  # torch's attention is read by itself
        if parameter.dim() < 2:
            rows = {c.num_heads * c.head_dim for c in self.claims}
            return own in ("q_bias", "k_bias") and parameter.numel() in rows
        if getattr(owner, "weight", None) is parameter:
            return True
        width = self.claims[0].heads().shape[-1]
        return width in parameter.shape and parameter.numel() >= width * self.claims[0].head_dim

    def _is_in_adapter(self, name: str) -> bool:
        """Whether PEFT added it: `check_adapters` decides about those."""
        steps = name.split(".")
        around = (self.module.get_submodule(".".join(steps[:n])) for n in range(len(steps)))
        return any(is_adapter(module) for module in around) and "base_layer" not in steps

    def _only_added(self, args: Any, kwargs: Any, parameter: Tensor, before: Tensor) -> bool:
        """Whether its effect on the scores is the same for other tokens, as that of a position bias is."""
        scores, _ = self.run(_halved(args), _halved(kwargs))
        (after,) = _gradients(scores, [parameter])
        return torch.allclose(before, after, rtol=1e-3, atol=1e-6)

    def _wrong_role(self, claim: Projection, scores: list[Tensor]) -> str:
        for s in scores:
            if s.shape[-1] < 2 or s.shape[-2] < 2:
                continue
            for matrix in {0: s.flatten(0, -3)[0], 1: s.flatten(0, -3)[-1]}.values():
                base, other_key, other_query = (
                    _rows_of_gradient(matrix[i, j], claim) for i, j in ((-1, 0), (-1, 1), (-2, 0))
                )
                as_query, as_key = _parallel(base, other_key), _parallel(base, other_query)
                own, other = (as_query, as_key) if claim.role == "q" else (as_key, as_query)
                wrong = (other > 0.999) & (own < 0.99)
                if wrong.any():
                    real = _WORD["k" if claim.role == "q" else "q"]
                    return (
                        f"{int(wrong.sum())} rows of {claim.name} are read as {_WORD[claim.role]}, but "
                        f"act as {real}"
                    )
        return ""

    @torch.no_grad()
    def _wrong_heads(self, claim: Projection, args: Any, kwargs: Any, scores: list[Tensor]) -> str:
        """Rows of a claimed head are swapped, which no normalisation over a head or over all of them undoes:
        its first quarter must change the same scores as all its rows do, and other heads other scores."""
        if claim.head_dim < 2:
            return ""
        taken: Tensor | None = None
        for head in sorted({0, 1 % claim.num_heads, claim.num_heads // 2, claim.num_heads - 1}):
            first = head * claim.head_dim
            rows = torch.arange(first, first + claim.head_dim)
            all_rows = self._scores_after_reversing(claim, rows, args, kwargs, scores)
            some = rows[: max(2, claim.head_dim // 4)]
            some_rows = self._scores_after_reversing(claim, some, args, kwargs, scores)
            if some_rows.sum() < 0.75 * all_rows.sum():
                return (
                    f"the rows of one head of {claim.name} act on several heads of the scores: its heads are "
                    f"not {claim.num_heads} of {claim.head_dim} rows, or its rows are in another order"
                )
            if taken is not None and (taken & all_rows).sum() > 0.1 * all_rows.sum():
                return (
                    f"two heads of {claim.name} act on the same scores: its heads are not "
                    f"{claim.num_heads} of {claim.head_dim} rows, or its rows are in another order"
                )
            taken = all_rows if taken is None else taken | all_rows
        return ""

    def _scores_after_reversing(
        self, claim: Projection, rows: Tensor, args: Any, kwargs: Any, before: list[Tensor]
    ) -> Tensor:
        """Which scores change if these rows (counted over all heads) trade places; they are put back."""
        kept = []
        for window in (claim.weight, claim.bias):
            if window is not None:
                view = window.view()
                group, row = rows // view.shape[1], rows % view.shape[1]
                values = view[group, row].clone()
                kept.append((view, group, row, values))
                view[group, row] = values.flip(0)
        with torch.enable_grad(), _Recorder() as recorder:
            self.module(*args, **kwargs)
        after = [s.detach() for s in recorder.scores if s.requires_grad]
        for view, group, row, values in kept:
            view[group, row] = values
        return torch.cat([_changed(old.detach(), new) for old, new in zip(before, after, strict=True)])


def _gradients(targets: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Of a random combination of the targets' elements, by each parameter; zeros where there is none."""
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


def _named_so(claim: Projection) -> bool:
    """Whether its name says query or key, so that it may go unused in one call."""
    words = {"q": {"q", "query"}, "k": {"k", "key"}}[claim.role]
    return bool(words & set(claim.name.rpartition(".")[2].split("_")))


def _rows_of_gradient(score: Tensor, claim: Projection) -> Tensor:
    (grad,) = torch.autograd.grad(score, [claim.weight.parameter], retain_graph=True, allow_unused=True)
    grad = torch.zeros_like(claim.weight.parameter) if grad is None else grad
    return claim.weight.cut(grad).flatten(2).flatten(0, 1)  # (rows, d_in)


def _parallel(a: Tensor, b: Tensor) -> Tensor:
    """|cosine| of each row of a with that of b; 1 where either is zero (no evidence)."""
    norms = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(norms > 1e-12, (a * b).sum(-1).abs() / norms.clamp_min(1e-12), 1.0)


def _changed(before: Tensor, after: Tensor) -> Tensor:
    usual = before[before.isfinite()].abs().median()  # the mean would count masks of -1e4
    return (((after - before).abs() > 1e-5 * usual) & before.isfinite()).flatten()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _tensors(item)


def _halved(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value * 0.5
    if isinstance(value, dict):
        return {k: _halved(v) for k, v in value.items()}
    return type(value)(_halved(v) for v in value) if isinstance(value, list | tuple) else value


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
