"""Keys say all that the bytes of vLLM's blocks depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpager.core.blocks import KeyMaker, packed
from kvpager.vllm.keys import Chain, Identity

ONE = Identity(
    weights="ab" * 32,
    model={"rope_theta": 10000.0, "num_hidden_layers": 2},
    numbers={"vllm": "0.32.0", "dtype": "torch.bfloat16", "instructions": ["vec"]},
    layout={"order": "LBHNC", "block_size": 32, "layers": [["a", "torch.bfloat16", [2, 32, 128]]]},
)


@pytest.mark.promise(5)
@pytest.mark.parametrize(
    "more",
    [
        {"weights": "cd" * 32},
        {"model": {"rope_theta": 20000.0, "num_hidden_layers": 2}},
        {"numbers": {**ONE.numbers, "vllm": "0.32.1"}},
        {"numbers": {**ONE.numbers, "dtype": "torch.float16"}},
        {"numbers": {**ONE.numbers, "instructions": ["amx"]}},
        {"layout": {**ONE.layout, "order": "LBNHC"}},
        {"layout": {**ONE.layout, "block_size": 64}},
        {"layout": {**ONE.layout, "layers": [["a", "torch.bfloat16", [4, 32, 128]]]}},
        {"rank": (1, 2)},
        {"rank": (0, 2)},
    ],
)
def test_each_part_of_an_identity_changes_all_keys(more: dict[str, object]) -> None:
    other = replace(ONE, **more)
    assert other.namespace != ONE.namespace
    tokens = packed([1, 2, 3])
    assert KeyMaker(other.namespace, "").key(b"", tokens, False) != KeyMaker(ONE.namespace, "").key(b"", tokens, False)


def test_the_order_of_settings_does_not_matter() -> None:
    turned = replace(ONE, model=dict(reversed(ONE.model.items())))
    assert turned.namespace == ONE.namespace


def test_a_chain_goes_on_from_block_to_block_and_from_its_salt() -> None:
    maker = KeyMaker(ONE.namespace, "")
    tokens = list(range(10))
    plain, salted = Chain([maker], 4, b""), Chain([maker], 4, b"salt")
    first, second = plain.keys(tokens, 2)
    assert first == (maker.key(b"", packed(tokens[:4]), False),)
    assert second == (maker.key(first[0], packed(tokens[4:8]), False),)
    assert salted.keys(tokens, 1)[0] == (maker.key(KeyMaker.root(b"salt"), packed(tokens[:4]), False),)
    assert plain.parents(0) == (b"",)
    assert salted.parents(0) == (KeyMaker.root(b"salt"),)
    assert plain.parents(1) == first
    assert plain.tenant == bytes(16)
    assert salted.tenant != bytes(16)


def test_keys_that_were_made_stay_when_tokens_are_added() -> None:
    chain = Chain([KeyMaker("a", ""), KeyMaker("b", "")], 4, b"")
    tokens = list(range(4))
    before = list(chain.keys(tokens, 1))
    assert len(before[0]) == len(set(before[0])) == 2
    tokens += [4, 5, 6, 7]
    assert list(chain.keys(tokens, 2))[:1] == before
