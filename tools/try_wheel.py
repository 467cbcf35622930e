"""Build the wheel and use it as a user would: in a clean virtual environment, outside the repository.

    python tools/try_wheel.py            the API with the core dependencies alone, then `oelm demo`
    python tools/try_wheel.py --light    the API alone

It needs the package index. `make wheel` and the workflow of the repository call it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Runs in an environment with torch, numpy and safetensors alone.
LIGHT = """
import torch, oelm
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
print(oelm.apply(model, "oelm-freeze", seed=42))
optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-3))
model(torch.randn(2, 3, 16)).square().mean().backward()
optimizer.step()
assert oelm.audit(model, optimizer).ok
assert "oelm-plus" in oelm.methods()
oelm.save(model, "saved")
oelm.remove(model)
try:
    oelm.OELMCallback
except oelm.OelmError as error:
    assert "pip install '.[hf]'" in str(error), error
else:
    raise AssertionError("more than the core dependencies is installed")
"""


def run(folder: Path, *words: object, code: int = 0) -> str:
    """Run a command in `folder`, without variables that point to the repository; return its output."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    command = list(map(str, words))
    print("$", *command, flush=True)
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = done.stdout.decode(errors="replace")
    print(output, flush=True)
    if done.returncode != code:
        raise SystemExit(f"exit code {done.returncode}, expected {code}: {' '.join(command)}")
    return output


def try_wheel(folder: Path, *, light: bool) -> None:
    """Build the wheel below `folder`, install it there, and use it."""
    source = folder / "source"  # a copy, because building leaves files behind
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(folder, sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", source)
    (wheel,) = (folder / "dist").glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    programs = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
    install = (programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    work = folder / "work"
    work.mkdir()
    run(work, *install, wheel)
    run(work, programs / "python", "-c", LIGHT)
    assert "pip install '.[study]'" in run(work, programs / "oelm", "list", code=1)
    if not light:
        run(work, *install, f"{wheel}[demo]")
        run(work, programs / "oelm", "demo")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        try_wheel(Path(name), light="--light" in sys.argv[1:])
