"""`oelm init`: write a study file that runs unchanged and that the user can edit."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from oelm.cli.output import print
from oelm.errors import UsageError
from oelm.files.atomic import write_text

_PACKAGE = "oelm.experiments.study_file"


def init(
    file: Annotated[str, Parameter(help="File to write; an existing file is not replaced.")] = "my.yaml", /
) -> None:
    """Write a study file with comments. Unchanged, it trains offline in minutes on a laptop."""
    path = Path(file).expanduser()
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise UsageError(f"'{file}' cannot be a study file: its name must end with .yaml or .yml")
    if path.exists() or path.is_symlink():
        raise UsageError(f"{file} already exists and is not overwritten; choose a different name")
    folder = files(_PACKAGE)
    schema = Path(str(folder / "study.schema.json")).as_uri()
    text = (folder / "template.yaml").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"# yaml-language-server: $schema={schema}\n{text}")
    print(f"{file}\n")
    named = shlex.quote(file)
    steps = {
        f"oelm show {named}": "the arms and questions",
        f"oelm run {named}": "train all arms; the same command continues",
        f"oelm decide {named}": "train seeds until the questions are answered",
        "oelm analyze": "differences, intervals, answers",
    }
    width = max(map(len, steps))
    for command, purpose in steps.items():
        print(f"  {command:{width}}    {purpose}")
