"""Run folders with hostile files: JSON or YAML with content that oelm never writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .arena import Arena, copy
from .driver import Case, Wrong, oelm
from .shown import RUN, must_end_cleanly, must_show_the_same

JSON_FILES = (
    "status.json",
    "results.json",
    "manifest.json",
    "timing_stats.json",
    "freeze_audit.json",
    "predictions.json",
    "test_losses.json",
)
WHOLE = {
    "null": "null",
    "list": "[]",
    "number": "7",
    "nan": "NaN",
    "deep": "[" * 100_000,
    "deep-object": '{"a":' * 100_000,
    "long-number": "9" * 100_000,
    "not-utf8": "\udcff\udcfe",
    "control": '{"id": "\\u0000\\u001b[31m", "state": "\\u202e"}',
    "empty-object": "{}",
}
VALUES: dict[str, Any] = {
    "null": None, "text": "x", "list": [], "object": {}, "true": True, "negative": -1, "huge": 10**400,
    "infinite": float("inf"), "fraction": 1e-308, "markup": "<script>alert(1)</script>", "long": "x" * 10**6,
}  # fmt: skip
CONFIGS = {
    "python-tag": "!!python/object/apply:os.system ['touch hostile-was-here']",
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    ),
    "deep": "[" * 20_000,
    "null": "null",
    "binary": "\udc80\udc81",
    "path-id": "id: ../../../../tmp/x\n",
}


FOUND = (  # cases in which oelm once was wrong; they are always tried
    "changed:results.json:value:huge:test/accuracy",
    "sealed:timing_stats.json:value:huge:predicted_saving",
    "sealed:results.json:value:long:test/loss",
    "sealed:manifest.json:value:long:data/rows",
)


def cases(arena: Arena, count: int) -> Iterator[Case]:
    """Yield 6 * `count` random cases each with old and with new checksums; all cases if `count` is 0."""
    folder = arena.finished_study() / RUN
    files = [file for file in JSON_FILES if (folder / file).exists()]  # a classifier has no test_losses.json
    names = [f"{file}:whole:{what}:" for file in files for what in WHOLE]
    names += [f"config.yaml:config:{what}:" for what in CONFIGS]
    for file in files:
        held = json.loads((folder / file).read_text())
        names += [f"{file}:value:{what}:{field}" for field in _fields(held) for what in VALUES]
    for name in FOUND:
        yield case(arena, name)
    for way in ("changed", "sealed"):
        chosen = arena.rng("hostile", way).sample(names, 6 * count) if count else names
        for name in chosen:
            yield case(arena, f"{way}:{name}")


def case(arena: Arena, name: str) -> Case:
    """Return the case with this name: WAY:FILE:whole|config:WHAT: or WAY:FILE:value:WHAT:FIELD.

    WAY is "changed" or "sealed". A sealed folder has new checksums that match the hostile content, as an
    attacker would write them. oelm cannot notice that, so it may show other numbers, but no traceback.
    """
    way, file, how, what, field = name.split(":", 4)

    def run(place: Path) -> str:
        runs = copy(arena.finished_study(), place / "runs")
        path = runs / RUN / file
        if how == "value":
            held = json.loads(path.read_text())
            _set(held, field.split("/"), VALUES[what])
            text = json.dumps(held)
        else:
            text = (WHOLE if how == "whole" else CONFIGS)[what]
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        if way == "sealed":
            _seal(path.parent)
            survived = must_end_cleanly(arena, runs, place)
        else:
            survived = must_show_the_same(arena, runs, path, place)
        if what in ("markup", "control", "long") or (way == "sealed" and not arena.short):
            _must_report(runs, place)
        if Path("hostile-was-here").exists():
            raise Wrong(f"oelm ran code from {path}")
        return survived

    return Case("hostile", name, run)


def _seal(folder: Path) -> None:
    from oelm.runs.folder import RunFolder

    RunFolder(folder).write_checksums()


def _must_report(runs: Path, place: Path) -> None:
    report = place / "report.html"
    oelm(["report", "--runs", runs, "-o", report], place / "log").must_be_clean()
    if report.exists() and "<script>alert(1)</script>" in report.read_text():
        raise Wrong("the report contains the markup of a hostile file")


def _fields(value: Any, prefix: str = "") -> list[str]:
    """Return the paths of all fields of nested objects, such as "test/accuracy"."""
    found = []
    for name, inner in value.items() if isinstance(value, dict) else ():
        found.append(f"{prefix}{name}")
        found += _fields(inner, f"{prefix}{name}/")
    return found


def _set(held: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        held = held[name]
    held[path[-1]] = value
