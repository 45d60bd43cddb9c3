"""Every flag that the documentation names exists."""

import re
from dataclasses import fields

import pytest

from spmd_serve.batch.options import BatchOptions
from spmd_serve.config.flags import Flags
from tests.support.imports import ROOT
from tests.unit.test_docs import PAGES

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")

# Flags of other programs that the pages call, and one that stands for any flag.
OTHERS = {"--index-url", "--once", "--flag", "--check"}


def ours(options: type) -> set[str]:
    return {"--" + item.name.replace("_", "-") for item in fields(options)}


@pytest.mark.filterwarnings("ignore")
def test_flags_that_are_named_exist() -> None:
    from torch.distributed.run import get_args_parser

    from spmd_serve.engine.config import make_parser

    known = ours(Flags) | ours(BatchOptions) | OTHERS
    for parser in (get_args_parser(), make_parser()):
        known |= {flag for action in parser._actions for flag in action.option_strings}
    known |= {flag.replace("_", "-") for flag in known}
    for path in (ROOT / "benchmarks").glob("*.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', path.read_text()))
    unknown = {
        page.name: sorted(found) for page in PAGES if (found := set(FLAG.findall(page.read_text())) - known)
    }
    assert unknown == {}
