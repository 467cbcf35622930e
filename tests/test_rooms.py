"""The house plan, checked: which room may import which, and what must not be loaded for a quick command.

Read from the source by `ast`, so that the tests take no time and see imports inside functions too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "oelm"
HEAVY = {"torch", "transformers", "matplotlib", "datasets"}

# A room may import the rooms before it, itself and the shared modules.
ORDER = (
    "methods",
    "models",
    "data",
    "config",
    "runs",
    "training",
    "analysis",
    "experiments",
    "report",
    "cli",
)
MAY_KNOW: dict[str, set[str]] = {room: set(ORDER[:n]) for n, room in enumerate(ORDER)}
MAY_KNOW["bench"] = MAY_KNOW["report"]
MAY_KNOW["cli"] |= {"bench"}
MAY_KNOW["files"] = MAY_KNOW["compiled"] = set()
SHARED = {"compiled", "cores", "errors", "files", "low_precision", "printable", "units"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = ("oelm", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module named in an import below `tree`, absolute; `from a import b` names a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def test_a_folder_holds_few_modules() -> None:
    """`cli` has one module per command, so it may hold more."""
    folders = Counter(path.parent for path in modules() if path.name != "__init__.py")
    assert {str(folder) for folder, count in folders.items() if count > 13} <= {str(SOURCE / "cli")}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_room_imports_only_rooms_before_it(path: Path) -> None:
    parts = path.relative_to(SOURCE).parts
    if len(parts) == 1:
        return
    room, name = parts[0], name_of(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    allowed = MAY_KNOW[room] | {room} | SHARED
    for target in imported(ast.parse(path.read_text(encoding="utf-8")), package):
        words = target.split(".")
        if words[0] != "oelm" or len(words) == 1:
            continue
        known = words[1] in allowed or (
            not (SOURCE / words[1]).exists() and not (SOURCE / f"{words[1]}.py").exists()
        )
        assert known, f"{name} imports {target}, but {room} may only know {sorted(allowed)}"


@cache
def top_level_imports(path: Path) -> tuple[str, ...]:
    """What importing the module imports: not what its functions would, nor what is for type checkers only."""
    name = name_of(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[str] = []
    nodes: list[ast.stmt] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += imported(node, package)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            nodes += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
    return tuple(found)


def file_of(module: str) -> Path | None:
    place = SOURCE.parent.joinpath(*module.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None


def loaded_by(*roots: str) -> dict[str, list[str]]:
    """Every module that importing `roots` loads, with the chain of our modules that leads to it."""
    chains: dict[str, list[str]] = {}
    waiting = [(root, [root]) for root in roots]
    while waiting:
        module, chain = waiting.pop()
        for part in range(1, module.count(".") + 2):  # a module loads its packages
            package = ".".join(module.split(".")[:part])
            if package in chains:
                continue
            chains[package] = chain
            path = file_of(package) if package.split(".")[0] == "oelm" else None
            if path is not None:
                waiting += [(target, [*chain, target]) for target in top_level_imports(path)]
    return chains


QUICK = {
    "import oelm": ("oelm",),
    "oelm --help": ("oelm.cli.main",),
    "oelm list": (
        *("oelm.cli.main", "oelm.cli.catalogue"),
        *(f"oelm.experiments.studies.{p.stem}" for p in (SOURCE / "experiments" / "studies").glob("*.py")),
    ),
    "oelm status": ("oelm.cli.main", "oelm.cli.status"),
    "oelm monitor": ("oelm.cli.main", "oelm.cli.monitor"),
    "oelm run": ("oelm.cli.main", "oelm.cli.run"),
    "oelm archive": ("oelm.cli.main", "oelm.cli.archive"),
    "oelm clean": ("oelm.cli.main", "oelm.cli.clean"),
    "oelm data list": ("oelm.cli.main", "oelm.cli.data", "oelm.data.catalogue"),
}


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands_load_nothing_heavy(command: str) -> None:
    chains = loaded_by(*QUICK[command])
    for module, chain in chains.items():
        assert module.split(".")[0] not in HEAVY, f"{command} loads {module}: {' -> '.join(chain)}"


def test_the_graph_read_from_source_is_the_real_one() -> None:
    """`oelm list` and `oelm status` in a fresh interpreter: what the interpreter really loaded."""
    program = """
import contextlib, io, sys
from oelm.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["list"]) == 0
    assert main(["status", "--runs", "."]) == 0
print(sorted({m.split(".")[0] for m in sys.modules} & %r))
"""
    done = subprocess.run(
        [sys.executable, "-c", program % HEAVY], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"
