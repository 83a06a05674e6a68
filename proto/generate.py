"""Generate the Python code of proto/kvferry/v1, or check that the committed code is fresh.

python proto/generate.py            writes *_pb2.py, *_pb2.pyi, *_pb2_grpc.py and *_pb2_grpc.pyi beside the .proto
python proto/generate.py --check    writes nothing; lists stale, missing and left-over files and exits with 1
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("kvferry/v1")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(output: Path) -> None:
    """Run the compiler over every .proto of the package. Raises SystemExit when it reports an error."""
    output.mkdir(parents=True, exist_ok=True)
    _find_plugins()
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={output}",
        f"--grpc_python_out={output}",
        f"--mypy_out=quiet:{output}",
        f"--mypy_grpc_out=quiet,only_async:{output}",
        *sorted(str(path) for path in (ROOT / PACKAGE).glob("*.proto")),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("the protobuf compiler failed; its message is above")
    _drop_empty_services(output / PACKAGE)


def _find_plugins() -> None:
    """The compiler looks for protoc-gen-mypy on PATH: it is installed beside the running interpreter."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _drop_empty_services(package: Path) -> None:
    """A .proto without a service still gets a *_pb2_grpc.py with nothing in it."""
    for proto in (ROOT / PACKAGE).glob("*.proto"):
        if "\nservice " not in proto.read_text():
            for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):
                (package / (proto.stem + suffix)).unlink(missing_ok=True)


def _generated(package: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in package.iterdir() if path.name.endswith(SUFFIXES)}


def stale_files() -> list[str]:
    """Names of committed files that differ from what the compiler writes now, are missing, or have no .proto."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = _generated(Path(folder) / PACKAGE)
    committed = _generated(ROOT / PACKAGE)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when the committed code is not fresh")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = stale_files()
    for name in stale:
        print(f"stale: {(ROOT / PACKAGE / name).relative_to(ROOT.parent)} (run: python proto/generate.py)")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
