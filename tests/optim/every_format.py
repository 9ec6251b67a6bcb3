"""Every format of optimizer state that a configuration file can name, as fields of ``OptimConfig``: each rule with each width of
its moments, over each master. Derived from the names themselves, so that a new one is in the suites as soon as it has a name."""

from __future__ import annotations

from typing import Any

from layerferry.optim.choose import NAMES
from layerferry.optim.formats import RESIDUES

RULES: dict[str, dict[str, Any]] = {
    **{name: {"optim": name} for name in {kind: name for name, kind in reversed(NAMES.items())}.values()},
    "sgd with momentum": {"optim": "sgd", "momentum": 0.9},
}
"""One name of each rule and width."""

EVERY_FORMAT: dict[str, dict[str, Any]] = {
    f"{rule} over {master}": {**fields, "master_weights": master} for rule, fields in RULES.items() for master in RESIDUES
}
