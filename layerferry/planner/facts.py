"""What the planner must know of a model: a few numbers per layer, read off the real layers on ``meta`` once.

Bytes that autograd keeps are counted by running each distinct layer once on ``meta`` tensors (shapes only, no arithmetic)
under a saved-tensor hook, at two row lengths: what grows with the square of the row (attention matrices of eager attention)
is told from what does not. For the compiler, whose choice is not visible there, the estimate is every linear module's output
and every distinct input of one: 158.7 KB per token of a Qwen2.5-7B layer, where 159 were measured. All of this is an estimate
until ``calibrate.py`` has measured. Checked by ``tests/planner/test_facts.py``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from layerferry.backends.pages import untouched_zeros
from layerferry.engine.sizes import pieces_of
from layerferry.layout import WEIGHT_PLANE, Plane
from layerferry.models.embedding import EmbeddingTap
from layerferry.models.experts_in_parts import ExpertsRefused, undividable
from layerferry.models.graph import tensors_in
from layerferry.models.inputs import Inputs
from layerferry.models.skeleton import Skeleton
from layerferry.models.stack import LayerCall
from layerferry.models.token_wise import has_inner_width
from layerferry.plan import Plan
from layerferry.planner.flops import Flops, chosen_share
from layerferry.planner.on_meta import is_linear, run_body_on_meta, run_on_meta
from layerferry.units import Part, Piece, Unit, divide

log = logging.getLogger(__name__)

COMPILED_SHARE = 0.6
"""Share of what plain autograd keeps that compiled layers keep at least at budget 1.0 (159 of 259 KB for Qwen2.5-7B)."""
_TRIAL_TOKENS = (64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Estimated bytes per token that one layer's forward leaves: its output and what autograd saves, not its input."""

    eager: float
    square: float
    """Further bytes per token *and token of the row*: eager attention's matrices."""
    compiled: float
    largest: float
    """Widest single activation: what transients are made of."""
    routed: float = 0.0
    """Bytes per token that pass through fused experts: each chosen one's inputs and outputs."""
    inner: float = 0.0
    """Of ``compiled``, what lies between the ends of parts that may run in chunks of tokens."""
    inner_share: float = 0.0
    """Their share of the layer's matrix products, attention aside."""
    outer_largest: float = 0.0
    """Widest activation outside them."""

    def per_token(self, row_tokens: int, budget: float, *, compiled: bool, boundary: float, chunked: bool = False) -> float:
        """Under ``budget``; ``boundary`` is the bytes per token of hidden states, the least that is kept."""
        inner = self.inner if chunked else 0.0
        if compiled:
            return boundary + budget * max(self.compiled - inner - boundary, 0.0)
        return max(self.eager - inner + self.square * row_tokens, boundary) if budget >= 1.0 else boundary


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """The planner's whole knowledge of a model. ``behaviours[i]`` is the kind of layer i, an index into ``kept``."""

    name: str
    units: tuple[Unit, ...]
    hidden_size: int
    vocab_size: int
    compute_bytes: int
    """Bytes of a hidden state's element."""
    behaviours: tuple[int, ...]
    kept: tuple[Kept, ...]
    flops: Flops
    buffer_bytes: int
    """Bytes of buffers @device: rotary frequencies, router corrections."""
    rotary_width: int
    """Elements per position that the prologue hands to the layers beside the hidden states."""
    mask_bytes: int
    """Bytes per query and key of a dense attention mask; 0 where none is built for rows that are not isolated."""
    isolated_mask_bytes: int
    """The same for packed rows that must not see each other."""
    has_linear_head: bool
    undividable: str | None
    """Why the ends can only be fed whole; None where they can be fed in parts."""
    undividable_layers: str | None
    """The same of layers."""
    chosen_share: float
    """Of a layer's experts, what a token is given to."""
    num_below: int = 0
    """Layers below everything that is trained: no graph, no backward."""
    attention_bytes: int = 0
    """Bytes per token that attention kernels give in one layer, output and log-sum-exp; 0 where they cannot be kept."""
    slowness: tuple[float, ...] = ()
    """Seconds of a layer over those of ``compute.py``, by behaviour, as they were measured here; empty: 1.0 (``problem.py``)."""

    @property
    def num_layers(self) -> int:
        return len(self.behaviours)

    @cached_property
    def num_params(self) -> int:
        return sum(unit.numel for unit in self.units)

    @cached_property
    def num_trained(self) -> int:
        return sum(unit.num_trained for unit in self.units)

    def num_inputs_at_host(self, host_inputs: int) -> int:
        """Layers whose inputs travel to the host and back where the first ``host_inputs`` do: not those below the backward."""
        return max(min(host_inputs, self.num_layers) - self.num_below, 0)

    @cached_property
    def layer_units(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.is_layer)

    def parts_of_ends(self, count: int) -> int:
        """In how many parts the ends are cut where ``count`` are wanted."""
        return max((len(divide(unit, count)) for unit in self.units if not unit.is_layer), default=1)

    def parts_of_experts(self, count: int) -> int:
        """The same of layers' experts, the body not counted."""
        return max([1, *(len(divide(unit, count)) - 1 for unit in self.kinds)])

    @cached_property
    def most_beside_parts(self) -> int:
        """Units that may live @device while experts travel in parts, from the embedding on: those before the first layer that is
        cut."""
        return next((unit.index for unit in self.units if unit.is_layer and unit.tables), len(self.units))

    @cached_property
    def kinds(self) -> tuple[Unit, ...]:
        """The first layer of each behaviour."""
        return tuple(self.layer_units[self.behaviours.index(number)] for number in range(len(self.kept)))

    @property
    def tied(self) -> bool:
        return sum(not unit.is_layer for unit in self.units) == 1

    def pieces_of_ends(self, plan: Plan) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """What of the prologue, and of the head, travels at a time; the same twice where they are one unit."""
        return pieces_of(self.units[0], plan), pieces_of(self.units[0 if self.tied else -1], plan)

    def head_rows(self, plan: Plan) -> int:
        """Rows of the vocabulary that the head has @device at a time."""
        _, head = self.pieces_of_ends(plan)
        return (
            self.vocab_size
            if len(head) == 1
            else max(len(rows) for part in head if isinstance(part, Part) for rows in part.rows.values())
        )

    def is_divided(self, number: int, plan: Plan) -> bool:
        """Whether layers of behaviour ``number`` travel in parts, where they travel."""
        return len(divide(self.kinds[number], plan.expert_parts)) > 1

    def body_share(self, number: int) -> float:
        """Of a token's way through a layer of behaviour ``number``, what is no expert."""
        unit = self.kinds[number]
        experts = sum(unit.layout.by_name[name].numel for name in unit.tables)
        return (unit.numel - experts) / (unit.numel - experts + self.chosen_share * experts)

    def num_choices(self, number: int) -> int:
        """Experts that a token is given to in a layer of behaviour ``number``, whose experts may travel in parts."""
        unit = self.kinds[number]
        return round(self.chosen_share * unit.layout.by_name[unit.tables[0]].shape[0])

    @property
    def boundary(self) -> int:
        """Bytes per token of hidden states."""
        return self.hidden_size * self.compute_bytes

    @classmethod
    def of(cls, skeleton: Skeleton) -> Model:
        numbers: dict[Hashable, int] = {}
        behaviours = tuple(numbers.setdefault(key, len(numbers)) for key in skeleton.keys)
        firsts = [behaviours.index(number) for number in range(len(numbers))]
        trial = _trial(skeleton, firsts)
        buffers = [*skeleton.model.buffers(), *(b for own in skeleton.buffers for b in own.values())]
        compute_bytes = next(skeleton.model.parameters()).dtype.itemsize
        eager = getattr(skeleton.config, "_attn_implementation", None) == "eager"
        return cls(
            name=str(skeleton.config.model_type),
            units=skeleton.units,
            hidden_size=skeleton.hidden_size,
            vocab_size=skeleton.vocab_size,
            compute_bytes=compute_bytes,
            behaviours=behaviours,
            kept=trial.kept,
            flops=Flops.of(skeleton),
            buffer_bytes=sum(b.numel() * b.element_size() for b in buffers),
            rotary_width=trial.rotary_width,
            mask_bytes=compute_bytes if eager else 0,
            isolated_mask_bytes=compute_bytes if eager else 1,
            has_linear_head=skeleton.head is not None,
            undividable=skeleton.undividable,
            undividable_layers=undividable(skeleton.layer_units) or trial.refusal,
            chosen_share=chosen_share(skeleton.config.get_text_config()),
            num_below=skeleton.reach.num_below,
            attention_bytes=_attention_bytes(skeleton, compute_bytes) if skeleton.has_varlen else 0,
        )


