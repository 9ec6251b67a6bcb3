"""Tools and calls as JSON text: whatever is wrong with it drops the row, and nothing else."""

from __future__ import annotations

import pytest

from layerferry.data.rows import BadRow
from layerferry.data.tools import parse_calls, parse_tools


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a":' * 100_000, "9" * 5000, "7", '"x"', "[7]"])
def test_what_is_no_list_of_tools_or_calls(text: str) -> None:
    with pytest.raises(BadRow):
        parse_tools(text)
    with pytest.raises(BadRow):
        parse_calls(text)
