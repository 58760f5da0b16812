"""The database file of a store: opened, looked after and told apart from what is not ours; knows nothing of blocks."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator

from kvpager.errors import StoreDamaged, StoreError, StoreForeign, StoreLocked, StoreNewer, StoreUnavailable
from kvpager.stores import raw
from kvpager.stores.claims import MENDING, Claims
from kvpager.stores.faults import explain
from kvpager.stores.places import Places
from kvpager.stores.schema import APPLICATION_ID, PAGE_BYTES, VERSION, is_ours, migrate

__all__ = ["Database"]

MAGIC, HEADER_BYTES = b"SQLite format 3\0", 100  # of every SQLite file
AGAIN_SECONDS = 0.005  # how soon one looks again at what somebody may just be writing
LOOK_SECONDS = 1.0  # how often a reader makes sure that the file is still there
WRITER_CACHE, READER_CACHE = 16 * 2**10, 2 * 2**10  # KiB


class Database:
    """One connection that writes, in one thread at a time, and as many that read as there are threads reading at once.

    Nothing is opened before it is needed, and what failed is tried again by the next call. `opened` is called with a
    connection whenever a database was opened, which may be another one than before; until it returns, nobody reads.

    The file is made with mode 0600 and its folder with 0700. A file of another application, or of a newer kvpager, is
    refused before anything of it is touched. Where the file was deleted or replaced, or is malformed, it is begun anew;
    a malformed one is put aside as NAME.damaged-N (only where `mend`; the last one is kept).
    """

    def __init__(
        self,
        places: Places,
        claims: Claims,
        opened: Callable[[sqlite3.Connection], None],
        *,
        synchronous: str,
        busy_ms: int,
        log_bytes: int,
        mend: bool,
        clock: Callable[[], float],
    ) -> None:
        self.places = places
        self.readonly = False
        self._claims = claims
        self._opened = opened
        self._synchronous, self._busy, self._log_bytes, self._mend = synchronous, busy_ms / 1000, log_bytes, mend
        self._clock = clock
        self._looked = clock()
        self._lock = threading.RLock()  # of whoever writes, opens or closes
        self._pool_lock = threading.Lock()
        self._pool: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self._generation = 0  # goes up when the connections that there are must not be used any more
        self._inode: tuple[int, int] | None = None
        self._log_inode: tuple[int, int] | None = None
        self._file: raw.File | None = None

    # -- use

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for reading, inside one transaction. Raises StoreError."""
        self._look_after()
        generation, connection = self._reader()
        try:
            connection.execute("BEGIN")
            yield connection
        except sqlite3.Error as error:
            raise self._after(error, generation) from error
        finally:
            _undo(connection)  # which also ends one in which something malformed was read; COMMIT does not
            with self._pool_lock:
                keep = generation == self._generation
                if keep:
                    self._pool.append(connection)
            if not keep:
                connection.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The connection for writing, inside one transaction that is undone if anything is raised. Raises StoreError.

        When it returns the transaction is durable, as `synchronous` promises, in the file that has the store's name.
        """
        with self._lock:
            connection = self._ready_to_write()
            generation = self._generation
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                _undo(connection)
                raise self._after(error, generation) from error
            except BaseException:
                _undo(connection)
                raise
            self._still_there(generation)

    def look(self) -> None:
        """Open it if it isn't, and make sure that the file is still there. Raises StoreError."""
        self.open()
        self._look_after(at_once=True)

    def checkpoint(self) -> bool:
        """Move all of the log into the database and cut it off; False where readers or the disk stand in the way."""
        with self._lock:
            try:
                busy: int = self._ready_to_write().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            except sqlite3.Error:
                return False
            return not busy

    def vacuum(self, nbytes: int) -> bool:
        """Take up to so many bytes of free pages out of the file, which they leave with the next checkpoint.

        Of at most half of what the log may hold: what lies behind a free page moves there by way of it. False where
        there were none. Raises StoreError.
        """
        most = max(1, min(nbytes, self._log_bytes // 2) // PAGE_BYTES)
        with self.writing() as connection:
            free: int = connection.execute("PRAGMA freelist_count").fetchone()[0]
            for _ in range(min(free, most)):
                # one page each time: Python's sqlite3 ends a statement that has no columns after its first step
                connection.execute("PRAGMA incremental_vacuum(1)").fetchall()
        return free > 0

    def open(self) -> None:
        """Open it if it isn't; raises StoreError."""
        if self._inode is None:
            with self._lock:
                if self._inode is None:
                    self._open()

    def close(self) -> None:
        """Close all connections; idempotent, and the next call opens it again."""
        with self._lock:
            self._shut()

    # -- opening

    def _open(self) -> None:
        generation = self._generation
        try:
            self._open_file()
        except sqlite3.Error as error:
            self._shut()
            raise self._after(error, generation, opening=True) from error
        except StoreDamaged as error:
            self._shut()
            raise self._put_aside(error, self._generation) from None
        except OSError as error:
            self._shut()
            raise StoreUnavailable(*self.places.explain(error)) from error
        except BaseException:
            self._shut()
            raise

    def _open_file(self) -> None:
        places = self.places
        if places.special:
            raise StoreForeign(f"{places.path} is a device or a folder and no file, and is left as it is")
        places.make_folder()
        emptied = places.size == 0 and self._claims.marked
        if places.size > 0:
            self._look()
        self.readonly = not places.make_file()
        self._file = raw.begin(places.path)
        self._writer = connection = self._connect(READER_CACHE if self.readonly else WRITER_CACHE)
        if not self.readonly:
            self._prepare(connection)
            self._claims.open()
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise self._newer(version)
        if self.readonly and 0 <= version < VERSION:
            raise StoreUnavailable(
                "readonly", f"store {places.path} has version {version}, and can't be brought to {VERSION}"
            )
        if not is_ours(connection):
            raise self._not_ours()
        inode = places.inode
        self._opened(connection)
        self._inode, self._log_inode = inode, places.log_inode
        if emptied:
            raise StoreUnavailable("lost", f"store {places.path} was emptied, and is begun anew")

    def _look(self) -> None:
        """Refuse what is not ours, by a look that takes no locks, makes no files and changes nothing."""
        places, ends, before = self.places, time.monotonic() + self._busy, None
        while True:
            being_made = places.journal.exists()  # asked first: once it is gone, what it stood for is all there
            now = (places.changed, places.begins_with(HEADER_BYTES))
            refused = self._refused(now[1])
            if refused is None:
                return
            if now == before and not being_made:
                raise refused
            if time.monotonic() >= ends:
                if being_made and not any(now[1]):
                    raise StoreLocked(f"store {places.path}: another process is making it ({places.journal} is there)")
                raise refused
            before = None if being_made else now
            time.sleep(AGAIN_SECONDS)

    def _refused(self, header: bytes) -> StoreError | None:
        """What a file that begins so is, if it is not ours."""
        path, whole = self.places.path, len(header) == HEADER_BYTES and header.startswith(MAGIC)
        if not whole and self._claims.marked:
            return StoreDamaged(f"store {path} is no database any more: its header is cut off, or overwritten")
        if not whole:
            return StoreForeign(f"{path} is no store of kvpager's, nor a database, and is left as it is")
        version, application = (int.from_bytes(header[at : at + 4], "big", signed=True) for at in (60, 68))
        if application != APPLICATION_ID:
            return StoreForeign(f"{path} is another application's database (id {application}), and is left as it is")
        return self._newer(version) if version > VERSION else None

    def _not_ours(self) -> StoreDamaged:
        return StoreDamaged(f"store {self.places.path}: its tables are not as kvpager makes them")

    def _newer(self, version: int) -> StoreNewer:
        return StoreNewer(
            f"store {self.places.path} has version {version}, and this kvpager reads up to {VERSION}; it is left as is"
        )

    def _connect(self, cache: int) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.places.uri(self.places.mode(self.readonly)),
            uri=True,
            timeout=self._busy,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._set_up(connection, cache)
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_up(self, connection: sqlite3.Connection, cache: int) -> None:
        connection.text_factory = _text
        for pragma in (
            f"cache_size = -{cache}",
            f"synchronous = {self._synchronous}",
            f"journal_size_limit = {self._log_bytes}",
            f"wal_autocheckpoint = {max(1, self._log_bytes // PAGE_BYTES)}",
            "mmap_size = 0",  # mapped, a file that is cut off under us would end the process
            "secure_delete = FAST",
            "cell_size_check = ON",
            "trusted_schema = OFF",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables, or bring them to this version; then the log (WAL), which readers and the writer share."""
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        if version < VERSION:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            migrate(connection)
        application: int = connection.execute("PRAGMA application_id").fetchone()[0]
        if application != APPLICATION_ID:  # made since one looked
            raise StoreForeign(f"{self.places.path} is another application's database, and is left as it is")
        kind: str = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if kind != "wal":
            raise StoreUnavailable(
                "io", f"store {self.places.path} lies where SQLite can't keep a log (it says {kind})"
            )

    def _shut(self) -> None:
        with self._pool_lock:
            self._generation += 1
            idle, self._pool = self._pool, []
        if self._writer is not None:
            idle.append(self._writer)
        self._writer = self._inode = None
        for connection in idle:
            connection.close()
        file, self._file = self._file, None
        if file is not None:
            raw.end(file)

    # -- connections

    def _reader(self) -> tuple[int, sqlite3.Connection]:
        self.open()
        with self._pool_lock:
            generation = self._generation
            if self._pool:
                return generation, self._pool.pop()
        try:
            return generation, self._connect(READER_CACHE)
        except sqlite3.Error as error:
            raise self._after(error, generation) from error

    def _ready_to_write(self) -> sqlite3.Connection:
        if self.readonly and self.places.writable:
            self._shut()
        self.open()
        if self.readonly or self._writer is None:
            raise StoreUnavailable("readonly", f"store {self.places.path} can only be read")
        return self._writer

    # -- what the outside does to the file

    def _look_after(self, at_once: bool = False) -> None:
        now = self._clock()
        if self._inode is not None and (at_once or not 0 <= now - self._looked < LOOK_SECONDS):
            self._looked = now
            with self._pool_lock:
                generation = self._generation
            if self.places.inode != self._inode:
                raise self._begin_anew(generation)

    def _still_there(self, generation: int) -> None:
        """After a transaction: what was written is in the file that has the name."""
        if self.places.inode != self._inode:
            raise self._begin_anew(generation)
        if (
            self.places.log_inode != self._log_inode
        ):  # deleted under us: it is still open here, and can be moved to the database
            self.checkpoint()
            self._shut()

    def _begin_anew(self, generation: int) -> StoreUnavailable:
        with self._lock:
            if generation == self._generation:
                log = self._log_inode
                self._shut()
                if log is not None and log == self.places.log_inode:  # SQLite would take it for the new file's
                    self.places.forget_log()
        return StoreUnavailable("lost", f"store {self.places.path} was deleted or replaced, and is begun anew")

    def _after(self, error: sqlite3.Error, generation: int, opening: bool = False) -> StoreError:
        """What an error means, when what can be done about it was done."""
        try:
            found = explain(error, str(self.places.path))
        except sqlite3.Error:
            try:
                ours = self._is_ours()
            except sqlite3.Error as another:
                raise explain(another, str(self.places.path)) from another
            if ours:
                raise
            found = self._not_ours()
        if isinstance(found, StoreDamaged):
            return self._put_aside(found, generation + opening)
        if found.kind == "lost" or (found.kind == "io" and not opening and self.places.inode != self._inode):
            return self._begin_anew(generation)
        return found

    def _is_ours(self) -> bool:
        """Whether the tables are still those that were made here; looked at anew."""
        with contextlib.closing(self._connect(READER_CACHE)) as connection:
            return is_ours(connection)

    def _put_aside(self, found: StoreDamaged, generation: int) -> StoreError:
        if not self._mend or self.readonly:
            return found
        with self._lock:
            if generation != self._generation:
                return found
            inode = self.places.inode
            self._shut()
            try:
                if not self._claims.take(MENDING):
                    return StoreLocked(f"store {self.places.path} is damaged, and another process puts it aside")
                try:
                    if inode == self.places.inode:
                        self.places.put_aside()
                finally:
                    self._claims.give_back(MENDING)
            except OSError as failure:
                return StoreUnavailable(*self.places.explain(failure))
        return found


def _text(data: bytes) -> str:
    """Text as it is read: there should be none, and it need not be any."""
    return data.decode(errors="replace")


def _undo(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
