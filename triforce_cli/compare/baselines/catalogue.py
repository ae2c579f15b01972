"""The systems that can be compared, with a description, the module that runs the system, and the packages it needs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

_PACKAGE = "triforce.cli.compare.baselines"


@dataclass(frozen=True)
class Entry:
    """A system, and its requirements."""

    name: str
    summary: str
    module: str
    """The module with `load(job)`; see `protocol.System`."""
    imports: tuple[str, ...] = ()
    """Modules of other packages that it needs."""
    install: str = ""
    """The command that installs them."""
    needs_draft: bool = False
    batch_only: bool = False
    """Whether it only decodes several sequences."""
    single_sequence_reason: str | None = None
    """The reason why it only decodes one sequence; `None` if it also decodes several."""
    prepares: bool = False
    """Whether its module has `prepare(job)`, to be run once before all measurements."""

    def missing(self) -> str | None:
        """The packages that are not installed and the command that installs them; `None` if all are."""
        absent = [name for name in self.imports if find_spec(name) is None]
        return f"not installed ({', '.join(absent)}): {self.install}" if absent else None


TRIFORCE = Entry("triforce", "this engine, speculating", f"{_PACKAGE}.ours")

BASELINES = {
    entry.name: entry
    for entry in (
        Entry("autoregressive", "this engine, token by token (--tiers 1)", f"{_PACKAGE}.ours"),
        Entry("transformers", "Hugging Face transformers, generate()", f"{_PACKAGE}.transformers_baseline"),
        Entry(
            "transformers-assisted",
            "the same, assisted generation with the draft",
            f"{_PACKAGE}.transformers_baseline",
            needs_draft=True,
            single_sequence_reason="assisted generation takes one sequence",
        ),
        Entry(
            "transformers-prefix",
            "the same for --batch: the common text is prefilled once, and its cache copied",
            f"{_PACKAGE}.transformers_baseline",
            batch_only=True,
        ),
        Entry(
            "deepspeed",
            "DeepSpeed, ZeRO-3 inference with offloaded parameters",
            f"{_PACKAGE}.deepspeed_baseline",
            imports=("deepspeed", "accelerate"),
            install="pip install deepspeed accelerate",
        ),
        Entry(
            "llama.cpp",
            "llama.cpp through llama-cpp-python",
            f"{_PACKAGE}.llama_cpp_baseline",
            imports=("llama_cpp", "gguf"),
            install="pip install llama-cpp-python gguf",
            prepares=True,
        ),
    )
}
"""The baselines by name, in the order of the help."""
