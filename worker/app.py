"""Starts a worker inside the running event loop: the process's own, or a launcher's."""

import asyncio
import logging
from typing import Final

from seamline.worker.v1 import worker_pb2, worker_pb2_grpc
from services.server import GrpcServer
from worker.compute_thread import ComputeThread
from worker.cpu_topology import default_num_threads
from worker.device import open_device
from worker.servicer import WorkerServicer
from worker.settings import WorkerSettings
from worker.worker import Worker

log = logging.getLogger(__name__)

SERVICE_NAME: Final = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_GRACE_S: Final = 2.0


class RunningWorker:
    """A started worker."""

    def __init__(self, server: GrpcServer, compute: ComputeThread) -> None:
        self._server = server
        self._compute = compute
        self._stopped = asyncio.Event()

    @property
    def address(self) -> str:
        """Where it listens, with the port that was chosen."""
        return self._server.address

    async def wait(self) -> None:
        """Returns once it has been stopped."""
        await self._stopped.wait()

    async def stop(self) -> None:
        """Ends running calls after a short grace, then the compute thread after its last job."""
        await self._server.stop(_GRACE_S)
        self._compute.stop()
        await asyncio.to_thread(self._compute.join, _GRACE_S)
        self._stopped.set()


async def start_worker(settings: WorkerSettings) -> RunningWorker:
    """Makes a worker listen; it serves as soon as it can accept Attach.

    Errors: InvalidArgumentError for an unknown device, UnavailableError when the address is taken.
    """
    num_threads = settings.num_threads or default_num_threads()
    device = open_device(settings.device, num_threads=num_threads)
    worker = Worker(device, settings.cache_dir.expanduser())
    compute = ComputeThread()
    server = GrpcServer(settings.listen_address, services=[SERVICE_NAME])
    servicer = WorkerServicer(worker, compute)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
    try:
        await server.start()
        await server.set_serving(SERVICE_NAME, True)
    except BaseException:
        compute.stop()
        raise
    log.info(
        "worker listens",
        extra={"address": server.address, "device": device.name, "num_threads": num_threads},
    )
    return RunningWorker(server, compute)
