"""Explain in one line what is wrong with a command line, and suggest the most similar valid name."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)

from oelm.cli.suggest import suggest
from oelm.errors import unknown_name


def explain(error: CycloptsError) -> str:
    """Return one line that says what is wrong with the command line, and what the user may have meant."""
    error.verbose = False
    command = " ".join(("oelm", *(error.command_chain or ())))
    if isinstance(error, UnknownOptionError):
        word = error.token.keyword or error.token.value
        names = {name for argument in error.argument_collection for name in argument.names}
        return _unknown_option(word, names | {"--help"}, command)
    if isinstance(error, UnknownCommandError):
        assert error.app is not None
        assert error.unused_tokens
        return _unknown_option(error.unused_tokens[0], {n for n in error.app if n.startswith("-")}, command)
    if isinstance(error, UnusedCliTokensError):
        assert error.unused_tokens
        return f"unexpected argument '{error.unused_tokens[0]}' (`{command} --help` shows the usage)"
    if isinstance(error, MissingArgumentError):
        assert error.argument is not None
        name = error.keyword or error.argument.name
        needs = f"{name} needs a value" if error.keyword else f"{name} is required"
        return f"{needs} (`{command} --help` shows the usage)"
    if isinstance(error, CoercionError) and error.token and error.argument and error.msg is None:
        return _wrong_value(error.token.value, error.token.keyword or error.argument.name, error.target_type)
    if isinstance(error, ValidationError) and error.argument:
        limit = _lower(error.exception_message.rstrip("."))
        return f"{error.argument.name} {limit}, not {error.argument.tokens[0].value}"
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} is given more than once"
    return _lower(str(error))


def _unknown_option(word: str, options: set[str], command: str) -> str:
    hint = suggest(word, options, command)
    return f"unknown option '{word}'; {hint}" if hint else f"unknown option '{word}' of `{command}`"


def _wrong_value(value: str, flag: str, wanted: object) -> str:
    if get_origin(wanted) is Literal:
        return str(unknown_name(flag, value, get_args(wanted)))
    kinds = {float: "a number", bool: "true or false"}
    kind = kinds.get(wanted, getattr(wanted, "__name__", str(wanted)))  # type: ignore[call-overload]
    return f"{flag} takes {kind}, not '{value}'"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
