"""Both ends of one of vLLM's shared-memory rings in one process."""

import threading
from typing import Protocol, TypeVar

DEADLINE_S = 20.0


class End(Protocol):
    def wait_until_ready(self) -> None: ...


Writer = TypeVar("Writer", bound=End)
Reader = TypeVar("Reader", bound=End)


def connected(writer: Writer, reader: Reader) -> tuple[Writer, Reader]:
    """Connect both ends, which wait for each other, and return them."""
    thread = threading.Thread(target=writer.wait_until_ready)
    thread.start()
    reader.wait_until_ready()
    thread.join(DEADLINE_S)
    return writer, reader
