"""The conformance kit on the examples. What they do not keep is said with its reason."""

from engine_plugin_testing import RolloutEngineSuite, TrainEngineSuite, TransportSuite

ONE_FILE = "one file holds hooks and engine; a package names its engine by text"


class TestPlainSGD(TrainEngineSuite):
    plugins = ("plain_sgd.py",)
    backend = "plain_sgd"
    optimizer = "sgd"  # how gradients are read off a step of the weights
    unsupported = {
        "test_hooks_load_without_heavy_imports": ONE_FILE,
        "test_the_learning_rate_follows_its_schedule": "it has no schedule",
        "test_weight_decay_is_on_matrices_only": "it has no weight decay",
    }


class TestPlainTrain(TrainEngineSuite):
    plugins = ("plain_train.py",)
    backend = "plain_train"
    unsupported = {"test_hooks_load_without_heavy_imports": ONE_FILE}


class TestPlainRollout(RolloutEngineSuite):
    plugins = ("plain_rollout.py",)
    backend = "plain"
    unsupported = {"test_hooks_load_without_heavy_imports": ONE_FILE}


class TestPlainTransport(TransportSuite):
    plugins = ("plain_transport.py",)
    backend = "store"
    world_size = 2
    unsupported = {"test_hooks_load_without_heavy_imports": ONE_FILE}


class TestPartialRollout(RolloutEngineSuite):
    plugins = ("partial_rollout.py",)
    backend = "partial"
    unsupported = {"test_hooks_load_without_heavy_imports": ONE_FILE}
