"""The documentation names what exists, and every message that a user can meet."""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from docs import file_table
from spmd_serve.config.flags import REFUSED, TORCHRUN_OWNS, Flags
from spmd_serve.errors import ExitCode
from tests.support.imports import PACKAGE, ROOT, modules

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")])
README = (ROOT / "README.md").read_text()
FLAGS_PAGE = (ROOT / "docs" / "flags.md").read_text()
LONGEST_README = 120
"""Lines."""
LONGEST_OVERVIEW = 1500
"""Words of docs/architecture.md."""
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

ERRORS = (
    "UsageError",
    "PeerLost",
    "SpmdError",
    "RefusedClass",
    "MessageTooLong",
    "PeerSilent",
    "BadFrame",
    "Stopped",
)
SHORTEST = 10
SHOWN = 24
"""How much of a message's fixed part the page must have at least, characters."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_files_that_are_named_exist() -> None:
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(r"`((?:launch|tests|benchmarks|docs)/[\w./-]+)`", page.read_text())
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_the_readme_and_the_overview_are_short() -> None:
    assert len(README.splitlines()) <= LONGEST_README
    assert len((ROOT / "docs" / "architecture.md").read_text().split()) <= LONGEST_OVERVIEW


def test_the_file_tables_are_up_to_date() -> None:
    assert file_table.PAGE.read_text() == file_table.page(), "run python docs/file_table.py"
    assert file_table.SUPPORT_PAGE.read_text() == file_table.support_page(), "run python docs/file_table.py"


def test_the_page_of_flags_lists_what_is_refused() -> None:
    flags = ["--" + name.replace("_", "-") for name in (*TORCHRUN_OWNS, *REFUSED)]
    assert [flag for flag in flags if f"`{flag}`" not in FLAGS_PAGE] == []


@pytest.mark.parametrize("page", ["docs/flags.md", "docs/troubleshooting.md"])
def test_exit_codes_are_explained(page: str) -> None:
    rows = re.findall(r"^\| `?(\d)`? \|", (ROOT / page).read_text(), re.MULTILINE)
    assert [int(row) for row in rows] == [int(code) for code in ExitCode]


def test_the_page_of_flags_has_the_defaults() -> None:
    for item in fields(Flags):
        flag = "--" + item.name.replace("_", "-")
        row = next(line for line in FLAGS_PAGE.splitlines() if line.startswith(f"| `{flag}"))
        default = row.split("|")[2].strip().strip("`")
        shown = "" if item.default in (None, ()) else item.default
        assert default == (f"{shown:g}" if isinstance(shown, float) else str(shown)), flag


def test_the_versions_of_the_readme_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (vllm,) = project["optional-dependencies"]["gpu"]
    assert vllm == "vllm>=0.32,<0.33" and "vLLM 0.32" in README
    assert project["requires-python"].startswith(">=3.11") and "Python 3.11" in README


def test_every_message_is_explained() -> None:
    """A message counts as explained when the page has the beginning of one of its fixed parts."""
    page = squeezed(TROUBLES)
    missing = [
        f"{where}: {' … '.join(parts)}"
        for where, parts in messages()
        if not any(squeezed(part)[:SHOWN].strip(" :;,('") in page for part in parts)
    ]
    assert missing == [], "add these to docs/troubleshooting.md"


def test_messages_are_in_alphabetical_order() -> None:
    for group in TROUBLES.split("\n## ")[1:-1]:
        rows = [line for line in group.splitlines() if line.startswith(("| `", "| in the"))]
        assert rows == sorted(rows, key=place_of)


def place_of(row: str) -> str:
    """A row's first fixed words."""
    return re.sub(r"^\| (in the output: )?`(…|-|\s|: |[ ,:=.])*", "", row).lower()


def test_messages_are_found() -> None:
    texts = [" … ".join(parts) for _, parts in messages()]
    assert len(texts) > 80
    assert any("contradicts torchrun" in text for text in texts)
    assert any("has been stopped" in text for text in texts)


def messages() -> Iterator[tuple[str, list[str]]]:
    """Where each error message stands, and its fixed parts that are long enough to be searched for."""
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and called(node) in ERRORS:
                text: ast.expr | None = node.args[0]
            elif isinstance(node, ast.Return) and path.name == "descriptions.py":
                text = node.value
            else:
                continue
            parts = [part for part in fixed_parts(text) if len(part.strip()) >= SHORTEST]
            if parts:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", parts


def called(node: ast.Call) -> str:
    return str(getattr(node.func, "id", None) or getattr(node.func, "attr", ""))


def fixed_parts(node: ast.expr | None) -> Iterator[str]:
    """String constants of an expression that builds a text; not those inside of what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from fixed_parts(value)
    elif isinstance(node, ast.BinOp):
        yield from fixed_parts(node.left)
        yield from fixed_parts(node.right)


def squeezed(text: str) -> str:
    return " ".join(text.split())
