"""Handles, rebuilds, and the two guards of the tape."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import layerferry.engine.gradients as gradients_module
import layerferry.engine.tape as tape_module
from layerferry.engine.engine import Engine
from layerferry.engine.feed import Slot
from layerferry.engine.gradients import add_gradients, gradients_of
from layerferry.engine.oracle import WholeRows, loss_and_gradients
from layerferry.engine.tape import Handle, SideGradients, Tape
from layerferry.errors import ModelRefused
from layerferry.layout import FP32_PLANE, WEIGHT_PLANE, Layout, ParameterSpec, Plane
from layerferry.models.stack import LayerCall
from layerferry.models.template import Template
from layerferry.units import Unit
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import PLAN, gradients, make_engine, micro_batches, real_model, unequal
from tests.engine.small import small_model

CALL = LayerCall((), {}, None)


class Layer(nn.Module):
    """Two products, one of them with a transposed half of the weight: handles with offsets and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden * self.scale) @ self.weight.t()


def unit_of(layer: nn.Module) -> Unit:
    specs = [ParameterSpec(name=n, shape=tuple(p.shape), dtype=torch.float32) for n, p in layer.named_parameters()]
    return Unit(name="layer.0", index=0, layout=Layout.of(specs), names={s.name: s.name for s in specs}, is_layer=True)


def slot_with(unit: Unit, layer: nn.Module) -> Slot:
    slot = Slot(torch.zeros(unit.layout.bytes(WEIGHT_PLANE), dtype=torch.uint8))
    plane = Plane(unit.layout, WEIGHT_PLANE, slot.buffer)
    for entry in unit.layout.entries:
        plane.view(entry).copy_(dict(layer.named_parameters())[entry.name].detach())
    return slot


@pytest.mark.parametrize("rebuild", [False, True])
def test_the_backward_reads_the_slot_that_it_is_given(rebuild: bool) -> None:
    torch.manual_seed(0)
    layer = Layer()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(4, 4))
        layer.scale.copy_(torch.randn(4))
    unit = unit_of(layer)
    forward, backward = slot_with(unit, layer), slot_with(unit, layer)
    hidden, gradient = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    tape = Tape([forward, backward], rebuilt={unit.index} if rebuild else (), audit=True)
    template = Template(layer, Plane(unit.layout, WEIGHT_PLANE, forward.buffer))
    with tape.record(unit, forward):
        output = tape.forward(unit, 0, template, hidden, CALL)
    forward.buffer.fill_(0xFF)  # NaN
    accumulator = Plane(unit.layout, FP32_PLANE, torch.zeros(unit.layout.bytes(FP32_PLANE), dtype=torch.uint8))
    other = Template(layer, Plane(unit.layout, WEIGHT_PLANE, backward.buffer))
    with tape.resolving(unit, backward):
        found = tape.backward(unit, 0, other, [gradient], accumulator, SideGradients())
    leaf = hidden.clone().requires_grad_(True)
    expected = torch.autograd.grad(layer(leaf), [leaf, layer.scale, layer.weight], gradient)
    assert torch.equal(output, layer(hidden)) and torch.equal(found, expected[0])
    by_name = {entry.name: accumulator.view(entry) for entry in unit.layout.entries}
    assert torch.equal(by_name["scale"], expected[1]) and torch.equal(by_name["weight"], expected[2])


def test_a_handle_is_offset_size_and_stride_in_its_own_dtype() -> None:
    tape = Tape([], rebuilt=(), audit=False)
    buffer = torch.arange(64, dtype=torch.float32).view(torch.uint8)
    unit = unit_of(Layer())
    slot = Slot(buffer.clone())
    view = slot.buffer.view(torch.float32)[8:24].view(4, 4).t()[1:]
    handle = Handle(0, view.dtype, int(view.storage_offset()), view.size(), view.stride())
    with tape.resolving(unit, slot):
        assert torch.equal(tape._resolve(handle), view)
    other = Slot(torch.arange(100, 164, dtype=torch.float32).view(torch.uint8))
    with tape.resolving(unit, other):
        assert torch.equal(tape._resolve(handle), view + 100)
    with pytest.raises(KeyError):
        tape._resolve(handle)  # no slot holds the unit now


