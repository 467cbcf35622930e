"""A small installation: torch, numpy and safetensors are enough for the API; a missing extra is named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from oelm.errors import EXTRA_OF

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = ["torch", "numpy", "safetensors"]
IMPORTED_AS = {"pyyaml": "yaml"}

# Runs first in a fresh interpreter: only the distributions named in argv[1], and what they require, can be
# imported. What they require is read from their metadata.
BLOCKER = r"""
import importlib.metadata, re, sys

def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def required(names):
    found, waiting = set(), [normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [normal(re.match(r"[\w.-]+", line)[0]) for line in lines if "extra ==" not in line]
    return found

allowed = required(sys.argv[1].split(","))
blocked = {
    module
    for module, owners in importlib.metadata.packages_distributions().items()
    if not {normal(owner) for owner in owners} & allowed and module != "oelm" and not module.startswith("_")
}

class Filter:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in blocked
        return None if hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Filter(finder) for finder in sys.meta_path if hasattr(finder, "find_spec")]
for name in [n for n in sys.modules if n.partition(".")[0] in blocked]:
    del sys.modules[name]
"""

LIBRARY = r"""
import torch, oelm
from oelm.models.gpt import GPT, gpt_config

assert "transformers" in blocked and "cyclopts" in blocked and "yaml" in blocked
model = GPT(gpt_config("smoke", vocab_size=8, context=4))
print(oelm.preview(model, "oelm-lowrank"))
applied = oelm.apply(model, "oelm-lowrank", seed=1, where="blocks.*")
optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-3, layer_decay=0.9))
model.logits(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
optimizer.step()
assert oelm.audit(model, optimizer).ok
oelm.save(model, sys.argv[2], compact=True)
assert oelm.audit(oelm.load(sys.argv[2])).ok
for use in (lambda: oelm.OELMCallback, lambda: oelm.push_to_hub(model, "me/mine")):
    try:
        use()
    except oelm.OelmError as error:
        print(error)
oelm.remove(model)
assert "oelm-freeze" in oelm.methods()
"""


def run(program: str, allowed: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + program, ",".join(allowed), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def extra(name: str) -> set[str]:
    """The distributions that an extra of pyproject.toml names, also through other extras."""
    found = set()
    for line in PROJECT["optional-dependencies"][name]:
        if nested := re.fullmatch(r"oelm\[(.+)\]", line):
            found |= {d for other in nested[1].split(",") for d in extra(other)}
        else:
            found.add(re.match(r"[\w-]+", line)[0].lower())  # type: ignore[index]
    return found


def test_the_core_requires_torch_numpy_and_safetensors_alone() -> None:
    assert sorted(re.match(r"\w+", line)[0] for line in PROJECT["dependencies"]) == sorted(CORE)  # type: ignore[index]


def test_the_api_works_with_torch_numpy_and_safetensors_alone(tmp_path: Path) -> None:
    done = run(LIBRARY, CORE, tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert "blocks.*.attn.q" in done.stdout
    for missing in ("oelm.OELMCallback needs transformers", "oelm.push_to_hub needs huggingface_hub"):
        assert (
            f"{missing}, which is not installed.\nWhat to do: pip install '.[hf]' in the clone" in done.stdout
        )


def test_the_command_names_the_extra_that_it_needs() -> None:
    done = run("from oelm.__main__ import entry; sys.argv[1:] = ['list']; entry()", CORE)
    assert done.returncode == 1
    assert done.stderr == (
        "oelm: the command `oelm` needs cyclopts, which is not installed.\n"
        "What to do: pip install '.[study]' in the clone of oelm\n"
    )


@pytest.mark.slow
def test_results_are_read_and_reported_with_the_extra_report_alone(tmp_path: Path) -> None:
    page = tmp_path / "report.md"
    shutil.copy(ROOT / "results" / "probes.jsonl.xz", tmp_path)
    words = ["report", "--runs", str(tmp_path), "--markdown", str(page)]
    program = f"""
from oelm.cli.main import main
assert "transformers" in blocked and "psutil" in blocked
assert main({words!r}) == 0
assert main(["board"]) == 1
"""
    done = run(program, [*CORE, *extra("report")])
    assert done.returncode == 0, done.stderr
    assert "pip install '.[board]' in the clone" in done.stderr
    assert page.stat().st_size > 1000


def test_every_library_that_is_imported_has_an_extra_that_installs_it() -> None:
    optional = {d for name in ("hf", "report", "study", "board", "peft") for d in extra(name)}
    assert {IMPORTED_AS.get(d, d) for d in optional} == set(EXTRA_OF)
    for library, name in EXTRA_OF.items():
        assert library in {IMPORTED_AS.get(d, d) for d in extra(name)}
