"""Regenerates ``tests/goldens/data/lf_*.json`` by running LLaMA-Factory on our rows with our tokenizer.

Run inside an environment that has LLaMA-Factory 0.9.5 (``docs/data.md``): ``python tests/oracles/lf_goldens.py
tests/goldens/data``. ``encode`` and ``pack`` are LLaMA-Factory's processors on given messages; where one raises, the golden
is null and ours must refuse too. A digest stands for (ids, labels) where the lists would be too long to keep; ``digest`` in
tests/data/lf.py makes the same.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "goldens/data"
DATE = "01 Jan 2026"
WHOLE = ("qwen3", "llama3", "mistral", "glm4", "gpt_oss")
"""Templates whose ids and labels are kept whole, for reading; of the others, digests."""
CUT = ("qwen", "qwen3", "llama3", "glm4", "glm4_7", "mistral", "llama2", "gemma", "default", "deepseekr1")
CUTOFFS = (12, 25, 40, 64, 97)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(FOLDER / "tokenizer"))


def prepared(name: str | None, **settings: Any) -> tuple[Any, Any, Any]:
    """LLaMA-Factory's template (a copy), the tokenizer fixed by it, and its arguments."""
    from llamafactory.data import template as module
    from llamafactory.hparams import DataArguments

    arguments = DataArguments(template=name, dataset="ours", **settings)
    if not hasattr(module, "PRISTINE"):
        module.PRISTINE = copy.deepcopy(module.TEMPLATES)
    module.TEMPLATES = copy.deepcopy(module.PRISTINE)
    tok = tokenizer()
    template = module.get_template_and_fix_tokenizer(tok, arguments)
    template.mm_plugin = module.get_mm_plugin("base")  # the others ask for an image processor even where a row is text alone
    return template, tok, arguments


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {
        "_prompt": [row["messages"][:-1] for row in rows],
        "_response": [row["messages"][-1:] for row in rows],
        "_system": [row.get("system", "") for row in rows],
        "_tools": [json.dumps(row["tools"], ensure_ascii=False) if "tools" in row else "" for row in rows],
        "_images": [None] * len(rows),
        "_videos": [None] * len(rows),
        "_audios": [None] * len(rows),
    }


def encode(rows: list[dict[str, Any]], name: str | None, **settings: Any) -> list[Any]:
    """[ids, labels] per row, or None where LLaMA-Factory raises."""
    from llamafactory.data.processor import SupervisedDatasetProcessor

    template, tok, arguments = prepared(name, **settings)
    processor = SupervisedDatasetProcessor(template=template, tokenizer=tok, processor=None, data_args=arguments)
    found: list[Any] = []
    for row in rows:
        try:
            out = processor.preprocess_dataset(columns([copy.deepcopy(row)]))
        except Exception:
            found.append(None)
        else:
            found.append([out["input_ids"][0], out["labels"][0]])
    return found


def pack(rows: list[dict[str, Any]], name: str, **settings: Any) -> dict[str, Any]:
    from llamafactory.data.processor import PackedSupervisedDatasetProcessor

    template, tok, arguments = prepared(name, **settings)
    processor = PackedSupervisedDatasetProcessor(template=template, tokenizer=tok, processor=None, data_args=arguments)
    out = processor.preprocess_dataset(columns(copy.deepcopy(rows)))
    return {key: out[key] for key in ("input_ids", "labels", "position_ids", "attention_mask")}


def pretrain(rows: list[dict[str, Any]], name: str | None, packing: bool | None, add_bos: bool, cutoff_len: int) -> Any:
    from llamafactory.data.processor import PretrainDatasetProcessor

    template, tok, arguments = prepared(name, packing=packing, cutoff_len=cutoff_len)
    arguments.packing = True if packing is None else packing
    tok.add_bos_token = add_bos
    processor = PretrainDatasetProcessor(template=template, tokenizer=tok, processor=None, data_args=arguments)
    return processor.preprocess_dataset(columns(rows))["input_ids"]


def convert(case: dict[str, Any]) -> Any:
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.hparams import DataArguments

    attributes = DatasetAttr("file", "ours")
    attributes.join(case["entry"])
    converter = get_dataset_converter(attributes.formatting, attributes, DataArguments(dataset="ours", template="qwen"))
    found = []
    for row in case["rows"]:
        try:
            out = converter(copy.deepcopy(row))
        except Exception:
            found.append(None)
        else:
            found.append([out["_prompt"] + out["_response"], out["_system"], out["_tools"]])
    return found


