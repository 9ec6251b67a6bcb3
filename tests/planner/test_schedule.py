"""Waits against closed forms: each test makes one lane the slow one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layerferry.planner.program import Piece, Program, Waits
from layerferry.planner.schedule import waits

LAYERS = 6
FREE = Piece(forward=1.0, backward=2.0, drain=0.0, update=0.0, upload=0.0, bring=0.0, send=0.0, home=False)
END = replace(FREE, forward=0.0, backward=0.0)


def step(layer: Piece = FREE, *, end: Piece = END, **changes: object) -> Waits:
    base = Program(
        prologue=[end],
        layers=[layer] * LAYERS,
        head=[end],
        tied=False,
        waves=[4.0],
        num_slots=3,
        num_slabs=2,
        resident_gradients=False,
    )
    return waits(replace(base, **changes))  # type: ignore[arg-type]


def test_free_lanes_are_not_waited_for() -> None:
    assert step() == Waits(0.0, 0.0)


@pytest.mark.parametrize("tied", [False, True])
def test_home_units_wait_for_nothing(tied: bool) -> None:
    slow = replace(FREE, update=9.0, upload=9.0, bring=9.0, send=9.0, home=True)
    assert step(slow, end=slow, tied=tied, waves=[1.0, 1.0]) == Waits(0.0, 0.0)


@pytest.mark.parametrize("update", [0.5, 4.0, 7.0])
def test_updates_are_waited_for_where_the_forward_overtakes_them(update: float) -> None:
    """Unit k is ready after k + 1 updates, and needed after k forwards of 4 micro-batches."""
    found = step(replace(FREE, update=update))
    assert found.updates == pytest.approx(max(0.0, *((k + 1) * update - 4.0 * k for k in range(LAYERS))))
    assert found.copies == 0.0


@pytest.mark.parametrize("update", [0.5, 2.0, 7.0])
@pytest.mark.parametrize("turning", [2, 6])
def test_the_first_micro_batch_alone_hides_updates_of_layers_that_turn(update: float, turning: int) -> None:
    """Unit k is ready after k + 1 updates, and needed after 4 forwards of each layer before it, or 1 of those that turn."""
    found = step(replace(FREE, update=update), num_turning=turning, num_slots=LAYERS)
    needed = [4.0 * min(k, LAYERS - turning) + max(k - LAYERS + turning, 0) for k in range(LAYERS)]
    assert found.updates == pytest.approx(max(0.0, *((k + 1) * update - at for k, at in enumerate(needed))))
    assert found.copies == 0.0


def test_gradients_of_layers_that_turn_travel_behind_the_last_micro_batch() -> None:
    """Two slabs: the third gradient leaves when the first has, which began 2 backwards earlier; then one every 5 s."""
    found = step(replace(FREE, send=5.0), num_turning=LAYERS, num_slots=LAYERS)
    assert found.copies == pytest.approx((LAYERS - 2) * (5.0 - 2.0) - 2.0)
    assert step(replace(FREE, send=2.0), num_turning=LAYERS, num_slots=LAYERS) == Waits(0.0, 0.0)


def test_the_first_micro_batch_of_layers_that_turn_waits_for_what_is_carried_on() -> None:
    """12 s each from when the second wave has used the embedding, whose slot the head's weights come to; the first layer's is
    needed after one micro-batch's L forwards and all backwards but its own. The three micro-batches after that hide nothing."""
    found = step(replace(FREE, bring=12.0), num_turning=LAYERS, num_slots=LAYERS, waves=[4.0, 4.0])
    needed = LAYERS + 2.0 * (LAYERS - 1)
    assert found.copies == pytest.approx(12.0 * LAYERS - needed)
    assert found.updates == 0.0


def test_the_first_unit_waits_for_its_gradient_its_update_and_its_upload() -> None:
    found = step(end=replace(END, update=3.0, send=2.0, upload=1.0), num_slots=LAYERS)
    assert found.updates == pytest.approx(2.0 + 3.0 + 1.0)


def test_units_at_home_give_the_others_time() -> None:
    slow = replace(FREE, update=4.0)
    layers = [replace(slow, home=True)] * 3 + [slow] * 3
    home_end = replace(END, home=True)
    assert step(layers=layers, prologue=[home_end], head=[home_end]) == Waits(0.0, 0.0)


def test_uploads_slower_than_the_forward_set_its_pace() -> None:
    """One micro-batch a layer, three seconds an upload, a backward that hides everything: the forward takes L uploads and the
    last layer's own second; L seconds of it are compute."""
    found = step(replace(FREE, upload=3.0, backward=100.0), waves=[1.0])
    assert found.copies == pytest.approx(3.0 * LAYERS + 1.0 - LAYERS)


