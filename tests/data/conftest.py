"""Every test has its own cache, no network, and no data folder unless it asks for one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

_SHARED = Path(os.environ.get("OELM_SHARED", Path(__file__).resolve().parents[3] / "shared"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OELM_CACHE_DIR", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("OELM_DATA_DIR", raising=False)
    monkeypatch.delenv("OELM_TOKENIZERS", raising=False)
    return folder


@pytest.fixture
def shared_data() -> Path:
    if not (_SHARED / "data").is_dir():
        pytest.skip("there is no folder of real samples (../shared/data, or OELM_SHARED)")
    return _SHARED / "data"


@pytest.fixture
def shared_tokenizers() -> Path:
    if not (_SHARED / "tokenizers").is_dir():
        pytest.skip("there is no folder of tokenizers (../shared/tokenizers, or OELM_SHARED)")
    return _SHARED / "tokenizers"


Write = Callable[[str, Iterable[object]], Path]


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Write:
    """Write rows (dicts, or raw lines as str or bytes) to a jsonl file in the test's folder."""

    def write(name: str, rows: Iterable[object]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for row in rows:
                line = row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else None
                file.write((json.dumps(row).encode() if line is None else line) + b"\n")
        return path

    return write
