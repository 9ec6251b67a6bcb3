"""``run.json``: exact floats, whatever they are, and nothing but our error for whatever else the file holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerferry.data import Cursor
from layerferry.errors import CheckpointError
from layerferry.plan import Plan
from layerferry.trainer.rounding import rounding_of
from layerferry.trainer.state import RUN_STATE, RunState, Totals, changes, check_data

FACTS = {"rows": 5, "content": 7, "seed": 42, "shuffle": True, "usable": 4}
numbers = st.floats() | st.integers(-(2**60), 2**60)


def write(folder: Path, state: RunState) -> None:
    for name, content in state.files().items():
        (folder / name).write_bytes(content)


def same(one: Any, other: Any) -> bool:
    """Equal, with NaN equal to NaN and 0.0 not to -0.0."""
    return repr(one) == repr(other)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=5), numbers, max_size=3), max_size=3), st.floats(), st.integers(0, 2**40))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, entries: list[dict[str, float]], loss: float, step: int) -> None:
    folder = tmp_path_factory.mktemp("state")
    state = RunState(
        cursor=Cursor(2, 3),
        totals=Totals(step=step, loss=loss),
        schedule={"best": math.inf, "bad": 1},
        entries=entries,
        log_lines=['{"a": 1}\n', "{}\n"],
        last_eval=(4, {"eval_loss": loss}),
        eval_facts={"sets": {"eval": 7}, "fp32": False, "flash_attn": "auto"},
        skipped_batches=[{"after_step": step, "epoch": 0.5, "reason": "loss nan", "rows": [1, 2]}],
        data=FACTS,
        settings={"seed": 1},
        rounding=rounding_of(Plan(carry_fp32=True), ()),
    )
    write(folder, state)
    assert same(RunState.read(folder), state)
    json.loads((folder / RUN_STATE).read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*json.loads(RunState().files()[RUN_STATE])]), json_values, min_size=1))
def test_whatever_it_holds_only_our_error_comes(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("state")
    write(folder, RunState())
    body = {**json.loads((folder / RUN_STATE).read_text()), **values}
    (folder / RUN_STATE).write_text(json.dumps(body))
    try:
        assert isinstance(RunState.read(folder), RunState)
    except CheckpointError as error:
        assert str(folder) in str(error) or "cursor" in str(error)


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    write(tmp_path, RunState())
    (tmp_path / "trainer_log.jsonl").unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        RunState.read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rows", 6, "another number of training rows: 5 then, 6 now"),
        ("content", 8, r"another row somewhere \(ids, labels or order"),
        ("seed", 43, "another seed of the order"),
        ("shuffle", False, r"another shuffling \(disable_shuffling\): True then, False now"),
        ("usable", 5, "another number of rows an epoch uses"),
    ],
)
def test_other_data_is_refused(key: str, value: int, message: str) -> None:
    check_data(Path("checkpoint-3"), FACTS, FACTS)
    with pytest.raises(CheckpointError, match=message):
        check_data(Path("checkpoint-3"), FACTS, {**FACTS, key: value})


def test_changed_settings_are_told() -> None:
    assert changes({"a": 1, "b": 2, "old": 0}, {"a": 1, "b": 3, "new": 4}) == ["b: 2 -> 3"]
