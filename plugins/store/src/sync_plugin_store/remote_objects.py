"""Objects in an object store, accessed with obstore: `RemoteObjects`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from sync_core import OptionError
from sync_core.errors import PayloadError
from sync_plugin_store.errors import ConflictError, ReplacedError, StoreError
from sync_plugin_store.objects import (
    LONGEST_PAUSE,
    PIECE,
    Found,
    ListedObject,
    NoRangesError,
    Objects,
    Patience,
    Validator,
)

__all__ = ["RemoteObjects"]


class RemoteObjects(Objects):
    """An object store, accessed with obstore.

    Credentials, regions and endpoints come from this process's environment, such as
    ``AWS_ACCESS_KEY_ID`` and ``AWS_ENDPOINT_URL``. Addresses never contain them.

    Args:
        url: where it is.
        timeout: how long failed requests are retried, in seconds.
    """

    def __init__(self, url: str, timeout: float) -> None:
        super().__init__(url)
        import obstore
        from obstore.store import from_url

        self._api = obstore
        self._errors: Any = obstore.exceptions
        client: Any = {
            # The limit of one request. Over a slow link, `read` resumes with further requests.
            "timeout": timedelta(seconds=max(timeout, 5.0)),
            "connect_timeout": timedelta(seconds=min(timeout, 5.0)),
            # For local services and tests; s3:// and gs:// use https by default.
            "allow_http": True,
        }
        retry: Any = {
            "max_retries": 100,
            "retry_timeout": timedelta(seconds=timeout),
            "backoff": {
                "init_backoff": timedelta(seconds=0.1),
                "max_backoff": timedelta(seconds=LONGEST_PAUSE),
                "base": 2.0,
            },
        }
        try:
            self._store: Any = from_url(url, client_options=client, retry_config=retry)
        except Exception as error:
            raise OptionError(f"url={url!r} cannot be opened: {error}") from error

    def look(self, name: str, tag: str | None = None) -> Found | None:
        # A tag "sha256:…" is made from the bytes, for stores without tags.
        options: Any = {"if_none_match": tag} if tag and not tag.startswith("sha256:") else None
        try:
            result = self._api.get(self._store, name, options=options)
            self.check_record(name, result.meta["size"])
            data = bytes(result.bytes())
        except self._errors.NotModifiedError:
            return None
        except (self._errors.NotFoundError, FileNotFoundError):
            return None
        except self._errors.BaseError as error:
            raise self._failed("read", name, error) from error
        found = result.meta["e_tag"] or f"sha256:{hashlib.sha256(data).hexdigest()}"
        return None if found == tag else Found(data, found)

    def read(
        self,
        name: str,
        start: int,
        memory: memoryview,
        patience: Patience,
        *,
        whole: bool,
        validator: Validator | None = None,
    ) -> bool:
        done, validator = 0, validator or Validator()
        while done < len(memory):
            begins, before = start + done, done
            options: Any = None
            if begins or not whole:
                options = {"range": (begins, start + len(memory))}
            try:
                for part in self._stream(name, options, len(memory), validator):
                    memory[done : done + len(part)] = part
                    done += len(part)
                if done < len(memory):
                    raise PayloadError(f"{name} in {self.url} ends after {start + done} bytes")
            except ReplacedError:
                raise
            except (self._errors.NotFoundError, FileNotFoundError):
                return False
            except (self._errors.BaseError, OSError) as error:
                # Resume where it broke, but leave a source that sent nothing: another may be
                # better.
                if done == before or not patience.pause():
                    raise self._failed("read", name, error) from error
        return True

    def _stream(
        self, name: str, options: Any, nbytes: int, validator: Validator
    ) -> Iterator[memoryview]:
        """Iterate over an object's bytes as they arrive, at most ``nbytes`` of them."""
        result = self._api.get(self._store, name, options=options)
        found = result.meta
        tag = found["e_tag"] or found["last_modified"]
        validator.check((tag, found["size"]), name, self.url)
        if options is None and result.meta["size"] != nbytes:
            raise PayloadError(
                f"{name} in {self.url} has {result.meta['size']} bytes, and {nbytes} were agreed"
            )
        left = nbytes
        try:
            for part in result.stream(min_chunk_size=PIECE):
                left -= len(part)
                if left < 0:
                    raise PayloadError(f"{name} in {self.url} has more bytes than agreed")
                yield memoryview(part)
        except self._errors.PreconditionError:
            # obstore has resumed the read, and found the object in another state.
            validator.check(None, name, self.url)

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._put(name, data, "overwrite")

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        mode: Any = "create" if tag is None else {"e_tag": tag}
        try:
            result = self._put(name, data, mode)
        except ConflictError:
            # An earlier attempt may have succeeded although its answer was lost.
            standing = self.look(name)
            if standing is None or standing.data != data:
                raise
            return standing.tag
        return str(result["e_tag"])

    def delete(self, name: str) -> None:
        try:
            self._api.delete(self._store, name)
        except (self._errors.NotFoundError, FileNotFoundError):
            return
        except self._errors.BaseError as error:
            raise self._failed("delete", name, error) from error

    def list(self, prefix: str) -> Iterator[ListedObject]:
        try:
            for some in self._api.list(self._store, prefix.rstrip("/") or None):
                for each in some:
                    yield ListedObject(
                        each["path"], each["size"], each["last_modified"].timestamp()
                    )
        except self._errors.BaseError as error:
            raise self._failed("list", prefix, error) from error

    def walk(self) -> Iterator[str]:
        return (each.name for each in self.list(""))

    def _put(self, name: str, data: bytes | memoryview, mode: Any) -> Any:
        try:
            return self._api.put(self._store, name, data, mode=mode, use_multipart=False)
        except (self._errors.PreconditionError, self._errors.AlreadyExistsError) as error:
            raise ConflictError(f"{name} in {self.url} was replaced meanwhile") from error
        except self._errors.BaseError as error:
            raise self._failed("write", name, error) from error

    def _failed(self, verb: str, name: str, error: Exception) -> StoreError:
        if isinstance(error, self._errors.NotSupportedError):
            return NoRangesError.of(self.url)
        refused = isinstance(
            error, self._errors.PermissionDeniedError | self._errors.UnauthenticatedError
        )
        advice = (
            "; give this process credentials that may, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
            if refused
            else ""
        )
        # obstore's messages contain the whole request, on several lines.
        text = " ".join(str(error).split())
        return StoreError(f"cannot {verb} {name} in {self.url}: {text:.300}{advice}")
