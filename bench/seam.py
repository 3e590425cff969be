"""What the seam between enginecore and worker costs: microseconds per step, without any model.

    python -m bench.seam

One scheduler drives decode steps of 1, 64 and 256 requests through two executors in turn: the real
one (protobuf over a Unix socket to a worker process whose compute thread answers at once) and one
that hands the step to a compute thread of its own process. `out` is from before `schedule()` until
the compute thread has the step, `trip` until its result is back in the engine's task. The rest of
the engine is the same.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer
import uvloop

from bench.percentiles import percentile
from enginecore.executor import GrpcExecutor
from enginecore.kv_cache_config import CacheOptions, plan_kv_cache
from enginecore.kv_cache_manager import KVCacheManager
from enginecore.request import Request, StopRules
from enginecore.scheduler import Scheduler
from enginecore.scheduler_config import SchedulerConfig
from enginecore.scheduler_output import ModelRunnerOutput, SchedulerOutput, StepTimings
from enginecore.worker_link import LoadOptions
from seamline.common.v1 import sampling_pb2
from services.channel import Backoff
from services.errors import FailedPreconditionError, UnavailableError
from worker.compute_thread import ComputeThread

BATCH_SIZES: Final = (1, 64, 256)
PROMPT_LEN: Final = 512
WARM_UP_STEPS: Final = 200
NUM_BLOCKS: Final = 60_000
BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 8_192
MAX_NUM_SEQS: Final = 256
MAX_NUM_BATCHED_TOKENS: Final = MAX_NUM_SEQS * PROMPT_LEN

Execute = Callable[[SchedulerOutput], Awaitable[ModelRunnerOutput]]


@dataclass(slots=True)
class Trips:
    """Microseconds of each measured step."""

    out_us: list[float] = field(default_factory=list)
    trip_us: list[float] = field(default_factory=list)


class InProcess:
    """An executor without a wire: a compute thread of this process."""

    def __init__(self) -> None:
        self._compute = ComputeThread()

    async def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Hands the step over as it is."""
        return await self._compute.call(lambda: _answer(output))


def _answer(output: SchedulerOutput) -> ModelRunnerOutput:
    started_ns = time.monotonic_ns()
    handles = [new.handle for new in output.scheduled_new_reqs]
    handles += output.scheduled_cached_reqs.handles
    ones = [1] * len(handles)
    timings = StepTimings(started_ns=started_ns)
    return ModelRunnerOutput(output.step, handles, ones, ones, timings=timings)


def _scheduler(batch_size: int) -> Scheduler:
    config = SchedulerConfig(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN)
    scheduler = Scheduler(config, KVCacheManager(NUM_BLOCKS, BLOCK_SIZE))
    scheduler.add_requests(
        [
            Request(
                request_id=f"request-{index}",
                handle=index + 1,
                prompt_token_ids=[index] * PROMPT_LEN,
                stop_rules=StopRules(),
                sampling_params=sampling_pb2.SamplingParams(temperature=0, seed=1),
            )
            for index in range(batch_size)
        ]
    )
    return scheduler


async def _measure(execute: Execute, batch_size: int, num_steps: int) -> Trips:
    """Runs decode steps of `batch_size` requests."""
    scheduler = _scheduler(batch_size)
    trips = Trips()
    for index in range(WARM_UP_STEPS + num_steps):
        begun_ns = time.monotonic_ns()
        scheduled = scheduler.schedule()
        result = await execute(scheduled)
        back_ns = time.monotonic_ns()
        scheduler.update_from_output(scheduled, result)
        if index >= WARM_UP_STEPS:
            trips.out_us.append((result.timings.started_ns - begun_ns) / 1e3)
            trips.trip_us.append((back_ns - begun_ns) / 1e3)
    return trips


async def _connect(address: str) -> GrpcExecutor:
    """Attaches to the worker and opens its step stream."""
    options = LoadOptions(
        model="null",
        dtype="float32",
        load_format="dummy",
        revision=None,
        seed=0,
        gpu_memory_utilization=0.9,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        enforce_eager=True,
    )
    executor = GrpcExecutor([address], "bench", options)
    backoff = Backoff()
    while True:
        try:
            facts = await executor.load(lambda _: None)
        except (UnavailableError, FailedPreconditionError):
            # not there yet, or its last lease is from before the clock was set back
            await asyncio.sleep(backoff.next_delay_s())
            continue
        cache = CacheOptions(BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS)
        await executor.initialize(plan_kv_cache(facts, cache))
        return executor


async def _compare(address: str, num_steps: int, rounds: int) -> None:
    in_process = InProcess()
    typer.echo(f"{'batch':>5} {'round':>5} {'executor':>10}  out us p50/p99   trip us p50/p99")
    for batch_size in BATCH_SIZES:
        for index in range(rounds):
            # a new lease each time: every stream begins with an empty batch
            over_wire = await _connect(address)
            contenders: dict[str, Execute] = {
                "gRPC": over_wire.execute,
                "in process": in_process.execute,
            }
            for name, execute in contenders.items():
                trips = await _measure(execute, batch_size, num_steps)
                typer.echo(f"{batch_size:>5} {index + 1:>5} {name:>10}  {_row(trips)}")
            await over_wire.close()


def _row(trips: Trips) -> str:
    columns = (trips.out_us, trips.trip_us)
    texts = (f"{percentile(c, 0.5):.0f} / {percentile(c, 0.99):.0f}" for c in columns)
    return "".join(f"{text:>14}" for text in texts)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Measured steps per figure")] = 1_000,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions")] = 3,
) -> None:
    """Measures both executors in turn."""
    with tempfile.TemporaryDirectory(prefix="seam-") as folder:
        address = f"unix:{Path(folder) / 'worker.sock'}"
        worker = subprocess.Popen([sys.executable, "-m", "bench.null_worker", address])
        try:
            uvloop.run(_compare(address, steps, rounds))
        finally:
            worker.terminate()
            worker.wait()


if __name__ == "__main__":
    typer.run(main)
