"""Cases, forked commands, and the table at the end."""

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

TIMEOUT_SECONDS = 120.0  # of one command that takes about a second; generous for busy machines
MEMORY_BYTES = 16 * 2**30  # of address space: a decompression bomb ends as an error, not with the machine


class Wrong(Exception):
    """The product broke a promise; the message says which."""


@dataclass(frozen=True)
class Case:
    """One fault. `name` alone decides everything about it, so that it can be repeated."""

    kind: str
    name: str
    run: Callable[[Path], str]  # in an empty folder; returns how it survived, raises Wrong

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass
class Tally:
    """What became of the cases of each kind."""

    tried: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    how: dict[str, Counter[str]] = field(default_factory=dict)
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
    """How a forked command ended. `code` is negative for a signal, as subprocess has it."""

    code: int
    output: str

    def must_be_clean(self) -> None:
        """No traceback, and no death by a signal of its own making."""
        if "Traceback (most recent call last)" in self.output:
            raise Wrong(f"traceback:\n{self.output[-3000:]}")
        if self.code < 0:
            raise Wrong(f"died of {signal.Signals(-self.code).name}\n{self.output[-1500:]}")

    def must_fail(self, *words: str) -> None:
        """An error in words: exit code not 0, and a message that holds one of `words` (any, if none)."""
        self.must_be_clean()
        if self.code == 0:
            raise Wrong(f"exit code 0 in spite of the fault\n{self.output[-1500:]}")
        if not self.output.strip() or (words and not any(word in self.output for word in words)):
            raise Wrong(f"exit code {self.code}, but no message with any of {words}:\n{self.output[-1500:]}")


def forked(action: Callable[[], int], log: Path, watch: Callable[[int], None] | None = None) -> Ending:
    """Run `action` in a forked process, its output in `log`; `watch` may do things to its pid meanwhile."""
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
            os.killpg(pid, signal.SIGKILL)  # whatever it left behind
    if code is None:
        raise Wrong(f"hangs: no end within {TIMEOUT_SECONDS:g} s\n{_text(log)[-3000:]}")
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
    """An `oelm` command in a forked process; `prepare` runs in that process before it."""

    def command() -> int:
        if prepare is not None:
            prepare()
        from oelm.cli.main import main

        return main([str(word) for word in words])

    return forked(command, log)


def warm_up(actions: Iterable[Callable[[], int]], place: Path) -> None:
    """Import here what `actions` import, so that no forked command has to. They run in processes of their
    own: threads that a training step starts would not survive a fork."""
    names = place / "modules"
    for number, action in enumerate(actions):

        def listed(action: Callable[[], int] = action) -> int:
            code = action()
            names.write_text("\n".join(sys.modules))
            return code

        ending = forked(listed, place / f"warm-{number}.log")
        if ending.code != 0:
            raise RuntimeError(f"warming up failed with {ending.code}:\n{ending.output}")
        for name in names.read_text().split("\n"):
            if name not in sys.modules and name != "__main__":
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy every page of what was imported here


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder, in memory where there is one: thousands of fsyncs to a disk take minutes."""
    shared = Path("/dev/shm")
    in_memory = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2**30
    with tempfile.TemporaryDirectory(prefix="oelm-torture-", dir=shared if in_memory else None) as place:
        yield Path(place)


def run_cases(cases: Iterable[Case], place: Path, tally: Tally, *, until: float, verbose: bool) -> None:
    """Each case in a folder of its own, removed after it; stops between cases when the time is up."""
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
            print(f"          repeat it: python -m tests.torture --case '{case.id}'", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sample(rng: random.Random, items: list[str], count: int) -> list[str]:
    """`count` of them spread over the whole list, a random one of each part; all when there are fewer."""
    if count <= 0 or count >= len(items):
        return items
    edges = [len(items) * i // count for i in range(count + 1)]
    return [items[rng.randrange(a, b)] for a, b in itertools.pairwise(edges)]
