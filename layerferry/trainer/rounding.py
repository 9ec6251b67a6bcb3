"""What of a plan decides in which order, and in which type, sums are rounded: recorded in a checkpoint, and told where a resumed
run's is another. All else of a plan changes no bit.

Waves are such a thing in two cases only: where gradients are carried between them in bf16, which rounds once a wave for units
that are not @device, and where the ends share a weight, whose two shares are added wave by wave (decision 9). Every other number
of waves gives the bits of one, and counts as one. Ends, and layers' experts, that travel in parts are summed by parts, but not
those @device, which are whole: there it matters which these are. Checked by ``tests/trainer/test_rounding.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from layerferry.plan import Plan

ALONE = ("micro_batch_rows", "chunk_tokens", "mlp_chunk_tokens", "carry_fp32", "compile")
"""Fields of a plan, each a key of the configuration too, that change the last bits of a step by themselves."""
TOGETHER = ("end_parts", "expert_parts", "num_waves", "first_wave", "resident_gradients", "device_units")
"""Those of which it depends on others whether they do."""


def rounding_of(plan: Plan, *, tied: bool, num_units: int) -> dict[str, Any]:
    """Fields by name, for ``other_rounding``. ``tied``: the ends of the model's ``num_units`` units share a weight."""
    of_model = {"tied_ends": tied, "num_units": num_units, "fp32": plan.fp32}
    return {key: getattr(plan, key) for key in (*ALONE, *TOGETHER)} | of_model


def other_rounding(saved: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """One line where the plan of a resumed run rounds otherwise, with the pins that keep the checkpoint's; None: it does not.
    What an older checkpoint has not recorded is not compared."""
    told, pins = dict[str, str](), dict[str, Any]()
    for ours, theirs in zip(_matters(saved), _matters(found), strict=True):
        differing = [key for key in ours if key in theirs and ours[key] != theirs[key]]
        told |= {key: f"{key}: {_shown(saved, ours, key)} -> {_shown(found, theirs, key)}" for key in differing}
        pins |= {key: _shown(saved, ours, key) for key in ours if differing}
    if not told:
        return None
    keys = ", ".join(f"{key}: {json.dumps(value)}" for key, value in pins.items())
    return (
        f"the plan is not that of the checkpoint: {', '.join(told.values())}: from here on sums are rounded in another order, "
        f"which is not wrong, but not bit for bit the run that was left; to keep its bits set {keys}"
    )


def _matters(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of fields that matter together: a run has the bits of another where all of these are equal."""
    alone = [{key: record[key]} if key in record else {} for key in ALONE]
    return [*alone, _waves(record), *_parts(record)]


def _waves(record: Mapping[str, Any]) -> dict[str, Any]:
    if "num_waves" not in record:
        return {}
    summed_in_fp32 = record.get("resident_gradients") or record.get("carry_fp32") or record.get("fp32")
    if record["num_waves"] == 1 or (summed_in_fp32 and not record.get("tied_ends")):
        return {"num_waves": 1}
    keys = ["num_waves", "resident_gradients", "first_wave", *([] if summed_in_fp32 else ["device_units"])]
    return {key: record[key] for key in keys if key in record}


def _parts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of the ends, and of layers' experts: how many, and how many of what they would divide are whole because @device."""
    if "num_units" not in record:
        return [{key: record[key]} if key in record else {} for key in ("end_parts", "expert_parts")]
    ends, home = 1 if record["tied_ends"] else 2, record["device_units"]
    layers = record["num_units"] - ends
    layers_home = min(max(home - 1, 0), layers)
    ends_home = min(home, 1) + max(home - 1 - layers, 0)
    return [
        {key: record[key], "device_units": whole} if record[key] > 1 and whole < there else {key: 1}
        for key, whole, there in (("end_parts", ends_home, ends), ("expert_parts", layers_home, layers))
    ]


def _shown(record: Mapping[str, Any], matters: Mapping[str, Any], key: str) -> Any:
    """As the key would be set: units @device are counted from the embedding on."""
    return record[key] if key == "device_units" else matters[key]
