"""Read datasets from the Hugging Face hub. Dataset scripts are never executed."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from oelm.data.bad_rows import BadRows
from oelm.data.catalogue import Dataset, Variant
from oelm.data.corpus import Source
from oelm.data.sources.readers import Row, join_articles
from oelm.errors import OelmError, first_line

_CONNECT_SECONDS = 3.0
_PARQUET_BRANCH = "refs/convert/parquet"  # where the hub stores its parquet conversion of a dataset


def offline() -> bool:
    """Return whether HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids the use of the network."""
    flags = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    return any(flag.upper() in ("1", "TRUE", "YES", "ON") for flag in flags)


def reachable() -> bool:
    """Return within 3 s whether the hub accepts connections; `huggingface_hub` would retry for 30 s."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # connections use a proxy, so a direct connection would show nothing
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
        with socket.create_connection((endpoint.hostname or "", port), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _set_libraries_offline() -> None:
    """Set offline mode in `datasets` and `huggingface_hub`, which read HF_HUB_OFFLINE only on import."""
    import datasets
    import huggingface_hub.constants

    datasets.config.HF_HUB_OFFLINE = True
    huggingface_hub.constants.HF_HUB_OFFLINE = True


class HubSource(Source):
    """The official splits of a dataset on the hub, at one fixed revision."""

    def __init__(self, dataset: Dataset, variant: Variant) -> None:
        self.dataset = dataset
        self.config = variant.config or dataset.config or None
        self.splits = {**dataset.hub_splits, **variant.hub_splits}
        self.take_first = self.streamed = dataset.stream and not offline()
        if not offline() and not reachable():
            raise self._error("the hub cannot be reached")
        self.folder: str | None = None  # folder of the parquet branch to load; None = load the main branch
        self.revision = None if offline() else self._find_revision()
        self._loaded: dict[str, Any] = {}
        if offline():
            self._load("train")  # raises an error if the dataset is not in the local cache of the hub

    @property
    def origin(self) -> str:
        name = f"{self.dataset.hub} ({self.config})" if self.config else self.dataset.hub
        streamed = ", streamed" if self.streamed else ""
        return f"Hugging Face hub {name}@{self.revision or 'as cached'}{streamed}"

    def rows(self, split: str, bad: BadRows) -> Iterator[tuple[str, int, Row]]:
        where = f"hub:{self.dataset.hub}/{self.splits[split]}"
        number = 0
        try:
            rows = enumerate(self._load(split), start=1)
            for number, row in join_articles(rows) if self.dataset.lines else rows:
                yield where, number, row
        except OelmError:
            raise
        except Exception as error:  # `datasets` raises many unrelated exception types
            reason = f"reading failed after row {number:,} of {self.splits[split]}: {first_line(error)}"
            raise self._error(reason) from error

    def fingerprint(self, split: str) -> str:
        version = self.revision or getattr(self._load(split), "_fingerprint", "")
        if not version:
            raise self._error("neither a revision nor a fingerprint identifies the version of the data")
        named = "\n".join((self.dataset.hub, self.config or "", self.splits[split], version))
        return hashlib.sha256(named.encode()).hexdigest()

    def size(self, split: str) -> tuple[int, int]:
        return 0, 0 if self.dataset.lines else self.dataset.sizes.get(self.splits[split], 0)

    def _load(self, split: str) -> Any:
        if split not in self._loaded:
            import datasets

            if offline():
                _set_libraries_offline()
            try:
                self._loaded[split] = datasets.load_dataset(
                    self.dataset.hub,
                    None if self.folder else self.config,
                    data_dir=self.folder,
                    split=self.splits[split],
                    streaming=self.streamed,
                    revision=self.revision,
                )
            except Exception as error:  # the library raises many unrelated exception types
                raise self._error(first_line(error)) from error
        return self._loaded[split]

    def _find_revision(self) -> str | None:
        """Return the newest revision of the repository or, if it has a script, of its parquet branch."""
        newest = self._info()
        files = [file.rfilename for file in newest.siblings or ()]
        if f"{self.dataset.hub.partition('/')[2]}.py" not in files:
            return newest.sha
        converted = self._info(_PARQUET_BRANCH)
        folders = sorted({file.rfilename.partition("/")[0] for file in converted.siblings or ()})
        configs = [name for name in folders if "." not in name]
        if not configs or (self.config and self.config not in configs):
            raise self._error(
                "the repository has a dataset script, which is not executed, and its parquet branch has "
                f"only the configurations {configs}"
            )
        self.folder = self.config or configs[0]
        return converted.sha

    def _info(self, revision: str | None = None) -> Any:
        from huggingface_hub import HfApi

        try:
            return HfApi().dataset_info(self.dataset.hub, revision=revision, timeout=10)
        except Exception as error:
            raise self._error(first_line(error)) from error

    def _error(self, reason: str) -> OelmError:
        return OelmError(
            f"cannot load dataset '{self.dataset.name}' from the hub ({self.dataset.hub}): {reason}.",
            remedy=f"copy the dataset to DIR/{self.dataset.name}/ and set OELM_DATA_DIR=DIR (or --data-dir "
            "DIR); if it is in the local cache of the hub, set HF_HUB_OFFLINE=1; or use generated text: "
            "--source builtin (for a run: --set data.source=builtin).",
        )
