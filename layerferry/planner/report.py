"""``plan``: what lives where, how many bytes, how many seconds, who decided what; for a person and for a program.

Needs a model's config.json and no weights. Widths are those of a terminal of 100 columns.
Checked by ``tests/planner/test_report.py``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from layerferry.backends import make
from layerferry.config import Config, Pins
from layerferry.models.build import ATTENTION, build_on_meta, config_of, take_block_size
from layerferry.models.frozen import freeze
from layerferry.models.skeleton import Skeleton
from layerferry.models.varlen import use_where_possible
from layerferry.optim.choose import optimizer_for
from layerferry.optim.decay import decays
from layerferry.plan import GIB, Plan, Seconds, value_text
from layerferry.planner import calibrate
from layerferry.planner.advice import Advice, faster
from layerferry.planner.choose import Decision, decide
from layerferry.planner.facts import Model
from layerferry.planner.held import DEVICE, DISK, HOST
from layerferry.planner.machine import Machine, machine_for
from layerferry.planner.problem import Problem, budget_source, needs, problem, unkept
from layerferry.store.store import plane_specs

WIDTH = 100
_BAR = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A decision with everything that it was made from."""

    decision: Decision
    faster: tuple[Advice, ...] = ()

    @property
    def question(self) -> Problem:
        return self.decision.question

    @property
    def plan(self) -> Plan:
        return self.decision.plan

    @property
    def fits(self) -> bool:
        return self.decision.shortfall is None

    def shortfall(self) -> str:
        """What is missing and what helps; empty where the plan fits."""
        return self.decision.shortfall or ""

    def render(self) -> str:
        text = render(self.plan, self.question)
        if not self.fits:
            return f"{text}\n\ndoes not fit: {self.decision.shortfall}"
        return "\n\n".join(filter(None, (text, _faster(self.faster))))

    def to_dict(self) -> dict[str, Any]:
        model, machine = self.question.model, self.question.machine
        places = needs(self.plan, machine)
        return {
            "fits": self.fits,
            "shortfall": self.decision.shortfall,
            "model": {
                "type": model.name,
                "params": model.num_params,
                "trained_params": model.num_trained,
                "layers": model.num_layers,
                "bytes_per_param": self.plan.total(HOST) / model.num_params,
                "flops_per_token": model.flops.per_token(self.plan.row_tokens),
            },
            "plan": self.plan.to_dict(),
            "pinned": _kept_pins(self.question.pins, self.plan),
            "places": {place: {"needed_bytes": needed, "available_bytes": there} for place, (needed, there) in places.items()},
            "faster": [asdict(advice) for advice in self.faster],
            "machine": machine.to_dict(),
        }


def plan_for(config: Config) -> PlanReport:
    """The plan that ``train`` would make for ``config`` here; activations as an earlier run has measured them, else estimated."""
    given = config.model
    backend = make(config.engine.device)
    hf_config = config_of(given, config.data.cutoff_len)
    take_block_size(hf_config)
    dtype = torch.float32 if config.train.fp32 else torch.bfloat16
    attention = ATTENTION[given.flash_attn]
    model = build_on_meta(hf_config, dtype=dtype, attention=attention, trust_remote_code=given.trust_remote_code)
    freeze(model, config.train)
    if backend.device.type == "cuda" and given.flash_attn == "auto":
        use_where_possible(model, backend.device)
    skeleton = Skeleton(model, decays=decays, device=torch.device("cpu"), fp32=config.train.fp32)
    specs = plane_specs(optimizer_for(config.optim).state_planes)
    machine = machine_for(config.engine, backend, config.disk_folder)
    question = problem(Model.of(skeleton), specs, machine, config, config.data.cutoff_len)
    decision = decide(question, calibrate.reader(skeleton, backend))
    advice = faster(decision.question, decision.plan) if decision.shortfall is None else ()
    return PlanReport(decision=decision, faster=advice)


def render(plan: Plan, question: Problem) -> str:
    """The plan as a table: choices, bytes by place, seconds by lane."""
    blocks = [
        _title(plan, question.model),
        _choices(plan, question.pins, question.model),
        _bytes(plan, question),
        _seconds(plan, question.machine),
    ]
    blocks.append("\n".join(textwrap.fill(f"note: {note}", WIDTH, subsequent_indent="      ") for note in plan.notes))
    return "\n\n".join(block for block in blocks if block)


