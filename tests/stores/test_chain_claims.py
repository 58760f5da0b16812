"""Claims of records in a chain: who claims a record next finds what was saved before."""

from kvpager.stores.chain import Chain
from kvpager.stores.limits import Limits
from tests.stores.fake import NOBODY, SETTLED, Clock, FakeTier, Gate, key_of

KEY = key_of(1)


def test_a_claim_is_given_up_when_the_record_is_written() -> None:
    tier = FakeTier()
    chain = Chain([lambda: tier], Limits(), Clock())
    assert chain.claim(KEY)
    gate = Gate(tier, "save_record")
    assert chain.save_record(KEY, NOBODY, b"one")
    assert gate.reached.wait(SETTLED)
    chain.release(KEY)
    assert tier.claimed == {KEY}
    gate.open()
    assert chain.flush(SETTLED)
    chain.close()
    assert tier.log[-1] == ("save", KEY)
    assert tier.claimed == set()


def test_a_claim_that_is_taken_again_meanwhile_is_kept() -> None:
    tier = FakeTier()
    chain = Chain([lambda: tier], Limits(), Clock())
    assert chain.claim(KEY)
    gate = Gate(tier, "save_record")
    assert chain.save_record(KEY, NOBODY, b"one")
    assert gate.reached.wait(SETTLED)
    chain.release(KEY)
    assert chain.claim(KEY)
    gate.open()
    assert chain.flush(SETTLED)
    assert tier.claimed == {KEY}
    assert not chain.claim(KEY)
    chain.release(KEY)
    assert tier.claimed == set()
    chain.close()


def test_a_claim_of_a_record_that_is_to_be_forgotten_or_erased_is_given_up_after_it() -> None:
    tier = FakeTier()
    chain = Chain([lambda: tier], Limits(), Clock())
    for forget in (lambda: chain.drop_record(KEY), lambda: chain.erase(NOBODY)):
        assert chain.claim(KEY)
        assert chain.save_record(KEY, NOBODY, b"one")
        forget()
        chain.release(KEY)
        assert chain.flush(SETTLED)
        assert KEY not in tier.records
    chain.close()
    assert tier.claimed == set()
