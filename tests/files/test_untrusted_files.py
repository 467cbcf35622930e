"""Reading a run or a model of someone else executes nothing and crashes nowhere."""

from __future__ import annotations

import ast
import json
import os
import shutil
from pathlib import Path

import pytest

import oelm
from oelm.cli.main import main
from oelm.errors import OelmError
from oelm.experiments.launch.attempts import read_attempts
from oelm.models.gpt import GPT, GPTConfig
from oelm.runs.lock import RunLock

SOURCE = Path(oelm.__file__).parent
DEEP = "[" * 100_000
YAML = 'id: "x"\nstudy: ' + DEEP


def calls() -> list[tuple[Path, ast.Call, str]]:
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found.append((path.relative_to(SOURCE), node, ast.unparse(node.func)))
    return found


def test_no_call_of_the_package_executes_what_a_file_says() -> None:
    for path, node, name in calls():
        options = {k.arg: ast.unparse(k.value) for k in node.keywords}
        place = f"{path}, line {node.lineno}: {name}"
        assert name not in ("eval", "exec", "os.system", "yaml.unsafe_load", "yaml.full_load"), place
        assert options.get("shell", "False") == "False", place
        assert options.get("allow_pickle", "False") == "False", place
        assert options.get("trust_remote_code", "False") == "False", place
        if name == "torch.load":
            assert options.get("weights_only") == "True", place
        if name == "yaml.load":
            assert path.as_posix() == "files/yaml.py", place
        if name.startswith("pickle.load"):  # between our own processes, through a pipe
            assert path.as_posix() == "data/tokenize/pool.py", place


@pytest.mark.parametrize(
    "words", [["analyze", "--runs", "runs"], ["generate", "run", "--prompt", "x"], ["train", "GPT-01"]]
)
def test_a_config_of_a_hundred_thousand_brackets_is_one_error(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "runs" / "paper" / "GPT-01" / "scale=smoke" / "seed=42"
    place.mkdir(parents=True)
    (place / "best").mkdir()
    (place / "config.yaml").write_text(YAML)
    (tmp_path / "run").symlink_to(place)
    code = main([*words, *(["--scale", "smoke", "--seed", "42"] if words[0] == "train" else [])])
    printed = capsys.readouterr()
    assert "nested deeper than 50 levels" in printed.out + printed.err
    assert code == {"analyze": 0, "generate": 2, "train": 1}[words[0]]  # analyze names the folder, goes on


@pytest.mark.parametrize("name", ["oelm.json", "config.json", "model.safetensors"])
@pytest.mark.parametrize(
    "content", [DEEP, '{"a": ' * 3000, "\x00\xff", "{}", "[]", "null", '{"format": NaN}']
)
def test_a_hostile_model_folder_is_one_error(
    name: str, content: str, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / name).write_text(content, encoding="latin-1")
    with pytest.raises(OelmError, match="model"):
        oelm.load(folder)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = GPT(GPTConfig(vocab_size=8, context=8, width=8, layers=1, heads=2, ff=8))
    oelm.apply(model, "oelm-freeze", seed=0)
    oelm.save(model, folder)
    return folder


def test_a_class_of_another_package_is_never_imported(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    about = json.loads((folder / "oelm.json").read_text())
    for named in ("os:system", "antigravity:x", "oelm.cli.main:main", "transformers.utils:logging"):
        (folder / "oelm.json").write_text(json.dumps({**about, "model_class": named}))
        with pytest.raises(OelmError):
            oelm.load(folder)


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), RunLock(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


def test_named_pipes_in_a_run_folder_do_not_hang_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "s" / "X" / "scale=mini" / "seed=0"
    place.mkdir(parents=True)
    for name in ("config.yaml", "status.json", "lock", "training.log", "console.log", "results.json"):
        os.mkfifo(place / name)
    for words in (["status"], ["analyze"]):
        main([*words, "--runs", str(tmp_path)])
        assert "not a regular file" in capsys.readouterr().out
    main(["monitor", "--once", "--runs", str(tmp_path)])
    assert "BROKEN" in capsys.readouterr().out


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path)
    place = tmp_path / "s" / "X" / "scale=mini"
    place.mkdir(parents=True)
    (place / "seed=0").symlink_to(place)
    (place / "seed=1").symlink_to(place / "seed=1")
    for words in (["status"], ["analyze"]):
        assert main([*words, "--runs", str(tmp_path)]) in (0, 1)


def test_a_broken_list_of_attempts_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "attempts.jsonl").write_text('{"exit_code": 0}\n' + DEEP + "\n")
    with pytest.raises(OelmError, match="line 2"):
        read_attempts(tmp_path)
