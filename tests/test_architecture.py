"""The rules of the house that a reader relies on: who may import whom, who prints, and what start-up must not load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLI = ROOT / "kamera_cli"
STORE = ROOT / "store" / "kamera_store"

LEAVES = {"errors", "results", "settings", "words"}
FACE = {"app", "commands", "output", "__main__"}
MAY_IMPORT = {
    "__init__": set(),
    "__main__": {"app"},
    "app": {"commands", "output"},
    "commands": {"commands", "engine", "bench", "window", "model", "output"},
    "output": {"output"},
    "errors": set(),
    "results": set(),
    "settings": set(),
    "words": set(),
}
"""Parts of kamera_cli that are named here may import these and the leaves, nothing else of ours."""

TORCH_FREE = FACE | LEAVES | {"window"}
ONLY_IN = {
    "typer": ("kamera_cli/app.py", "kamera_cli/commands/"),
    "rich": ("kamera_cli/output/", "kamera_cli/words.py", "kamera_cli/commands/"),
    "transformers": ("kamera_cli/model/",),
    "lmdb": ("store/kamera_store/lmdb/binding.py",),
    "zstandard": ("store/kamera_store/format/codec.py",),
    "pickle": (),
    "dill": (),
    "cloudpickle": (),
    "shelve": (),
    "marshal": (),
}
"""Outside modules and the only files or folders of the two packages that may import them."""


def python_files() -> list[Path]:
    return sorted([*CLI.rglob("*.py"), *STORE.rglob("*.py")])


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    """``commands`` for ``kamera_cli/commands/query.py``, ``engine`` for ``kamera_cli/engine.py``."""
    return path.relative_to(CLI).parts[0].removesuffix(".py")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that can run: what stands under ``if TYPE_CHECKING`` never does."""
    for child in ast.iter_child_nodes(tree):
        if not is_type_checking(child):
            yield child
            yield from running_nodes(child)


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted module of each import that runs, relative ones made absolute."""
    package = where(path).removeprefix("store/").removesuffix(".py").split("/")[:-1]
    for node in running_nodes(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module in ("kamera_cli", "kamera_store") or not node.module:
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def test_imports_run_one_way() -> None:
    wrong = []
    for path in CLI.rglob("*.py"):
        part = part_of(path)
        for line, module in imported_names(path):
            names = module.split(".")
            if names[0] != "kamera_cli" or len(names) < 2 or names[1].startswith("__"):
                continue
            target = names[1]
            if part in MAY_IMPORT:
                allowed = target in MAY_IMPORT[part] | LEAVES
            elif part == "bench":
                allowed = target not in FACE
            elif part == "engine":
                allowed = target not in FACE | {"bench"}
            else:
                allowed = target not in FACE | {"bench", "engine"}
            if not allowed:
                wrong.append(f"{where(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_store_knows_nothing_of_ours_outside_itself() -> None:
    wrong = [
        f"{where(path)}:{line} imports {module}"
        for path in STORE.rglob("*.py")
        for line, module in imported_names(path)
        if module.split(".")[0] in ("kamera_cli", "typer", "rich", "transformers")
    ]
    assert not wrong, "\n".join(wrong)


def test_outside_libraries_stay_in_their_files() -> None:
    wrong = [
        f"{where(path)}:{line} imports {module}"
        for path in python_files()
        for line, module in imported_names(path)
        if (allowed := ONLY_IN.get(module.split(".")[0])) is not None
        and not where(path).startswith(allowed or ("-",))
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_stays_out_of_what_must_start_fast() -> None:
    wrong = [
        f"{where(path)}:{line} imports {module}"
        for path in python_files()
        for line, module in imported_names(path)
        if module.split(".")[0] in ("torch", "torchvision")
        and (path.name != "tensors.py" if path.is_relative_to(STORE) else part_of(path) in TORCH_FREE)
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_take_only_the_torch_free_table_from_the_model_package() -> None:
    wrong = [
        f"{where(path)}:{line} imports {module}"
        for path in (CLI / "commands").rglob("*.py")
        for line, module in imported_names(path)
        if module.startswith("kamera_cli.model") and module != "kamera_cli.model.architectures"
    ]
    assert not wrong, "\n".join(wrong)


def prints(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Name):
        return called.id in ("print", "echo", "secho")
    if not isinstance(called, ast.Attribute):
        return False
    owner = ast.unparse(called.value)
    return called.attr in ("print", "echo", "secho") or (
        called.attr == "write" and owner in ("sys.stdout", "sys.stderr")
    )


CHILD_BODIES = {"store/kamera_store/rescue.py": "sys.stdout.write"}
"""Files whose functions run in a child process of ours and answer through its stdout, and how they do."""


def test_nothing_but_output_prints() -> None:
    wrong = [
        f"{where(path)}:{node.lineno} {ast.unparse(node)[:60]}"
        for path in python_files()
        if where(path) != "kamera_cli/output/printer.py"
        for node in ast.walk(parse(path))
        if prints(node) and not ast.unparse(node).startswith(CHILD_BODIES.get(where(path), "-"))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_program_itself_catches_every_exception() -> None:
    wrong = [
        f"{where(path)}:{node.lineno}"
        for path in python_files()
        if where(path) != "kamera_cli/app.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_store_folder_is_no_package_of_its_own() -> None:
    assert not (ROOT / "store" / "__init__.py").exists()


LOADED = """
import sys
from kamera_cli.app import run
code = run(sys.argv[1:])
heavy = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "torchvision", "av", "PIL"})
sys.stderr.write(f"code={code} heavy={heavy}")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["query", "--help"],
        ["bench", "--help"],
        ["models"],
        ["stats"],
        ["ls"],
        ["verify"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_help_and_store_commands_load_no_torch(arguments: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KAMERA_")}
    environment |= {
        "KAMERA_STORE": str(tmp_path / "store"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'store'}",
    }
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "heavy=[]" in ran.stderr, ran.stderr
    assert f"code={3 if arguments[0] in ('stats', 'ls', 'verify') else 0}" in ran.stderr, ran.stderr
