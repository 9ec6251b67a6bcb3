"""``python -m layerferry``: the command line, also where its script is not on the path. Checked by ``tests/cli/test_cli.py``."""

from __future__ import annotations

import sys

from layerferry.cli import main

if __name__ == "__main__":
    sys.exit(main())
