"""Census of model families: which config types of the installed transformers can `oelm.apply` read?

    python tools/families.py                    all types: rewrites docs/families.md
    python tools/families.py bert deberta       only these types: prints one line each
    python tools/families.py --sample 60        60 types drawn at random (--seed 1): prints one line each

Each type is built from its default config with small widths and few layers, in a process of its own, so that
a crash or a large model costs one line. Nothing is downloaded. The same
command continues an interrupted census, if neither transformers nor the code that reads models has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import multiprocessing
import os
import random
import re
import resource
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import oelm
from oelm.methods.reading.verify import verify_projections

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
PROGRESS = ROOT / "cache" / "families.jsonl"  # the rows of an unfinished census
READ, REFUSED, NO_QK, NOT_BUILT = "read", "refused", "no queries and keys", "cannot be built here"
MAX_PARAMETERS = 400_000_000  # larger models stay on the meta device
MAX_BYTES = 12 * 2**30
MAX_SECONDS = 240  # of processor time, so that a busy machine gives the same outcome

_LAYERS = re.compile(r"(layers?|blocks|depth|num_layer|decoders)$")
_EXPERTS = re.compile(r"^(n|num)_.*experts$|^num_experts$|^moe_num_experts$")
_WIDTH = re.compile(
    r"hidden|dim|d_model|d_ff|d_kv|d_inner|d_embed|d_head|n_embd|n_inner|embed|width|intermediate|inner_size"
    r"|ffn|channels|latent_size|lora_rank|head_size|filters|mrope_section"
)
_NO_WIDTH = re.compile(
    r"num_hid|num_|layer_norm|dropout|max_|image|patch|window|prob|_act|std|vocab|n_layer|kernel|position"
    r"|num_channels|token|layers|scale|multiplier|use_|temporal|resolution|stride|factor|pad|chunk"
)


class Row(NamedTuple):
    """What happened to one config type."""

    type: str
    model: str
    outcome: str
    detail: str = ""


def small(config: PretrainedConfig, divisor: int, layers: int) -> dict[str, Any]:
    """Return arguments for the class of a default config: few layers, and widths divided by `divisor`."""
    changed: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in type(config).sub_configs:
            inner = getattr(config, name, None)
            if isinstance(inner, PretrainedConfig):
                changed[name] = {"model_type": inner.model_type, **small(inner, divisor, layers)}
        elif isinstance(value, bool) or not isinstance(value, int | list | tuple):
            continue
        elif isinstance(value, int) and _LAYERS.search(name) and value > layers:
            changed[name] = layers
        elif isinstance(value, int) and _EXPERTS.search(name):
            changed[name] = min(value, 16)
        elif divisor > 1 and _WIDTH.search(name) and not _NO_WIDTH.search(name):
            changed[name] = _divided(value, divisor)
    return changed


def _divided(value: Any, divisor: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_divided(v, divisor) for v in value)
    is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 2 * divisor
    return value // divisor if is_size and value % divisor == 0 else value


def configs(kind: type[PretrainedConfig]) -> Iterator[PretrainedConfig]:
    """Yield configs of a class, the smallest first; the last one is the default."""
    default = kind()
    for divisor, layers in ((8, 8), (2, 8), (8, 99), (1, 2)):
        try:
            yield kind(**small(default, divisor, layers))
        except Exception:
            continue
    yield default


def model_classes(kind: type[PretrainedConfig]) -> list[type[PreTrainedModel]]:
    """Return the model classes of a config class, the one without a head first."""
    found = []
    mapping = transformers.MODEL_MAPPING
    if kind in mapping:
        main = mapping[kind]
        found += list(main) if isinstance(main, tuple | list) else [main]
    module = kind.__module__.replace("configuration_", "modeling_")
    try:
        classes = vars(__import__(module, fromlist=["x"])).values()
    except ImportError:
        classes = ()
    own = [
        c
        for c in classes
        if inspect.isclass(c)
        and issubclass(c, PreTrainedModel)
        and c.config_class is kind
        and "Pretrained" not in c.__name__
        and "PreTrained" not in c.__name__
    ]
    return list(dict.fromkeys([*found, *own]))


def build(kind: type[PretrainedConfig], config: PretrainedConfig) -> nn.Module:
    """Return a model for a config; on the meta device if it is large. Raise the first error."""
    first_error: Exception | None = None
    for model_class in model_classes(kind)[:3]:
        try:
            with torch.device("meta"):
                model = model_class._from_config(config, dtype=torch.float32)
            if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
                return model
            return model_class._from_config(config, dtype=torch.float32)
        except Exception as error:
            first_error = first_error or error
    raise first_error or ValueError("no model class has this config")


def has_queries_and_keys(model: nn.Module) -> bool:
    """Return whether a module is called attention, or a parameter is named like a query or a key."""
    names = re.compile("attention|attn|mhsa", re.IGNORECASE)
    words = re.compile(r"(^|[._])(q|k|qkv|query|key|qk|kv|wqkv)([._]|$)", re.IGNORECASE)
    return any(names.search(type(m).__name__) for m in model.modules()) or any(
        words.search(name) for name, _ in model.named_parameters()
    )


def examine(name: str) -> Row:
    """Build one config type, apply a method, and return what happened."""
    first, kind = None, CONFIG_MAPPING[name]
    try:
        for config in configs(kind):
            row = _examine(name, kind, config)
            if row.outcome in (READ, NO_QK):
                return row
            if first is None or first.outcome == NOT_BUILT:
                first = row
            # A larger width may help: positions need even head sizes, and heads a width that they divide.
            if row.outcome == REFUSED and not re.search("verified|heads of size", row.detail):
                return row
    except Exception as error:
        return Row(name, "", NOT_BUILT, _line(error))
    return first or Row(name, "", NOT_BUILT, "no config can be built")


def _examine(name: str, kind: type[PretrainedConfig], config: PretrainedConfig) -> Row:
    try:
        model = build(kind, config).eval()
    except Exception as error:
        return Row(name, "", NOT_BUILT, _line(error))
    is_meta = next(model.parameters()).is_meta
    title = type(model).__name__ + (" (meta)" if is_meta else "")
    try:
        if is_meta:
            verify_projections(model, oelm.qk_projections(model))
        else:
            oelm.apply(model, "freeze-pretrained")
    except Exception as error:
        outcome = REFUSED if has_queries_and_keys(model) else NO_QK
        return Row(name, title, outcome, str(error) if isinstance(error, oelm.OelmError) else repr(error))
    return Row(name, title, READ, f"{len(oelm.qk_projections(model))} projections")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150] if str(error) else ''}"


def _child(name: str, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sender.send(examine(name))


def examine_apart(name: str) -> Row:
    """Return `examine(name)` from a process of its own, with limits of time and memory."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, sender))
    child.start()
    sender.close()
    try:
        row = receiver.recv()
    except EOFError:
        row = Row(name, "", NOT_BUILT, f"no answer within {MAX_SECONDS} s and {MAX_BYTES >> 30} GiB")
    child.join()
    return row