def test_slots_for_every_layer_upload_once() -> None:
    slow = replace(FREE, upload=3.0)
    once = step(slow, waves=[1.0, 1.0, 1.0], num_slots=LAYERS)
    assert once.copies == pytest.approx(3.0 * LAYERS + 1.0 - LAYERS), "in the first forward alone"
    assert step(slow, waves=[1.0, 1.0, 1.0]).copies > once.copies


def test_downloads_slower_than_the_backward_set_its_pace() -> None:
    """Of two slabs, layer k of the backward needs the one that layer k - 2 has left: L - 2 downloads of 5 s end after the
    first layer's own 2 s, and the last layer's slab is then free, where L layers alone would have taken 2 L."""
    found = step(replace(FREE, send=5.0), waves=[1.0])
    assert found.copies == pytest.approx(2.0 + 5.0 * (LAYERS - 2) - 2.0 * LAYERS)


def test_carried_gradients_travel_and_resident_ones_do_not() -> None:
    slow = replace(FREE, bring=5.0)
    assert step(slow, waves=[1.0, 1.0]).copies > 0.0
    assert step(slow, waves=[1.0, 1.0], resident_gradients=True).copies == 0.0
    assert step(slow, waves=[1.0]).copies == 0.0


@pytest.mark.parametrize(("down", "up"), [(0.9, 1.9), (0.5, 0.5)])
def test_inputs_that_are_faster_than_compute_are_not_waited_for(down: float, up: float) -> None:
    """The first one hides behind the head."""
    assert step(replace(FREE, input_down=down, input_up=up), end=replace(END, forward=1.0)).copies == pytest.approx(0.0)
    assert step(replace(FREE, input_down=down, input_up=up)).copies == pytest.approx(up)


def test_downloads_of_inputs_slower_than_the_forward_set_its_pace() -> None:
    """L layers of 4 micro-batches at 3 s an input; the last one begins its second of compute when all but two are down."""
    found = step(replace(FREE, input_down=3.0))
    assert found.copies == pytest.approx(3.0 * (4 * LAYERS - 2) + 1.0 - 4.0 * LAYERS)


def test_uploads_of_inputs_slower_than_the_backward_set_its_pace() -> None:
    """The first upload begins when the backward does, at the latest; the last micro-batch's 2 s follow all of them."""
    found = step(replace(FREE, input_up=3.0, forward=0.0))
    slowest = 3.0 * 4 * LAYERS + 2.0 - 2.0 * 4 * LAYERS
    assert slowest - 2 * 2.0 <= found.copies <= slowest


def test_inputs_share_their_lanes_with_weights_and_gradients() -> None:
    """The backward's uploads are inputs and weights: together they take longer than either."""
    slow = replace(FREE, upload=9.0, input_up=1.9)
    assert step(slow).copies > step(replace(slow, input_up=0.0)).copies
    assert step(replace(FREE, send=5.0, input_down=0.9), waves=[4.0, 4.0]).copies > 0


def test_many_waves_are_like_the_third() -> None:
    slow = replace(FREE, upload=2.0, bring=3.0, send=1.0)
    few, more, most = (step(slow, waves=[1.0] * count).copies for count in (8, 9, 10))
    assert most - more == pytest.approx(more - few) and more > few


@pytest.mark.parametrize("update", [0.5, 6.0, 10.0, 30.0])
def test_updates_on_arrival_hide_behind_the_backward(update: float) -> None:
    """The worker begins when the first of L layers has passed its 8 s of backward, and the first unit of the next forward is
    updated last: it waits for one update where they are faster than the backward, else for what is left of L of them."""
    found = step(replace(FREE, update=update), on_arrival=True)
    assert found.updates == pytest.approx(max(update, 8.0 + LAYERS * update - 8.0 * LAYERS))
    assert found.copies == 0.0


def test_gradients_that_find_no_free_buffer_hold_the_backward() -> None:
    """The worker is busy with the head for 100 s: three layers' gradients find a buffer, the fourth's, 32 s later, waits for the
    rest of them. The next forward begins with the embedding's 100 s."""
    found = step(end=replace(END, update=100.0), on_arrival=True)
    assert found.updates == pytest.approx((100.0 - 32.0) + 100.0)
    one_layer = step(layers=[FREE], end=replace(END, update=100.0), on_arrival=True)
    assert one_layer.updates == pytest.approx((100.0 - 8.0) + 100.0), "the embedding's waits for the one buffer of the ends"
