"""Settings of a plan that save memory, in words for trainers that have no argument for them."""

from __future__ import annotations

from trainfit.core.plan_records import Plan


def saver_notes(plan: Plan) -> list[str]:
    """Notes on what saves memory and is no argument of a trainer."""
    notes = []
    if plan.quantization != "none":
        bits = "load_in_4bit, nf4" if plan.quantization == "nf4" else "load_in_8bit"
        notes.append(
            f"planned on {plan.quantization} weights: give it a BitsAndBytesConfig ({bits})"
        )
    if plan.optimizer in ("adamw_bf16", "muon"):
        notes.append(f"{plan.optimizer} is trainfit's own: AdamW in its place keeps more state")
    if plan.offload_activations:
        notes.append(
            "planned with activations in the host's memory: run the forward pass under "
            "torch.autograd.graph.save_on_cpu(pin_memory=True)"
        )
    if plan.runtime.memory_gib is not None:
        notes.append(
            f"planned for {plan.runtime.memory_gib:g} GiB: limit torch with "
            "torch.cuda.set_per_process_memory_fraction"
        )
    return notes
