"""An example: a recurrent language model, its train engine and its sampler."""
