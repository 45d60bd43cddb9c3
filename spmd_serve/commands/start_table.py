"""The table that rank 0 prints at start: node, device and coordinates of each rank."""

from collections.abc import Mapping, Sequence

from spmd_serve.topology import Cluster, Layout, spans

_HEAD = ("rank", "host", "device", "dp", "pp", "tp", "pid", "interface")


def start_table(cluster: Cluster, layout: Layout, urls: Mapping[str, Sequence[int]]) -> str:
    """Return the table of all ranks, followed by each URL with the replicas behind it.

    `urls`: maps each URL to the numbers of its replicas.
    """
    rows = [_HEAD]
    for info in cluster.ranks:
        coords = layout.coords(info.rank)
        rows.append(
            (
                str(info.rank),
                info.hostname,
                info.device,
                str(coords.dp),
                str(coords.pp),
                str(coords.tp),
                str(info.pid),
                f"{info.interface} {info.address}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    for url, replicas in urls.items():
        behind = "" if layout.dp == 1 else f"  ({spans('replica', replicas)})"
        lines.append(f"{url}{behind}")
    return "\n".join(lines)
