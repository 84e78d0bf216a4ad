"""The rules of the house that a reader relies on: who may import whom, who prints, and what start-up must not load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLI = ROOT / "kamera_cli"
STORE = ROOT / "store" / "kamera_store"
PACKAGES = {"kamera_cli": CLI, "kamera_store": STORE}

FACE = {"__main__", "app", "commands", "output"}
FOUNDATION = {"errors", "media", "options", "results", "settings", "trust", "words"}
LAYERS = (
    FACE,
    {"bench"},
    {"__init__", "engine", "handle"},
    {"evict", "ingest", "patches", "query", "recall"},
    {
        "context",
        "factors",
        "hot",
        "lazy",
        "library",
        "model",
        "operator",
        "tiny",
        "window",
        "window_changes",
        "writing",
    },
    FOUNDATION,
)
"""Parts of kamera_cli: each may import its own layer and those below it, and kamera_store, which is below them all."""

MAY_IMPORT = {
    "__main__": {"app"},
    "app": {"__init__", "commands", "model", "output"},
    "commands": {"commands", "engine", "bench", "window", "model", "operator", "output"},
    "output": {"output"},
}
"""Parts that may import these and the foundation, and nothing else of kamera_cli."""

NO_TORCH = (
    FACE
    | (FOUNDATION - {"media"})
    | {"__init__", "context", "engine", "evict", "handle", "lazy", "window", "window_changes"}
)
"""Parts that import no torch at their top level, nor anything that does."""

FOREIGN_PRIVATE = {"_attn_implementation"}
"""Attributes of other people's objects that have no public name: the attention of a transformers config."""

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


def module_of(path: Path) -> str:
    """``kamera_cli.query.answer`` for ``kamera_cli/query/answer.py``; the folder's name for ``__init__.py``."""
    dotted = where(path).removeprefix("store/").removesuffix(".py").replace("/", ".")
    return dotted.removesuffix(".__init__")


@cache
def modules() -> Mapping[str, Path]:
    return {module_of(path): path for path in python_files()}


def part_of(module: str) -> str:
    """``commands`` for ``kamera_cli.commands.query``, ``__init__`` for ``kamera_cli`` itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def nodes(tree: ast.AST, *, skip: tuple[str, ...] = ()) -> Iterator[ast.AST]:
    """Every node below one, without what stands under ``if TYPE_CHECKING`` ("types") or in functions ("functions")."""
    for child in ast.iter_child_nodes(tree):
        types_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not ("types" in skip and types_only) and not ("functions" in skip and function):
            yield child
            yield from nodes(child, skip=skip)


@cache
def imports(path: Path, skip: tuple[str, ...] = ()) -> tuple[tuple[int, str], ...]:
    """Line and dotted module of each import of a file, relative ones made absolute.

    What a package's ``__init__`` runs before any of its modules is not counted.
    """
    module = module_of(path)
    package = (module if path.name == "__init__.py" else module.rpartition(".")[0]).split(".")
    found = []
    for node in nodes(parse(path), skip=skip):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            named = [f"{source}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name if name in modules() else source) for name in named]
    return tuple(dict.fromkeys(found))


def graph(skip: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Our modules that each of our modules imports."""
    return {
        module: {target for _, target in imports(path, skip) if target in modules()} - {module}
        for module, path in modules().items()
    }


