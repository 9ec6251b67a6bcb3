"""The shape of the house, read from the source: who may import whom, where the machine is touched, how long a file may be.

Imports count wherever they stand, also inside functions: a lazy import upwards is an import upwards.
"""

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import layerferry
from layerferry import config

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "layerferry"
SOURCES = sorted(PACKAGE.rglob("*.py"))

RANKS: list[set[str]] = [
    {"errors", "version"},
    {"config", "environment"},
    {"layout", "units", "plan", "master"},
    {"backends"},
    {"store", "models"},
    {"optim"},
    {"engine", "objectives"},
    {"planner", "checkpoint", "data", "interop"},
    {"api", "verify", "chat", "trainer"},
    {"cli"},
    {"__main__"},
]
"""From the bottom to the top; a module imports its own rank and those below."""

PUBLIC = ["AdamW", "CrossEntropy", "Engine", "MicroBatch", "__version__", "load"]
MAY_PRINT = {"cli.py", "chat.py"}
MAY_USE_TRANSFORMERS = {"models", "data", "interop", "chat.py"}
LONGEST_FILE = 400


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(module: str) -> str:
    """``layerferry.store.store`` -> ``store``."""
    return module.split(".")[1] if "." in module else ""


def rank_of(part: str) -> int:
    ranks = [number for number, parts in enumerate(RANKS) if part in parts]
    assert len(ranks) == 1, f"{part} has no rank: add it to RANKS"
    return ranks[0]


def imports(path: Path, *, types: bool = True) -> Iterator[tuple[str, int]]:
    """Every imported module with its line; ``from a import b`` counts as a.b where that is a module, else as a.

    ``types`` False leaves out what only a type checker imports.
    """
    tree = tree_of(path)
    guarded = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unseen = set() if types else {inner for node in guarded for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            module = node.module or ""
            submodules = [f"{module}.{alias.name}" for alias in node.names if is_module(f"{module}.{alias.name}")]
            yield from ((name, node.lineno) for name in submodules or [module])


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@cache
def attributes(path: Path) -> list[tuple[str, int]]:
    """Every dotted expression, such as ``torch.cuda.synchronize``, with its line."""
    return [(ast.unparse(node), node.lineno) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)]


def own_part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_only_down() -> None:
    wrong = []
    for path in SOURCES:
        part = own_part(path)
        if part == "__init__":
            continue  # resolves its names lazily, on behalf of the user
        for module, line in imports(path):
            inside = module.removeprefix("layerferry.")
            if module.startswith("layerferry.") and rank_of(part_of(module)) > rank_of(part):
                wrong.append(f"{name_of(path)}:{line}: {part} imports {inside}, which lies above it")
    assert not wrong, "\n".join(wrong)


def test_the_package_itself_imports_only_its_version() -> None:
    found = [
        node.module
        for node in tree_of(PACKAGE / "__init__.py").body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("layerferry")
    ]
    assert found == ["layerferry.version"]


def uses(pattern: str) -> set[str]:
    """Files of the package with an import or a dotted expression that matches ``pattern``."""
    found = set()
    for path in SOURCES:
        for text, _ in (*imports(path, types=False), *attributes(path)):
            if re.match(pattern, text):
                found.add(path.relative_to(PACKAGE).as_posix())
    return found


def test_cuda_is_touched_in_one_file() -> None:
    assert uses(r"torch\.cuda\b") <= {"backends/cuda.py"}


def test_transformers_is_used_in_few_places() -> None:
    assert {file.split("/")[0] for file in uses(r"transformers\b")} <= MAY_USE_TRANSFORMERS


def test_environment_variables_are_read_in_one_file() -> None:
    assert uses(r"os\.(environ|getenv|putenv)\b") <= {"config.py"}


def test_streams_and_events_stay_behind_the_seam() -> None:
    streams = r"torch\..*(Stream|Event)$|.*\.(record_stream|wait_stream|wait_event)$"
    assert all(file.startswith("backends/") or file in ("engine/feed.py", "engine/drain.py") for file in uses(streams))


WRITES = {
    *("open", "write_text", "write_bytes", "touch", "mkdir", "unlink", "rmdir", "rename", "replace_file", "write_file", "Files"),
    *("mkdtemp", "mkstemp", "NamedTemporaryFile", "rmtree", "copyfile", "copytree", "symlink_to", "savefig", "dump"),
}


def test_a_run_writes_its_files_through_one_door() -> None:
    """By another the folder of a successor would be written into (``trainer/output.py``). Pictures are drawn in memory."""
    found = set()
    for path in sorted((PACKAGE / "trainer").glob("*.py")):
        for node in ast.walk(tree_of(path)):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
            if name in WRITES:
                found.add((path.name, name))
    assert {one for one in found if one[0] != "output.py"} == {("plots.py", "savefig")}, found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_is_short_and_says_what_it_is_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    assert not text.strip() or ast.get_docstring(tree_of(path)), "a file opens with what it is for"


def test_only_programs_print() -> None:
    for path in SOURCES:
        if path.relative_to(PACKAGE).as_posix() in MAY_PRINT:
            continue
        for node in ast.walk(tree_of(path)):
            called = node.func if isinstance(node, ast.Call) else None
            assert not (isinstance(called, ast.Name) and called.id == "print"), f"{name_of(path)}:{node.lineno}: print"


def test_heavy_packages_are_imported_inside_functions() -> None:
    heavy = {"transformers", "datasets", "matplotlib", "pyarrow", "accelerate", "omegaconf", "wandb", "tensorboard"}
    for path in SOURCES:
        for node in tree_of(path).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {name.split(".")[0] for name in names}, f"{name_of(path)}:{node.lineno}"


def test_every_setting_is_read() -> None:
    """Silence means honoured: a field that nothing reads would be a promise that nobody keeps."""
    readers = [path for path in SOURCES if own_part(path) not in ("config", "interop")]
    sections = (
        config.ModelConfig,
        config.DataConfig,
        config.OptimConfig,
        config.TrainConfig,
        config.EngineConfig,
        config.ChatConfig,
    )
    names = {field.name for section in sections for field in dataclasses.fields(section)}
    found = {text.rsplit(".", 1)[-1] for path in readers for text, _ in attributes(path)}
    assert names <= found


def test_public_names_are_frozen_and_resolve() -> None:
    assert sorted(layerferry.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(layerferry, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lood'"):
        _ = layerferry.lood
