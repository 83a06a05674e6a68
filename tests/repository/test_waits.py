"""Every wait has a deadline, or is named here with the reason why it needs none of its own."""

import ast
from pathlib import Path

import pytest

from tests.repository.sources import ROOT
from tests.repository.waits import Wait, unbounded_waits

FOLDERS = ("cache", "transfer", "deploy")

_CLIENT, _LINK, _NETWORK = "transfer/control/client.py", "transfer/control/link.py", "transfer/control/network.py"
_PARSING, _SERVER = "transfer/control/parsing.py", "transfer/control/server.py"
_WORKER, _SIDES = "deploy/worker.py", "deploy/side_by_side.py"

ALLOWED: dict[str, list[Wait]] = {
    "the call was given a timeout when it was made": [
        Wait(_CLIENT, "InferenceClient.generate", "stream"),
        Wait(_CLIENT, "InferenceClient.decode", "stream"),
        Wait(_SIDES, "_first", "events"),
        Wait(_SIDES, "_next", "step"),
        Wait(_SIDES, "_one_of", "asyncio.wait({step, reply}, return_when=asyncio.FIRST_COMPLETED)"),
        Wait(_SIDES, "side_by_side", "reply"),
    ],
    "the caller gives up at its own deadline or goes away, which the library tells by cancelling this": [
        Wait(_PARSING, "_of_one.answer", "behaviour(request, context)"),
        Wait(_PARSING, "_of_stream.answer", "behaviour(_each_parsed(requests), context)"),
        Wait("deploy/streams.py", "EventStream.events", "self._queue.get()"),
    ],
    "a channel is open as long as both workers live; keepalive ends it when the peer is silent": [
        Wait(_LINK, "_envelopes", "call.read()"),
        Wait(_LINK, "_first_to_end", "asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)"),
        Wait(_LINK, "_first_to_end", "listening"),
        Wait(_NETWORK, "PeerNetwork._listen", "inbound"),
        Wait(_PARSING, "_each_parsed", "requests"),
        Wait("transfer/control/servicers.py", "_envelopes", "requests"),
        Wait("transfer/control/stream.py", "Stream.outbound", "self._news.wait()"),
    ],
    "the lock is held only around waits that have deadlines": [
        Wait(_NETWORK, "PeerNetwork.connect", "self._changing"),
        Wait(_NETWORK, "PeerNetwork.update", "self._changing"),
        Wait(_NETWORK, "PeerNetwork.disconnect", "self._changing"),
        Wait(_NETWORK, "PeerNetwork.close", "self._changing"),
    ],
    "the task is done: this fetches its result or raises its error": [
        Wait(_LINK, "_first_to_end", "speaking.result()"),
        Wait(_NETWORK, "PeerNetwork.channel", "listening.result()"),
        Wait(_WORKER, "_first_of", "task.result()"),
    ],
    "the library does this without waiting for anybody": [
        Wait(
            _LINK,
            "Link._session",
            "open_channel(self.entry.endpoint, allow_insecure=owner.allow_insecure, "
            "keepalive_seconds=owner.keepalive_seconds)",
        ),
        Wait(_PARSING, "RefuseMalformed.intercept_service", "continuation(handler_call_details)"),
        Wait(_SERVER, "ControlServer.set_serving", "self._health.set(name, status)"),
        Wait(_SERVER, "ControlServer.start", "self._server.start()"),
        Wait(_SERVER, "ControlServer.stop", "self._health.enter_graceful_shutdown()"),
        Wait("deploy/demo.py", "_table", "captured.get()"),
    ],
    "the time is an argument": [
        Wait(_SERVER, "ControlServer.stop", "self._server.stop(grace_seconds)"),
        Wait(_WORKER, "Worker.stop", "asyncio.to_thread(self._parts.loop.stop, STOP_SECONDS)"),
        Wait(_WORKER, "Worker.stop", "asyncio.to_thread(self._transceiver.close, STOP_SECONDS)"),
    ],
    "pairing has the deadline of those who ask for it: PeerNetwork.register and Link._pair": [
        Wait(_WORKER, "Worker._pair", "asyncio.wrap_future(self._transceiver.pair(info))"),
    ],
    "a process serves until it is told to stop": [
        Wait("deploy/frontend.py", "run_frontend", "stop.wait()"),
        Wait("deploy/process.py", "serve.run", "main(stop)"),
        Wait(_WORKER, "_first_of", "asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)"),
        Wait(_WORKER, "_serve", "asyncio.Event().wait()"),
        Wait(_WORKER, "run_worker", "stop.wait()"),
        Wait(_WORKER, "run_worker", "worker.failed.wait()"),
    ],
}


def test_every_wait_has_a_deadline_or_a_reason() -> None:
    allowed = {wait for waits in ALLOWED.values() for wait in waits}
    assert [wait for wait in unbounded_waits(ROOT, FOLDERS) if wait not in allowed] == []


def test_no_reason_is_given_for_a_wait_that_is_gone() -> None:
    found = set(unbounded_waits(ROOT, FOLDERS))
    assert [wait for waits in ALLOWED.values() for wait in waits if wait not in found] == []


@pytest.mark.parametrize(
    "body, found",
    [
        ("await thing.read()", ["thing.read()"]),
        ("await thing.read(timeout=3)", []),
        ("await own()", []),
        ("await asyncio.sleep(delay)", []),
        ("async with asyncio.timeout(3):\n        await thing.read()", []),
        ("async with asyncio.timeout(3):\n        pass\n    await thing.read()", ["thing.read()"]),
        (
            "async with asyncio.timeout(3):\n        async def inner():\n            await thing.read()",
            ["thing.read()"],
        ),
        ("async for item in thing:\n        pass", ["thing"]),
        ("async for item in own():\n        pass", []),
        ("async with aclosing(own()) as items:\n        async for item in items:\n            pass", []),
        ("async with lock:\n        pass", ["lock"]),
        ("thread.join()", ["thread.join()"]),
        ("thread.join(3)", []),
        ("future.result()", ["future.result()"]),
        ("event.wait(timeout=3)", []),
    ],
)
def test_waits_are_found_and_bounded_ones_are_not(tmp_path: Path, body: str, found: list[str]) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    (folder / "module.py").write_text(f"async def own():\n    pass\n\nasync def waiting():\n    {body}\n")
    waits = unbounded_waits(tmp_path, ("some",))
    assert [wait.expression for wait in waits] == found
    assert all(ast.parse(wait.expression) for wait in waits)
