"""`python -m worker`: one device as a service."""

from services.process import RunningService, run_service
from worker.cpu_topology import configure_openmp
from worker.settings import WorkerSettings


async def _start(settings: WorkerSettings) -> RunningService:
    configure_openmp(settings.num_threads)
    from worker.app import start_worker

    return await start_worker(settings)


if __name__ == "__main__":
    run_service("worker", WorkerSettings, _start)
