"""The adapter for OpenRLHF with a stand-in for its actor, which does not run without flash-attn."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from example_scripts import differ_in_few_lines_and_agree
from models import VOCAB, distance, take_gradients, tiny
from test_token_scores import padded

import dormouse.openrlhf
from dormouse.openrlhf import MODULE, UnsupportedTrainerError, refusals
from dormouse.trainers import short_prompts

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "openrlhf"
sys.path.insert(0, str(EXAMPLES))
from stand_in import StandInActor

# Of the padding: left, right, or both.
SIDES = ({"left": 3, "right": 0}, {"left": 0, "right": 2}, {"left": 2, "right": 1})


@pytest.fixture
def shared_class(runtime):
    """A class of its own that shares prompts."""
    return dormouse.openrlhf.share(copy_of(StandInActor), runtime=runtime)


def copy_of(actor_class):
    return type("Actor", (torch.nn.Module,), dict(vars(actor_class)) | {"__init__": init})


def init(self, model, temperature=1.0):
    torch.nn.Module.__init__(self)
    self.model, self.temperature = model, temperature


def a_batch(*, left=2, right=1, holes=True, longer=0, seed=3):
    """Rows of three prompts in any order, as OpenRLHF has them: the mask of actions has a column
    for every token but the first. One row has no response."""
    prompts = [n + longer for n in (17, 11, 17, 17, 11, 23, 17)]
    ids, mask, keep = padded(prompts, [4, 6, 1, 8, 3, 0, 5], left=left, right=right, seed=seed)
    actions = mask.clone()
    actions[:, :-keep] = 0
    if holes:
        # What a tool returns between two turns, and a first token that is none.
        actions[1, -keep + 2 : -keep + 4] = 0
        actions[3, -keep : -keep + 2] = 0
    return ids, actions[:, 1:], mask


def loss_of(logps, entropies, actions):
    """A loss that mixes rows, and reads places without an action as little as OpenRLHF does."""
    weights = torch.linspace(-1, 2, logps.numel(), dtype=logps.dtype).view_as(logps)
    total = (logps.exp() * weights * actions).sum() + ((logps * actions).sum(1) ** 2).mean() * 1e-2
    if entropies is not None:
        total = total - 0.1 * (entropies[:, -actions.shape[1] :] * weights.flip(0) * actions).sum()
    return total


def computed(actor, batch, *, entropy):
    """Returns log-probabilities, entropies where actions are, and gradients."""
    ids, actions, mask = batch
    asked = {"return_output": entropy, "return_entropy": entropy}
    found = actor(ids, actions, attention_mask=mask, **asked)
    logps, entropies = (found[0], found[1].entropy) if entropy else (found, None)
    loss_of(logps, entropies, actions).backward()
    values = [logps.detach()]
    if entropy:
        assert entropies.shape == (len(ids), ids.shape[1] - 1)
        values.append(entropies.detach()[:, -actions.shape[1] :] * actions)
    return values, take_gradients(actor.model)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("columns", ["all", "last"])
@pytest.mark.parametrize(
    "temperature, entropy", [(1.0, True), (1.0, False), (0.7, False), (0.7, True)]
)
def test_values_and_gradients_are_those_of_the_class(
    sides, columns, temperature, entropy, shared_class
):
    model, batch = tiny(), a_batch(**sides)
    if columns == "last":
        batch = (batch[0], batch[1][:, -12:], batch[2])
    wanted = computed(StandInActor(model, temperature), batch, entropy=entropy)
    actor = shared_class(model, temperature)
    got = computed(actor, batch, entropy=entropy)
    for ours, own in zip(got[0], wanted[0], strict=True):
        assert ours.shape == own.shape and (ours - own).abs().max() < 1e-10
    assert distance(got[1], wanted[1]) < 1e-10
    assert actor.sharing.rows == 6
    # Of 17 and 11 tokens; and the one with two tokens more that are no actions.
    assert actor.sharing.prompts == 3


def test_values_without_a_graph(shared_class):
    model, (ids, actions, mask) = tiny(dtype=torch.float32), a_batch()
    actor = shared_class(model).eval()
    with torch.no_grad():
        got = actor(ids, actions, mask)
        wanted = StandInActor(model)(ids, actions, mask)
    assert not got.requires_grad and got.dtype == torch.float32
    assert (got - wanted).abs().max() < 1e-4


def test_the_model_is_looked_up_in_each_call(shared_class):
    actor, batch = shared_class(tiny()), a_batch()
    computed(actor, batch, entropy=False)
    actor.model = other = tiny(seed=1)
    got = computed(actor, batch, entropy=False)
    wanted = computed(StandInActor(other), batch, entropy=False)
    assert distance(got[1], wanted[1]) < 1e-10


def test_calls_without_actions_run_the_own_forward(shared_class, caplog):
    dormouse.openrlhf.actor._note_own_forward.cache_clear()
    actor, (ids, _, mask) = shared_class(tiny()), a_batch()
    for _ in range(2):
        output = actor(ids, attention_mask=mask, return_output=True)
        assert output.logits.shape == (*ids[:, 1:].shape, VOCAB)
    assert [each.message for each in caplog.records] == [
        "a call of the actor without action_mask runs as in OpenRLHF"
    ]


@pytest.mark.parametrize("entropy", [False, True])
def test_a_batch_with_a_prompt_of_one_token_runs_the_own_forward(entropy, shared_class, caplog):
    short_prompts.note.cache_clear()
    ids, mask, keep = padded([1, 11, 1, 11], [4, 6, 3, 2])
    actions = mask.clone()
    actions[:, :-keep] = 0
    model, batch = tiny(), (ids, actions[:, 1:], mask)
    wanted = computed(StandInActor(model, 0.7), batch, entropy=entropy)
    actor = shared_class(model, 0.7)
    for _ in range(2):
        got = computed(actor, batch, entropy=entropy)
        assert all(map(torch.equal, got[0], wanted[0])) and distance(got[1], wanted[1]) == 0
    assert [each.message for each in caplog.records] == [
        "a batch with a prompt of fewer than 2 tokens runs as in OpenRLHF"
    ]
    assert actor.sharing.rows == 0
    # Others are shared.
    computed(actor, a_batch(), entropy=entropy)
    assert actor.sharing.rows == 6


def test_a_class_is_restored(runtime):
    own = copy_of(StandInActor)
    methods = own.__init__, own.forward
    assert dormouse.openrlhf.share(own, runtime=runtime) is own
    assert (own.__init__, own.forward) != methods
    with pytest.raises(UnsupportedTrainerError, match="already"):
        dormouse.openrlhf.share(own, runtime=runtime)
    dormouse.openrlhf.restore(own)
    assert (own.__init__, own.forward) == methods
    dormouse.openrlhf.restore(own)


def test_another_signature_is_refused():
    class Changed(StandInActor):
        def __init__(self):
            super().__init__()

        def forward(self, sequences, action_mask=None):
            pass

    with pytest.raises(UnsupportedTrainerError, match="accepted: Actor of OpenRLHF 0.11"):
        dormouse.openrlhf.share(Changed)
    assert "_dormouse_own_methods" not in vars(Changed)


@pytest.mark.parametrize(
    "temperature, asked, match",
    [
        (1.0, {"pixel_values": torch.zeros(1)}, "images"),
        (1.0, {"ring_attn_group": object()}, "ring_attn_group"),
        (1.0, {"allgather_logits": True}, "allgather_logits"),
        (1.0, {"return_logprobs": True}, "return_logprobs"),
        (1.0, {"return_entropy": True}, "without return_output"),
        (1.0, {"attention_mask": None}, "attention_mask"),
    ],
)
def test_calls_that_are_refused(temperature, asked, match, shared_class):
    ids, actions, mask = a_batch()
    actor = shared_class(tiny(), temperature)
    with pytest.raises(UnsupportedTrainerError, match=match):
        actor(ids, actions, **({"attention_mask": mask} | asked))


@pytest.mark.parametrize("version, is_refused", [("0.11.0", True), ("0.11.1", False)])
def test_entropies_without_the_temperature_are_refused(
    version, is_refused, shared_class, monkeypatch
):
    monkeypatch.setattr(refusals.importlib.metadata, "version", lambda name: version)
    ids, actions, mask = a_batch()
    actor, asked = shared_class(tiny(), 0.7), {"return_entropy": True, "return_output": True}
    refused = pytest.raises(UnsupportedTrainerError, match="temperature 0.7.*0.11.0 computes")
    with refused if is_refused else contextlib.nullcontext():
        actor(ids, actions, mask, **asked)
    # Log-probabilities alone do not depend on it.
    actor(ids, actions, mask)


def test_images_of_the_actor_are_refused(shared_class):
    actor, (ids, actions, mask) = shared_class(tiny()), a_batch()
    actor.is_vlm = True
    with pytest.raises(UnsupportedTrainerError, match="images"):
        actor(ids, actions, mask)


def test_batches_that_are_refused(shared_class):
    actor, (ids, actions, mask) = shared_class(tiny()), a_batch()
    hole, empty, beside = mask.clone(), mask.clone(), actions.clone()
    hole[0, 12] = 0
    empty[0] = 0
    beside[0, -1] = 1
    for own, match in (
        ((ids, actions, hole), "hole"),
        ((ids, actions, empty), "without tokens"),
        ((ids, beside, mask), "padding"),
        ((ids, mask, mask), "columns"),
    ):
        with pytest.raises(UnsupportedTrainerError, match=match):
            actor(*own)


def test_other_outputs_are_refused(shared_class):
    actor, (ids, actions, mask) = shared_class(tiny()), a_batch()
    _, output = actor(ids, actions, mask, return_output=True)
    assert output.entropy is None
    for name in ("logits", "aux_loss"):
        with pytest.raises(UnsupportedTrainerError, match=f"output.{name} is read"):
            getattr(output, name)
        with pytest.raises(UnsupportedTrainerError, match=f"output.{name} is read"):
            output[name]


def test_liger_is_refused(shared_class):
    actor, (ids, actions, mask) = shared_class(tiny()), a_batch()
    norm = actor.model.model.norm
    norm.__class__ = type("Norm", (type(norm),), {"__module__": "liger_kernel.transformers"})
    with pytest.raises(UnsupportedTrainerError, match="liger"):
        actor(ids, actions, mask)


def test_a_class_that_computes_otherwise_is_refused(runtime):
    class Changed(copy_of(StandInActor)):
        def __init__(self, *own):
            super().__init__(*own)

        def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False,
                    allgather_logits=False, return_logprobs=False, ring_attn_group=None,
                    packed_seq_lens=None, return_entropy=False, **mm_inputs):  # fmt: skip
            return 1.01 * super().forward(sequences, action_mask, attention_mask)

    actor = dormouse.openrlhf.share(Changed, runtime=runtime)(tiny())
    with pytest.raises(UnsupportedTrainerError, match="own log-probabilities"):
        actor(*a_batch())


def test_the_class_is_shared_when_it_is_imported(tmp_path, monkeypatch, runtime):
    package = tmp_path / "openrlhf" / "models"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "actor.py").write_text("from stand_in import StandInActor as Actor\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    try:
        dormouse.openrlhf.register(runtime=runtime)
        assert MODULE not in sys.modules
        from openrlhf.models.actor import Actor

        assert sys.meta_path == finders
        actor = Actor(tiny())
        computed(actor, a_batch(), entropy=False)
        assert actor.sharing.prompts == 3
        dormouse.openrlhf.restore(Actor)
        dormouse.openrlhf.register(runtime=runtime)
        assert "_dormouse_own_methods" in vars(Actor)
    finally:
        dormouse.openrlhf.restore(StandInActor)
        for name in [each for each in sys.modules if each.split(".")[0] == "openrlhf"]:
            del sys.modules[name]


@pytest.mark.slow
def test_examples_differ_in_few_lines_and_agree():
    differ_in_few_lines_and_agree(EXAMPLES, ("actor.py", "actor_shared.py"))
