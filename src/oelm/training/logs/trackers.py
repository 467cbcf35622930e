"""Optional dashboards behind one small protocol. metrics.jsonl is the truth; these are views of it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from oelm.config.hash import config_hash
from oelm.config.mapping import to_mapping
from oelm.config.run_config import RunConfig
from oelm.errors import UsageError, unknown_name


class Tracker(Protocol):
    """What a dashboard must do. Rows come in order; after a resume, from the checkpoint's step on."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder; `purge_step` hides what a killed process wrote past its checkpoint."""

    def __init__(self, config: RunConfig, folder: Path, step: int) -> None:
        _package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Service:
    """Weights & Biases, or trackio, which has the same calls. The run's name is its config's, so a resumed
    run goes on in the same place; rows the service already has are not sent again."""

    def __init__(self, module: ModuleType, config: RunConfig, folder: Path, **settings: Any) -> None:
        self.module = module
        self.mark = folder / f".{module.__name__}.step"  # the last step sent, so that none is sent twice
        self.sent = int(self.mark.read_text()) if self.mark.exists() else -1
        name = f"{config.id}-{config.scale}-seed{config.seed}-{config_hash(config)[:8]}"
        self.module.init(
            project=f"oelm-{config.study}", name=name, config=to_mapping(config), resume="allow", **settings
        )
        self.step = -1
        self.pending: dict[str, float] = {}

    def log(self, step: int, values: dict[str, float]) -> None:
        if step != self.step:
            self._send()
            self.step = step
        self.pending.update(values)  # one call per step: the services count calls as steps

    def _send(self) -> None:
        if self.pending and self.step > self.sent:
            self.module.log(self.pending, step=self.step)
            self.sent = self.step
            self.mark.write_text(str(self.step))
        self.pending = {}

    def close(self) -> None:
        self._send()
        self.module.finish()


def _wandb(config: RunConfig, folder: Path, step: int) -> Tracker:
    return Service(_package("wandb"), config, folder, dir=str(folder), id=config_hash(config)[:16])


def _trackio(config: RunConfig, folder: Path, step: int) -> Tracker:
    return Service(_package("trackio"), config, folder)


TRACKERS: dict[str, Callable[[RunConfig, Path, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker that does not exist or is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise unknown_name("tracker", name, TRACKERS)
        if importlib.util.find_spec(name) is None:
            raise _not_installed(name)


def open_trackers(names: tuple[str, ...], config: RunConfig, folder: Path, step: int) -> list[Tracker]:
    """The named trackers, going on after `step`."""
    check_trackers(names)
    return [TRACKERS[name](config, folder, step) for name in names]


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise _not_installed(name) from None


def _not_installed(name: str) -> UsageError:
    return UsageError(f"the tracker '{name}' is not installed: pip install -e '.[{name}]'")
