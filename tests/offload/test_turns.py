"""Turns of a conversation on a simulated GPU that has hardly more memory than they take, with true shapes that compute
nothing: what the engine has there itself is no reason to read a text again, or to have blocks leave."""

import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from computing_nothing import ComputingNothing, UnwrittenWeights, launching_nothing
from cuda_simulator import Simulator
from ledger import with_reserve
from simulated_gpu import simulated_system
from test_transients import DRAFT, SHAPES, config
from triforce.kernels import use_kernels
from triforce.offload import Engine, Sampling
from triforce.offload.planning.run_plan import CUDA_CONTEXT, WORKSPACE, make_plan
from triforce.offload.settings import Settings
from triforce.offload.transfer.cuda_link import CudaLink
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp import CapacityError
from triforce.tp.decoder import Decoder

NEW_TOKENS, QUESTION, ROOM = 8, 30, 2048
SHAPE = SHAPES["8B"] | {"vocab_size": 32000}  # whose logits are computed sooner
LAYERS = 4
"""Fewer would take less memory than it takes to stream them."""
PLENTY = 2**42


class Link(CudaLink):
    """A link whose host memory has no page."""

    def host_memory(self, shape, dtype):
        memory = torch.empty(*shape, dtype=dtype)
        self._runtime.lock_pages(memory.data_ptr(), memory.nbytes)
        weakref.finalize(memory.untyped_storage(), self._runtime.unlock_pages, memory.data_ptr())
        return memory


@dataclass
class Turn:
    """What a turn has read, and what was on the GPU after it."""

    read: int
    resident: int
    warnings: list[str]


class Conversation:
    """Turns over a long text, each run of which its caller still has when the next begins."""

    def __init__(self, directory, tokens, resident, room=ROOM):
        """Args: `resident` is the share of the keys and values that the GPU has memory for; from 1 on, none stream."""
        self.simulator, self.prompt, self.runs = Simulator(), [7] * tokens, []
        shapes = (
            config(directory / "target", **SHAPE, num_hidden_layers=LAYERS),
            config(directory / "draft", vocab_size=32000, **DRAFT),
        )
        weights = UnwrittenWeights(torch.bfloat16)
        with ComputingNothing():
            self.decoders = [Decoder(shape, weights, torch.device("cpu")) for shape in shapes]  # pyright: ignore[reportArgumentType]
        self.settings = Settings(block_length=6, draft_length=4, pack="off")
        self.room, context = room, tokens + NEW_TOKENS + room
        asked = replace(self.engine(None)._models.request(context, NEW_TOKENS), gpu_bytes=PLENTY)
        by_hand = replace(self.settings, resident=None if resident >= 1 else 0.0)
        plan = make_plan(replace(asked, settings=by_hand))
        self.card = with_reserve(plan, plan.weights + plan.working + int(min(resident, 1) * plan.kv) + CUDA_CONTEXT)
        self.simulator.outside = CUDA_CONTEXT

    def engine(self, device_bytes):
        system = simulated_system(self.simulator, device_bytes=device_bytes)
        system = replace(system, make_link=lambda *_: Link(torch.device("cpu"), runtime=self.simulator.runtime()))
        target, draft = self.decoders
        engine = Engine(target, draft, self.settings, system=system)
        engine._kept.room = self.room
        return engine

    def turns(self, count, between=lambda conversation, turn: None):
        with launching_nothing(), use_kernels(as_gpu=("triton",)), ComputingNothing(), self.simulator:
            self.kept = self.engine(self.card)
            for _, tensor in self.kept.held():
                self.simulator.memory(tensor)
            for turn in range(count):
                between(self, turn)
                yield self.turn()
                self.simulator.workspaces = 4 * WORKSPACE  # libraries have them from the first pass on

    def turn(self):
        run = self.kept.stream(self.prompt, Sampling(0.0), NEW_TOKENS, ignore_eos=True)
        self.runs.append(run)
        for event in run:
            if event.index:
                break
        run.close()
        read = len(self.prompt) - run.statistics.reused_tokens
        self.prompt = self.prompt + run.statistics.token_ids + [9] * QUESTION
        return Turn(read, self.blocks.placement.num_resident, run.warnings)

    @property
    def blocks(self):
        return self.kept._kept.caches[-1].blocks


@pytest.mark.parametrize("resident", [0.3, 1])
@pytest.mark.parametrize("tokens", [32768, 122880])
@pytest.mark.slow(keep=("32768-0.3",))
def test_a_turn_reads_what_is_new_and_no_block_leaves(tmp_path, tokens, resident):
    """What is free may vary by less than a hundredth of the card."""

    def vary(conversation, turn):
        conversation.simulator.others = conversation.card // 200 * (turn > 0)

    conversation = Conversation(tmp_path, tokens, resident)
    first, *others = conversation.turns(5, vary)
    assert conversation.blocks.all_on_device == (resident == 1)
    assert first.read == tokens and first.resident > 0
    for turn in others:
        assert turn.read < 2 * QUESTION and turn.resident == first.resident and not turn.warnings
    assert all(run.stats()["token_ids"] == run.statistics.token_ids for run in conversation.runs)


@pytest.mark.slow
def test_a_cache_that_is_all_on_the_gpu_stays_there_although_another_one_would_stream(tmp_path):
    """The same question again, while hardly less memory is free than at first."""

    def vary(conversation, turn):
        conversation.prompt = conversation.prompt[:32768]
        conversation.simulator.others = conversation.card // 200 * (turn > 0)

    conversation = Conversation(tmp_path, 32768, 1, room=0)
    first, second = conversation.turns(2, vary)
    assert second.read < QUESTION and second.resident == first.resident and conversation.blocks.all_on_device


def test_blocks_leave_between_turns_for_another_process_and_it_is_said(tmp_path):
    def take(conversation, turn):
        if turn == 1:
            spare = conversation.blocks.footprint.spare
            conversation.simulator.others = conversation.card // 100 + spare // 2

    conversation = Conversation(tmp_path, 32768, 0.4)
    first, second, third = conversation.turns(3, take)
    assert second.read < 2 * QUESTION and third.read < 2 * QUESTION
    assert 0 < second.resident < first.resident and third.resident == second.resident
    assert any("GPU memory ran low" in line for line in second.warnings) and not third.warnings


@pytest.mark.slow
def test_no_block_leaves_if_that_is_not_enough(tmp_path, monkeypatch):
    """The text is read again then, and it is said that less of it is on the GPU."""

    def take(conversation, turn):
        if turn == 1:
            spare, count = conversation.blocks.footprint.spare, conversation.blocks.placement.num_spare
            less_may_be_free = conversation.card // 100 + 2 * spare // count
            conversation.simulator.others = spare + less_may_be_free

    conversation = Conversation(tmp_path, 32768, 0.5)
    monkeypatch.setattr(StreamedBlocks, "offload", lambda blocks, num_bytes: pytest.fail(f"{num_bytes} bytes left"))
    first, second = conversation.turns(2, take)
    assert second.read > 32768 and second.resident < first.resident
    assert any("GPU memory ran low" in line for line in second.warnings)


@pytest.mark.slow
def test_what_others_have_is_what_is_said_of_them(tmp_path):
    def take(conversation, turn):
        if turn == 1:
            conversation.simulator.others = conversation.card // 4

    conversation = Conversation(tmp_path, 32768, 1)
    turns = conversation.turns(2, take)
    next(turns)
    with pytest.raises(CapacityError) as error:
        next(turns)
    others = f"{conversation.card / 4 / 2**30:.2f} GiB"
    assert f"(other processes have {others})" in str(error.value)
