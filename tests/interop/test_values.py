"""Conversions: what people write for each type, and what is refused."""

import pytest

from layerferry.interop import values
from layerferry.interop.keys import table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60GiB", 60 * 2**30),
        ("24GB", 24 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("0.5TiB", 2**39),
        (1000, 1000),
        ("1000B", 1000),
        (6e10, 60_000_000_000),
    ],
)
def test_sizes(text: object, expected: int) -> None:
    assert values.to_size(text) == expected


@pytest.mark.parametrize("text", ["60G", "GiB", "-1", "", "1e3GiB", True, None, [], "0", ".inf"])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        values.to_size(text)


@pytest.mark.parametrize(("written", "expected"), [(3, 3), (3.0, 3), ("8", 8), (1e3, 1000), (-1, -1), (10**30, 10**30)])
def test_whole_numbers(written: object, expected: int) -> None:
    assert values.to_int(written) == expected


@pytest.mark.parametrize("written", [1.5, "x", True, None, float("inf"), float("nan"), [], {}])
def test_what_is_no_whole_number(written: object) -> None:
    with pytest.raises(ValueError, match="expected a whole number"):
        values.to_int(written)


@pytest.mark.parametrize("written", ["x", True, None, float("inf"), 10**400, []])
def test_what_is_no_number(written: object) -> None:
    with pytest.raises(ValueError, match="expected a number"):
        values.to_float(written)


def test_lists_and_mappings() -> None:
    assert values.to_list("a, b,,c ") == ("a", "b", "c")
    assert values.to_list(["a", 1]) == ("a", "1")
    assert values.to_dict('{"num_cycles": 2}') == {"num_cycles": 2} == values.to_dict({"num_cycles": 2})
    for wrong in ("[1]", "{", 3):
        with pytest.raises(ValueError, match="expected a mapping"):
            values.to_dict(wrong)


def test_a_bare_no_is_a_word_where_words_are_accepted() -> None:
    assert values.convert(table()["eval_strategy"], False) == "no"


@pytest.mark.parametrize(("key", "value"), [("adam_beta1", 1.5), ("learning_rate", -1.0), ("gradient_accumulation_steps", 0)])
def test_bounds_are_named(key: str, value: object) -> None:
    with pytest.raises(ValueError, match="expected at (least|most)"):
        values.convert(table()[key], value)
