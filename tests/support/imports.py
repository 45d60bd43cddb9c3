"""Who imports whom in spmd_serve, read from the source without running it."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "spmd_serve"


@dataclass(frozen=True)
class Import:
    """One imported name, such as "spmd_serve.errors.UsageError" or "torch.distributed"."""

    name: str
    line: int
    lazy: bool
    """Inside a function: runs when that is called, not when the module is imported."""


def modules() -> dict[str, Path]:
    """All files of the package, by module name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: str) -> list[Import]:
    """Return every import in a source text, also those inside functions and under TYPE_CHECKING."""
    return list(_walk(ast.parse(source), lazy=False))


def _walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None and child.level == 0, f"line {child.lineno}: a relative import"
            yield from (Import(f"{child.module}.{alias.name}", child.lineno, lazy) for alias in child.names)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, lazy or inside)


def own_imports(known: Mapping[str, Path]) -> dict[str, set[str]]:
    """Module to the modules of ours that it imports."""
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        graph[module] = {
            target
            for one in imports(path.read_text())
            if one.name.partition(".")[0] == PACKAGE.name and (target := owner(one.name, known)) != module
        }
    return graph


def owner(name: str, known: Mapping[str, Path]) -> str:
    """The module that an imported name belongs to."""
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return name


def circle(graph: Mapping[str, set[str]]) -> list[str] | None:
    """Some modules that import each other, in order; None where there are none."""
    done: set[str] = set()
    for start in graph:
        found = _circle_from(start, graph, [], done)
        if found:
            return found
    return None


def _circle_from(
    module: str, graph: Mapping[str, set[str]], path: list[str], done: set[str]
) -> list[str] | None:
    if module in path:
        return [*path[path.index(module) :], module]
    if module in done:
        return None
    for target in sorted(graph.get(module, ())):
        found = _circle_from(target, graph, [*path, module], done)
        if found:
            return found
    done.add(module)
    return None


def strings(source: str) -> Iterator[tuple[str, int]]:
    """Every string constant of a source text with its line, docstrings too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
