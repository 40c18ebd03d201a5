"""What a row about one of ComfyUI's own model classes says (image.py, video.py, audio.py; read in ComfyUI v0.33.0):
where its blocks are and what happens between them. The code between two calls of blocks decides between stream and
relay, as docs/internals/adding_a_family.md says. A class without a row is relayed, if its blocks are called as modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..tensor_plan import BlockList, TensorPlan
from ..token_plan import TokenPlan

Transport = Literal["stream", "relay"]
# Arguments and dict keys that are not entered when tensors are moved: all share and change these objects.
PASSED_BY = ("transformer_options", "control")
# "run": tests build the class from an installed ComfyUI. "outside": it is in no ComfyUI that the tests have; its public
# source was run once beside 0.33.0, split and whole, bit for bit; of a class that is refused it was read.
Evidence = Literal["run", "outside"]


def runs_over(
    text: tuple[str, ...] = ("*txt_*", "*context_block*", "*add_?_proj*", "*to_add_out*"),
    sample: tuple[str, ...] = ("*mod*", "*adaLN*", "*adaln*", "*_mod.*"),
    **more: Any,
) -> BlockList:
    """What the linears of all lists of blocks run over, by the names that most classes have."""
    return BlockList("", text_modules=text, sample_modules=sample, **{"is_joint": True, **more})


@dataclass(frozen=True)
class NativeModel:
    """How one of ComfyUI's own model classes is laid out. Fully qualified names count from the diffusion model."""

    path: str  # of the class, e.g. "comfy.ldm.flux.model.Flux"
    # ModuleLists or ModuleDicts in execution order; a name that is neither is itself one block.
    block_lists: tuple[str, ...] = ("blocks",)
    # Modules after the last block, which stay on the main device. A build may lack some; a ModuleList is its members.
    tail: tuple[str, ...] = ("final_layer",)
    note: str = ""  # what a reader should know, in a sentence; a refusal of another transport says it, too
    # "stream": activations may stay on a card until the next card's first block. "relay": each block of another card
    # sends its output to the main device. Both send the last block's there: some tails mix free parameters with it.
    transport: Transport = "stream"
    # Name in the keys (name, index) of patches_replace["dit"] -> block list that index counts in.
    replace_keys: Mapping[str, str] = field(default_factory=dict)
    # Names in transformer_options["patches"] that are called inside blocks, with tensors on the block's card.
    patches_inside: tuple[str, ...] = ()
    # Parameters held by the model itself, or by a module around its blocks. Those read before the blocks alone stay on
    # the main device, those read behind them alone go where the tail is. Any other could be needed on two cards.
    front_parameters: tuple[str, ...] = ()
    tail_parameters: tuple[str, ...] = ()
    # As of ModelFamily; the name may be of a method of the model. With `mixes_early` the forward computes with these
    # before its last block, so that the tail's card waits for them at once.
    read_by_tail: Mapping[str, int] = field(default_factory=dict)
    mixes_early: bool = False
    # Method of the model behind the last block -> its keyword arguments with tensors that other cards need as well.
    tail_arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hooks_children: bool = False  # blocks are never called; a function walks their children, which are hooked instead
    # A list whose blocks run right after the blocks of a main list that they add to, on their devices -> the main list,
    # and the attribute of the model with a dict {index in the main list: index in the side list}.
    follows: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    optional: tuple[str, ...] = ()  # block lists that not every build of the class has
    is_sequential: bool = False  # microbatches must not interleave: blocks get fresh tensors from the main device
    refusal: str = ""  # why this class cannot be split at all
    untrained: str = ""  # why this class cannot be trained though it can be split
    no_forecast: str = ""  # why a dry run, whose tensors have no numbers, cannot tell what a training of it holds
    reads_first: tuple[str, ...] = ()  # options of a CONDITIONING that it reads of the first sample of a batch alone
    evidence: Evidence = "run"  # what the row rests on
    # Keyword arguments of blocks with an object in which they share what they have computed, on the device of the first
    # that did. Away from the main device each device gets an empty one: its class called without arguments.
    per_device: tuple[str, ...] = ()
    remembers: tuple[str, ...] = ()  # attributes in which a forward leaves what the next one computes faster with
    # Whether a forward with patches neither reads nor leaves that; in training it would be of an earlier LoRA.
    forgets_if_patched: bool = False
    linears: BlockList = runs_over()  # of its blocks, for estimates of computing time
    # Patterns of the linears that hold attention's projections beside others and are not called after it.
    fused_attention: tuple[str, ...] = ()
    # How its blocks are divided among cards that compute each of them together; () if nobody described that.
    tensor: tuple[TensorPlan, ...] = ()
    ends_on_main_device: bool = False  # whether its forward computes behind the blocks, outside of any module
    has_out: bool = False  # whether its blocks name tensors to write into (out=), which autograd refuses
    in_place: tuple[str, ...] = ()  # modules that are called between blocks and write into what they are given
    # As LatentSpec has them: frames by which its clips grow, then clip_steps. () where its latent format says all.
    clip_steps: tuple[int, ...] = ()
    reads_level: bool = False  # whether it reads the noise level as a number, which no tensor without numbers has
    takes_one: bool = False  # whether a forward takes one sample alone
    fps: float = 0.0  # of the clips that it is trained on where nobody says otherwise; 0 for a class that makes images
    tokens: TokenPlan = TokenPlan({})  # where its rows (tokens) are; without blocks if nobody described that
    no_tokens: str = ""  # why cards cannot share out its rows, which are not derived either
    # The rows as derived and proved here (nodes/host/split/deriving.py), by signatures of inputs.
    derived_rows: Mapping[str, TokenPlan] = field(default_factory=dict)
    # Kinds of inputs with which gradients of a class that nobody has described were proved on this machine.
    trained_inputs: tuple[str, ...] = ()
    is_derived: bool = False  # nobody has seen such a class run: that it calls its blocks is looked at

    @property
    def class_name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def token_plan(self) -> TokenPlan | None:
        """Where its rows are: as written, else as derived for the first inputs."""
        return self.tokens if self.tokens.blocks else next(iter(self.derived_rows.values()), None)

    @property
    def why_no_tokens(self) -> str:
        """Why cards cannot share out its rows; "" if they can."""
        reason = self.no_tokens or "nobody has described where its tokens are"
        return "" if self.token_plan else f"{self.class_name} cannot be shared out by tokens: {reason}"

    @property
    def can_overlap(self) -> bool:
        """Whether micro-batches may run interleaved, each with its own copy of transformer_options."""
        return self.transport == "stream" and not self.is_sequential

    @property
    def keeps_nothing(self) -> bool:
        """Whether a forward is known to leave nothing for the next, so that copies may compute several at once."""
        return not (self.remembers or self.is_derived)

    @property
    def main_lists(self) -> tuple[str, ...]:
        """The lists whose blocks are placed; the others follow them."""
        return tuple(name for name in self.block_lists if name not in self.follows)
