"""Reading lanes out of UCX's log. The tables are as UCX 1.21 wrote them, some with another transport's name put in."""

import logging
from pathlib import Path

import pytest

from kvferry.transfer.transport import lanes
from kvferry.transfer.transport.base import Operation
from kvferry.transfer.transport.lanes import (
    MAX_FORWARDED_LINES,
    MAX_LINE_BYTES,
    MAX_TABLES,
    LaneLog,
    LaneTable,
    Row,
    lane_of,
    parse_tables,
    possible_lanes,
    prepare_environment,
    wire_fingerprint,
)

STAMP = "[1796050189.230625] [vm:5613 :0]   "
GET = "remote memory read by ucp_get*(multi) into host memory from host"
PUT = "remote memory write by ucp_put*(multi) from host memory to host"
SEND = "active message by ucp_am_send* from host memory"

CMA = """
[1796050189.230625] [vm:5613 :0]   +--------+-------------+------------------------------------------+
[1796050189.230625] [vm:5613 :0]   | A intra-node cfg#1                                              |
[1796050189.230625] [vm:5613 :0]   | remote memory write by ucp_put*(multi) from host memory to host |
[1796050189.230625] [vm:5613 :0]   +--------+-------------+------------------------------------------+
[1796050189.230625] [vm:5613 :0]   | Range  | Description |                  Config                  |
[1796050189.230625] [vm:5613 :0]   +--------+-------------+------------------------------------------+
[1796050189.230625] [vm:5613 :0]   | 0..inf | zero-copy   | cma/memory                               |
[1796050189.230625] [vm:5613 :0]   +--------+-------------+------------------------------------------+
"""
TCP_TWO_RAILS = """
[1796050564.944385] [vm:7346 :0]   +--------+-------------+-----------------------------------+
[1796050564.944385] [vm:7346 :0]   | I intra-node cfg#2                                       |
[1796050564.944385] [vm:7346 :0]   | remote memory write by ucp_put* from host memory to host |
[1796050564.944385] [vm:7346 :0]   +--------+-------------+-----------------------------------+
[1796050564.944385] [vm:7346 :0]   | Range  | Description |              Config               |
[1796050564.944385] [vm:7346 :0]   +--------+-------------+-----------------------------------+
[1796050564.944385] [vm:7346 :0]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
[1796050564.944385] [vm:7346 :0]   +--------+-------------+-----------------------------------+
"""
ACTIVE_MESSAGES = """
[1796050189.164183] [vm:5613 :0]   +------------+--------------------+---------------+
[1796050189.164183] [vm:5613 :0]   | A intra-node cfg#1                              |
[1796050189.164183] [vm:5613 :0]   | active message by ucp_am_send* from host memory |
[1796050189.164183] [vm:5613 :0]   +------------+--------------------+---------------+
[1796050189.164183] [vm:5613 :0]   |   Range    |    Description     |    Config     |
[1796050189.164183] [vm:5613 :0]   +------------+--------------------+---------------+
[1796050189.164183] [vm:5613 :0]   |          0 | short              | tcp/lo        |
[1796050189.164183] [vm:5613 :0]   |   1..16515 | zero-copy          | tcp/lo        |
[1796050189.164183] [vm:5613 :0]   | 16516..inf | multi-frag copy-in | tcp/lo        |
[1796050189.164183] [vm:5613 :0]   +------------+--------------------+---------------+
"""


def table(*rows: tuple[str, str], title: str = "A inter-node cfg#1", operation: str = PUT) -> str:
    """A table as UCX prints it."""
    cells = [title, operation, None, "Range | Description | Config", None]
    cells += [f"{sizes} | zero-copy | {config}" for sizes, config in rows]
    lines = [f"{STAMP}| {cell} |" if cell else f"{STAMP}+----+" for cell in [None, *cells, None]]
    return "\n".join(lines) + "\n"


def log_of(text: str, folder: Path) -> LaneLog:
    path = folder / "ucx.log"
    path.write_text(text)
    log = LaneLog(path)
    log.refresh()
    return log


def test_parse_cma_table() -> None:
    rows = (Row(0, None, frozenset({"cma"})),)
    assert parse_tables(CMA) == [LaneTable("A", "intra-node cfg#1", Operation.WRITE, PUT, rows)]


def test_parse_tcp_over_two_rails_is_one_lane() -> None:
    (found,) = parse_tables(TCP_TWO_RAILS)
    assert (found.worker, found.connection) == ("I", "intra-node cfg#2")
    assert found.rows == (Row(0, None, frozenset({"tcp"})),)


def test_parse_leaves_out_other_operations() -> None:
    assert [found.worker for found in parse_tables(ACTIVE_MESSAGES + CMA + ACTIVE_MESSAGES)] == ["A"]