def _title(plan: Plan, model: Model) -> str:
    tokens = plan.rows_per_step * plan.row_tokens
    step = f"{plan.rows_per_step} rows of {plan.row_tokens:,} tokens a step ({tokens:,} tokens)"
    layers = f"{model.num_layers} layers of {'one kind' if len(model.kept) == 1 else f'{len(model.kept)} kinds'}"
    frozen = model.num_trained < model.num_params
    trained = f" ({_count(model.num_trained)} trained, {model.num_trained / model.num_params:.2%})" if frozen else ""
    return f"{model.name}, {_count(model.num_params)} parameters{trained}, {layers}\n{step}"


def _choices(plan: Plan, pins: Pins, model: Model) -> str:
    micro = -(-plan.rows_per_step // plan.micro_batch_rows)
    tokens = min(plan.micro_batch_rows, plan.rows_per_step) * plan.row_tokens
    rows = [
        ("micro_batch_rows", str(plan.micro_batch_rows), f"{micro} micro-batch{'es' * (micro > 1)} of {tokens:,} tokens"),
        ("num_waves", str(plan.num_waves), _waves(plan, model)),
        *(
            [("first_wave", str(plan.first_wave), "micro-batches: the updates hide behind their forward")]
            if plan.first_wave
            else []
        ),
        ("activation_budget", f"{plan.activation_budget:g}", _budget(plan)),
        *(
            [("richer_layers", str(plan.richer_layers), f"the last layers keep {plan.richer_budget:g}")]
            if plan.richer_layers
            else []
        ),
        *(
            [("turn_layers", str(plan.turn_layers), "the last layers: a micro-batch comes back down before the next goes up")]
            if plan.turn_layers
            else []
        ),
        *([("host_inputs", str(plan.host_inputs), "layers are computed again from inputs @host")] if plan.host_inputs else []),
        *(
            [("mlp_chunk_tokens", str(plan.mlp_chunk_tokens), "tokens that an MLP sees at a time; every layer is computed again")]
            if plan.mlp_chunk_tokens
            else []
        ),
        *([("kept_attention", str(plan.kept_attention), "layers whose attention is not")] if plan.kept_attention else []),
        ("device_units", str(plan.device_units), "units whose planes live @device: nothing of them travels"),
        *([("disk_units", str(plan.disk_units), "units whose residues and moments live @disk")] if plan.on_disk else []),
        *([("resident_gradients", "true", "sums of all waves stay @device")] if plan.resident_gradients else []),
        *([("carry_fp32", "true", "gradients @host have four bytes")] if plan.carry_fp32 else []),
        ("num_slots", str(plan.num_slots), "device buffers for layer weights that travel"),
        ("num_slabs", str(plan.num_slabs), "device buffers that gradients leave from"),
        ("end_parts", str(plan.end_parts), _parts(plan)),
        *([("expert_parts", str(plan.expert_parts), "layers of experts travel in parts")] if plan.expert_parts > 1 else []),
        ("compile", value_text(plan.compile), "torch.compile" if plan.compile else "eager"),
        ("optimizer_threads", str(plan.optimizer_threads), "updates on the CPU, beside the next forward"),
        ("chunk_tokens", str(plan.chunk_tokens), "tokens whose logits exist at once"),
    ]
    kept = _kept_pins(pins, plan)
    lines = [f"  {name:<18} {value:>6}  {'pinned ' if name in kept else 'planner'}  {text}" for name, value, text in rows]
    return "\n".join(["choices", *lines])


def _budget(plan: Plan) -> str:
    if plan.rebuilds_every_layer:
        return "of a layer that is computed again, as every one is"
    if plan.activation_budget == 0.0:
        return "keep inputs only"
    return "keep everything" if plan.activation_budget >= 1.0 else "keep this share, compute the rest again"


def _parts(plan: Plan) -> str:
    return "embedding and head travel whole" if plan.end_parts == 1 else "embedding and head travel in parts; logits twice"


def _kept_pins(pins: Pins, plan: Plan) -> list[str]:
    """What is as the user has pinned it."""
    missed = unkept(pins, plan)
    return [name for name, _ in pins.items() if name not in missed]


def _waves(plan: Plan, model: Model) -> str:
    if plan.device_units == len(model.units):
        return "every unit lives @device: nothing travels"
    if plan.num_waves == 1:
        up = "every weight travels up twice a step"
        if plan.num_slots >= sum(unit.is_layer and unit.index not in plan.on_device for unit in model.units):
            up = "every layer travels up once a step"
        elif plan.turn_layers:
            up = "weights travel up twice a step (once: layers that turn)"
        return f"{up}, every gradient down once"
    if plan.resident_gradients:
        return "gradients are summed @device and travel down once"
    return f"gradients are carried between waves in {'fp32' if plan.carry_fp32 or plan.fp32 else 'bf16'}"


def _bytes(plan: Plan, question: Problem) -> str:
    model, machine = question.model, question.machine
    places = needs(plan, machine)
    lines = []
    for place in (HOST, DEVICE, *([DISK] if plan.on_disk else [])):
        own = [item for item in plan.items if item.place == place]
        total = plan.total(place)
        per_param = f"{total / model.num_params:5.2f} B/param" if place == HOST else ""
        lines.append(f"{place:<46} {total / GIB:9.2f} GiB   {per_param}".rstrip())
        for item in own:
            share = f"{item.num_bytes / model.num_params:5.2f} B/param" if place == HOST else _bar(item.num_bytes, total)
            mark = " " if item.exact else "~"
            lines.append(f"  {item.what:<44} {mark}{item.num_bytes / GIB:8.2f} GiB   {share}".rstrip())
        if place in places:
            lines.append(_against(*places[place], machine, place))
    if any(not item.exact for item in plan.items):
        lines.append("~ estimated")
    return "\n".join(lines)


def _against(needed: int, there: int, machine: Machine, place: str) -> str:
    what = "needed, both places in one memory" if machine.one_memory and place == HOST else "needed"
    verdict = f"{(there - needed) / GIB:.2f} left" if needed <= there else f"{(needed - there) / GIB:.2f} SHORT"
    return f"  {what:<44} {needed / GIB:9.2f} GiB   of {there / GIB:.2f} ({budget_source(machine, place)}): {verdict}"


def _bar(num_bytes: int, total: int) -> str:
    return "▪" * round(_BAR * num_bytes / total) if total else ""


def _seconds(plan: Plan, machine: Machine) -> str:
    if plan.seconds is None:
        return ""
    lanes: Seconds = plan.seconds
    rows = [
        ("compute", lanes.compute, f"{machine.matmul_flops_per_s.value / 1e12:.3g} TFLOP/s", machine.matmul_flops_per_s.source),
        ("upload", lanes.upload, _rate(machine.upload_together_bytes_per_s.value), machine.upload_together_bytes_per_s.source),
        (
            "download",
            lanes.download,
            _rate(machine.download_together_bytes_per_s.value),
            machine.download_together_bytes_per_s.source,
        ),
        (
            "optimizer",
            lanes.optimizer,
            f"{machine.optimizer_s_per_param.value * 1e9:.2f} ns/param",
            machine.optimizer_s_per_param.source,
        ),
    ]
    if plan.on_disk:
        read, write = machine.disk_read_bytes_per_s, machine.disk_write_bytes_per_s
        rows.append(("disk", lanes.disk, f"{read.value / 1e9:.3g} and {_rate(write.value)}", write.source))
    lines = [f"{'seconds a step':<26} {lanes.step:9.2f} s     compute and waits; {lanes.serial:.2f} if the lanes took turns"]
    for name, value, rate, source in rows:
        limit = "  <- limits the step" if name == lanes.limit else ""
        lines.append(f"  {name:<24} {value:9.2f} s     {f'at {rate} ({source})'}{limit}")
    lines.append(f"  {'waits for updates':<24} {lanes.waits_for_updates:9.2f} s     of units @host, in the first wave's forward")
    lines.append(f"  {'waits for copies':<24} {lanes.waits_for_copies:9.2f} s     of weights and gradients")
    tokens = plan.rows_per_step * plan.row_tokens
    lines.append(f"  {'tokens a second':<24} {_rounded(tokens / lanes.step):>9}")
    return "\n".join(lines)


def _faster(advice: Sequence[Advice]) -> str:
    if not advice:
        return ""
    lines = [f"  {one.settings:<42} {_rounded(one.tokens_per_s):>9}     {one.price}" for one in advice]
    return "\n".join([f"{'it would be faster with':<40} tokens/s     at the price of", *lines])


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _count(params: int) -> str:
    return f"{params / 1e9:.2f}B" if params >= 1e9 else f"{params / 1e6:.1f}M"
