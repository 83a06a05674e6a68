"""`kvferry demo`, as its JSON tells it."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.programs import Ended, run

KEYS = {
    "identical",
    "model",
    "prompt_tokens",
    "new_tokens",
    "text",
    "manager",
    "transport",
    "runtime",
    "lane",
    "blocks",
    "pages",
    "bytes",
    "descriptors",
    "transfer_seconds",
    "ttft_seconds",
    "pool_groups",
}
TTFT_PARTS = {"total", "queue", "prefill", "transfer", "first_decode_step", "other"}
GROUPS = {
    ("tiny-gpt-oss", "V2"): [["window 128", "full"]],
    ("tiny-gpt-oss", "V1"): [["window 128"], ["full"]],
    **{("tiny-gemma3", manager): [["window 512"], ["full"]] for manager in ("V2", "V1")},
    **{("tiny-deepseek-v3", manager): [["full"]] for manager in ("V2", "V1")},
    # In the order of each one's first layer.
    **{
        (model, manager): [["recurrent"], ["full"]]
        for model in ("tiny-qwen3-next", "tiny-nemotron-h")
        for manager in ("V2", "V1")
    },
    **{("tiny-falcon-h1", manager): [["full"], ["recurrent"]] for manager in ("V2", "V1")},
}
LONG = ("tiny-qwen3-next", "tiny-falcon-h1", "tiny-nemotron-h", "tiny-deepseek-v3")
"""Each starts a cluster of its own: one model of one pool group and one of two are enough for every run."""
CASES = [pytest.param(*pair, marks=[pytest.mark.full] if pair[1] == "V1" or pair[0] in LONG else []) for pair in GROUPS]
PROMPT = "ferry " * 120


@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize("model, manager", CASES)
def test_demo_json_says_identical_and_how(model: str, manager: str, tmp_path: Path) -> None:
    arguments = ("--model", model, "--manager", manager.lower(), "--prompt", PROMPT, "--max-new-tokens", "16")
    ended = run("demo", *arguments, "--json", environ={"TMPDIR": str(tmp_path)})
    # Exit code 0 also says that every child ended well when told to; one that was killed would leave its folder behind.
    assert (ended.code, complaints(ended)) == (0, [])
    assert list(tmp_path.glob("kvferry-*")) == []
    told = json.loads(ended.out)
    assert set(told) >= KEYS
    assert told["identical"] is True
    assert (told["manager"], told["transport"], told["runtime"], told["lane"]) == (manager, "NIXL", "PYTHON", "cma")
    assert (told["prompt_tokens"], told["new_tokens"], told["blocks"]) == (len(PROMPT), 16, len(PROMPT) // 32 + 1)
    assert [group["life_cycles"] for group in told["pool_groups"]] == GROUPS[model, manager]
    assert all(group["slot_bytes"] > 0 and group["num_slots"] > 0 for group in told["pool_groups"])
    parts = told["ttft_seconds"]
    assert set(parts) == TTFT_PARTS
    assert all(seconds >= 0 for seconds in parts.values())
    assert parts["total"] == pytest.approx(sum(parts.values()) - parts["total"], abs=1e-6)


def complaints(ended: Ended) -> list[str]:
    """What stands on standard error, less the library's word that it has no fast kernels for recurrent layers."""
    return [line for line in ended.error_lines if not line.startswith("[transformers] ")]


@pytest.mark.full
@pytest.mark.xdist_group("demo")
def test_demo_of_the_real_model_streams_text_and_ends_with_the_verdict() -> None:
    ended = run("demo", "--max-new-tokens", "12")
    assert ended.code == 0
    assert ended.out.startswith("prompt: The Moon is about 384,400 kilometres from Earth")
    assert "\nanswer: The tides" in ended.out
    assert "\n(stopped at --max-new-tokens 12)\n" in ended.out
    assert ended.out.splitlines()[-1] == "identical to a single process: yes (12/12 tokens)"


@pytest.mark.full
@pytest.mark.xdist_group("demo")
def test_demo_over_tcp_names_its_lane() -> None:
    ended = run("demo", "--model", "tiny-gemma3", "--json", environ={"UCX_TLS": "tcp"})
    told = json.loads(ended.out)
    assert (ended.code, told["identical"], told["lane"]) == (0, True, "tcp")