def test_parse_table_cut_anywhere_gives_nothing_and_spoils_no_later_table() -> None:
    lines = CMA.strip().splitlines()
    for kept in range(len(lines)):
        cut = "\n".join(lines[:kept]) + "\n"
        assert parse_tables(cut) == []
        assert [found.worker for found in parse_tables(cut + TCP_TWO_RAILS)] == ["I"]
        assert [found.worker for found in parse_tables("\n".join(lines[kept:]) + TCP_TWO_RAILS)][-1] == "I"


@pytest.mark.parametrize(
    "text", ["", "\n\n", "+---+\n| a |\n", STAMP + "| x |\n" + STAMP + "+---+\n", STAMP + "|||||\n", "\0" * 100]
)
def test_parse_other_text_gives_nothing(text: str) -> None:
    assert parse_tables(text) == []


@pytest.mark.parametrize(
    "resource, lane",
    [
        ("cma", "cma"),
        ("tcp", "tcp"),
        *((name, "shm") for name in ("posix", "sysv", "xpmem", "knem")),
        *((name, "rdma") for name in ("rc_mlx5", "rc_verbs", "dc_mlx5", "ud_verbs", "ud_mlx5", "ib", "rc", "srd")),
        ("cuda_ipc", "cuda_ipc"),
        ("self", "memcpy"),
        ("rocm_ipc", "unknown"),
        ("udder", "unknown"),
    ],
)
def test_lane_of_resource(resource: str, lane: str) -> None:
    assert lane_of(resource) == lane


def test_lane_depends_on_run_size(tmp_path: Path) -> None:
    log = log_of(
        table(("0..2047", "posix/memory"), ("2048..8191", "cma/memory"), ("8192..inf", "xpmem/memory")), tmp_path
    )
    assert [log.lane("A", size) for size in (1, 2047, 2048, 8191, 8192, 1 << 30)] == ["shm"] * 2 + ["cma"] * 2 + [
        "shm"
    ] * 2


def test_lane_of_reads_and_writes_is_told_apart(tmp_path: Path) -> None:
    log = log_of(table(("0..inf", "cma/memory")) + table(("0..inf", "tcp/lo"), operation=GET), tmp_path)
    assert (log.lane("A", 1), log.lane("A", 1, operation=Operation.READ)) == ("cma", "tcp")
    assert log.connections("A") == {"inter-node cfg#1"}


@pytest.mark.parametrize(
    "settings, has_rdma, on_device, more",
    [
        ({}, False, False, set()),
        ({}, True, False, {"rdma"}),
        ({}, False, True, {"cuda_ipc"}),
        ({"UCX_TLS": "all"}, True, True, {"rdma", "cuda_ipc"}),
        ({"UCX_TLS": "tcp"}, True, False, set()),
        ({"UCX_TLS": "sm,tcp,self,cuda_copy,cuda_ipc"}, True, False, set()),
        ({"UCX_TLS": "rc,tcp"}, True, False, {"rdma"}),
        ({"UCX_TLS": "^tcp"}, True, False, {"rdma"}),
        ({"UCX_TLS": "something_new"}, True, False, {"rdma"}),
        ({"UCX_TLS": "rc"}, False, False, set()),
    ],
)
def test_possible_lanes_leave_out_only_what_cannot_be(
    settings: dict[str, str], has_rdma: bool, on_device: bool, more: set[str]
) -> None:
    assert possible_lanes(settings, has_rdma=has_rdma, on_device=on_device) == {"cma", "shm", "tcp", "memcpy"} | more


def test_lane_over_several_devices_and_transports(tmp_path: Path) -> None:
    rails = "50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1/path0"
    assert log_of(table(("0..inf", rails)), tmp_path).lane("A", 65536) == "rdma"
    mixed = "33% on tcp/eth0, 33% on cuda_ipc/cuda and 34% on rc_verbs/bnxt_re0:1"
    assert log_of(table(("0..inf", mixed)), tmp_path).lane("A", 65536) == "cuda_ipc+rdma+tcp"
    assert log_of(table(("0..inf", "warp/drive")), tmp_path).lane("A", 65536) == "unknown"


def test_lane_of_own_memory_is_left_out(tmp_path: Path) -> None:
    log = log_of(table(("0..inf", "self/memory"), title="A self cfg#0"), tmp_path)
    assert log.connections("A") == frozenset()
    assert log.lane("A", 65536) == "unknown"


