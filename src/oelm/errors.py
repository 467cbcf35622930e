"""Errors that a user can cause and fix.

The command line prints their message without a traceback and exits with `exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OelmError(Exception):
    """An error that the user can fix. The message says what is wrong, where, and what to do.

    `remedy` says what to do. It is part of the message, and also an attribute.

    >>> error = OelmError("no network.", remedy="Set HF_HUB_OFFLINE=1.")
    >>> print(error)
    no network.
    What to do: Set HF_HUB_OFFLINE=1.
    """

    exit_code = 1

    def __init__(self, problem: str = "", *, remedy: str = "") -> None:
        super().__init__(f"{problem}\nWhat to do: {remedy}" if remedy else problem)
        self.problem, self.remedy = problem, remedy


class TransientError(OelmError):
    """An error that may not occur again (network, other processes). Launchers retry the run."""


class UsageError(OelmError):
    """An unknown name or an invalid flag or value. The command line exits with code 2.

    `field` is the dotted name of the wrong field, such as "optim.lr"; "" if the error is not about a field.
    The code that reads a YAML file uses it to add the line number to the message.
    """

    exit_code = 2

    def __init__(self, problem: str = "", *, remedy: str = "", field: str = "") -> None:
        super().__init__(problem, remedy=remedy)
        self.field = field


#: {import name of an optional library: the extra of oelm that installs it}
EXTRA_OF: dict[str, str] = {
    **dict.fromkeys(("accelerate", "huggingface_hub", "transformers"), "hf"),
    **dict.fromkeys(("jinja2", "matplotlib", "rich", "scipy", "yaml"), "report"),
    **dict.fromkeys(("cyclopts", "datasets", "psutil", "pyarrow", "submitit", "tokenizers"), "study"),
    **dict.fromkeys(("starlette", "uvicorn"), "board"),
    "peft": "peft",
}


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of oelm; oelm is not on a package index.

    >>> install_extra("board")
    "pip install '.[board]' in the clone of oelm"
    """
    return f"pip install '.[{extra}]' in the clone of oelm"


def missing_library(error: ModuleNotFoundError, needed_by: str) -> OelmError | None:
    """Return an error that says how to install the missing library; None if no extra of oelm installs it.

    `needed_by` is the feature that needs the library; the message starts with it.

    >>> print(missing_library(ModuleNotFoundError(name="datasets"), "`oelm data`"))
    `oelm data` needs datasets, which is not installed.
    What to do: pip install '.[study]' in the clone of oelm
    """
    library = (error.name or "").partition(".")[0]
    if library not in EXTRA_OF:
        return None
    return OelmError(
        f"{needed_by} needs {library}, which is not installed.",
        remedy=install_extra(EXTRA_OF[library]),
    )


def unknown_name(kind: str, name: str, valid: Iterable[str], see: str = "", field: str = "") -> UsageError:
    """Return the error for a name that is not in `valid`; the message suggests the nearest valid name.

    `kind` says what is named, such as "method". `see` is a command that lists all valid names; pass it where
    there are too many names to print. `field` is the dotted name of the field that has the unknown name as
    its value.

    >>> str(unknown_name("method", "oelm-freze", ["baseline", "oelm-freeze"]))
    "unknown method 'oelm-freze'; did you mean 'oelm-freeze'? Valid: baseline, oelm-freeze"
    """
    names = list(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not near:  # the name may differ only in case and separators
        folded = {_fold(n): n for n in names}
        near = [folded[_fold(name)]] if _fold(name) in folded else []
    hint = f"; did you mean '{near[0]}'?" if near else "" if see else "."
    listed = f"(see {see})" if see else f"Valid: {', '.join(names)}"
    return UsageError(f"unknown {kind} '{name}'{hint} {listed}", field=field)


def require_distinct(values: Iterable[object], *, field: str = "") -> None:
    """Raise UsageError if a value is in a list twice, which is probably a typing mistake for another value.

    >>> require_distinct([0, 0, 1])
    Traceback (most recent call last):
    ...
    oelm.errors.UsageError: 0 is listed twice; list each value once
    """
    listed: set[object] = set()
    for value in values:
        if value in listed:
            raise UsageError(f"{value} is listed twice; list each value once", field=field)
        listed.add(value)


def first_line(error: Exception) -> str:
    """Return "type: first line" of an exception from another library, to quote it in a message of oelm.

    >>> first_line(ValueError("no such file.\\nLong explanation"))
    'ValueError: no such file'
    """
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}".rstrip(". ")


def _fold(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")
