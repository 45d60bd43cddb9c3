"""The watchers of the other nodes: on the head all of them, elsewhere the head's."""

from spmd_serve.liveness.head import Head
from spmd_serve.liveness.node import Uplink
from spmd_serve.wire.lines import Message


class Peers:
    """Both are None until the rendezvous, and in a job of one node."""

    def __init__(self) -> None:
        self.head: Head | None = None
        """On the head: the connections from the other nodes."""
        self.uplink: Uplink | None = None
        """On other nodes: the connection to the head."""

    @property
    def head_decides(self) -> bool:
        """Whether this is not the head, and the head's watcher can be reached."""
        return self.uplink is not None and self.uplink.is_joined

    def send_up(self, message: Message) -> None:
        """Send a message to the head's watcher, if this is not the head."""
        if self.uplink is not None:
            self.uplink.send(message)

    def broadcast(self, message: Message) -> None:
        """Send a message to all other nodes, if this is the head."""
        if self.head is not None:
            self.head.broadcast(message)

    def tick(self, table: list[Message]) -> None:
        """Call every beat; `table`: the members of this node."""
        if self.head is not None:
            self.head.tick()
        if self.uplink is not None:
            self.uplink.tick(table)
