"""The hostile backend: it changes no result, and it catches every fence that is left out.

``test_every_fence_is_needed`` removes one ordering call of the engine at a time, found by running it, and demands that the run
either raises ``RaceError`` or ends with other bits than the cpu backend's.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from layerferry.backends.base import Fence, Lane
from layerferry.backends.chaos import ChaosBackend, ChaosFence, RaceError, is_released
from layerferry.backends.cpu import CpuBackend
from layerferry.errors import DiskTierError
from layerferry.objectives import OnLogits
from layerferry.optim.base import Optimizer
from layerferry.optim.muon import Muon
from layerferry.plan import Plan
from tests.conformance.harness import make_engine, micro_batches
from tests.engine.small import same, small_model, state

PLAN = Plan(fp32=True, num_slots=2, num_slabs=1, num_waves=2, carry_fp32=True)
AT_HOST = replace(PLAN, num_waves=1, host_inputs=2, row_tokens=8, rows_per_step=2, on_device=tuple(range(5)))
"""Nothing but kept inputs travels, so no other copy orders them by chance."""
HOME = replace(PLAN, num_slots=3, num_slabs=2, on_device=(2,))
TURN = replace(PLAN, num_waves=1, turn_layers=2, num_slots=3)
ON_DISK = replace(PLAN, on_disk=(0, 1, 2, 3))
SCENARIOS: tuple[tuple[Plan, Optimizer | None], ...] = (
    *((PLAN, None), (HOME, None), (AT_HOST, None), (ON_DISK, None), (TURN, None)),
    *((HOME, Muon()), (ON_DISK, Muon())),
)
Site = tuple[str, str, int]


class Forgetful(ChaosBackend):
    """Leaves out the ordering calls of one place in the engine, and remembers which places there are."""

    def __init__(self, seed: int, without: Site | None = None) -> None:
        super().__init__(seed, eagerness=0.05)
        self.without, self.sites = without, set[Site]()

    def _forgets(self) -> bool:
        frame = sys._getframe(2)
        place = Path(frame.f_code.co_filename)
        if place.parent.name not in ("engine", "store"):
            return False
        site = (place.name, frame.f_code.co_name, frame.f_lineno)
        self.sites.add(site)
        return site == self.without

    def wait(self, lane: Lane, fence: Fence) -> None:
        if not self._forgets():
            super().wait(lane, fence)

    def record(self, lane: Lane) -> Fence:
        fence = super().record(lane)
        assert isinstance(fence, ChaosFence)
        return ForgetfulFence(self, fence.lane, fence.ticket, fence.clock)


class ForgetfulFence(ChaosFence):
    """``synchronize`` is an ordering call too."""

    def synchronize(self) -> None:
        assert isinstance(self.backend, Forgetful)
        if not self.backend._forgets():
            super().synchronize()


def trained(backend: CpuBackend, plan: Plan, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    engine = make_engine(small_model(), plan, backend=backend, optimizer=optimizer)
    try:
        for step in range(2):
            engine.step(micro_batches(2, rows=1, tokens=8, seed=step), lr=1e-2)
            engine.evaluate(micro_batches(1, rows=1, tokens=8))
        engine.feed.forget(stale=True)
        engine.feed.expect(engine.skeleton.layer_units)  # and then something else is wanted
        with engine.feed(engine.skeleton.layer_units[-1]):
            pass
        if plan.host_inputs or plan.turn_layers:  # a step that breaks off at the turn, and one that follows it
            with pytest.raises(ZeroDivisionError):
                engine.step(micro_batches(2, rows=1, tokens=8), OnLogits(lambda logits, labels: logits.sum() / (1 // 0)), lr=1e-2)
            engine.step(micro_batches(2, rows=1, tokens=8, seed=2), lr=1e-2)
        engine.settle()
        at_home = [unit for unit in engine.store.units if unit.index not in plan.on_device]
        planes = [plane.buffer for unit in at_home for plane in engine.store.planes(unit).values()]
        here = [buffer for buffer in planes if buffer.device.type != "meta"]  # and not @disk
        backend.touch(Lane.HOST, reads=here)  # whoever settles reads, as saving does
        return state(engine)
    finally:
        engine.deferred.close()


@pytest.fixture(scope="module")
def truths() -> list[dict[str, Tensor]]:
    return [trained(CpuBackend(), *scenario) for scenario in SCENARIOS]


def ordering_sites() -> dict[Site, list[int]]:
    """Each place, and the numbers of the scenarios that come by there."""
    found: dict[Site, list[int]] = {}
    for number, scenario in enumerate(SCENARIOS):
        backend = Forgetful(0)
        trained(backend, *scenario)
        for site in backend.sites:
            found.setdefault(site, []).append(number)
    return found


def test_every_fence_is_needed(truths: list[dict[str, Tensor]]) -> None:
    sites = ordering_sites()
    files = {"feed.py", "drain.py", "deferred.py", "kept.py", "stages.py", "disk.py"}
    assert {name for name, _, _ in sites} == files and len(sites) >= 22
    missed = [site for site, numbers in sites.items() if not any(caught(site, SCENARIOS[n], truths[n]) for n in numbers)]
    assert not missed


def caught(site: Site, scenario: tuple[Plan, Optimizer | None], truth: dict[str, Tensor]) -> bool:
    for seed in range(3):
        try:
            if not same(trained(Forgetful(seed, site), *scenario), truth):
                return True
        except (RaceError, AssertionError, DiskTierError):
            return True
    return False


SHAPES = [
    replace(PLAN, num_slots=slots, num_slabs=slabs, num_waves=waves, turn_layers=turn)
    for slots, slabs, waves, turn in ((1, 1, 1, 0), (2, 1, 2, 0), (3, 2, 1, 1), (4, 1, 2, 0))
]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_two_hundred_orders_of_events_give_the_same_bits(number: int) -> None:
    """Seeds, eagerness and plans (fifty seeds each) change what happens when, never what comes out."""
    model = small_model(layers=2)
    batches = [micro_batches(2, rows=1, tokens=6, seed=step) for step in range(2)]

    def run(backend: CpuBackend, plan: Plan) -> dict[str, Tensor]:
        engine = make_engine(model, plan, backend=backend)
        for step in range(2):
            engine.step(batches[step], lr=1e-2)
        left = state(engine)
        engine.close()
        return left

    truth = run(CpuBackend(), PLAN)
    for seed in range(50 * number, 50 * (number + 1)):
        backend = ChaosBackend(seed, eagerness=(0.0, 0.1, 0.5, 1.0)[seed % 4])
        assert same(run(backend, SHAPES[number]), truth), seed


# -------------------------------------------------------------------- the backend itself


def buffers(backend: ChaosBackend) -> tuple[Tensor, Tensor]:
    """@host and @device, zero both."""
    host, device = backend.host_buffer(8, travels=True), backend.device_buffer(8)
    backend.record(Lane.COMPUTE).synchronize()
    return host, device


def test_a_copy_lands_late_but_before_who_waits_for_it() -> None:
    backend = ChaosBackend(eagerness=0.0)
    host, device = buffers(backend)
    host.fill_(7)
    backend.copy(Lane.UPLOAD, device, host)
    assert not device.any()
    fence = backend.record(Lane.UPLOAD)
    assert not device.any()
    backend.wait(Lane.COMPUTE, fence)
    assert bool((device == 7).all())


LANES = (Lane.UPLOAD, Lane.DOWNLOAD, Lane.SIDE)


@pytest.mark.parametrize("lane", LANES)
def test_the_zeros_of_a_new_buffer_come_late_but_before_every_lane(lane: Lane) -> None:
    backend = ChaosBackend(eagerness=0.0)
    host, device = backend.host_buffer(8, travels=True), backend.device_buffer(8)
    assert bool((device == 0xFF).all())
    backend.copy(lane, device, host.fill_(7))
    backend.record(lane).synchronize()
    backend.synchronize()
    assert bool((device == 7).all())


def test_compute_finds_the_zeros_of_a_new_buffer() -> None:
    for use in ("touch", "computing"):
        backend = ChaosBackend(eagerness=0.0)
        device = backend.device_buffer(8)
        assert is_released(device.view(torch.float32))
        if use == "touch":
            backend.touch(Lane.COMPUTE, reads=[device])
        else:
            with backend.computing():
                pass
        assert not device.any()


class Early(ChaosBackend):
    """Its new buffers leave ``lane`` unordered behind their zeros."""

    def __init__(self, lane: Lane, eagerness: float = 0.0) -> None:
        super().__init__(eagerness=eagerness)
        self.lane = lane

    def wait(self, lane: Lane, fence: Fence) -> None:
        if lane is not self.lane or sys._getframe(1).f_code.co_name != "device_buffer":
            super().wait(lane, fence)


@pytest.mark.parametrize("lane", LANES)
def test_a_lane_that_runs_ahead_of_the_zeros_is_caught(lane: Lane) -> None:
    for eagerness in (0.0, 1.0):
        backend = Early(lane, eagerness)
        host, device = backend.host_buffer(8, travels=True), backend.device_buffer(8)
        with pytest.raises(RaceError, match=f"{lane.value} copy: no fence after the zeros that compute wrote"):
            backend.copy(lane, device, host)


def test_the_first_weights_come_behind_the_zeros_of_their_slots() -> None:
    """Nothing but the backend orders them: the feed waits for nobody where a slot has not been used."""
    with pytest.raises(RaceError, match="upload copy: no fence after the zeros that compute wrote"):
        trained(Early(Lane.UPLOAD), PLAN)


class Careless(ChaosBackend):
    """Inputs that leave for the host are given back while they do; nothing says so but that they are free."""

    def wait(self, lane: Lane, fence: Fence) -> None:
        if sys._getframe(1).f_code.co_name != "_let_go":
            super().wait(lane, fence)

    def release(self, buffer: Tensor) -> None:
        if sys._getframe(1).f_code.co_name != "_let_go":
            super().release(buffer)


def test_memory_that_is_freed_while_a_copy_reads_it_is_caught() -> None:
    with pytest.raises(RaceError, match="memory was freed with no fence after the copy for which download uses it"):
        trained(Careless(eagerness=1.0), AT_HOST)
    trained(ChaosBackend(eagerness=1.0), AT_HOST)


def test_memory_is_free_when_a_fence_says_so_and_its_address_begins_anew() -> None:
    backend = ChaosBackend(eagerness=1.0)
    for waits in (True, False) * 3:
        host, device = buffers(backend)
        backend.copy(Lane.UPLOAD, device, host)
        if waits:
            backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        else:
            backend.record(Lane.UPLOAD).synchronize()
        del device
        backend.touch(Lane.COMPUTE, writes=[host])
        assert len(backend._uses) == 1
        del host
    host, device = buffers(backend)
    backend.copy(Lane.UPLOAD, device, host)
    del device
    with pytest.raises(RaceError, match="freed with no fence after the copy for which upload"):
        backend.touch(Lane.COMPUTE, writes=[torch.zeros(1)])


def test_waits_chain_through_lanes() -> None:
    backend = ChaosBackend(eagerness=0.0)
    host, device = buffers(backend)
    home = backend.host_buffer(8, travels=True)
    host.fill_(3)
    backend.copy(Lane.UPLOAD, device, host)
    backend.wait(Lane.DOWNLOAD, backend.record(Lane.UPLOAD))
    backend.copy(Lane.DOWNLOAD, home, device)
    backend.record(Lane.DOWNLOAD).synchronize()
    assert bool((home == 3).all())


def test_races_are_reported_whether_or_not_the_run_got_away_with_it() -> None:
    for eagerness in (0.0, 1.0):
        backend = ChaosBackend(eagerness=eagerness)
        host, device = buffers(backend)
        backend.copy(Lane.UPLOAD, device, host)
        with pytest.raises(RaceError, match="compute use: no fence after the copy that upload wrote"):
            backend.touch(Lane.COMPUTE, reads=[device])
        backend = ChaosBackend(eagerness=eagerness)
        host, device = buffers(backend)
        backend.touch(Lane.COMPUTE, reads=[device])
        with pytest.raises(RaceError, match="by which compute reads"):
            backend.copy(Lane.UPLOAD, device, host)


def test_reads_beside_reads_are_no_race() -> None:
    backend = ChaosBackend()
    host, device = buffers(backend)
    backend.touch(Lane.COMPUTE, reads=[device])
    backend.copy(Lane.DOWNLOAD, host, device)


def test_released_memory_is_nan_in_both_dtypes() -> None:
    backend = ChaosBackend()
    _, device = buffers(backend)
    backend.release(device)
    assert is_released(device.view(torch.bfloat16)) and is_released(device.view(torch.float32))


def test_the_worker_is_another_actor() -> None:
    """What another thread wrote is unordered until a fence of its own is waited for."""
    import threading

    backend = ChaosBackend()
    host, device = buffers(backend)
    fences: list[Fence] = []

    def update() -> None:
        backend.touch(Lane.HOST, writes=[host])
        fences.append(backend.record(Lane.HOST))

    worker = threading.Thread(target=update)
    worker.start()
    worker.join()
    with pytest.raises(RaceError):
        backend.copy(Lane.UPLOAD, device, host)
    backend.wait(Lane.UPLOAD, fences[0])
    backend.copy(Lane.UPLOAD, device, host)
