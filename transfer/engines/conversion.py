"""GGUF files, converted once into a folder that loads ten times faster.

The folder's name holds the digest of the file, so a changed file is converted anew. A conversion happens in a temporary
folder and is renamed when complete: a folder that exists is whole.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvferry.cache.errors import ConfigError
from kvferry.transfer.engines.loaded_model import library_errors

_FORMAT = 1
"""Raise it when converted folders of an earlier version must not be used any more."""

_POLL_SECONDS = 0.2

Report = Callable[[str], None]


def model_cache_dir(environ: Mapping[str, str]) -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/kvferry/models, by default under ~/.cache."""
    home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kvferry" / "models"


def converted_copy(source: Path, cache_dir: Path, *, report: Report, timeout_seconds: float = 900.0) -> Path:
    """The folder with the safetensors copy (float32) of a GGUF file; converts when there is none yet.

    Concurrency: any number of processes; one converts, the others wait for it.

    Raises:
        ConfigError: the file is no GGUF that transformers reads, the folder cannot be written, or another process
            held the lock for longer than `timeout_seconds`.
    """
    target = cache_dir / f"{source.stem}-{_file_digest(source)[:16]}-v{_FORMAT}"
    if target.is_dir():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{target.name}.lock", report, timeout_seconds):
            if not target.is_dir():
                _convert_into(source, target, report)
    except OSError as error:
        raise ConfigError(f"cannot convert {source} into {target}: {error}") from error
    return target


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read the model file {path}: {error.strerror}") from error


@contextmanager
def _locked(path: Path, report: Report, timeout_seconds: float) -> Iterator[None]:
    """Hold an exclusive lock that the system drops when this process dies."""
    with path.open("w") as file:
        _acquire(file.fileno(), path, report, time.monotonic() + timeout_seconds)
        yield


def _acquire(descriptor: int, path: Path, report: Report, deadline: float) -> None:
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ConfigError(f"another process kept {path} locked: wait for its conversion, or end it") from None
        if not told:
            report("another process is converting this model: waiting for it")
            told = True
        time.sleep(_POLL_SECONDS)


def _convert_into(source: Path, target: Path, report: Report) -> None:
    """Called with the lock held, so whatever partial folders are there belong to conversions that died."""
    for abandoned in target.parent.glob(f".{target.name}.partial-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        _convert(source, partial, report)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(source: Path, folder: Path, report: Report) -> None:
    started = time.monotonic()
    report(f"converting {source.name} once into {folder.parent} (less than a minute for 100 MB)")
    with library_errors(f"convert {source}, which may be truncated or damaged"):
        _save_tokenizer(source, folder)
        _save_network(source, folder)
    report(f"converted {source.name} in {time.monotonic() - started:.0f} s")


def _save_tokenizer(source: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, local_files_only=True)
    tokenizer.save_pretrained(folder)


def _save_network(source: Path, folder: Path) -> None:
    """A network loaded from GGUF remembers its quantisation and refuses to be saved; a fresh one does not."""
    loaded = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, local_files_only=True, dtype=torch.float32
    )
    network = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    network.load_state_dict(loaded.state_dict())
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.generation_config = loaded.generation_config
    network.save_pretrained(folder)
