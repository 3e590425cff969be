"""`python -m worker`: one device as a service."""

import os

from services.process import RunningService, run_service
from worker.cpu_topology import default_num_threads
from worker.settings import WorkerSettings


async def _start(settings: WorkerSettings) -> RunningService:
    # read by OpenMP when torch is imported: spinning threads would starve the other processes
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(settings.num_threads or default_num_threads())
    from worker.app import start_worker

    return await start_worker(settings)


if __name__ == "__main__":
    run_service("worker", WorkerSettings, _start)
