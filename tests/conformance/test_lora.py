import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.train_adapters import ENDS, WHOLE_HEAD

OTHER = "the gradient is the adapter's, not that of the whole model; see plugins/torch/tests/test_adapter.py"
ROUNDED = "weights that come are rounded; see plugins/torch/tests/test_quantize_model.py"


class TestLoRA(TrainEngineSuite):
    backend = "adapted"
    plugins = ["lora_plugin.py"]
    unsupported = {
        "test_the_gradient_is_that_of_the_global_sum": OTHER,
        "test_the_policy_gradient_equals_the_reference": OTHER,
        "test_gradients_add_up_over_calls": OTHER,
        "test_grad_norm_is_the_global_norm_before_clipping": OTHER,
        "test_gradients_are_clipped_to_max_grad_norm": OTHER,
        "test_the_norm_is_the_same_on_any_number_of_ranks": OTHER,
        "test_gradients_of_other_outputs_equal_the_reference": OTHER,
        "test_gradients_of_candidates_equal_the_reference": OTHER,
        "test_several_steps_equal_an_independent_optimizer": OTHER,
        "test_clipping_begins_at_the_limit_and_survives_any_norm": OTHER,
        "test_other_models_are_as_right_as_the_first": OTHER,
        "test_long_packs_equal_the_reference": OTHER,
        "test_many_sequences_equal_the_reference": OTHER,
        "test_uneven_shares_are_those_of_the_whole": OTHER,
        "test_sequences_that_belong_together_are_not_split": OTHER,
        "test_a_step_starts_from_weights_that_were_loaded": OTHER,
        "test_weight_decay_is_on_matrices_only": "the frozen weights do not decay",
        "test_a_resumed_run_continues_exactly": "it resumes over another base, which is refused",
        "test_a_state_replaces_all_of_an_engine_that_trained": "it resumes over another base, which is refused",
    }


@pytest.mark.slow
class TestLoRAAboveAQuantizedBase(TestLoRA):
    reference = "rounded_reference.py:nf4"
    lora = ({}, ENDS, WHOLE_HEAD)
    options = {"quantize": "nf4", "param_dtype": "fp32", "compute_dtype": "fp32"}
    unsupported = {
        **TestLoRA.unsupported,
        "test_named_weights_are_those_of_the_model_folder": "they are those of the folder, rounded",
        "test_weights_go_from_one_engine_to_another": ROUNDED,
        "test_weights_are_mixed_in_their_share": ROUNDED,
        "test_a_whole_model_takes_the_place_of_an_adapter": ROUNDED,
    }