@dataclass(frozen=True, slots=True)
class _Trial:
    kept: tuple[Kept, ...]
    rotary_width: int
    refusal: str | None
    """Why layers with experts do not run apart from them; None where none was seen to refuse."""


_TRIALS: dict[Hashable, _Trial] = {}
"""Of this process: a run asks twice, for its plan and for its report, and the layers that ``_key`` tells apart answer alike."""


def _key(skeleton: Skeleton) -> Hashable:
    """All that a trial depends on: the classes, the modules and shapes of every layer, the configuration, dtype, attention."""
    config = skeleton.config
    attention = getattr(config, "_attn_implementation", None)
    parts = [(name, type(module)) for name, module in skeleton.model.named_modules()]
    dtype = next(skeleton.model.parameters()).dtype
    return config.to_json_string(use_diff=False), attention, dtype, str(skeleton.device), tuple(skeleton.keys), tuple(parts)


def _trial(skeleton: Skeleton, firsts: list[int]) -> _Trial:
    key = _key(skeleton)
    if key not in _TRIALS:
        calls = _layer_calls(skeleton)
        kept = tuple(_kept(skeleton, index, calls) for index in firsts)
        _TRIALS[key] = _Trial(kept, _rotary_width(calls), _refusal(skeleton, firsts, calls))
    return _TRIALS[key]


