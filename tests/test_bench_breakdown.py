"""What a step is made of: each part's time in its own row, and a step that is the loop's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from tiny import byte_model, byte_tokenizer, plain_tokens, random_drafter

from redrafter_mlx.bench.measure.breakdown import PARTS, Breakdown, break_down
from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import DraftInput, Proposer
from redrafter_mlx.drafting.oracle import Replay
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.tree import Beams

PROMPT = [5, 6, 7, 8, 5, 6]


@dataclass
class Meter:
    """A clock that only moves when somebody works: the host at once, the device when evaluated."""

    now: float = 0.0
    owed: float = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, host: float, device: float) -> None:
        self.now += host
        self.owed += device

    def evaluate(self, arrays: Sequence[mx.array]) -> None:
        mx.eval(arrays)
        self.now += self.owed
        self.owed = 0.0


@dataclass
class Slowed:
    """A proposer that costs time, and remembers what it was asked."""

    inner: Proposer
    meter: Meter
    host: float
    device: float
    asked: list[DraftInput] = field(default_factory=list)

    @property
    def reads_context(self) -> tuple[int, ...]:
        return ()

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        self.meter.work(self.host, self.device)
        self.asked.append(given)
        return self.inner.propose(given, shape)


def measured(monkeypatch: pytest.MonkeyPatch, host: float, device: float) -> Breakdown:
    """With a target of 5 and 0.5, and a drafter of `device` and `host`."""
    meter = Meter()
    model = byte_model()
    drafts = Replay(PROMPT + plain_tokens(model, PROMPT, 60), 258)
    redrafter = Redrafter(model, byte_tokenizer(), Slowed(drafts, meter, host, device))
    verify = redrafter.target.verify

    def slow_verify(*given: object, **named: object) -> object:
        meter.work(0.5, 5.0)
        return verify(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(redrafter.target, "verify", slow_verify)
    return break_down(
        redrafter, PROMPT, BeamShape(2, 4), rounds=3, steps=3, clock=meter, evaluate=meter.evaluate
    )


def rows(found: Breakdown) -> dict[str, tuple[float, float]]:
    return {p.name: (p.device.median, p.host.median) for p in found.parts}


def test_drafting_that_is_a_tenth_slower_shows_in_its_row_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = measured(monkeypatch, host=0.1, device=1.0)
    after = measured(monkeypatch, host=0.1, device=1.1)
    hosts = measured(monkeypatch, host=0.11, device=1.0)
    assert tuple(rows(before)) == PARTS
    assert rows(before)["verification"] == pytest.approx((5.0, 0.5))
    assert rows(before)["drafting"] == pytest.approx((1.0, 0.1))
    assert rows(after)["drafting"] == pytest.approx((1.1, 0.1))
    assert rows(hosts)["drafting"] == pytest.approx((1.0, 0.11))
    for name in PARTS:
        if name != "drafting":
            assert rows(before)[name] == pytest.approx(rows(after)[name])
            assert rows(before)[name] == pytest.approx(rows(hosts)[name])
    assert after.device.median - before.device.median == pytest.approx(0.1)
    assert hosts.host.median - before.host.median == pytest.approx(0.01)


def test_work_on_the_device_in_drafting_shows_in_its_row_by_the_real_clock() -> None:
    @dataclass
    class Heavy:
        inner: Proposer
        reads_context: tuple[int, ...] = ()

        def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
            # Far more than a tiny step, and joined to the drafts so that it cannot be left out.
            x = given.context[0, 0] * 1e-9 + mx.ones((768, 768))
            for _ in range(3):
                x = (x @ x) / 768
            beams = self.inner.propose(given, shape)
            return beams._replace(log_probs=beams.log_probs + mx.min(x) * 0)

    model = byte_model()
    drafts = Replay(PROMPT + plain_tokens(model, PROMPT, 40), 258)
    redrafter = Redrafter(model, byte_tokenizer(), Heavy(drafts))
    found = break_down(redrafter, PROMPT, BeamShape(2, 3), rounds=3, steps=2)
    parts = {part.name: part.device for part in found.parts}
    # Whoever else uses the machine delays one round or another, not the same part in all three.
    drafting = parts.pop("drafting").high
    assert all(drafting > 3 * device.low for device in parts.values())


@pytest.mark.parametrize("shape", [BeamShape(2, 4), BeamShape(1, 3), BeamShape(3, 3, 4)])
def test_the_whole_step_is_the_loops_step(shape: BeamShape) -> None:
    """Its drafts begin where the loop's do: behind the target's own choices."""
    meter = Meter()
    model = byte_model()
    want = plain_tokens(model, PROMPT, 60)
    proposer = Slowed(Replay(PROMPT + want, 258), meter, 0.0, 0.0)
    break_down(Redrafter(model, byte_tokenizer(), proposer), PROMPT, shape, rounds=1, steps=4)
    whole = proposer.asked[-5:]  # the last variant of the only round
    places = [given.position.item() - len(PROMPT) for given in whole]
    assert [given.root.item() for given in whole] == [want[place] for place in places]
    assert places == sorted(set(places))


def test_the_loop_is_timed_behind_the_same_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host's part alone shows on a clock that the loop's own evaluation does not move."""
    assert measured(monkeypatch, host=0.25, device=1.0).loop.median == pytest.approx(0.75)


def test_measuring_the_parts_leaves_the_model_as_it_was() -> None:
    redrafter = Redrafter(byte_model(), byte_tokenizer(), random_drafter(vocab_size=258))
    before = redrafter.generate(PROMPT, max_tokens=12).token_ids
    break_down(redrafter, PROMPT, BeamShape(2, 3), rounds=1, steps=1)
    assert redrafter.generate(PROMPT, max_tokens=12).token_ids == before
