"""Every mistake gets one clear line, exit code 2, and no process that stays."""

import socket
from pathlib import Path

import pytest

from tests.end_to_end.programs import Ended, run
from tests.end_to_end.serving import serving
from tests.helpers import wait_until

pytestmark = pytest.mark.xdist_group("bad-input")


def check_refused(ended: Ended, *words: str) -> None:
    assert ended.code == 2, ended
    assert len(ended.error_lines) == 1, ended.err
    assert ended.error_lines[0].startswith("kvferry: error: ")
    for word in words:
        assert word in ended.error_lines[0]


def test_demo_missing_model_path_is_refused() -> None:
    check_refused(run("demo", "--model", "/no/such/model", "--json"), "/no/such/model")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("demo", "--prompt", ""), ("prompt is empty",)),
        (("demo", "--max-new-tokens", "0"), ("--max-new-tokens is 0",)),
        (("demo", "--prefill", "0"), ("--prefill is 0",)),
        (("demo", "--decode", "-1"), ("--decode is -1",)),
        (("demo", "--nonsense"), ("--nonsense",)),
        (("demo", "--manager", "v3"), ("--manager is v3", "v1 or v2")),
        (("demo", "--max-new-tokens", "many"), ("--max-new-tokens", "integer", "many")),
        (("nonsense",), ("nonsense",)),
        (("worker", "--role", "prefill"), ("directory",)),
        (("worker", "--role", "cook", "--directory", "127.0.0.1:1"), ("role", "cook")),
        (("worker", "--config", "/no/such.yaml"), ("/no/such.yaml",)),
        (("frontend", "--config", "/"), ("/",)),
        (("frontend", "--listen", "nowhere"), ("nowhere", "HOST:PORT")),
        (("frontend", "--listen", "192.0.2.1:0"), ("192.0.2.1", "loopback")),
        (("frontend", "--set", "listen"), ("KEY=VALUE",)),
        (("generate", "--frontend", "127.0.0.1:1", "--prompt", ""), ("prompt is empty",)),
        (("generate", "--frontend", "127.0.0.1:1", "--prompt", "hello"), ("127.0.0.1:1",)),
        (("generate", "--frontend", "127.0.0.1:1", "--prompt", "hello", "--timeout", "nan"), ("--timeout is nan",)),
        (("status", "--worker", "127.0.0.1:1"), ("127.0.0.1:1",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_command_line_mistake_is_refused(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check_refused(run(*arguments), *words)


def test_unknown_key_names_the_key_and_the_nearest_valid_one(tmp_path: Path) -> None:
    config = tmp_path / "worker.yaml"
    config.write_text("role: prefill\ndirectory: 127.0.0.1:1\npools: {quota_byte: 1}\n")
    check_refused(run("worker", "--config", str(config)), "pools.quota_byte", "pools.quota_bytes")


def test_unreadable_yaml_names_the_place(tmp_path: Path) -> None:
    config = tmp_path / "frontend.yaml"
    config.write_text("listen: [\n")
    check_refused(run("frontend", "--config", str(config)), str(config), "line")


def test_frontend_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        check_refused(run("frontend", "--listen", address), address, "in use")


def test_worker_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run(
            *("worker", "--role", "decode", "--directory", "127.0.0.1:1", "--model", "tiny-gpt-oss"),
            *("--listen", address, "--log-level", "error"),
        )
        check_refused(ended, address, "in use")


def test_pools_too_small_for_one_sequence_are_refused() -> None:
    ended = run(
        *("worker", "--role", "decode", "--directory", "127.0.0.1:1", "--model", "tiny-gemma3"),
        *("--set", "pools.quota_bytes=64KiB", "--log-level", "error"),
    )
    check_refused(ended, "65536 bytes", "raise the quota")


@pytest.mark.parametrize(
    "manager, ratio, words",
    [
        ("V2", "0.5,0.3,0.2", ("[0.5, 0.3, 0.2]", "one per life cycle")),
        pytest.param("V1", "0.5,0.3,0.2", ("[0.5, 0.3, 0.2]", "need 2 positive numbers"), marks=pytest.mark.full),
    ],
)
def test_shares_that_do_not_fit_the_model_are_refused(manager: str, ratio: str, words: tuple[str, ...]) -> None:
    ended = run(
        *("worker", "--role", "decode", "--directory", "127.0.0.1:1", "--model", "tiny-gemma3"),
        *("--set", f"pools.manager={manager}", "--set", f"pools.ratio={ratio}", "--log-level", "error"),
    )
    check_refused(ended, *words)


def test_prompts_that_cannot_be_served_are_refused_at_admission() -> None:
    with serving(model="tiny-gpt-oss", pools={"quota_bytes": "1MiB"}) as service:
        ask = ("generate", "--frontend", service.endpoint)
        # 1 MiB is 42 slots of 24 576 bytes; 2000 tokens need 63 blocks of full attention beside the window's.
        check_refused(run(*ask, "--prompt", "a" * 2000), "slots per pool group, the pools have [42]")
        check_refused(run(*ask, "--prompt", "a" * 9000), "max_seq_len_tokens")
        answer = run(*ask, "--prompt", "hello", "--max-new-tokens", "4", "--json")
        assert (answer.code, answer.err) == (0, "")
        wait_until(service.is_idle, 10.0, "nobody uses any page")
