"""What of a plan decides in which order, and in which type, sums are rounded: recorded in a checkpoint, and told where a resumed
run's is another. All else of a plan changes no bit.

Several waves are such a thing in two cases only: where gradients are carried between them in bf16, which rounds once a wave for
units that are not @device, and where the ends share a weight, whose two shares are added wave by wave (decision 9). Every other
number of waves gives the bits of one, and is recorded as one. Where layers' experts travel in parts, those @device are whole, so
it matters which these are. Checked by ``tests/trainer/test_rounding.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from layerferry.plan import Plan

ROUNDING = ("micro_batch_rows", "chunk_tokens", "mlp_chunk_tokens", "end_parts", "expert_parts", "carry_fp32", "compile")
"""Fields of a plan, each a key of the configuration too, that change the last bits of a step (``reliability.md``)."""
WAVES = ("num_waves", "first_wave", "resident_gradients", "device_units")
"""Those that do so together, where waves matter; what does not matter is left out."""
FREE = "any"


def rounding_of(plan: Plan, *, tied: bool) -> dict[str, Any]:
    """Fields by name. ``tied``: the ends share a weight."""
    found = {key: getattr(plan, key) for key in ROUNDING}
    if plan.expert_parts > 1:
        found["device_units"] = plan.device_units if max(plan.on_device, default=0) > 0 else 0  # unit 0 is no layer
    carries_bf16 = not plan.is_exact
    if plan.num_waves == 1 or not (carries_bf16 or tied):
        return {**found, "num_waves": 1}
    found |= {"num_waves": plan.num_waves, "resident_gradients": plan.resident_gradients}
    if plan.first_wave:
        found["first_wave"] = plan.first_wave
    if carries_bf16:
        found["device_units"] = plan.device_units
    return found


def other_rounding(saved: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """One line where the plan of a resumed run rounds otherwise, with the pins that keep the checkpoint's; None: it does not.
    What an older checkpoint has not recorded is not compared."""
    other = [key for key in ROUNDING if key in saved and key in found and saved[key] != found[key]]
    pins = list(other)
    waves = [key for key in WAVES if "num_waves" in saved and saved.get(key, FREE) != found.get(key, FREE)]
    if waves:
        other += waves
        pins += [key for key in WAVES if key in saved]
    if not other:
        return None
    told = ", ".join(f"{key}: {saved.get(key, FREE)} -> {found.get(key, FREE)}" for key in other)
    keys = ", ".join(f"{key}: {json.dumps(saved[key])}" for key in pins)
    return (
        f"the plan is not that of the checkpoint: {told}: from here on sums are rounded in another order, which is "
        f"not wrong, but not bit for bit the run that was left; to keep its bits set {keys}"
    )
