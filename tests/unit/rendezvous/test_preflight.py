"""Which variables of the environment are compared between ranks."""

import pytest

from spmd_serve.rendezvous.preflight import collect


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_SERVICE_HOST", "10.0.0.7"),
        ("VLLM_SERVICE_PORT", "8000"),
        ("VLLM_SERVICE_PORT_HTTP", "8000"),
        ("VLLM_PORT", "tcp://10.0.0.7:8000"),
        ("VLLM_PORT_8000_TCP", "tcp://10.0.0.7:8000"),
        ("VLLM_FOO_SERVICE_HOST", "10.0.0.7"),
        ("VLLM_FOO_SERVICE_PORT", "8000"),
        ("VLLM_FOO_PORT", "tcp://10.0.0.7:8000"),
        ("VLLM_FOO_PORT_8000_TCP", "tcp://10.0.0.7:8000"),
        ("VLLM_FOO_PORT_8000_TCP_ADDR", "10.0.0.7"),
        ("VLLM_FOO_PORT_53_UDP_PROTO", "udp"),
    ],
)
def test_service_links_of_kubernetes_are_not_compared(name: str, value: str) -> None:
    assert f"env {name}" not in collect({}, {name: value}, None).items


@pytest.mark.parametrize("name", ["VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_PORTS", "VLLM_SERVICE"])
def test_settings_with_similar_names_are_compared(name: str) -> None:
    assert collect({}, {name: "8998"}, None).items[f"env {name}"] == "8998"
