"""The entry point of `oelm`: run a command, and report an error as one line and an exit code.

Only the module of the command that runs is imported, so that `oelm --help` is fast.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.help import DefaultFormatter

import oelm
from oelm.cli.options import shown_default
from oelm.cli.output import discard_output
from oelm.errors import OelmError, UsageError, missing_library, unknown_name
from oelm.files.atomic import is_disk_full
from oelm.printable import printable


class Action(NamedTuple):
    """One action of a command, such as `list` of `oelm data`."""

    name: str
    function: str
    help: str


@dataclass(frozen=True)
class Command:
    """One command: its function as `module:name`, its line in `oelm --help`, and examples.

    The function is imported when the command is called. A command with actions, such as `oelm data` with the
    action `list`, has no function itself; its actions have functions.
    """

    function: str
    group: str
    help: str
    examples: tuple[str, ...]
    actions: tuple[Action, ...] = ()


_START, _CATALOGUE, _RUNS = "Get started", "Catalogue and data", "Runs"
_RESULTS, _FILES = "Results", "Benchmarks and disk"
_GROUPS = (_START, _CATALOGUE, _RUNS, _RESULTS, _FILES)

COMMANDS: dict[str, Command] = {
    "demo": Command(
        "oelm.cli.demo:demo", _START,
        "Compare frozen and trained query/key projections in minutes on a CPU, and write a report.",
        ("oelm demo", "oelm demo --lang zh"),
    ),
    "init": Command(
        "oelm.cli.init:init", _START,
        "Write a study file (YAML) with comments, to describe experiments of your own.",
        ("oelm init my.yaml",),
    ),
    "doctor": Command(
        "oelm.cli.doctor:doctor", _START,
        "Check software, devices, precision and disk, and for each named experiment its data, one training "
        "step and one evaluation.",
        (
            "oelm doctor GPT-01 GPT-02 --scale mini",
            "oelm doctor --all --seeds 0 1 2",
            "oelm doctor GPT-02 --scale mini --resume --runs /scratch/runs",
        ),
    ),
    "list": Command(
        "oelm.cli.catalogue:list_experiments", _CATALOGUE,
        "List the experiments of the catalogue.",
        ("oelm list", "oelm list --study gap"),
    ),
    "show": Command(
        "oelm.cli.catalogue:show", _CATALOGUE,
        "Show one experiment: settings, parameter counts, disk and time.",
        ("oelm show GPT-02 --scale mini --set optim.lr=1e-3", "oelm show my.yaml"),
    ),
    "diff": Command(
        "oelm.cli.catalogue:diff", _CATALOGUE,
        "Show the settings that differ between two experiments.",
        ("oelm diff GPT-01 GPT-02",),
    ),
    "methods": Command(
        "oelm.cli.catalogue:list_methods", _CATALOGUE,
        "List the named methods, with the purpose and the control of each.",
        ("oelm methods", "oelm methods --json"),
    ),
    "data": Command(
        "", _CATALOGUE,
        "List the datasets, prepare them for training, or check one.",
        ("oelm data prepare tinystories --data-dir data --tokenizer gpt2",),
        (
            Action("list", "oelm.cli.data:list_datasets", "List all datasets: task, sizes and licence."),
            Action("prepare", "oelm.cli.data:prepare", "Download, check and tokenize datasets."),
            Action("check", "oelm.cli.data:check", "Read all rows and report what is wrong with them."),
        ),
    ),
    "train": Command(
        "oelm.cli.train:train", _RUNS,
        "Train one run in this process. The same command resumes a run that was interrupted.",
        (
            "oelm train GPT-02 --scale mini --seed 0 --set budget.steps=600 optim.lr=1e-3",
            "oelm train my.yaml frozen",
        ),
    ),
    "run": Command(
        "oelm.cli.run:run", _RUNS,
        "Train many runs, on this machine or through SLURM. The same command resumes unfinished runs.",
        (
            "oelm run --phase 2 --seeds 0 1 2 --scale mini",
            "oelm run my.yaml",
            "oelm run --all --gpus 0,1 --pilot",
            "oelm run --study gap --on slurm --partition gpu --time 8h --dry-run",
        ),
    ),
    "decide": Command(
        "oelm.cli.decide:decide", _RUNS,
        "Train seeds until the questions of a study are answered; the error rates stay valid.",
        (
            "oelm decide GAP-TS-oelm-bias-rope --scale mini --budget 6h --data-dir DIR",
            "oelm decide --study gap --scale mini --max-seeds 12 --dry-run",
        ),
    ),
    "status": Command(
        "oelm.cli.status:status", _RUNS,
        "Print the state of all runs.",
        ("oelm status --state running stalled",),
    ),
    "monitor": Command(
        "oelm.cli.monitor:monitor", _RUNS,
        "Watch the state of all runs in the terminal.",
        ("oelm monitor --study gap",),
    ),
    "board": Command(
        "oelm.cli.board:board", _RUNS,
        "Watch runs, curves and verdicts live in the browser.",
        ("oelm board --runs runs", "oelm board --port 0 --lang zh"),
    ),
    "analyze": Command(
        "oelm.cli.analyze:analyze", _RESULTS,
        "Print tables, differences with confidence intervals, and verdicts.",
        ("oelm analyze gap --all",),
    ),
    "report": Command(
        "oelm.cli.report:report", _RESULTS,
        "Write a self-contained HTML report, or Markdown.",
        ("oelm report -o report.html --lang zh",),
    ),
    "generate": Command(
        "oelm.cli.model:generate_text", _RESULTS,
        "Sample text from a trained language model.",
        ('oelm generate GPT-02 --scale mini --prompt "Once upon a time" --tokens 100 --top-p 0.9',),
    ),
    "export": Command(
        "oelm.cli.model:export", _RESULTS,
        "Write a trained model as a folder that transformers loads.",
        ("oelm export GPT-02 --scale mini -o exported/gpt-02",),
    ),
    "probe": Command(
        "oelm.cli.probe:probe", _RESULTS,
        "Analyse the queries and keys of trained language models: constant part, distances, rank.",
        ("oelm probe GAP-TS-baseline-rope GAP-TS-oelm-bias-rope --scale mini --seed 0 --figure why.svg",),
    ),
    "bench": Command(
        "oelm.cli.bench:bench", _FILES,
        "Measure step time, memory and FLOPs of each method on this machine.",
        ("oelm bench --methods baseline oelm-freeze --size medium-512 --batch 4",),
    ),
    "archive": Command(
        "", _FILES,
        "Pack results into one checked file, merge such a file, or write one small file per study.",
        (
            "oelm archive pack results.tar.gz --study paper",
            "oelm archive merge results.tar.gz --runs runs",
            "oelm archive keep results --study gap",
            "oelm archive merge results/gap.jsonl.xz --runs runs",
        ),
        (
            Action("pack", "oelm.cli.archive:pack", "Pack configs, metrics, logs and results into one file."),
            Action("verify", "oelm.cli.archive:verify", "Check every byte of an archive."),
            Action("merge", "oelm.cli.archive:merge", "Add the runs of such a file to the runs folder."),
            Action("keep", "oelm.cli.archive:keep", "Write one file per study for reports, without weights."),
        ),
    ),
    "clean": Command(
        "oelm.cli.clean:clean", _FILES,
        "Delete checkpoints that ended runs still have. Best models of runs and results are not deleted.",
        ("oelm clean --study paper",),
    ),
}  # fmt: skip

_EPILOGUE = """Start here:
  oelm demo                                       a small study, in minutes
  oelm list                                       all experiments
  oelm train GPT-02 --scale mini                  one run on a laptop
  oelm run --phase 2 --seeds 0 1 2 --scale mini   many runs

