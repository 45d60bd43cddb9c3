"""What a rank is about to do, as the others compare it. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spmd_serve.offline.digest import describe, digest
from spmd_serve.topology import spans

IGNORED = ("use_tqdm",)
"""Arguments that change nothing but what is shown, and that scripts set by rank."""

_SHOWN_ARGUMENTS = 3

OwnCall = tuple[str | Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A worker's method or a function of the worker, with arguments. It never leaves its process: every rank's

script makes the same call, so functions, and tensors of this rank alone, need not be sent.
"""


@dataclass(frozen=True)
class Call:
    """Call `number` of an LLM: a method, and for each argument its digest and what it looks like.

    `left`: the rank calls nothing any more; the method says in words what it did instead.
    """

    number: int
    method: str
    arguments: Mapping[str, tuple[str, str]]
    left: bool = False

    @classmethod
    def of(cls, number: int, method: str, arguments: Mapping[str, object]) -> "Call":
        """For a method with its arguments by name."""
        compared = {
            name: (digest(value), describe(value)) for name, value in arguments.items() if name not in IGNORED
        }
        return cls(number, method, compared)

    def to_plain(self) -> list[Any]:
        """Lists, texts and numbers only."""
        arguments = {name: list(two) for name, two in self.arguments.items()}
        return [self.number, self.method, arguments, self.left]

    @classmethod
    def from_plain(cls, plain: Any) -> "Call":
        """Inverse of `to_plain`."""
        number, method, arguments, left = plain
        pairs = {str(name): (str(one), str(two)) for name, (one, two) in arguments.items()}
        return cls(int(number), str(method), pairs, bool(left))

    def __str__(self) -> str:
        shown = [f"{name}={text}" for name, (_, text) in self.arguments.items() if text != "None"]
        more = ", …" if len(shown) > _SHOWN_ARGUMENTS else ""
        return f"{self.method}({', '.join(shown[:_SHOWN_ARGUMENTS])}{more})"

    @property
    def action(self) -> str:
        """What the rank does, as the end of a sentence."""
        return self.method if self.left else f"calls {self}"


def own_call(method: str, arguments: Mapping[str, Any]) -> OwnCall | None:
    """What a call has each shard do with its own rank's arguments; None for methods of the driver."""
    if method == "collective_rpc":
        return arguments["method"], tuple(arguments.get("args") or ()), dict(arguments.get("kwargs") or {})
    if method == "apply_model":
        return method, (arguments["func"],), {}
    return None


def disagreement(calls: Mapping[int, Call], hosts: Mapping[int, str]) -> str | None:
    """One line that says who calls what, where ranks do not make the same call; None where all do.

    Both mappings are by rank.
    """
    first = calls[min(calls)]
    if all(call == first for call in calls.values()):
        return None
    same_method = all((call.number, call.method) == (first.number, first.method) for call in calls.values())
    if same_method:
        return f"call {first.number} of {first.method}(): {_differing_arguments(calls, hosts)}"
    told = _told(((rank, call.action) for rank, call in calls.items()), hosts)
    return f"the ranks are out of step at call {first.number}: {told}"


def absence(
    number: int, waiting: Mapping[int, Call], missing: Collection[int], hosts: Mapping[int, str]
) -> str:
    """One line for ranks that have called nothing while others wait."""
    told = _told(((rank, call.action) for rank, call in waiting.items()), hosts)
    return f"call {number}: {told}, but {_who(missing, hosts)} called nothing"


def _differing_arguments(calls: Mapping[int, Call], hosts: Mapping[int, str]) -> str:
    names = dict.fromkeys(name for call in calls.values() for name in call.arguments)
    lines = []
    for name in names:
        values = {rank: call.arguments.get(name, ("", "not given")) for rank, call in calls.items()}
        if len({one for one, _ in values.values()}) > 1:
            by_digest: dict[str, str] = {}
            for one, text in values.values():
                same_text = text in by_digest.values() and one not in by_digest
                by_digest.setdefault(one, f"another {text}" if same_text else text)
            told = _told(((rank, by_digest[one]) for rank, (one, _) in values.items()), hosts, where="on ")
            lines.append(f"{name} differs: {told}")
    return "; ".join(lines[:_SHOWN_ARGUMENTS]) + ("; …" if len(lines) > _SHOWN_ARGUMENTS else "")


def _told(what: Iterable[tuple[int, str]], hosts: Mapping[int, str], where: str = "") -> str:
    """ "rank 0 on a calls x; ranks 1-3 on b call y", or with `where`: "x on rank 0 on a; …"."""
    groups: dict[str, list[int]] = {}
    for rank, text in what:
        groups.setdefault(text, []).append(rank)
    if where:
        return "; ".join(f"{text} {where}{_who(ranks, hosts)}" for text, ranks in groups.items())
    return "; ".join(f"{_who(ranks, hosts)}: {text}" for text, ranks in groups.items())


def _who(ranks: Collection[int], hosts: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in sorted(ranks)))
    place = f" on {', '.join(names)}" if len(names) <= 3 else f" on {len(names)} hosts"
    return spans("rank", ranks) + place
