"""Write docs/llamafactory-keys.md from the key table. Run after a change of layerferry/interop/keys.tsv (``make docs``)."""

from pathlib import Path

from layerferry.interop.keys import markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "llamafactory-keys.md"

if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
