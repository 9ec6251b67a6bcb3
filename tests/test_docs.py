"""The documentation says what is there: links and paths resolve, names exist, examples run, quoted rows are in the results.

What is history (the lab book) may name what is gone; everything else may not.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.families import BY_TYPE, tiny_config

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "layerferry"
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = {"docs/log.md"}
MODEL = '"Qwen/Qwen2.5-7B"'
"""What the examples load; the tests put a tiny model in its place."""
FOREIGN = {"messages", "completion", "text", "PreTrainedModel", "gradient", "cpu", "cuda", "dataset", "conversations", "output"}
"""Single words in code type that are no names of ours."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@cache
def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def in_code_type(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def anchors(page: Path) -> set[str]:
    """GitHub's names of the headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# ---------------------------------------------------------------- links, paths, names


@every_page
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)}: {target}"
        assert not anchor or anchor in anchors(found), f"{name_of(page)}: {target}: no such heading"


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").as_posix()
        assert path == "index.md" or f"({path})" in index, path


def test_no_two_decisions_share_a_number() -> None:
    numbers = [int(page.name[:4]) for page in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert numbers == sorted(set(numbers)) and numbers[:12] == list(range(1, 13))


@every_page
def test_paths_exist(page: Path) -> None:
    """Whatever begins with a folder of the repository or the package is a path of ours."""
    if name_of(page) in HISTORY:
        return
    for words in in_code_type(page):
        for path in re.findall(r"^[\w.\-]+(?:/[\w.\-]+)*/?$", words):
            first = path.split("/")[0]
            if "/" not in path or first == "outputs" or not ((ROOT / first).is_dir() or (PACKAGE / first).is_dir()):
                continue
            assert (ROOT / path).exists() or (PACKAGE / path).exists(), f"{name_of(page)}: {path}"


def test_modules_name_tests_that_exist() -> None:
    """``Checked by tests/...`` in a docstring."""
    named = {
        (file, path)
        for folder in (PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "tools", ROOT / "native")
        for file in (*folder.rglob("*.py"), *folder.glob("*.cpp"), *folder.glob("*.h"))
        for path in re.findall(r"\btests/[\w/]+\.py\b", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert not [f"{file.name}: {path}" for file, path in named if not (ROOT / path).exists()]


@cache
def classes() -> dict[str, set[str]]:
    """Every class of the package with the names of its methods, fields and ``self`` attributes, inherited ones included."""
    own: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = own.setdefault(node.name, set())
                bases[node.name] = [ast.unparse(base) for base in node.bases]
                for inner in ast.walk(node):
                    if isinstance(inner, ast.FunctionDef):
                        names.add(inner.name)
                    elif isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        names.add(inner.id if isinstance(inner, ast.Name) else inner.attr)
    for name in own:
        for base in bases[name]:
            own[name] |= own.get(base, set())
    return own


@every_page
def test_members_exist(page: Path) -> None:
    """``Class.member`` of a class of ours."""
    if name_of(page) in HISTORY:
        return
    for words in in_code_type(page):
        for owner, member in re.findall(r"^([A-Z]\w+)\.(\w+)", words):
            assert owner not in classes() or member in classes()[owner], f"{name_of(page)}: {owner}.{member}"


@cache
def words_of_the_source() -> set[str]:
    files = [path for pattern in ("*.py", "*.tsv") for path in PACKAGE.rglob(pattern)]
    files += [*(ROOT / "native").glob("*.cpp"), *(ROOT / "tests" / "conformance").glob("*.py")]
    files += [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.jsonl")]
    return {word for path in files for word in re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8"))}


@every_page
def test_single_words_in_code_type_occur_in_the_source(page: Path) -> None:
    if name_of(page) in HISTORY:
        return
    for words in in_code_type(page):
        if re.fullmatch(r"[A-Za-z_]\w*", words):
            assert words in words_of_the_source() | FOREIGN, f"{name_of(page)}: {words}"


def test_the_design_names_every_part_of_the_house() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for path in PACKAGE.iterdir():
        is_part = (path / "__init__.py").is_file() or path.suffix == ".py"
        if is_part and path.name not in ("__init__.py", "version.py", "environment.py"):
            name = f"{path.name}/" if path.is_dir() else path.name
            assert re.search(rf"(?<!\w){re.escape(name)}", design), f"docs/design.md does not name {name}"


def test_the_commands_of_the_readme_are_those_of_the_command_line() -> None:
    from layerferry.cli import _parser

    usage = _parser().format_help().partition("options:")[0]
    there = set(re.findall(r"^    ([a-z]+) ", usage, flags=re.M)) - {"version", "env"}
    named = set(re.findall(r"^\| `layerferry (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M))
    assert named == there


# ---------------------------------------------------------------- examples


@every_page
def test_python_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, name_of(page), "exec")


@pytest.fixture
def tiny_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model and a tokenizer, and beside it, in the working directory, some text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests" / "goldens" / "data" / "tokenizer")
    torch.manual_seed(0)
    config = tiny_config(BY_TYPE["llama"], vocab_size=len(tokenizer), max_position_embeddings=512)
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("A ferry crosses the river.\nIt comes back empty.\n", encoding="utf-8")
    return folder


def run(page: Path, folder: Path) -> dict[str, Any]:
    """Execute a page's Python, block after block, with the tiny model; returns what it has defined."""
    found: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block.replace(MODEL, repr(str(folder))), name_of(page), "exec"), found)
    return found