`oelm COMMAND --help` shows the options of a command and an example."""


class _JoinedLines(DefaultFormatter):
    """Prints the panels of --help. The lines of a help text are joined, so that it wraps at any width."""

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        from rich.text import Text  # here, because only --help needs it

        for entry in panel.entries:
            if isinstance(text := getattr(entry.description, "primary_renderable", None), Text):
                entry.description.primary_renderable = Text(" ".join(text.plain.split()))
        super().__call__(console, options, panel)


def make_app() -> App:
    """Return the cyclopts application of `oelm`, without importing the modules of its commands."""
    options = Group("Options", sort_key=9)
    app = App(
        name="oelm",
        help="Freeze the query/key projections of a transformer, train the rest, and measure the cost.",
        help_epilogue=_EPILOGUE,
        help_format="plaintext",
        help_formatter=_JoinedLines(),
        version=f"oelm {oelm.__version__}",
        default_parameter=Parameter(negative=(), show_default=shown_default),
        group_parameters=Group("Options", sort_key=0),
        exit_on_error=False,
        print_error=False,
        help_on_error=False,
        verbose=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    groups = {name: Group(name, sort_key=place) for place, name in enumerate(_GROUPS)}
    for place, (name, command) in enumerate(COMMANDS.items()):
        epilogue = "\n".join(("Example:", *(f"  {example}" for example in command.examples)))
        place_in_help: dict[str, Any] = {"group": groups[command.group], "sort_key": place}
        if not command.actions:
            app.command(
                command.function, name=name, help=command.help, help_epilogue=epilogue, **place_in_help
            )
            continue
        actions = App(name=name, help=command.help, help_epilogue=epilogue, **place_in_help)
        for action in command.actions:
            actions.command(action.function, name=action.name, help=action.help, help_epilogue=epilogue)
        app.command(actions)
    app.register_install_completion_command(
        help="Install completion for bash, zsh or fish. Adds a line to the startup file of the shell."
    )
    for flag in ("--help", "--version", "--install-completion"):
        app[flag].group = options
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: sys.argv) and return the exit code.

    Errors that the user can fix are printed as one line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(make_app(), words or ["--help"])
    except CycloptsError as error:
        from oelm.cli.mistakes import explain

        return _fail(explain(error), 2)
    except OelmError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if (explained := missing_library(error, f"`oelm {' '.join(words[:1])}`")) is None:
            raise
        return _fail(str(explained), explained.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # `oelm list | head`: the reader closed the pipe, which is not an error
        discard_output()
        return 0
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # the same in `oelm --help | head`, raised by rich
            return 0
        raise
    except OSError as error:
        if error.filename is None and is_disk_full(error):
            discard_output()
            return _fail(f"cannot write the output: {error.strerror}", 1)
        if error.filename is None:  # the error is not about a file, so it is a bug: show the traceback
            raise
        return _fail(f"{printable(error.filename)}: {error.strerror}", 1)


def _run(app: App, words: list[str]) -> int:
    _check_command(words)
    return app(repeat_set(words)) or 0


def repeat_set(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `--set a=1 b=2` written as `--set a=1 --set b=2`.

    cyclopts' own option for several values would also take the ID in `oelm train --set a=1 GPT-02`.

    >>> repeat_set(["train", "--set", "optim.lr=1", "compile=true", "GPT-02"])
    ['train', '--set', 'optim.lr=1', '--set', 'compile=true', 'GPT-02']
    """
    found: list[str] = []
    in_set = False  # whether the word before is a value of --set
    for word in words:
        if in_set and re.match(r"[a-z_.]+=", word):
            found.append("--set")
        in_set = found[-1:] == ["--set"] or word.startswith("--set=")
        found.append(word)
    return found


def _check_command(words: list[str]) -> None:
    """Raise UsageError for an unknown command or action, because cyclopts would accept `Run` for `run`."""
    name, *rest = words
    if name.startswith("-"):
        return
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    actions = [action.name for action in COMMANDS[name].actions]
    if actions and not rest:
        raise UsageError(f"an action is required after `oelm {name}`: one of {', '.join(actions)}")
    if actions and not rest[0].startswith("-") and rest[0] not in actions:
        raise unknown_name("action", rest[0], actions)


def _fail(message: str, code: int) -> int:
    print(f"oelm: {printable(message, lines=True)}", file=sys.stderr)
    return code


def entry() -> NoReturn:
    """Run `oelm` with the arguments of this process, and exit."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # this process is one of several that torchrun started
        from oelm.experiments.launch.ranks import exit_rank

        exit_rank(main)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal cannot show is no error
        sys.stdout.reconfigure(errors="replace")
    sys.exit(main())


if __name__ == "__main__":
    entry()
