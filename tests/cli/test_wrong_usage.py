"""Wrong command lines of every command: one line on stderr, exit code 2, no traceback, no files written.

The names that an error suggests are tested in test_commands.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from oelm.cli.main import COMMANDS, main

WRONG = """
runn
Run GPT-01
--nonsense
list GPT-01
list --phase
list --phase=
list --study gap --study paper
list --phase 0
list --phase 1-9
list --phase 4-1
list --phase papers
list --study paper --phase 9
list --catalogue nowhere.py
show
show GPT-1
show GPT-01 GPT-02
show GPT-01 --seed -1
show GPT-01 --seed 1.5
show GPT-01 --set
show GPT-01 --set lr
show GPT-01 --set lr=1
show GPT-01 --set optim.lr=fast
show GPT-01 --set seed=1
show GPT-01 --set method=oelm-frieze
show GPT-01 --set method.layers=-1 --set method.freeze=all-but-last
show GPT-01 --set model.position=rotary
show GPT-01 --scale tiny
show GPT-01 --scale mini --data-dir nowhere
show GPT-01 --scale mini --data-dir file
diff GPT-01
diff GPT-01 GPT-0X
diff GPT-01 GPT-02 --data-dir nowhere
methods oelm-freeze
doctor GPT-1
doctor --phase 12
doctor GPT-01 --seeds one
data
data lst
data List
list --phase 1 --json --Study
data list --data-dir nowhere
data check
data prepare
data check tinystorys
data check stories --variant en
data check xnli --variant xx
data check stories --source nowhere
data check stories --data-dir nowhere
data check tinystories --source builtin --data-dir nowhere
data check ./nowhere
data check file:nowhere.jsonl
data check tinystories --data-dir .
data prepare stories --tokenizer gtp2
data prepare stories --cache-dir file
train
train GPT-1
train GPT-01 --scale minni
train GPT-01 --scale smoke --seeds 1
train GPT-01 --scale smoke --device cuda:99
train GPT-01 --scale smoke --device gpu0
train GPT-01 --scale smoke --threads -1
train GPT-01 --scale smoke --track tensorbord
train GPT-01 --scale smoke --cache-dir file
train GPT-01 --scale smoke --cache-dir file/below
train GPT-01 --scale smoke --runs file
train GPT-01 --scale smoke --lr 1e-3
train GPT-01 --scale smoke --time-limit 5x
train GPT-01 --scale mini --data-dir .
run NOPE
run GPT-01 --phase 2
run --phase 1 --all
run --phase GPT-01
run --study gap --all
run GPT-01 --seeds
run GPT-01 --seeds x
run GPT-01 --seeds 3-1
run GPT-01 --seeds -3
run GPT-01 --scale smoke mimi
run GPT-01 --grid fast --tune
run GPT-01 --tune --grid 0 --dry-run
run GPT-01 --gpus 0,0
run GPT-01 --gpus first
run GPT-01 --gpus 97
run GPT-01 --gpus-per-run 0
run GPT-01 --gpus none --device cuda
run GPT-01 --on slurm --gpus none --gpus-per-run 4 --dry-run
run GPT-01 --tune --seeds 0 1 --trial-seeds 1 2 --dry-run
run GPT-01 --slots -1
run GPT-01 --scale smoke --slots -1 --dry-run
run GPT-01 --threads x
run GPT-01 --retries many
run GPT-01 --device cuda:99
run GPT-01 --cache-dir file --dry-run
run GPT-01 --runs file --dry-run
run GPT-04 --scale mini --data-dir . --dry-run
run GPT-04 --data-dir . --dry-run
run GPT-01 --track nothing --dry-run
run GPT-01 --learning-rate 1
run GPT-01 --on k8s
run GPT-01 --on slurm --time 0
run GPT-01 --on slurm --time 99999999d
run GPT-01 --pilot-factor -1 --pilot
status --study nowhere
status --scale huge
status --runs=
train GPT-01 --runs=
show GPT-01 --set=
analyze nowhere --runs .
analyze --phase 9
analyze gap --phase 2
analyze --benchmarks nowhere
report --lang de
report --phase x
report -o .
report --benchmarks nowhere
demo --scale huge
demo --seeds a
demo --lang fr
demo --data-dir .
demo --runs file
demo --cache-dir file
bench nonsense
bench --batch 0
bench --size enormous
bench --output .
archive pack .
archive verify .
bench --device tpu
generate
export
probe
clean --study nowhere
archive pack
archive nonsense
archive pack x.tar.gz --runs nowhere
archive pack x.tar.gz --runs file
archive pack x.tar.gz --runs . --study nowhere
archive keep results --runs nowhere
archive keep results --runs . --study nowhere
status --runs file
board --runs file --port 0
generate GPT-01 --prompt a --runs file
generate GPT-01 --prompt a --tokens -1
generate GPT-01 --prompt a --sample-seed -1
archive merge x.tar.gz --runs file
""".strip().splitlines()


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    code = main(line.split())
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1), error
    assert error.startswith("oelm: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(("command", "flag"), itertools.product(COMMANDS, ["--no-such-flag", "-q"]))
def test_every_command_refuses_unknown_flags(
    command: str,
    flag: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main([command, flag])
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("oelm: ")
    assert list(tmp_path.iterdir()) == []
