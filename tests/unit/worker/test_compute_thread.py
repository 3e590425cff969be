"""The compute thread: order, results, failures."""

import asyncio
import threading
from functools import partial

import pytest

from worker.compute_thread import ComputeThread


async def test_jobs_run_in_order_on_one_other_thread() -> None:
    compute = ComputeThread()
    seen: list[int] = []

    def job(number: int) -> int:
        seen.append(number)
        return threading.get_ident()

    threads = await asyncio.gather(*(compute.call(partial(job, i)) for i in range(20)))
    assert seen == list(range(20))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    compute.stop()


async def test_a_failed_job_raises_for_its_caller_and_the_thread_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compute = ComputeThread()

    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await compute.call(fail)
    compute.post(fail)
    assert await compute.call(lambda: 7) == 7
    assert "a job of the compute thread failed" in caplog.text
    compute.stop()


async def test_a_caller_that_left_harms_nobody() -> None:
    compute = ComputeThread()
    gate = threading.Event()
    task = asyncio.create_task(compute.call(gate.wait))
    await asyncio.sleep(0)
    task.cancel()
    gate.set()
    assert await compute.call(lambda: 7) == 7
    compute.stop()
