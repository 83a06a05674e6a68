"""Configuration of a worker and of a frontend: every key, its unit and bounds, and how the sources combine.

Precedence: flag > environment > YAML file > default. An environment variable names a key in capitals after the prefix
of its process, with two underscores between the parts: `KVFERRY_WORKER__POOLS__QUOTA_BYTES=512MiB`.
"""

import difflib
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from kvferry.cache.admission import CommitPolicy
from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import SlotOrder
from kvferry.transfer.control.addresses import Address, AddressError, checked_address
from kvferry.transfer.types import Direction, Role

_MIB = 1 << 20
_MAX_FILE_BYTES = _MIB
_MAX_KEY_PARTS = 4
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?")
"""Variables that Kubernetes gives every container, here for a service that is named like a kvferry process."""


def _listen_address(text: str) -> str:
    return str(_checked(text, "listen on"))


def _dial_address(text: str) -> str:
    address = _checked(text, "connect to")
    if address.port == 0:
        raise ValueError("must name a port from 1 to 65535: nothing can connect to port 0")
    return str(address)


def _checked(text: str, purpose: str) -> Address:
    try:
        return checked_address(text, purpose=purpose)
    except AddressError as error:
        raise ValueError(error.rule) from None


ListenAddress = Annotated[str, AfterValidator(_listen_address)]
DialAddress = Annotated[str, AfterValidator(_dial_address)]
Seconds = Annotated[float, Field(gt=0, le=3600)]
Tokens = Annotated[int, Field(ge=1, le=1 << 24)]
NumRequests = Annotated[int, Field(ge=1, le=1 << 16)]


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _numbers(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, (int, float)) else value


Manager = Annotated[Literal["V1", "V2"], BeforeValidator(_upper)]
Ratio = Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...] | None, BeforeValidator(_numbers)]


