"""A stub that replaces `oelm.training.fit` in processes started with this folder on PYTHONPATH.

It writes status, checkpoints and results like real training, resumes exactly, handles signals and takes
milliseconds. The ID of a run says what it does: BROKEN has bad data, CRASHES fails each time, FLAKY fails
once, DIVERGES diverges, KILLED is killed after it finished, WORSE has twice the perplexity of the others,
NOISY varies between seeds by 1 %, and DIVERGES-LATE diverges with seed 3 only.
"""

import contextlib
import hashlib
import json
import math
import os
import random
import signal
import sys
import time
import types
from dataclasses import replace
from pathlib import Path


def fit(config, path, machine):
    from oelm.errors import OelmError
    from oelm.files.atomic import write_json
    from oelm.runs.folder import RunFolder
    from oelm.runs.schema import (
        AuditRecord,
        Fairness,
        FreezeAudit,
        ParameterCounts,
        Results,
        Scores,
        Status,
        TimingStats,
    )
    from oelm.runs.states import EXIT_CODES
    from oelm.training.signals import describe_signal

    folder = RunFolder(path)
    before = folder.status()
    if before is not None and before.state == "diverged":
        return types.SimpleNamespace(state="diverged", exit_code=EXIT_CODES["diverged"], reason=before.reason)
    _claim_alone(folder.path)
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda number, _: asked.append(describe_signal(number)))
    attempt = before.attempt + 1 if before else 1
    status = Status(
        total_steps=config.budget.steps,
        pid=os.getpid(),
        host=os.uname().nodename,
        started=time.time(),
        attempt=attempt,
    )
    folder.write_status(status)

    def end(state, reason=""):
        folder.write_status(replace(status, state=state, reason=reason, step=step))
        (folder.path / "alone").unlink()
        return types.SimpleNamespace(state=state, exit_code=EXIT_CODES[state], reason=reason)

    from oelm.data.catalogue import dataset

    dataset(config.data.dataset)
    step = 0
    if "BROKEN" in config.id:
        (folder.path / "alone").unlink()
        raise OelmError("label -1 in row 7")
    if "CRASHES" in config.id:
        (folder.path / "alone").unlink()
        raise RuntimeError("device lost")
    if "FLAKY" in config.id and attempt == 1:
        (folder.path / "alone").unlink()
        raise RuntimeError("the network went away")
    state = (
        json.loads(folder.latest.read_text(encoding="utf-8"))
        if folder.latest.exists()
        else {"step": 0, "digest": config.id}
    )
    step, digest = state["step"], state["digest"]
    while step < config.budget.steps:
        time.sleep(float(os.environ.get("STUB_STEP_SECONDS", "0.02")))
        step += 1
        digest = hashlib.sha256(f"{digest} {config.seed} {step}".encode()).hexdigest()
        status = folder.write_status(replace(status, step=step, loss=1.0))
        late = "DIVERGES-LATE" in config.id and config.seed != 3
        if ("DIVERGES" in config.id and not late) or config.optim.lr > 1:
            return end("diverged", f"loss is nan at step {step}")
        write_json(folder.latest, {"step": step, "digest": digest})
        if asked:
            return end("interrupted", asked[0])
    loss = math.log(4 if "WORSE" in config.id else 2) + abs(config.optim.lr - 3e-3) + 1e-6 * config.seed
    if "NOISY" in config.id:
        loss += random.Random(f"{config.id} {config.seed}").gauss(0, 0.01)
    scores = Scores(loss, n=1, ppl=math.exp(loss))
    results = Results.of(
        config,
        metric="ppl",
        test=None if config.tune.trial else scores,
        validation=scores,
        parameters=ParameterCounts(1, 1, 0, 1, 1),
        steps=step,
        tokens_seen=step,
        checkpoint_bytes=1,
        stopped_early=False,
        fairness=Fairness() if "NOISY" in config.id else Fairness(data=digest),
    )
    folder.write(results)
    folder.write(FreezeAudit(end=AuditRecord(ok="UNSOUND" not in config.id)))
    folder.write(TimingStats(total_wall_time=10.0))
    folder.write_checksums()
    if "KILLED" in config.id:
        end("finished")
        os.kill(os.getpid(), signal.SIGKILL)
    return end("finished")


def _claim_alone(path: Path) -> None:
    """Create a file if another process works in the same folder."""
    from oelm.files.locks import process_alive

    mark = path / "alone"
    with contextlib.suppress(FileNotFoundError, ValueError):
        if process_alive(int(mark.read_text(encoding="utf-8"))):
            (path / "TWO AT ONCE").touch()
    mark.write_text(str(os.getpid()))
    with open(path / "starts", "a") as file:
        file.write(f"{os.getpid()}\n")


module = types.ModuleType("oelm.training.fit")
module.fit_claimed = fit
sys.modules["oelm.training.fit"] = module
