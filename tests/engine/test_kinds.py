"""Every kind of layer cache through the bytes of records: what comes back is what was there."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from cachestore.record import RecordError
from engine import attach, pack
from engine.batch import Batch, BatchMode, BatchShape
from engine.config import PrefillStep
from engine.kv import kinds
from engine.kv.codec import CodecPolicy
from engine.kv.layout import probe
from engine.kv.live import LiveCaches
from tests.support.checkpoints import Saved, feed, flat, lossless, path_at, save, save_checkpoint
from tests.support.zoo import animal
from tests.support.zoo.window import WINDOW

SAME_CUTS, OTHER_CUTS = 1e-5, 2e-4
POSITIONS = (5, WINDOW, WINDOW + 9)
TOKENS = tuple(int(t) for t in np.random.default_rng(5).integers(0, 256, 2 * WINDOW))
# One of each kind, and how it runs in the batch.
MODELS = {
    "llama": BatchMode.BATCHED,
    # Lists; values that the model clears, or that are empty.
    "deepseek_v32": BatchMode.BATCHED,
    "minimax_m3_vl": BatchMode.ONE_ROW,
    "gpt_oss": BatchMode.BATCHED,
    # Layers that read what another one's window holds.
    "gemma3n": BatchMode.BATCHED,
    "llama4": BatchMode.ONE_ROW,
    "mamba2": BatchMode.BATCHED,
    "qwen3_next": BatchMode.BATCHED,
    # Lists of a recurrent state and a window.
    "baichuan_m1": BatchMode.PREFILL_ONE,
    # Its state is of integers.
    "longcat_flash_ngram": BatchMode.PREFILL_ONE,
}
# Those without experts, which MLX's CPU backend has in float32 only; quick ones.
IN_16_BITS = ("llama", "mamba2", "baichuan_m1")


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return animal(name)


def rest(position: int) -> list[Sequence[int]]:
    """The tokens behind a position: a chunk, then one by one."""
    return [TOKENS[position : position + 4], *([token] for token in TOKENS[position + 4 :][:6])]


def cold(model: Any, position: int) -> mx.array:
    """Logits of a cold run that is cut at the position, which are also those of mlx-lm's own
    caches: its windows have their rows in another order."""
    chunks = [TOKENS[:position], *rest(position)]
    found = feed(model, LiveCaches(model).fresh(), *chunks)
    assert mx.abs(found - feed(model, make_prompt_cache(model), *chunks)).max() <= OTHER_CUTS
    return found


@pytest.mark.parametrize("position", POSITIONS)
def test_a_restored_request_goes_on_as_if_nothing_had_been(model: Any, position: int) -> None:
    live = LiveCaches(model)
    caches = live.fresh()
    feed(model, caches, TOKENS[:position])
    saved = save(lossless(live), caches, TOKENS, position)
    expected = cold(model, position)
    for _ in range(2):
        found = feed(model, saved.restore(), *rest(position))
        assert mx.abs(found - expected).max() <= SAME_CUTS
    # Taking it changed nothing.
    assert mx.abs(feed(model, caches, *rest(position)) - expected).max() <= SAME_CUTS


def batch_of(model: Any, mode: BatchMode, *lengths: int) -> tuple[Batch, list[int]]:
    shape = BatchShape(mode, 1 if mode is BatchMode.ONE_ROW else 2, PrefillStep(8, 8))
    batch = Batch(LiveCaches(model), shape)
    prompts = [TOKENS[:length] for length in lengths[: shape.rows_max]]
    return batch, [batch.insert(prompt, None, 0, None) for prompt in prompts]


@pytest.mark.parametrize("lengths", [(WINDOW + 9, 12), (9, WINDOW + 1)])
def test_of_a_row_in_a_batch_beside_another_one(
    name: str, model: Any, lengths: tuple[int, int]
) -> None:
    """At every position that the batch stops at, while it prefills and while it decodes."""
    policy = lossless(LiveCaches(model))
    batch, uids = batch_of(model, MODELS[name], *lengths)
    replies: dict[int, list[int]] = {uid: [] for uid in uids}
    saved: list[tuple[int, int, Saved]] = []
    for _ in range(12):
        for token in batch.step().tokens:
            replies[token.uid].append(token.token)
        for uid, length in zip(uids, lengths, strict=False):
            held = batch.held(uid)
            found = batch._locate(uid)
            if held and found is not None:
                tokens = (*TOKENS[:length], *replies[uid])
                rows, index = found
                saved.append((uid, held, save(policy, rows.prompt_cache, tokens, held, index)))
    assert len({(uid, held) for uid, held, _ in saved}) > 8
    for uid, held, one in saved[:: max(1, len(saved) // 4)]:
        tokens = (*TOKENS[: lengths[uids.index(uid)]], *replies[uid])[:held]
        expected = feed(model, make_prompt_cache(model), tokens, *rest(20))
        given = feed(model, one.restore(), *rest(20))
        assert mx.abs(given - expected).max() <= OTHER_CUTS
    batch.close()


def contents(packed: pack.PackedCheckpoint) -> list[bytes]:
    return [array.tobytes() for array in packed.arrays]


@pytest.mark.parametrize("position", [5, WINDOW + 9])
def test_a_snapshot_does_not_change_while_decoding_goes_on(model: Any, position: int) -> None:
    live = LiveCaches(model)
    policy = lossless(live)
    caches = live.fresh()
    feed(model, caches, TOKENS[:position])
    packed = pack.pack_checkpoint(policy, kinds.snapshot(policy.codec.layout, caches, 0), position)
    before = contents(packed)
    saved = save(policy, caches, TOKENS, position)
    restored = saved.restore()
    for token in TOKENS[:20]:
        for each in (caches, restored):
            feed(model, each, [token])
    assert contents(packed) == before
    again = pack.pack_checkpoint(
        policy, kinds.snapshot(policy.codec.layout, saved.restore(), 0), position
    )
    assert contents(again) == before


@pytest.mark.parametrize("position", POSITIONS)
def test_what_comes_back_has_exactly_the_rows_before_the_position(
    model: Any, position: int
) -> None:
    """Also through `state`; and what lies behind them in memory shows nowhere."""
    live = LiveCaches(model)
    caches = live.fresh()
    feed(model, caches, TOKENS[:position])
    clean = save(lossless(live), caches, TOKENS, position)
    for leaf in kinds.leaves(caches):
        poison(leaf, position)
    saved = save(lossless(live), caches, TOKENS, position)
    assert bytes_of(saved) == bytes_of(clean)
    for leaf in kinds.leaves(saved.restore()):
        held = flat(leaf.state)
        assert all(mx.isfinite(array).all() for array in held)
        if hasattr(leaf, "offset"):
            most = getattr(leaf, "max_size", getattr(leaf, "chunk_size", position))
            assert leaf.offset == position
            assert {array.shape[2] for array in held} == {min(position, most)}
    found = feed(model, saved.restore(), *rest(position))
    assert mx.abs(found - cold(model, position)).max() <= SAME_CUTS


def bytes_of(saved: Saved) -> list[bytes]:
    sources = [*saved.rows, *([saved.checkpoint] if saved.checkpoint else [])]
    return [bytes(source.view) for source in sources]


def poison(leaf: Any, position: int) -> None:
    """Fill capacity that holds no row with NaN."""
    if not hasattr(leaf, "keys"):
        return
    rows = min(position, leaf.max_size) if hasattr(leaf, "max_size") else None
    if hasattr(leaf, "start_position"):
        rows = leaf.offset - leaf.start_position
    for name in ("keys", "values"):
        array = getattr(leaf, name)
        behind = mx.arange(array.shape[2])[:, None] >= (position if rows is None else rows)
        setattr(leaf, name, mx.where(behind, mx.nan, array))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("small", IN_16_BITS)
def test_every_dtype_survives(small: str, dtype: mx.Dtype) -> None:
    model = animal(small)
    model.set_dtype(dtype)
    live = LiveCaches(model)
    caches = live.fresh()
    feed(model, caches, TOKENS[:21])
    saved = save(lossless(live), caches, TOKENS, 21)
    theirs, ours = ([*kinds.leaves(c)] for c in (caches, saved.restore()))
    again = save(lossless(live), ours, TOKENS, 21)
    assert bytes_of(again) == bytes_of(saved)
    for one, other in zip(theirs, ours, strict=True):
        assert type(one) is type(other)
        assert [a.dtype for a in flat(one.state)] == [a.dtype for a in flat(other.state)]


def test_a_checkpoint_that_does_not_belong_is_refused(model: Any) -> None:
    live = LiveCaches(model)
    policy = lossless(live)
    caches = live.fresh()
    feed(model, caches, TOKENS[:17])
    saved = save(policy, caches, TOKENS, 17)
    if saved.checkpoint is None:
        with pytest.raises(RecordError, match="no use"):
            attach.plan(policy, saved.rows, saved.rows[0])
        return
    feed(model, caches, TOKENS[17:18])
    later = save_checkpoint(policy, caches, TOKENS, 18)
    other = save_checkpoint(policy, saved.restore(), TOKENS[1:], 17)
    view, path = saved.checkpoint.view, path_at(TOKENS, 17)
    for wrong in (
        None,
        attach.Source(later.view, 0, 1, path),
        attach.Source(other.view, 0, 1, path),
        attach.Source(view[:-1], 0, 1, path),
        attach.Source(saved.rows[0].view, 0, 1, path),
    ):
        with pytest.raises(RecordError):
            attach.plan(policy, saved.rows, wrong)
    assert attach.plan(policy, saved.rows, saved.checkpoint).rows == 17


def test_the_bytes_are_those_that_were_asked_for(model: Any) -> None:
    end = POSITIONS[-1]
    policy = CodecPolicy.of(probe(LiveCaches(model)), "none")
    caches = LiveCaches(model).fresh()
    feed(model, caches, TOKENS[:end])
    packed = pack.pack_checkpoint(policy, kinds.snapshot(policy.codec.layout, caches, 0), end)
    payload = sum(array.nbytes for array in packed.arrays)
    assert payload <= packed.nbytes < payload + 2048
    expected = 0
    for group in policy.codec.layout.states:
        rows = group.kind.rows_at(end)
        sizes = [p.heads * p.width * p.mlx_dtype.size for p in group.parts]
        expected += len(group.layers) * rows * sum(sizes)
    assert payload == expected
    with pytest.raises(RecordError, match="extent"):
        pack.write_checkpoint(
            packed, path_at(TOKENS, end), memoryview(bytearray(packed.nbytes - 1))
        )
