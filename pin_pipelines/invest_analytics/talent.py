"""The Talent API over HTTP: the adapter of ``PriceSource``.

An attempt is a whole page: connection, headers, body and JSON. urllib3's own retries end where the body begins, and
they would take a truncated page for a good one.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Self
from urllib.parse import urlencode, urlsplit
from uuid import UUID

import requests
from requests.auth import AuthBase

from pin_pipelines.invest_analytics.snapshots import RawItem, SourceContractError, SourceError
from pin_pipelines.invest_analytics.transport import AskingAdapter

PRICES_PATH = "/api/v1/property-object-prices"

CONNECT_TIMEOUT_SECONDS = 5.0
READ_TIMEOUT_SECONDS = 30.0
PAGE_DEADLINE_SECONDS = 60.0
MAX_ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
MAX_RETRY_AFTER_SECONDS = 60.0
# A page of 1,000 rows is about half a megabyte.
MAX_BODY_BYTES = 32 * 2**20

_CHUNK_BYTES = 65536
_SHOWN_CHARACTERS = 300
_WHOLE_SECONDS = re.compile(r"[0-9]+")
# What may pass by itself; any other refusal will be the same in a minute.
_BUSY = {408, 429}
_OF_THE_NETWORK = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.ContentDecodingError,
)
_ADVICE = {
    401: "the token is not accepted; check PIN_TALENT_TOKEN",
    403: "the token may not read prices; check PIN_TALENT_TOKEN and what it is allowed to read",
    404: "there is nothing at that address; check PIN_TALENT_BASE_URL and PIN_TALENT_PATH",
}
_OTHER_ADVICE = "check PIN_TALENT_BASE_URL and PIN_TALENT_PATH, and whether the API still has the same contract"


class SourceStoppedError(SourceError):
    """The page was given up since the run is to stop; nothing is wrong with the source."""


@dataclass(frozen=True)
class Limits:
    """How long, how often and how much; the defaults are for production.

    Attributes:
        connect_seconds: to connect.
        read_seconds: until the network brings anything.
        page_seconds: from the request to the last byte of the page, however steadily they come.
        body_bytes: of a page, unpacked.
        attempts: at a page, the first included.
        first_pause_seconds: the longest pause after the first attempt. It doubles with each further one; a pause is
            anything from nothing to that, by chance.
        longest_pause_seconds: where the doubling ends.
        retry_after_seconds: as long as a server's Retry-After is obeyed.
    """

    connect_seconds: float = CONNECT_TIMEOUT_SECONDS
    read_seconds: float = READ_TIMEOUT_SECONDS
    page_seconds: float = PAGE_DEADLINE_SECONDS
    body_bytes: int = MAX_BODY_BYTES
    attempts: int = MAX_ATTEMPTS
    first_pause_seconds: float = FIRST_PAUSE_SECONDS
    longest_pause_seconds: float = LONGEST_PAUSE_SECONDS
    retry_after_seconds: float = MAX_RETRY_AFTER_SECONDS


PRODUCTION = Limits()


class TalentClient:
    """Reads pages of prices; a context manager. From one thread at a time."""

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        path: str = PRICES_PATH,
        stop: threading.Event | None = None,
        logger: logging.Logger | None = None,
        limits: Limits = PRODUCTION,
        sleep: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Connect to nothing yet.

        Args:
            base_url: scheme, host, port and perhaps a path; no user, query or fragment (``Settings`` sees to it).
            token: the bearer token. It is in no message, log line or ``repr``.
            path: of the pages, after ``base_url``.
            stop: when set, a page is given up at its next read or pause.
            logger: gets a warning for each attempt that is followed by another.
            limits: see there.
            sleep: pauses before another attempt; by default until ``stop`` is set.
            clock: monotonic seconds, for the deadline of a page.
            now: the time of day (aware), for a Retry-After that names one.
        """
        self._url = base_url.rstrip("/") + path
        self._bearer = _Bearer(token)
        self._logger = logger or logging.getLogger(__name__)
        self._limits = limits
        self._stop = stop or threading.Event()
        self._sleep = sleep or self._stop.wait
        self._clock = clock
        self._now = now
        self._deadline = 0.0
        self._session = _Session()
        # The settings alone say where the token goes: a proxy named in the environment would be handed it too.
        self._session.trust_env = False
        self._session.auth = self._bearer
        self._session.headers["Accept"] = "application/json"
        adapter = AskingAdapter(self._seconds_to_read)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)

    def __repr__(self) -> str:
        """The client with its address, without its token."""
        return f"TalentClient({self._url!r})"

    def __enter__(self) -> Self:
        """Nothing to open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def fetch(self, *, after: UUID | None, to: UUID | None, take: int) -> Sequence[RawItem]:
        """See ``PriceSource``. Numbers are int or Decimal, exact; what is in the rows is for others to check.

        Raises:
            SourceError: the page cannot be read, after ``Limits.attempts``; or at once, where another attempt would
                come to the same. Its message names the address and what to check.
            SourceContractError: what came is no page.
            SourceStoppedError: ``stop`` was set.
        """
        bounds = {"after": after, "to": to}
        query = {name: str(bound) for name, bound in bounds.items() if bound is not None} | {"take": str(take)}
        for attempt in range(1, self._limits.attempts + 1):
            try:
                return self._read_page(query)
            except _AttemptError as error:
                if attempt == self._limits.attempts:
                    raise SourceError(
                        f"GET {self._url}?{urlencode(query)} failed {attempt} times, at last with: {error}. "
                        "The source is down or cannot be reached; the next run goes on from the checkpoint"
                    ) from None
                self._pause(attempt, error)
        raise AssertionError  # the last attempt returns or raises

    # One attempt

    def _read_page(self, query: Mapping[str, str]) -> list[RawItem]:
        self._deadline = self._clock() + self._limits.page_seconds
        times = (self._limits.connect_seconds, self._limits.read_seconds)
        try:
            with self._session.get(self._url, params=query, stream=True, timeout=times) as response:
                self._check_status(response)
                return self._parse(response, self._read_body(response))
        except _OF_THE_NETWORK as error:
            raise _AttemptError(self._describe(error)) from None
        except requests.RequestException as error:
            raise SourceError(
                f"{self._url} is no address to read from ({self._describe(error)}); check PIN_TALENT_BASE_URL"
            ) from None

    def _seconds_to_read(self) -> float:
        """Leave for one read from the network."""
        if self._stop.is_set():
            raise SourceStoppedError("the page was given up, since the run is to stop")
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        return min(left, self._limits.read_seconds)

    def _check_status(self, response: requests.Response) -> None:
        status = response.status_code
        if status in _BUSY or status >= 500:
            retry_after = self._parse_retry_after(response.headers.get("Retry-After"))
            raise _AttemptError(f"status {status}", retry_after=retry_after)
        if 300 <= status < 400:
            raise SourceError(
                f"{_shown(response)} was answered with status {status}, a redirect to "
                f"{self._clean(_host(response.headers.get('Location', '')))}. It is not followed, since the token "
                "would go with it; check PIN_TALENT_BASE_URL and PIN_TALENT_PATH"
            )
        if status != 200:
            raise SourceError(
                f"{_shown(response)} was answered with status {status}: {_ADVICE.get(status, _OTHER_ADVICE)}"
            )

    def _read_body(self, response: requests.Response) -> bytes:
        chunks, size = [], 0
        for chunk in response.iter_content(_CHUNK_BYTES):
            size += len(chunk)
            if size > self._limits.body_bytes:
                raise SourceError(
                    f"{_shown(response)} was answered with more than {self._limits.body_bytes} bytes, far more than "
                    "such a page has; check PIN_TALENT_PATH, and whether the API still heeds take"
                )
            chunks.append(chunk)
        return b"".join(chunks)

    def _parse(self, response: requests.Response, body: bytes) -> list[RawItem]:
        try:
            page = _parse_json(body)
        except (ValueError, RecursionError) as error:
            # An error page of a gateway, or half an answer: it says 200, and may be gone the next time.
            content_type = response.headers.get("Content-Type", "no content type")
            what = self._clean(f"{content_type}, {len(body)} bytes: {error}")
            raise _AttemptError(f"an answer that is no JSON ({what})") from None
        items = page.get("items") if isinstance(page, dict) else None
        if not isinstance(items, list):
            raise SourceContractError(
                f"{_shown(response)} was answered with JSON that is no page; it must be an object whose items are a "
                "list"
            )
        return items

    # Between two attempts

    def _pause(self, attempt: int, error: _AttemptError) -> None:
        longest = min(self._limits.first_pause_seconds * 2 ** (attempt - 1), self._limits.longest_pause_seconds)
        # From nothing on: clients that failed together must not come back together.
        seconds = max(secrets.SystemRandom().uniform(0, longest), error.retry_after)
        self._logger.warning(
            "a page of the Talent API failed (attempt %d of %d), the next attempt in %.1f s: %s",
            attempt,
            self._limits.attempts,
            seconds,
            error,
        )
        self._sleep(seconds)
        if self._stop.is_set():
            raise SourceStoppedError("the page was given up between two attempts, since the run is to stop") from None

    def _parse_retry_after(self, text: str | None) -> float:
        """Seconds to wait, capped; 0 where the header says nothing that can be obeyed."""
        text = (text or "").strip()
        if _WHOLE_SECONDS.fullmatch(text):
            seconds = float(text)  # as many digits as there may be: int would refuse very many
        else:
            try:
                moment = parsedate_to_datetime(text)
            except (ValueError, OverflowError):
                return 0.0
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - self._now().timestamp()
        return min(max(seconds, 0.0), self._limits.retry_after_seconds)

    # What is said of it

    def _describe(self, error: requests.RequestException) -> str:
        """The first cause, in one line: what requests and urllib3 wrap round it says less in more words."""
        if isinstance(error, requests.ConnectTimeout):
            return f"no connection within {self._limits.connect_seconds:g} s"
        cause: BaseException = error
        while (deeper := cause.__cause__ or cause.__context__) is not None:
            cause = deeper
        if isinstance(cause, TimeoutError):
            if self._clock() >= self._deadline:
                return f"the page was not complete within {self._limits.page_seconds:g} s"
            return f"nothing came for {self._limits.read_seconds:g} s"
        name, text = type(cause).__name__, str(cause)
        return self._clean(text if text.startswith(name) else f"{name}: {text}")

    def _clean(self, text: str) -> str:
        """Text that the server had a part in: one short line, printable, and no token that it may have sent back."""
        line = " ".join(self._bearer.hide(text).split())
        return "".join(char if char.isprintable() else "?" for char in line[:_SHOWN_CHARACTERS])


class _AttemptError(Exception):
    """An attempt failed, and another one may not. The message is fit to be shown."""

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _Bearer(AuthBase):
    """The token. As the session's auth it also goes before whatever a URL or ~/.netrc might say."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    def hide(self, text: str) -> str:
        return text.replace(self._token, "…")


