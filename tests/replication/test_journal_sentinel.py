"""A Redis whose primary dies: what was acknowledged is on its replica, and the journal goes on there."""

from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpager.replication.journal import Journal
from kvpager.replication.lease import Lease
from kvpager.replication.limits import Limits
from kvpager.replication.mirror import Mirror
from tests.redis_rig import RedisSentinel, until
from tests.replication.rig import PAGE, accepted, grown, trying

WAITS = 60.0  # longer than sentinels take


def test_the_journal_goes_on_with_the_replica(redis_sentinel: RedisSentinel) -> None:
    def connect() -> object:
        return redis_sentinel.client(socket_timeout=1.0, retry=Retry(NoBackoff(), 0))

    lease = Lease(connect, "pair", "first", 600.0)
    assert lease.acquire()
    journal = Journal(connect, lease, PAGE, on_lost=lambda: None, limits=Limits(bound_s=WAITS, look_s=0.05))
    journal.start()
    until(lambda: journal.stats().replicas == 1)
    journal.accept(accepted("one"))
    acknowledged: list[int] = []
    journal.step([grown("one", 0, 0, 6, 1)], lambda: acknowledged.append(1))
    until(lambda: acknowledged)
    redis_sentinel.primary.kill()
    journal.step([grown("one", 0, 6, 7, 2)], lambda: acknowledged.append(2))
    until(lambda: acknowledged == [1, 2], "it does not go on", WAITS)
    assert journal.resumable("one")
    one = Mirror(connect, "pair")
    until(trying(lambda: one.poll(0.0)))
    assert one.requests()["one"].outputs == [[1, 2]]
    one.close()
    journal.close()
    assert until(trying(lease.renew)) == "held"
    lease.close()