def page(rows: list[Row]) -> str:
    """Return docs/families.md: counts, and the types that are refused with the reason."""
    counts = Counter(row.outcome for row in rows)
    with_qk = counts[READ] + counts[REFUSED]
    lines = [
        "# Model families",
        "",
        f"`oelm.apply` on every config type of transformers {transformers.__version__}, built small with",
        "random weights. A type counts as read if the numeric check accepts its queries and keys",
        f"([how it works](howto/own-model.md#how-a-registration-is-checked)). Of the {with_qk} types",
        f"with queries and keys, {counts[READ]} ({100 * counts[READ] / with_qk:.0f} %) are read.",
        "`python tools/families.py` rewrites this page.",
        "",
        "| outcome | types |",
        "|---|---:|",
        *(f"| {outcome} | {counts[outcome]} |" for outcome in (READ, REFUSED, NO_QK, NOT_BUILT)),
        "",
        "A type cannot be built here if its default config is incomplete, if it has no model class of its",
        "own, or if it needs a package that is not installed.",
        "",
        "## Refused",
        "",
        "Nothing is changed in these models. `where=` and `exclude=` act on their other modules,",
        "`example_inputs=` shows how a module is called, and `oelm.register_attention` says where its Q and",
        "K are.",
        "",
        "| type | module | reason |",
        "|---|---|---|",
        *(f"| {row.type} | {' | '.join(_reason(row.detail))} |" for row in rows if row.outcome == REFUSED),
    ]
    return "\n".join(lines) + "\n"


def _reason(detail: str) -> tuple[str, str]:
    """Return the class and a short reason from an error message of oelm."""
    first = detail.splitlines()[0]
    if "stores its Q and K" in detail:
        return detail.partition("Tell oelm where ")[2].split()[0], "not recognised"
    kind = first.partition("(")[2].partition(")")[0]
    if "verify numerically" in first:
        return kind, "its call cannot be guessed"
    if ", but " in first:
        return kind, _short(first.partition(", but ")[2].partition(". So")[0])
    return "", _short(first.partition(". Pass one of")[0])


def _short(reason: str) -> str:
    """Return the reason, cut after a word if it is long."""
    return textwrap.shorten(reason, 160, placeholder=" …")


def versions() -> dict[str, str]:
    """Return what the outcome of a type depends on: the libraries, and the code of oelm and of this tool."""
    digest = hashlib.sha256()
    for path in (*sorted((ROOT / "src" / "oelm" / "methods").rglob("*.py")), Path(__file__)):
        digest.update(path.read_bytes())
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "code": digest.hexdigest(),
    }


def census() -> list[Row]:
    """Examine all config types, or those that an interrupted census with the same code left out."""
    lines = PROGRESS.read_text(encoding="utf-8").splitlines(keepends=True) if PROGRESS.exists() else []
    lines = [line for line in lines if line.endswith("\n")]  # the last one may be cut off
    if not lines or json.loads(lines[0]) != versions():
        lines = [json.dumps(versions()) + "\n"]
    PROGRESS.parent.mkdir(exist_ok=True)
    PROGRESS.write_text("".join(lines), encoding="utf-8")
    rows = {row.type: row for row in (Row(*json.loads(line)) for line in lines[1:])}
    names = sorted(CONFIG_MAPPING)
    with PROGRESS.open("a", encoding="utf-8") as file:
        for number, name in enumerate(names, 1):
            if name not in rows:
                rows[name] = examine_apart(name)
                file.write(json.dumps(rows[name]) + "\n")
                file.flush()
                print(f"{number}/{len(names)} {_described(rows[name])}", flush=True)
    return [rows[name] for name in names]


def _described(row: Row) -> str:
    return f"{row.type:36} {row.model:44} {row.outcome}: {row.detail}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Which config types of transformers can oelm.apply read?")
    parser.add_argument("names", nargs="*", metavar="TYPE")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="examine N types drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    given = parser.parse_args()
    started = time.monotonic()
    if names := given.names or random.Random(given.seed).sample(sorted(CONFIG_MAPPING), given.sample):
        for name in names:
            print(_described(examine_apart(name)), flush=True)
        return
    rows = census()
    print(Counter(row.outcome for row in rows), f"{time.monotonic() - started:.0f} s")
    PAGE.write_text(page(rows), encoding="utf-8")
    PROGRESS.unlink()


if __name__ == "__main__":
    main()
