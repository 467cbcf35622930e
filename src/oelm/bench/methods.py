"""`oelm bench`: measure the step time and memory of each method on the user's model and device.

The baseline is measured twice, as two arms. The ratio of their step times would be 1 without noise, so its
distance from 1 shows how noisy the machine is.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from oelm.bench.harness import Measured, Plan, Progress, measure_together, median_of, ratio
from oelm.bench.worker import REFERENCE_PRODUCTS, Arm, product_flops, products
from oelm.errors import UsageError
from oelm.methods.presets import find_method
from oelm.models.sizes import gpt_shape

DEFAULT_METHODS = ("baseline", "oelm-freeze", "oelm-bias", "oelm-plus")
AGAIN = "baseline (again)"
GEMM = "gemm"  # arm that only multiplies matrices, to measure the peak FLOP/s of the machine
GEMM_PRODUCTS = 4  # matrix products in a step of that arm
ENCODERS = ("minilm", "tiny-bert")  # Hugging Face encoders, measured as classifiers with two classes


@dataclass(frozen=True)
class Workload:
    """The model, the batch and the device of the training step that is measured."""

    size: str = "medium-512"  # a size of the built-in GPT, "minilm" or "tiny-bert"
    vocabulary: int = 50257
    context: int = 512
    batch: int = 4
    position: str = "learned"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size not in ENCODERS:
            gpt_shape(self.size)  # raises UsageError for an unknown size


@dataclass(frozen=True)
class MethodsBench:
    """The settings of a comparison of methods. The first method must be the baseline."""

    methods: tuple[str, ...] = DEFAULT_METHODS
    workload: Workload = field(default_factory=Workload)
    plan: Plan = field(default_factory=Plan)

    def __post_init__(self) -> None:
        names = [find_method(name).name for name in self.methods]  # raises UsageError for an unknown name
        if not names or len(set(names)) != len(names):
            raise UsageError(
                f"invalid methods {list(self.methods)}: give at least one method, and none of them twice"
            )
        for name in names:
            if find_method(name).schedule != "constant":
                raise UsageError(
                    f"{name} cannot be measured by single steps, because it freezes or unfreezes parameters "
                    "during training; leave it out"
                )
        if names[0] != "baseline":
            raise UsageError("the first method must be 'baseline', because the others are compared with it")

    def specs(self) -> list[dict[str, Any]]:
        """Return the specs of the methods, and of the second copy of the baseline, for their processes."""
        arms = [(name, name) for name in self.methods] + [(AGAIN, "baseline")]
        return [
            {"arm": arm, "method": find_method(name).to_dict(), **self.shared_spec()} for arm, name in arms
        ]

    def shared_spec(self) -> dict[str, Any]:
        return {"build": "oelm.bench.methods:build", **asdict(self.workload)}


def run(bench: MethodsBench, progress: Progress = lambda text: None) -> dict[str, Any]:
    """Measure all methods; return the result that `oelm bench -o FILE` writes and `oelm report` reads."""
    gemm = {"arm": GEMM, **bench.shared_spec()}
    measured = measure_together([gemm, *bench.specs()], bench.plan, progress)
    return {
        "kind": "step",
        "order": "turns",
        "model": bench.workload.size,
        "settings": {**asdict(bench.workload), **asdict(bench.plan), "threads": bench.plan.thread_count},
        **summarise(measured, "baseline"),
    }


def summarise(measured: dict[str, Measured], reference: str) -> dict[str, Any]:
    """Return the results of all arms: time and memory relative to the arm `reference`, and raw step times.

    If the FLOPs of an arm's step are known, its FLOP/s are also given as a fraction of the machine's peak
    FLOP/s. The arm `GEMM` measures that peak; without it, the reference computation around each step does.
    """
    peak = peak_flops(measured)
    first = measured[reference]
    rows = []
    for name, arm in measured.items():
        if name == GEMM:
            continue
        facts = arm.facts
        control = measured.get(facts.get("method", {}).get("control", ""))
        row: dict[str, Any] = {
            "name": name,
            "method": facts.get("method", {}).get("name", "") if name != AGAIN else "",
            # The name is not enough: a later version of oelm may change what the method of this name does.
            "fields": facts.get("method") if name != AGAIN else None,
            "median_seconds": arm.median_seconds,
            "tokens_per_second": facts["tokens"] / arm.median_seconds,
            "ratio": ratio(arm.rounds, first.rounds).to_dict(),
            # against the trained control of the method, if that is one of the arms
            "control_ratio": ratio(arm.rounds, control.rounds).to_dict() if control else None,
            "memory_ratio": arm.memory["peak_bytes"] / first.memory["peak_bytes"],
            "parameters": facts["parameters"],
            "trainable": facts["trainable"],
            **arm.to_dict(),
        }
        if "flops" in facts:
            # While the reference computation is timed around each step, the peak is that of the same moment.
            unit = product_flops(REFERENCE_PRODUCTS) if arm.reference else peak
            row["gemm_peak_share"] = facts["flops"] / (median_of(arm.times) * unit)
            row["flops_ratio"] = facts["flops"] / first.facts["flops"] if "flops" in first.facts else None
        rows.append(row)
    return {"gemm_peak_flops": peak, "arms": rows}


def peak_flops(measured: dict[str, Measured]) -> float:
    """Return the FLOP/s of large matrix products on the machine: the median of all measurements of them."""
    if GEMM in measured:
        return measured[GEMM].facts["flops"] / measured[GEMM].median_seconds
    references = [turns for arm in measured.values() for turns in arm.reference]
    return product_flops(REFERENCE_PRODUCTS) / median_of(references)


# -- functions that the worker process of an arm calls ------------------------------------------------------


def build(spec: dict[str, Any]) -> Arm:
    """Return the arm that `spec` describes: matrix products only, or a training step with a method."""
    if spec["arm"] == GEMM:
        return Arm(products(GEMM_PRODUCTS, spec["device"]), {"flops": product_flops(GEMM_PRODUCTS)})
    import torch

    from oelm.compiled.products import speed_up_linear_layers
    from oelm.config.run_config import OptimConfig
    from oelm.cores import keep_freed_memory
    from oelm.methods.apply import apply
    from oelm.methods.method import Method
    from oelm.training.measure.flops import flop_model
    from oelm.training.optimizer import build_optimizer, clip_gradients

    keep_freed_memory()  # as in a run
    ids = token_batch(spec)
    model, loss_of = (_encoder if spec["size"] in ENCODERS else _gpt)(spec, ids)
    apply(model, Method.from_dict(spec["method"]), seed=spec["seed"])
    speed_up_linear_layers(model)  # as in a run
    optimizer = build_optimizer(model, OptimConfig())
    synchronize = torch.cuda.synchronize if spec["device"].startswith("cuda") else (lambda: None)

    gc.collect()
    gc.freeze()  # garbage collection skips the objects that exist now, as in a run

    def step() -> None:
        loss_of().backward()
        clip_gradients(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize()

    rows, length = ids.shape[0], ids.shape[1] - 1
    flops = flop_model(model)
    facts = {
        "method": spec["method"],
        "flops": flops.step(rows, length).total,
        **step_facts(model, ids),
    }
    return Arm(step, facts, training_bytes(model, optimizer))


def token_batch(spec: dict[str, Any]) -> Any:
    """Return random token ids of shape (batch, context + 1), the same for every arm."""
    import torch

    draw = torch.Generator().manual_seed(spec["seed"])
    ids = torch.randint(spec["vocabulary"], (spec["batch"], spec["context"] + 1), generator=draw)
    return ids.to(spec["device"])


def step_facts(model: Any, ids: Any) -> dict[str, int]:
    """Return the number of tokens in a step, and the parameter counts of the model."""
    return {
        "tokens": ids.shape[0] * (ids.shape[1] - 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def training_bytes(model: Any, optimizer: Any) -> Callable[[], dict[str, int]]:
    """Return a function that counts the bytes of gradients and optimizer state, and the peak GPU memory."""
    import torch

    def count() -> dict[str, int]:
        states = (
            v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
        )
        held = {
            "gradient_bytes": sum(p.nbytes for p in model.parameters() if p.requires_grad),
            "optimizer_bytes": sum(v.nbytes for v in states),
        }
        if torch.cuda.is_available() and next(model.parameters()).is_cuda:
            held["peak_bytes"] = torch.cuda.max_memory_allocated()
        return held

    return count


def _gpt(spec: dict[str, Any], ids: Any) -> tuple[Any, Callable[[], Any]]:
    import torch

    from oelm.models.gpt import GPT, gpt_config

    config = gpt_config(
        spec["size"], vocab_size=spec["vocabulary"], context=spec["context"], position=spec["position"]
    )
    model = GPT(config, torch.Generator().manual_seed(spec["seed"])).to(spec["device"])
    x, y = ids[:, :-1], ids[:, 1:]
    return model, lambda: model.loss(x, y)


def _encoder(spec: dict[str, Any], ids: Any) -> tuple[Any, Callable[[], Any]]:
    """Return an encoder with a classification head, and a function that computes its loss.

    Such a model has no LM head, so nearly all of its step time is spent in the transformer blocks, where the
    methods differ.
    """
    import torch

    from oelm.config.run_config import DataConfig, ModelConfig, RunConfig
    from oelm.training.build_model import build_model
    from oelm.training.tasks.classification import class_logits

    config = RunConfig(
        id="bench",
        study="bench",
        task="classification",
        data=DataConfig(dataset="", max_length=spec["context"]),
        model=ModelConfig("hf", spec["size"], pretrained=spec["size"] == "minilm", dropout=0.0),
        method=find_method("baseline"),
        seed=spec["seed"],
    )
    model: Any = build_model(config, vocab_size=spec["vocabulary"], classes=2, pad_id=0, eos_id=1)
    model.train().to(spec["device"])
    rows = ids[:, :-1] % model.config.vocab_size
    tensors = {"ids": rows, "lengths": torch.full((len(rows),), rows.shape[1], device=rows.device)}
    labels = torch.arange(len(rows), device=rows.device) % 2
    return model, lambda: torch.nn.functional.cross_entropy(class_logits(model, tensors), labels)
