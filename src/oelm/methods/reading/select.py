"""Select modules by name patterns: the arguments `where` and `exclude` of `oelm.apply`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from oelm.errors import UsageError

#: One pattern, several patterns, or None for no restriction.
Patterns = str | Sequence[str] | None


@dataclass(frozen=True)
class Selection:
    """The modules that match a pattern of `where` and no pattern of `exclude`; an empty `where` matches all.

    A pattern is a shell pattern over the names in `model.named_modules()`, in which `*` also matches dots.
    A pattern that matches a module also matches everything inside this module.

    >>> text = Selection.of("text_model.*", exclude="*.layers.0")
    >>> text.includes("text_model.layers.1.q_proj"), text.includes("text_model.layers.0.q_proj")
    (True, False)
    """

    where: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, where: Patterns = None, exclude: Patterns = None) -> Selection:
        return cls(_as_patterns("where", where), _as_patterns("exclude", exclude))

    @property
    def is_everything(self) -> bool:
        return not self.where and not self.exclude

    def includes(self, name: str) -> bool:
        """Return whether the module `name` is selected, by its own name or that of a module containing it."""
        if self.is_everything:
            return True
        names = _with_modules_around(name)
        selected = not self.where or any(_matches(names, pattern) for pattern in self.where)
        return selected and not any(_matches(names, pattern) for pattern in self.exclude)

    def reaches(self, name: str, module: nn.Module) -> bool:
        """Return whether the module `name`, or any module inside it, is selected."""
        inside = (inner for inner, _ in module.named_modules())
        return any(self.includes(".".join(part for part in (name, inner) if part)) for inner in inside)

    def check_patterns(self, model: nn.Module, projections: Iterable[str]) -> None:
        """Raise UsageError if a pattern matches no module and no projection; the error suggests names."""
        names = [*(name for name, _ in model.named_modules(remove_duplicate=False)), *projections]
        for argument, patterns in (("where", self.where), ("exclude", self.exclude)):
            for pattern in patterns:
                if not _matches(names, pattern):
                    near = difflib.get_close_matches(pattern.rstrip(".*"), set(names), n=3, cutoff=0.4)
                    hint = (
                        f"did you mean {', '.join(sorted(near))}?"
                        if near
                        else f"the model has {_top(model)}."
                    )
                    raise UsageError(
                        f"{argument}: '{pattern}' matches no module of {type(model).__name__}; {hint} "
                        f"Patterns match the names in model.named_modules(); * also matches dots"
                    )


ALL = Selection()


def _as_patterns(argument: str, given: Patterns) -> tuple[str, ...]:
    if given is None:
        return ()
    patterns = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(f"{argument} must be a name pattern or a list of name patterns, got {given!r}")
    return patterns


def _with_modules_around(name: str) -> list[str]:
    steps = name.split(".")
    return [".".join(steps[:depth]) for depth in range(1, len(steps) + 1)]


def _matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _top(model: nn.Module) -> str:
    return ", ".join(name for name, _ in model.named_children()) or "no submodules"