def test_no_saved_tensor_may_live_in_another_units_slot() -> None:
    layer = Layer()
    unit = unit_of(layer)
    own, other = slot_with(unit, layer), slot_with(unit, layer)
    stray = Template(layer, Plane(unit.layout, WEIGHT_PLANE, other.buffer))
    tape = Tape([own, other], rebuilt=(), audit=False)
    with pytest.raises(AssertionError, match="another unit's slot"), tape.record(unit, own):
        tape.forward(unit, 0, stray, torch.randn(1, 2, 4), CALL)


def test_a_leaf_from_elsewhere_is_refused_by_shape() -> None:
    class Shares(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * shared

    shared = torch.randn(3, 4, requires_grad=True)
    layer = Shares()
    unit = unit_of(layer)
    slot = slot_with(unit, layer)
    tape = Tape([slot], rebuilt=(), audit=True)
    template = Template(layer, Plane(unit.layout, WEIGHT_PLANE, slot.buffer))
    with pytest.raises(ModelRefused, match=r"layer\.0: .*\(3, 4\).*shared"), tape.record(unit, slot):
        tape.forward(unit, 0, template, torch.randn(1, 3, 4), CALL)


class Exp(Layer):
    """``exp`` saves its own output."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.exp(super().forward(hidden)).sin()


def test_a_layer_that_is_passed_on_leaves_nothing_and_run_again_is_the_same() -> None:
    layer = Exp()
    unit = unit_of(layer)
    slot = slot_with(unit, layer)
    tape = Tape([slot], rebuilt=(), audit=True)
    template = Template(layer, Plane(unit.layout, WEIGHT_PLANE, slot.buffer))
    hidden = torch.randn(2, 3, 4)
    kept = _Storages()
    with tape.record(unit, slot), kept:
        output = tape.pass_on(unit, 0, template, hidden, CALL)
        expected = output.clone()
    del output
    assert kept.seen and not kept.alive(), "a graph that nobody holds holds nothing"
    accumulator = Plane(unit.layout, FP32_PLANE, torch.zeros(unit.layout.bytes(FP32_PLANE), dtype=torch.uint8))
    with tape.resolving(unit, slot):
        with tape.record(unit, slot):
            tape.run_again(unit, 0, template, hidden, CALL)
        found = tape.backward(unit, 0, template, [torch.ones(2, 3, 4)], accumulator, SideGradients())
    leaf = hidden.clone().requires_grad_(True)
    again = layer(leaf)
    assert torch.equal(again, expected) and torch.equal(found, torch.autograd.grad(again.sum(), leaf)[0])
    assert not tape._graphs


class _Storages(TorchDispatchMode):
    """Remembers the storages of what operations return, without holding them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "clone" not in str(func) and "detach" not in str(func) and isinstance(result, Tensor):
            self.seen.append(weakref.ref(result.untyped_storage()))
        return result

    def alive(self) -> int:
        """Storages that are still there, views of the slot aside."""
        return sum(storage is not None and storage.nbytes() == 2 * 3 * 4 * 4 for storage in (one() for one in self.seen))


def test_side_inputs_get_their_gradient_summed_over_layers() -> None:
    """gemma4's per-layer inputs come from the prologue and carry gradient."""
    model = real_model(tiny_config(BY_TYPE["gemma4_text"]))
    _, expected = loss_and_gradients(model, micro_batches())
    engine = make_engine(model)
    engine.step(micro_batches(), WholeRows(), lr=0.0)
    found = gradients(engine)
    sides = [name for name in expected if "per_layer" in name and ".layers." not in name]
    assert sides and all(expected[name].any() for name in sides)
    assert not unequal({n: found[n] for n in sides}, {n: expected[n] for n in sides})
    engine.close()


def test_nothing_is_kept_after_a_step_and_little_with_a_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild keeps inputs: per layer and micro-batch one tensor of hidden states."""
    tapes: list[Tape] = []
    kept: dict[float, int] = {}
    original = Tape.__init__

    def remembering(self: Tape, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        tapes.append(self)

    monkeypatch.setattr(Tape, "__init__", remembering)
    for budget in (1.0, 0.0):
        engine: Engine = make_engine(small_model(), replace(PLAN, activation_budget=budget))
        counter = _Saved(monkeypatch)
        engine.step(micro_batches(1), lr=0.0)
        kept[budget] = counter.num_bytes
        assert not tapes[-1]._graphs
        engine.close()
    assert kept[0.0] < kept[1.0] / 4


class _Saved:
    """Counts the bytes of tensors that the recording hook lets stay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        real = torch.autograd.graph.saved_tensors_hooks

        def counting(pack: Any, unpack: Any) -> Any:
            def packed(tensor: Tensor) -> Any:
                result = pack(tensor)
                if isinstance(result, Tensor):
                    self.num_bytes += result.numel() * result.element_size()
                return result

            return real(packed, unpack)

        monkeypatch.setattr(tape_module.torch.autograd.graph, "saved_tensors_hooks", counting)


def test_frozen_parameters_are_left_out_and_get_zeros() -> None:
    one, frozen = torch.randn(3, requires_grad=True), torch.randn(3)
    assert gradients_of([(one * frozen).sum()], [frozen, one], [None])[0] is None
    unit = unit_of(Layer())
    accumulator = Plane(unit.layout, FP32_PLANE, torch.zeros(unit.layout.bytes(FP32_PLANE), dtype=torch.uint8))
    add_gradients(accumulator, [None, torch.ones(4, 4)])
    add_gradients(accumulator, [None, torch.ones(4, 4)])
    assert not accumulator.views()[0].any() and bool((accumulator.views()[1] == 2).all())


def test_a_frozen_parameter_of_a_family_stays_as_it_is() -> None:
    """ernie4_5_moe declares its router corrections as parameters without gradient: no update, no weight decay."""
    from layerferry.optim.adamw import AdamW
    from layerferry.optim.reference import ReferenceKernels
    from tests.conformance.harness import masters

    model = real_model(tiny_config(BY_TYPE["ernie4_5_moe"]))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    engine = make_engine(model, optimizer=AdamW(weight_decay=0.5, kernels=ReferenceKernels()))
    before = masters(engine)
    engine.step(micro_batches(), lr=1e-2)
    after = masters(engine)
    assert frozen and all(torch.equal(before[name], after[name]) for name in frozen)
    assert not any(torch.equal(before[n], after[n]) for n in before if n.endswith("up_proj.weight"))
    engine.close()


def test_on_a_cpu_a_gradient_is_added_without_a_copy_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices, with the same bits, whatever its shape and strides; torch would make an fp32 copy of it."""
    monkeypatch.setattr(gradients_module, "ADDED_AT_ONCE", 10)
    shapes = ((7, 5), (3, 4, 2), (23,), (1, 30))
    layout = Layout.of([ParameterSpec(name=str(shape), shape=shape, dtype=torch.bfloat16) for shape in shapes])
    accumulator = Plane(layout, FP32_PLANE, torch.zeros(layout.bytes(FP32_PLANE), dtype=torch.uint8))
    expected = dict[str, Tensor]()
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        found = list[Tensor | None]()
        for entry in layout.entries:
            reverse = tuple(reversed(range(len(entry.shape))))
            values = torch.randn(tuple(reversed(entry.shape)), generator=generator).bfloat16().permute(reverse)
            found.append(values)
            expected[entry.name] = expected.get(entry.name, torch.zeros(())) + values.float()
        with Casts() as casts:
            add_gradients(accumulator, found)
        assert casts.largest <= 30
    assert all(torch.equal(accumulator.view(entry), expected[entry.name]) for entry in layout.entries)


class Casts(TorchDispatchMode):
    """Elements of the largest tensor that is added to another while it is active."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "add_":
            self.largest = max(self.largest, args[1].numel())
        return found
