"""What the disk tier's disk does a second: measured in its folder where the plan needs it, and remembered for that file system.

As the tier moves units, checksums included, past the page cache: written, read, and both at once. Some disks do both in less than
the sum of their times: the rates are such that taking turns would need what both at once do. A probe moves less than a disk's
or a host's write cache may hold, so a run watches whether its disk keeps up (``trainer/disk.py``). A disk that cannot be measured
keeps its guess, and a note says why. Checked by ``tests/planner/test_disk_rates.py``.
"""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

import torch

from layerferry.backends.cpu import CpuBackend
from layerferry.config import cache_folder
from layerferry.errors import LayerFerryError
from layerferry.planner.rate import GUESS, Rate
from layerferry.store.disk import DiskTier
from layerferry.store.scratch import ALIGN_BYTES, ScratchFile, existing

log = logging.getLogger(__name__)

DISK_RATES = ("disk_read_bytes_per_s", "disk_write_bytes_per_s")
DISK_GUESS = Rate(1e9, GUESS)
UNIT_BYTES, NUM_UNITS = 64 << 20, 6


def disk_rates(folder: Path, most_bytes: int) -> tuple[dict[str, Rate], tuple[str, ...]]:
    """Rates of the disk of ``folder``, of an earlier measurement or of one that takes ``most_bytes`` of it; and notes."""
    known = _read(folder)
    return (known, ()) if known is not None else measured_rates(folder, most_bytes)


def measured_rates(folder: Path, most_bytes: int = NUM_UNITS * UNIT_BYTES) -> tuple[dict[str, Rate], tuple[str, ...]]:
    """The same, measured now, and remembered if it was measured at full size."""
    unit_bytes = min(UNIT_BYTES, max(most_bytes // NUM_UNITS, ALIGN_BYTES))
    try:
        found = measure_disk(existing(folder), unit_bytes)
    except (OSError, MemoryError, LayerFerryError) as error:
        note = f"the disk of {folder} not measured ({' '.join(str(error).split())[:200]}): the default stands"
        return dict.fromkeys(DISK_RATES, DISK_GUESS), (note,)
    if unit_bytes == UNIT_BYTES:
        _remember(folder, found)
    return {key: Rate(value, "measured") for key, value in found.items()}, ()


def measure_disk(folder: Path, unit_bytes: int) -> dict[str, float]:
    """Bytes a second of units of ``unit_bytes``."""
    units, random = range(NUM_UNITS), torch.frombuffer(bytearray(os.urandom(unit_bytes)), dtype=torch.uint8)
    tier = DiskTier(dict.fromkeys(units, "probe"), dict.fromkeys(units, unit_bytes), CpuBackend(), ScratchFile(folder))

    def moved() -> tuple[float, int, int]:
        tier.settle()
        return tier.busy_s, tier.bytes_read, tier.bytes_written

    try:
        for unit in units:
            with tier.at_hand(unit, writes=True) as memory:
                memory[:unit_bytes].copy_(random)
        written_s, _, written = moved()
        for unit in units:
            with tier.at_hand(unit, writes=False):
                pass
        read_s, read, _ = moved()
        tier.expect(units)
        for unit in units:
            with tier.at_hand(unit, writes=True):
                pass
        both_s, all_read, all_written = moved()
    finally:
        tier.close()
    read_rate, write_rate = read / (read_s - written_s), written / written_s
    in_turn_s = (all_read - read) / read_rate + (all_written - written) / write_rate
    gain = in_turn_s / (both_s - read_s)
    return {"disk_read_bytes_per_s": gain * read_rate, "disk_write_bytes_per_s": gain * write_rate}


def rates_file(folder: Path) -> Path:
    """Where the rates of the file system of ``folder`` are cached."""
    mount = existing(folder).resolve()
    while not mount.is_mount():
        mount = mount.parent
    label = "".join(c if c.isalnum() else "-" for c in str(mount)).strip("-").lower()
    return cache_folder() / "machine" / f"disk-{label[-120:] or 'root'}.json"


def _read(folder: Path) -> dict[str, Rate] | None:
    """None where nothing is remembered, or it is not to be read."""
    try:
        found = json.loads(rates_file(folder).read_text())
        rates = {key: Rate(float(found[key]), "measured") for key in DISK_RATES}
    except (OSError, ValueError, AttributeError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return rates if all(0 < rate.value < math.inf for rate in rates.values()) else None


def _remember(folder: Path, found: dict[str, float]) -> None:
    path = rates_file(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
    except OSError as error:
        log.warning("%s: cannot be written (%s); the disk will be measured again", path, error)
