"""The function of notebook 4.3: right ones pass, each mistake has a hint."""

import pytest
from answers import assert_verdicts
from drivers.ranks import MakeRanks
from lessons import definitions
from syrupy.assertion import SnapshotAssertion

ANSWERS = "from itertools import product\nmessages = 0\n" + definitions(
    "4.3",
    *("scores_of", "attend", "merge", "pass_on", "pairs", "gradients_of"),
    *("CausalRing", "ring_attention"),
)
OTHERS = """
def of_own_keys(query, key, value, places):
    mask = places[rank][:, None] >= places[rank]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

def in_32_bits(query, key, value, places):
    given = query.float(), key.float(), value.float()
    return ring_attention(*given, places).double()
"""
RING = '"4.3a", but("ring_attention"'
PLACES, MASK = "places[rank], places[(rank - step) % world_size]", "< theirs[columns]"
INDEX = "[torch.arange(places.numel()).view_as(places)[at] for at in (rank, rank - step)]"
ADD, HOME = "of_kv[columns] += torch.stack(of_block)", "of_kv = pass_on(of_kv)"
SAVE = "ctx.save_for_backward(q, k, v, out, lse, places)"
EXCHANGE = (
    "for work in dist.batch_isend_irecv([to_next, from_last]):\\n        work.wait()\\n"
    "    return arriving"
)
GATHER = (
    "every = [torch.empty_like(tensor) for _ in range(world_size)]\\n"
    "    dist.all_gather(every, tensor)\\n    return every[rank - 1]"
)
LOOP = (
    "lse = torch.full_like(q[..., :1], -torch.inf)\\n        for step in range(world_size):\\n"
    "            if step > 0:\\n                kv = pass_on(kv)\\n"
)
ALL_BEFORE = (
    "lse = torch.full_like(q[..., :1], -torch.inf)\\n        blocks = [kv]\\n"
    "        for _ in range(world_size - 1):\\n            blocks.append(pass_on(blocks[-1]))\\n"
    "        for step, kv in enumerate(blocks):\\n"
)
ONE_BY_ONE = (
    '"dist.P2POp(dist.isend, tensor,", "dist.isend(tensor,",'
    ' "dist.P2POp(dist.irecv, arriving,", "dist.recv(arriving,",'
    ' "dist.batch_isend_irecv([to_next, from_last])", "[to_next]"'
)
RIGHT = ['"4.3a", ring_attention', f"{RING}, {ONE_BY_ONE})"]
WRONG = [
    '"4.3a", 3',
    '"4.3a", lambda query, key, value: query',
    '"4.3a", lambda *given: given[0][..., :1]',
    f'{RING}, "out * (lse - both).exp() + other * (other_lse - both).exp()", "out + other")',
    f'{RING}, "{MASK}", "{MASK} - 999")',
    f'{RING}, "q @ k.mT * q.shape[-1] ** -0.5", "q @ k.mT")',
    '"4.3a", of_own_keys',
    f'{RING}, "{PLACES}", "{INDEX}")',
    f'{RING}, "rank - step", "rank + step")',
    '"4.3a", lambda *given: ring_attention(*given).detach()',
    f'{RING}, "{ADD}", "{ADD} * (step == 0)", "{HOME}", "pass")',
    f'{RING}, "{HOME}", "of_kv = pass_on(of_kv) if step < world_size - 1 else of_kv")',
    f'{RING}, "*of_kv, None", "*pass_on(of_kv), None")',
    f'{RING}, " - (gradient * out).sum(-1, keepdim=True)", "")',
    f'{RING}, "of_scores * q.shape[-1] ** -0.5", "of_scores")',
    f'{RING}, "{EXCHANGE}", "{GATHER}")',
    f'{RING}, "kv, out = torch.stack([k, v])", "kv, out = torch.stack([k, v, k, v])[:2]")',
    f'{RING}, "{SAVE}", "{SAVE}; pass_on(kv)")',
    f'{RING}, "{SAVE}", "{SAVE}; ctx.blocks = [kv, kv.clone()]")',
    f'{RING}, "{LOOP}", "{ALL_BEFORE}")',
    f'{RING}, "if not hidden.all()", "if True")',
    '"4.3a", in_32_bits',
    f'{RING}, "of_kv = torch.zeros_like(kv)", "of_kv = torch.zeros_like(kv).float()")',
]


@pytest.mark.full
def test_a_ring_gets_a_verdict(make_group: MakeRanks, snapshot: SnapshotAssertion) -> None:
    assert_verdicts(make_group(4), OTHERS, RIGHT, WRONG, snapshot, answers=ANSWERS)