class _Config(BaseModel):
    """What all sections share: unknown keys are errors, values do not change, no field is a truth value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("must be a number or a text, not a truth value")
        return value


class PoolConfig(_Config):
    """Where the KV cache of one worker lives."""

    quota_bytes: ByteSize = Field(
        default=ByteSize(256 * _MIB), ge=1, description="bytes of all pools together, a number or a text such as 256MiB"
    )
    tokens_per_block: int = Field(default=32, ge=1, le=4096, description="tokens of one block, the same on all workers")
    slot_order: SlotOrder = Field(default="layer_major", description="order of dimensions inside a slot")
    manager: Manager = Field(
        default="V2", description="V2: pools shared by life cycles; V1: one pool per window, divided once and for all"
    )
    ratio: Ratio = Field(
        default=None,
        description="shares of the quota, separated by commas, that sum to 1: one per life cycle with V2, one per pool "
        "with V1; not set: V2 fits them to the longest request, V1 takes equal ones",
    )
    commit_policy: CommitPolicy = Field(
        default="all_reusable", description="what requests leave in the pools for later ones"
    )
    max_util_for_resume: float = Field(
        default=1.0, ge=0.01, le=1, description="share of a pool group that others may hold when a request starts"
    )
    max_sequences: NumRequests | None = Field(
        default=None, description="requests that may have pages at one time, whatever the memory; no limit when not set"
    )
    window_scratch: Literal["on", "off"] = Field(
        default="off",
        description="on: layers share pages for prompt blocks that leave their window within one chunk, which cannot "
        "be reused later",
    )


class TransferConfig(_Config):
    """How pages move between workers."""

    transport: str = Field(default="nixl", min_length=1, description="name of a registered transport")
    timeout_seconds: Seconds = Field(
        default=60.0, description="seconds from the grant of a transfer's pages to the end of the transfer"
    )
    hold_seconds: Seconds = Field(
        default=120.0,
        description="seconds a finished prompt is kept without a sign of life of the worker that is to receive it",
    )
    lease_seconds: float = Field(
        default=10.0,
        ge=0.5,
        le=300,
        description="seconds without a sign of life of the other side after which a transfer fails",
    )
    direction: Direction = Field(
        default=Direction.PUSH,
        description="who drives the wire when this worker receives: push, the sender writes; pull, this worker reads",
    )
    slice_bytes: ByteSize = Field(
        default=ByteSize(8 * _MIB), ge=_MIB, le=64 * _MIB, description="bytes handed to the transport in one post"
    )
    max_held_transfers: NumRequests = Field(
        default=64, description="finished prompts whose pages may wait for, or be in, a transfer out at one time"
    )
    max_held_bytes: ByteSize = Field(
        default=ByteSize(0),
        ge=0,
        description="bytes of the pages of such prompts together before prefill pauses; 0: no limit but their number",
    )
    max_receiving_bytes: ByteSize = Field(
        default=ByteSize(0),
        ge=0,
        description="bytes of the pages granted to transfers in at one time, a larger request alone; 0: no limit",
    )
    quarantine_limit: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="share of each pool group that may be in quarantine; above it the worker admits nothing new and "
        "does not serve, until proof brings pages back",
    )


def _default_name(validated: Mapping[str, Any]) -> str:
    return f"{validated['role'].value}-{secrets.token_hex(4)}"


class WorkerConfig(_Config):
    """One worker process."""

    env_prefix: ClassVar[str] = "KVFERRY_WORKER__"

    role: Role = Field(description="what the worker does: prefill, decode or both")
    name: str = Field(
        default_factory=_default_name,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="name in the directory, unique among workers; the role and a random suffix when not set",
    )
    listen: ListenAddress = Field(default="127.0.0.1:0", description="HOST:PORT to serve on; port 0 takes a free one")
    directory: DialAddress = Field(description="HOST:PORT of the directory, which the frontend serves")
    model: str = Field(
        default="smollm2",
        min_length=1,
        description="smollm2, a tiny model's name, or the path of a folder or .gguf file",
    )
    engine: Literal["hf", "synthetic"] = Field(default="hf", description="what computes keys and values")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where the model and the pools live")
    num_threads: int = Field(default=1, ge=1, le=1024, description="threads one forward pass computes with")
    pools: PoolConfig = Field(default_factory=PoolConfig, description="where the KV cache lives")
    transfer: TransferConfig = Field(default_factory=TransferConfig, description="how pages move")
    prefill_chunk_tokens: Tokens = Field(default=512, description="most prompt tokens one forward pass computes")
    max_seq_len_tokens: Tokens | None = Field(
        default=None, description="most tokens of a prompt and its answer together; the model's own limit when not set"
    )
    max_waiting_requests: NumRequests = Field(default=64, description="requests that may queue before one is refused")
    max_running_requests: NumRequests = Field(default=16, description="requests computed at one time")
    stall_seconds: Seconds = Field(
        default=10.0,
        description="seconds a request may wait for room while nothing is under way that could make any",
    )
    lease_seconds: float = Field(
        default=10.0,
        ge=1,
        le=300,
        description="seconds without a sign of life after which the directory drops the worker",
    )


class FrontendConfig(_Config):
    """The frontend process, which serves clients and the directory."""

    env_prefix: ClassVar[str] = "KVFERRY_FRONTEND__"

    listen: ListenAddress = Field(
        default="127.0.0.1:7470", description="HOST:PORT to serve on; port 0 takes a free one"
    )
    min_lease_seconds: Seconds = Field(default=1.0, description="seconds of the shortest lease a worker may ask for")
    max_lease_seconds: Seconds = Field(default=300.0, description="seconds of the longest lease a worker may ask for")
    max_request_timeout_seconds: Seconds = Field(
        default=600.0, description="seconds of the longest deadline a request may ask for"
    )
    max_inflight_requests: NumRequests = Field(
        default=256, description="requests being answered at one time before one is refused"
    )
    schedule: Literal["context_first", "generation_first"] = Field(
        default="context_first",
        description="context_first: decode is asked once the prompt is computed; generation_first: both at the same "
        "time, so that the pages are granted by then",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "FrontendConfig":
        if self.min_lease_seconds > self.max_lease_seconds:
            raise ValueError(
                f"min_lease_seconds {self.min_lease_seconds} is above max_lease_seconds {self.max_lease_seconds}"
            )
        return self


ConfigT = TypeVar("ConfigT", WorkerConfig, FrontendConfig)

Key = tuple[str, ...]
"""A key as the parts between its dots."""


class Setting(NamedTuple):
    """One value and the name of the key as its source spells it."""

    spelled: str
    value: object


Settings = dict[Key, Setting]


def load(
    model_class: type[ConfigT], yaml_path: Path | None, overrides: Mapping[str, object], environ: Mapping[str, str]
) -> ConfigT:
    """Combine the sources into one checked configuration.

    Args:
        yaml_path: the file; None for no file.
        overrides: values of flags by dotted key ("pools.quota_bytes"); None means that the flag was not given.
        environ: the process environment.

    Raises:
        ConfigError: one line that says everything that is wrong: where it was set, the key, the value given and what is
            accepted.
    """
    settings = from_file(yaml_path) if yaml_path else {}
    settings |= from_env(model_class.env_prefix, environ)
    settings |= _from_flags(overrides)
    known = _descriptions(model_class)
    mistakes = [_unknown(key, setting, list(known)) for key, setting in settings.items() if key not in known]
    mistakes += _misspelled(model_class.env_prefix, environ, list(known))
    if mistakes:
        raise ConfigError("; ".join(mistakes))
    try:
        return model_class.model_validate(_nested(settings))
    except ValidationError as error:
        raise ConfigError("; ".join(_described(error, settings, known))) from None


def from_file(path: Path) -> Settings:
    """The settings in a YAML file of at most 1 MiB; a key without a value counts as not set. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {_MAX_FILE_BYTES} bytes: not a configuration file")
    values = _parse_yaml(path, content)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}: lines of `key: value` are needed")
    return {key: Setting(f"{path}: {'.'.join(key)}", value) for key, value in _flattened(values, ())}


