"""Run fault-injection cases, each `oelm` command in a forked process, and count how they end."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_SECONDS = 120.0  # limit for one command, which takes about a second on an idle machine
MEMORY_BYTES = 16 * 2**30  # limit of address space, so that a decompression bomb cannot fill the memory


class Wrong(Exception):
    """oelm did not survive a fault; the message says what it did wrong."""


@dataclass(frozen=True)
class Case:
    """One fault to inject. Its `name` determines the fault completely, so that it can be repeated."""

    kind: str
    name: str
    run: Callable[[Path], str]  # injects the fault in an empty folder; returns how oelm survived, or raises

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass
class Tally:
    """How many cases of each kind were tried, survived and wrong."""

    tried: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    how: dict[str, Counter[str]] = field(default_factory=dict)  # kind -> how oelm survived -> cases
    wrong: list[dict[str, str]] = field(default_factory=list)

    def add(self, case: Case, how: str) -> None:
        self.tried[case.kind] += 1
        self.survived[case.kind] += 1
        self.how.setdefault(case.kind, Counter())[how] += 1

    def add_wrong(self, case: Case, why: str) -> None:
        self.tried[case.kind] += 1
        self.wrong.append({"kind": case.kind, "case": case.id, "why": why})

    def wrong_of(self, kind: str) -> list[dict[str, str]]:
        return [entry for entry in self.wrong if entry["kind"] == kind]

    def table(self) -> str:
        lines = [f"{'kind':10}{'tried':>8}{'survived':>10}{'wrong':>8}   how they survived"]
        for kind in self.tried:
            how = ", ".join(f"{count} {text}" for text, count in self.how.get(kind, Counter()).most_common())
            wrong = len(self.wrong_of(kind))
            lines.append(f"{kind:10}{self.tried[kind]:8}{self.survived[kind]:10}{wrong:8}   {how}")
        total = (sum(self.tried.values()), sum(self.survived.values()), len(self.wrong))
        return "\n".join([*lines, f"{'all':10}{total[0]:8}{total[1]:10}{total[2]:8}"])

    def to_json(self) -> str:
        return json.dumps({"tried": self.tried, "survived": self.survived, "wrong": self.wrong})


@dataclass(frozen=True)
class Ending:
    """How a forked command ended. `code` is negative if a signal killed it, as in `subprocess`."""

    code: int
    output: str

    def must_be_clean(self) -> None:
        """Raise Wrong if the command printed a traceback or was killed by a signal."""
        if "Traceback (most recent call last)" in self.output:
            raise Wrong(f"the command printed a traceback:\n{self.output[-3000:]}")
        if self.code < 0:
            name = signal.Signals(-self.code).name
            raise Wrong(f"the command was killed by {name}\n{self.output[-1500:]}")

    def must_fail(self, *words: str) -> None:
        """Raise Wrong unless the command failed with a message that contains one of `words`.

        Without `words`, any message will do.
        """
        self.must_be_clean()
        if self.code == 0:
            raise Wrong(f"exit code 0 in spite of the fault\n{self.output[-1500:]}")
        if not self.output.strip() or (words and not any(word in self.output for word in words)):
            raise Wrong(f"exit code {self.code}, but no message with any of {words}:\n{self.output[-1500:]}")


def forked(action: Callable[[], int], log: Path, watch: Callable[[int], None] | None = None) -> Ending:
    """Run `action` in a forked process that writes its output to `log`; return how it ended.

    watch: called with the pid of the process while it runs, for example to send it a signal
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _in_child(action, log)
    try:
        if watch is not None:
            watch(pid)
        code = _wait(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # kill the processes that it left behind
    if code is None:
        raise Wrong(f"the command hangs: no end within {TIMEOUT_SECONDS:g} s\n{_text(log)[-3000:]}")
    return Ending(code, _text(log))


def _in_child(action: Callable[[], int], log: Path) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = action()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> int | None:
    end = time.monotonic() + TIMEOUT_SECONDS
    pause = 0.002
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)


def _text(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace")
    return ""


def oelm(words: Iterable[str], log: Path, prepare: Callable[[], None] | None = None) -> Ending:
    """Run an `oelm` command in a forked process and return how it ended.

    prepare: called in the forked process before the command, for example to install a fault
    """

    def command() -> int:
        if prepare is not None:
            prepare()
        from oelm.cli.main import main

        return main([str(word) for word in words])

    return forked(command, log)


def warm_up(actions: Iterable[Callable[[], int]], place: Path) -> None:
    """Import all modules that `actions` import, so that forked commands do not have to.

    The actions run in forked processes, because threads that a training step starts here would not survive
    later forks.
    """
    names = place / "modules"
    for number, action in enumerate(actions):

        def listed(action: Callable[[], int] = action) -> int:
            code = action()
            names.write_text("\n".join(sys.modules))
            return code

        ending = forked(listed, place / f"warm-{number}.log")
        if ending.code != 0:
            raise RuntimeError(f"a command without a fault ended with {ending.code}:\n{ending.output}")
        for name in names.read_text().split("\n"):
            if name not in sys.modules and name != "__main__":
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a forked process would copy the memory of all modules


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a temporary folder, in memory if possible, because thousands of fsyncs to a disk take minutes."""
    shared = Path("/dev/shm")
    in_memory = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2**30
    with tempfile.TemporaryDirectory(prefix="oelm-torture-", dir=shared if in_memory else None) as place:
        yield Path(place)


def run_cases(cases: Iterable[Case], place: Path, tally: Tally, *, until: float, verbose: bool) -> None:
    """Run each case in an empty folder, count how it ended, and stop when the time `until` is reached."""
    for case in cases:
        if time.monotonic() > until:
            return
        folder = place / "case"
        folder.mkdir()
        try:
            how = case.run(folder)
            tally.add(case, how)
            if verbose:
                print(f"survived  {case.id}: {how}", flush=True)
        except Wrong as error:
            tally.add_wrong(case, str(error))
            shown = str(error) if verbose else "\n".join(str(error).splitlines()[-6:])
            print(f"WRONG     {case.id}: {shown}", flush=True)
            print(f"          to repeat it: python -m tests.torture --case '{case.id}'", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sample(rng: random.Random, items: list[str], count: int) -> list[str]:
    """Return `count` items spread over the list: one at random from each of `count` equal parts.

    Returns all items if `count` is 0 or larger than their number.
    """
    if count <= 0 or count >= len(items):
        return items
    edges = [len(items) * i // count for i in range(count + 1)]
    return [items[rng.randrange(a, b)] for a, b in itertools.pairwise(edges)]
