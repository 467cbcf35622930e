"""What the benchmarks should show, and whether they do: judged from the result files alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Results = Iterable[dict[str, Any]]
Verdict = Literal[
    "met", "met, but not by the whole interval", "missed", "missed, but not by the whole interval"
]
FROZEN = ("freeze-pretrained", "oelm-freeze")


@dataclass(frozen=True)
class Judged:
    """One goal against one figure. `low` and `high` bound it where an interval was measured."""

    goal: str
    bound: float
    at_least: bool
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = "x"

    @property
    def verdict(self) -> Verdict:
        worst, best = (self.low, self.high) if self.at_least else (self.high, self.low)
        if not self._holds(self.value):
            whole = best is None or not self._holds(best)
            return "missed" if whole else "missed, but not by the whole interval"
        return "met" if worst is None or self._holds(worst) else "met, but not by the whole interval"

    def _holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    @property
    def figure(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{self.unit}{interval}"

    @property
    def wanted(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.bound:g}{self.unit}"


def judge(results: Results) -> list[Judged]:
    found: list[Judged] = []
    for result in results:
        found += _JUDGES.get(result["kind"], lambda _: [])(result)
    return found


def _of_step(result: dict[str, Any]) -> Iterator[Judged]:
    arms = {arm["name"]: arm for arm in result["arms"]}
    first = result["arms"][0]
    where = result["model"]
    if first["name"] == "baseline" and result["model"] == "medium-512":
        for name, bound in (("plain", 1.4), ("transformers", 1.7)):
            if name in arms:
                yield _ratio(f"{where}: a step against {name}", bound, arms[name]["ratio"])
        yield Judged(f"{where}: share of the GEMM peak", 0.75, True, first["gemm_peak_share"], unit="")
        if "plain" in arms:
            share = 1 / arms["plain"]["memory_ratio"]
            yield Judged(f"{where}: peak memory against plain", 0.6, False, share)
    for arm in result["arms"][1:]:
        if (arm.get("fields") or {}).get("freeze", "none") == "none":
            continue
        r, saving = arm["ratio"], arm.get("saving")
        name = f"{where}: {arm['name']} takes no longer than {first['name']}"
        yield Judged(name, 1.0, False, r["value"], r["low"], r["high"])
        if saving and result["model"] in ("minilm", "tiny-bert") and arm["name"] in FROZEN:
            low, high = (saving[key] / saving["predicted"] for key in ("low", "high"))
            name = f"{where}: {arm['name']} shows the predicted saving of {100 * saving['predicted']:.1f} %"
            yield Judged(name, 0.7, True, saving["realised"], low, high, unit="")


def _of_classification(result: dict[str, Any]) -> Iterator[Judged]:
    bounds = {
        "agnews": {"padded-to-512": 4.0, "trainer": 1.2},
        "mnli": {"padded-to-512": 4.0, "trainer": 1.2},
        "imdb": {"padded-to-512": 1.5, "trainer": 1.2},
    }
    for comparison in result["comparisons"]:
        for arm in comparison["arms"]:
            bound = bounds.get(comparison["dataset"], {}).get(arm["name"])
            if bound is not None:
                text = f"{comparison['dataset']}: samples per second against {arm['name']}"
                yield _ratio(text, bound, arm["speedup_of_ours"])


def _of_tokenisation(result: dict[str, Any]) -> Iterator[Judged]:
    for c in result["comparisons"]:
        best = min(c["ratio_to_ours"].values(), key=lambda r: r["median"])
        text = f"{c['dataset']}, {c['tokenizer']}: MB/s per core against the fastest other way"
        yield Judged(text, 1.0, True, best["median"], best["low"], best["high"])


def _of_folders(result: dict[str, Any]) -> Iterator[Judged]:
    for command, found in result["commands"].items():
        text = f"`oelm {command}` over {max(result['counts'])} finished runs"
        yield Judged(text, 10.0, False, found["best_seconds"][-1], unit=" s")


def _ratio(text: str, bound: float, r: dict[str, float]) -> Judged:
    return Judged(text, bound, True, r["value"], r["low"], r["high"])


_JUDGES: dict[str, Any] = {
    "step": _of_step,
    "classification": _of_classification,
    "tokenisation": _of_tokenisation,
    "folders": _of_folders,
}
