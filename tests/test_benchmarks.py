"""Every benchmark runs at a tiny size on the CPU, its rows have the fields that benchmarks/README.md promises, and what it
compares is the same thing: the baseline takes the engine's step, the two heads have one loss, the formula is the planner's."""

from __future__ import annotations

import importlib
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import layerferry
from layerferry.backends.cpu import CpuBackend
from layerferry.engine.tape import Handle
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import EXP_AVG
from layerferry.plan import GIB, Plan
from layerferry.planner.flops import flops_per_token

FOLDER = Path(__file__).parents[1] / "benchmarks"
STEP = ["--rows", "2", "--row-tokens", "16", "--micro-batch-rows", "1", "--steps", "2", "--warmup", "1"]
SWEEP = ["--tokens", "32", "--row-tokens", "16", "--micro-batch-tokens", "16", "--steps", "1", "--warmup", "0"]
PUBLISHED_PARAMS = {
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs find each other in their own folder, as when they are run."""
    monkeypatch.syspath_prepend(str(FOLDER))


def program(name: str) -> Any:
    return importlib.import_module(name)


def rows_of(name: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    program(name).main(argv)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# ---------------------------------------------------------------- rows


def test_packed_rows_are_full_of_samples_that_end_where_positions_restart() -> None:
    torch.manual_seed(0)
    batches = program("rows").packed_batches(rows=24, row_tokens=1024, micro_batch_rows=16, vocab_size=99, sample_tokens=250)
    assert [one.input_ids.shape for one in batches] == [(16, 1024), (8, 1024)] and all(one.isolated for one in batches)
    real = sum(one.num_tokens for one in batches)
    assert real > 0.97 * 24 * 1024
    starts = sum(
        int((row[: int(used)] == 0).sum()) for one in batches for row, used in zip(one.position_ids, one.lengths, strict=True)
    )
    assert 150 < real / starts < 350
    assert sum(one.num_targets for one in batches) == real - starts


@pytest.mark.parametrize(
    ("name", "argv", "cases"),
    [
        ("step", [*STEP, "--variants", "num_slots=1,case=one;layers=2,settle=1,case=two"], 3),
        ("step", [*STEP, "--auto", "1", "--case", "auto"], 1),
        ("step", [*STEP, "--richer-layers", "1", "--activation-budget", "0", "--case", "richer"], 1),
        ("step", [*STEP, "--host-inputs", "1", "--mlp-chunk-tokens", "8", "--split-from", "16", "--case", "long"], 1),
        ("resident", STEP, 1),
        ("sweep", ["length", "--at", "8,16", *SWEEP], 2),
        ("sweep", ["depth", "--at", "1,2", *SWEEP], 2),
        ("sweep", ["width", "--at", "1,1.5", *SWEEP], 2),
        ("sweep", ["ablation", *SWEEP], 10),
    ],
)
def test_rows_of_whole_steps(name: str, argv: list[str], cases: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows_of(name, [*argv, "--device", "cpu", "--commit", "abc1234"], capsys)
    assert len({row["case"] for row in found}) == len(found) == cases
    for row in found:
        assert set(program("rows").STEP_FIELDS) <= set(row)
        assert row["commit"] == "abc1234" and row["tokens_per_step"] == 32
        assert row["tokens_per_s"] == pytest.approx(32 / row["step_s"], rel=0.01)
        assert row["model_tflops"] > 0 and row["step_s"] > 0
        if name != "resident":
            assert row["predicted_step_s"] > 0 and row["predicted_device_gib"] > 0, "a plan without a prediction"


@pytest.mark.parametrize(
    ("name", "argv", "fields", "cases"),
    [
        ("link", ["--chunk-mib", "0.5,1", "--total-mib", "1", "--repeats", "1"], {"way", "pinned", "chunk_mib"}, 12),
        ("layer", ["--row-tokens", "16", "--repeats", "1"], {"model_tflops", "kept_bytes_per_token"}, 2),
        ("head", ["--row-tokens", "16", "--repeats", "1"], {"model_tflops", "call_peak_gib", "path"}, 4),
        ("attention", ["--row-tokens", "16,32", "--repeats", "1"], {"kernel", "forward_tflops", "backward_tflops"}, 2),
        ("adamw", ["--params", "1e5", "--repeats", "1", "--threads", str(torch.get_num_threads())], {"gb_per_s"}, 2),
        ("adamw", ["--params", "1e5", "--repeats", "1", "--format", "adamw_8bit,sgd,muon"], {"gb_per_s"}, 6),
        ("pages", ["--params", "1e6", "--repeats", "1", "--threads", str(torch.get_num_threads())], {"resident_share"}, 3),
    ],
)
def test_rows_of_parts(name: str, argv: list[str], fields: set[str], cases: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows_of(name, [*argv, "--device", "cpu"], capsys)
    assert len({row["case"] for row in found}) == len(found) == cases
    for row in found:
        assert {"benchmark", *program("rows").COMMON_FIELDS, *fields} <= set(row)


def test_each_way_of_the_link_has_its_rates(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--chunk-mib", "1", "--total-mib", "1", "--repeats", "1", "--device", "cpu"]
    rates = {row["way"]: {key for key in row if key.endswith("gb_per_s")} for row in rows_of("link", argv, capsys)}
    up, down = "upload_gb_per_s", "download_gb_per_s"
    assert rates == {"upload": {up}, "download": {down}, "together": {up, down}}


def test_what_is_given_of_a_plan_is_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*STEP, "--device", "cpu", "--auto", "1", "--num-slots", "1", "--points", "case=pinned;case=free,num_slots="]
    pinned, free = rows_of("step", argv, capsys)
    assert (pinned["plan"]["num_slots"], pinned["planned_by"]) == (1, "planner") and free["plan"]["num_slots"] > 1


def test_long_rows_say_how_much_of_a_step_is_attention(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*STEP, "--device", "cpu", "--host-inputs", "1"]
    [row] = rows_of("step", [*argv, "--split-from", "16"], capsys)
    assert row["attention_s"] > 0 and row["attention_s"] + row["rest_s"] == pytest.approx(row["step_s"], abs=2e-3)
    assert row["kept_inputs_gib"] >= 0 and row["plan"]["host_inputs"] == 1
    [row] = rows_of("step", argv, capsys)
    assert "attention_s" not in row


@pytest.mark.parametrize("auto", [0, 1])
def test_rows_with_state_on_the_disk_say_what_it_moved(auto: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps behind the warm-up read and write the state of every unit there once; planned and moved bytes are the same."""
    argv = [*STEP, "--warmup", "2", "--steps", "3", "--device", "cpu", "--disk-folder", str(tmp_path), "--disk-memory", "0.1"]
    [row] = rows_of("step", [*argv, "--disk-units", "99" if auto else "4", "--auto", str(auto)], capsys)
    assert row["plan"]["on_disk"] == ([0, 1, 2, 3, 4, 5] if auto else [1, 2, 3, 4])
    assert row["predicted_step_s"] >= row["predicted_disk_s"] > 0 and row["disk_busy_s"] > 0 and min(row["disk_gb_per_s"]) > 0
    for moved in ("disk_read_gb", "disk_written_gb"):
        assert row[moved] == pytest.approx(row["disk_gib"] * GIB / 1e9, rel=0.5)
    assert not list(tmp_path.iterdir())


def test_a_step_is_drawn_and_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline, profile = tmp_path / "lanes", tmp_path / "profile.txt"
    rows_of("step", [*STEP, "--device", "cpu", "--timeline", str(timeline), "--profile", str(profile)], capsys)
    events = json.loads((timeline / "timeline.json").read_text())["traceEvents"]
    assert {"compute", "upload"} <= {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert (timeline / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "aten::mm" in profile.read_text()


def test_a_run_that_broke_off_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "head.jsonl"
    argv = ["--row-tokens", "16", "--repeats", "1", "--device", "cpu", "--out", str(out), "--resume"]
    first = rows_of("head", [*argv, "--chunk-tokens", "8", "--commit", "a"], capsys)
    more = rows_of("head", [*argv, "--chunk-tokens", "8,16", "--commit", "a"], capsys)
    assert [row["chunk_tokens"] for row in first] == [8, 8] and [row["chunk_tokens"] for row in more] == [16, 16]
    assert [json.loads(line) for line in out.read_text().splitlines()] == first + more
    assert len(rows_of("head", [*argv, "--chunk-tokens", "8", "--commit", "b"], capsys)) == 2


# ---------------------------------------------------------------- what is compared is the same


def test_the_formula_is_the_planners(capsys: pytest.CaptureFixture[str]) -> None:
    scratch, shapes = program("scratch"), program("shapes")
    shape = shapes.SHAPES["qwen2.5-7b"]
    d, f, v, depth = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"], shape["num_hidden_layers"]
    kv = d * shape["num_key_value_heads"] // shape["num_attention_heads"]
    matmul = depth * (2 * d * d + 2 * d * kv + 3 * d * f) + v * d
    a_token = 6 * matmul + 6 * depth * d * 1024
    skeleton = scratch.skeleton_of("qwen2.5-7b", CpuBackend(), layers=depth)
    assert flops_per_token(skeleton, 1024) == a_token
    assert f"{a_token * 131072 / 1e12:,.0f} TFLOP" in " ".join((FOLDER / "README.md").read_text().split())
    [row] = rows_of("step", [*STEP, "--device", "cpu"], capsys)
    small = scratch.skeleton_of("tiny", CpuBackend(), layers=4)
    assert row["model_tflops"] * row["step_s"] * 1e12 == pytest.approx(flops_per_token(small, 16) * 32, rel=0.01)


def test_shapes_are_the_published_ones() -> None:
    shapes = program("shapes")
    assert set(PUBLISHED_PARAMS) == set(shapes.SHAPES) - {"tiny"}
    for name, count in PUBLISHED_PARAMS.items():
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(shapes.config_of(name), dtype=torch.bfloat16)
        assert sum(parameter.numel() for parameter in model.parameters()) == count, name


def test_a_width_that_cuts_a_head_is_refused() -> None:
    with pytest.raises(SystemExit, match="num_attention_heads"):
        program("shapes").config_of("qwen2.5-7b", width=1.125)


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_baseline_takes_the_engines_step(gradients: str, tied: bool) -> None:
    """The same loss, norm, first moment (a tenth of the clipped gradient) and update, up to gradients of bf16 that are summed
    and rounded in another order: eps is 2^-8, and a few of them add up along two layers. Adam's first update is lr times a
    sign, so an element that differs at all has a gradient near zero: there are few."""
    from transformers import AutoModelForCausalLM

    config = program("shapes").config_of("tiny", layers=2)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    before = {name: value.detach().float().clone() for name, value in model.named_parameters()}
    batches = program("rows").random_batches(rows=4, row_tokens=16, micro_batch_rows=2, vocab_size=config.vocab_size)
    lr = 1e-3
    plan = Plan(micro_batch_rows=2, row_tokens=16, rows_per_step=4)
    optimizer = AdamW(weight_decay=0.01)
    engine = layerferry.load(model, plan=plan, optimizer=optimizer, backend=CpuBackend(), row_tokens=16)
    report = engine.step(batches, lr=lr)
    engine.settle()
    resident = program("resident").Resident(model, CpuBackend(), gradients=gradients, chunk_tokens=16, budget=1.0, compiled=False)
    loss, norm = resident.step(batches, lr=lr)
    assert loss == pytest.approx(report.loss, rel=1e-4)
    assert norm == pytest.approx(report.grad_norm, rel=1e-2)
    names = [name for name, _ in model.named_parameters()]
    theirs = dict(zip(names, resident.masters, strict=True))
    for unit in engine.store.units:
        for entry in unit.layout.entries:
            name = unit.names[entry.name]
            ours = engine.store.master(unit, entry) - before[name]
            moment = engine.store.plane(unit, EXP_AVG).view(entry)
            error = resident.optimizer.state[theirs[name]]["exp_avg"] - moment
            assert error.norm() <= 4 * torch.finfo(torch.bfloat16).eps * moment.norm(), name
            assert ours.abs().max() > 0, f"{name} did not move"
            far = (ours - (theirs[name].detach() - before[name])).abs() > 0.1 * lr
            assert far.float().mean() < 0.02, name
    engine.close()


def test_both_heads_have_one_loss(capsys: pytest.CaptureFixture[str]) -> None:
    losses = [row["loss"] for row in rows_of("head", ["--row-tokens", "16", "--repeats", "1", "--device", "cpu"], capsys)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)


def test_the_layer_reads_its_weights_in_another_slot() -> None:
    """Whatever is kept, the same gradients; and what is kept are handles, resolved in the second slot."""
    layer, scratch = program("layer"), program("scratch")
    found = []
    for budget in (0.0, 1.0):
        torch.manual_seed(0)
        skeleton = scratch.skeleton_of("tiny", CpuBackend())
        plan = Plan(micro_batch_rows=2, row_tokens=16, activation_budget=budget)
        own = layer.Layer(skeleton, CpuBackend(), plan, micro_batches=3)
        own.forward()
        assert budget < 1.0 or own._tape.num_handles[own._unit.index] > 0, f"no {Handle.__name__}"
        own._slots[0].buffer.fill_(255)  # NaN
        own.backward()
        found.append(own.sums.buffer.clone())
    assert torch.equal(*found)
    assert found[0].view(torch.float32).isfinite().all() and found[0].view(torch.float32).abs().sum() > 0


# ---------------------------------------------------------------- the list of all


def test_every_command_of_the_list_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = subprocess.run(["bash", str(FOLDER / "all.sh"), "--list"], capture_output=True, text=True, check=True).stdout
    step = program("step")
    lines = [line.split(" min ") for line in listed.splitlines()]
    assert len({head.split()[0] for head, _ in lines}) == len(lines) > 10
    for _, command in lines:
        name, *argv = shlex.split(command)
        if name == "sweep.py":
            passed: list[list[str]] = []
            with monkeypatch.context() as patch:
                patch.setattr(step, "main", passed.append)
                program("sweep").main(argv)
            [argv], name = passed, "step.py"
        args = program(name.removesuffix(".py")).parser().parse_args(argv)
        if name == "step.py":
            assert all(vars(one).keys() == vars(args).keys() for one in step.variants(args)), command


def test_curves_of_formats_beside_plain_autograd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp32 compute and an fp32 master, the engine's curve is plain autograd's up to the rounding of sums; 8 bits stay near."""
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged, that a single man in possession of a good fortune " * 40)
    argv = ["--shape", "tiny", "--text", str(text), "--steps", "12", "--rows", "4", "--micro-batch-rows", "2"]
    argv += ["--row-tokens", "32", "--formats", "plain-bf16,adamw_torch,adamw_8bit,sgd", "--fp32"]
    argv += ["--plot", str(tmp_path / "curves.png"), "--device", "cpu", "--out", str(tmp_path / "curves.jsonl")]
    baseline, rounded, same, lean, sgd = rows_of("curves", argv, capsys)
    assert baseline["format"] == "plain-fp32" and baseline["gap"] == 0.0 and baseline["final_loss"] < baseline["first_loss"]
    assert abs(same["gap"]) < 1e-5 and max(abs(a - b) for a, b in zip(same["losses"], baseline["losses"], strict=True)) < 2e-3
    assert abs(rounded["gap"]) < 0.02 and rounded["losses"] != baseline["losses"] and rounded["compute"] == "bf16"
    assert abs(lean["gap"]) < 0.02 and lean["losses"] != same["losses"]
    assert sgd["first_loss"] == same["first_loss"] and sgd["losses"] != same["losses"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    again = [*argv, "--formats", "sgd", "--baseline", str(tmp_path / "curves.jsonl")]
    (found,) = rows_of("curves", again, capsys)
    assert (found["losses"], found["gap"]) == (sgd["losses"], pytest.approx(sgd["gap"], abs=1e-4))
    with pytest.raises(SystemExit, match="no tiny-plain-fp32 of these steps, tokens and rate"):
        program("curves").main([*again, "--steps", "13"])


def test_the_gap_of_curves_is_measured_over_the_last_steps() -> None:
    """Oracle: a curve 1 % above the other from step 50 on, without noise; a constant and a noisy difference."""
    curves = program("curves")
    baseline = [3.0] * 60
    share, noise = curves.gap([9.0] * 50 + [3.03] * 10, baseline)
    assert share == pytest.approx(0.01) and noise == pytest.approx(0.0, abs=1e-12)
    _, noise = curves.gap([3.0 + 0.3 * (-1) ** step for step in range(60)], baseline)
    assert noise == pytest.approx(2 * 0.3 * (10 / 9) ** 0.5 / 10**0.5 / 3.0)


@pytest.mark.parametrize(
    "name", ["step", "sweep", "resident", "layer", "head", "link", "adamw", "pages", "curves", "save", "kill_resume"]
)
def test_help_explains_itself(name: str) -> None:
    text = program(name).parser().format_help()
    assert f"python benchmarks/{name}.py" in text, "no example"
    assert sys.modules[name].__file__ == str(FOLDER / f"{name}.py")


# ---------------------------------------------------------------- killed runs


def test_a_killed_run_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    """Two kills, the second inside a save, and no difference."""
    sizes = "--model tiny --layers 1 --vocab 1500 --home 1 --row-tokens 16 --rows 2 --micro-batch-rows 1"
    command = [
        *(sys.executable, str(FOLDER / "kill_resume.py"), "--device", "cpu", "--work", str(tmp_path / "work"), *sizes.split()),
        *("--steps", "60", "--save-steps", "2", "--kills", "2"),
    ]
    done = subprocess.run([*command, "--seconds", "110"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["largest_difference"] == 0 and row["same_weights"] and len(row["kills"]) == 2 and len(row["resumed_from"]) >= 2
    assert row["first_loss"] > row["last_loss"]


def test_a_killed_run_that_is_out_of_time_goes_on(tmp_path: Path) -> None:
    """The same command takes up what was done; other settings begin anew."""
    kill_resume = program("kill_resume")
    argv = ["--model", "tiny", "--layers", "1", "--vocab", "64", "--work", str(tmp_path / "work")]
    course = kill_resume.Course(kill_resume.parser().parse_args(argv))
    course.kills.append("at step 7")
    course.keep()
    rows = (tmp_path / "work" / "rows.jsonl").stat().st_ino
    assert kill_resume.Course(kill_resume.parser().parse_args([*argv, "--seconds", "5"])).kills == ["at step 7"]
    assert (tmp_path / "work" / "rows.jsonl").stat().st_ino == rows
    assert kill_resume.Course(kill_resume.parser().parse_args([*argv, "--steps", "50"])).kills == []
    course = kill_resume.Course(kill_resume.parser().parse_args([*argv, "--seconds", "0"]))

    class Living:
        killed = False

        def has_ended(self) -> bool:
            return False

        def kill(self) -> None:
            self.killed = True

    child = Living()
    with pytest.raises(kill_resume.NotDone, match="waiting for a save: the same command goes on"):
        course.wait(child, lambda: False, "a save")
    assert child.killed


def test_who_is_told_to_end_writes_the_row_of_the_steps_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, begun = program("counted"), []
    batches_for = counted.batches_for

    def third_time_lucky(*arguments: Any) -> Any:
        begun.append(1)
        if len(begun) == 3:
            signal.raise_signal(signal.SIGTERM)
        return batches_for(*arguments)

    monkeypatch.setattr(counted, "batches_for", third_time_lucky)
    before = signal.getsignal(signal.SIGTERM)
    (row,) = rows_of("step", ["--device", "cpu", *STEP, "--steps", "9", "--variants", "activation_budget=0.0"], capsys)
    assert len(row["step_s_all"]) == 2, "one to warm up, one before, one meanwhile; no other plan"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_save_beside_the_raw_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "tiny", "--device", "cpu", "--vocab", "0", "--repeats", "1", "--work", str(tmp_path / "disk")]
    (row,) = rows_of("save", [*argv, "--spare", "1", "--home", "1"], capsys)
    assert row["raw_gb_per_s"] > 0 and row["save_gb_per_s"] > 0 and row["released_s"] > 0
    assert not list((tmp_path / "disk").iterdir())
