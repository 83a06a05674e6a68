"""What the demo checks before it starts anything, and how its report reads."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.cache.errors import ConfigError
from kvferry.deploy import demo
from kvferry.deploy.demo import DemoOptions, Served, described, run_demo, shortened
from kvferry.transfer.inference import GenerateSummary, PoolGroupStatus, Timings, WorkerStatus
from kvferry.transfer.types import Role, Usage, WireReport, WorkerId

OPTIONS = DemoOptions("tiny-gpt-oss", "hello", 4, 1, 1, "V2", as_json=True)
GROUP = PoolGroupStatus(("full",), 1474560, 182, 180, 2, 0, 0, 0)
SENDER, RECEIVER = WorkerId("prefill-0", 1), WorkerId("decode-0", 2)
SERVED = Served(
    tokens=[5, 6],
    text="ab",
    summary=GenerateSummary(
        finish_reason="length",
        usage=Usage(40),
        new_tokens=2,
        num_blocks=2,
        timings=Timings(0.0000004, 0.1000004, 0.0200004, 0.0300004),
        wire=WireReport(1, 4, 5898240, 8, 0.0012345678, "cma"),
        sender=SENDER,
        receiver=RECEIVER,
        prompt_token_ids=(1, 2),
    ),
    ttft_seconds=0.1612345678,
    first_token_seconds=0.1012345678,
    decode_status=WorkerStatus(
        worker=RECEIVER,
        role=Role.DECODE,
        model="tiny-gpt-oss",
        manager="V2",
        transport="NIXL",
        runtime="PYTHON",
        pool_groups=(GROUP, replace(GROUP, life_cycles=("window 128", "full"), slot_bytes=24576)),
        waiting=0,
        running=0,
        holding=0,
        receiving=0,
        peers=(),
        integrity="ok",
        process_id=1,
    ),
)


@pytest.mark.parametrize(
    "prompt, max_new_tokens, numbers",
    [("a" * 9000, 4, ("9000 tokens", "--max-new-tokens is 4")), ("hello", 9000, ("5 tokens", "is 9000"))],
)
def test_demo_beyond_the_model_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str, max_new_tokens: int, numbers: tuple[str, ...]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=r"tiny-gpt-oss holds at most \d+ tokens of both together") as refused:
        run_demo(replace(OPTIONS, prompt=prompt, max_new_tokens=max_new_tokens))
    assert all(number in str(refused.value) for number in numbers)
    assert list(tmp_path.iterdir()) == []


def test_report_is_at_most_100_columns_wide_and_whole() -> None:
    table = demo._table(demo._rows(OPTIONS, SERVED))
    assert max(len(line) for line in table.splitlines()) <= 100
    words = " ".join(table.replace("│", " ").split())
    for part in (
        "full: 182 slots of 1.41 MiB window 128 and full: 182 slots of 24 KiB",
        "token sampled by prefill after 0.101 s",
        "time to first token 0.161 s, computed by decode = queue 0.000 + prefill 0.100 + transfer 0.020",
    ):
        assert part in words


def test_value_that_looks_like_markup_is_shown_as_it_is() -> None:
    assert "[red]model[/red]" in demo._table([("model", "[red]model[/red]")])


def test_json_has_seconds_to_the_microsecond_that_add_up() -> None:
    told = demo._as_json(OPTIONS, SERVED, True)
    parts = told["ttft_seconds"]
    assert (told["transfer_seconds"], told["first_token_seconds"], parts["total"]) == (0.001235, 0.101235, 0.161235)
    assert parts == {name: round(seconds, 6) for name, seconds in parts.items()}
    assert parts["total"] == pytest.approx(sum(parts.values()) - parts["total"], abs=1e-9)


def test_pool_group_reads_as_a_phrase() -> None:
    assert described(GROUP) == "full: 182 slots of 1.41 MiB"


def test_long_prompt_is_shortened_to_two_lines() -> None:
    assert shortened("short\nprompt") == "short prompt"
    assert shortened("word " * 500) == " ".join(["word"] * 38) + " [...]"