def test_lane_looks_only_at_the_agent_and_the_connections_asked_for(tmp_path: Path) -> None:
    log = log_of(
        table(("0..inf", "cma/memory"), title="A intra-node cfg#1")
        + table(("0..inf", "tcp/eth0"), title="A inter-node cfg#2")
        + table(("0..inf", "rc_mlx5/mlx5_0:1"), title="B inter-node cfg#1"),
        tmp_path,
    )
    assert log.connections("A") == {"intra-node cfg#1", "inter-node cfg#2"}
    assert log.lane("A", 1) == "cma+tcp"
    assert log.lane("A", 1, frozenset({"inter-node cfg#2"})) == "tcp"
    assert log.lane("B", 1) == "rdma"
    assert log.lane("C", 1) == "unknown"


def test_lane_finds_agent_whose_name_ucx_cut(tmp_path: Path) -> None:
    name = "prefill-worker-0 of some host-0123456789abcdef"
    log = log_of(table(("0..inf", "cma/memory"), title=f"{name[:31]} intra-node cfg#1"), tmp_path)
    assert log.lane(name, 1) == "cma"


def test_refresh_reads_on_across_any_cut(tmp_path: Path) -> None:
    text = (CMA + TCP_TWO_RAILS).encode()
    path = tmp_path / "ucx.log"
    log = LaneLog(path)
    log.refresh()
    for start in range(0, len(text), 37):
        with path.open("ab") as file:
            file.write(text[start : start + 37])
        log.refresh()
    assert (log.lane("A", 1), log.lane("I", 1)) == ("cma", "tcp")


def test_refresh_starts_over_when_the_log_began_anew(tmp_path: Path) -> None:
    log = log_of(CMA + ACTIVE_MESSAGES, tmp_path)
    (tmp_path / "ucx.log").write_text(TCP_TWO_RAILS)
    log.refresh()
    assert (log.lane("A", 1), log.lane("I", 1)) == ("cma", "tcp")


def test_refresh_without_log_knows_nothing(tmp_path: Path) -> None:
    for path in (None, tmp_path / "missing" / "ucx.log", tmp_path):
        log = LaneLog(path)
        log.refresh()
        assert log.lane("A", 1) == "unknown"


def test_refresh_forwards_warnings_and_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    problems = (
        "[1796050584.274235] [vm:7449 :0]          select.c:722  UCX  ERROR   no active messages transport to peer\n"
        "[1796050584.274236] [vm:7449 :0]          parser.c:2045 UCX  WARN  unused environment variable: UCX_X\n"
        "[1796050584.274237] [vm:7449 :0]          parser.c:2046 UCX  INFO  UCX_* env variables: UCX_TLS=tcp\n"
    )
    with caplog.at_level(logging.DEBUG, logger=lanes.__name__):
        log = log_of(problems + CMA, tmp_path)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "UCX: no active messages transport to peer"),
        ("WARNING", "UCX: unused environment variable: UCX_X"),
    ]
    assert log.last_problem == "unused environment variable: UCX_X"
    assert log.lane("A", 1) == "cma"


def test_refresh_is_bounded_whatever_the_log_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    many = "".join(
        table(("0..inf", "cma/memory"), title=f"A inter-node cfg#{number}") for number in range(MAX_TABLES + 50)
    )
    warnings = (STAMP + "a.c:1 UCX  WARN  again\n") * (MAX_FORWARDED_LINES + 50)
    long_line = STAMP + "x" * (MAX_LINE_BYTES * 20)
    log = log_of(many + warnings + long_line + "\n" + long_line, tmp_path)
    assert len(log.connections("A")) == MAX_TABLES
    assert len(caplog.records) == MAX_FORWARDED_LINES
    assert len(log._partial) <= MAX_LINE_BYTES


def test_prepare_environment_sets_what_the_user_did_not(tmp_path: Path) -> None:
    path = tmp_path / "ucx.log"
    environ: dict[str, str] = {}
    assert prepare_environment(environ, path) == path
    assert environ["UCX_LOG_FILE"] == str(path)
    assert environ["UCX_PROTO_INFO"] == "y"
    assert environ["UCX_TCP_CONN_NB"] == "y"
    assert environ["NIXL_LOG_LEVEL"] == "ERROR"


def test_prepare_environment_keeps_the_users_settings_and_says_the_log_is_elsewhere(tmp_path: Path) -> None:
    environ = {"UCX_LOG_FILE": "/var/log/ucx-%p.log", "NIXL_LOG_LEVEL": "DEBUG"}
    assert prepare_environment(environ, tmp_path / "ucx.log") is None
    assert environ["UCX_LOG_FILE"] == "/var/log/ucx-%p.log"
    assert environ["NIXL_LOG_LEVEL"] == "DEBUG"


def test_wire_fingerprint_tells_settings_apart_but_not_logs() -> None:
    plain = wire_fingerprint({"HOME": "/root"})
    assert plain == wire_fingerprint({"UCX_LOG_FILE": "/x", "UCX_PROTO_INFO": "y"})
    assert plain != wire_fingerprint({"UCX_TLS": "tcp"})
