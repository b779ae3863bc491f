"""The kit catches what it says that it catches: each fault by the contract that names it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from engine_plugin_testing import (
    AdvantageSuite,
    EnvironmentSuite,
    LossSuite,
    RewardSuite,
    RolloutEngineSuite,
    StageSuite,
    TrainEngineSuite,
    TrainerSuite,
    TransportSuite,
)
from engine_plugin_testing.launcher import CaseFailed, Workers


class Train(TrainEngineSuite):
    plugins = ["broken_plugin.py"]


class InBf16(Train):
    in_bf16 = {"compute_dtype": "bf16"}


class InFp16(Train):
    in_fp16 = {"compute_dtype": "fp16", "loss_scale": 2.0**21}


class Buffered(TrainEngineSuite):
    plugins = ["broken_plugin.py", "custom_model_plugin.py"]
    write_model = "custom_model_plugin.py:write"
    reference = "custom_model_plugin.py:load"


class Heavy(TrainEngineSuite):
    plugins = ["heavy_plugin.py"]


class TwoRanks(TrainEngineSuite):
    plugins = ["broken_plugin.py"]
    world_size = 2


class Rollout(RolloutEngineSuite):
    plugins = ["broken_plugin.py"]


class RolloutInBf16(Rollout):
    options = {"dtype": "bf16"}
    tolerance = 0.2


class Rewards(RewardSuite):
    plugins = ["broken_plugin.py"]
    examples = [(" 4.", 1.0), ("4", 1.0), ("5", 0.0)]


class Bounded(RewardSuite):
    plugins = ["broken_plugin.py"]
    examples = [("4", 1.0), ("", 0.0)]
    failing = ["fail", ("late", "timeout")]
    bounds = (0.0, 1.0)


class Read(RewardSuite):
    plugins = ["broken_plugin.py"]
    examples = [("4", 1.0, "4"), ("so 4", 1.0, "4")]


class Rows(RewardSuite):
    plugins = ["broken_plugin.py"]
    examples = [
        ({"completion": text, "answer": answer}, float(text == answer)) for text, answer in ("44", "56", "77")
    ]


class Advantages(AdvantageSuite):
    plugins = ["broken_algorithms.py"]
    examples = [([[0.0, 1.0], [1.0, 3.0]], [[-0.5, 0.5], [-1.0, 1.0]])]


class Losses(LossSuite):
    plugins = ["broken_algorithms.py"]
    examples = [((-1.0, -1.0, 2.0), -2.0)]


class Stages(StageSuite):
    plugins = ["broken_algorithms.py"]
    examples = [([[0.0, 1.0], [1.0, 1.0]], [[0, 1], []])]


class Trainers(TrainerSuite):
    plugins = ["broken_trainers.py"]


class Environments(EnvironmentSuite):
    plugins = ["guess.py"]


class Transport(TransportSuite):
    plugins = ["broken_plugin.py"]
    world_size = 3


RUN_FAULTS = runpy.run_path(str(Path(__file__).with_name("train_faults.py")))["RUN_FAULTS"]
OF_RUNNER = runpy.run_path(str(Path(__file__).with_name("test_planted_reward_faults.py")))
WORKLOADS = (
    ("MasksPad", "padding tokens of a prompt left out"),
    ("AfterEnd", "a prompt read from its last end token on"),
    ("CutsLongPrompts", "the beginning of prompts near the limit cut off"),
    ("AtOneLater", "a continued response sampled at temperature 1"),
    ("NarrowSupport", "no support of more than sixteen tokens"),
    ("WrapsTopK", "top-k above the vocabulary taken modulo its size"),
    ("UncutWithoutLogProbs", "nothing cut where no log-probs are asked for"),
    ("AbortsNothingPaused", "abort without effect in a pause"),
    ("LosesPausedAdds", "requests added in a pause lost"),
    ("LosesOnBroken", "requests in flight lost in an update that breaks"),
    ("SecondBegins", "one version for all tokens of before"),
)
FAULTS = [
    (Heavy, "heavy", "torch imported at the top of the hook module", "hooks_load_without_heavy_imports"),
    (Train, "Shifted", "log-probs shifted by one token", "log_probs_equal_the_reference"),
    (Train, "ValuesOfThemselves", "values read from the token itself", "values_see_only_the_tokens_before"),
    (Train, "Leaking", "values that depend on packed sequences", "values_see_only_the_tokens_before"),
    (Train, "NoTemperature", "temperature ignored in training", "log_probs_are_at_the_temperature_of_the_batch"),
    (Train, "Leaking", "attention across packed sequences", "a_sequence_does_not_see_its_neighbours"),
    (Train, "WrongOrder", "results in the order of the micro-batches", "results_come_in_the_order_of_the_batch"),
    (Train, "DrawsInInfer", "infer draws random numbers", "infer_leaves_no_trace"),
    (Train, "RoughInfer", "infer computes in another precision than the step", "the_ratio_of_an_unchanged_policy_is_exactly_one"),
    (Train, "LocalMean", "mean over a rank's tokens instead of the global sum", "the_gradient_is_that_of_the_global_sum"),
    (TwoRanks, "MeanOverRanks", "gradients averaged over ranks", "the_gradient_is_that_of_the_global_sum"),
    (TwoRanks, "OwnLoss", "loss of one rank reported", "the_loss_is_that_of_the_whole_batch"),
    (TwoRanks, "HalfSums", "gradients summed over ranks in half precision", "the_norm_is_the_same_on_any_number_of_ranks"),
    (Train, "MicroBatchMean", "no normalisation over micro-batches", "micro_batches_change_neither_loss_nor_gradient"),
    (Train, "NoClip", "gradients not clipped", "gradients_are_clipped_to_max_grad_norm"),
    (Train, "AppliesNaN", "a step with a NaN gradient is applied", "a_gradient_that_is_not_finite_skips_the_step"),
    (Train, "ForgetsOptimizer", "optimizer state not saved", "a_resumed_run_continues_exactly"),
    (Train, "ForgetsSchedule", "schedule not saved", "a_resumed_run_continues_exactly"),
    (TwoRanks, "BoundToItsRanks", "a checkpoint that only as many ranks can load", "a_run_goes_on_on_another_number_of_ranks"),
    (Train, "ForgetsRandom", "random state not saved", "the_random_state_comes_back"),
    (Train, "LoadsAnything", "another model's state loaded", "the_state_of_another_model_is_refused"),
    (Train, "DropsWeight", "a weight left out of named_weights", "named_weights_are_those_of_the_model_folder"),
    (Buffered, "NoBuffers", "a saved buffer left out of named_weights", "named_weights_are_those_of_the_model_folder"),
    (Train, "TiedTwice", "a tied weight given twice", "a_tied_weight_comes_once"),
    (Train, "TakesPart", "a missing weight accepted", "weights_that_do_not_fit_are_refused"),
    (Rollout, "Swapped", "sequences of a group swapped", "groups_are_complete_and_in_order"),
    (Rollout, "Dropped", "a token dropped", "no_token_is_lost_or_doubled"),
    (Rollout, "Doubled", "a token doubled", "no_token_is_lost_or_doubled"),
    (Rollout, "PromptInMask", "prompt tokens in the loss mask", "only_sampled_tokens_are_in_the_loss_mask"),
    (Rollout, "TakesEmpty", "an empty prompt accepted", "malformed_requests_are_refused"),
    (Rollout, "Shifted", "rollout log-probs shifted by one token", "log_probs_equal_the_reference"),
    (Rollout, "AtOne", "log-probs reported at temperature 1", "log_probs_are_at_the_temperature"),
    (Rollout, "BeforeTheCut", "log-probs before top-p and top-k", "log_probs_are_of_what_top_p_and_top_k_left"),
    (Rollout, "WiderTopP", "a token too many left by top-p", "log_probs_are_of_what_top_p_and_top_k_left"),
    (Rollout, "NoMass", "the mass of what top-p and top-k left not returned", "log_probs_with_the_mass_kept_are_over_the_vocabulary"),
    (Rollout, "NoTemperature", "temperature ignored in sampling", "samples_follow_the_distribution"),
    (Rollout, "NoTopK", "top-k ignored in sampling", "samples_follow_the_distribution"),
    (Rollout, "NoStop", "stop strings ignored", "a_stop_string_ends_a_response"),
    (Rollout, "NoStopIds", "stop token ids ignored", "a_stop_token_ends_a_response"),
    (Rollout, "AlwaysStop", "wrong finish reason", "the_finish_reason_is_true"),
    (Rollout, "NoSeed", "seed ignored", "a_seed_gives_the_same_tokens"),
    (Rollout, "OneSeed", "one seed for all", "different_seeds_differ"),
    (Rollout, "SeedOfBatch", "the batch decides what is sampled", "a_seed_does_not_depend_on_the_batch"),
    (Rollout, "Stale", "stale weights after an update", "sampling_follows_new_weights"),
    (Rollout, "NewerOnly", "an update ignored if its version is not newer", "sampling_follows_new_weights"),
    (Rollout, "SmallerType", "a smaller type of the weights than they have", "a_sender_may_round_to_the_type_of_the_weights"),
    (Rollout, "VersionsAtPrompt", "the version of the weights at tokens of the prompt", "sampling_follows_new_weights"),
    (Rollout, "NewText", "text without the tokens of begun", "a_stopped_response_goes_on"),
    (Rollout, "AbortLosesDone", "requests that finished in a pause lost where they are aborted", "a_pause_loses_no_request"),
    (Rollout, "TakesPart", "an incomplete update accepted", "an_update_that_does_not_fit_is_refused"),
    (Rollout, "UpdatesAsleep", "an update taken while asleep", "an_engine_asleep_takes_no_update"),
    (Rollout, "OtherSupport", "the support of another token", "the_support_is_what_top_p_and_top_k_left"),
    (Train, "NoSupport", "support ignored in training", "log_probs_are_over_the_support"),
    (Train, "EntropyInBits", "entropy in bits", "entropy_equals_its_definition"),
    (Train, "NextCandidates", "log-probs of the candidates of the next token", "log_probs_at_candidates_equal_the_reference"),
    (Train, "BottomTokens", "the least likely tokens returned as the most likely", "top_tokens_are_the_likeliest"),
    (Train, "OutputsEverywhere", "outputs at prompt tokens", "outputs_are_zero_where_nothing_is_learned"),
    (Train, "WrongSign", "advantages with the wrong sign", "a_step_follows_the_sign_of_the_advantages"),
    (Train, "ForgetsGradients", "a call clears the gradients of the one before", "gradients_add_up_over_calls"),
    (Train, "NormAfterClipping", "the norm after clipping reported", "grad_norm_is_the_global_norm_before_clipping"),
    (Train, "LrAfterStep", "the learning rate of the next step reported", "the_learning_rate_follows_its_schedule"),
    (Train, "DecaysVectors", "weight decay on vectors", "weight_decay_is_on_matrices_only"),
    (Train, "DecaysRegardless", "weights that shrink in every step", "nothing_to_learn_leaves_the_weights_alone"),
    (Train, "PeakIsNow", "set_lr sets the rate, not the peak", "set_lr_replaces_the_peak"),
    (Train, "SleepForgets", "optimizer state lost in sleep", "an_engine_that_slept_goes_on_as_if_it_had_not"),
    (Train, "LendsInTraining", "module lent in training mode", "the_generation_module_gives_the_logits_of_the_policy"),
    (Train, "StaleStream", "named_weights always from the first version", "named_weights_follow_a_step"),
    (Train, "StaleExport", "export always of the first version", "export_is_loaded_by_from_pretrained"),
    (Train, "NoMix", "mix ignored", "weights_are_mixed_in_their_share"),
    (Train, "Pickles", "a pickle among the files", "state_holds_no_pickle"),
    (Train, "SavesInSitu", "saving clears the optimizer state", "saving_changes_nothing"),
    (Rollout, "Doubles", "log-probs in float64", "columns_have_their_types"),
    (Rollout, "TextWithPrompt", "the prompt in the text", "the_text_is_the_response_decoded"),
    (Rollout, "LosesLater", "requests of a later call lost", "every_request_comes_back_once"),
    (Rollout, "AbortsAsLength", "aborted rollouts reported as length", "aborted_requests_come_back_at_once"),
    (Rollout, "AbortsUnsampled", "a stopped response without its tokens", "a_response_stopped_in_its_midst_is_what_was_sampled"),
    (Rollout, "NewVersions", "the versions of a stopped response overwritten", "a_stopped_response_goes_on"),
    (Rollout, "LosesSupport", "the support of what was begun lost", "a_stopped_response_goes_on"),
    (Rollout, "PauseDrops", "finished rollouts lost in a pause", "a_pause_loses_no_request"),
    (Rollout, "NeverGreedy", "temperature 0 sampled at 1", "temperature_0_is_greedy"),
    (Rollout, "FirstForAll", "the first request's sampling for all", "requests_of_one_batch_keep_their_own_sampling"),
    (Rollout, "ConstantChecksum", "a constant checksum", "the_checksum_is_of_what_was_received"),
    (Rollout, "OldVersion", "set_version ignored", "a_shared_module_is_followed_without_transport"),
    (Rollout, "SleepForgets", "weights lost in sleep", "an_engine_that_slept_samples_as_before"),
    (Rollout, "Drops", "dropout while sampling", "a_model_with_biases_and_dropout_is_sampled_right"),
    (Rollout, "MatricesOnly", "norm weights and biases left out of an update", "a_model_with_biases_and_dropout_is_sampled_right"),
    (Rollout, "TiesHead", "a head tied by force", "a_model_with_biases_and_dropout_is_sampled_right"),
    (Rollout, "SharesTraining", "a shared module sampled in training mode", "a_shared_module_is_followed_without_transport"),
    (Rollout, "Window", "attention to the last tokens only", "many_requests_of_all_sizes_are_sampled_right"),
    (Rollout, "LosesMany", "requests beyond a hundred lost", "many_requests_of_all_sizes_are_sampled_right"),
    (Rollout, "PrefixOfAnother", "a cached prefix of another prompt", "many_requests_of_all_sizes_are_sampled_right"),
    (Rollout, "Forgetful", "a cache that loses its contents when it grows", "many_requests_of_all_sizes_are_sampled_right"),
    (Rollout, "LateShift", "log-probs of late tokens shifted by one", "many_requests_of_all_sizes_are_sampled_right"),
    (Rollout, "OneNumber", "one random number for all tokens of a response", "later_tokens_follow_their_distributions"),
    (Rollout, "Middle", "later tokens drawn from the middle", "later_tokens_follow_their_distributions"),
    (Rollout, "NoTail", "the tail never drawn at later tokens", "later_tokens_follow_their_distributions"),
    (Rollout, "Neighbours", "one random number for two requests", "later_tokens_follow_their_distributions"),
    (Rollout, "CoolsLater", "another temperature at later tokens", "later_tokens_follow_their_distributions"),
    (Rollout, "KeepsKeys", "keys and values of the weights before an update", "weights_change_under_responses_in_flight"),
    (Rollout, "KeepsOldWeights", "responses in flight that keep the old weights", "weights_change_under_responses_in_flight"),
    (Rollout, "VersionOfTheEnd", "the version of an update for tokens before it", "weights_change_under_responses_in_flight"),
    (Rollout, "BeginsAgain", "responses in flight that begin again", "weights_change_under_responses_in_flight"),
    (Rollout, "KeepsCache", "the cache of responses in flight kept in sleep", "what_sleeps_or_is_closed_holds_no_memory"),
    (Rollout, "KeepsModule", "a module kept after close", "what_sleeps_or_is_closed_holds_no_memory"),
    (Rollout, "SleepLoses", "responses in flight lost in sleep", "a_sleep_under_responses_in_flight_changes_nothing"),
    (Rollout, "SleepBeginsElsewhere", "a token changed in sleep", "a_sleep_under_responses_in_flight_changes_nothing"),
    (Rollout, "KeepsTensors", "tensors of the stream kept", "what_is_the_callers_is_left_alone"),
    (Rollout, "ChangesStream", "tensors of the stream changed", "what_is_the_callers_is_left_alone"),
    (Rollout, "ChangesRequests", "a prompt's columns changed", "what_is_the_callers_is_left_alone"),
    (Rollout, "SeedsGlobally", "torch seeded globally", "what_is_the_callers_is_left_alone"),
    (Rollout, "DrawsFromNumpy", "global random numbers taken", "what_is_the_callers_is_left_alone"),
    *((Rollout, name, fault, "any_workload_is_answered_right") for name, fault in WORKLOADS),
    (Rollout, "OneWeightSum", "a checksum of one weight", "the_checksum_is_of_what_was_received"),
    (Rollout, "PlainSum", "a checksum that is a plain sum", "the_checksum_is_of_what_was_received"),
    (Rollout, "FirstCut", "top-p and top-k at first tokens only", "later_tokens_follow_their_distributions"),
    (Rollout, "Repeats", "the random numbers of a response repeated", "later_tokens_follow_their_distributions"),
    (Rollout, "SeedPlusPosition", "random numbers of seed plus position", "later_tokens_follow_their_distributions"),
    (Rollout, "Sixteenth", "the random numbers of the request sixteen before", "later_tokens_follow_their_distributions"),
    (Rollout, "SeedOfFirst", "a seed used for first tokens only", "a_seed_gives_the_same_tokens"),
    (Rollout, "WithVersion", "a checksum with the version", "the_checksum_is_of_what_was_received"),
    (Rollout, "OfOneSampler", "a checksum that differs between samplers", "the_checksum_is_of_what_was_received"),
    (Rollout, "SumOfEach", "a checksum of a sum for each weight", "the_checksum_changes_with_any_one_value"),
    (Rollout, "WithoutSigns", "a checksum without signs", "the_checksum_changes_with_any_one_value"),
    (Rollout, "RoundedSums", "a checksum of rounded sums", "the_checksum_changes_with_any_one_value"),
    (Rollout, "FirstOfEach", "a checksum of the first values", "the_checksum_changes_with_any_one_value"),
    (Rollout, "Unscaled", "an adapter without its scale", "an_adapter_alone_is_sampled_like_merged_weights"),
    (Rollout, "OnTop", "an adapter on top of the one before", "an_adapter_alone_is_sampled_like_merged_weights"),
    (Rollout, "NotUsed", "an adapter that is not used", "an_adapter_alone_is_sampled_like_merged_weights"),
    (Rollout, "KeepsHalf", "half of an adapter kept from before", "an_adapter_alone_is_sampled_like_merged_weights"),
    (Rollout, "TrustsHalf", "half of an update of an adapter sampled from", "an_adapter_alone_is_sampled_like_merged_weights"),
    (Rollout, "TakesWhole", "whole weights taken for an adapter", "an_adapter_alone_is_sampled_like_merged_weights"),
    (Rollout, "ShortStops", "only the last two characters of a stop string compared", "stop_strings_cross_the_borders_of_tokens"),
    (Rollout, "FirstStop", "only the first of several stop strings", "stop_strings_cross_the_borders_of_tokens"),
    (Rollout, "StopsOrTokens", "stop tokens ignored where stop strings are given", "stop_strings_cross_the_borders_of_tokens"),
    (Rollout, "StopInPrompt", "stop strings found in the prompt", "stop_strings_cross_the_borders_of_tokens"),
    (Rollout, "LastIsLength", "a stop in the last place reported as length", "stop_strings_cross_the_borders_of_tokens"),
    (Rollout, "EndIsLength", "an end token in the last place reported as length", "an_end_token_may_be_the_last_one_allowed"),
    (Rollout, "NoEndWithStops", "no end of sequence where stop strings are given", "an_end_token_may_be_the_last_one_allowed"),
    (Rollout, "SmallSeeds", "only the low bits of a seed used", "different_seeds_differ"),
    (Rollout, "Strips", "text without its first space", "stop_strings_cross_the_borders_of_tokens"),
    (Rollout, "CleansUp", "text cleaned up", "stop_strings_cross_the_borders_of_tokens"),
    (Rollout, "OneByOne", "tokens decoded one by one", "stop_strings_cross_the_borders_of_tokens"),
    (Rollout, "BeginsNumbersAgain", "the random numbers of the first tokens used again", "a_stopped_response_goes_on"),
    (Rollout, "LastNumberAgain", "the random number of the last token used again", "a_stopped_response_goes_on"),
    (Rollout, "OfOneId", "prompts of one id taken for one", "groups_are_complete_and_in_order"),
    (Rollout, "TwoForEach", "two tokens decoded for each character of the longest stop string", "stop_strings_cross_the_borders_of_tokens"),
    (Rollout, "KeepsStoppedRows", "a stopped response returned instead of its continuation", "a_stopped_response_goes_on"),
    (Rollout, "LosesBegunInQueue", "the tokens of begun lost if a queued request is stopped", "a_stopped_response_goes_on"),
    (Rollout, "CutsIds", "ids cut to a length", "every_request_comes_back_once"),
    (Rollout, "SleepsAll", "weights put to sleep although they are kept", "an_engine_that_slept_samples_as_before"),
    (Rollout, "WakesAllOrNothing", "a wake of one part without effect", "an_engine_that_slept_samples_as_before"),
    (Rollout, "AbortsTwice", "an id named twice returned twice", "aborted_requests_come_back_at_once"),
    (Rollout, "CountsQueue", "requests that finished in a pause not counted", "a_pause_loses_no_request"),
    (Rollout, "CutsEarly", "a response cut one token before the last position", "a_response_fits_into_the_model"),
    (Rollout, "TakesFull", "a prompt that leaves no position for a response accepted", "a_response_fits_into_the_model"),
    (Rollout, "ShortTail", "as many tokens decoded as the longest stop string has characters", "stop_strings_cross_the_borders_of_tokens"),
    (Rollout, "KeepsSharedCache", "keys and values of a shared module kept over its steps", "a_shared_module_changes_under_responses_in_flight"),
    (Rollout, "NoSpecialTokens", "stop strings searched in text without special tokens", "a_stop_string_may_be_a_special_token"),
    (RolloutInBf16, "RoundsLogProbs", "rollout log-probs rounded to 16 bits", "log_probs_equal_the_reference"),
    (Rollout, "DrainsOneBatch", "one batch drained and the others left", "a_pause_loses_no_request"),
    (Rollout, "DrainsOneStep", "a drain of a single step", "a_pause_loses_no_request"),
    (Rollout, "CutsGreedy", "greedy log-probs of what top-p left", "temperature_0_is_greedy"),
    (Rollout, "CertainGreedy", "greedy log-probs of 0", "temperature_0_is_greedy"),
    (Rollout, "StopsAmongNew", "stop strings searched among new tokens only", "a_response_goes_on_to_the_same_end"),
    (Rollout, "NoStopsLater", "a continued response without stop strings", "a_response_goes_on_to_the_same_end"),
    (Rollout, "NoStopIdsLater", "a continued response without stop tokens", "a_response_goes_on_to_the_same_end"),
    (Rollout, "WakesAll", "weights woken with the cache", "an_engine_asleep_takes_no_update"),
    (Rollout, "SleepsWholeOnly", "weights that stay awake if the cache is kept", "an_engine_asleep_takes_no_update"),
    (Rollout, "StepsAsleep", "a step taken while asleep", "an_engine_asleep_takes_no_update"),
    (Rollout, "ContinuesFailed", "a batch continued after a step that failed in its midst", "a_shared_module_is_followed_without_transport"),
    (Rollout, "LosesFailed", "requests lost by a step that failed", "a_shared_module_is_followed_without_transport"),
    (Transport, "LosesLast", "the last bucket lost", "every_receiver_gets_all_weights_bit_for_bit"),
    (Transport, "CountsForEach", "bytes counted for each receiver", "bytes_are_counted_once"),
    (Transport, "ReusesBuffers", "buffers reused while the receiver holds them", "tensors_are_the_receivers_to_keep"),
    (Transport, "StopsAtLast", "a stream that is not run to its end", "the_stream_is_run_to_its_end_once"),
    (Transport, "NoChecksum", "a checksum that is never compared", "a_damaged_bucket_is_refused"),
    (Transport, "AnyVersion", "any version accepted", "an_update_of_another_version_is_refused"),
    (Transport, "AnyNumber", "any number accepted", "an_update_of_another_version_is_refused"),
    (Transport, "LooksOnce", "a bucket of another update", "a_bucket_that_does_not_follow_is_refused"),
    (Transport, "AnyBucket", "a bucket twice", "a_bucket_that_does_not_follow_is_refused"),
    (Transport, "DoesNotWait", "a sender that does not wait for its receivers", "a_sender_waits_until_every_receiver_has_all"),
    (Transport, "BreaksAreEnds", "a broken stream taken for a whole one", "a_stream_that_fails_is_told_to_every_receiver"),
    (Transport, "NamesAnother", "an error that names another receiver", "a_receiver_that_wants_no_more_holds_up_nobody"),
    (Transport, "WaitsForEver", "a receiver that waits for ever", "a_sender_that_does_not_send_is_told_in_time"),
    (Transport, "PlainSum", "a checksum that is a plain sum", "a_damaged_bucket_is_refused"),
    (Transport, "FirstBuckets", "a checksum of the first buckets only", "a_damaged_bucket_is_refused"),
    (Transport, "ChunkSums", "a checksum of each chunk of 8 MiB without its place", "a_damaged_bucket_is_refused"),
    (Transport, "WaitsForRest", "a receiver that waits for ever for the rest of an update", "a_sender_that_does_not_send_is_told_in_time"),
    (Transport, "TakesFromStrangers", "weights taken from a stranger", "a_process_without_the_token_is_kept_out"),
    (Transport, "GivesToStrangers", "weights given to a stranger", "a_process_without_the_token_is_kept_out"),
    (Transport, "NoNaN", "NaN replaced by 0", "values_of_every_kind_cross_exactly"),
    (Transport, "Rounds", "float64 rounded to float32", "values_of_every_kind_cross_exactly"),
    (Transport, "Unsigned", "negative integers lost", "values_of_every_kind_cross_exactly"),
    (Transport, "CutsLarge", "large tensors cut", "values_of_every_kind_cross_exactly"),
    (Transport, "NoEmpty", "empty tensors left out", "values_of_every_kind_cross_exactly"),
    (Transport, "NeverNothing", "an empty update refused", "values_of_every_kind_cross_exactly"),
    (Transport, "StaleAfterSixteen", "every update after the sixteenth stale", "values_of_every_kind_cross_exactly"),
    (Transport, "StripsNames", "spaces around a name lost", "random_updates_arrive_bit_for_bit"),
    (Transport, "OrderOfMemory", "a tensor of four dimensions in the order of its memory", "random_updates_arrive_bit_for_bit"),
    (Transport, "OneForShared", "tensors that share their memory taken for one", "random_updates_arrive_bit_for_bit"),
    (Transport, "KeepsRepeated", "a repeated tensor taken from what the receiver keeps", "random_updates_arrive_bit_for_bit"),
    (Transport, "LeavesThread", "a thread left by every link", "nothing_is_left_once_it_is_closed"),
    (Transport, "LeavesSocket", "a socket left by every link", "nothing_is_left_once_it_is_closed"),
    (Transport, "LeavesFile", "a file left by every link", "nothing_is_left_once_it_is_closed"),
    (Rewards, "one_number", "wrong length returned", "values_are_right"),
    (Read, "reads_first", "an answer that is not the one of its example", "values_are_right"),
    (Rewards, "draws", "a random reward", "it_is_deterministic"),
    (Rewards, "first_wins", "depends on the order of the samples", "order_and_company_do_not_matter"),
    (Rewards, "strips", "changes its inputs", "inputs_are_left_alone"),
    (Rows, "similar", "texts that differ little taken for one", "random_completions_are_scored_apart"),
    (Rows, "number_before", "the number of another text where there is none", "random_completions_are_scored_apart"),
    (Rows, "by_length", "the values of a batch in the order of lengths", "random_completions_are_scored_apart"),
    (Rewards, "locks", "a lock that a lost worker leaves", "a_worker_that_is_lost_is_replaced"),
    (Rewards, "first_letter", "fails on an empty completion", "any_text_gets_a_value"),
    (Rewards, "undocumented", "an option without a docstring", "options_are_documented_and_checked"),
    (Rows, "shifted", "rows beyond the sixty-fourth shifted", "rows_of_a_large_batch_stay_apart"),
    (Rows, "remembers", "the value of another row that has the same text", "rows_of_a_large_batch_stay_apart"),
    (Rows, "tires", "a value that depends on how many were scored", "rows_of_a_large_batch_stay_apart"),
    (Rows, "first_row", "the first row for all", "rows_of_a_large_batch_stay_apart"),
    (Bounded, "unbounded", "a value beyond its bounds", "very_long_text_gets_a_value"),
    (Bounded, "scores_failures", "a failure that becomes a number", "what_cannot_be_scored_fails"),
    (Bounded, "hides_delay", "a time-out that counts as an error", "what_cannot_be_scored_fails"),
    (Advantages, "negated", "advantages of the wrong sign", "values_are_right"),
    (Advantages, "everywhere", "advantages of prompt tokens", "tokens_outside_the_mask_get_0"),
    (Advantages, "of_all", "invalid rollouts in the statistics", "invalid_rollouts_do_not_count"),
    (Advantages, "in_order", "groups assumed to be in order", "order_does_not_matter"),
    (Advantages, "divided", "a division by a spread of 0", "degenerate_groups_are_finite"),
    (Advantages, "of_batch", "a statistic of the batch declared as one of the group", "a_group_declared_apart_needs_no_other"),
    (Advantages, "in_place", "the batch changed in place", "the_batch_is_left_alone"),
    (Losses, "half", "a loss of half the size", "values_are_right"),
    (Losses, "turned", "advantages with the wrong sign", "the_gradient_follows_the_advantage"),
    (Losses, "centred", "a mean over the micro-batch", "a_micro_batch_changes_no_loss"),
    (Losses, "unclamped", "an overflow of the ratio", "a_policy_that_moved_far_is_finite"),
    (Losses, "watched", "the gradient through a metric", "metrics_are_without_gradient"),
    (Losses, "scaled", "the advantages changed in place", "inputs_are_left_alone"),
    (Stages, "everything", "the wrong groups kept", "examples_are_kept_as_they_say"),
    (Stages, "rounded", "log-probs changed in a rollout", "what_was_sampled_stays"),
    (Stages, "averaging", "a failure on a step without valid rollouts", "steps_without_anything_pass"),
    (Stages, "lottery", "a random choice", "a_step_is_repeated_exactly"),
    (Stages, "forgets", "a state that lacks a part", "a_resumed_stage_continues"),
    (Stages, "centers", "rewards that follow a mean which is not in the state", "a_resumed_stage_continues"),
    (Trainers, "idle", "a step without an update", "a_run_trains"),
    (Trainers, "forgets", "state that is not in checkpoints", "a_resumed_run_ends_like_one_that_was_not_stopped"),
    (Trainers, "interruptible", "an optimizer step that a stop interrupts", "a_stop_within_an_optimizer_step_loses_nothing"),
    (Trainers, "loose", "unknown options accepted", "unknown_options_are_refused"),
    (InBf16, "ComputesInFloat32", "a compute type that is ignored", "computing_in_bf16_rounds_no_weight"),
    (InBf16, "LendsInFloat32", "a module lent without the compute type", "computing_in_bf16_rounds_no_weight"),
    (InBf16, "StreamsInHalf", "weights rounded to the compute type in a stream", "computing_in_bf16_rounds_no_weight"),
    (InBf16, "StepsInHalf", "a step that is rounded to the compute type", "computing_in_bf16_rounds_no_weight"),
    (InBf16, "TakesInHalf", "received weights rounded to the compute type", "computing_in_bf16_rounds_no_weight"),
    (InBf16, "MergesInHalf", "an adapter merged in the compute type", "computing_in_bf16_rounds_no_weight"),
    (InFp16, "ForgetsScale", "a loss scale that is not saved", "an_overflow_in_fp16_lowers_the_loss_scale"),
    (InFp16, "NeverLowers", "an overflow that lowers no loss scale", "an_overflow_in_fp16_lowers_the_loss_scale"),
    (InFp16, "HidesOverflow", "an overflow that is not reported", "an_overflow_in_fp16_lowers_the_loss_scale"),
    (InFp16, "ClipsScaled", "gradients clipped before they are unscaled", "an_overflow_in_fp16_lowers_the_loss_scale"),
    (Environments, "greedy_reader", "a failure on a short turn", "short_responses_are_survived"),
    (Environments, "dice", "random numbers that ignore the episode's seed", "a_run_is_repeated_exactly"),
    (Environments, "shared_dice", "random numbers of Python's global generator", "a_run_is_repeated_exactly"),
    (Environments, "counter", "state that outlives an episode", "a_resumed_run_ends_like_one_that_was_not_stopped"),
    (Environments, "twice", "a turn that is learned in two sequences", "each_turn_is_learned_once"),
    (Rewards, "loose", "unknown options accepted", "options_are_documented_and_checked"),
    *(({1: Train, 2: TwoRanks}[ranks], *fault) for ranks, *fault in RUN_FAULTS),
]  # fmt: skip


SUITES = (
    TrainEngineSuite, RolloutEngineSuite, RewardSuite, TransportSuite, AdvantageSuite, LossSuite, StageSuite,
    TrainerSuite, EnvironmentSuite,
)  # fmt: skip


@pytest.fixture(scope="module")
def workers():
    """One group for each number of ranks, for all broken plugins."""
    groups = {}

    def of(size):
        if size not in groups:
            groups[size] = Workers(size)
        return groups[size]

    yield of
    for group in groups.values():
        group.close()


def with_slow_ones():
    """Yield the faults as parameters: `make test` plants the first of each contract, `make test-full` all."""
    seen = set()
    for suite, name, fault, contract in FAULTS:
        marks = pytest.mark.slow if (suite.kind, contract) in seen else ()
        seen.add((suite.kind, contract))
        yield pytest.param(suite, name, fault, contract, id=f"{suite.__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("suite", "name", "fault", "contract"), with_slow_ones())
def test_a_planted_fault_is_caught_by_its_contract(workers, tmp_path, suite, name, fault, contract):
    made = suite.contracts[f"test_{contract}"]
    key = "backend" if "backend" in suite.fields else "name"
    settings = {**suite.settings(), key: name, "shared": str(tmp_path)}
    case, size = made.case, suite.world_size
    if made.follow:
        workers(size).run(suite.bench, case, settings)
        case, size = made.follow_case, 1
    with pytest.raises(CaseFailed) as caught:
        workers(size).run(suite.bench, case, settings)
    refused = "This is a bug of the plugin." in str(caught.value)  # by the core, before the contract compares
    assert refused or not caught.value.crashed, f"It failed for another reason: {caught.value}"
    assert fault in made.catches


def test_every_fault_that_a_contract_claims_to_catch_is_planted():
    claimed = {
        (made.name, fault) for suite in SUITES for made in suite.contracts.values() for fault in made.catches
    }
    planted = {(f"test_{contract}", fault) for _, _, fault, contract in FAULTS}
    assert claimed == planted | {(f"test_{OF_RUNNER['CONTRACT']}", fault) for _, fault in OF_RUNNER["FAULTS"]}
