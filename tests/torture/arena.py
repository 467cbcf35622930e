"""The runs that are tortured: tiny experiments of the catalogue, their commands and their references."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .driver import Ending, Wrong, forked, oelm, warm_up
from .faults import FileFaults

IDS = {"cls": "GPT-CLS-02", "lm": "GPT-02"}
_SETTINGS = {
    "data.tokenizer": "bpe-300",
    "data.train_rows": 16,
    "data.eval_rows": 2,
    "data.max_length": 16,
    "budget.steps": 6,
    "budget.batch_size": 4,
    "budget.eval_every": 2,
    "budget.log_every": 2,
}
# Accumulation, dropout, a schedule that freezes, checkpoints with and apart from validations.
_OF_SHAPE = {
    "cls": {"budget.accumulation": 2, "budget.batch_size": 2, "data.eval_rows": 8, "model.dropout": 0.1},
    "lm": {"method": "oelm-gradual", "model.dropout": 0.1, "budget.checkpoint_every": 3},
}


class Arena:
    """References, shared by all cases, below `place`."""

    def __init__(self, place: Path, seed: int, short: bool = False) -> None:
        self.place, self.seed, self.short = place, seed, short
        self.cache = place / "cache"
        self._made: dict[str, Any] = {}
        self.seconds = 0.0  # that the last reference took
        _cheapen()
        warm_up([self._warm], place)

    def _warm(self) -> int:
        from oelm.cli.main import main

        for shape in IDS:
            main(self.train(shape, self.place / "warm"))
        return main(["analyze", "--all", "--runs", str(self.place / "warm"), "--json"])

    def rng(self, *words: object) -> random.Random:
        return random.Random(" ".join(map(str, (self.seed, *words))))

    def train(
        self, shape: str, runs: Path, *, seed: int = 0, cache: Path | None = None, id: str = ""
    ) -> list[str]:
        """The words of `oelm train`; a second time they resume."""
        settings = {**_SETTINGS, **_OF_SHAPE[shape]}
        changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        machine = ["--device", "cpu", "--threads", "1", "--cache-dir", str(cache or self.cache)]
        which = ["train", id or IDS[shape], "--scale", "smoke", "--seed", str(seed), "--runs", str(runs)]
        return [*which, *changes, *machine]

    def folder(self, shape: str, runs: Path, seed: int = 0, id: str = "") -> Path:
        return runs / "paper" / (id or IDS[shape]) / "scale=smoke" / f"seed={seed}"

    @functools.cache  # noqa: B019 - one arena per process
    def reference(self, shape: str) -> Path:
        """The folder of an uninterrupted run."""
        runs = self.place / f"reference-{shape}"
        begin = time.monotonic()
        _must_finish(oelm(self.train(shape, runs), self.place / "reference.log"))
        self.seconds = time.monotonic() - begin
        return self.folder(shape, runs)

    @functools.cache  # noqa: B019
    def operations(self, shape: str, fresh_cache: bool = False) -> list[str]:
        """The file operations of an uninterrupted run, in their order."""
        runs = self.place / f"counted-{shape}-{fresh_cache}"
        cache = runs / "cache" if fresh_cache else self.cache
        self.reference(shape)
        faults, listed = FileFaults([runs]), self.place / "operations.json"

        def count() -> int:
            from oelm.cli.main import main

            faults.install()
            code = main(self.train(shape, runs, cache=cache))
            listed.write_text(json.dumps(faults.operations))
            return code

        _must_finish(forked(count, self.place / "counted.log"))
        return list(json.loads(listed.read_text()))

    @functools.cache  # noqa: B019
    def half_finished(self, shape: str) -> Path:
        """A runs folder with a run that was killed in a step after its second checkpoint."""
        runs = self.place / f"half-{shape}"
        operations = self.operations(shape)
        checkpoints = [n for n, text in enumerate(operations, 1) if text.startswith("replace .latest.pt")]
        at = next(n for n, text in enumerate(operations, 1) if n > checkpoints[1] and "metrics.jsonl" in text)
        ending = oelm(self.train(shape, runs), self.place / "half.log", FileFaults([runs], at).install)
        if ending.code != -9:
            raise RuntimeError(f"the half-finished run ended with {ending.code}: {ending.output}")
        return runs

    @functools.cache  # noqa: B019
    def finished_study(self) -> Path:
        """A runs folder with a baseline and an arm, two seeds each: enough for a comparison."""
        runs = self.place / "study"
        for id in ("GPT-CLS-01", "GPT-CLS-02"):
            for seed in (0, 1):
                _must_finish(oelm(self.train("cls", runs, seed=seed, id=id), self.place / "study.log"))
        return runs

    def signalled(self, shape: str, place: Path, number: signal.Signals, permille: int) -> Ending:
        """A run in place/runs that gets a signal after a share of the time that a whole run takes here."""

        self.reference(shape)

        def command() -> int:
            from oelm.cli.main import main

            return main(self.train(shape, place / "runs"))

        def send(pid: int) -> None:
            time.sleep(self.seconds * permille / 1000)
            os.kill(pid, number)

        return forked(command, place / "log", send)

    def must_end_equal(self, shape: str, runs: Path, log: Path, cache: Path | None = None) -> None:
        """Resume with the same command; it must finish with the bytes of the uninterrupted run."""
        ending = oelm(self.train(shape, runs, cache=cache), log)
        ending.must_be_clean()
        if ending.code != 0:
            raise Wrong(f"resuming ended with {ending.code}:\n{ending.output[-2000:]}")
        self.must_be_equal(shape, runs)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The value of `make()`, called the first time only."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def must_be_equal(self, shape: str, runs: Path) -> None:
        from oelm.errors import OelmError
        from oelm.experiments.resume.compare_runs import compare_runs

        try:
            differences = compare_runs(self.reference(shape), self.folder(shape, runs))
        except (OelmError, OSError) as error:
            raise Wrong(f"finished with files that cannot be read: {error}") from None
        if differences:
            raise Wrong("the result differs without a word: " + "; ".join(map(str, differences)))

    def must_not_seem_alive(self, shape: str, runs: Path) -> str:
        """The state that `oelm status` shows of a run without a process; "running" would be a lie."""
        from oelm.runs.scan import state_of

        folder = self.folder(shape, runs)
        if not folder.exists():
            return "absent"
        state, _, _ = state_of(folder)
        if state in ("running", "stalled"):
            raise Wrong(f"shown as {state} although no process has it")
        return state


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, symlinks=True)
    return target


def _must_finish(ending: Ending) -> None:
    if ending.code != 0:
        raise RuntimeError(f"an undisturbed run ended with {ending.code}: {ending.output}")


def _cheapen() -> None:
    """Use one thread per process and no hub: both are slow and change no result."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(1)
