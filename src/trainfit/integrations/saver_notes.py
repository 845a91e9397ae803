"""Settings of a plan that save memory, in words for trainers that have no argument for them."""

from __future__ import annotations

from trainfit.core.plan_records import Plan

_QUANTIZED = {
    "nf4": 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16',
    "int8": "load_in_8bit=True",
}


def saver_notes(plan: Plan) -> list[str]:
    """Notes on what saves memory and is no argument of a trainer."""
    notes = []
    if plan.quantization != "none":
        options = _QUANTIZED[plan.quantization]
        notes.append(
            f"planned with weights in {plan.quantization}: load the model with "
            f"quantization_config=BitsAndBytesConfig({options})"
        )
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
