"""Data parallel: which prompts a replica answers, and how the parts become one answer again. Pure."""

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
"""Methods whose work is spread, and the arguments that hold it."""

ALONGSIDE = ("sampling_params", "pooling_params", "params", "lora_request", "priority")
"""Arguments that may have one item a prompt."""

PER_RANK = ("collective_rpc", "apply_model")
"""Methods that answer with one item a rank."""


def spread(method: str, arguments: Arguments, replicas: int) -> list[tuple[Arguments | None, list[int]]]:
    """For each replica its arguments (None: nothing to do) and the places of its answers.

    Prompts go to the replicas in turn, so that neighbours in a list sorted by length are on different ones.
    What is not a list of prompts, such as a single one, is the first replica's alone.
    """
    works = [name for name in PROMPTS[method] if _is_list(method, arguments.get(name))]
    count = max((len(arguments[name]) for name in works), default=0)
    works = [name for name in works if len(arguments[name]) == count]  # the others hold one for all
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
    """The replicas' answers in the order of the prompts."""
    whole: list[Any] = [None] * sum(map(len, places))
    for answers, where in zip(parts, places, strict=True):
        for place, answer in zip(where, answers, strict=True):
            whole[place] = answer
    return whole


def combine(method: str, parts: Sequence[Any]) -> Any:
    """The answers of replicas that all did the same: one item a rank, whether all say yes, or the first."""
    if method in PER_RANK:
        return [item for part in parts for item in part]
    if all(isinstance(part, bool) for part in parts):
        return all(parts)
    return parts[0]


def _is_list(method: str, value: Any) -> bool:
    """Whether it is several prompts: no text, no prompt as a dictionary or as tokens, no single chat."""
    if not _is_sequence(value):
        return False
    first = value[0] if len(value) else None
    if method in ("chat", "enqueue_chat"):
        return not isinstance(first, Mapping)
    return not isinstance(first, int)


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    """Also what only acts as a list, such as a column of a data set; no text, and no mapping."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | Mapping)
