"""Verify numerically that the projections found in a model are exactly its query and key projections.

The docstring of `trial.py` describes the tests. Each kind of attention module (same class, shapes and
projections) is verified once per process. The arguments of its `forward()` are guessed from the signature, or
observed while the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oelm.errors import OelmError
from oelm.methods.reading.calls import Call, guess_inputs, observe_calls
from oelm.methods.reading.projection import Projection
from oelm.methods.reading.trial import ROLE_NAMES, Trial


@dataclass(frozen=True)
class Verification:
    """The result of verifying that the projections of one attention module are Q and K.

    problem: Why the projections are not Q and K. not_run: Why the attention module could not be tested. Both
    are "" if the projections are verified.
    """

    problem: str = ""
    not_run: str = ""

    @property
    def verified(self) -> bool:
        return not self.problem and not self.not_run


_results: dict[Any, Verification] = {}  # kind of attention module, see `_kind_of()` -> result


def verify_projections(
    model: nn.Module, projections: Sequence[Projection], example_inputs: Any = None
) -> None:
    """Raise OelmError unless the projections of every attention module are verified as Q and K.

    torch's own MultiheadAttention needs no verification.

    example_inputs: A batch that the model accepts (a dict, a tuple or a tensor). oelm runs the model on it to
        see how it calls its attention modules. Without it, calls are guessed from their signatures.
    """
    by_attention: dict[str, list[Projection]] = {}
    for p in projections:
        if type(p.attention).forward is not nn.MultiheadAttention.forward:
            by_attention.setdefault(p.attention_name, []).append(p)
    calls: dict[str, Call] | None = None
    for name, group in by_attention.items():
        key = _kind_of(group)
        if key not in _results:
            result = Verification(not_run="not tried")
            if example_inputs is None:
                result = verify_attention(model, group)
            if not result.verified:  # guessed arguments may be wrong, unlike those that the model passes
                if calls is None:
                    calls = _observe_calls(model, by_attention, example_inputs)
                result = verify_attention(model, group, [calls[name]]) if name in calls else result
            if result.not_run:
                raise _not_run_error(name, group, result.not_run)
            _results[key] = result
        if _results[key].problem:
            raise _problem_error(name, group, _results[key].problem)


def verify_attention(
    model: nn.Module, projections: Sequence[Projection], calls: Sequence[Call] = ()
) -> Verification:
    """Verify that the projections of one attention module are exactly its Q and K, and return the result.

    calls: The (args, kwargs) with which the model calls the module. If empty, they are guessed.
    """
    result = _try_calls(model, projections, calls, eager=False)
    if not result.verified and _attention_kernel(projections[0].attention) not in (None, "eager"):
        # Some attention kernels hide the scores. The "eager" kernel of transformers computes the same, and
        # its scores can be recorded.
        eager = _try_calls(model, projections, calls, eager=True)
        result = eager if eager.verified or result.not_run else result
    return result


def _try_calls(
    model: nn.Module, projections: Sequence[Projection], calls: Sequence[Call], *, eager: bool
) -> Verification:
    """Return the result for the first of `calls` (or guessed calls) that runs without an error.

    Later guesses are less usual, so they might run only by chance.
    """
    try:
        trial = Trial(model, projections)
        if eager:
            trial.module.config._attn_implementation = "eager"  # type: ignore[union-attr]
    except Exception as error:  # deepcopy of a user's module can raise anything
        return Verification(not_run=f"a float32 copy of it cannot be made, {_short(error)}")
    first_error = ""
    for args, kwargs in calls or trial.guess_calls():
        try:
            scores, output = trial.run(args, kwargs)
        except Exception as error:  # the module does not accept the guessed arguments
            first_error = first_error or _short(error)
            continue
        if scores:
            try:
                return Verification(problem=trial.contradiction(args, kwargs, scores, output))
            except Exception as error:  # the tests call the module again, which can fail
                return Verification(not_run=f"a second call with the same arguments failed, {_short(error)}")
    return Verification(not_run=first_error or "it computes no softmax over scores")


def _attention_kernel(attention: nn.Module) -> str | None:
    """Return the attention kernel of a transformers module, such as "sdpa"; None for other modules."""
    return getattr(getattr(attention, "config", None), "_attn_implementation", None)


def _kind_of(group: Sequence[Projection]) -> Any:
    attention = group[0].attention
    claims = [
        (p.role, p.name[len(p.attention_name) :], p.num_heads, p.head_dim, p.weight.layout) for p in group
    ]
    shapes = [(name, p.shape) for name, p in attention.named_parameters()]
    return type(attention), tuple(claims), tuple(shapes)


def _observe_calls(model: nn.Module, groups: dict[str, list[Projection]], inputs: Any) -> dict[str, Call]:
    """Run the model on `inputs`, or on guessed inputs if None; return how it calls its attention modules.

    Guessed inputs are used only if the model computes in float32 or on an accelerator, because low precision
    on a CPU is slow and crashes the process on some machines. Otherwise, return {}.
    """
    attentions = {name: group[0].attention for name, group in groups.items()}
    if inputs is not None:
        return observe_calls(model, attentions, inputs)
    for p in model.parameters():
        if p.is_meta or (p.device.type == "cpu" and p.dtype not in (torch.float32, torch.float64)):
            return {}
    for guessed in guess_inputs(model):
        try:
            return observe_calls(model, attentions, guessed)
        except Exception:  # the model does not accept these inputs
            continue
    return {}


def _not_run_error(name: str, group: Sequence[Projection], reason: str) -> OelmError:
    return OelmError(
        f"{_title(name, group)}: oelm could not verify numerically that the projections are {_listed(group)} "
        f"({reason}), so nothing was changed. Pass a small batch that the model accepts:\n"
        f"    oelm.apply(model, method, example_inputs=batch)  # a dict, a tuple or a tensor\n"
        f"or, if you are certain, oelm.apply(model, method, verify=False); oelm.audit then reports that the "
        f"projections are not verified"
    )


def _problem_error(name: str, group: Sequence[Projection], problem: str) -> OelmError:
    kind = type(group[0].attention)
    heads = next(p.num_heads for p in group if p.role == "q")
    return OelmError(
        f"{_title(name, group)}: oelm read the projections as {_listed(group)}, but {problem}. So nothing "
        f"was changed. Tell oelm where the queries and keys are:\n"
        f'    oelm.register_attention("{kind.__module__}.{kind.__qualname__}", q=..., k=..., '
        f"num_heads={heads})  # all matrices that compute queries or keys\n"
        f'or, for a fused matrix, fused=..., layout=... ("block", "per-head" or "grouped"); for a class '
        f"without Q and K, ignore=True"
    )


def _title(name: str, group: Sequence[Projection]) -> str:
    return f"{name or 'the model'} ({type(group[0].attention).__name__})"


def _listed(group: Sequence[Projection]) -> str:
    return ", ".join(
        f"{p.name[len(p.attention_name) :].lstrip('.')} "
        f"({ROLE_NAMES[p.role]}, {p.num_heads} heads x {p.head_dim})"
        for p in group
    )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
