"""Our flags: read before vLLM is there, refused where they contradict torchrun."""

from dataclasses import fields

import pytest

from spmd_serve.config.flags import REFUSED, TORCHRUN_OWNS, Flags, preparse, refuse
from spmd_serve.errors import UsageError


def test_defaults_stand_in_the_dataclass_alone() -> None:
    parsed = preparse(["some/model"])
    assert parsed.flags == Flags()
    assert parsed.subcommand == "serve"
    assert (parsed.host, parsed.ports, parsed.uds) == (None, (8000,), None)


def test_our_flags_are_read_from_among_vllms() -> None:
    parsed = preparse(
        ["serve", "m", "-tp", "2", "--join_timeout=7", "--head", "b", "--port", "0", "--dtype", "float32"]
    )
    assert parsed.flags.join_timeout == 7.0
    assert parsed.flags.head == "b"
    assert parsed.ports == (0,)
    assert parsed.rest[0] == "m"


def test_batch_is_a_subcommand_and_a_model_may_be_called_anything_else() -> None:
    assert preparse(["batch", "m"]).subcommand == "batch"
    assert preparse(["./serve", "m"]).subcommand == "serve"


def test_classes_may_be_allowed_several_times() -> None:
    flags = preparse(["m", "--control-allow-class", "a:B", "--control-allow-class", "c:D"]).flags
    assert flags.control_allow_class == ("a:B", "c:D")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--join-timeout", "0"], "--join-timeout"),
        (["--rank-timeout", "-1"], "--rank-timeout"),
        (["--step-timeout", "soon"], "--step-timeout"),
        (["--control-backend", "mpi"], "--control-backend"),
        (["--probe-port", "70000"], "--probe-port"),
        (["--port", "http"], "--port"),
    ],
)
def test_a_bad_value_is_named_in_one_line(words: list[str], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        preparse(["m", *words])
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], "internal"),
        (["-dp", "2"], "internal"),
        (["--lb", "hybrid"], "hybrid"),
        (["--data-parallel-hybrid-lb", "-dp=2"], "hybrid"),
        (["-dph"], "hybrid"),
        (["--data_parallel_external_lb"], "external"),
        (["-dpe", "--lb=external"], "external"),
    ],
)
def test_vllms_flags_for_load_balancing_mean_the_same_as_ours(words: list[str], kind: str) -> None:
    assert preparse(["m", *words]).flags.lb == kind


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lb", "internal", "-dpe"], "--lb internal and --data-parallel-external-lb contradict"),
        (["--lb=hybrid", "-dpe"], "--lb hybrid and --data-parallel-external-lb contradict"),
        (["-dph", "-dpe"], "--data-parallel-external-lb and --data-parallel-hybrid-lb contradict"),
    ],
)
def test_flags_for_load_balancing_that_contradict_each_other(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        preparse(["m", *words])


def test_the_port_may_be_a_list() -> None:
    assert preparse(["m", "--port=8000,9000"]).ports == (8000, 9000)


@pytest.mark.parametrize("value", ["8000,", "8000,8000", "-1", "65536", "8000;8001"])
def test_a_bad_port_is_named(value: str) -> None:
    with pytest.raises(UsageError, match=r"argument --port: .*" + value):
        preparse(["m", f"--port={value}"])


def test_flags_are_not_abbreviated() -> None:
    assert preparse(["m", "--join", "7"]).flags.join_timeout == Flags().join_timeout


@pytest.mark.parametrize("name", [*TORCHRUN_OWNS, *REFUSED])
def test_what_contradicts_torchrun_is_refused_with_what_to_write_instead(name: str) -> None:
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")) as caught:
        refuse({name: "given"}, {name: None})
    assert (
        ("torchrun" in str(caught.value))
        or ("leave it out" in str(caught.value))
        or "write" in str(caught.value)
    )


def test_defaults_and_foreign_flags_pass() -> None:
    refuse({"nnodes": 1, "dtype": "float32", "data_parallel_backend": "mp"}, {"nnodes": 1, "dtype": "auto"})


def test_ray_is_refused() -> None:
    with pytest.raises(UsageError, match="--data-parallel-backend"):
        refuse({"data_parallel_backend": "ray"}, {})


def test_every_flag_has_a_help_text() -> None:
    assert all(item.metadata["help"] for item in fields(Flags))
