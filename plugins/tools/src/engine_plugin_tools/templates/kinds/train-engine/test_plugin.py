"""The contracts that every train engine keeps: the page 'Contracts of the conformance kit'."""

from engine_plugin_testing import TrainEngineSuite


class TestTemplateName(TrainEngineSuite):
    backend = "template_name"
    optimizer = "sgd"  # how gradients are derived from a step of the weights
    unsupported = {
        "test_the_learning_rate_follows_its_schedule": "it has no schedule",
        "test_weight_decay_is_on_matrices_only": "it has no weight decay",
    }