class _Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> None:
        """No answer is a redirect; requests would also read the body of one, of any size."""


def _shown(response: requests.Response) -> str:
    """What was asked for; there is no secret in address and range."""
    return f"GET {response.url}"


def _host(location: str) -> str:
    try:
        host = urlsplit(location).hostname
    except ValueError:
        return "an address that cannot be read"
    return f"the host {host}" if host else "another path of the same host"


def _parse_json(body: bytes) -> Any:
    """JSON with exact numbers.

    NaN and Infinity are no JSON, though Python reads them: as Decimals they make their row a bad one, which stops
    nobody.

    Raises:
        ValueError, RecursionError: it is no JSON.
    """
    read = partial(json.loads, parse_float=_exact, parse_constant=Decimal)
    try:
        return read(body)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # An integer with more digits than ``int`` takes. To be asked about each integer would cost a page a
        # millisecond, a quarter of its parsing.
        return read(body, parse_int=_whole)


def _exact(text: str) -> Decimal | str:
    try:
        return Decimal(text)
    except InvalidOperation:
        return text  # an exponent of twenty digits: as a text the row is a bad one, and keeps what it said


def _whole(text: str) -> int | Decimal:
    try:
        return int(text)
    except ValueError:
        return Decimal(text)  # thousands of digits: no column takes them, but the row can be kept
