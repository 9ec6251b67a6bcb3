"""The machine as the planner sees it: bytes that may be used, rates, and where each number came from.

A ``Machine`` is a value. ``machine_for`` reads what is free now and takes rates from an earlier ``probe`` of the same machine
(per-user cache) or, where there was none, times them in brief; only a device that the project has measured has stated
defaults. What a machine *is* (its link coherent, its memory one for host and device) shows in rates and bytes alone.
Training waits for no other measurement, but for that of a disk that it may use (``disk_rates.py``). Checked by
``tests/planner/test_machine.py``.
"""

from __future__ import annotations

import json
import math
import platform
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from layerferry.backends.base import Backend
from layerferry.backends.cuda import CudaBackend
from layerferry.backends.numa import own_nodes
from layerferry.config import EngineConfig, cache_folder
from layerferry.plan import GIB, size_text
from layerferry.planner.disk_rates import DISK_GUESS, DISK_RATES, disk_rates
from layerferry.planner.host import cores, host_limits, host_total, locked_limit
from layerferry.planner.rate import GUESS, Rate
from layerferry.planner.stopwatch import copied_bytes_per_s, device_traffic, links, matmul_flops_per_s, triad_bytes_per_s
from layerferry.store.scratch import ScratchFile, check_folder, is_memory

BRIEF = "measured in brief"
DISK_MEMORY = "disk_memory"
BRIEF_BYTES = 1 << 27
OPTIMIZER_BYTES_PER_PARAM = 22
"""Read and written by one AdamW update of a split master with bf16 gradient."""
CODED_OPTIMIZER_BYTES_PER_PARAM = 12
"""With a 24-bit master and 8-bit moments."""


RATES = (
    "matmul_flops_per_s",
    "upload_bytes_per_s",
    "download_bytes_per_s",
    "upload_together_bytes_per_s",
    "download_together_bytes_per_s",
    "dram_bytes_per_s",
    "optimizer_s_per_param",
    "device_bytes_per_s",
    "coded_optimizer_s_per_param",
)

_DEVICES: dict[str, tuple[float, float, float, float, float, float, float]] = {
    # matmul FLOP/s, link bytes/s alone, together, host DRAM bytes/s, optimizer s/param in a step, device memory bytes/s,
    # optimizer s/param with 8-bit moments
    "H200": (715e12, 55e9, 45e9, 122e9, 0.225e-9, 4.2e12, 0.15e-9),
}
"""Measured by the project on one H200 with 16 cores (docs/decisions, benchmarks/results)."""

