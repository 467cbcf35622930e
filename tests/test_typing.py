"""A user's program, checked by type checkers: the API is accepted as documented, and mistakes are found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

PROGRAM = """
import torch
from typing_extensions import assert_type

import oelm
from oelm.methods.presets import find_method

model = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
assert_type(oelm.methods(), dict[str, oelm.Method])
print(oelm.preview(model, find_method("oelm-freeze"), where=["self_attn"]).frozen)
applied: oelm.Applied = oelm.apply(model, "oelm-freeze", seed=42, where="self_attn", exclude=None)
total: int = applied.total
mine: oelm.Method = oelm.register_method(oelm.Method("mine", init="headwise", freeze="all"))
optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-3))
ok: bool = oelm.audit(model, optimizer).ok
names: list[str] = [p.name for p in oelm.qk_projections(model)]
with oelm.disabled(model):
    pass
plain: torch.nn.Module = oelm.remove(model)
oelm.applyy(model)  # mistake
oelm.Method("mine", init="headwize")  # mistake
oelm.apply(model, "oelm-freeze", sed=1)  # mistake
"""

MISTAKES = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# mistake")]


def test_mypy_accepts_the_api_and_finds_the_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    # torch is not read, which would take minutes on a slow machine; its types are Any.
    config = "[mypy]\nfollow_imports = silent\n[mypy-torch.*,transformers.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(config, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    found = re.findall(r"program.py:(\d+): error", done.stdout)
    assert sorted(map(int, set(found))) == MISTAKES, done.stdout + done.stderr


def test_pyright_accepts_the_api_and_finds_the_mistakes(tmp_path: Path) -> None:
    # basedpyright is pyright in a wheel with Node.js; the wheel of pyright downloads both when it runs.
    pytest.importorskip("basedpyright")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    config = {"extraPaths": [str(SOURCE)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    if "{" not in done.stdout:
        pytest.skip(f"pyright does not run here: {done.stderr[-200:]}")
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert sorted({d["range"]["start"]["line"] + 1 for d in found}) == MISTAKES, done.stdout
