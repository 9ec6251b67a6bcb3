"""Kept inputs @host: what layers are computed again from travels down in the forward and comes back for the backward.

A kept input [B, T, D] of every (layer, micro-batch) is all that a one-wave step keeps at activation budget 0, and at many
tokens it is most of the device: 26 GB for 131k tokens of a 7B model. For the first layers of the model, whose inputs wait
longest, it lives @host instead. ``send`` queues the download of an input that compute has made; ``with bring_back`` gives it
to the backward, and the upload of the one after next is queued behind its use.

Inputs leave from the very tensors that compute has made: no copy @device. The ones on their way are held here, at most
``LEAVING`` of them, and compute waits for a download before their memory is given back, so that the allocator may hand it to
whatever compute does next. They come back into a ring of ``LANDINGS`` buffers. An input that is wider than planned (a family
that keeps its residual stream in fp32) stays @device, and one line says so. Places @host are one buffer for each (layer,
micro-batch of a wave), made once.

Left out: graphs. The tape makes them again (``Tape.run_again``). Checked by ``tests/engine/test_kept.py`` and, with one fence
removed at a time, by ``tests/backends/test_chaos.py``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from layerferry.backends.base import Backend, Fence, Lane
from layerferry.engine.clock import Clock
from layerferry.engine.sizes import LANDINGS, LEAVING, InputSizes
from layerferry.errors import PlanError
from layerferry.models.attention_outputs import Results
from layerferry.units import Unit

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Place:
    """Where one input waits @host. Written by downloads only."""

    buffer: Tensor  # [input_bytes] uint8 @host
    written: Fence | None = None


@dataclass(eq=False)
class Landing:
    """A device buffer that inputs come back into. Written by uploads only."""

    buffer: Tensor  # [input_bytes] uint8 @device
    free: Fence | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """One input of the present wave."""

    unit: Unit
    shape: torch.Size
    dtype: torch.dtype
    place: Place | None
    here: Tensor | None = None
    """The input itself, where it stays @device."""


class KeptInputs:
    """Owns the places @host and the landings. All calls come from the thread that runs the sweeps."""

    def __init__(self, backend: Backend, clock: Clock, sizes: InputSizes) -> None:
        self._backend, self._clock, self._sizes = backend, clock, sizes
        self._places = [
            [Place(backend.host_buffer(sizes.input_bytes, travels=True)) for _ in range(sizes.num_micro_batches)]
            for _ in range(sizes.num_layers)
        ]
        count = LANDINGS if sizes.num_layers else 0
        self._landings = [Landing(backend.device_buffer(sizes.input_bytes)) for _ in range(count)]
        self._numbers: Sequence[int] = ()
        self._kept: dict[tuple[int, int], Kept] = {}
        self._attention: dict[tuple[int, int], Results] = {}
        self._leaving: deque[tuple[Tensor, Fence, bool]] = deque()
        self._coming: deque[Kept] = deque()
        self._free: deque[Landing] = deque()
        self._landed: deque[tuple[Landing, Fence]] = deque()
        self._warned = False
        self.host_bytes = sizes.host_bytes
        self.sent_bytes = self.returned_bytes = 0
        """Bytes of inputs that have gone down, and come back, since the start."""

    def rebuilds(self, layer_index: int) -> bool:
        """Whether this layer is computed again from its input."""
        return self._sizes.first_layer <= layer_index < self._sizes.num_rebuilt

    def _place(self, layer_index: int, number: int) -> Place | None:
        """None: the layer's inputs stay @device."""
        own = layer_index - self._sizes.first_layer
        return self._places[own][self._numbers.index(number)] if own < len(self._places) else None

    def begin(self, numbers: Sequence[int]) -> None:
        """A wave of these micro-batches. What a wave that has failed has left is dropped."""
        most = len(self._places[0]) if self._places else len(numbers)
        if len(numbers) > most:
            raise PlanError(
                f"a wave of {len(numbers)} micro-batches; the plan has room @host for the inputs of {most}: give a step fewer "
                "rows, or load with host_inputs=0"
            )
        while self._leaving:
            self._let_go()
        for _, arrival in self._landed:
            self._backend.wait(Lane.COMPUTE, arrival)
        self._landed.clear()
        self._numbers = numbers
        self._kept.clear()
        self._attention.clear()
        self._coming.clear()
        self._free = deque(self._landings)
        for landing in self._landings:
            landing.free = self._backend.record(Lane.COMPUTE)

    # ---------------------------------------------------------------- down

    def send(self, unit: Unit, layer_index: int, number: int, hidden: Tensor) -> None:
        """``hidden`` [B, T, D] @device, the input of layer ``layer_index`` for micro-batch ``number``, begins its way down.

        It may be used until the next input is sent, and not later. An upload of the wave before has left its place: compute has
        waited for it.
        """
        while len(self._leaving) >= LEAVING:
            self._let_go()
        key = (layer_index, number)
        flat = hidden.detach().contiguous().view(-1).view(torch.uint8)
        size = flat.numel()
        place = self._place(layer_index, number)
        if place is not None and size > place.buffer.numel():
            self._warn(unit, size / hidden.numel())
            place = None
        if place is None:
            self._kept[key] = Kept(unit, hidden.shape, hidden.dtype, place, here=hidden)
            return
        self._backend.touch(Lane.COMPUTE, writes=[flat])
        self._backend.wait(Lane.DOWNLOAD, self._backend.record(Lane.COMPUTE))
        with self._clock.span(Lane.DOWNLOAD, f"{unit.name} input"):
            self._backend.copy(Lane.DOWNLOAD, place.buffer[:size], flat)
        place.written = self._backend.record(Lane.DOWNLOAD)
        self._kept[key] = Kept(unit, hidden.shape, hidden.dtype, place)
        # the first layer's input may be part of the prologue's graph, which the wave keeps
        self._leaving.append((flat, place.written, layer_index > 0))
        self.sent_bytes += size

    def _let_go(self) -> None:
        flat, arrived, ours = self._leaving.popleft()
        with self._clock.waiting("link"):
            self._backend.wait(Lane.COMPUTE, arrived)
        if ours:
            self._backend.release(flat)

    def _warn(self, unit: Unit, width: float) -> None:
        if not self._warned:
            log.warning("%s: its input takes %g bytes a value, more than planned, and stays @device", unit.name, width)
            self._warned = True

    def attention_of(self, layer_index: int, number: int) -> Results | None:
        """Where the results of the layer's attention wait for the backward, @device; None: they are computed again."""
        if layer_index < self._sizes.first_attention:
            return None
        return self._attention.setdefault((layer_index, number), [])

    # ---------------------------------------------------------------- up

    def expect(self) -> None:
        """The backward begins: it goes from the last layer to the first, in each from the first micro-batch to the last. The
        first inputs are on their way when this returns."""
        while self._leaving:
            self._let_go()
        layers = range(self._sizes.first_layer, self._sizes.first_layer + len(self._places))
        order = [(layer, number) for layer in reversed(layers) for number in self._numbers]
        self._coming = deque(kept for key in order if (kept := self._kept[key]).here is None)
        while self._free and self._coming:
            self._bring_next()

    def _bring_next(self) -> None:
        kept, landing = self._coming.popleft(), self._free.popleft()
        place, size = kept.place, kept.shape.numel() * kept.dtype.itemsize
        assert place is not None and place.written is not None and landing.free is not None
        self._backend.wait(Lane.UPLOAD, place.written)
        self._backend.wait(Lane.UPLOAD, landing.free)
        with self._clock.span(Lane.UPLOAD, f"{kept.unit.name} input"):
            self._backend.copy(Lane.UPLOAD, landing.buffer[:size], place.buffer[:size])
        self._landed.append((landing, self._backend.record(Lane.UPLOAD)))
        self.returned_bytes += size

    def take(self, layer_index: int, number: int) -> Tensor:
        """The same for good: a copy, where it comes back to a landing."""
        stays = self._kept[layer_index, number].here is not None
        with self.bring_back(layer_index, number) as hidden:
            return hidden if stays else hidden.clone()

    @contextmanager
    def bring_back(self, layer_index: int, number: int) -> Iterator[Tensor]:
        """The input [B, T, D] @device of what is next in the order of ``expect``, for the compute lane, until the context is
        left."""
        kept = self._kept.pop((layer_index, number))
        if kept.here is not None:
            yield kept.here
            return
        landing, arrival = self._landed.popleft()
        with self._clock.waiting("link"):
            self._backend.wait(Lane.COMPUTE, arrival)
        self._backend.touch(Lane.COMPUTE, reads=[landing.buffer])
        size = kept.shape.numel() * kept.dtype.itemsize
        yield landing.buffer[:size].view(kept.dtype).view(kept.shape)
        self._backend.release(landing.buffer)
        landing.free = self._backend.record(Lane.COMPUTE)
        self._free.append(landing)
        if self._coming:
            self._bring_next()
