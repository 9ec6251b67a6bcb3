"""Rewrite a model folder: other shard sizes, another element type, quantised weights made plain; ready for other programs.

Tensors keep their names and pass one at a time, so that a model larger than the memory can be exported. Weights come first and
become visible only when all are there (``store/safetensors_writer.py``); then the small files: config, generation config,
tokenizer, chat template, the model's own code. With a LLaMA-Factory template named, an Ollama ``Modelfile`` too, as
LLaMA-Factory writes one. Leaves out: hub ids (download first), adapters, quantisation.
Checked by ``tests/interop/test_export.py``.
"""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerferry.config import ExportConfig
from layerferry.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from layerferry.store.safetensors_file import TensorFolder

log = logging.getLogger(__name__)

COPIED = (
    *("generation_config.json", "preprocessor_config.json", "chat_template.*", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "*.model", "tekken.json", "*.py", "LICENSE*", "NOTICE*"),
)
"""Files that travel as they are: patterns inside the model folder."""


def export(options: ExportConfig) -> None:
    """Write ``options.export_dir``."""
    from layerferry.store.safetensors_writer import TensorToWrite, write_pretrained

    source, target = Path(options.model.model_name_or_path), Path(options.export_dir)
    if not source.is_dir():
        raise ConfigError(f"model_name_or_path: {source}: no such folder (download a hub model first)")
    if target.resolve() == source.resolve():
        raise ConfigError(f"export_dir: {target} is the model itself: name another folder")
    config = _config(source)
    folder, was_quantised = _weights(source, config)
    wanted = _element_type(options.infer_dtype, was_quantised)
    tensors = []
    for name in folder.names:
        stored = folder.dtype(name)
        dtype = wanted if wanted is not None and stored.is_floating_point else stored
        tensors.append(TensorToWrite(name, folder.shape(name), dtype, partial(_read_as, folder, name, dtype)))
    modelfile = _modelfile(options.template)
    written = write_pretrained(
        target,
        tensors,
        max_shard_bytes=options.export_size * 10**9,
        total_parameters=sum(prod(tensor.shape) for tensor in tensors),
    )
    if was_quantised:
        config.pop("quantization_config", None)
    if wanted is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(wanted).removeprefix("torch.")
    _write_small_files(source, target, config, modelfile)
    log.info("%s: %d files of weights, %.2f GB", target, len(written.files), written.total_bytes / 1e9)


def _config(source: Path) -> dict[str, Any]:
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{source / 'config.json'}: not readable as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{source / 'config.json'}: expected an object")
    return config


def _weights(source: Path, config: dict[str, Any]) -> tuple[TensorFolder, bool]:
    from layerferry.store.dequantise import DequantisedFolder
    from layerferry.store.safetensors_file import CheckpointFolder

    block = (config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    folder = DequantisedFolder(CheckpointFolder(source), block=(int(block[0]), int(block[1])))
    return folder, folder.is_quantised


def _element_type(name: str, was_quantised: bool) -> torch.dtype | None:
    """The type of every floating-point tensor; None: each as it is."""
    import torch

    if name == "auto":
        return torch.bfloat16 if was_quantised else None
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _read_as(folder: TensorFolder, name: str, dtype: torch.dtype) -> torch.Tensor:
    return folder.read(name).to(dtype)


def _write_small_files(source: Path, target: Path, config: dict[str, Any], modelfile: str | None) -> None:
    try:
        for path in sorted({path for pattern in COPIED for path in source.glob(pattern) if path.is_file()}):
            shutil.copyfile(path, target / path.name)
        if modelfile is not None:
            (target / "Modelfile").write_text(modelfile, encoding="utf-8")
        (target / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{error.filename or target}: cannot be written: {error.strerror}") from error


def _modelfile(name: str | None) -> str | None:
    """What Ollama needs to run the folder; None where no template is named, or one that Ollama's language cannot say."""
    if name in (None, "auto"):
        return None
    from layerferry.data import templates

    template = templates.load(str(name))

    def text(slots: templates.Slots, content: str) -> str:
        pieces = templates.fill(slots, content)
        return "".join(
            piece if isinstance(piece, str) else piece.name for piece in pieces if not isinstance(piece, templates.Special)
        )

    if template.kind == "fused":
        log.info("Modelfile: not written: template %s puts the system message inside the first turn", name)
        return None
    lines = [
        "FROM .",
        'TEMPLATE """'
        + text(template.prefix, "")
        + "{{ if .System }}"
        + text(template.system, "{{ .System }}")
        + "{{ end }}{{ range .Messages }}"
        + '{{ if eq .Role "user" }}'
        + text(template.user, "{{ .Content }}")
        + '{{ else if eq .Role "assistant" }}'
        + text(template.assistant, "{{ .Content }}")
        + '{{ end }}{{ end }}"""',
        *([f'SYSTEM """{template.default_system}"""'] if template.default_system else []),
        *(f'PARAMETER stop "{word}"' for word in template.stop_words),
        "PARAMETER num_ctx 4096",
    ]
    return "\n\n".join(lines) + "\n"
