"""Ask a running server one question over HTTP and print the answer.

`python launch/ask.py http://127.0.0.1:8000 "What is the capital of France?" --wait 300` waits for the server
to be ready first. Standard library only. Without an answer the exit code is 1, and one line
names the reason.
"""

import argparse
import json
import re
import sys
import time
import urllib.request
from pathlib import Path

POLL_S = 0.5
DOT_EVERY_S = 5.0
ANSWER_LIMIT_S = 120.0


class NoAnswerError(Exception):
    """There is no answer; the message is one line for the user."""


def wait_ready(url: str, limit_s: float, pid: int | None, log: Path | None) -> float:
    """Wait until /health answers 200, and return the seconds it took. `pid`, `log`: of the server."""
    began = dotted = time.monotonic()
    print("waiting for the server to be ready ", end="", flush=True)
    problem = None
    while problem is None and not _healthy(url):
        now = time.monotonic()
        if now - began > limit_s:
            problem = f"not ready after {limit_s:.0f} s"
        elif pid is not None and not _running(pid):
            problem = "the server ended before it was ready"
        elif now - dotted >= DOT_EVERY_S:
            dotted = now
            print(".", end="", flush=True)
        time.sleep(POLL_S)
    took = time.monotonic() - began
    print(f"{'ready' if problem is None else 'failed'} ({took:.0f} s)", flush=True)
    if problem is not None:
        raise NoAnswerError(problem + _log_end(log))
    return took


def ask(url: str, question: str) -> str:
    """Return the model's greedy answer to one chat message."""
    model = _call(f"{url}/v1/models")["data"][0]["id"]
    message = {"role": "user", "content": question}
    request = {"model": model, "messages": [message], "max_tokens": 64, "temperature": 0}
    content: str = _call(f"{url}/v1/chat/completions", request)["choices"][0]["message"]["content"]
    return content


def _call(url: str, body: dict[str, object] | None = None) -> dict[str, list[dict[str, dict[str, str]]]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as answer:
            return json.load(answer)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"{url}: {error}") from error


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _log_end(log: Path | None) -> str:
    """Return the last line of the log by spmd_serve, else the last line that has a word in it."""
    if log is None:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line.strip() for line in lines if re.search("[a-z]", line)]
    own = [line for line in lines if line.startswith("spmd_serve")]
    return f": {(own or lines or ['its log is empty'])[-1]} (all of it in {log})"


def _running(pid: int) -> bool:
    """Return whether the process runs. A zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("url", help="the server's, without a path")
    parser.add_argument("question")
    parser.add_argument(
        "--wait", type=float, metavar="SECONDS", help="first wait this long at most for it to be ready"
    )
    parser.add_argument("--pid", type=int, help="the server's process: do not wait for one that has ended")
    parser.add_argument("--log", type=Path, help="the server's log: its last line is shown where it fails")
    arguments = parser.parse_args()
    try:
        if arguments.wait is not None:
            wait_ready(arguments.url, arguments.wait, arguments.pid, arguments.log)
        print(f"question: {arguments.question}", flush=True)
        print(f"answer: {ask(arguments.url, arguments.question)}", flush=True)
    except NoAnswerError as error:
        print(f"ask: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
