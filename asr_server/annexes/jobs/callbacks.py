"""Report the end of jobs to their clients, signed in the form of Standard Webhooks."""

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import httpx2
from sqlalchemy import select, update
from sqlalchemy.orm import Session
from standardwebhooks import Webhook

from asr_server.annexes.jobs import JobsSettings
from asr_server.annexes.jobs.rows import Job
from asr_server.annexes.jobs.store import Store
from asr_server.config import naming
from asr_server.errors import InvalidValue, StorageUnavailable

MOST_TRIES: Final = 10
FIRST_PAUSE_S: Final = 2.0
PAUSE_GROWS: Final = 3.0  # times: the last of ten tries is made after five and a half hours
LIMIT_S: Final = 10.0  # of one try
AT_ONCE: Final = 8
ANY_HOST: Final = "*"
_PORTS: Final = {"http": 80, "https": 443}

logger = logging.getLogger(__name__)


class Callbacks:
    def __init__(self, settings: JobsSettings, store: Store) -> None:
        hosts = map(str.strip, settings.callback_hosts.lower().split(","))
        self._hosts = frozenset(filter(None, hosts))
        self._secret, self._store = settings.callback_secret, store
        self._client = httpx2.AsyncClient(timeout=LIMIT_S, trust_env=False)
        self._reporting = set[asyncio.Task[None]]()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def require_allowed(self, url: str) -> None:
        """Raises InvalidValue."""
        if not url:
            return
        if not self._hosts:
            raise InvalidValue(f"This server reports no ends: {naming('callback_hosts')}.", "callback_url")
        try:
            await self._address_of(urlsplit(url))
        except (ValueError, OSError) as error:
            raise InvalidValue(f"'callback_url' cannot be called: {error}.", "callback_url") from None

    async def _address_of(self, url: SplitResult) -> str:
        """Return the name or the address to connect to.

        Raises:
            ValueError: the URL or its host is not allowed.
            OSError: no such host.
        """
        host = url.hostname or ""
        if url.scheme not in _PORTS or not host or url.username or url.password:
            raise ValueError("it must be http:// or https://, with a host and no password")
        if host in self._hosts:
            return host
        if ANY_HOST not in self._hosts:
            raise ValueError(f"its host is not among those of {naming('callback_hosts')}")
        port = url.port or _PORTS[url.scheme]
        found = await asyncio.get_running_loop().getaddrinfo(host, port, proto=6)  # TCP
        addresses = [str(address[0]) for *_, address in found]
        if not all(map(_is_public, addresses)):
            raise ValueError("its host has an address of a private network")
        return addresses[0]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Report what ends meanwhile, and what the last server had not reported."""
        pending = select(Job).where(Job.callback_state == "pending")
        for job in await self._store.run(lambda session: list(session.scalars(pending))):
            self.report(job)
        try:
            yield
        finally:
            for task in self._reporting:
                task.cancel()
            await asyncio.gather(*self._reporting, return_exceptions=True)
            await self._client.aclose()

    def report(self, job: Job) -> None:
        if job.callback_url:
            task = asyncio.create_task(self._report(job), name=f"report {job.id}")
            self._reporting.add(task)
            task.add_done_callback(self._reporting.discard)

    async def _report(self, job: Job) -> None:
        """Try until it is taken, refused or has been tried often enough; note each try."""
        tries = [*job.callback_tries]
        state = "pending"
        while state == "pending":
            if tries:
                await asyncio.sleep(FIRST_PAUSE_S * PAUSE_GROWS ** (len(tries) - 1))
            async with self._places:
                outcome = await self._try(job)
            tries.append({"at": int(time.time())} | outcome)
            hundreds = outcome.get("status", 0) // 100
            if hundreds == 2:
                state = "delivered"
            elif hundreds == 4 or len(tries) >= MOST_TRIES:
                state = "failed"
            try:
                if not await self._store.run(_note, job, tries, state):
                    return  # deleted
            except StorageUnavailable:  # tried again, which the receiver knows by the id
                state = "pending"
        logger.info(
            "job %s: its end was reported to %s: %s", job.id, urlsplit(job.callback_url).hostname, state
        )

    async def _try(self, job: Job) -> dict[str, Any]:
        id, now = f"evt_{job.id.removeprefix('job_')}", datetime.now(UTC)
        body = json.dumps(
            {
                "id": id,
                "object": "event",
                "created_at": int(now.timestamp()),
                "type": f"transcription.{job.status}",
                "data": {"id": job.id, "status": job.status},
            }
        )
        url = urlsplit(job.callback_url)
        try:
            address = await self._address_of(url)
            headers = {
                "content-type": "application/json",
                "host": url.netloc,
                "webhook-id": id,
                "webhook-timestamp": str(int(now.timestamp())),
                "webhook-signature": Webhook(self._secret).sign(id, now, body),
            }
            target = httpx2.URL(job.callback_url).copy_with(host=address)
            extensions = {"sni_hostname": url.hostname}  # a certificate has the name
            send = self._client.stream("POST", target, content=body, headers=headers, extensions=extensions)
            async with asyncio.timeout(LIMIT_S), send as answer:
                return {"status": answer.status_code}
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"[:200]}


def _note(session: Session, job: Job, tries: list[dict[str, object]], state: str) -> bool:
    values = {"callback_tries": tries, "callback_state": state}
    note = update(Job).where(Job.number == job.number).values(values).returning(Job.id)
    return session.scalar(note) is not None


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return address.is_global and not address.is_multicast
