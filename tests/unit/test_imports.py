"""How the package is built: imports run down only, and each outside library stays where it belongs."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.imports import (
    PACKAGE,
    Import,
    circle,
    imports,
    modules,
    own_imports,
    owner,
    strings,
)

LONGEST_FILE = 360
MODULES = modules()

# From the bottom up. A folder (or a root module) imports from itself and from lower layers.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("topology",),
    ("system",),
    ("config",),
    ("wire",),
    ("liveness",),
    ("rendezvous",),
    ("channel",),
    ("engine",),
    ("job", "server", "batch"),
    ("offline", "commands"),
    ("main",),
    ("", "__main__"),
)
MOST_ROOT_MODULES = 6

# Modules and folders ("name.") that may import a library; "" is the package itself, when asked for LLM.
VLLM = ("engine.", "server.", "offline.", "batch.handlers", "")
WEB = ("server.",)
WEB_LIBRARIES = ("fastapi", "starlette", "uvicorn")
TORCH = ("rendezvous.join", "channel.gloo", "channel.nccl", "engine.", "offline.")
TORCH_IN_FUNCTIONS = ("wire.codec", "job.job", "commands.")

TORCHRUN_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w*|PET_\w*"
)


def short(module: str) -> str:
    return module.removeprefix("spmd_serve").removeprefix(".")


def is_among(module: str, names: tuple[str, ...]) -> bool:
    """Whether a module is one of these, or in one of these packages."""
    name = short(module)
    return any(name == one or (one.endswith(".") and f"{name}.".startswith(one)) for one in names)


def layer_of(module: str) -> int:
    found = [number for number, names in enumerate(LAYERS) if folder_of(module) in names]
    assert len(found) == 1, f"{module}: give its folder one layer in {__name__}.LAYERS"
    return found[0]


def folder_of(module: str) -> str:
    return short(module).partition(".")[0]


def docstring_of(path: Path) -> str | None:
    return ast.get_docstring(ast.parse(path.read_text()))


def uses_of(library: str) -> list[tuple[str, Import]]:
    """Modules that import a library, with the import."""
    return [
        (module, one)
        for module, path in MODULES.items()
        for one in imports(path.read_text())
        if one.name.partition(".")[0] == library
    ]


def test_imports_run_down() -> None:
    upwards = [
        f"{module} imports {target}"
        for module, targets in own_imports(MODULES).items()
        for target in targets
        if layer_of(target) > layer_of(module)
        or (layer_of(target) == layer_of(module) and folder_of(target) != folder_of(module))
    ]
    assert upwards == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(own_imports(MODULES)) is None


def test_the_root_holds_few_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_ROOT_MODULES


def test_every_folder_says_what_belongs_there() -> None:
    silent = [
        module for module, path in MODULES.items() if path.name == "__init__.py" and not docstring_of(path)
    ]
    assert silent == []
    folders = {path.parent for path in MODULES.values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("library", "places"),
    [("vllm", VLLM), ("uvloop", (*WEB, "commands.batch")), *((library, WEB) for library in WEB_LIBRARIES)],
)
def test_a_library_stays_where_it_belongs(library: str, places: tuple[str, ...]) -> None:
    assert {module for module, _ in uses_of(library) if not is_among(module, places)} == set()


def test_torch_stays_out_of_the_lower_layers() -> None:
    strays = {
        f"{module} line {one.line}"
        for module, one in uses_of("torch")
        if not is_among(module, TORCH) and not (one.lazy and is_among(module, TORCH_IN_FUNCTIONS))
    }
    assert strays == set()


def test_torchruns_variables_are_read_in_one_place() -> None:
    named = [
        f"{module} line {line}: {text}"
        for module, path in MODULES.items()
        if short(module) != "system.torchrun_env"
        for text, line in strings(path.read_text())
        if TORCHRUN_VARIABLES.fullmatch(text)
    ]
    assert named == []


def test_files_are_short() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in MODULES.values()}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE} == {}


class TestTheReader:
    """A reader that saw nothing would pass every test above."""

    def test_imports_are_found_wherever_they_stand(self) -> None:
        source = (
            "import a.b\n"
            "from c import d as e, f\n"
            "if TYPE_CHECKING:\n    import h\nelse:\n    import i\n"
            "class X:\n    async def y(self):\n        try:\n            import g\n        finally: pass\n"
        )
        assert [(one.name, one.lazy) for one in imports(source)] == [
            ("a.b", False),
            ("c.d", False),
            ("c.f", False),
            ("h", False),
            ("i", False),
            ("g", True),
        ]

    def test_names_belong_to_modules(self) -> None:
        assert owner("spmd_serve.errors.UsageError", MODULES) == "spmd_serve.errors"
        assert owner("spmd_serve.channel.gloo", MODULES) == "spmd_serve.channel.gloo"

    def test_circles_are_found(self) -> None:
        assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
        assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None

    def test_the_package_is_seen(self) -> None:
        graph = own_imports(MODULES)
        assert "spmd_serve.errors" in graph["spmd_serve.config.flags"]
        assert "spmd_serve.commands.serve" in graph["spmd_serve.main"]  # inside a function
        assert {module for module, _ in uses_of("torch")} >= {
            "spmd_serve.rendezvous.join",
            "spmd_serve.wire.codec",
        }
