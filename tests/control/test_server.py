import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry.cache.errors import ConfigError
from kvferry.transfer.control.directory import Directory
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.control.wire import open_channel
from kvferry.v1.inference_pb2 import GenerateRequest
from kvferry.v1.inference_pb2_grpc import InferenceStub
from tests.control.worlds import run

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_follows_set_serving() -> None:
    async def test() -> None:
        server = ControlServer("127.0.0.1:0", directory=Directory())
        await server.start()
        async with open_channel(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def states() -> list[int]:
                names = ("", "kvferry.v1.Directory")
                return [(await stub.Check(health_pb2.HealthCheckRequest(service=n), timeout=5)).status for n in names]

            assert await states() == [NOT_SERVING] * 2
            await server.set_serving(True)
            assert await states() == [SERVING] * 2
            await server.set_serving(False)
            assert await states() == [NOT_SERVING] * 2
        await server.stop()

    run(test)


def test_reflection_lists_the_services_given() -> None:
    async def test() -> None:
        server = ControlServer("localhost:0", directory=Directory())
        await server.start()
        async with open_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]), timeout=5)]
        await server.stop()
        assert [service.name for service in answers[0].list_services_response.service] == [
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "kvferry.v1.Directory",
        ]

    run(test)


def test_service_not_given_is_unimplemented() -> None:
    async def test() -> None:
        server = ControlServer("127.0.0.1:0", directory=Directory())
        await server.start()
        async with open_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await InferenceStub(channel).Generate(GenerateRequest(), timeout=5).read()
        await server.stop()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(test)


def test_port_in_use_is_one_clear_line(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        server = ControlServer("127.0.0.1:0")
        await server.start()
        second = ControlServer(server.address)
        with pytest.raises(ConfigError, match=f"cannot listen on {server.address}: Address already in use") as caught:
            await second.start()
        assert "\n" not in str(caught.value)
        await second.stop()
        await server.stop()

    run(test)
    assert capfd.readouterr().err == ""


def test_stop_frees_the_port_and_may_be_repeated() -> None:
    async def test() -> None:
        server = ControlServer("127.0.0.1:0")
        await server.start()
        port = int(server.address.rpartition(":")[2])
        await server.stop()
        await server.stop()
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
            assert free.getsockname()[1] == port

    run(test)


def test_address_is_known_only_after_start() -> None:
    async def test() -> None:
        server = ControlServer("127.0.0.1:0")
        with pytest.raises(ConfigError, match="not started"):
            _ = server.address
        await server.stop()

    run(test)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "worker-7:50051", "192.0.2.1:0"])
def test_plain_text_beyond_loopback_is_refused(address: str) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="without encryption"):
            ControlServer(address)
        with pytest.raises(ConfigError, match="without encryption"):
            open_channel(address)
        await open_channel(address, allow_insecure=True).close()

    run(test)


def test_allow_insecure_listens_on_every_interface() -> None:
    async def test() -> None:
        server = ControlServer("0.0.0.0:0", allow_insecure=True)
        await server.start()
        assert server.address.startswith("0.0.0.0:")
        await server.stop()

    run(test)
