"""The runs into which faults are injected: tiny experiments of the catalogue, in two shapes.

The shape "cls" is a classification, "lm" a language model. For each shape there is a reference: an
undisturbed run with which the disturbed runs are compared.
"""

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
# The shapes cover gradient accumulation, dropout, a method that unfreezes layers during training, and
# checkpoints both at and between validations.
_OF_SHAPE = {
    "cls": {"budget.accumulation": 2, "budget.batch_size": 2, "data.eval_rows": 8, "model.dropout": 0.1},
    "lm": {"method": "oelm-gradual", "model.dropout": 0.1, "budget.checkpoint_every": 3},
}


class Arena:
    """The undisturbed runs that all cases share, in folders below `place`."""

    def __init__(self, place: Path, seed: int, short: bool = False) -> None:
        self.place, self.seed, self.short = place, seed, short
        self.cache = place / "cache"
        self._made: dict[str, Any] = {}
        self.seconds = 0.0  # how long the last undisturbed run took
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
        """Return the arguments of `oelm train` for a run in the folder `runs`.

        The same command, given again, resumes the run.
        """
        settings = {**_SETTINGS, **_OF_SHAPE[shape]}
        changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        machine = ["--device", "cpu", "--threads", "1", "--cache-dir", str(cache or self.cache)]
        which = ["train", id or IDS[shape], "--scale", "smoke", "--seed", str(seed), "--runs", str(runs)]
        return [*which, *changes, *machine]

    def folder(self, shape: str, runs: Path, seed: int = 0, id: str = "") -> Path:
        return runs / "paper" / (id or IDS[shape]) / "scale=smoke" / f"seed={seed}"

    @functools.cache  # noqa: B019 - one arena per process
    def reference(self, shape: str) -> Path:
        """Return the folder of an undisturbed run of this shape; the first call trains it."""
        runs = self.place / f"reference-{shape}"
        begin = time.monotonic()
        _must_finish(oelm(self.train(shape, runs), self.place / "reference.log"))
        self.seconds = time.monotonic() - begin
        return self.folder(shape, runs)

    @functools.cache  # noqa: B019
    def operations(self, shape: str, fresh_cache: bool = False) -> list[str]:
        """Return the file operations of an undisturbed run, in order, such as "write status.json"."""
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
        """Return a runs folder with a run that was killed in a step after its second checkpoint."""
        runs = self.place / f"half-{shape}"
        operations = self.operations(shape)
        checkpoints = [n for n, text in enumerate(operations, 1) if text.startswith("replace .latest.pt")]
        at = next(n for n, text in enumerate(operations, 1) if n > checkpoints[1] and "metrics.jsonl" in text)
        ending = oelm(self.train(shape, runs), self.place / "half.log", FileFaults([runs], at).install)
        if ending.code != -9:
            raise RuntimeError(f"the run should be killed, but ended with {ending.code}: {ending.output}")
        return runs

    @functools.cache  # noqa: B019
    def finished_study(self) -> Path:
        """Return a runs folder with a baseline and one other method, two seeds each, for a comparison."""
        runs = self.place / "study"
        for id in ("GPT-CLS-01", "GPT-CLS-02"):
            for seed in (0, 1):
                _must_finish(oelm(self.train("cls", runs, seed=seed, id=id), self.place / "study.log"))
        return runs

    def signalled(self, shape: str, place: Path, number: signal.Signals, permille: int) -> Ending:
        """Start a run in place/runs, send it a signal, and return how it ended.

        permille: moment of the signal as a share of the time that an undisturbed run takes
        """

        self.reference(shape)

        def command() -> int:
            from oelm.cli.main import main

            return main(self.train(shape, place / "runs"))

        def send(pid: int) -> None:
            time.sleep(self.seconds * permille / 1000)
            os.kill(pid, number)

        return forked(command, place / "log", send)

    def must_end_equal(self, shape: str, runs: Path, log: Path, cache: Path | None = None) -> None:
        """Resume the run with the same command; raise Wrong unless it ends equal to the undisturbed run."""
        ending = oelm(self.train(shape, runs, cache=cache), log)
        ending.must_be_clean()
        if ending.code != 0:
            raise Wrong(f"the resumed run ended with exit code {ending.code}:\n{ending.output[-2000:]}")
        self.must_be_equal(shape, runs)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the value of `make()`, which is called only the first time for each `name`."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def must_be_equal(self, shape: str, runs: Path) -> None:
        """Raise Wrong unless the finished run in `runs` is equal to the undisturbed run."""
        from oelm.errors import OelmError
        from oelm.experiments.resume.compare_runs import compare_runs

        try:
            differences = compare_runs(self.reference(shape), self.folder(shape, runs))
        except (OelmError, OSError) as error:
            raise Wrong(f"the run finished, but one of its files cannot be read: {error}") from None
        if differences:
            found = "; ".join(map(str, differences))
            raise Wrong(f"the run finished without a warning, but differs from the undisturbed run: {found}")

    def must_not_seem_alive(self, shape: str, runs: Path) -> str:
        """Return the state that `oelm status` shows of a run whose process has ended.

        Raises Wrong if the run is shown as running.
        """
        from oelm.runs.scan import state_of

        folder = self.folder(shape, runs)
        if not folder.exists():
            return "absent"
        state, _, _ = state_of(folder)
        if state in ("running", "stalled"):
            raise Wrong(f"the run is shown as {state}, although no process works on it")
        return state


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, symlinks=True)
    return target


def _must_finish(ending: Ending) -> None:
    if ending.code != 0:
        raise RuntimeError(f"an undisturbed run ended with exit code {ending.code}: {ending.output}")


def _cheapen() -> None:
    """Use one thread per process and do not contact the hub, which makes every run faster."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(1)
