"""Who may import whom. The reasons are in docs/decisions and at the top of each table here."""

import ast

import pytest

from tests.repository.sources import GENERATED, Import, Source, imports, inside, sources, walk

# Arrows run one way: deploy -> transfer -> cache.
FORBIDDEN_ARROWS = {
    "kvferry.cache": ("kvferry.transfer", "kvferry.deploy", GENERATED),
    "kvferry.transfer": ("kvferry.deploy",),
    "kvferry.deploy": (GENERATED,),
}

# A library is called in one place, where its errors become ours.
HOMES = {
    "grpc": ("kvferry.transfer.control",),
    "grpc_health": ("kvferry.transfer.control",),
    "grpc_reflection": ("kvferry.transfer.control",),
    "google": ("kvferry.transfer.control",),
    GENERATED: ("kvferry.transfer.control",),
    "nixl": ("kvferry.transfer.transport.nixl",),
    "nixl_cu12": ("kvferry.transfer.transport.nixl",),
    "nixl_cu13": ("kvferry.transfer.transport.nixl",),
    "ucxx": ("kvferry.transfer.transport.ucx",),
    "transformers": ("kvferry.transfer.engines",),
}

# What the transfer side sees of the cache: a frozen page table and what it is made of (spec names its dtypes).
VISIBLE_TO_TRANSFER = (
    "kvferry.cache.errors",
    "kvferry.cache.ids",
    "kvferry.cache.layout",
    "kvferry.cache.lifecycle",
    "kvferry.cache.page_table",
    "kvferry.cache.spec",
)
SEES_ALL_OF_CACHE = ("kvferry.transfer.engines", "kvferry.transfer.transceiver")

# No I/O, threads, clock, tensors or transport: time is an argument, and a test needs nothing but values.
PURE = (
    "kvferry.cache.cursors",
    "kvferry.cache.errors",
    "kvferry.cache.ids",
    "kvferry.cache.layout",
    "kvferry.cache.lifecycle",
    "kvferry.cache.page_table",
    "kvferry.cache.quota",
    "kvferry.cache.sizing",
    "kvferry.cache.spec",
    "kvferry.cache.workload",
    "kvferry.transfer.budget",
    "kvferry.transfer.compatibility",
    "kvferry.transfer.ended",
    "kvferry.transfer.fencing",
    "kvferry.transfer.inference",
    "kvferry.transfer.leases",
    "kvferry.transfer.notice",
    "kvferry.transfer.outcomes",
    "kvferry.transfer.plan",
    "kvferry.transfer.session",
    "kvferry.transfer.types",
)
IMPURE_LIBRARIES = (
    "asyncio",
    "concurrent",
    "datetime",
    "grpc",
    "io",
    "multiprocessing",
    "nixl",
    "os",
    "pathlib",
    "queue",
    "random",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "torch",
    "transformers",
    "ucxx",
)

# (module, function): why its import cannot stand at the top.
_SLOW = "help and mistakes in a command line are answered without loading torch"
IMPORTS_IN_FUNCTIONS = {
    ("kvferry.deploy.cli", "demo"): _SLOW,
    ("kvferry.deploy.cli", "worker"): _SLOW,
    ("kvferry.deploy.cli", "frontend"): _SLOW,
}


def named(cases: tuple[Source, ...]) -> list[object]:
    return [pytest.param(source, id=source.place) for source in cases]


def places(source: Source, found: list[Import]) -> list[str]:
    return [f"{source.place}:{item.line} imports {item.module}" for item in found]


@pytest.mark.parametrize("source", named(sources()))
def test_arrows_run_from_deploy_to_transfer_to_cache(source: Source) -> None:
    forbidden = next(targets for package, targets in FORBIDDEN_ARROWS.items() if inside(source.module, (package,)))

    assert not places(source, [item for item in imports(source) if inside(item.module, forbidden)])


@pytest.mark.parametrize("source", named(sources()))
def test_library_is_imported_only_at_its_home(source: Source) -> None:
    away = [library for library, homes in HOMES.items() if not inside(source.module, homes)]

    assert not places(source, [item for item in imports(source) if inside(item.module, tuple(away))])


@pytest.mark.parametrize("source", named(sources()))
def test_transfer_sees_the_cache_through_its_page_table(source: Source) -> None:
    seen = [item for item in imports(source) if inside(item.module, ("kvferry.cache",))]
    restricted = inside(source.module, ("kvferry.transfer",)) and not inside(source.module, SEES_ALL_OF_CACHE)

    assert not restricted or not places(source, [item for item in seen if not inside(item.module, VISIBLE_TO_TRANSFER)])


@pytest.mark.parametrize("module", PURE)
def test_pure_module_imports_nothing_impure(module: str) -> None:
    source = next(source for source in sources() if source.module == module)
    found = imports(source)

    assert not places(source, [item for item in found if inside(item.module, IMPURE_LIBRARIES)])
    assert not places(source, [item for item in found if inside(item.module, ("kvferry",)) and item.module not in PURE])


@pytest.mark.parametrize("source", named(sources()))
def test_imports_stand_at_the_top(source: Source) -> None:
    hidden = [item for item in imports(source) if item.function]

    assert not places(source, [item for item in hidden if (source.module, item.function) not in IMPORTS_IN_FUNCTIONS])


def test_allowed_imports_in_functions_all_exist() -> None:
    used = {(source.module, item.function) for source in sources() for item in imports(source) if item.function}

    assert set(IMPORTS_IN_FUNCTIONS) <= used


def test_walk_finds_imports_under_conditions_and_in_functions() -> None:
    tree = ast.parse("if True:\n  import a.b\ndef f():\n  def g():\n    from c import d\n")

    assert [tuple(item) for item in walk(tree)] == [("a.b", 2, ""), ("c", 5, "g")]
