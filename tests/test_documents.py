"""What the documents say holds: links, paths, names, commands and flags exist, and what is generated is up to date."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import measured_tables
import pytest
from test_architecture import LAYERS

from kamera_cli.app import help_text, run
from kamera_cli.model.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
)
CURRENT = tuple(name for name in DOCUMENTS if name != "CHANGELOG.md")
"""Documents about what is there now; the change log also names what was."""

MAX_LINES, MAX_WIDTH = 250, 120
ROOTS = ("", "docs", "kamera_cli", "store", "store/kamera_store", "tests")
"""Folders from which a path in a document may be read."""


GROUPS = ("models",)
"""Commands that have commands of their own."""

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NOT_IN_THE_TREE = (
    "design §",
    "design.md",
    "cli.md",
    "house.md",
    "paper.md",
    "cases.md",
    "FORMAT.md",
    "kamera_cli.jobs",
)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def tracked() -> frozenset[str]:
    """Every file of the project, and the name of each alone."""
    skipped = {".git", ".venv", "__pycache__", ".ruff_cache", ".mypy_cache"}
    found = [path for path in ROOT.rglob("*") if not skipped & set(path.relative_to(ROOT).parts)]
    return frozenset(path.relative_to(ROOT).as_posix() for path in found if path.is_file()) | {
        p.name for p in found
    }


def code_spans(text: str) -> Iterator[str]:
    """What stands between backticks outside fenced blocks."""
    yield from re.findall(r"`([^`\n]+)`", FENCED.sub("", text))


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)


def test_the_readme_is_short_and_fits_a_terminal() -> None:
    lines = text_of("README.md").splitlines()
    assert len(lines) <= MAX_LINES
    assert [(number, len(line)) for number, line in enumerate(lines, 1) if len(line) > MAX_WIDTH] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_relative_link_leads_somewhere(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = ROOT / name if not path else (ROOT / name).parent / path
        if not file.exists() or (
            anchor and anchor not in map(slug, headings(file.read_text(encoding="utf-8")))
        ):
            broken.append(target)
    assert not broken


def is_there(path: str) -> bool:
    if path.endswith("/"):
        return any((ROOT / root / path).is_dir() for root in ROOTS)
    return any((ROOT / root / path).exists() for root in ROOTS) or ("/" not in path and path in tracked())


@pytest.mark.parametrize("name", CURRENT)
def test_every_path_that_is_named_is_there(name: str) -> None:
    text = text_of(name)
    named = {
        word
        for span in code_spans(text)
        for word in span.split()
        if re.fullmatch(r"[\w.-]+(/[\w.-]*)*", word)
    }
    paths = {word for word in named if re.search(r"\.(py|md|sh)$|/$", word) and "NAME" not in word}
    run_files = set(re.findall(r"(?:python|sh|pytest) ((?:[\w-]+/)+[\w.-]+\.(?:py|sh))", text))
    assert sorted(path for path in paths | run_files if not is_there(path)) == []


@pytest.mark.parametrize("name", CURRENT)
def test_every_name_of_the_packages_can_be_imported(name: str) -> None:
    wrong = []
    for span in code_spans(text_of(name)):
        if re.fullmatch(r"kamera_(cli|store)(\.\w+)+", span):
            try:
                pkgutil.resolve_name(span)
            except (ImportError, AttributeError):
                wrong.append(span)
    assert not wrong


@pytest.mark.parametrize("name", CURRENT)
def test_nothing_is_cited_that_is_not_in_the_tree(name: str) -> None:
    assert [what for what in NOT_IN_THE_TREE if what in text_of(name)] == []


def sources() -> list[Path]:
    return [
        path
        for folder in ("kamera_cli", "store", "examples", "docs")
        for path in (ROOT / folder).rglob("*.py")
    ]


def test_no_docstring_cites_what_is_not_in_the_tree() -> None:
    found = [
        (path.relative_to(ROOT).as_posix(), what)
        for path in sources()
        for what in NOT_IN_THE_TREE
        if what in path.read_text(encoding="utf-8")
    ]
    assert not found


def test_a_section_that_the_code_cites_is_in_the_architecture() -> None:
    known = headings(text_of("docs/architecture.md"))
    cited = [
        (path.relative_to(ROOT).as_posix(), section)
        for path in sources()
        for section in re.findall(r'docs/architecture\.md`*,?\s+"([^"]+)"', path.read_text(encoding="utf-8"))
    ]
    assert [where for where in cited if where[1] not in known] == []


# Commands and flags


def shell_lines(text: str) -> Iterator[str]:
    """Lines that call the program: of shell blocks, and what stands between backticks."""
    for language, block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if language in ("sh", "console", "text") else ():
            yield from line.removeprefix("$ ").split("#")[0].split(";")
    yield from code_spans(text)


@cache
def helped(command: str) -> str | None:
    """Help of a command; None where there is no such command."""
    try:
        return help_text(command, MAX_WIDTH)
    except (KeyError, ValueError, AssertionError):
        return None


def command_of(words: list[str]) -> str:
    """``compile-patches`` of ``kamera --json compile-patches 1``, ``models check`` of ``kamera models check DIR``."""
    plain = [word for word in words[1:] if re.fullmatch(r"[a-z]+(-[a-z]+)*", word)]
    if not plain:
        return ""
    return " ".join(plain[:2]) if plain[0] in GROUPS and plain[1:2] == ["check"] else plain[0]


@cache
def commands() -> tuple[str, ...]:
    return tuple(re.findall(r"^  ([a-z-]+)  ", help_text().split("Commands:")[1], re.MULTILINE))


def wrong_calls(text: str) -> list[str]:
    """Calls of the program in a document with a command or a flag that it does not have."""
    known = set(re.findall(r"--[a-z-]+", help_text())) | {"--help"}
    wrong = []
    for line in shell_lines(text):
        words = line.split()
        if words[:1] != ["kamera"]:
            continue
        command = command_of(words)
        if command and command.split()[0] not in commands():
            wrong.append(line)
            continue
        flags = {word.split("=")[0].rstrip(",") for word in words if re.match(r"--[a-z]", word)}
        offered = known | set(re.findall(r"--[a-z-]+", helped(command) or ""))
        wrong += [f"{line}: {flag}" for flag in sorted(flags - offered)]
    return wrong


@pytest.mark.parametrize("name", CURRENT)
def test_commands_and_flags_that_are_shown_exist(name: str) -> None:
    assert not wrong_calls(text_of(name))


def test_a_command_or_flag_that_does_not_exist_is_noticed() -> None:
    block = '```sh\nkamera query "what?" --chunks 1 --fps 2\nkamera ls; kamera dance\n```\n'
    assert wrong_calls(block) == ['kamera query "what?" --chunks 1 --fps 2: --fps', " kamera dance"]
    assert wrong_calls("see `kamera evict --older 3`") == ["kamera evict --older 3: --older"]


@pytest.mark.parametrize("name", CURRENT)
def test_flags_that_stand_alone_belong_to_some_command(name: str) -> None:
    offered = {
        flag for command in ("", *commands()) for flag in re.findall(r"--[a-z-]+", helped(command) or "")
    }
    named = {
        span.split()[0].split("=")[0] for span in code_spans(text_of(name)) if re.match(r"--[a-z]", span)
    }
    assert sorted(named - offered) == []


# What can be run


def test_the_lines_of_the_quickstart_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for variable in ("KAMERA_STORE", "KAMERA_MODEL", "KAMERA_TENANT", "KAMERA_QUOTA"):
        monkeypatch.delenv(variable, raising=False)
    script = text_of("examples/quickstart.sh")
    question = re.search(r"^question='(.*)'$", script, re.MULTILINE)[1]
    lines = re.findall(r"^kamera (.*)$", script, re.MULTILINE)
    assert len(lines) >= 5
    printed = []
    for line in lines:
        words = [question if word == '"$question"' else word for word in line.split()]
        assert run(["--store", str(tmp_path / "store"), "--device", "cpu", *words]) == 0
        printed.append(capfd.readouterr().out)
    answers = [
        out.splitlines()[0] for line, out in zip(lines, printed, strict=True) if line.startswith("query")
    ]
    assert answers == ["seven", "seven", "unknown"]
    everything = {without_numbers(line) for out in printed for line in out.splitlines()}
    shown = text_of("README.md").split("## Try it")[1].split("```text\n")[1].split("```")[0]
    results = [
        line for line in shown.splitlines() if line and not line.startswith(("$", "kamera: warning", "..."))
    ]
    assert len(results) >= 5
    assert [line for line in results if without_numbers(line) not in everything] == []


def without_numbers(line: str) -> str:
    """A line of output with every number, and the width of its columns, left out."""
    return " ".join(re.sub(r"\d[\d.e-]*", "0", line).split())


# What is generated


def test_measured_figures_are_those_of_the_recorded_runs() -> None:
    assert text_of("docs/measured.md") == measured_tables.page(), "run: python docs/generate.py measured"
    readme = text_of("README.md")
    assert readme == measured_tables.with_headline(readme), "run: python docs/generate.py measured"
    assert "two-hop right" in readme.split("<!-- measured:begin -->")[1].split("<!-- measured:end -->")[0]


def test_every_recorded_run_says_how_it_was_made() -> None:
    for name, run_ in measured_tables.runs().items():
        assert run_["command"].startswith("kamera bench "), name
        assert run_["suite"] in measured_tables.SHOWN, name
        assert re.match(r"20\d\d-\d\d-\d\d", run_["date"]), name
        assert run_["version"] and run_["environment"]["versions"]["torch"], name


def test_figures_that_were_changed_by_hand_are_noticed() -> None:
    text = text_of("README.md")
    begin = text.index("<!-- measured:begin -->")
    changed = text[:begin] + re.sub(r"\d+\.\d %", "12.3 %", text[begin:], count=1)
    assert changed != text
    assert measured_tables.with_headline(changed) == text


def test_the_readme_counts_and_names_the_architectures_that_are_supported() -> None:
    section = " ".join(text_of("README.md").split("## Your own model")[1].split("\n## ")[0].split())
    assert f"in {len(ARCHITECTURES)} architectures" in section
    variants = {
        "qwen3_vl_moe": "its MoE",
        "deepseek_vl_hybrid": "its hybrid",
        "qwen2": "Qwen2",
        "deepseek_v3": "V3",
    }
    assert [one.name for one in ARCHITECTURES if variants.get(one.model_type, one.name) not in section] == []


# The architecture


@pytest.mark.parametrize("package", ["kamera_cli", "store/kamera_store"])
def test_every_room_has_its_line(package: str) -> None:
    rooms = text_of("docs/architecture.md").split("## Rooms")[1].split("\n## ")[0]
    named = {
        span for line in rooms.splitlines() if line.startswith("|") for span in code_spans(line.split("|")[1])
    }
    entries = [path for path in (ROOT / package).iterdir() if not path.name.startswith(("_", "."))]
    there = {
        f"{path.name}/" if path.is_dir() else path.name for path in entries if path.suffix in ("", ".py")
    }
    assert sorted(there - named) == []


def test_the_operator_is_where_the_architecture_says_that_it_is() -> None:
    """A reader who follows the life of a query ends at the rotation of a key."""
    tree = ast.parse(text_of("kamera_cli/model/families/gqa.py"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert "rotate" in functions


def test_the_layers_are_those_that_the_architecture_test_computes() -> None:
    section = text_of("docs/architecture.md").split("## What may import what")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
    assert [set(code_spans(row)) for row in rows] == list(LAYERS)
