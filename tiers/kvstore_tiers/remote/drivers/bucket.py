"""A bucket, container or directory by obstore: keys under a prefix, errors as OSError with a remedy."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import obstore
from obstore import exceptions, store

from kvstore_tiers.remote.driver import CannotOpen
from kvstore_tiers.remote.drivers.runs.objects import Listed, Objects

PART_BYTES: Final = 8 << 20  # of a multipart write
_DIRECTORY_SPAN_BYTES: Final = 2 << 20  # what was read is still in the processor's cache when it is copied
_LONGEST_REQUEST_S: Final = 30.0  # of the index, where calls are shorter
_OF_CLIENT: Final = {"allow_http", "allow_invalid_certificates", "proxy_url"}
_DETAIL: Final = re.compile(r"<Code>(?P<code>[^<]*)</Code>\s*<Message>(?P<message>[^<]*)")
_NO_ROOM: Final = ("No space left on device", "Disk quota exceeded", "QuotaExceeded", "StorageFull", "507 ")
_NO_ANSWER: Final = ("error sending request", "error trying to connect", "dns error", "connection closed")
_REFUSED: Final = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "InvalidToken", "ExpiredToken")


class Bucket(Objects):
    """A bucket of an object store (such as S3), whose objects it reads and writes by the library obstore."""

    def __init__(
        self, url: str, options: Mapping[str, str], credentials: Mapping[str, str], *, timeout_s: float
    ) -> None:
        self._where = url.partition("?")[0]
        if urlsplit(url).scheme == "file":
            self.span_bytes = _DIRECTORY_SPAN_BYTES
        self._store = _opened(self._where, {**options, **credentials}, timeout_s)

    async def list(self, folder: str, after: str = "") -> list[Listed]:
        with self._translated():
            found = await obstore.list(self._store, folder, offset=after or None).collect_async()
        return sorted(Listed(each["path"], each["last_modified"]) for each in found)

    async def get(self, key: str) -> bytes | None:
        with self._translated():
            try:
                found = await obstore.get_async(self._store, key)
                return bytes(await found.bytes_async())
            except FileNotFoundError:
                return None

    async def get_range(self, key: str, start: int, end: int) -> memoryview | None:
        with self._translated():
            try:
                return memoryview(await obstore.get_range_async(self._store, key, start=start, end=end))
            except FileNotFoundError:
                return None
            except exceptions.GenericError as error:
                if "416 Range Not Satisfiable" in str(error) or "Range started at" in str(error):
                    return memoryview(b"")
                raise

    async def create(self, key: str, content: bytes) -> bool:
        with self._translated():
            try:
                await obstore.put_async(self._store, key, content, mode="create", use_multipart=False)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return False
            return True

    async def put(self, key: str, content: bytes) -> None:
        with self._translated():
            await obstore.put_async(self._store, key, content, chunk_size=PART_BYTES)

    async def delete(self, keys: Sequence[str]) -> None:
        with self._translated():
            for key in keys if isinstance(self._store, store.LocalStore) else ():
                with _missing_is_fine():
                    await obstore.delete_async(self._store, key)
            if not isinstance(self._store, store.LocalStore) and keys:
                with _missing_is_fine():
                    await obstore.delete_async(self._store, list(keys))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.BaseError, FileNotFoundError, PermissionError) as error:
            raise self._as_os_error(str(error)) from None

    def _as_os_error(self, text: str) -> OSError:
        detail = _DETAIL.search(text)
        said = f"{detail['code']}: {detail['message']}" if detail else text.partition("\n")[0]
        if "NoSuchBucket" in text or "ContainerNotFound" in text:
            return OSError(errno.ENOENT, f"{self._where}: there is no such bucket ({said}); create it first")
        if any(sign in text for sign in _REFUSED) or "403 Forbidden" in text or "401 Unauthorized" in text:
            return OSError(
                errno.EACCES, f"{self._where}: access refused ({said}); check the credentials and the policy"
            )
        if any(sign in text for sign in _NO_ROOM):
            return OSError(errno.ENOSPC, f"{self._where}: no room ({said})")
        if "operation timed out" in text:
            return TimeoutError(errno.ETIMEDOUT, f"{self._where}: no answer in time ({said})")
        if any(sign in text for sign in _NO_ANSWER):
            return ConnectionError(errno.ENOTCONN, f"{self._where}: the store cannot be reached ({said})")
        return OSError(errno.EIO, f"{self._where}: {said}")


@contextmanager
def _missing_is_fine() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise


def _opened(where: str, options: Mapping[str, str], timeout_s: float) -> Any:
    parts = urlsplit(where)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError(f"{where}: name a directory, as file:///var/cache/kvstored")
        if options:
            raise ValueError(f"{where}: a directory has no option {', '.join(sorted(options))}")
        try:
            return store.LocalStore(unquote(parts.path), mkdir=True)
        except (exceptions.BaseError, OSError) as error:
            raise OSError(errno.ENOENT, f"{where}: {str(error).partition(chr(10))[0]}") from None
    if not parts.netloc:
        raise ValueError(f"{where}: name a bucket, as {parts.scheme}://BUCKET/PREFIX")
    client: dict[str, Any] = {key: _client_value(value) for key, value in options.items() if key in _OF_CLIENT}
    client["connect_timeout"] = timedelta(seconds=timeout_s)
    client["timeout"] = timedelta(seconds=max(timeout_s, _LONGEST_REQUEST_S))
    retries: Any = {
        "max_retries": 2,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=max(0.05, timeout_s / 4)),
            "base": 2,
        },
    }
    config: Any = {key: value for key, value in options.items() if key not in _OF_CLIENT}
    try:
        return store.from_url(where, config=config, client_options=client, retry_config=retries)
    except (exceptions.BaseError, TypeError) as error:
        is_unknown = isinstance(error, TypeError | exceptions.UnknownConfigurationKeyError)
        message = f"{where}: {str(error).partition(chr(10))[0]}"
        raise (ValueError if is_unknown else CannotOpen)(message) from None


def _client_value(value: str) -> str | bool:
    return {"true": True, "false": False}.get(value.lower(), value)


def split_options(url: str) -> dict[str, str]:
    """Return the options behind the "?" of `url` by name."""
    return dict(parse_qsl(urlsplit(url).query, keep_blank_values=True, strict_parsing=bool(urlsplit(url).query)))
