"""A Hugging Face model with its layers taken out: the family's own prologue and epilogue, and the units that are streamed.

The skeleton runs the model's *own* forward with stubs where the layers were. Stopped at the last stub it is the prologue:
embedding, masks per layer type, rotary, per-layer side inputs, as the family computes them. With the last stub handing our
hidden states back it is the epilogue: final norm, head, soft-caps, scales. Which parameters belong to which end is read off
the autograd graph of a four-token trial on zeros.

Left out, and refused by name: layers that share a parameter, hidden states changed between layers, several modalities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerferry.backends.pages import untouched_zeros
from layerferry.errors import ModelRefused
from layerferry.layout import Entry, Layout, ParameterSpec, Plane
from layerferry.models.build import fp32_only, locations, owner_types
from layerferry.models.embedding import EmbeddingTap
from layerferry.models.experts_in_parts import expert_tables
from layerferry.models.graph import graph_leaves, leaf_names, tensors_in
from layerferry.models.inputs import Inputs
from layerferry.models.router_balance import RouterBalance
from layerferry.models.stack import LayerCall, StopForward, Stub, StubScript, find_stack
from layerferry.models.streamable import refuse_unstreamable
from layerferry.models.tables import tables_of
from layerferry.models.template import Template, behaviour_key
from layerferry.models.varlen import uses_varlen, without_mask
from layerferry.models.whole_rows import whole_rows
from layerferry.units import Piece, Reach, Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DecayRule = Callable[[str, str], bool]
"""(model parameter name, class name of the module that holds it) -> whether weight decay applies."""

_LONGEST_TUPLE = 3
"""Layers return a tensor or a tuple of up to so many things (bamba 2, rwkv 3)."""


class _HeadReached(Exception):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _stop_at_head(hidden: Tensor) -> Tensor:
    """Stands where the output embedding stood while only its input is wanted."""
    raise _HeadReached(hidden)


class Skeleton:
    """Owns the model on ``meta``. ``units[0]`` is the prologue, then the layers, then the epilogue unless tied weights make
    the two ends one unit."""

    def __init__(self, model: PreTrainedModel, *, decays: DecayRule, device: torch.device, fp32: bool = False) -> None:
        self.model = model
        self.config: Any = model.config
        self.device = device
        text = model.config.get_text_config()
        self.has_varlen = uses_varlen(model)
        self.hidden_size = int(text.hidden_size)
        self.vocab_size = int(text.vocab_size)
        self.stack_name, self._stack = find_stack(model, model.config)
        self.layers = list(self._stack)
        self._script = StubScript(len(self.layers))
        refuse_unstreamable(self.model, self.stack_name)
        self._specs = self._parameter_specs(decays, fp32)
        self.balance = RouterBalance.of(model, self.layers)
        for index, layer in enumerate(self.layers):
            self._stack[index] = Stub(layer, index, self._script)
        self._places = locations(model)
        if getattr(self.config, "output_router_logits", False):
            self.config.output_router_logits = False  # stubs route nothing; the loss is added by the sweep
        first, last = self._split_ends()
        self.units = self._make_units(first, last)
        self.prologue_unit = self.units[0]
        self.epilogue_unit = self.units[0] if self.units[-1].is_layer else self.units[-1]
        self.layer_units = tuple(unit for unit in self.units if unit.is_layer)
        self.reach = Reach.of(self.layer_units, trains_prologue=any(self._specs[name].trained for name in first))
        self.keys = [behaviour_key(layer) for layer in self.layers]
        self._head_parts = self._find_head()
        self._mark_tables()
        self.buffer_names = self._persistent_buffers()
        self.buffers = [{name: b.to(device) for name, b in layer.named_buffers()} for layer in self.layers]
        self._move_buffers()

    # ---------------------------------------------------------------- construction

    def _parameter_specs(self, decays: DecayRule, fp32: bool) -> dict[str, ParameterSpec]:
        pattern, owners = fp32_only(self.model), owner_types(self.model)
        specs = {}
        for name, parameter in self.model.named_parameters():
            # TRAP: some families make a parameter in fp32 without listing it (tests/conformance: olmo_hybrid, hunyuan_v1_moe)
            wide = fp32 or parameter.dtype == torch.float32 or (pattern is not None and pattern.search(name) is not None)
            dtype = torch.float32 if wide else torch.bfloat16
            decayed = decays(name, owners[id(parameter)])
            shape, trained = tuple(parameter.shape), parameter.requires_grad
            specs[name] = ParameterSpec(name=name, shape=shape, dtype=dtype, decays=decayed, trained=trained)
        return specs

    def _split_ends(self) -> tuple[list[str], list[str]]:
        """Names of the skeleton's parameters that the prologue reads, and those that the epilogue reads."""
        names = [name for name, _ in self.model.named_parameters() if not name.startswith(f"{self.stack_name}.")]
        on_meta = {name: self._parameter(name) for name in names}
        by_id = {}
        for name, parameter in on_meta.items():
            zeros = nn.Parameter(untouched_zeros(parameter.shape, parameter.dtype))
            self._swap(parameter, zeros)
            by_id[id(zeros)] = name
        try:
            ids = torch.zeros(1, 4, dtype=torch.int64)
            self._learn_convention(ids)
            self._refuse_by_passes(ids)
            hidden, calls = self._forward_to_last_stub(Inputs(ids))
            sides = [leaf for call in calls for leaf in tensors_in((call.args, call.kwargs))]
            first = leaf_names([hidden, *sides], by_id)
            probe = torch.zeros(4, 1, self.hidden_size, dtype=hidden.dtype, requires_grad=True)
            last = leaf_names([self._epilogue(probe)], by_id)
        finally:
            for name, parameter in on_meta.items():
                self._swap(self._parameter(name), parameter)
        rest = [name for name in names if name not in first and name not in last]
        return [n for n in names if n in first], [n for n in names if n in last or n in rest]

    def _learn_convention(self, ids: Tensor) -> None:
        """Does the model expect a tensor or a tuple of its layers? Run it every way; identity must be visible between stubs."""
        reasons: list[Exception] = []
        for self._script.tuple_length in range(_LONGEST_TUPLE + 1):
            try:
                hidden, _ = self._forward_to_last_stub(Inputs(ids))
                if hidden.shape != (1, 4, self.hidden_size):
                    raise ModelRefused(
                        f"{self.config.model_type}: hidden states of shape {tuple(hidden.shape)} are not [B, T, D]"
                    )
                self._epilogue(torch.zeros(2, 1, self.hidden_size, dtype=self._compute_dtype()))
                return
            except ModelRefused as refused:
                if "not [B, T, D]" in str(refused):
                    raise
                reasons.append(refused)
            except Exception as error:  # the wrong convention fails somewhere in the family's own code
                reasons.append(error)
        reason = next((r for r in reasons if isinstance(r, ModelRefused)), reasons[0])
        raise ModelRefused(f"{self.config.model_type}: its forward does not run around its layers: {reason}") from reason

    def _refuse_by_passes(self, ids: Tensor) -> None:
        """Hidden states must go from one layer to the next and nowhere else, those of the last one to the epilogue."""
        try:
            probes: list[Tensor] = []
            self._script.probes = probes
            _, calls = self._forward_to_last_stub(Inputs(ids))
            inputs = [tensor for call in calls for tensor in tensors_in((call.args, call.kwargs))]
            reached = {id(leaf) for leaf in graph_leaves(inputs)} & {id(probe) for probe in probes}
            with torch.no_grad():
                logits = self._epilogue(torch.zeros(2, 1, self.hidden_size, dtype=self._compute_dtype()), blank=torch.nan)
            reached_end = bool(torch.isnan(logits).any())
        finally:
            self._script.probes = None
        if reached or reached_end:
            where = "other layers than the next" if reached else "the head"
            raise ModelRefused(f"{self.config.model_type}: what a layer or the embedding computes also goes to {where}")

    def _make_units(self, first: list[str], last: list[str]) -> tuple[Unit, ...]:
        both = [("ends", [*first, *(n for n in last if n not in first)])]
        ends = both if set(first) & set(last) else [("prologue", first), ("epilogue", last)]
        tables = {f"layer.{index}": expert_tables(layer) for index, layer in enumerate(self.layers)}
        pieces = [(name, {n: n for n in names}, False) for name, names in ends]
        for index, layer in enumerate(self.layers):
            prefix = f"{self.stack_name}.{index}"
            pieces.append((f"layer.{index}", {n: f"{prefix}.{n}" for n, _ in layer.named_parameters()}, True))
        if len(ends) == 2:
            pieces.append(pieces.pop(1))
        units = []
        for index, (name, names, is_layer) in enumerate(pieces):
            specs = [self._specs[full] for full in names.values()]
            kinds = [is_layer and spec.has_matrices for spec in specs]
            own = zip(names, specs, kinds, strict=True)
            layout = Layout.of(replace(spec, name=name_in_unit, matrix=matrix) for name_in_unit, spec, matrix in own)
            units.append(Unit(name=name, index=index, layout=layout, names=names, is_layer=is_layer, tables=tables.get(name, ())))
        return tuple(units)

    def _mark_tables(self) -> None:
        """Tell the ends which of their parameters can be used some rows at a time."""
        tables = tables_of(self)
        ends = (self.prologue_unit.index, self.epilogue_unit.index)
        self.units = tuple(replace(unit, tables=tables[unit.index]) if unit.index in tables else unit for unit in self.units)
        self.prologue_unit, self.epilogue_unit = (self.units[index] for index in ends)

    @property
    def undividable(self) -> str | None:
        """Why the ends can only be fed whole; None where they can be fed in parts."""
        if self.prologue_unit is self.epilogue_unit:
            return "embedding and head share a weight, whose gradient is one sum"
        if not self.epilogue_unit.tables:
            return "its head is not a linear map with a scale or soft-cap after it"
        return None if self.prologue_unit.tables else "its embedding is not just looked up with the input ids"

    def _persistent_buffers(self) -> dict[str, tuple[int | None, str]]:
        """Model name of every buffer that a checkpoint holds -> (layer index or None, name inside it)."""
        found: dict[str, tuple[int | None, str]] = {}
        roots = [(None, "", self.model), *((i, f"{self.stack_name}.{i}.", layer) for i, layer in enumerate(self.layers))]
        for index, prefix, root in roots:
            kept = {f"{m}.{n}".lstrip(".") for m, module in root.named_modules() for n in module._non_persistent_buffers_set}
            for name, _ in root.named_buffers():
                if name not in kept:
                    found[prefix + name] = (index, name)
        return found

    def _move_buffers(self) -> None:
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Load a persistent buffer by its model name."""
        index, own = self.buffer_names[name]
        if index is not None:
            self.buffers[index][own] = value.to(self.device, self.buffers[index][own].dtype)
            return
        path, _, leaf = own.rpartition(".")
        module = self.model.get_submodule(path)
        old = module._buffers[leaf]
        module._buffers[leaf] = value.to(self.device, None if old is None else old.dtype)

    def get_buffer(self, name: str) -> Tensor:
        index, own = self.buffer_names[name]
        return self.model.get_buffer(own) if index is None else self.buffers[index][own]

    @property
    def boundary(self) -> int:
        """Bytes of one token's hidden states, in the weights' dtype."""
        return self.hidden_size * self._compute_dtype().itemsize

    def _compute_dtype(self) -> torch.dtype:
        first: nn.Parameter = next(iter(self.model.parameters()))
        return first.dtype

    def _find_head(self) -> tuple[nn.Module, Entry, Entry | None] | None:
        """The output embedding, where it is a plain linear module of the epilogue's own parameters."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            return None
        names = {id(p): n for n, p in self.model.named_parameters()}
        by_name = self.epilogue_unit.layout.by_name
        weight = by_name.get(names.get(id(head.weight), ""))
        if weight is None:
            return None
        bias = None if head.bias is None else by_name[names[id(head.bias)]]
        return head, weight, bias

    # ---------------------------------------------------------------- binding

    def bind(self, piece: Piece, plane: Plane) -> list[nn.Parameter]:
        """Hang views of ``plane`` (weights of an end, or of a part of it, in its slot) into the model; parameters in layout
        order."""
        bound = []
        for entry in piece.layout.entries:
            old = self._parameter(piece.names[entry.name])
            parameter = nn.Parameter(plane.view(entry), requires_grad=old.requires_grad)
            self._swap(old, parameter)
            bound.append(parameter)
        return bound

    @contextmanager
    def lent(self, name: str, parameter: nn.Parameter) -> Iterator[nn.Module]:
        """``parameter`` in the place of the one called ``name`` for a while; yields the module that owns it."""
        old = self._parameter(name)
        self._swap(old, parameter)
        try:
            yield self._places[id(parameter)][0][0]
        finally:
            self._swap(parameter, old)

    def is_trained(self, name: str) -> bool:
        return self._parameter(name).requires_grad

    def _swap(self, old: nn.Parameter, new: nn.Parameter) -> None:
        places = self._places.pop(id(old))
        for module, leaf in places:
            module._parameters[leaf] = new
        self._places[id(new)] = places

    def _parameter(self, name: str) -> nn.Parameter:
        path, _, leaf = name.rpartition(".")
        parameter: nn.Parameter | None = self.model.get_submodule(path)._parameters[leaf]
        assert parameter is not None
        return parameter

    def template(self, layer_index: int, plane: Plane) -> Template:
        return Template(self.layers[layer_index], plane, self.balance)

    # ---------------------------------------------------------------- running

    def prologue(self, inputs: Inputs, tap: EmbeddingTap) -> tuple[Tensor, list[LayerCall]]:
        """Hidden states [B, T, D] before the first layer, and what each layer is called with. Embeddings go through ``tap``."""
        with tap:
            return self._forward_to_last_stub(inputs)

    def _forward_to_last_stub(self, inputs: Inputs) -> tuple[Tensor, list[LayerCall]]:
        self._script.reset()
        packed = nullcontext() if inputs.boundaries is None else without_mask()
        try:
            with whole_rows() if inputs.position_ids is None else packed:
                self.model(**inputs.arguments(), use_cache=False)
        except StopForward:
            hidden, calls = self._script.first_hidden, self._script.calls
            self._script.reset()
            assert hidden is not None
            return hidden, calls
        raise ModelRefused(f"{self.config.model_type}: its forward does not pass through every layer")

    def _epilogue(self, hidden: Tensor, *, blank: float = 0.0) -> Tensor:
        """Logits [C, 1, V] of hidden states [C, 1, D]. The prologue runs on dummy ids, without gradient or embedding table."""
        ids = torch.zeros(hidden.shape[0], 1, dtype=torch.int64, device=hidden.device)
        self._script.reset()
        self._script.injected = hidden
        grad = torch.is_grad_enabled()
        try:
            with torch.no_grad(), EmbeddingTap.blind(blank), whole_rows():
                output = self.model(input_ids=ids, use_cache=False)
        finally:
            self._script.reset()
            torch.set_grad_enabled(grad)
        logits: Tensor = output.logits
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm, head, caps and scales by the family's own code: [C, D] -> [C, V] @device."""
        return self._epilogue(hidden.unsqueeze(1)).squeeze(1)

    @property
    def head(self) -> tuple[Entry, Entry | None] | None:
        """Layout entries (weight [V, D], bias [V] or None) of the linear head; None where the family has no plain one."""
        return None if self._head_parts is None else self._head_parts[1:]

    @property
    def head_module(self) -> nn.Linear | None:
        """The linear head itself."""
        if self._head_parts is None:
            return None
        module = self._head_parts[0]
        assert isinstance(module, nn.Linear)
        return module

    def head_weight(self) -> tuple[Tensor, Tensor | None]:
        """The head's bound weight [V, D] and bias [V] @device."""
        module = self.head_module
        assert module is not None
        return module.weight, module.bias

    def before_head(self, hidden: Tensor) -> Tensor:
        """What the linear head is given for hidden states [C, D]: [C, D], after the final norm."""
        assert self._head_parts is not None
        grad = torch.is_grad_enabled()
        with self._in_place_of_head(self._head_parts[0], _stop_at_head):
            try:
                self._epilogue(hidden.unsqueeze(1))
            except _HeadReached as reached:
                return reached.hidden.squeeze(1)
            finally:
                torch.set_grad_enabled(grad)
        raise AssertionError("the epilogue did not reach the head")

    def after_head(self, output: Tensor, hidden: Tensor | None = None) -> Tensor:
        """What the family makes of the linear head's output [C, V]: logits [C, V], after scales and caps. ``hidden`` [C, D] goes
        into the epilogue, zeros where it is None."""
        assert self._head_parts is not None
        if hidden is None:
            hidden = torch.zeros(len(output), self.hidden_size, dtype=output.dtype, device=output.device)
        with self._in_place_of_head(self._head_parts[0], lambda _: output.unsqueeze(1)):
            return self._epilogue(hidden.unsqueeze(1)).squeeze(1)

    @contextmanager
    def _in_place_of_head(self, head: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> Iterator[None]:
        forward = head.forward
        head.forward = stand_in
        try:
            yield
        finally:
            head.forward = forward
