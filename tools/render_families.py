"""Write docs/families.md from the conformance list. Run after a change of tests/conformance/families.py (``make docs``)."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.conformance.page import markdown

    PAGE.write_text(markdown(), encoding="utf-8")
