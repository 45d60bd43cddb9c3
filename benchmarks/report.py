"""From raw rounds to medians, ratios and a Markdown page."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rounds = Sequence[Mapping[str, Any]]  # one entry per measured round, as in rounds.json

SUMMARY = ("output tokens/s", "TTFT median ms", "TPOT median ms", "ITL p99 ms")


@dataclass(frozen=True)
class Comparison:
    """One measure of a side beside that of the first side."""

    reference: float
    side: float
    ratio: float  # of the medians
    pair_ratio: float  # median of the ratios within each round
    lowest: float
    highest: float

    @classmethod
    def of(cls, reference: Sequence[float], side: Sequence[float]) -> "Comparison":
        """Of values of the same rounds, in the same order."""
        first, second = statistics.median(reference), statistics.median(side)
        pairs = [divide(after, before) for before, after in zip(reference, side, strict=False)]
        return cls(first, second, divide(second, first), statistics.median(pairs), min(pairs), max(pairs))

    def __str__(self) -> str:
        return f"{self.ratio:.2f} | {self.pair_ratio:.2f} | {self.lowest:.2f} to {self.highest:.2f}"


def divide(value: float, by: float) -> float:
    return value / by if by else float("nan")


def markdown(result: Mapping[str, Any]) -> str:
    """The whole page of a run."""
    sides: list[str] = result["names"]
    lines = ["# Serving measured", ""]
    lines += [f"- {name}: {value}" for name, value in result["machine"].items()]
    lines += [f"- {name}: {value}" for name, value in result["options"].items() if name != "shapes"]
    lines += [
        "",
        f"Ratios are to `{sides[0]}`: above 1 is better for throughputs, below 1 for times and memory.",
        "",
    ]
    for name, layout in result["layouts"].items():
        lines += [f"## {name}", ""]
        lines += summary(layout["rounds"], sides)
        lines += launching(layout["launches"], sides)
        lines += idleness(layout["idle"])
        lines += details(layout["rounds"], sides)
        lines += placements(layout["placement"])
        lines += commands(layout["commands"])
    return "\n".join(lines) + "\n"


def select(rounds: Rounds, shape: str, side: str, measure: str) -> list[float]:
    """The values of one measure, by round."""
    found = [one for one in rounds if one["shape"] == shape and one["side"] == side]
    return [float(one["measures"][measure]) for one in sorted(found, key=lambda one: int(one["round"]))]


def compare(rounds: Rounds, shape: str, sides: Sequence[str], measure: str) -> list[tuple[str, Comparison]]:
    """Each side but the first with the first, where both were measured; a lone first side with itself."""
    others = list(sides[1:]) or [sides[0]]
    reference = select(rounds, shape, sides[0], measure)
    values = [(side, select(rounds, shape, side, measure)) for side in others]
    return [(side, Comparison.of(reference, value)) for side, value in values if value and reference]


def summary(rounds: Rounds, sides: Sequence[str]) -> list[str]:
    """One line per shape and side: ratios of the medians."""
    if not rounds:
        return []
    lines = [
        "| load | side | " + " | ".join(SUMMARY) + " | same answers | disturbance |",
        "|---|---|" + "---|" * (len(SUMMARY) + 2),
    ]
    for shape in shapes(rounds):
        for index, side in enumerate(sides):
            mine = [one for one in rounds if one["shape"] == shape and one["side"] == side]
            if not mine:
                continue
            cells = []
            for measure in SUMMARY:
                cell = f"{statistics.median(select(rounds, shape, side, measure)):.1f}"
                if index:
                    reference = select(rounds, shape, sides[0], measure)
                    own = select(rounds, shape, side, measure)
                    cell += f" (x{Comparison.of(reference, own).ratio:.2f})" if reference else ""
                cells.append(cell)
            same = f"{sum(one['same_answers'] for one in mine)} of {sum(one['answers'] for one in mine)}"
            disturbance = max(one["measures"]["CPU of others, % of a core"] for one in mine)
            lines.append(f"| {shape} | {side} | " + " | ".join(cells) + f" | {same} | {disturbance:.0f} % |")
    lines += [
        "",
        "Medians over the rounds. Same answers: texts equal to the first side's. "
        "Disturbance: the most CPU that other processes of the machine used in a round, of one core.",
        "",
    ]
    return lines


def details(rounds: Rounds, sides: Sequence[str]) -> list[str]:
    """Every measure of every shape."""
    lines: list[str] = []
    for shape in shapes(rounds):
        lines += [
            f"### {shape}",
            "",
            f"| measure | side | {sides[0]} | side's | ratio of medians | median of pairs | pairs |",
            "|---|---|---|---|---|---|---|",
        ]
        first = next(one for one in rounds if one["shape"] == shape)
        for measure in first["measures"]:
            for side, found in compare(rounds, shape, sides, measure):
                lines.append(f"| {measure} | {side} | {found.reference:.2f} | {found.side:.2f} | {found} |")
        lines.append("")
    return lines


def launching(launches: Rounds, sides: Sequence[str]) -> list[str]:
    """Start-up times and memory."""
    if not launches:
        return []
    names = {
        "health_s": "launch to /health 200, s",
        "ready_s": "launch to first answer, s",
        "cpu_s": "CPU time until then, s",
        "pss_mib": "memory (PSS) once warm, MiB",
        "processes": "processes",
        "stop_s": "SIGTERM to the end, s",
    }
    lines = ["| start-up | " + " | ".join(sides) + " |", "|---|" + "---|" * len(sides)]
    for key, name in names.items():
        cells = []
        for index, side in enumerate(sides):
            values = [float(one[key]) for one in launches if one["side"] == side]
            reference = [float(one[key]) for one in launches if one["side"] == sides[0]]
            cell = (
                f"{statistics.median(values):.1f} [{min(values):.1f} to {max(values):.1f}]" if values else "-"
            )
            if index and values and reference:
                cell += f" (x{Comparison.of(reference, values).ratio:.2f})"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", "Medians [least to most], each alone on the machine.", ""]


def idleness(idle: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """CPU use while idle, by process."""
    if not idle:
        return []
    lines = ["| idle | process | CPU, s | of a core |", "|---|---|---|---|"]
    for side, processes in idle.items():
        for one in processes:
            lines.append(
                f"| {side} | {one['name']} | {one['cpu_s']:.2f} | {one['percent_of_a_core']:.2f} % |"
            )
        total = sum(one["percent_of_a_core"] for one in processes)
        lines.append(f"| {side} | all | {sum(one['cpu_s'] for one in processes):.2f} | {total:.2f} % |")
    return [*lines, ""]


def placements(placement: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Which cores the threads of each process may use, and the variables that said so."""
    if not placement:
        return []
    lines = [
        "### Where threads may run",
        "",
        "| side | process | threads: cores | variables |",
        "|---|---|---|---|",
    ]
    for side, processes in placement.items():
        for one in processes:
            cores = ", ".join(f"{count}: {cpus}" for cpus, count in one["threads on cores"].items())
            variables = " ".join(f"{name}={value}" for name, value in one["variables"].items())
            cell = f"`{variables}`".replace("|", "\\|") if variables else ""
            lines.append(f"| {side} | {one['name']} | {cores} | {cell} |")
    return [*lines, ""]


def commands(found: Mapping[str, Sequence[str]]) -> list[str]:
    """What was started, one line per host."""
    lines = ["### Commands", "", "```"]
    lines += [f"# {side}\n{command}" for side, started in found.items() for command in started]
    return [*lines, "```", ""] if found else []


def shapes(rounds: Rounds) -> list[str]:
    return list(dict.fromkeys(str(one["shape"]) for one in rounds))
