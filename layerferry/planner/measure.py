"""``probe``: measure this machine in a few seconds and remember it.

On CUDA: matrix products, each link direction alone and both together, and AdamW while the link runs, as it does in
a step. Everywhere: host memory traffic, the kernel, a disk (``disk_rates.py``). What cannot be measured keeps its default, and
a note says what was lost. Checked by ``tests/planner/test_machine.py``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from layerferry.backends import Backend, Lane, make
from layerferry.backends.cuda import CudaBackend
from layerferry.config import EngineConfig, cache_folder
from layerferry.errors import LayerFerryError
from layerferry.layout import Layout, ParameterSpec, Plane
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import StepHyper
from layerferry.optim.formats import StateFormat
from layerferry.optim.load import load_kernels
from layerferry.optim.reference import ReferenceKernels
from layerferry.planner.disk_rates import measured_rates
from layerferry.planner.host import cores
from layerferry.planner.machine import Machine, assemble, default_rates, device_name, rates_file
from layerferry.planner.rate import Rate
from layerferry.planner.stopwatch import (
    best_s,
    copied_bytes_per_s,
    device_traffic,
    links,
    matmul_flops_per_s,
    triad_bytes_per_s,
)
from layerferry.store.store import plane_specs

log = logging.getLogger(__name__)


def probe(engine: EngineConfig | None = None, *, quick: bool = False) -> Machine:
    """Measure, cache, and return the machine. ``quick`` uses tiny sizes: for tests of the path, not of the numbers."""
    engine = engine or EngineConfig()
    backend = make(engine.device)
    rates = default_rates(device_name(backend), on_cpu=not isinstance(backend, CudaBackend))
    notes: list[str] = []

    def measure(what: str, function: Callable[[], dict[str, float]]) -> None:
        try:
            rates.update({key: Rate(value, "measured") for key, value in function().items()})
        except (RuntimeError, OSError, MemoryError, LayerFerryError) as error:
            notes.append(f"{what} not measured ({' '.join(str(error).split())[:120]}): the default stands")

    numel = 1 << (16 if quick else 24)
    measure("host memory traffic", lambda: {"dram_bytes_per_s": triad_bytes_per_s(numel)})
    if isinstance(backend, CudaBackend):
        cuda = backend
        measure("matrix products", lambda: {"matmul_flops_per_s": cuda.matmul_flops_per_s()})
        measure("link", lambda: links(cuda, 1 << 29))
        measure("device memory traffic", lambda: device_traffic(cuda, 1 << 29))
        if not cuda.can_pin:
            notes.append("host memory cannot be pinned (ulimit -l): copies are slower and do not run beside compute")
    else:
        notes.append("no CUDA device: the CPU plays the device, and both places are one memory")
        measure("copies", lambda: _copies(numel))
        measure("matrix products", lambda: {"matmul_flops_per_s": matmul_flops_per_s(64 if quick else 1024)})
        measure("device memory traffic", lambda: {"device_bytes_per_s": triad_bytes_per_s(numel)})
    measure("AdamW", lambda: {"optimizer_s_per_param": _update(backend, numel, StateFormat())})
    lean = StateFormat(master="24bit", moments="8bit")
    measure("AdamW, 8-bit", lambda: {"coded_optimizer_s_per_param": _update(backend, numel, lean)})
    disk = Path(engine.disk_folder) if engine.disk_folder else cache_folder()
    found, more = measured_rates(disk, 1 << 16) if quick else measured_rates(disk)
    if isinstance(load_kernels(), ReferenceKernels):
        notes.append("the native kernels could not be built: the torch ones are ten times slower")
    _remember(device_name(backend), rates)
    return assemble(engine, backend, rates | found, (*notes, *more))


def _copies(numel: int) -> dict[str, float]:
    """Where the CPU plays the device, a lane is a copy in host memory, and two lanes share it."""
    alone = copied_bytes_per_s(numel)
    ways = ("upload", "download")
    return {f"{way}_bytes_per_s": alone for way in ways} | {f"{way}_together_bytes_per_s": alone / 2 for way in ways}


def _update(backend: Backend, numel: int, state_format: StateFormat) -> float:
    """Seconds per parameter of AdamW in a format, on CUDA while both link directions run."""
    optimizer, threads = AdamW(state_format=state_format), max(1, cores() - 2)
    layout = Layout.of([ParameterSpec(name="weight", shape=(numel,), dtype=torch.bfloat16)])
    specs = plane_specs(optimizer.state_planes)
    planes = {kind: Plane(layout, spec, torch.zeros(layout.bytes(spec), dtype=torch.uint8)) for kind, spec in specs.items()}

    def update() -> None:
        optimizer.step(planes, layout, StepHyper(lr=1e-5, step=1), threads)

    if not isinstance(backend, CudaBackend):
        return best_s(update) / numel
    host = [backend.host_buffer(1 << 28, travels=True) for _ in range(2)]
    device = [backend.device_buffer(1 << 28) for _ in range(2)]
    update()
    for _ in range(40):  # some 0.25 s of traffic in each direction
        backend.copy(Lane.UPLOAD, device[0], host[0])
        backend.copy(Lane.DOWNLOAD, host[1], device[1])
    loaded = best_s(update, runs=3) / numel
    backend.synchronize()
    return loaded


def _remember(name: str, rates: dict[str, Rate]) -> None:
    path = rates_file(name)
    text = json.dumps({key: rate.value for key, rate in rates.items() if rate.source == "measured"}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        log.warning("%s: cannot be written (%s); the probe is not remembered", path, error)
