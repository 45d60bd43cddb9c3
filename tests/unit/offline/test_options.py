"""What LLM() takes, and how its sizes follow torchrun's ranks."""

from typing import Any

import pytest

from spmd_serve.errors import UsageError
from spmd_serve.offline.options import refuse, split
from spmd_serve.topology import Layout


class Extension:
    pass


def layout(ranks_per_node: list[int], **arguments: Any) -> Layout:
    options, _ = split({"model": "m", **arguments})
    return options.layout(ranks_per_node, [f"node{number}" for number in range(len(ranks_per_node))])


def test_ours_and_vllms_arguments_are_told_apart() -> None:
    options, engine = split(
        {
            "model": "m",
            "dtype": "float32",
            "tensor_parallel_size": 2,
            "outputs_on": "driver",
            "call_timeout": 5,
            "rank_timeout": 3.0,
            "control_allow_class": ["a:B"],
        }
    )
    assert engine == {"model": "m", "dtype": "float32"}
    assert (options.outputs_on, options.call_timeout) == ("driver", 5.0)
    assert options.flags.rank_timeout == 3.0
    assert options.flags.control_allow_class == ("a:B",)
    assert options.given == {"tp": 2, "pp": None, "dp": None}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"outputs_on": "rank0"}, "outputs_on='rank0'"),
        ({"call_timeout": 0}, "call_timeout"),
        ({"rank_timeout": -1.0}, "rank_timeout"),
        ({"control_backend": "nccl"}, "auto and gloo"),
        ({"distributed_executor_backend": "ray"}, "leave it out"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        split({"model": "m", **wrong})


def test_arguments_that_contradict_torchrun() -> None:
    defaults = {"model": "", "nnodes": 1, "data_parallel_rank": None}
    refuse({"model": "m", "nnodes": 1}, defaults)
    with pytest.raises(UsageError, match="torchrun --nnodes"):
        refuse({"model": "m", "nnodes": 2}, defaults)
    with pytest.raises(UsageError, match="no argument 'modle'"):
        refuse({"model": "m", "modle": 1}, defaults)


def test_a_class_serves_as_its_name() -> None:
    _, engine = split({"model": "m", "worker_extension_cls": Extension})
    assert engine["worker_extension_cls"] == f"{__name__}.Extension"


def test_none_means_not_given() -> None:
    _, engine = split({"model": "m", "tokenizer": None, "hf_overrides": None})
    assert engine == {"model": "m"}


def test_sizes_follow_torchrun() -> None:
    assert layout([2]) == Layout(2, 1, 1)
    assert layout([4, 4]) == Layout(4, 2, 1)
    assert layout([4], data_parallel_size=2) == Layout(2, 1, 2)
    assert layout([4], pipeline_parallel_size=2) == Layout(2, 2, 1)
    with pytest.raises(UsageError, match=r"torchrun started 4 ranks"):
        layout([4], tensor_parallel_size=2)


def test_the_external_launchers_sizes_are_vllms() -> None:
    external = {"distributed_executor_backend": "external_launcher"}
    assert layout([4], tensor_parallel_size=2, pipeline_parallel_size=2, **external) == Layout(2, 2, 1)
    # What is left are independent replicas, also over nodes.
    assert layout([4], tensor_parallel_size=2, **external) == Layout(2, 1, 2)
    assert layout([8, 8], tensor_parallel_size=8, **external) == Layout(8, 1, 2)
    assert layout([2], **external) == Layout(1, 1, 2)
    assert layout([4], tensor_parallel_size=2, data_parallel_size=2, **external) == Layout(2, 1, 2)
