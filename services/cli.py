"""The `seamline` command."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from services import embedded_model
from services.errors import ServiceError

app = typer.Typer(
    name="seamline",
    help="An LLM serving engine cut along its process boundaries.",
    no_args_is_help=True,
    add_completion=False,
)
DEFAULT_CACHE_DIR = Path("~/.cache/seamline").expanduser()
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=PASS_ON)
def serve(context: typer.Context) -> None:
    """Run gateway, enginecore and worker on this machine (--help: all flags)."""
    # imported here: the other commands need none of the services
    from services.stack.launcher import serve as run

    sys.exit(run(context.args))


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure a running server, or a stack of its own (--help: all options)."""
    # imported here: it needs the development tools
    from bench.served import main as measure

    sys.argv = ["seamline bench", *context.args]
    typer.run(measure)


@app.command("fetch-model")
def fetch_model(
    cache_dir: Annotated[
        Path, typer.Option(envvar="SEAMLINE_CACHE_DIR", help="Where models are kept")
    ] = DEFAULT_CACHE_DIR,
) -> None:
    """Download the embedded default model, unless it is there."""
    try:
        typer.echo(embedded_model.fetch(cache_dir))
    except ServiceError as error:
        typer.echo(f"seamline: {error.message}", err=True)
        sys.exit(1)


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
