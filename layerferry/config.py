"""Every setting and its only default.

Field names are LLaMA-Factory's where it has the setting, so that a config file maps one to one; the rest are ours.
Readers of files (``interop``) fill these; everything below the command line takes them. Environment variables are read here only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

RESUME_NEWEST = "newest"
RESUME_NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is built."""

    model_name_or_path: str
    """Folder with config.json (and weights), or a hub id."""
    model_revision: str = "main"
    cache_dir: str | None = None
    trust_remote_code: bool = False
    """Run Python code that ships with the model: off unless asked."""
    train_from_scratch: bool = False
    """Random weights from the config instead of the checkpoint's."""
    resize_vocab: bool = False
    add_tokens: tuple[str, ...] = ()
    add_special_tokens: tuple[str, ...] = ()
    split_special_tokens: bool = False
    flash_attn: str = "auto"
    """auto, disabled (eager), sdpa, fa2, fa3."""
    rope_scaling: str | None = None
    """linear, dynamic, yarn, llama3: stretch rotary positions to rows of cutoff_len."""
    moe_aux_loss_coef: float | None = None
    """Weight of the router's load-balancing loss; None keeps the model config's choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which rows, and how they become token ids and labels."""

    dataset: tuple[str, ...] = ()
    """Names from dataset_info.json, or direct paths to JSON/JSONL/text files."""
    eval_dataset: tuple[str, ...] = ()
    dataset_dir: str = "data"
    template: str | None = None
    """A LLaMA-Factory template name; auto: the tokenizer's own chat template; None: from the tokenizer, as LLaMA-Factory does."""
    default_system: str | None = None
    enable_thinking: bool | None = True
    preserve_thinking: bool = False
    tool_format: str | None = None
    cutoff_len: int = 2048
    """Tokens a sample may have; the rest is cut."""
    train_on_prompt: bool = False
    mask_history: bool = False
    packing: bool | None = None
    """None: on for stage pt, off otherwise."""
    neat_packing: bool = False
    """Pack, and keep the samples of a row from seeing each other; implies packing."""
    max_samples: int | None = None
    val_size: float = 0.0
    eval_on_each_dataset: bool = False
    mix_strategy: str = "concat"
    interleave_probs: tuple[float, ...] = ()
    streaming: bool = False
    preprocessing_batch_size: int = 1000
    """Rows that are packed together: a knapsack never looks further."""
    tokenized_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The optimizer, its schedule and clipping."""

    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, float | int | str] = field(default_factory=dict)
    warmup_steps: float = 0
    """Steps; below 1 a share of all steps."""
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    """Never applied to norms and biases."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optim: str = "adamw_torch_fused"
    """A name of the Hugging Face Trainer: the rule, and the bits of its moments (adamw_8bit, lion_32bit, sgd ...)."""
    master_weights: str = "auto"
    """fp32, 24bit, bf16 (stochastic rounding); auto: fp32 beside fp32 moments, 24bit beside 8-bit ones."""
    momentum: float | None = None
    """Of sgd and muon (``optim_args: momentum=0.9``); None: the rule's own, 0 and 0.95."""
    max_grad_norm: float = 1.0
    """Exact global-norm clipping; 0 turns it off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Steps, logging, saving, evaluation."""

    stage: str = "sft"
    finetuning_type: str = "full"
    """full, or freeze: only what the next four name is trained; the rest holds 2 bytes a parameter."""
    freeze_trainable_layers: int = 2
    """The last n layers; the first -n where negative."""
    freeze_trainable_modules: tuple[str, ...] = ("all",)
    """Modules of those layers (mlp, self_attn ...), or all."""
    freeze_extra_modules: tuple[str, ...] = ()
    """Modules outside the layers that are trained too: embed_tokens, lm_head, norm ..."""
    use_llama_pro: bool = False
    """Train every (number of layers / n)-th layer instead: those that a block expansion has put in."""
    output_dir: str = "outputs"
    overwrite_output_dir: bool = False
    resume_from_checkpoint: str | None = None
    """A checkpoint folder. RESUME_NEWEST: the newest in output_dir, which must be there; RESUME_NEVER: start anew.
    None, as LLaMA-Factory does: the newest in output_dir where there is one, unless overwrite_output_dir."""
    do_train: bool = True
    do_eval: bool = False
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    logging_steps: float = 500
    """Steps between log lines; below 1 a share of all steps. So too save_steps and eval_steps."""
    logging_first_step: bool = False
    logging_dir: str | None = None
    """Folder of TensorBoard's files; None: runs/ in output_dir."""
    disable_tqdm: bool | None = None
    """True: a plain log even on a terminal."""
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    save_only_model: bool = False
    """Checkpoints without optimizer state: a sixth of the bytes, and nothing can be resumed from them."""
    eval_strategy: str = "no"
    eval_steps: float | None = None
    """None: as logging_steps."""
    plot_loss: bool = False
    report_to: tuple[str, ...] = ()
    """tensorboard, wandb."""
    run_name: str | None = None
    seed: int = 42
    full_determinism: bool = False
    """Deterministic kernels only: on CUDA a run repeated or resumed under the same plan has the same bits, at some cost of speed.
    (On the CPU bits are equal anyway.)"""
    data_seed: int | None = None
    disable_shuffling: bool = False
    dataloader_drop_last: bool = False
    include_num_input_tokens_seen: bool = False
    gradient_checkpointing: bool = True
    """False (LLaMA-Factory's disable_gradient_checkpointing): keep every activation."""
    max_skipped_steps: int = 10
    """Steps in a row whose loss or gradient norm may be not finite before the run stops."""
    detect_anomaly: bool = False
    """Name the first unit whose output or gradient is not finite, and stop; every look waits for the device."""
    verify_memory: bool = False
    """Sum the host planes between steps, to find bad memory; two more passes over them."""
    watchdog_minutes: float = 30.0
    """A run in which some lane has to move and does not for so long is ended; 0: never."""
    fp32: bool = False
    """Compute in fp32 (LLaMA-Factory: neither bf16 nor pure_bf16 on a CPU); weights 4 bytes, no residue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What the user fixes of the plan; None: the planner chooses."""

    disk_units: int | None = None
    """Units, from the last on, whose optimizer state lives on the disk."""
    micro_batch_rows: int | None = None
    num_waves: int | None = None
    first_wave: int | None = None
    """Micro-batches of the first of several waves; 0: as many as of the others."""
    activation_budget: float | None = None
    """Share of the activations that is kept between forward and backward; 1.0 keeps all, 0.0 little more than inputs."""
    richer_layers: int | None = None
    """Layers, the last ones, that keep ``richer_budget`` instead."""
    richer_budget: float | None = None
    turn_layers: int | None = None
    """Layers, the last ones, through which a micro-batch goes up and down at once, with all that they keep."""
    host_inputs: int | None = None
    """Layers, from the first on, whose inputs wait @host for their backward."""
    mlp_chunk_tokens: int | None = None
    """Tokens of a row that a layer's token-wise parts see at a time; 0: all."""
    kept_attention: int | None = None
    """Layers, the last ones, whose attention is kept while the rest of every layer is computed again."""
    device_units: int | None = None
    """Units, from the embedding on, that live @device whole: weights, gradients, optimizer state."""
    resident_gradients: bool | None = None
    """Whether sums of several waves stay @device."""
    carry_fp32: bool | None = None
    """Whether gradients are kept @host in four bytes."""
    num_slots: int | None = None
    num_slabs: int | None = None
    end_parts: int | None = None
    """Parts in which embedding and head travel, so that they need not fit the device whole."""
    expert_parts: int | None = None
    """Parts in which a layer's stacked experts travel, so that no layer need fit the device whole."""
    chunk_tokens: int | None = None
    """Tokens whose logits exist at the same time."""
    compile: bool | None = None
    """None: on for CUDA, off elsewhere."""
    optimizer_threads: int | None = None

    def __contains__(self, field: str) -> bool:
        return getattr(self, field, None) is not None

    def items(self) -> Iterator[tuple[str, float]]:
        """What is fixed, by field."""
        return ((field.name, getattr(self, field.name)) for field in fields(Pins) if field.name in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Pins):
    """Ours: what the plan may use, and what the user pins of it."""

    device: str = "auto"
    """auto, cuda, cuda:1, cpu, chaos."""
    device_memory: int | None = None
    """Bytes that are taken from the device at most, the allocator's gaps included; None: what it reports."""
    host_memory: int | None = None
    """Bytes of host memory; None: what the system reports."""
    disk_memory: int | None = None
    """Bytes of a disk that optimizer state may take where host and device have no room; None and 0: none."""
    disk_folder: str | None = None
    """On that disk; None: output_dir."""
    update_on_arrival: bool = False
    """Update a unit as soon as its gradient is @host, and keep no gradients: 2 bytes a parameter less. Needs max_grad_norm: 0,
    and a step that is not finite cannot be skipped: the run ends there."""
    timeline: bool = False
    """Record one step: timeline.json (Chrome, Perfetto) and timeline.png in the output folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One run."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    @property
    def disk_folder(self) -> Path:
        """Where optimizer state @disk is."""
        return Path(self.engine.disk_folder or self.train.output_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """One conversation: the model, its template, and how tokens are drawn (LLaMA-Factory's generating defaults)."""

    model: ModelConfig
    template: str | None = None
    """A LLaMA-Factory template name; None and auto: the model folder's own chat template."""
    default_system: str | None = None
    enable_thinking: bool | None = True
    infer_dtype: str = "auto"
    do_sample: bool = True
    """False: always the likeliest token."""
    temperature: float = 0.95
    top_p: float = 0.7
    top_k: int = 50
    num_beams: int = 1
    max_new_tokens: int = 1024
    """Tokens of an answer, at most."""
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """A model folder in, a model folder out."""

    model: ModelConfig
    export_dir: str
    export_size: int = 5
    """GB (10^9 bytes) a shard."""
    infer_dtype: str = "auto"
    """auto (as it is), float16, bfloat16, float32."""
    template: str | None = None


def extra_keys_allowed() -> bool:
    """LLaMA-Factory's ALLOW_EXTRA_ARGS: unknown keys are a warning instead of an error."""
    return _is_true("ALLOW_EXTRA_ARGS")


def debug_requested() -> bool:
    """LAYERFERRY_DEBUG: the command line shows the traceback of a user error too."""
    return _is_true("LAYERFERRY_DEBUG")


def preferred_compiler() -> str | None:
    """CXX: the C++ compiler (and arguments) to build the native kernels with."""
    return os.environ.get("CXX", "").strip() or None


def allocator_is_configured() -> bool:
    """PYTORCH_ALLOC_CONF, or PYTORCH_CUDA_ALLOC_CONF as it was called before: the user has settings of their own for torch's
    device allocator."""
    return any(os.environ.get(name, "").strip() for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))


def cache_folder() -> Path:
    """LAYERFERRY_CACHE, or layerferry/ in the user's cache folder: what can be built or measured again. May not exist yet."""
    named = os.environ.get("LAYERFERRY_CACHE", "").strip()
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path(os.path.expanduser("~"), ".cache")) / "layerferry"


def fix_cublas_workspace() -> None:
    """Sets CUBLAS_WORKSPACE_CONFIG, unless it is set: what cuBLAS needs to be deterministic, read when it is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "true", "y", "yes", "on"}