def main(folder: Path) -> None:
    from llamafactory.data import tool_utils
    from llamafactory.data.template import TEMPLATES

    class Clock:
        @staticmethod
        def now() -> Clock:
            return Clock()

        def strftime(self, _: str) -> str:
            return DATE

    tool_utils.datetime = Clock
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    encoded: dict[str, Any] = {"whole": {}, "digests": {}}
    for name in sorted(TEMPLATES):
        reasons = "Reasoning" in type(TEMPLATES[name]).__name__
        for thinking in (True, False, None) if reasons else (True,):
            found = encode(rows, name, enable_thinking=thinking)
            encoded["digests"][f"{name} {thinking}"] = [value and digest(value) for value in found]
            if name in WHOLE and thinking is not None:
                encoded["whole"][f"{name} {thinking}"] = found
    write(folder / "lf_encode.json", encoded)

    cut = {}
    for name in CUT:
        for cutoff in CUTOFFS:
            for setting in ("", "mask_history", "train_on_prompt"):
                if setting == "train_on_prompt" and TEMPLATES[name].efficient_eos:
                    continue
                settings = {setting: True} if setting else {}
                found = encode(rows, name, cutoff_len=cutoff, **settings)
                cut[f"{name} {cutoff} {setting}".strip()] = [value and digest(value) for value in found]
    for name, settings in SETTINGS:
        cut[f"{name} {json.dumps(settings)}"] = [value and digest(value) for value in encode(rows, name, **settings)]
    write(folder / "lf_cut.json", cut)

    plain = [row for row in rows if "tools" not in row]
    packs = {
        f"{name} {cutoff} {neat}": pack(plain, name, cutoff_len=cutoff, packing=True, neat_packing=neat)
        for name in ("qwen3", "glm4")
        for cutoff in (64, 150)
        for neat in (False, True)
    }
    write(folder / "lf_pack.json", packs)

    texts = [{"messages": [{"role": "user", "content": m["content"]}]} for row in plain for m in row["messages"]]
    for text in texts:
        text["messages"].append({"role": "assistant", "content": ""})
    pretrained = {
        f"{name} {packing} {bos} {cutoff}": pretrain(texts, name, packing, bos, cutoff)
        for name in ("default", "llama3")
        for packing in (None, True, False)
        for bos in (False, True)
        for cutoff in (20, 64)
        if name == "default" or cutoff == 64
    }
    write(folder / "lf_pretrain.json", pretrained)

    cases = json.loads((folder / "convert_cases.json").read_text(encoding="utf-8"))
    write(folder / "lf_convert.json", {name: convert(case) for name, case in cases.items()})

    write(folder / "lf_mix.json", mixes())

    derived = {}
    for name, text in json.loads((folder / "chat_templates.json").read_text(encoding="utf-8")).items():
        try:
            derived[name] = derive(rows, text)
        except Exception as error:
            derived[name] = None
            print(f"{name}: LLaMA-Factory raises {error!r}", file=sys.stderr)
    write(folder / "lf_derive.json", derived)


def derive(rows: list[dict[str, Any]], chat_template: str) -> list[Any]:
    global tokenizer
    plain = tokenizer

    def with_template() -> Any:
        tok = plain()
        tok.chat_template = chat_template
        return tok

    tokenizer = with_template
    try:
        return [value and digest(value) for value in encode(rows, None)]
    finally:
        tokenizer = plain


def mixes() -> dict[str, Any]:
    """What the datasets library and LLaMA-Factory's loader do with row numbers."""
    import numpy as np
    from datasets import Dataset, interleave_datasets

    found: dict[str, Any] = {}
    for counts in ((5, 3), (4, 9, 6)):
        sets = [Dataset.from_dict({"source": [i] * n, "row": list(range(n))}) for i, n in enumerate(counts)]
        for strategy, stopping in (("under", "first_exhausted"), ("over", "all_exhausted")):
            for weights in (None, [0.7, 0.3] if len(counts) == 2 else [0.2, 0.5, 0.3]):
                mixed = interleave_datasets(sets, weights, seed=42, stopping_strategy=stopping)
                found[json.dumps([counts, f"interleave_{strategy}", weights or []])] = [
                    [row["source"], row["row"]] for row in mixed
                ]
    for count, size, seed in ((10, 0.25, 42), (91, 0.1, 42), (30, 7, 3)):
        parts = Dataset.from_dict({"row": list(range(count))}).train_test_split(test_size=size, seed=seed)
        found[json.dumps(["split", count, size, seed])] = [parts["train"]["row"][:], parts["test"]["row"][:]]
    np.random.seed(42)
    for count, wanted in ((6, 4), (5, 12)):
        index = np.random.permutation(count)[:wanted]
        more = wanted - len(index)
        index = np.concatenate((index, np.random.choice(count, more))) if more > 0 else index
        found[json.dumps(["drawn", count, wanted])] = [int(i) for i in index]
    return found


SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen", {"default_system": "Speak like a pilot."}),
    ("qwen3", {"preserve_thinking": True}),
    ("qwen3", {"preserve_thinking": True, "mask_history": True}),
    ("qwen3", {"enable_thinking": False, "mask_history": True}),
    ("qwen3", {"enable_thinking": False, "train_on_prompt": True}),
    ("qwen", {"tool_format": "llama3"}),
    ("glm4", {"tool_format": "qwen"}),
    ("llama2", {"default_system": "Short answers.", "tool_format": "mistral"}),
)


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
