"""Optional dashboards (TensorBoard, Weights & Biases, trackio) that show the rows of metrics.jsonl."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from oelm.config.hash import config_hash
from oelm.config.mapping import to_mapping
from oelm.config.run_config import RunConfig
from oelm.errors import UsageError, install_extra, unknown_name

TRACKERS = ("tensorboard", "wandb", "trackio")


class TensorBoard:
    """Writes event files for TensorBoard to the run folder.

    A run that resumes at `step` writes the rows after it again, and TensorBoard hides the old ones.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Service:
    """Sends metrics to Weights & Biases or trackio, which have the same Python functions.

    The name and the id of the run depend only on its config, so that a resumed run continues the same curves.
    A file in the run folder contains the last step that was sent, so that no step is sent twice.
    """

    def __init__(self, module: ModuleType, config: RunConfig, folder: Path) -> None:
        self.module = module
        self.sent_file = folder / f".{module.__name__}.step"
        self.sent = int(self.sent_file.read_text(encoding="utf-8")) if self.sent_file.exists() else -1
        self.step = -1
        self.pending: dict[str, float] = {}
        digest = config_hash(config)
        only_wandb = {"dir": str(folder), "id": digest[:16]} if module.__name__ == "wandb" else {}
        module.init(
            project=f"oelm-{config.study}",
            name=f"{config.id}-{config.scale}-seed{config.seed}-{digest[:8]}",
            config=to_mapping(config),
            resume="allow",
            **only_wandb,
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        if step != self.step:
            self._send()
            self.step = step
        self.pending.update(values)  # sent in one call per step, because a service counts each call as a step

    def _send(self) -> None:
        if self.pending and self.step > self.sent:
            self.module.log(self.pending, step=self.step)
            self.sent = self.step
            self.sent_file.write_text(str(self.step), encoding="utf-8")
        self.pending = {}

    def close(self) -> None:
        self._send()
        self.module.finish()


Tracker = TensorBoard | Service


def check_trackers(names: Iterable[str]) -> None:
    """Raise UsageError if a tracker (a dashboard such as TensorBoard) is unknown or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise unknown_name("tracker", name, TRACKERS)
        if importlib.util.find_spec(name) is None:
            raise _not_installed(name)


def open_trackers(names: tuple[str, ...], config: RunConfig, folder: Path, step: int) -> list[Tracker]:
    """Return the trackers (dashboards such as TensorBoard) in `names`; the run resumes after `step`."""
    check_trackers(names)
    opened: list[Tracker] = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:
            raise _not_installed(name) from None
        opened.append(TensorBoard(folder, step) if name == "tensorboard" else Service(module, config, folder))
    return opened


def _not_installed(name: str) -> UsageError:
    return UsageError(f"the tracker '{name}' is not installed: {install_extra(name)}")