def circles(edges: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Strongly connected components of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    waiting: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        waiting.append(node)
        for target in sorted(edges[node]):
            if target not in index:
                visit(target)
            if target in waiting:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            at = waiting.index(node)
            group = waiting[at:]
            del waiting[at:]
            if len(group) > 1:
                found.append(tuple(sorted(group)))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"f"}, "f": {"e"}, "g": {"a", "f"}}
    assert sorted(circles(edges)) == [("a", "b", "c"), ("e", "f")]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checking and inside functions are counted."""
    assert not circles(graph())


def test_imports_run_one_way() -> None:
    height = {part: at for at, layer in enumerate(LAYERS) for part in layer}
    wrong = []
    for module, path in modules().items():
        if module.split(".")[0] != "kamera_cli":
            continue
        part = part_of(module)
        for line, target in imports(path):
            if target.split(".")[0] != "kamera_cli":
                continue
            to = part_of(target)
            allowed = height[to] >= height[part] and (
                part not in MAY_IMPORT or to in MAY_IMPORT[part] | FOUNDATION
            )
            if not allowed:
                wrong.append(f"{where(path)}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_each_part_of_the_program_has_a_layer() -> None:
    listed = [part for layer in LAYERS for part in layer]
    there = {part_of(module) for module in modules() if module.split(".")[0] == "kamera_cli"}
    assert len(set(listed)) == len(listed) and there <= set(listed)


def test_the_store_knows_nothing_of_ours_outside_itself() -> None:
    wrong = [
        f"{where(path)}:{line} imports {module}"
        for path in STORE.rglob("*.py")
        for line, module in imports(path)
        if module.split(".")[0] in ("kamera_cli", "typer", "rich", "transformers")
    ]
    assert not wrong, "\n".join(wrong)


def test_outside_libraries_stay_in_their_files() -> None:
    wrong = [
        f"{where(path)}:{line} imports {module}"
        for path in python_files()
        for line, module in imports(path, ("types",))
        if (allowed := ONLY_IN.get(module.split(".")[0])) is not None
        and not where(path).startswith(allowed or ("-",))
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_stays_out_of_what_must_start_fast() -> None:
    wrong = [
        f"{where(path)}:{line} imports {module}"
        for name, path in modules().items()
        for line, module in imports(path, ("types",))
        if module.split(".")[0] in ("torch", "torchvision")
        and (
            path.name != "tensors.py"
            if path.is_relative_to(STORE)
            else part_of(name) in FACE | FOUNDATION - {"media"}
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_the_engine_or_a_command_reaches_no_torch() -> None:
    """Through no chain of top-level imports."""
    heavy = {"torch", "torchvision", "transformers", "av", "PIL"}
    edges = graph(("types", "functions"))
    reached = {
        module
        for module in modules()
        if module.split(".")[0] == "kamera_store" or part_of(module) in NO_TORCH
    }
    waiting = sorted(reached - {"kamera_store.format.tensors"})
    reached = set(waiting)
    while waiting:
        new = edges[waiting.pop()] - reached
        reached |= new
        waiting += new
    wrong = [
        f"{where(modules()[module])}:{line} imports {target}"
        for module in sorted(reached)
        for line, target in imports(modules()[module], ("types", "functions"))
        if target.split(".")[0] in heavy
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_take_only_the_torch_free_table_from_the_model_package() -> None:
    wrong = [
        f"{where(path)}:{line} imports {module}"
        for path in (CLI / "commands").rglob("*.py")
        for line, module in imports(path)
        if module.startswith("kamera_cli.model") and module != "kamera_cli.model.architectures"
    ]
    assert not wrong, "\n".join(wrong)


def private_names(path: Path) -> set[str]:
    """Names with one leading underscore that a file itself gives to a function, class, field or attribute."""
    found = set()
    for node in nodes(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_no_private_attribute_of_another_module_is_used() -> None:
    """Told by name: ``x._name`` is another module's where this file gives no function, field or ``self._name`` so."""
    wrong = []
    for path in python_files():
        known = private_names(path) | FOREIGN_PRIVATE
        for node in nodes(parse(path)):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node):
                used = [node.attr]
            elif isinstance(node, ast.ImportFrom) and (
                node.level or (node.module or "").split(".")[0] in PACKAGES
            ):
                used = [alias.name for alias in node.names if is_private(alias.name)]
            else:
                continue
            wrong += [f"{where(path)}:{node.lineno} uses {name}" for name in used if name not in known]
    assert not wrong, "\n".join(wrong)


def test_nothing_that_threads_share_is_a_cached_property() -> None:
    """Since Python 3.12 it takes no lock: two threads that ask first both make the value."""
    wrong = [
        f"{where(path)}:{node.lineno}"
        for module, path in modules().items()
        if part_of(module) != "bench"
        for node in nodes(parse(path))
        if isinstance(node, ast.Attribute | ast.Name | ast.alias) and "cached_property" in ast.unparse(node)
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
        for node in nodes(parse(path))
        if prints(node) and not ast.unparse(node).startswith(CHILD_BODIES.get(where(path), "-"))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_program_itself_catches_every_exception() -> None:
    wrong = [
        f"{where(path)}:{node.lineno}"
        for path in python_files()
        if where(path) != "kamera_cli/app.py"
        for node in nodes(parse(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_store_folder_is_no_package_of_its_own() -> None:
    assert not (ROOT / "store" / "__init__.py").exists()


HEAVY = """
import sys
heavy = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "torchvision", "av", "PIL"})
sys.stderr.write(f"heavy={heavy}")
"""
LOADED = f"""
import sys
from kamera_cli.app import run
sys.stderr.write(f"code={{run(sys.argv[1:])}} ")
{HEAVY}
"""


def start(code: str, *arguments: str, **variables: str) -> str:
    """What a fresh interpreter says on its error stream."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KAMERA_")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'store'}", **variables}
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return ran.stderr


def test_making_an_engine_loads_no_torch(tmp_path: Path) -> None:
    code = (
        f"from kamera_cli import Engine, Settings, Window\nEngine(Settings()).open_window('notes')\n{HEAVY}"
    )
    assert start(code, KAMERA_STORE=str(tmp_path / "store")).endswith("heavy=[]")


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
    said = start(LOADED, *arguments, KAMERA_STORE=str(tmp_path / "store"))
    assert "heavy=[]" in said, said
    assert f"code={3 if arguments[0] in ('stats', 'ls', 'verify') else 0}" in said, said
