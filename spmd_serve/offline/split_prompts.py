"""Split prompts over data-parallel replicas, and merge their results. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

Arguments = dict[str, Any]

PROMPTS: Mapping[str, tuple[str, ...]] = {
    "generate": ("prompts",),
    "chat": ("messages",),
    "encode": ("prompts",),
    "embed": ("prompts",),
    "classify": ("prompts",),
    "beam_search": ("prompts",),
    "enqueue": ("prompts",),
    "enqueue_chat": ("messages",),
    "score": ("data_1", "data_2"),
}
"""Methods whose prompts are split, and the arguments that hold the prompts."""

ALONGSIDE = ("sampling_params", "pooling_params", "params", "lora_request", "priority")
"""Arguments that may hold one item per prompt."""

PER_RANK = ("collective_rpc", "apply_model")
"""Methods that return one item per rank."""


def spread(method: str, arguments: Arguments, replicas: int) -> list[tuple[Arguments | None, list[int]]]:
    """Return for each replica its arguments (None: nothing to do) and the positions of its results.

    Prompts go to the replicas in turn, so that neighbours in a list sorted by length go to different ones.
    A single prompt goes to the first replica.
    """
    works = [name for name in PROMPTS[method] if _is_list(method, arguments.get(name))]
    count = max((len(arguments[name]) for name in works), default=0)
    works = [
        name for name in works if len(arguments[name]) == count
    ]  # the others hold one item for all prompts
    if count < 2:
        everything = list(range(count)) if works else [0]
        return [(arguments, everything), *((None, []) for _ in range(replicas - 1))]
    parts: list[tuple[Arguments | None, list[int]]] = []
    for replica in range(replicas):
        places = list(range(replica, count, replicas))
        part = dict(arguments)
        for name in (*works, *ALONGSIDE):
            value = part.get(name)
            if name in works or (_is_sequence(value) and len(value) == count):
                part[name] = [part[name][place] for place in places]
        if replica > 0 and "use_tqdm" in part:
            part["use_tqdm"] = False
        parts.append((part if places else None, places))
    return parts


def gather(parts: Sequence[Sequence[Any]], places: Sequence[Sequence[int]]) -> list[Any]:
    """Return the replicas' results in the order of the prompts."""
    whole: list[Any] = [None] * sum(map(len, places))
    for answers, where in zip(parts, places, strict=True):
        for place, answer in zip(where, answers, strict=True):
            whole[place] = answer
    return whole


def combine(method: str, parts: Sequence[Any]) -> Any:
    """Merge the results of replicas of the same call: one item per rank, all() of bools, else the first."""
    if method in PER_RANK:
        return [item for part in parts for item in part]
    if all(isinstance(part, bool) for part in parts):
        return all(parts)
    return parts[0]


def _is_list(method: str, value: Any) -> bool:
    """Return whether `value` holds several prompts, rather than one text, token list, dict or chat."""
    if not _is_sequence(value):
        return False
    first = value[0] if len(value) else None
    if method in ("chat", "enqueue_chat"):
        return not isinstance(first, Mapping)
    return not isinstance(first, int)


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether `value` acts as a list (also a column of a data set), and is no text or mapping."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | Mapping)
