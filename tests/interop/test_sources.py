"""Where settings come from: files with lines, the command line over them, and whatever bytes a file may hold."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerferry.errors import ConfigError
from layerferry.interop.sources import Setting, read_settings


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_values_and_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path, "### model\nlearning_rate: 1e-5\n\nlr_scheduler_kwargs:\n  num_cycles: 2\nrun_name: ${oc.env:NOT_SET,x}\n"
    )
    assert read_settings(path, ["lr_scheduler_kwargs.power=3", "seed=7"]) == {
        "learning_rate": Setting(1e-5, f"{path}:2"),
        "lr_scheduler_kwargs": Setting({"num_cycles": 2, "power": 3}, "command line"),
        "run_name": Setting("x", f"{path}:6"),
        "seed": Setting(7, "command line"),
    }


def test_json(tmp_path: Path) -> None:
    path = write(tmp_path, '{\n\t"learning_rate": 1e-5,\n\t"bf16": true\n}\n', "run.json")
    assert read_settings(path, []) == {"learning_rate": Setting(1e-5, f"{path}:2"), "bf16": Setting(True, f"{path}:3")}


def test_an_empty_file_has_no_settings(tmp_path: Path) -> None:
    assert read_settings(write(tmp_path, "# nothing\n"), []) == {}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "seed: 1\nbf16: true\nseed: 2\n", r"a.yaml:3: duplicate key 'seed', first on line 1"),
        ("a.json", '{"seed": 1,\n"seed": 2}', r"a.json:2: duplicate key 'seed', first on line 1"),
        ("a.yaml", "seed: [1\nbf16: true\n", r"a.yaml:\d: not valid YAML"),
        ("a.yaml", "- a\n- b\n", r"expected key: value lines"),
        ("a.yaml", "hello", r"expected key: value lines"),
        ("a.yaml", "seed: ???\n", r"a.yaml: .*[Mm]issing"),
        ("a.yaml", "seed: ${nowhere}\n", r"a.yaml: .*nowhere"),
        ("a.yaml", "? [a, b]\n: 1\n", r"a.yaml:1: a key must be a plain word"),
        ("a.json", '{"seed": 1,}', r"a.json:1: not valid JSON"),
        ("a.yaml", "a: {b: 1, b: 2}\n", r"a.yaml: .*duplicate key"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(write(tmp_path, text, name), [])


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"{path}: cannot read the configuration"):
            read_settings(path, [])


@pytest.mark.parametrize("item", ["seed", "=3", "seed=[1", "a={", "a='"])
def test_broken_overrides(item: str) -> None:
    with pytest.raises(ConfigError, match="command line"):
        read_settings(None, [item])


def test_a_broken_override_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 1\n")
    with pytest.raises(ConfigError, match=r"^command line: 'seed=\{' cannot be read"):
        read_settings(path, ["bf16=true", "seed={"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(st.binary(max_size=80), st.text(max_size=80).map(lambda text: text.encode("utf-8", "surrogatepass"))))
def test_any_bytes_are_settings_or_a_config_error(tmp_path: Path, content: bytes) -> None:
    for name in ("fuzz.yaml", "fuzz.json"):
        path = tmp_path / name
        path.write_bytes(content)
        try:
            read_settings(path, [])
        except ConfigError as error:
            assert str(path) in str(error)


def test_deep_nesting_is_a_config_error(tmp_path: Path) -> None:
    for name in ("deep.yaml", "deep.json"):
        with pytest.raises(ConfigError):
            read_settings(write(tmp_path, "[" * 5000 + "]" * 5000, name), [])
