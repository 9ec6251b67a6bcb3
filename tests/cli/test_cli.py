"""The command line: exit codes, one error line, what goes where, and that --help costs nothing."""

import io
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from layerferry import cli, errors
from layerferry.version import VERSION

GOLDENS = Path(__file__).parents[1] / "goldens" / "data"
RUN = ["model_name_or_path=m", "finetuning_type=full", "dataset=d", "bf16=true"]


def program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "layerferry", *arguments], capture_output=True, text=True, check=False, **options
    )


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    fake = ModuleType(module)
    for name, value in names.items():
        setattr(fake, name, value)
    monkeypatch.setitem(sys.modules, module, fake)


def report(**facts: Any) -> SimpleNamespace:
    return SimpleNamespace(render=lambda: "a table", to_dict=lambda: {"fact": 1}, **facts)


def raises(error: BaseException) -> Any:
    def function(*_: Any) -> None:
        raise error

    return function


def test_help_answers_within_0_3_seconds() -> None:
    walls = []
    for _ in range(5):
        start = time.perf_counter()
        answer = program("--help")
        walls.append(time.perf_counter() - start)
        assert answer.returncode == 0 and "train" in answer.stdout and answer.stderr == ""
    assert min(walls) < 0.3, walls


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from layerferry.cli import main\ntry: main(['-h'])\nfinally: print(*sys.modules, file=sys.stderr)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "layerferry.cli" in answer.stderr
    loaded = {name.split(".")[0] for name in answer.stderr.split()}
    assert not loaded & {"torch", "transformers", "numpy", "omegaconf", "yaml", "matplotlib", "datasets"}


@pytest.mark.parametrize("command", ["train", "plan", "verify", "probe", "data", "chat", "export", "version", "env"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    assert f"usage: layerferry {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.LayerFerryError("the result\nis wrong"), 1),
        (errors.ConfigError("a.yaml:3: seed: wrong"), 2),
        (errors.DataError("d.jsonl:7: malformed"), 2),
        (errors.CheckpointError("shard missing"), 2),
        (errors.PlanError("needs 3 GiB"), 3),
        (errors.ModelRefused("shared state"), 4),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: errors.LayerFerryError, code: int
) -> None:
    stand_in(monkeypatch, "layerferry.trainer", train=raises(error))
    assert cli.main(["train", *RUN]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line for line in printed.err.splitlines() if line.startswith("error: ")] == [f"error: {' '.join(str(error).split())}"]
    assert "Traceback" not in printed.err


def test_debug_shows_the_traceback_and_keeps_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "layerferry.trainer", train=raises(errors.PlanError("no")))
    monkeypatch.setenv("LAYERFERRY_DEBUG", "1")
    assert cli.main(["train", *RUN]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "layerferry.trainer", train=raises(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", *RUN])


def test_a_file_that_the_system_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(monkeypatch, "layerferry.trainer", train=raises(OSError(28, "No space left on device", "/out/x")))
    assert cli.main(["train", *RUN]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: /out/x: No space left on device (LAYERFERRY_DEBUG=1 shows where)"


def test_an_address_space_that_is_too_small_is_one_line() -> None:
    """Found before the libraries are imported, which would end in any way there is."""
    small = 1 << 30
    done = program("train", *RUN, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (small, small)))
    assert done.returncode == 3 and done.stdout == "" and done.stderr.count("\n") == 1
    line = r"error: RLIMIT_AS \(ulimit -v\) leaves 0\.9\d GiB of address space, .*: `ulimit -v unlimited` lifts RLIMIT_AS$"
    assert re.match(line, done.stderr)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread"), OSError(12, "Cannot allocate memory")])
def test_a_limit_that_is_reached_later_is_named_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    stand_in(monkeypatch, "layerferry.trainer", train=raises(error))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 40, 1 << 40))
    assert cli.main(["train", *RUN]) == 3
    assert "error: out of address space: RLIMIT_AS (ulimit -v) is 1024.0 GiB: `ulimit" in capsys.readouterr().err
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if isinstance(error, OSError):
        assert cli.main(["train", *RUN]) == 1
    elif isinstance(error, MemoryError):
        assert cli.main(["train", *RUN]) == 3
        assert "error: the system has given this process no more memory: `layerferry plan`" in capsys.readouterr().err
    else:
        with pytest.raises(type(error)):
            cli.main(["train", *RUN])


def test_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "layerferry.trainer", train=raises(KeyboardInterrupt()))
    assert cli.main(["train", *RUN]) == 130


def test_settings_win_over_the_file_in_all_their_forms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    stand_in(monkeypatch, "layerferry.trainer", train=seen.append)
    path = tmp_path / "a=b.yaml"
    path.write_text("model_name_or_path: m\nfinetuning_type: full\ndataset: d\nseed: 1\n", encoding="utf-8")
    arguments = ["train", "--plot_loss", "--learning_rate", "1e-6", str(path), "seed=7", "--run_name=x", "--do_eval", "false"]
    assert cli.main(arguments) == 0
    (config,) = seen
    assert (config.train.seed, config.optim.learning_rate, config.train.run_name) == (7, 1e-6, "x")
    assert config.train.plot_loss and not config.train.do_eval


