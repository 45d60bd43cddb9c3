"""Write docs/files.md: every file of the package with the first paragraph of its docstring."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spmd_serve"
PAGE = ROOT / "docs" / "files.md"
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
        rows = [
            f"| `{path.relative_to(PACKAGE).as_posix()}` | {summary(path)} |"
            for path in sorted(folder.glob("*.py"))
            if path.name != "__init__.py"
        ]
        sections.append("\n".join(["| file | what it holds |", "|---|---|", *rows, ""]))
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page())
