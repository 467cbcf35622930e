"""The Hugging Face hub through `datasets`: never a script, and no waiting when there is no network."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from oelm.data.catalogue import Dataset, Variant
from oelm.data.corpus import Source
from oelm.data.problems import Problems
from oelm.data.sources.readers import Row, articles
from oelm.errors import OelmError, TransientError

_PROBE_SECONDS = 3.0
_CONVERTED = "refs/convert/parquet"  # the branch where the hub keeps its own conversion of a dataset


def offline() -> bool:
    """The user has said there is no network."""
    flags = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    return any(flag.upper() in ("1", "TRUE", "YES", "ON") for flag in flags)


def reachable() -> bool:
    """Whether the hub answers at all: the hub's own client would retry for half a minute to find out."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # the proxy decides, a direct connection proves nothing
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
        with socket.create_connection((endpoint.hostname or "", port), timeout=_PROBE_SECONDS):
            return True
    except OSError:
        return False


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}".rstrip(". ")


def _tell_libraries() -> None:
    """Both libraries read HF_HUB_OFFLINE once, at import; set later, it would cost half a minute."""
    import datasets
    import huggingface_hub.constants

    datasets.config.HF_HUB_OFFLINE = True
    huggingface_hub.constants.HF_HUB_OFFLINE = True


class HubSource(Source):
    """The official splits of one dataset on the hub, pinned to one revision."""

    def __init__(self, dataset: Dataset, variant: Variant) -> None:
        self.dataset = dataset
        self.config = variant.config or dataset.config or None
        self.splits = {**dataset.hub_splits, **variant.hub_splits}
        self.take_first = self.streamed = dataset.stream and not offline()
        if not offline() and not reachable():
            raise self._error("the hub cannot be reached from here")
        self.folder: str | None = None  # of the configuration, in a converted copy
        self.revision = None if offline() else self._find_revision()
        self._loaded: dict[str, Any] = {}
        if offline():
            self._load("train")  # what is not in the hub's own cache should fail now

    @property
    def origin(self) -> str:
        place = f"{self.dataset.hub}" + (f" ({self.config})" if self.config else "")
        how = ", streamed" if self.streamed else ""
        return f"Hugging Face hub {place}@{self.revision or 'as cached'}{how}"

    def rows(self, split: str, problems: Problems) -> Iterator[tuple[str, int, Row]]:
        where = f"hub:{self.dataset.hub}/{self.splits[split]}"
        number = 0
        try:
            rows = enumerate(self._load(split), start=1)
            for number, row in articles(rows, "text") if self.dataset.lines else rows:
                yield where, number, row
        except OelmError:
            raise
        except Exception as error:  # as in _load
            broke = f"reading broke off after row {number:,} of {self.splits[split]}: {_short(error)}"
            raise self._error(broke) from error

    def fingerprint(self, split: str) -> str:
        known = self.revision or getattr(self._load(split), "_fingerprint", "")
        if not known:
            raise self._error("what was loaded carries neither a revision nor a fingerprint")
        named = "\n".join((self.dataset.hub, self.config or "", self.splits[split], known))
        return hashlib.sha256(named.encode()).hexdigest()

    def size(self, split: str) -> tuple[int, int]:
        return 0, 0 if self.dataset.lines else self.dataset.sizes.get(self.splits[split], 0)

    def _load(self, split: str) -> Any:
        if split not in self._loaded:
            import datasets

            if offline():
                _tell_libraries()
            try:
                self._loaded[split] = datasets.load_dataset(
                    self.dataset.hub,
                    None if self.folder else self.config,
                    data_dir=self.folder,
                    split=self.splits[split],
                    streaming=self.streamed,
                    revision=self.revision,
                )
            except Exception as error:  # the library raises from a dozen families; all mean: not obtainable
                raise self._error(_short(error)) from error
        return self._loaded[split]

    def _find_revision(self) -> str | None:
        """The newest one; of a repository that is a script, which nobody should run, the hub's conversion."""
        newest = self._info()
        files = [file.rfilename for file in newest.siblings or ()]
        if f"{self.dataset.hub.partition('/')[2]}.py" not in files:
            return newest.sha
        converted = self._info(_CONVERTED)
        folders = sorted({file.rfilename.partition("/")[0] for file in converted.siblings or ()})
        parquet = [name for name in folders if not name.startswith(".") and "." not in name]
        if not parquet or (self.config and self.config not in parquet):
            raise self._error(f"it is a script, and the hub's converted copy holds only {parquet}")
        self.folder = self.config or parquet[0]
        return converted.sha

    def _info(self, revision: str | None = None) -> Any:
        from huggingface_hub import HfApi

        try:
            return HfApi().dataset_info(self.dataset.hub, revision=revision, timeout=10)
        except Exception as error:
            raise self._error(_short(error)) from error

    def _error(self, why: str) -> OelmError:
        return TransientError(
            f"dataset '{self.dataset.name}' could not be had from the hub ({self.dataset.hub}): {why}.",
            remedy=f"copy it to DIR/{self.dataset.name}/ and set OELM_DATA_DIR=DIR (or --data-dir DIR); "
            "with it in the hub's cache set HF_HUB_OFFLINE=1; or use the built-in stand-in: --source builtin "
            "(for a run: --set data.source=builtin).",
        )
