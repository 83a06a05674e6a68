"""How many requests in steady decode fit into a GPU's memory, by model and kind of pool.

The managers themselves answer, on pools without bytes. Run as `python -m benchmarks.capacity [--json FILE]`.
"""

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import fleet, report
from benchmarks.load import Load
from kvferry.cache.spec import ModelSpec, from_transformers_config

MODELS = Path(__file__).parent / "models"
QUOTA_BYTES = 80 << 30
TOKENS_PER_BLOCK = 32
LENGTHS = (8192, 32768)
DTYPE = "bfloat16"

Count = Callable[[ModelSpec, Load, int], int]

OURS = "V2"
POOLS: Mapping[str, Count] = {
    OURS: fleet.pooled,
    "V1, equal shares": fleet.static_equal,
    "V1, best shares": fleet.static_best,
    "no windows": fleet.windowless,
}


@dataclass(frozen=True)
class Capacity:
    """Requests that fit at the same time, by kind of pool."""

    model: str
    num_tokens: int
    requests: Mapping[str, int]

    def ratio(self, name: str) -> float:
        """V2's count over that of another kind of pool."""
        return self.requests[OURS] / self.requests[name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the table. Returns the exit code."""
    options = _parser().parse_args(arguments)
    pools = kinds_of_pool()
    found = [capacity(path, length, pools) for path in sorted(MODELS.glob("*.json")) for length in LENGTHS]
    print(table(found))
    if options.json is not None:
        ratios = [{name: entry.ratio(name) for name in pools} for entry in found]
        rows = [{**asdict(entry), "v2_over": ratio} for entry, ratio in zip(found, ratios, strict=True)]
        settings = {"quota_bytes": QUOTA_BYTES, "tokens_per_block": TOKENS_PER_BLOCK, "dtype": DTYPE}
        report.write_json(options.json, {**settings, "capacity": rows})
    return 0


def kinds_of_pool() -> Mapping[str, Count]:
    """The kinds to compare; with vLLM's hybrid allocator where vLLM is installed, and a line that says so if not."""
    if importlib.util.find_spec("vllm") is None:
        print(f"vLLM is left out: it is not installed for {sys.executable}\n")
        return POOLS
    return {**POOLS, "vLLM, hybrid": importlib.import_module("benchmarks.vllm_fleet").hybrid}


def capacity(model: Path, num_tokens: int, pools: Mapping[str, Count], quota_bytes: int = QUOTA_BYTES) -> Capacity:
    """Count the requests that every kind of pool holds of one model at one length."""
    spec = from_transformers_config(json.loads(model.read_text()), name=model.stem, dtype=DTYPE)
    load = Load(num_tokens, TOKENS_PER_BLOCK)
    return Capacity(model.stem, num_tokens, {name: count(spec, load, quota_bytes) for name, count in pools.items()})


def table(found: Sequence[Capacity]) -> str:
    """Counts, and V2's over every other kind's."""
    names = list(found[0].requests)
    others = [name for name in names if name != OURS]
    header = ["model", "tokens", *names, *(f"{OURS} / {name}" for name in others)]
    rows = []
    for entry in found:
        counts = [str(entry.requests[name]) for name in names]
        rows.append([entry.model, str(entry.num_tokens), *counts, *(f"{entry.ratio(name):.3f}" for name in others)])
    return report.table(header, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