def _layer_calls(skeleton: Skeleton) -> list[list[LayerCall]] | None:
    """What the prologue gives each layer, for rows of ``_TRIAL_TOKENS``; None where a family's prologue does not run on zeros."""
    try:
        with end_weights(skeleton):
            return [
                skeleton.prologue(Inputs(torch.zeros(1, n, dtype=torch.int64, device=skeleton.device)), EmbeddingTap(()))[1]
                for n in _TRIAL_TOKENS
            ]
    except Exception as error:  # the family's own code; an estimate from the shapes remains
        log.debug("%s: no trial prologue: %s", skeleton.config.model_type, error)
        return None


@contextmanager
def end_weights(skeleton: Skeleton) -> Iterator[None]:
    """Bind the prologue to zeros, which take no memory on a CPU, and back to ``meta``."""
    unit, device = skeleton.prologue_unit, skeleton.device
    num_bytes = unit.layout.bytes(WEIGHT_PLANE)
    on_cpu = device.type == "cpu"
    given = untouched_zeros([num_bytes], torch.uint8) if on_cpu else torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    skeleton.bind(unit, Plane(unit.layout, WEIGHT_PLANE, given))
    try:
        with torch.no_grad():
            yield
    finally:
        skeleton.bind(unit, Plane(unit.layout, WEIGHT_PLANE, torch.empty(num_bytes, dtype=torch.uint8, device="meta")))


