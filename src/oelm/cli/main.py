"""`oelm`: find the command, load only its module, run it, turn errors into words and exit codes."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import oelm
from oelm.cli.suggest import suggest
from oelm.errors import OelmError, unknown_name
from oelm.printable import printable

# command -> (module in this package, one line). The order is that of a study's life.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "the whole story in minutes on a CPU: arms, controls, verdict, report"),
    "list": ("catalogue", "the experiments of the catalogue"),
    "show": ("catalogue", "all that one experiment will do: settings, size, disk, time"),
    "diff": ("catalogue", "what differs between two experiments"),
    "methods": ("catalogue", "the named methods, what each is for and controls for"),
    "doctor": ("doctor", "preflight: machine, precision, disk, data, one step and one evaluation"),
    "data": ("data", "list datasets, prepare one, check one"),
    "train": ("train", "one run in this process; the same command goes on where it stopped"),
    "run": ("run", "many runs, on this machine or through SLURM"),
    "status": ("status", "the state of all runs, once"),
    "monitor": ("monitor", "the state of all runs, live"),
    "analyze": ("analyze", "tables, gaps with intervals, verdicts"),
    "report": ("report", "a self-contained HTML (or Markdown) report"),
    "bench": ("bench", "step time, memory and saving of each method on this machine"),
    "generate": ("model", "sample text from a trained language model"),
    "export": ("model", "a trained model as a folder that transformers loads"),
    "archive": (
        "archive",
        "pack results into one verified file, merge one, or keep them in a folder",
    ),
    "clean": ("clean", "free the disk of finished runs' checkpoints"),
}

_EPILOG = """start here:
  oelm demo                                    the whole story on this machine
  oelm list                                    what can be run
  oelm train GPT-02 --scale mini               one experiment on a laptop
  oelm run --phase 2 --seeds 0 1 2 --scale mini"""


class Parser(argparse.ArgumentParser):
    """argparse whose errors name the nearest valid word, and whose help keeps the examples' lines."""

    def __init__(self, **options: object) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options["allow_abbrev"] = False  # an abbreviation that works today may mean another flag tomorrow
        super().__init__(**options)  # type: ignore[arg-type]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = action.metavar if isinstance(action.metavar, str) else action.dest
            raise unknown_name(kind.lower(), str(value), map(str, action.choices))

    def error(self, message: str) -> NoReturn:
        raise SystemExit(_fail(f"{message} (`{self.prog} --help` shows the usage)", 2))


def build_parser(command: str | None = None) -> Parser:
    """The parser of one command; without one, only what `oelm --help` shows."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items())
    parser = Parser(
        prog="oelm",
        description="Freeze a transformer's query/key projections, train the rest, learn what that costs.",
        epilog=f"commands:\n{lines}\n\n{_EPILOG}\n\n`oelm COMMAND --help` shows each with an example.",
    )
    parser.add_argument("--version", action="version", version=f"oelm {oelm.__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", parser_class=Parser, help="see below"
    )
    if command is not None:
        _module(command).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except OelmError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # `oelm list | head`: the reader has gone, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:  # not about a file that someone named
            raise
        return _fail(f"{printable(error.filename)}: {error.strerror}", 1)


def _dispatch(words: list[str]) -> int:
    command = next((w for w in words if not w.startswith("-")), None)
    if command is None:
        parser = build_parser()
        if not words:
            parser.print_help()
            return 0
        _refuse_unknown(parser, parser.parse_known_args(words)[1])
        return 0
    if command not in COMMANDS:
        raise unknown_name("command", command, COMMANDS)
    parser = build_parser(command)
    args, extra = parser.parse_known_args(words)
    _refuse_unknown(parser, extra)
    return int(_module(command).run(args))


def _module(command: str) -> Any:
    name = f"oelm.cli.{COMMANDS[command][0]}"
    if importlib.util.find_spec(name) is None:
        raise OelmError(f"`oelm {command}` is not part of this installation (no module {name})")
    return importlib.import_module(name)


def _refuse_unknown(parser: Parser, extra: Sequence[str]) -> None:
    if extra:
        flags = [word for word in extra if word.startswith("-")]
        word = flags[0] if flags else extra[0]
        hint = suggest(word, _options(parser)) if flags else ""
        raise SystemExit(_fail(f"unknown argument '{word}'{f'; {hint}' if hint else ''}", 2))


def _options(parser: argparse.ArgumentParser) -> set[str]:
    names = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                names |= _options(inner)
    return names


def _fail(message: str, code: int) -> int:
    print(f"oelm: {printable(message, lines=True)}", file=sys.stderr)
    return code


def entry() -> NoReturn:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # a rank under torchrun
        from oelm.experiments.launch.ranks import exit_rank

        exit_rank(main)
    sys.exit(main())


if __name__ == "__main__":
    entry()
