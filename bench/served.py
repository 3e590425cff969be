"""Served benchmark: what a client of the whole stack sees, and what each process pays for it.

python -m bench.served                       the four standard workloads on a stack of its own
python -m bench.served --workload B --rounds 3
python -m bench.served --url http://127.0.0.1:8000 --concurrency 4 --input-len 256 --output-len 64
"""

import asyncio
import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Final

import httpx
import typer

from bench.launched_stack import LaunchedStack, ProcessCost
from bench.load import WORKLOADS, LoadResult, Workload, run_load
from bench.percentiles import percentile

WARM_UP: Final = Workload(num_prompts=2, concurrency=2, input_len=64, output_len=8, seed=1_000_000)
MIB: Final = 2**20


def main(
    url: Annotated[str, typer.Option(help="A running server; unset: start a stack")] = "",
    model: Annotated[str, typer.Option(help="Served model; unset: the first one")] = "",
    api_key: Annotated[str, typer.Option(help="Bearer token", envvar="OPENAI_API_KEY")] = "",
    workload: Annotated[str, typer.Option(help="Of A, B, C, D; unset: all")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of each workload")] = 1,
    concurrency: Annotated[int, typer.Option(help="A workload of your own: clients")] = 0,
    num_prompts: Annotated[int, typer.Option(help="its requests")] = 16,
    input_len: Annotated[int, typer.Option(help="its prompt tokens")] = 128,
    output_len: Annotated[int, typer.Option(help="its output tokens")] = 64,
    prefix_len: Annotated[int, typer.Option(help="its shared prefix tokens")] = 0,
    seed: Annotated[int, typer.Option(help="its prompts' seed")] = 0,
    serve_flags: Annotated[str, typer.Option(help="Flags for the stack it starts")] = "",
) -> None:
    """Measures output tokens per second, TTFT, ITL, and CPU and memory per process."""
    loads = {name: load for name, load in WORKLOADS.items() if workload in ("", name)}
    if concurrency:
        own = Workload(num_prompts, concurrency, input_len, output_len, prefix_len, seed)
        loads = {"own": own}
    with _server(url, serve_flags) as (base_url, stack):
        name = model or httpx.get(f"{base_url}/v1/models").json()["data"][0]["id"]
        target = Target(base_url, name, api_key, stack)
        target.run(WARM_UP)
        _header(stack)
        for label, load in loads.items():
            _measure(label, load, rounds, target)


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test, and its processes when they are ours."""

    base_url: str
    model: str
    api_key: str
    stack: LaunchedStack | None

    def run(self, load: Workload) -> LoadResult:
        """Runs a workload on it."""
        return asyncio.run(run_load(self.base_url, self.model, load, self.api_key))

    def costs(self) -> dict[str, ProcessCost]:
        """What its processes took so far; nothing when they are not ours."""
        return self.stack.costs() if self.stack else {}


@contextlib.contextmanager
def _server(url: str, flags: str) -> Iterator[tuple[str, LaunchedStack | None]]:
    if url:
        yield url.rstrip("/"), None
        return
    with LaunchedStack(flags.split(), env={"SEAMLINE_LOG_LEVEL": "warning"}) as stack:
        yield stack.base_url, stack


def _header(stack: LaunchedStack | None) -> None:
    if stack:
        typer.echo(f"ready after {stack.ready_after_s:.1f} s")
    typer.echo(
        f"{'load':>4} {'round':>5} {'tok/s':>7} {'TTFT ms p50/p99':>16} {'ITL ms p50/p99/max':>20}"
        "  CPU s: gateway enginecore worker"
    )


def _measure(label: str, load: Workload, rounds: int, target: Target) -> None:
    rates = []
    for index in range(rounds):
        before = target.costs()
        # other prompts each round, so that no round profits from the previous one's cached prefixes
        result = target.run(replace(load, seed=load.seed + index))
        rates.append(result.num_output_tokens / result.duration_s)
        typer.echo(_row(label, index, result, before, target.costs()))
    if rounds > 1:
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        typer.echo(f"{label:>4} median {statistics.median(rates):.1f} tok/s ({spread})")
    if target.stack:
        _memory(target.stack)


def _row(
    label: str,
    index: int,
    result: LoadResult,
    before: dict[str, ProcessCost],
    after: dict[str, ProcessCost],
) -> str:
    rate = result.num_output_tokens / result.duration_s
    ttft = "/".join(f"{percentile(result.ttft_s, p) * 1e3:.0f}" for p in (0.5, 0.99))
    itl = "/".join(f"{percentile(result.itl_s, p) * 1e3:.1f}" for p in (0.5, 0.99, 1.0))
    cpu = " ".join(f"{after[name].cpu_s - before[name].cpu_s:.2f}" for name in before)
    return f"{label:>4} {index + 1:>5} {rate:>7.1f} {ttft:>16} {itl:>20}  {cpu}"


def _memory(stack: LaunchedStack) -> None:
    resident = {name: cost.resident_bytes / MIB for name, cost in stack.costs().items()}
    parts = ", ".join(f"{name} {mib:.0f}" for name, mib in resident.items())
    typer.echo(f"     resident MiB: {parts}; together {sum(resident.values()):.0f}")


if __name__ == "__main__":
    typer.run(main)