def from_env(prefix: str, environ: Mapping[str, str]) -> Settings:
    """The settings in the environment: variables that start with the prefix."""
    names = (name for name in environ if name.startswith(prefix))
    return {tuple(name.removeprefix(prefix).lower().split("__")): Setting(name, environ[name]) for name in names}


def variable(prefix: str, key: Key) -> str:
    """The environment variable that sets a key."""
    return prefix + "__".join(key).upper()


def without_keys(prefix: str, config: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment less the variables that would win over a key that `config`, the content of a file, sets."""
    keys = {key for key, _ in _flattened(config, ())}
    dropped = {setting.spelled for key, setting in from_env(prefix, environ).items() if key in keys}
    return {name: value for name, value in environ.items() if name not in dropped}


def _from_flags(overrides: Mapping[str, object]) -> Settings:
    given = ((key, value) for key, value in overrides.items() if value is not None)
    return {tuple(key.split(".")): Setting(f"flag for {key}", value) for key, value in given}


class _Loader(yaml.SafeLoader):
    """Refuses a key that one mapping has twice; YAML forbids it, and the safe loader takes the last one.

    `on` and `off` are words, which some keys take; the safe loader reads them, and `yes` and `no`, as truth values.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if first in "tTfF" or entry[0] != "tag:yaml.org,2002:bool"]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _parse_yaml(path: Path, content: bytes) -> object:
    try:
        loader = _Loader(content)
        try:
            values = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}: is not valid YAML{place}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None
    return {} if values is None else values


def _flattened(values: Mapping[Any, object], above: Key) -> Iterator[tuple[Key, object]]:
    for name, value in values.items():
        key = (*above, str(name))
        # No valid key is this deep; without the limit a file that refers to itself would never end.
        if isinstance(value, dict) and len(key) < _MAX_KEY_PARTS:
            yield from _flattened(value, key)
        elif value is not None:
            yield key, value


def _nested(settings: Settings) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, setting in settings.items():
        section = nested
        for part in key[:-1]:
            section = section.setdefault(part, {})
        section[key[-1]] = setting.value
    return nested


def _descriptions(model_class: type[BaseModel], above: Key = ()) -> dict[Key, str]:
    """Every key that takes a value, with its description."""
    found: dict[Key, str] = {}
    for name, field in model_class.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _descriptions(field.annotation, (*above, name))
        else:
            found[(*above, name)] = field.description or ""
    return found


def _unknown(key: Key, setting: Setting, known: list[Key]) -> str:
    inside = [".".join(other) for other in known if other[: len(key)] == key]
    if inside:
        return f"{setting.spelled} is {setting.value!r}, but it is a section with the keys {', '.join(inside)}"
    nearest = max(known, key=lambda other: _similarity(key, other))
    return f"{setting.spelled}: unknown key {'.'.join(key)!r}, the nearest valid one is {'.'.join(nearest)!r}"


def _misspelled(prefix: str, environ: Mapping[str, str], known: list[Key]) -> Iterator[str]:
    """Variables that would be read if the underscores after the name of the process were two."""
    near = prefix.removesuffix("_")
    for name in environ:
        rest = name.removeprefix(near)
        if rest != name and not name.startswith(prefix) and not _SERVICE_LINK.fullmatch(rest):
            nearest = max(known, key=lambda key: _ratio(rest.lower(), "_".join(key)))
            yield f"{name} is not read: two underscores stand between the parts, as in {variable(prefix, nearest)}"


def _similarity(key: Key, other: Key) -> float:
    """How alike two keys are; the last part alone counts too, since a key in the wrong section still has its name."""
    return max(_ratio(key[-1], other[-1]), _ratio(".".join(key), ".".join(other)))


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _described(error: ValidationError, settings: Settings, known: Mapping[Key, str]) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        place = tuple(str(part) for part in detail["loc"])
        key = next((given for given in settings if place[: len(given)] == given), place)
        if detail["type"] == "missing":
            yield f"{'.'.join(key)} is not set: {known[key]}"
        elif key in settings:
            yield f"{settings[key].spelled} is {_shortened(settings[key].value)}: {_accepted(detail)}"
        elif detail["type"] != "default_factory_not_called":
            yield _accepted(detail)


def _accepted(detail: ErrorDetails) -> str:
    if detail["type"].startswith("byte_size"):
        return "must be a number of bytes or a text such as 256MiB"
    return detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
