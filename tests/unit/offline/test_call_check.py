"""What ranks are told when they do not make the same call."""

from spmd_serve.offline.call_check import Call, absence, disagreement, own_call

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def generate(number: int = 3, prompts: object = ("x", "y"), **more: object) -> Call:
    return Call.of(number, "generate", {"prompts": prompts, **more})


def test_equal_calls_agree() -> None:
    assert disagreement({rank: generate() for rank in HOSTS}, HOSTS) is None


def test_what_is_only_shown_may_differ() -> None:
    assert disagreement({0: generate(use_tqdm=True), 1: generate(use_tqdm=False)}, HOSTS) is None


def test_different_methods() -> None:
    calls = {0: generate(), 1: generate(), 2: Call.of(3, "sleep", {"level": 1}), 3: generate()}
    assert disagreement(calls, HOSTS) == (
        "the ranks are out of step at call 3: ranks 0-1, 3 on a, b: calls generate(prompts=tuple of 2); "
        "rank 2 on b: calls sleep(level=1)"
    )


def test_the_argument_that_differs_is_named() -> None:
    calls = {0: generate(), 1: generate(), 2: generate(prompts=["x"]), 3: generate()}
    assert disagreement(calls, HOSTS) == (
        "call 3 of generate(): prompts differs: tuple of 2 on ranks 0-1, 3 on a, b; list of 1 on rank 2 on b"
    )


def test_values_that_look_alike_are_told_apart() -> None:
    calls = {0: generate(prompts=["x", "y"]), 1: generate(prompts=["x", "z"])}
    assert disagreement(calls, HOSTS) == (
        "call 3 of generate(): prompts differs: list of 2 on rank 0 on a; another list of 2 on rank 1 on a"
    )


def test_an_argument_that_not_all_give() -> None:
    calls = {0: generate(priority=1), 1: generate()}
    assert disagreement(calls, HOSTS) == (
        "call 3 of generate(): priority differs: 1 on rank 0 on a; not given on rank 1 on a"
    )


def test_one_rank_is_a_call_behind() -> None:
    calls = {0: generate(4), 1: generate(3)}
    text = disagreement(calls, HOSTS)
    assert text is not None and text.startswith("the ranks are out of step at call 4")


def test_a_rank_that_has_left() -> None:
    calls = {0: generate(), 1: Call(3, "has ended its script", {}, left=True)}
    assert disagreement(calls, HOSTS) == (
        "the ranks are out of step at call 3: rank 0 on a: calls generate(prompts=tuple of 2); "
        "rank 1 on a: has ended its script"
    )


def test_ranks_that_called_nothing() -> None:
    assert absence(3, {0: generate(), 1: generate()}, [2, 3], HOSTS) == (
        "call 3: ranks 0-1 on a: calls generate(prompts=tuple of 2), but ranks 2-3 on b called nothing"
    )


def test_only_a_few_arguments_are_shown() -> None:
    call = Call.of(1, "chat", {"messages": [1], "a": None, "b": 2, "c": 3, "d": 4})
    assert str(call) == "chat(messages=list of 1, b=2, c=3, …)"


def test_calls_travel_as_plain_values() -> None:
    call = generate(priority=1)
    assert Call.from_plain(call.to_plain()) == call


def test_what_each_shard_runs_of_a_call() -> None:
    assert own_call("collective_rpc", {"method": len, "args": ([1],)}) == (len, ([1],), {})
    named = {"method": "x", "args": None, "kwargs": {"a": 1}}
    assert own_call("collective_rpc", named) == ("x", (), {"a": 1})
    assert own_call("apply_model", {"func": len}) == ("apply_model", (len,), {})
    assert own_call("generate", {"prompts": "a"}) is None
