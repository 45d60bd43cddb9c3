"""A server's HTTP side as its clients see it: the openai client, and plain requests for everything else."""

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from harness.waiting import wait_until

NAME = "tiny"  # --served-model-name, so that two servers' answers are alike
REQUEST_LIMIT_S = 120.0


@dataclass(frozen=True)
class Endpoint:
    """Where a server answers; `key` is its --api-key, `authority` who has signed its certificate."""

    url: str
    key: str = "none"
    authority: Path | None = None

    @cached_property
    def client(self) -> OpenAI:
        """A client that never tries twice."""
        return OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.key,
            max_retries=0,
            timeout=REQUEST_LIMIT_S,
            default_headers={"Connection": "close"},  # nothing stays open behind a test
            http_client=DefaultHttpxClient(verify=self._trust),
        )

    @cached_property
    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority)

    def call(self, path: str, body: object | None = None, *, key: str | None = None) -> tuple[int, Any]:
        """GET, or POST where there is a body: the status, and the answer parsed where it is JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.key}"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S, context=self._trust) as answer:
                status, raw = answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            with refusal:
                status, raw = refusal.code, refusal.read().decode()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw

    def greedy(self, prompts: Sequence[str], max_tokens: int = 48, *, model: str = NAME) -> list[list[int]]:
        """The tokens of the greedy continuations, asked for in one request."""
        answer = self.client.completions.create(
            model=model,
            prompt=list(prompts),
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        return [choice.model_dump()["token_ids"] for choice in answer.choices]

    def greedy_together(
        self, prompts: Sequence[str], max_tokens: int = 48, *, model: str = NAME
    ) -> list[list[int]]:
        """The same, each prompt by a client of its own, all at once."""
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = clients.map(lambda prompt: self.greedy([prompt], max_tokens, model=model)[0], prompts)
            return list(answers)

    def greedy_of(self, replica: int, prompt: str, max_tokens: int = 48, *, model: str = NAME) -> list[int]:
        """The same for one prompt, from the replica behind this endpoint that is asked for."""
        answer = self.client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"return_token_ids": True},
            extra_headers={"X-data-parallel-rank": str(replica)},
        )
        tokens: list[int] = answer.choices[0].model_dump()["token_ids"]
        return tokens

    def by_engine(self, name: str) -> dict[str, float]:
        """The samples of a metric of /metrics by their engine label."""
        _, text = self.call("/metrics")
        found = re.findall(rf'^{re.escape(name)}{{engine="(\d+)".*}} (\S+)$', text, re.MULTILINE)
        return {engine: float(value) for engine, value in found}

    def metric(self, name: str) -> float:
        """The sum of all samples of a metric of /metrics."""
        _, text = self.call("/metrics")
        samples = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert samples, f"/metrics holds no {name}"
        return sum(map(float, samples))

    def members(self) -> list[dict[str, Any]]:
        """The job's processes as /topology lists them."""
        status, view = self.call("/topology")
        assert status == 200, view
        members: list[dict[str, Any]] = view["members"]
        return members

    def pid(self, name: str) -> int:
        """The pid of a member: "rank 1", "API server", "engine core"…"""
        return next(int(member["pid"]) for member in self.members() if member["name"] == name)

    def steps(self) -> dict[int, int]:
        """How many messages of the driver each rank has obeyed so far."""
        return {member["rank"]: member["steps"] for member in self.members() if member["kind"] == "rank"}

    def wait_steps(self, before: Mapping[int, int], more: int) -> None:
        """Waits until each rank has obeyed `more` messages more than `before`: it counts after it answers."""
        wait_until(
            lambda: all(self.steps()[rank] - steps >= more for rank, steps in before.items()),
            10.0,
            f"{more} steps more on each rank",
        )

    def ask_ranks(self, method: str, *arguments: str) -> list[Any]:
        """Calls a worker method on all ranks of the replica, in the ranks' order."""
        status, answer = self.call("/collective_rpc", {"method": method, "args": arguments, "timeout": 60})
        assert status == 200, answer
        results: list[Any] = answer["results"]
        return results
