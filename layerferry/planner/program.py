"""One step as ``schedule.py`` plays it: what each unit or part takes on every lane, and what compute stands still for.

``time.py`` makes it from a model, a plan and a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Seconds of one unit or part: compute of a micro-batch, one drain's passes, one update, one copy each way."""

    forward: float
    """Of a whole head: forward and backward, which are one; of a part of it: its pass for the loss."""
    backward: float
    drain: float
    update: float
    upload: float
    bring: float
    """Upload of a carried gradient."""
    send: float
    """Download of its gradient."""
    home: bool
    """Lives @device: neither update nor copies."""
    trained: bool = True
    """False: neither update nor gradient."""
    upload_again: float = 0.0
    """Of a layer whose experts travel in parts: what comes a second time on the way down."""
    input_down: float = 0.0
    """Download of one micro-batch's input; 0: it stays @device."""
    input_up: float = 0.0
    """Its way back."""
    finish: float = 0.0
    """Of the update, what follows the device; 0: the CPU does all of it."""
    orthogonal: float = 0.0
    """Compute between the two, which the sweeps have to do without."""
    trip: float = 0.0
    """Copies for that, both ways."""
    fetch: float = 0.0
    """Of its state from the disk; 0: it is not there."""
    spill: float = 0.0
    """And back."""


@dataclass(slots=True)
class Waits:
    """Seconds that compute stands still in a step."""

    updates: float = 0.0
    copies: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One step. Prologue and head are a piece each, or parts. ``tied``: they are one unit, whose update and copies are those of
    ``prologue``."""

    prologue: Sequence[Piece]
    layers: Sequence[Piece]
    head: Sequence[Piece]
    tied: bool
    waves: Sequence[float]
    """Micro-batches of each."""
    num_slots: int
    num_slabs: int
    resident_gradients: bool
    num_turning: int = 0
    """Of the last layers, which turn with the head."""
    num_below: int = 0
    """Layers that the backward does not come to."""
    in_parts: bool = False
    """Layers' experts travel in parts: next to nothing of a layer stays in its slots for its next use."""
    on_arrival: bool = False
    """Updates begin when gradients are @host, and gradients wait for a free buffer there."""
    home_step_s: float = 0.0