def _rotary_width(calls: list[list[LayerCall]] | None) -> int:
    if calls is None:
        return 0
    seen = {id(t): t for call in calls[0] for t in tensors_in((call.args, call.kwargs))}
    return sum(t.numel() // _TRIAL_TOKENS[0] for t in seen.values() if t.dim() == 3 and t.shape[-2] == _TRIAL_TOKENS[0])


def _kept(skeleton: Skeleton, index: int, calls: list[list[LayerCall]] | None) -> Kept:
    layer, boundary = skeleton.layers[index], skeleton.hidden_size
    itemsize = next(layer.parameters()).dtype.itemsize
    linear, largest = _linear_widths(layer, skeleton.config)
    eager, square = 1.0 / COMPILED_SHARE * linear * itemsize, 0.0
    if calls is not None:
        try:
            runs = [
                run_on_meta(layer, call[index], n, skeleton.hidden_size) for n, call in zip(_TRIAL_TOKENS, calls, strict=True)
            ]
            grown = max((runs[1].kept - runs[0].kept) / (_TRIAL_TOKENS[1] - _TRIAL_TOKENS[0]), 0.0)
            eager = runs[0].kept - grown * _TRIAL_TOKENS[0]
            square = grown if getattr(skeleton.config, "_attn_implementation", None) == "eager" else 0.0
            linear = max(runs[0].linear + _expert_width(layer, skeleton.config), 0)
        except Exception as error:  # data-dependent shapes and the like do not run on meta
            log.debug("%s: layer %d does not run on meta: %s", skeleton.config.model_type, index, error)
    compiled = max(linear * itemsize, COMPILED_SHARE * eager)
    routed = _expert_width(layer, skeleton.config) * itemsize
    inner, inner_share, outer = _inner(layer, boundary)
    return Kept(
        eager=eager,
        square=square,
        compiled=compiled,
        largest=max(largest, boundary) * itemsize,
        routed=routed,
        inner=min(inner * itemsize, compiled),
        inner_share=inner_share,
        outer_largest=max(outer, boundary) * itemsize,
    )


def _refusal(skeleton: Skeleton, firsts: list[int], calls: list[list[LayerCall]] | None) -> str | None:
    divided = [index for index in firsts if calls is not None and skeleton.layer_units[index].tables]
    for index in divided:
        assert calls is not None
        try:
            run_body_on_meta(skeleton.layers[index], calls[0][index], _TRIAL_TOKENS[0], skeleton.hidden_size)
        except ExpertsRefused as error:
            return error.reason
        except Exception as error:  # what does not run on meta may be divided all the same
            log.debug("%s: the body of layer %d does not run on meta: %s", skeleton.config.model_type, index, error)
    return None


def _inner(layer: nn.Module, hidden_size: int) -> tuple[int, float, int]:
    """Of the children that take hidden states alone and are wide inside, experts aside (what ``models/token_wise.py`` will try):
    elements per token between their ends, their share of the layer's matrices, and the widest activation elsewhere."""
    inside: set[nn.Module] = set()
    for child in layer.children():
        alone = [
            p for p in inspect.signature(child.forward).parameters.values() if p.default is p.empty and p.kind < p.VAR_KEYWORD
        ]
        expert = any("experts" in name.split(".") for name, _ in child.named_modules())
        takes_one = len(alone) == 1 and alone[0].kind is not inspect.Parameter.VAR_POSITIONAL
        if takes_one and not expert and has_inner_width(child, hidden_size):
            inside |= {module for module in child.modules() if is_linear(module)}
    every = [module for module in layer.modules() if is_linear(module)]
    shapes = {module: next(p.shape for p in module.parameters() if p.dim() == 2) for module in every}
    wide = sum(sum(side for side in shapes[module] if side != hidden_size) for module in inside)
    total = sum(shape.numel() for shape in shapes.values())
    share = sum(shapes[module].numel() for module in inside) / total if total else 0.0
    return wide, share, max((max(shapes[module]) for module in every if module not in inside), default=0)


def _attention_bytes(skeleton: Skeleton, compute_bytes: int) -> int:
    widths = [width for width, _ in Flops.of(skeleton).attention]
    heads = int(getattr(skeleton.config.get_text_config(), "num_attention_heads", 0) or 0)
    return max(widths, default=0) * compute_bytes + heads * 4


def _linear_widths(layer: nn.Module, config: Any) -> tuple[int, int]:
    """(sum of outputs and inputs of linear modules and active experts, the widest), elements per token."""
    shapes = [p.shape for m in layer.modules() if is_linear(m) for p in m.parameters(recurse=False) if p.dim() == 2]
    widest = max((max(shape) for shape in shapes), default=0)
    return sum(sum(shape) for shape in shapes) + _expert_width(layer, config), max(widest, _expert_width(layer, config) // 4)


def _expert_width(layer: nn.Module, config: Any) -> int:
    """Elements per token that pass through fused experts ([experts, out, in] parameters): each of the chosen ones' sides."""
    text = config.get_text_config()
    chosen = int(getattr(text, "num_experts_per_tok", 0) or 0)
    return sum(chosen * (p.shape[1] + p.shape[2]) for n, p in layer.named_parameters() if p.dim() == 3 and "experts" in n)
