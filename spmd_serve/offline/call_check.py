"""Describe the call of each rank, and find the ranks whose calls differ. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from spmd_serve.offline.digest import describe, digest
from spmd_serve.topology import spans

IGNORED = ("use_tqdm",)
"""Arguments that only affect what is displayed, so that ranks may pass different values."""

_SHOWN_ARGUMENTS = 3
_Key = TypeVar("_Key")

OwnCall = tuple[str | Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A worker method, or a function of the worker, with its arguments.

It stays in its process: the script makes the same call on every rank, so neither functions nor the tensors of
one rank have to be sent.
"""


@dataclass(frozen=True)
class Call:
    """Call `number` of an LLM: a method, and the digest and the description of each argument.

    With `left` the rank makes no further calls, and `method` is a phrase for the reason.
    """

    number: int
    method: str
    arguments: Mapping[str, tuple[str, str]]
    left: bool = False

    @classmethod
    def of(cls, number: int, method: str, arguments: Mapping[str, object]) -> "Call":
        """Return the call of `method` with its arguments by name."""
        compared = {
            name: (digest(value), describe(value)) for name, value in arguments.items() if name not in IGNORED
        }
        return cls(number, method, compared)

    def to_plain(self) -> list[Any]:
        """Return the call as lists, strings and numbers."""
        arguments = {name: list(pair) for name, pair in self.arguments.items()}
        return [self.number, self.method, arguments, self.left]

    @classmethod
    def from_plain(cls, plain: Any) -> "Call":
        """Return the call that `to_plain` has converted."""
        number, method, arguments, left = plain
        compared = {str(name): (str(hashed), str(text)) for name, (hashed, text) in arguments.items()}
        return cls(int(number), str(method), compared, bool(left))

    def __str__(self) -> str:
        shown = [f"{name}={text}" for name, (_, text) in self.arguments.items() if text != "None"]
        more = ", …" if len(shown) > _SHOWN_ARGUMENTS else ""
        return f"{self.method}({', '.join(shown[:_SHOWN_ARGUMENTS])}{more})"

    @property
    def action(self) -> str:
        """The end of a sentence that begins with the rank."""
        return self.method if self.left else f"calls {self}"


def own_call(method: str, arguments: Mapping[str, Any]) -> OwnCall | None:
    """Return the function that each shard runs with its rank's arguments; None for the driver's methods."""
    if method == "collective_rpc":
        return arguments["method"], tuple(arguments.get("args") or ()), dict(arguments.get("kwargs") or {})
    if method == "apply_model":
        return method, (arguments["func"],), {}
    return None


def disagreement(calls: Mapping[int, Call], hostnames: Mapping[int, str]) -> str | None:
    """Return one line that names each rank's call if the calls differ, else None.

    Both mappings are by rank.
    """
    first = calls[min(calls)]
    if all(call == first for call in calls.values()):
        return None
    if all((call.number, call.method) == (first.number, first.method) for call in calls.values()):
        return f"call {first.number} of {first.method}(): {_differing_arguments(calls, hostnames)}"
    return f"the ranks are out of step at call {first.number}: {_actions(calls, hostnames)}"


def absence(
    number: int, calls: Mapping[int, Call], missing: Collection[int], hostnames: Mapping[int, str]
) -> str:
    """Return one line that names the ranks that made no call, and the calls of the others."""
    return f"call {number}: {_actions(calls, hostnames)}, but {_ranks(missing, hostnames)} called nothing"


def _actions(calls: Mapping[int, Call], hostnames: Mapping[int, str]) -> str:
    groups = _grouped((rank, call.action) for rank, call in calls.items())
    return "; ".join(f"{_ranks(ranks, hostnames)}: {action}" for action, ranks in groups.items())


def _differing_arguments(calls: Mapping[int, Call], hostnames: Mapping[int, str]) -> str:
    names = dict.fromkeys(name for call in calls.values() for name in call.arguments)
    differing = []
    for name in names:
        groups = _grouped((rank, call.arguments.get(name, ("", "not given"))) for rank, call in calls.items())
        if len(groups) > 1:
            shown: list[str] = []
            texts: set[str] = set()
            for (_, text), ranks in groups.items():
                another = "another " if text in texts else ""
                shown.append(f"{another}{text} on {_ranks(ranks, hostnames)}")
                texts.add(text)
            differing.append(f"{name} differs: {'; '.join(shown)}")
    return "; ".join(differing[:_SHOWN_ARGUMENTS]) + ("; …" if len(differing) > _SHOWN_ARGUMENTS else "")


def _grouped(pairs: Iterable[tuple[int, _Key]]) -> dict[_Key, list[int]]:
    groups: dict[_Key, list[int]] = {}
    for rank, key in pairs:
        groups.setdefault(key, []).append(rank)
    return groups


def _ranks(ranks: Collection[int], hostnames: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(hostnames[rank] for rank in sorted(ranks)))
    place = f" on {', '.join(names)}" if len(names) <= 3 else f" on {len(names)} machines"
    return spans("rank", ranks) + place
