"""The gRPC server of one process: the services it is given, standard health, reflection."""

import socket

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from kvferry.cache.errors import ConfigError
from kvferry.transfer.control import servicers
from kvferry.transfer.control.addresses import Address, checked_address
from kvferry.transfer.control.handlers import DirectoryHandler, InferenceHandler, PeerHandler, TransferHandler
from kvferry.transfer.control.parsing import RefuseMalformed
from kvferry.transfer.control.wire import KEEPALIVE_SECONDS, server_options
from kvferry.v1 import directory_pb2_grpc, inference_pb2_grpc, peer_pb2_grpc, transfer_pb2_grpc

WHOLE_SERVER = ""
"""The health service's name for everything at once."""


class ControlServer:
    """Serves the handlers it is given on one address.

    Health answers NOT_SERVING until `set_serving(True)`: ready means that this process can do its work.
    Concurrency: made, started and stopped on one running loop, which also runs the handlers.
    """

    def __init__(
        self,
        address: str,
        *,
        directory: DirectoryHandler | None = None,
        peer: PeerHandler | None = None,
        transfer: TransferHandler | None = None,
        inference: InferenceHandler | None = None,
        allow_insecure: bool = False,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
    ) -> None:
        self._wished = checked_address(address, purpose="listen on", allow_insecure=allow_insecure)
        self._server = grpc.aio.server(interceptors=[RefuseMalformed()], options=server_options(keepalive_seconds))
        self._health = health.aio.HealthServicer()
        self._services = [WHOLE_SERVER]
        self._bound: Address | None = None
        self._add(directory, peer, transfer, inference)

    async def start(self) -> None:
        """Listen and answer.

        Raises: ConfigError: the address cannot be used, e.g. because the port is taken.
        """
        self._bound = self._wished._replace(port=self._bind())
        await self.set_serving(False)
        await self._server.start()

    @property
    def address(self) -> str:
        """HOST:PORT really listened on. Valid while started."""
        if self._bound is None:
            raise ConfigError(f"the server for {self._wished} is not started: it has no address yet")
        return str(self._bound)

    async def set_serving(self, serving: bool) -> None:
        """What the health service says from now on."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._services:
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float = 2.0) -> None:
        """Say not serving, refuse new calls, let running ones end within the grace, then cancel them. Idempotent.

        Watches and channels end when the directory and the network behind them are closed; close those first.
        """
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)

    def _add(
        self,
        directory: DirectoryHandler | None,
        peer: PeerHandler | None,
        transfer: TransferHandler | None,
        inference: InferenceHandler | None,
    ) -> None:
        server = self._server
        if directory is not None:
            directory_pb2_grpc.add_DirectoryServicer_to_server(servicers.DirectoryServicer(directory), server)
            self._services.append("kvferry.v1.Directory")
        if peer is not None:
            peer_pb2_grpc.add_PeerServicer_to_server(servicers.PeerServicer(peer), server)
            self._services.append("kvferry.v1.Peer")
        if transfer is not None:
            transfer_pb2_grpc.add_TransferServicer_to_server(servicers.TransferServicer(transfer), server)
            self._services.append("kvferry.v1.Transfer")
        if inference is not None:
            inference_pb2_grpc.add_InferenceServicer_to_server(servicers.InferenceServicer(inference), server)
            self._services.append("kvferry.v1.Inference")
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection([*self._services[1:], health.SERVICE_NAME, reflection.SERVICE_NAME], server)

    def _bind(self) -> int:
        probe(self._wished)
        try:
            port = self._server.add_insecure_port(str(self._wished))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {self._wished}: {error}") from error
        if port == 0:
            raise ConfigError(f"cannot listen on {self._wished}: the library gave no reason")
        return port


def probe(address: Address) -> None:
    """Bind and let go: the system's reason is plainer than the library's, which also prints a line of its own.

    Raises: ConfigError: the address cannot be listened on.
    """
    if not address.is_literal:
        return
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}; choose another port, or 0 to let the system choose"
            ) from error