def test_what_is_replaced_is_logged_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "layerferry.trainer", train=lambda config: None)
    assert cli.main(["train", *RUN, "deepspeed=no/such/file.json"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("deepspeed: host-streaming engine replaces ZeRO; key ignored\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train", "no.yaml"], "no.yaml: cannot read"),
        (["train", "a.yaml", "b.yaml"], "'b.yaml' is neither key=value nor the one configuration file (a.yaml)"),
        (["train", *RUN, "learning_rte=1"], "did you mean 'learning_rate'?"),
        (["verify"], "expected one argument, MODEL_DIR"),
        (["verify", "a", "b"], "expected one argument, MODEL_DIR"),
        (["probe", "x"], "unexpected argument 'x'"),
        (["data", "--samples", "x"], "--samples"),
        (["data", *RUN, "--samples", "-1"], "--samples: expected at least 1, found -1"),
        (["train"], "no configuration: give a file or key=value settings (see layerferry train --help)"),
        (["plan", "--json"], "no configuration"),
        (["train", *RUN, "seed=-1"], "seed: expected at least 0 and at most 4294967295, found -1"),
        (["train", *RUN, "data_seed=4294967296"], "data_seed: expected at least 0 and at most 4294967295"),
        (["chat", "no/such/folder"], "model_name_or_path: no/such/folder: no such folder"),
    ],
)
def test_a_wrong_command_line_is_a_user_error(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0]


def test_plan_prints_its_table_and_then_says_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = report(fits=True)
    stand_in(monkeypatch, "layerferry.planner", plan_for=lambda config: plan)
    assert cli.main(["plan", *RUN]) == 0 and capsys.readouterr().out == "a table\n"
    assert cli.main(["plan", *RUN, "--json"]) == 0 and json.loads(capsys.readouterr().out) == {"fact": 1}
    plan.fits, plan.shortfall = False, lambda: "needs 3 GiB @host, 2 free"
    assert cli.main(["plan", *RUN]) == 3
    printed = capsys.readouterr()
    assert printed.out == "a table\n" and printed.err.endswith("error: needs 3 GiB @host, 2 free\n")


def test_verify_and_probe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = report(ok=True)
    stand_in(monkeypatch, "layerferry.verify", verify=lambda folder: result)
    probed: list[str | None] = []
    stand_in(monkeypatch, "layerferry.planner", probe=lambda engine: probed.append(engine.disk_folder) or report())
    assert cli.main(["verify", "folder"]) == 0
    result.ok = False
    assert cli.main(["verify", "folder", "--json"]) == 1
    assert cli.main(["probe", "--json"]) == 0
    assert cli.main(["probe", "--disk", "folder", "--json"]) == 0
    assert probed == [None, "folder"]
    assert capsys.readouterr().out == 'a table\n{"fact": 1}\n{"fact": 1}\n{"fact": 1}\n'


@pytest.fixture
def data_run(tmp_path: Path) -> list[str]:
    rows = tmp_path / "rows.jsonl"
    texts = [{"prompt": "Who are you?", "completion": "A ferry."}, {"prompt": "And now?", "completion": "Across."}]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    return [
        f"model_name_or_path={GOLDENS / 'tokenizer'}",
        "finetuning_type=full",
        f"dataset={rows}",
        "template=auto",
        "bf16=true",
    ]


def test_data_prints_json_lines_and_nothing_else(data_run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", *data_run, "--json"]) == 0
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(samples) == 2
    for sample in samples:
        assert set(sample) == {"input_ids", "labels"} and len(sample["input_ids"]) == len(sample["labels"])
        assert {-100} < set(sample["labels"])


def test_data_shows_trained_tokens(data_run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", *data_run, "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "⟦A ferry." in shown and "Across" not in shown


def test_version_and_env() -> None:
    assert program("version").stdout == f"layerferry {VERSION}\n" == program("--version").stdout
    answer = program("env")
    assert answer.returncode == 0 and f"layerferry: {VERSION}\n" in answer.stdout and "torch: 2." in answer.stdout


def test_a_standard_error_that_has_gone_away_keeps_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    stand_in(monkeypatch, "layerferry.trainer", train=raises(errors.Interrupted("SIGHUP", signal_number=1)))
    monkeypatch.setattr(sys, "stderr", Gone())
    assert cli.main(["train", *RUN]) == 129


def test_closed_streams_lead_nowhere() -> None:
    """The code is that of the command, and no file that is opened later gets the number of a stream."""
    code = (
        "import os, sys\n"
        "from layerferry.cli import main\n"
        "done = main(['version'])\n"
        "sys.exit(done or os.open(os.devnull, os.O_RDONLY) <= 2)\n"
    )
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, preexec_fn=lambda: os.closerange(0, 3), check=False)
    assert answer.returncode == 0


def test_a_reader_that_leaves_is_no_fault() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    answer = subprocess.run(
        [sys.executable, "-m", "layerferry", "env"], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write_end)
    assert answer.returncode == 1 and answer.stderr == ""
