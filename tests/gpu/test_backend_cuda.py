"""The CUDA backend: exact pinned buffers, fences, and failures that leave nothing behind."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from layerferry.backends import cuda
from layerferry.backends.base import Lane
from layerferry.backends.cuda import CudaBackend, device_count
from layerferry.backends.pinning import Pinning
from layerferry.layout import NO_PLANE, RESIDUE, RESIDUE_PLANE, Layout, ParameterSpec
from layerferry.store.store import Store, plane_specs
from layerferry.units import Unit
from tests.backends.test_pages import is_mapped

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]


def test_freed_pinned_memory_can_be_used_for_anything() -> None:
    backend = CudaBackend()
    for _ in range(20):
        buffer = backend.host_buffer(3 << 20, travels=True)
        assert buffer.is_pinned()
        del buffer
        gc.collect()
        torch.randn(3 << 18).cuda()  # a pageable copy from the same addresses
    backend.synchronize()


def test_a_failed_pin_costs_one_warning_and_no_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    backend = CudaBackend()
    real = cuda._runtime()

    class Refusing:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            return int(
                real.cudaHostRegister(0, num_bytes, flags)
            )  # leaves the context's last error behind, as a real refusal does

    monkeypatch.setattr(cuda, "_runtime", Refusing)
    with caplog.at_level(logging.WARNING):
        buffers = [backend.host_buffer(1 << 20, travels=True) for _ in range(3)]
    assert len([r for r in caplog.records if "cannot pin" in r.message]) == 1
    assert not any(buffer.is_pinned() for buffer in buffers)
    device = backend.device_buffer(1 << 20)
    backend.copy(Lane.UPLOAD, device, buffers[0].fill_(7))
    backend.record(Lane.UPLOAD).synchronize()
    assert int(device.sum(dtype=torch.int64)) == 7 << 20


def test_a_buffer_registered_in_pieces_is_copied_over_their_borders() -> None:
    backend = CudaBackend()
    backend._pinning = Pinning(backend._register, backend._unregister, piece_bytes=1 << 21)
    host = backend.host_buffer((5 << 20) + 4096, travels=True)
    back = backend.host_buffer(host.numel(), travels=True)
    host.copy_(torch.arange(host.numel(), dtype=torch.int64).remainder(251).to(torch.uint8))
    device = backend.device_buffer(host.numel())
    for part in (slice(0, None), slice((1 << 21) - 8, (1 << 22) + 8)):
        back.zero_()
        device.zero_()
        backend.synchronize()
        backend.copy(Lane.UPLOAD, device[part], host[part])
        backend.synchronize()
        backend.copy(Lane.DOWNLOAD, back[part], device[part])
        backend.synchronize()
        assert torch.equal(back[part], host[part])
    del host, back
    gc.collect()
    torch.randn(3 << 18).cuda()  # whatever is mapped there next can be copied


def test_weights_made_on_the_device_cross_the_borders_of_pinned_planes() -> None:
    backend = CudaBackend()
    backend._pinning = Pinning(backend._register, backend._unregister, piece_bytes=1 << 21)
    layout = Layout.of([ParameterSpec(name="w", shape=(3 << 20,), dtype=torch.bfloat16)])
    unit = Unit(index=0, name="only", is_layer=True, layout=layout, names={"w": "w"})
    for residue in (RESIDUE_PLANE, NO_PLANE):
        store = Store([unit], plane_specs({RESIDUE: residue}), backend)
        for value in (torch.randn(3 << 20, device=backend.device), torch.randn(3 << 20, device=backend.device).bfloat16()):
            store.set_parameter(unit, layout.by_name["w"], value)
            kept = value.cpu().float()
            expected = kept if residue is RESIDUE_PLANE else kept.bfloat16().float()
            assert torch.equal(store.master(unit, layout.by_name["w"]), expected)


def test_pages_are_registered_until_they_are_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, there = CudaBackend(), []
    real = backend._pinning._unregister

    def unregister(address: int) -> None:
        there.append(is_mapped(address))
        real(address)

    monkeypatch.setattr(backend._pinning, "_unregister", unregister)
    buffer = backend.host_buffer(1 << 22, travels=True)
    del buffer
    gc.collect()
    assert there == [True]


def test_computing_is_the_compute_lane_whatever_the_caller_is_at() -> None:
    backend = CudaBackend()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        assert torch.cuda.current_stream() != backend._streams[Lane.COMPUTE]
        with backend.computing():
            assert torch.cuda.current_stream() == backend._streams[Lane.COMPUTE]


def test_copies_wait_for_fences() -> None:
    backend = CudaBackend()
    host = backend.host_buffer(256 << 20, travels=True)
    back = backend.host_buffer(256 << 20, travels=True)
    device = backend.device_buffer(256 << 20)
    for value in range(1, 20):
        host.fill_(value)
        backend.copy(Lane.UPLOAD, device, host)
        backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        device.add_(1)
        backend.wait(Lane.DOWNLOAD, backend.record(Lane.COMPUTE))
        backend.copy(Lane.DOWNLOAD, back, device)
        backend.record(Lane.DOWNLOAD).synchronize()
        assert int(back.min()) == int(back.max()) == value + 1


@pytest.mark.parametrize("lane", [Lane.UPLOAD, Lane.DOWNLOAD, Lane.SIDE])
def test_a_new_buffer_is_zero_for_every_lane(lane: Lane) -> None:
    """Also for one that could run ahead of a compute lane that is busy: what it writes is there to stay."""
    backend = CudaBackend()
    source = backend.host_buffer(1 << 20, travels=True).fill_(7)
    torch.cuda._sleep(200_000_000)
    buffer = backend.device_buffer(1 << 20)
    backend.copy(lane, buffer, source)
    backend.synchronize()
    assert bool((buffer == 7).all())


def test_a_limit_holds_for_all_that_the_allocator_takes() -> None:
    backend = CudaBackend()
    gc.collect()
    backend.drop_workspaces()
    taken = torch.cuda.memory_reserved(backend.device)
    backend.limit_memory(taken + (1 << 28))
    try:
        first = backend.device_buffer(1 << 27)
        with pytest.raises(torch.OutOfMemoryError):
            backend.device_buffer(1 << 28)
        assert torch.cuda.memory_reserved(backend.device) <= taken + (1 << 28)
        del first
    finally:
        backend.limit_memory(None)
    assert backend.device_buffer(1 << 28).numel() == 1 << 28