_GUESSES: dict[str, tuple[float, float, float]] = {
    "B200": (1200e12, 50e9, 6.5e12),
    "H100": (600e12, 50e9, 2.8e12),
    "A100": (230e12, 24e9, 1.6e12),
    "L40": (150e12, 24e9, 0.7e12),
    "4090": (140e12, 24e9, 0.85e12),
    "3090": (60e12, 12e9, 0.8e12),
}
"""Not measured: half to nine tenths of what the makers print. (bf16 matmul FLOP/s, link bytes/s, device memory bytes/s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """``device_available`` and ``host_available`` are bytes that a run may take; on a CPU both name the same memory."""

    backend: str
    device_name: str
    device_available: int
    device_total: int
    device_source: str
    host_available: int
    host_total: int
    host_source: str
    locked_limit: int | None
    cores: int
    matmul_flops_per_s: Rate
    upload_bytes_per_s: Rate
    download_bytes_per_s: Rate
    upload_together_bytes_per_s: Rate
    download_together_bytes_per_s: Rate
    dram_bytes_per_s: Rate
    optimizer_s_per_param: Rate
    device_bytes_per_s: Rate
    coded_optimizer_s_per_param: Rate
    others_s_per_param: Rate | None = None
    """Of parameters that are no matrices, where an optimizer has matrices of its own, which it orthogonalises @device."""
    disk_available: int = 0
    """Bytes of a disk that optimizer state may take."""
    disk_source: str = DISK_MEMORY
    disk_read_bytes_per_s: Rate = DISK_GUESS
    disk_write_bytes_per_s: Rate = DISK_GUESS
    """Checksums included, while both directions run."""
    disk_in_memory: bool = False
    """The folder of state @disk lies in host memory."""
    host_free: int | None = None
    """Bytes that the system says are free, where ``host_memory`` states another number."""
    unified: bool = False
    """The device has no memory of its own: it computes in the host's."""
    num_nodes: int = 1
    """Memory nodes of the host, over which planes are spread."""
    notes: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """The device is the host."""
        return self.backend != "cuda"

    @property
    def one_memory(self) -> bool:
        """Both places are the same bytes, which count once."""
        return self.is_cpu or self.unified

    @property
    def shares_budget(self) -> bool:
        """What the device takes is the host's: they are one memory, and nobody has said what the device may take of it."""
        return self.one_memory and self.device_source != "device_memory"

    @property
    def guessed(self) -> bool:
        return any(getattr(self, name).source == GUESS for name in RATES)

    def to_dict(self) -> dict[str, Any]:
        names = (*RATES, *DISK_RATES)
        rates = {name: {"value": getattr(self, name).value, "source": getattr(self, name).source} for name in names}
        return {
            "device": {
                "backend": self.backend,
                "name": self.device_name,
                "available_bytes": self.device_available,
                "total_bytes": self.device_total,
                "source": self.device_source,
            },
            "host": {
                "available_bytes": self.host_available,
                "total_bytes": self.host_total,
                "source": self.host_source,
                "cores": self.cores,
                "locked_limit_bytes": self.locked_limit,
            },
            "disk": {"available_bytes": self.disk_available, "source": self.disk_source},
            "rates": rates,
            "notes": list(self.notes),
        }

    def render(self) -> str:
        """For a terminal of 100 columns."""
        locked = "no limit" if self.locked_limit is None else size_text(self.locked_limit)
        device = "the same memory" if self.one_memory else f"{_gib(self.device_available)} of {_gib(self.device_total)} free"
        rows = [
            ("device", self.device_name, "" if self.is_cpu else self.backend),
            ("device memory", device, self.device_source),
            ("host memory", f"{_gib(self.host_available)} of {_gib(self.host_total)} free", self.host_source),
            ("locked memory", locked, "RLIMIT_MEMLOCK"),
            ("cores", str(self.cores), ""),
            ("matrix products", f"{self.matmul_flops_per_s.value / 1e12:.3g} TFLOP/s", self.matmul_flops_per_s.source),
            ("upload", _gb(self.upload_bytes_per_s), self.upload_bytes_per_s.source),
            ("download", _gb(self.download_bytes_per_s), self.download_bytes_per_s.source),
            ("both at once", self._together(), self.upload_together_bytes_per_s.source),
            ("host memory traffic", _gb(self.dram_bytes_per_s), self.dram_bytes_per_s.source),
            ("device memory traffic", _gb(self.device_bytes_per_s), self.device_bytes_per_s.source),
            ("AdamW", _ns(self.optimizer_s_per_param), self.optimizer_s_per_param.source),
            ("AdamW, 8-bit", _ns(self.coded_optimizer_s_per_param), self.coded_optimizer_s_per_param.source),
            ("disk, reading", _gb(self.disk_read_bytes_per_s), self.disk_read_bytes_per_s.source),
            ("disk, writing", _gb(self.disk_write_bytes_per_s), self.disk_write_bytes_per_s.source),
        ]
        lines = [f"{name:<21}  {value:<33}  {source}".rstrip() for name, value, source in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _together(self) -> str:
        up, down = self.upload_together_bytes_per_s.value, self.download_together_bytes_per_s.value
        return f"{up / 1e9:.1f} GB/s up, {down / 1e9:.1f} GB/s down"


def machine_for(engine: EngineConfig, backend: Backend, disk: Path = Path()) -> Machine:
    """What ``backend`` and this host have now; rates from the cache or defaults. ``disk``: the folder of state @disk."""
    rates = read_rates(device_name(backend)) or brief_rates(backend)
    if not engine.disk_memory:
        return assemble(engine, backend, rates)
    check_folder(disk)
    found, notes = disk_rates(disk, engine.disk_memory)
    there = replace(assemble(engine, backend, rates | found, notes), disk_in_memory=is_memory(disk))
    free = ScratchFile(disk).free_bytes()
    return there if free >= engine.disk_memory else replace(there, disk_available=free, disk_source="free on the disk")


def brief_rates(backend: Backend) -> dict[str, Rate]:
    """Of a machine that was never probed: stated ones of a device that the project has measured, else timed in brief."""
    if not isinstance(backend, CudaBackend):
        return quick_rates()
    rates = default_rates(device_name(backend), on_cpu=False)
    if not any(rate.source == GUESS for rate in rates.values()):
        return rates
    try:
        found = {
            "matmul_flops_per_s": backend.matmul_flops_per_s(rows=4096),
            **links(backend, BRIEF_BYTES),
            **device_traffic(backend, BRIEF_BYTES),
            "dram_bytes_per_s": (dram := triad_bytes_per_s(1 << 22)),
            "optimizer_s_per_param": _per_param(dram),
            "coded_optimizer_s_per_param": _coded_per_param(dram),
        }
    except (RuntimeError, MemoryError):  # the device is too full even for that
        return rates
    return rates | {key: Rate(value, BRIEF) for key, value in found.items()}


def assemble(engine: EngineConfig, backend: Backend, rates: dict[str, Rate], notes: tuple[str, ...] = ()) -> Machine:
    """A ``Machine`` of what is free now and ``rates``."""
    limit = host_limits()[0]
    host, host_source = limit.num_bytes, limit.source
    if engine.host_memory is not None:
        host, host_source = engine.host_memory, "host_memory"
    if isinstance(backend, CudaBackend):
        free, total = backend.memory()
        device, source = free + backend.allocated_bytes(), "free now"
    else:
        device, total, source = host, host_total(), host_source
    if engine.device_memory is not None:
        device, source = engine.device_memory, "device_memory"
    known = {key: rate for key, rate in rates.items() if key in (*RATES, *DISK_RATES)}
    return Machine(
        backend=backend.name,
        device_name=device_name(backend),
        device_available=device,
        device_total=total,
        device_source=source,
        host_available=host,
        host_total=host_total(),
        host_source=host_source,
        host_free=None if engine.host_memory is None else limit.num_bytes,
        locked_limit=locked_limit(),
        cores=cores(),
        disk_available=engine.disk_memory or 0,
        disk_source=DISK_MEMORY,
        disk_in_memory=False,
        unified=isinstance(backend, CudaBackend) and backend.is_unified,
        num_nodes=max(len(own_nodes()), 1),
        notes=notes,
        **known,
    )


def device_name(backend: Backend) -> str:
    if isinstance(backend, CudaBackend):
        return backend.describe()
    return f"{cpu_name()} (CPU)"


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = info.read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def default_rates(name: str, *, on_cpu: bool) -> dict[str, Rate]:
    """Stated defaults for a device that was never probed; what nobody measured is marked as a guess."""
    count = cores()
    dram = min(10e9 * count, 100e9)
    if on_cpu:
        return _cpu_rates(40e9 * count, dram / 2, dram, GUESS)
    if (known := next((key for key in _DEVICES if _names(key, name)), None)) is not None:
        flops, link, together, dram, per_param, device, coded = _DEVICES[known]
        return _rates((flops, link, link, together, together, dram, per_param, device, coded), f"default for {known}")
    flops, link, device = next((_GUESSES[key] for key in _GUESSES if _names(key, name)), (60e12, 12e9, 0.5e12))
    together = 0.8 * link
    return _rates((flops, link, link, together, together, dram, _per_param(dram), device, _coded_per_param(dram)), GUESS)


def _names(key: str, name: str) -> bool:
    """Whether ``key`` is a word of ``name``: a GH200 is no H200."""
    return re.search(rf"(?<![A-Za-z0-9]){key}", name) is not None


@cache
def quick_rates() -> dict[str, Rate]:
    """Of a CPU that was never probed, in a tenth of a second: CPUs differ by a factor of ten, so nothing stated would hold."""
    return _cpu_rates(matmul_flops_per_s(512), copied_bytes_per_s(1 << 22), triad_bytes_per_s(1 << 22), BRIEF)


def _cpu_rates(flops: float, copied: float, dram: float, source: str) -> dict[str, Rate]:
    """A lane is a copy in host memory, and two lanes share it."""
    return _rates((flops, copied, copied, copied / 2, copied / 2, dram, _per_param(dram), dram, _coded_per_param(dram)), source)


def _per_param(dram_bytes_per_s: float) -> float:
    return OPTIMIZER_BYTES_PER_PARAM / (0.6 * dram_bytes_per_s)


def _coded_per_param(dram_bytes_per_s: float) -> float:
    """Half the bytes, and twice the arithmetic on each."""
    return CODED_OPTIMIZER_BYTES_PER_PARAM / (0.45 * dram_bytes_per_s)


def _rates(values: tuple[float, ...], source: str) -> dict[str, Rate]:
    return {key: Rate(value, source) for key, value in zip(RATES, values, strict=True)}


def rates_file(name: str) -> Path:
    """Where the rates of this device beside this CPU are cached."""
    label = "".join(c if c.isalnum() else "-" for c in f"{name}-{cpu_name()}-{cores()}-{torch.__version__}").lower()
    return cache_folder() / "machine" / f"{label[:150]}.json"


def read_rates(name: str) -> dict[str, Rate] | None:
    """Rates of an earlier probe; None where there is none or it is not to be read."""
    try:
        found = json.loads(rates_file(name).read_text())
        rates = {key: Rate(float(value), "measured") for key, value in found.items()}
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return None
    return rates if all(key in rates and 0 < rates[key].value < math.inf for key in RATES) else None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _ns(rate: Rate) -> str:
    return f"{rate.value * 1e9:.2f} ns per parameter"


def _gb(rate: Rate) -> str:
    return f"{rate.value / 1e9:.1f} GB/s"
