"""Ways of weights from the processes of a trained role to those of a sampler. Weights never pass the controller."""
