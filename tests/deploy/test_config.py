import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from kvferry.cache.errors import ConfigError
from kvferry.deploy.config import (
    FrontendConfig,
    PoolConfig,
    TransferConfig,
    WorkerConfig,
    load,
    without_keys,
)
from kvferry.transfer.types import Direction, Role

MINIMAL = {"role": "decode", "directory": "127.0.0.1:7470"}
MIB = 1 << 20
ADDRESS_RULE = "must be HOST:PORT with a port from 0 to 65535; an IPv6 host stands in brackets, as in [::1]:80"
LOOPBACK_RULE = "until TLS exists, only loopback addresses (127.0.0.1, localhost, [::1]) are allowed"


def worker(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, **flags: Any) -> WorkerConfig:
    path = tmp_path / "worker.yaml"
    path.write_text(text)
    return load(WorkerConfig, path, MINIMAL | flags, environ or {})


def refusal(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        worker(tmp_path, text, environ, **flags)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_load_without_file_uses_defaults() -> None:
    config = load(WorkerConfig, None, MINIMAL, {})

    assert config.role is Role.DECODE
    assert config.pools == PoolConfig(quota_bytes=256 * MIB, tokens_per_block=32, slot_order="layer_major")
    assert config.transfer.slice_bytes == 8 * MIB
    assert config.max_seq_len_tokens is None


def test_name_not_given_is_role_and_random_suffix() -> None:
    names = {load(WorkerConfig, None, MINIMAL, {}).name for _ in range(3)}

    assert len(names) == 3
    assert all(re.fullmatch(r"decode-[0-9a-f]{8}", name) for name in names)


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    text = "num_threads: 2\nprefill_chunk_tokens: 20\nmax_running_requests: 200\n"
    environ = {"KVFERRY_WORKER__PREFILL_CHUNK_TOKENS": "21", "KVFERRY_WORKER__MAX_RUNNING_REQUESTS": "201"}

    config = worker(tmp_path, text, environ, max_running_requests=202)

    assert config.num_threads == 2
    assert config.prefill_chunk_tokens == 21
    assert config.max_running_requests == 202
    assert config.max_waiting_requests == 64


def test_sources_combine_inside_a_section(tmp_path: Path) -> None:
    environ = {"KVFERRY_WORKER__POOLS__TOKENS_PER_BLOCK": "16"}

    pools = worker(tmp_path, "pools:\n  quota_bytes: 64MiB\n", environ, **{"pools.slot_order": "head_major"}).pools

    assert pools == PoolConfig(quota_bytes=64 * MIB, tokens_per_block=16, slot_order="head_major")


def test_variables_of_other_processes_are_not_read(tmp_path: Path) -> None:
    assert worker(tmp_path, environ={"KVFERRY_FRONTEND__NO_SUCH_KEY": "1", "KVFERRY_LOG": "x"}).role is Role.DECODE


def test_flags_of_none_and_keys_without_value_are_not_set(tmp_path: Path) -> None:
    assert worker(tmp_path, "num_threads:\npools:\n", name="w", model=None) == worker(tmp_path, name="w")


@pytest.mark.parametrize(
    "given, expected", [("256MiB", 256 * MIB), ("1 GiB", 1024 * MIB), (4096, 4096), ("4096", 4096), ("2MB", 2_000_000)]
)
def test_quota_accepts_numbers_and_units(tmp_path: Path, given: object, expected: int) -> None:
    assert worker(tmp_path, **{"pools.quota_bytes": given}).pools.quota_bytes == expected


@pytest.mark.parametrize("content, expected", [("", 1), ("# nothing\n", 1), ("num_threads: 3\n", 3)])
def test_load_file_empty_or_not_is_read(tmp_path: Path, content: str, expected: int) -> None:
    assert worker(tmp_path, content).num_threads == expected


def test_file_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file or directory$"):
        load(WorkerConfig, tmp_path / "none.yaml", MINIMAL, {})


def test_file_that_is_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory$"):
        load(WorkerConfig, tmp_path, MINIMAL, {})


@pytest.mark.parametrize("content, kind", [("- a\n- b\n", "list"), ("just words\n", "str"), ("5", "int")])
def test_file_not_a_mapping_is_refused(tmp_path: Path, content: str, kind: str) -> None:
    assert refusal(tmp_path, content) == f"worker.yaml: holds a {kind}: lines of `key: value` are needed"


def test_file_with_bad_yaml_names_line_and_column(tmp_path: Path) -> None:
    message = refusal(tmp_path, "role: decode\npools: {quota_bytes: 1\nname: x\n")

    assert message.startswith("worker.yaml: is not valid YAML at line 3, column 5: ")


@pytest.mark.parametrize(
    "content, key, line",
    [
        ("role: decode\nname: a\nrole: both\n", "role", 3),
        ("pools:\n  quota_bytes: 1\n  quota_bytes: 2\n", "quota_bytes", 3),
    ],
)
def test_file_with_a_key_twice_names_key_and_line(tmp_path: Path, content: str, key: str, line: int) -> None:
    message = refusal(tmp_path, content)

    assert message.startswith(f"worker.yaml: is not valid YAML at line {line}, column ")
    assert message.endswith(f"the key {key!r} is there twice")


@pytest.mark.parametrize(
    "name, right",
    [
        ("KVFERRY_WORKER_ROLE", "KVFERRY_WORKER__ROLE"),
        ("KVFERRY_WORKER_POOLS_QUOTA_BYTES", "KVFERRY_WORKER__POOLS__QUOTA_BYTES"),
        ("KVFERRY_WORKER_POOLS__QUOTA_BYTE", "KVFERRY_WORKER__POOLS__QUOTA_BYTES"),
    ],
)
def test_variable_with_one_underscore_names_the_right_spelling(tmp_path: Path, name: str, right: str) -> None:
    message = refusal(tmp_path, environ={name: "1"})

    assert message == f"{name} is not read: two underscores stand between the parts, as in {right}"


@pytest.mark.parametrize("rest", ["PORT", "PORT_7470_TCP_ADDR", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC"])
def test_variables_of_a_container_platform_are_not_taken_for_mistakes(tmp_path: Path, rest: str) -> None:
    assert worker(tmp_path, environ={f"KVFERRY_WORKER_{rest}": "1", "KVFERRY_FRONTEND_LISTEN": "1"}).name


def test_without_keys_drops_what_the_configuration_sets() -> None:
    environ = {
        "KVFERRY_WORKER__ROLE": "1",
        "KVFERRY_WORKER__pools__QUOTA_BYTES": "1",
        "KVFERRY_WORKER__POOLS__SLOT_ORDER": "1",
        "KVFERRY_WORKER__POOLS": "1",
        "KVFERRY_FRONTEND__ROLE": "1",
        "HOME": "/",
    }

    left = without_keys("KVFERRY_WORKER__", {"role": "both", "pools": {"quota_bytes": 5}, "model": None}, environ)

    assert left == {name: environ[name] for name in list(environ)[2:]}


@pytest.mark.parametrize("content", [b"name: \xff\xfe", b"name: \x00", b"when: 2026-99-99", b"[" * 5000])
def test_file_that_cannot_be_parsed_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "worker.yaml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match="is not valid YAML") as caught:
        load(WorkerConfig, path, MINIMAL, {})
    assert "\n" not in str(caught.value)


def test_file_too_large_is_refused(tmp_path: Path) -> None:
    assert "larger than 1048576 bytes" in refusal(tmp_path, "#" * (MIB + 1))


def test_file_that_contains_itself_is_refused(tmp_path: Path) -> None:
    assert "unknown key 'pools.a.a.a'" in refusal(tmp_path, "pools: &again\n  a: *again\n")


def test_tag_that_would_run_code_is_refused(tmp_path: Path) -> None:
    assert "is not valid YAML" in refusal(tmp_path, "name: !!python/object/apply:os.getcwd []\n")


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("pools.quota_byte", "pools.quota_bytes"),
        ("quota_bytes", "pools.quota_bytes"),
        ("transfer.timeout", "transfer.timeout_seconds"),
        ("pool.tokens_per_block", "pools.tokens_per_block"),
        ("modle", "model"),
        ("role.kind", "role"),
    ],
)
def test_unknown_key_names_it_and_the_nearest(tmp_path: Path, key: str, nearest: str) -> None:
    assert refusal(tmp_path, **{key: "1"}).endswith(f"unknown key {key!r}, the nearest valid one is {nearest!r}")


def test_unknown_key_names_where_it_was_set(tmp_path: Path) -> None:
    message = refusal(tmp_path, "pools: {quota: 1}\n", {"KVFERRY_WORKER__PORTS": "1"}, thread=1)

    assert message == (
        "worker.yaml: pools.quota: unknown key 'pools.quota', the nearest valid one is 'pools.quota_bytes'; "
        "KVFERRY_WORKER__PORTS: unknown key 'ports', the nearest valid one is 'transfer.transport'; "
        "flag for thread: unknown key 'thread', the nearest valid one is 'num_threads'"
    )


def test_section_given_as_value_lists_its_keys(tmp_path: Path) -> None:
    assert refusal(tmp_path, "pools: 5\n") == (
        "worker.yaml: pools is 5, but it is a section with the keys "
        "pools.quota_bytes, pools.tokens_per_block, pools.slot_order, pools.manager, pools.ratio, "
        "pools.commit_policy, pools.max_util_for_resume, pools.max_sequences, pools.window_scratch"
    )


@pytest.mark.parametrize(
    "key, given, accepted",
    [
        ("role", "chef", "must be 'prefill', 'decode' or 'both'"),
        ("engine", "vllm", "must be 'hf' or 'synthetic'"),
        ("num_threads", "many", "must be a valid integer, unable to parse string as an integer"),
        ("num_threads", 0, "must be greater than or equal to 1"),
        ("num_threads", True, "must be a number or a text, not a truth value"),
        ("name", "two words", "String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$'"),
        ("listen", "here", ADDRESS_RULE),
        ("listen", "127.0.0.1:70000", ADDRESS_RULE),
        ("listen", "192.0.2.1:0", f"will not listen on it without encryption: {LOOPBACK_RULE}"),
        ("directory", "node-1:5", f"will not connect to it without encryption: {LOOPBACK_RULE}"),
        ("directory", "127.0.0.1:0", "must name a port from 1 to 65535: nothing can connect to port 0"),
        ("pools.quota_bytes", "lots", "must be a number of bytes or a text such as 256MiB"),
        ("pools.quota_bytes", "3 parsecs", "must be a number of bytes or a text such as 256MiB"),
        ("pools.quota_bytes", 0, "must be greater than or equal to 1"),
        ("transfer.slice_bytes", "65MiB", f"must be less than or equal to {64 * MIB}"),
        ("transfer.hold_seconds", 0, "must be greater than 0"),
        ("transfer.timeout_seconds", float("nan"), "must be less than or equal to 3600"),
        ("transfer.lease_seconds", 0.1, "must be greater than or equal to 0.5"),
        ("transfer.direction", "sideways", "must be 'push' or 'pull'"),
        ("transfer.max_held_bytes", -1, "must be a number of bytes or a text such as 256MiB"),
        ("transfer.max_receiving_bytes", "few", "must be a number of bytes or a text such as 256MiB"),
        ("transfer.quarantine_limit", 0, "must be greater than 0"),
        ("transfer.quarantine_limit", 1.5, "must be less than or equal to 1"),
        ("lease_seconds", 0.5, "must be greater than or equal to 1"),
    ],
)
def test_wrong_value_names_key_value_and_what_is_accepted(
    tmp_path: Path, key: str, given: object, accepted: str
) -> None:
    assert refusal(tmp_path, **{key: given}) == f"flag for {key} is {given!r}: {accepted}"


def test_wrong_value_of_the_environment_names_the_variable(tmp_path: Path) -> None:
    assert refusal(tmp_path, environ={"KVFERRY_WORKER__POOLS__SLOT_ORDER": "rows"}) == (
        "KVFERRY_WORKER__POOLS__SLOT_ORDER is 'rows': must be 'layer_major' or 'head_major'"
    )


def test_wrong_value_too_long_is_shortened(tmp_path: Path) -> None:
    assert refusal(tmp_path, engine="x" * 1000).startswith("flag for engine is '" + "x" * 76 + "...: ")


def test_missing_keys_are_all_named_with_their_meaning() -> None:
    with pytest.raises(ConfigError) as caught:
        load(WorkerConfig, None, {"num_threads": 0}, {})

    assert str(caught.value) == (
        "role is not set: what the worker does: prefill, decode or both; "
        "directory is not set: HOST:PORT of the directory, which the frontend serves; "
        "flag for num_threads is 0: must be greater than or equal to 1"
    )


def test_frontend_bounds_out_of_order_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^min_lease_seconds 20\.0 is above max_lease_seconds 10\.0$"):
        load(FrontendConfig, None, {"min_lease_seconds": 20, "max_lease_seconds": 10}, {})


def test_frontend_reads_its_own_variables() -> None:
    assert load(FrontendConfig, None, {}, {"KVFERRY_FRONTEND__LISTEN": "[::1]:80"}).listen == "[::1]:80"


def test_config_once_made_does_not_change() -> None:
    config = load(FrontendConfig, None, {}, {})

    with pytest.raises(ValueError, match="frozen"):
        config.listen = "0.0.0.0:1"


@pytest.mark.parametrize("model_class", [WorkerConfig, PoolConfig, TransferConfig, FrontendConfig])
def test_every_field_says_what_it_is(model_class: type[BaseModel]) -> None:
    for name, field in model_class.model_fields.items():
        assert field.description, name
        for unit in ("bytes", "seconds", "tokens"):
            assert unit not in name or unit in field.description, f"{name} does not say its unit"


def test_addresses_are_written_one_way(tmp_path: Path) -> None:
    config = worker(tmp_path, listen="localhost:0", directory="[::1]:7470")

    assert (config.listen, config.directory) == ("127.0.0.1:0", "[::1]:7470")


def test_reading_a_configuration_needs_no_grpc() -> None:
    script = "import sys, kvferry.deploy.config; sys.exit('grpc' in sys.modules)"
    assert subprocess.run((sys.executable, "-c", script), timeout=60.0, check=False).returncode == 0


# ---- how pages move

TRANSFER_KEYS = [
    ("direction", "pull", Direction.PULL),
    ("direction", "push", Direction.PUSH),
    ("lease_seconds", "2.5", 2.5),
    ("max_receiving_bytes", "64MiB", 64 * MIB),
    ("max_held_bytes", "0", 0),
    ("quarantine_limit", "1", 1.0),
]


@pytest.mark.parametrize("name, given, expected", TRANSFER_KEYS)
def test_transfer_key_is_taken_from_flag_environment_and_file(
    tmp_path: Path, name: str, given: str, expected: object
) -> None:
    configs = [
        worker(tmp_path, **{f"transfer.{name}": given}),
        worker(tmp_path, environ={f"KVFERRY_WORKER__TRANSFER__{name.upper()}": given}),
        worker(tmp_path, f"transfer:\n  {name}: {given}\n"),
    ]

    assert [getattr(config.transfer, name) for config in configs] == [expected] * 3


def test_transfers_are_pushed_and_bounded_by_the_quarantine_alone_unless_set() -> None:
    transfer = load(WorkerConfig, None, MINIMAL, {}).transfer

    assert (transfer.direction, transfer.lease_seconds, transfer.quarantine_limit) == (Direction.PUSH, 10.0, 0.25)
    assert (transfer.max_receiving_bytes, transfer.max_held_bytes) == (0, 0)


def test_schedule_of_the_frontend_is_one_of_two() -> None:
    assert load(FrontendConfig, None, {}, {}).schedule == "context_first"
    assert load(FrontendConfig, None, {"schedule": "generation_first"}, {}).schedule == "generation_first"
    with pytest.raises(ConfigError, match="must be 'context_first' or 'generation_first'"):
        load(FrontendConfig, None, {"schedule": "both"}, {})


# ---- how pools are kept

POOL_KEYS = [
    ("pools.manager", "v1", "V1"),
    ("pools.manager", "V1", "V1"),
    ("pools.manager", "v2", "V2"),
    ("pools.ratio", "0.5,0.5", (0.5, 0.5)),
    ("pools.ratio", " 0.25 , 0.75 ", (0.25, 0.75)),
    ("pools.ratio", "1", (1.0,)),
    ("pools.commit_policy", "per_conversation", "per_conversation"),
    ("pools.commit_policy", "off", "off"),
    ("pools.max_util_for_resume", "0.9", 0.9),
    ("pools.max_util_for_resume", "1", 1.0),
    ("pools.max_sequences", "8", 8),
    ("pools.window_scratch", "on", "on"),
    ("pools.window_scratch", "off", "off"),
    ("stall_seconds", "2.5", 2.5),
]


def value_of(config: WorkerConfig, key: str) -> object:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
@pytest.mark.parametrize("key, given, expected", POOL_KEYS)
def test_pool_key_is_read_from_every_source(
    tmp_path: Path, source: str, key: str, given: str, expected: object
) -> None:
    config = {
        "flag": lambda: worker(tmp_path, **{key: given}),
        "environment": lambda: worker(tmp_path, environ={f"KVFERRY_WORKER__{key.replace('.', '__').upper()}": given}),
        "file": lambda: worker(tmp_path, yaml_of(key, repr(given))),
    }[source]()

    assert value_of(config, key) == expected


def yaml_of(key: str, value: str) -> str:
    section, _, name = key.rpartition(".")
    return f"{section}: {{{name}: {value}}}\n" if section else f"{name}: {value}\n"


@pytest.mark.parametrize(
    "key, text, expected",
    [
        ("pools.ratio", "[0.5, 0.5]", (0.5, 0.5)),
        ("pools.max_sequences", "8", 8),
        ("pools.max_sequences", "", None),
        ("pools.max_util_for_resume", "0.5", 0.5),
        ("stall_seconds", "3", 3.0),
    ],
)
def test_pool_key_of_a_file_may_be_a_number_a_list_or_nothing(
    tmp_path: Path, key: str, text: str, expected: object
) -> None:
    assert value_of(worker(tmp_path, yaml_of(key, text)), key) == expected


@pytest.mark.parametrize("text, expected", [("on", "on"), ("off", "off"), ("'on'", "on")])
def test_words_that_yaml_takes_for_truth_values_are_read_as_written(tmp_path: Path, text: str, expected: str) -> None:
    assert worker(tmp_path, yaml_of("pools.window_scratch", text)).pools.window_scratch == expected


def test_commit_policy_off_is_read_as_written(tmp_path: Path) -> None:
    assert worker(tmp_path, yaml_of("pools.commit_policy", "off")).pools.commit_policy == "off"


def test_pools_not_configured_are_v2_with_reuse_and_without_limits() -> None:
    pools = PoolConfig()

    assert (pools.manager, pools.ratio, pools.commit_policy) == ("V2", None, "all_reusable")
    assert (pools.max_util_for_resume, pools.max_sequences, pools.window_scratch) == (1.0, None, "off")


@pytest.mark.parametrize(
    "key, given, accepted",
    [
        ("pools.manager", "v3", "must be 'V1' or 'V2'"),
        ("pools.manager", 2, "must be 'V1' or 'V2'"),
        ("pools.commit_policy", "some", "must be 'off', 'all_reusable', 'per_request' or 'per_conversation'"),
        ("pools.max_util_for_resume", "0", "must be greater than or equal to 0.01"),
        ("pools.max_util_for_resume", "1.5", "must be less than or equal to 1"),
        ("pools.max_util_for_resume", "nan", "must be less than or equal to 1"),
        ("pools.max_sequences", "0", "must be greater than or equal to 1"),
        ("pools.max_sequences", "65537", "must be less than or equal to 65536"),
        ("pools.max_sequences", "2.5", "must be a valid integer, unable to parse string as an integer"),
        ("pools.window_scratch", "maybe", "must be 'on' or 'off'"),
        ("stall_seconds", "0", "must be greater than 0"),
        ("stall_seconds", "inf", "must be less than or equal to 3600"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "environment"])
def test_wrong_pool_value_names_key_value_and_what_is_accepted(
    tmp_path: Path, source: str, key: str, given: object, accepted: str
) -> None:
    variable = f"KVFERRY_WORKER__{key.replace('.', '__').upper()}"
    if source == "flag":
        assert refusal(tmp_path, **{key: given}) == f"flag for {key} is {given!r}: {accepted}"
    else:
        assert refusal(tmp_path, environ={variable: str(given)}).startswith(f"{variable} is {str(given)!r}: ")


@pytest.mark.parametrize(
    "given, part",
    [
        ("0.5,half", "unable to parse string as a number"),
        ("0.5,", "unable to parse string as a number"),
        ("0,1", "greater than 0"),
        ("0.5,1.5", "less than or equal to 1"),
        ("nan,0.5", "less than or equal to 1"),
    ],
)
def test_wrong_ratio_names_what_was_given_and_the_rule(tmp_path: Path, given: str, part: str) -> None:
    message = refusal(tmp_path, **{"pools.ratio": given})

    assert part in message
    assert "pools.ratio" in message
    assert repr(given) in message
