"""What cannot be otherwise with a memory. A test that Llama passes, and we neither pass nor name, counts as failed."""

TENSOR_PARALLEL = "no tensor parallelism: memories hold all heads of a layer, and loading with a plan is refused"
INHERENT = {
    "test_attention_outputs": "fused attention kernels return no weights: `output_attentions` is refused",
    "test_model_rope_scaling_from_config_1_dynamic": (
        "positions run inside blocks, so that none is beyond the length at which dynamic NTK begins"
    ),
    "test_tp_plan_matches_params": TENSOR_PARALLEL,
    "test_tied_head_has_a_tp_plan_entry": TENSOR_PARALLEL,
}
# Tests of hidden states and attentions: without the second half, which `test_attention_outputs` stands for.
WITHOUT_ATTENTIONS = ("test_model_outputs_equivalence", "test_retain_grad_hidden_states_attentions")