def test_the_example_of_the_readme_trains(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    engine = run(ROOT / "README.md", tiny_folder)["engine"]
    losses = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert engine.num_steps == len(losses) == 2
    before = AutoModelForCausalLM.from_pretrained(tiny_folder).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    engine.close()


def test_the_example_of_the_readme_is_ten_lines() -> None:
    [block] = blocks(ROOT / "README.md", "python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("name", ["api", "extending"])
def test_examples_run(name: str, tiny_folder: Path) -> None:
    """The worked examples hold their own assertions."""
    assert run(ROOT / "docs" / f"{name}.md", tiny_folder)


# ---------------------------------------------------------------- numbers and the picture


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8").splitlines()]


def test_the_tables_of_measured_rows_are_rendered_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("render_results", ROOT / "tools" / "render_results.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    for page, text in script.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{name_of(page)}: python tools/render_results.py"
    quoted = re.findall(r"^\| `([\w\-.]+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M)
    assert quoted == list(script.WHAT)


def test_every_field_of_a_row_is_explained() -> None:
    explained = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for file in (ROOT / "benchmarks" / "results").glob("*.jsonl"):
        for field in {field for row in rows(file.name) for field in row}:
            assert f"`{field}`" in explained, f"benchmarks/README.md does not explain {field} of {file.name}"


def test_the_memory_table_in_the_readme_is_that_of_the_memory_page() -> None:
    quoted = re.findall(r"^\| (\S+B) \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M)
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    table = {cells[0]: cells for line in page.splitlines() if len(cells := [c.strip() for c in line.strip("|").split("|")]) > 4}
    assert quoted
    for model, host, device in quoted:
        assert (table[model][2], table[model][-1]) == (host, device), model


def test_every_commit_of_a_row_is_written_like_one() -> None:
    assert all(re.fullmatch(r"[0-9a-f]{7,40}", row["commit"]) for row in rows("step.jsonl"))


def test_the_picture_is_drawn_by_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("draw_idea", ROOT / "tools" / "draw_idea.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    script.draw(tmp_path / "idea.png")
    assert (tmp_path / "idea.png").stat().st_size > 50_000
    bars = script.simulate(3)
    uploads = [bar for bar in bars if bar.lane == "upload" and bar.step == 1 and bar.label.isdigit()]
    # each layer once, and downwards all but the three that the slots still hold: what the planner counts too
    from layerferry.planner.time import layer_uploads

    assert len(uploads) == layer_uploads(script.LAYERS, 0, script.NUM_SLOTS, 1)
