"""Data parallel: whose prompts are whose, and the order of the answers."""

from collections import UserList
from typing import Any

import pytest

from spmd_serve.offline.split_prompts import combine, gather, spread


def answers(method: str, arguments: dict[str, Any], replicas: int) -> list[Any]:
    """The answers of replicas that answer each prompt with itself and its parameters."""
    parts = spread(method, arguments, replicas)
    name = "messages" if "chat" in method else "prompts"

    def answer(part: dict[str, Any] | None) -> list[Any]:
        if part is None:
            return []
        prompts, params = part[name], part.get("sampling_params")
        if not isinstance(params, list):
            params = [params] * len(prompts)
        return list(zip(prompts, params, strict=True))

    return gather([answer(part) for part, _ in parts], [where for _, where in parts])


@pytest.mark.parametrize("count", [2, 3, 4, 7, 100])
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_every_prompt_is_answered_once_and_in_order(count: int, replicas: int) -> None:
    prompts = [f"prompt {number}" for number in range(count)]
    params = list(range(count))
    assert answers("generate", {"prompts": prompts, "sampling_params": params}, replicas) == list(
        zip(prompts, params, strict=True)
    )


def test_what_acts_as_a_list_is_spread_too() -> None:
    """A column of a data set, say; also what goes alongside."""
    arguments = {"prompts": UserList("abc"), "sampling_params": UserList([1, 2, 3])}
    assert spread("generate", arguments, 2) == [
        ({"prompts": ["a", "c"], "sampling_params": [1, 3]}, [0, 2]),
        ({"prompts": ["b"], "sampling_params": [2]}, [1]),
    ]
    assert spread("generate", {"prompts": b"ab"}, 2)[1] == (None, [])


def test_the_work_is_even() -> None:
    parts = spread("generate", {"prompts": ["x"] * 10}, 4)
    assert [len(where) for _, where in parts] == [3, 3, 2, 2]


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_without_work(replicas: int) -> None:
    parts = spread("generate", {"prompts": ["x", "y"]}, 3)
    assert parts[2] == (None, [])


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], {"prompt_token_ids": [1]}, ["one"]])
def test_a_single_prompt_is_one_replicas(prompt: object) -> None:
    arguments = {"prompts": prompt}
    parts = spread("generate", arguments, 2)
    assert parts[0][0] == arguments
    assert parts[1] == (None, [])
    assert gather([["answer"], []], [where for _, where in parts]) == ["answer"]


def test_no_prompts() -> None:
    parts = spread("generate", {"prompts": []}, 2)
    assert gather([[] for _ in parts], [where for _, where in parts][:2]) in ([], [None])


def test_one_set_of_parameters_for_all_is_not_cut() -> None:
    parts = spread("generate", {"prompts": ["a", "b", "c"], "sampling_params": "for all"}, 2)
    assert all(part is not None and part["sampling_params"] == "for all" for part, _ in parts)


def test_conversations() -> None:
    chats = [[{"role": "user", "content": f"{number}"}] for number in range(5)]
    assert [prompt for prompt, _ in answers("chat", {"messages": chats}, 2)] == chats
    assert spread("chat", {"messages": chats[0]}, 2)[1] == (None, [])


def test_scores_of_one_with_many_and_of_pairs() -> None:
    one, other = spread("score", {"data_1": "q", "data_2": ["a", "b", "c"]}, 2)
    assert one == ({"data_1": "q", "data_2": ["a", "c"]}, [0, 2])
    assert other == ({"data_1": "q", "data_2": ["b"]}, [1])
    one, other = spread("score", {"data_1": ["q"], "data_2": ["a", "b"]}, 2)
    assert one == ({"data_1": ["q"], "data_2": ["a"]}, [0])
    one, other = spread("score", {"data_1": ["p", "q"], "data_2": ["a", "b"]}, 2)
    assert other == ({"data_1": ["q"], "data_2": ["b"]}, [1])


def test_only_the_first_replica_shows_its_progress() -> None:
    parts = spread("generate", {"prompts": ["a", "b"], "use_tqdm": True}, 2)
    assert [part["use_tqdm"] for part, _ in parts if part is not None] == [True, False]


def test_other_methods_answers_are_combined() -> None:
    assert combine("collective_rpc", [[1, 2], [3, 4]]) == [1, 2, 3, 4]
    assert combine("wake_up", [True, False]) is False
    assert combine("reset_prefix_cache", [True, True]) is True
    assert combine("sleep", [None, None]) is None
    assert combine("get_weight_version", ["v1", "v1"]) == "v1"
