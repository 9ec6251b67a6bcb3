"""For people with their own loop: a model in, an engine out.

    engine = layerferry.load("Qwen/Qwen2.5-7B", optimizer=layerferry.AdamW(weight_decay=0.1))
    report = engine.step(micro_batches, lr=1e-5)
    engine.save_pretrained("out")

The trainer and the command line use nothing else. Order matters for memory: the plan is made, and refused, before a byte of
weights is allocated; then planes are allocated, then filled parameter by parameter.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layerferry.backends import Backend, make
from layerferry.config import Config, EngineConfig, ModelConfig
from layerferry.engine.engine import Engine
from layerferry.engine.pretrained import ModelFolder
from layerferry.engine.randomness import seed_of
from layerferry.errors import CheckpointError, ConfigError
from layerferry.layout import FP32_PLANE, GRAD_PLANE, WEIGHT
from layerferry.models import experts, varlen
from layerferry.models.build import ATTENTION, build_on_meta, config_of, refuse_missing_folder, take_block_size
from layerferry.models.frozen import freeze, freeze_alike
from layerferry.models.grown import GrownSource, grown_rows
from layerferry.models.initial import initial_parameters
from layerferry.models.parameter_source import ParameterSource
from layerferry.models.router_balance import ask_for_balance
from layerferry.models.skeleton import Skeleton
from layerferry.optim.base import Optimizer
from layerferry.optim.choose import optimizer_for
from layerferry.optim.decay import decays
from layerferry.plan import Plan
from layerferry.store.dequantise import DequantisedFolder
from layerferry.store.fill import DEFAULT_READ_AHEAD_BYTES, fill
from layerferry.store.safetensors_file import CheckpointFolder
from layerferry.store.scratch import ScratchFile
from layerferry.store.store import Store, plane_specs
from layerferry.units import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def load(
    model: str | Path | PreTrainedModel,
    *,
    optimizer: Optimizer | None = None,
    config: Config | None = None,
    plan: Plan | None = None,
    backend: Backend | None = None,
    row_tokens: int = 2048,
    weights: str | Path | None = None,
    num_tokens: int | None = None,
    **engine_options: Any,
) -> Engine:
    """An engine that trains ``model`` (folder, hub id, or a live model whose weights are copied, and whose parameters stay
    frozen where ``requires_grad`` is off).

    ``config`` carries every setting of a run; without it, ``engine_options`` are fields of ``EngineConfig`` (``device``,
    ``device_memory``, ``micro_batch_rows`` ...) and ``row_tokens`` is the longest row that will be trained. ``plan`` None:
    the planner chooses. ``weights``: a folder whose weights are taken instead of the model's own (a checkpoint of its run).
    ``num_tokens``: length of the tokenizer, for ``resize_vocab``. Raises ``PlanError`` (does not fit),
    ``ModelRefused`` (cannot be right), ``CheckpointError`` (files).
    """
    if config is not None and engine_options:
        given = ", ".join(engine_options)
        raise ConfigError(f"{given}: given beside config, whose engine section has it: set it there")
    live = None if isinstance(model, (str, Path)) else model
    if config is None:
        name = str(model) if live is None else type(live).__name__
        config = Config(model=ModelConfig(model_name_or_path=name), engine=EngineConfig(**engine_options))
    backend = backend or make(config.engine.device)
    backend.limit_memory(None)  # what is measured for a plan may be more than fits
    optimizer = optimizer or optimizer_for(config.optim, seed=config.train.seed)
    built, source, folder = _build(config, live, num_tokens)
    if weights is not None:
        source = ParameterSource(built, CheckpointFolder(weights))
    freeze(built, config.train) if live is None else freeze_alike(built, live)
    if backend.device.type == "cuda":
        experts.use_where_needed(built)
    if backend.device.type == "cuda" and config.model.flash_attn == "auto":
        varlen.use_where_possible(built, backend.device)
    skeleton = Skeleton(built, decays=decays, device=backend.device, fp32=config.train.fp32)
    if plan is None:
        from layerferry.planner import choose_for

        plan = choose_for(skeleton, optimizer, config, backend, row_tokens=row_tokens)
    backend.limit_memory(config.engine.device_memory)
    grad = FP32_PLANE if plan.carry_fp32 else GRAD_PLANE
    store = Store(
        skeleton.units,
        plane_specs(optimizer.state_planes, grad=grad),
        backend,
        on_device=plan.on_device,
        on_disk=plan.on_disk,
        scratch=ScratchFile(config.disk_folder),
        keeps_gradients=not plan.on_arrival,
    )
    _fill(store, skeleton, source, seed=config.train.seed)
    engine = Engine(skeleton, store, optimizer, backend, plan, seed=config.train.seed, folder=folder)
    engine.max_grad_norm = config.optim.max_grad_norm
    return engine


def _build(config: Config, live: PreTrainedModel | None, num_tokens: int | None) -> tuple[PreTrainedModel, Any, ModelFolder]:
    """The model on meta, where its parameters come from (None: random), and how it is written."""
    given = config.model
    dtype = torch.float32 if config.train.fp32 else torch.bfloat16
    if live is not None:
        built = build_on_meta(live.config, dtype=dtype, attention=live.config._attn_implementation)
        return built, _LiveSource(live), ModelFolder(built, source=None)
    hf_config = config_of(given, config.data.cutoff_len)
    block = take_block_size(hf_config)
    ask_for_balance(hf_config, given.moe_aux_loss_coef)

    def build(rows: int) -> PreTrainedModel:
        hf_config.get_text_config().vocab_size = rows
        return build_on_meta(
            hf_config, dtype=dtype, attention=ATTENTION[given.flash_attn], trust_remote_code=given.trust_remote_code
        )

    known_rows = int(hf_config.get_text_config().vocab_size)
    rows = known_rows
    if given.resize_vocab and num_tokens is not None and num_tokens > known_rows:
        rows = grown_rows(num_tokens)
    if given.train_from_scratch:
        built = build(rows)
        return built, None, ModelFolder(built, source=None)
    path = local_folder(given)
    source = ParameterSource(built := build(known_rows), DequantisedFolder(CheckpointFolder(path), block=block))
    if rows == known_rows:
        return built, source, ModelFolder(built, source=path, used_transforms=source.used_transforms)
    built = build(rows)
    grown = GrownSource(source, built, old_rows=known_rows, seed=config.train.seed)
    return built, grown, ModelFolder(built, source=path, used_transforms=source.used_transforms)


def local_folder(given: ModelConfig) -> Path:
    """The folder of the checkpoint: the path itself, or the hub's files in the local cache."""
    path = Path(given.model_name_or_path)
    if path.is_dir():
        return path
    refuse_missing_folder(given.model_name_or_path)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                given.model_name_or_path,
                revision=given.model_revision,
                cache_dir=given.cache_dir,
                allow_patterns=["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"],
            )
        )
    except Exception as error:
        raise CheckpointError(f"{given.model_name_or_path}: no such folder, and the hub did not give it: {error}") from error


