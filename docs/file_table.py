"""Write docs/files.md and tests/support/README.md: every file with the first paragraph of its docstring."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spmd_serve"
PAGE = ROOT / "docs" / "files.md"
SUPPORT = ROOT / "tests" / "support"
SUPPORT_PAGE = SUPPORT / "README.md"
SUPPORT_HEAD = """# Helpers of the tests

Generated from the docstrings by `python docs/file_table.py`. Helpers that the benchmarks use as well are in
`harness/`.
"""
HEAD = """# Every file

Generated from the docstrings by `python docs/file_table.py`. [Architecture](architecture.md) explains how the
parts work together.
"""


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring, as one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def page() -> str:
    """Return the text of docs/files.md."""
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    sections = [HEAD]
    for folder in folders:
        name = folder.relative_to(ROOT).as_posix()
        sections.append(f"## `{name}/`\n\n{summary(folder / '__init__.py')}\n")
        sections.append(table(folder, PACKAGE))
    return "\n".join(sections)


def support_page() -> str:
    """Return the text of tests/support/README.md."""
    harness = ROOT / "harness"
    return "\n".join([SUPPORT_HEAD, table(SUPPORT, ROOT), table(harness, ROOT)])


def table(folder: Path, root: Path) -> str:
    """Return a table of the modules in `folder`; their paths are relative to `root`."""
    rows = [
        f"| `{path.relative_to(root).as_posix()}` | {summary(path)} |"
        for path in sorted(folder.glob("*.py"))
        if path.name != "__init__.py"
    ]
    return "\n".join(["| file | what it holds |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
    SUPPORT_PAGE.write_text(support_page())
