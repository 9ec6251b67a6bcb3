"""What of a plan decides in which order, and in which type, sums are rounded: recorded in a checkpoint, and told where a resumed
run's is another. All else of a plan changes no bit.

Waves are such a thing in two cases only: where gradients are carried between them in bf16, which rounds once a wave for units
that are not @device, and where the ends share a weight, whose two shares are added wave by wave (decision 9). Every other number
of waves gives the bits of one, and counts as one. Ends, and layers' experts, that travel in parts are summed by parts, but not
those @device, which are whole: there it matters how many of the ends, or of the layers of experts, these are. Checked by
``tests/trainer/test_rounding.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from layerferry.plan import Plan
from layerferry.units import Unit

ALONE = ("micro_batch_rows", "chunk_tokens", "mlp_chunk_tokens", "carry_fp32", "compile")
"""Fields of a plan, each a key of the configuration too, that change the last bits of a step by themselves."""
TOGETHER = ("end_parts", "expert_parts", "num_waves", "first_wave", "resident_gradients", "device_units")
"""Those of which it depends on others whether they do."""
OF_MODEL = ("fp32", "tied_ends", "whole_ends", "whole_experts", "all_at_home")
"""What it depends on, beside fields of the plan."""


def rounding_of(plan: Plan, units: Sequence[Unit]) -> dict[str, Any]:
    """Fields by name, for ``other_rounding``. ``units``: of the model."""
    ends = [unit for unit in units if not unit.is_layer]
    divided = [unit for unit in units if unit.is_layer and unit.tables]
    return {
        **{key: getattr(plan, key) for key in (*ALONE, *TOGETHER)},
        "fp32": plan.fp32,
        "tied_ends": len(ends) == 1,
        "whole_ends": _num_home(plan, ends),
        "whole_experts": _num_home(plan, divided),
        "all_at_home": plan.device_units == len(units),
    }


def _num_home(plan: Plan, units: Sequence[Unit]) -> list[int]:
    """How many of ``units`` are @device, and of how many."""
    return [sum(unit.index in plan.on_device for unit in units), len(units)]


def other_rounding(saved: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """One line where the plan of a resumed run rounds otherwise, with the pins that keep the checkpoint's; None: it does not.
    What an older checkpoint has not recorded is not compared."""
    told = dict[str, str]()
    for ours, theirs in zip(_matters(saved), _matters(found), strict=True):
        differing = [key for key in ours if key in theirs and ours[key] != theirs[key]]
        told |= {key: f"{key}: {_shown(saved, ours, key)} -> {_shown(found, theirs, key)}" for key in differing}
    if not told:
        return None
    keys = ", ".join(f"{key}: {json.dumps(value)}" for key, value in _pins(saved).items())
    return (
        f"the plan is not that of the checkpoint: {', '.join(told.values())}: from here on sums are rounded in another order, "
        f"which is not wrong, but not bit for bit the run that was left; to keep its bits set {keys}"
    )


def _matters(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of fields that matter together: a run has the bits of another where all of these are equal."""
    alone = [{key: record[key]} if key in record else {} for key in ALONE]
    return [*alone, _waves(record), *_parts(record)]


def _pins(record: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that must be pinned for a plan to round like ``record``: what is left free, a planner would move."""
    found = {key: value for group in _matters(record) for key, value in group.items()}
    if "device_units" in found:
        found["device_units"] = record["device_units"]
    if _is_complete(record) and found["num_waves"] == 1 and not record["tied_ends"]:
        del found["num_waves"]
        found |= _as_one_wave(record)
    return found


def _is_complete(record: Mapping[str, Any]) -> bool:
    """Whether it has all that is recorded today."""
    return record.keys() >= {*ALONE, *TOGETHER, *OF_MODEL}


def _as_one_wave(record: Mapping[str, Any]) -> dict[str, Any]:
    """What makes any number of waves have the bits of one, beside ``carry_fp32``; or one."""
    if record["carry_fp32"] or record["fp32"]:
        return {}
    if record["num_waves"] == 1:
        return {"num_waves": 1}
    why = "resident_gradients" if record["resident_gradients"] else "device_units"
    return {why: record[why]}


def _waves(record: Mapping[str, Any]) -> dict[str, Any]:
    if "num_waves" not in record:
        return {}
    keys = ["num_waves", "resident_gradients", "first_wave", "device_units"]
    if not _is_complete(record):  # an older checkpoint, which has them where they matter, and no first wave like the others
        several = {"first_wave": 0} if record["num_waves"] > 1 else {}
        return several | {key: record[key] for key in keys if key in record}
    summed_in_fp32 = any(record[key] for key in ("resident_gradients", "carry_fp32", "fp32", "all_at_home"))
    if record["num_waves"] == 1 or (summed_in_fp32 and not record["tied_ends"]):
        return {"num_waves": 1}
    return {key: record[key] for key in (keys[:3] if summed_in_fp32 else keys)}


def _parts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of the ends, and of layers' experts: how many, and how many of what they would divide are whole because @device."""
    if not _is_complete(record):
        return [{key: record[key]} if key in record else {} for key in ("end_parts", "expert_parts")]
    groups = []
    for key, whole in (("end_parts", "whole_ends"), ("expert_parts", "whole_experts")):
        (home, there), parts = record[whole], record[key]
        groups.append({key: parts, "device_units": home} if parts > 1 and home < there else {key: 1})
    return groups


def _shown(record: Mapping[str, Any], matters: Mapping[str, Any], key: str) -> Any:
    """As the key would be set: units @device are counted from the embedding on."""
    return record[key] if key == "device_units" else matters[key]