def _fill(store: Store, skeleton: Skeleton, source: Any, *, seed: int) -> None:
    if source is None:
        for unit in store.units:
            by_name = unit.layout.by_name
            with store.at_hand(unit):
                for name, value in initial_parameters(skeleton, unit, seed=seed_of(seed, unit.index), device=skeleton.device):
                    store.set_parameter(unit, by_name[name], value)
        return
    homes = {unit.names[entry.name]: (unit, entry) for unit in store.units for entry in unit.layout.entries}
    buffers = set(skeleton.buffer_names)

    unit_bytes = max(store.plane(unit, WEIGHT).buffer.numel() for unit in store.units)
    with ExitStack() as at_hand:
        current: Unit | None = None

        def put(name: str, value: torch.Tensor) -> None:
            nonlocal current
            if name in buffers:
                skeleton.set_buffer(name, value)
                return
            unit, entry = homes[name]
            if unit is not current:  # names come unit by unit
                at_hand.close()
                at_hand.enter_context(store.at_hand(unit))
                current = unit
            store.set_parameter(unit, entry, value)

        fill(put, source, [*homes, *skeleton.buffer_names], read_ahead_bytes=min(unit_bytes, DEFAULT_READ_AHEAD_BYTES))


class _LiveSource:
    """Parameters of a live model, by name."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._values = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def load(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self._values[name]
        return value.detach().cpu()

    def num_bytes(self, name: str) -> int:
        value = self._values[name]
        return int(value.numel() * value.element_size())
