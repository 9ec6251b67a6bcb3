"""docs/families.md is what the conformance list says."""

from pathlib import Path

from tests.conformance.families import FAMILIES
from tests.conformance.page import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run tools/render_families.py"


def test_the_list_is_long_and_names_each_type_once() -> None:
    types = [family.model_type for family in FAMILIES]
    assert len(types) == len(set(types)) >= 52
    assert len({family.kind for family in FAMILIES}) == 5
